"""Putting kernels under an existing model."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from pellucid_model.kernels import (
    Kernels,
    NativeKernels,
    TorchKernels,
    WeightFormat,
    accelerate,
    modules,
    weight_bytes,
)


class Tied(nn.Module):
    """An embedding with two heads on the same Parameter, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.other_head = nn.Linear(8, 20)
        self.head.weight = self.other_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        return torch.cat((self.head(x), self.other_head(x)), dim=-1)


class Doubled(nn.Linear):
    """A subclass, whose forward is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    model = nn.Sequential(
        *(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), shared, nn.RMSNorm(16), nn.GELU(), shared),
        *(nn.LayerNorm(16, elementwise_affine=False), nn.GELU(approximate="tanh"), nn.Linear(16, 16, bias=False)),
        *(nn.LayerNorm(16, bias=False), nn.SiLU(), nn.RMSNorm(16, eps=1e-3), nn.Linear(16, 5)),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def test_same_function_in_float32(kernels: Kernels) -> None:
    model = layers()
    x = torch.randn(3, 4, 12)
    expected = copy.deepcopy(model).double()(x.double())
    accelerate(model, kernels, "float32")
    assert {type(module).__module__ for module in model} == {modules.__name__}
    torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_activations_in_place_change_what_they_are_given(kernels: Kernels, activation: type[nn.Module]) -> None:
    model, x = nn.Sequential(activation(inplace=True)), torch.randn(3, 8)
    expected = activation()(x)
    accelerate(model, kernels, "float32")
    assert model(x) is x
    torch.testing.assert_close(x, expected)


def test_bfloat16_weights(kernels: Kernels) -> None:
    linear = nn.Linear(33, 40)
    model = nn.Sequential(linear)
    x = torch.randn(5, 33)
    weight, bias = linear.weight.bfloat16().double(), linear.bias.double()
    accelerate(model, kernels, "bfloat16")
    expected = x.bfloat16().double() @ weight.T + bias
    torch.testing.assert_close(model(x).double(), expected, rtol=0, atol=1e-2 if kernels.name == "torch" else 1e-5)


def test_shared_modules_and_tied_weights_are_packed_once(kernels: Kernels) -> None:
    model = layers()
    accelerate(model, kernels, "float32")
    assert model[3] is model[6]

    tied = Tied()
    tokens = torch.arange(20)
    expected = tied(tokens)
    accelerate(tied, kernels, "float32")
    assert isinstance(tied.head, modules.Linear)
    assert isinstance(tied.other_head, modules.Linear)
    assert tied.head.packed.weight is tied.other_head.packed.weight
    torch.testing.assert_close(tied(tokens), expected)


def test_weights_are_freed_unless_still_used(kernels: Kernels) -> None:
    linear, tied, kept = nn.Linear(8, 8), Tied(), nn.Parameter(torch.randn(4))
    tied.register_parameter("kept", kept)
    model = nn.Sequential(linear, tied)
    free, shared, used = weakref.ref(linear.weight), weakref.ref(tied.embedding.weight), weakref.ref(kept)
    del linear, kept
    accelerate(model, kernels, "float32")
    gc.collect()
    assert free() is None
    assert shared() is None
    assert used() is tied.kept


@pytest.mark.parametrize("format", get_args(WeightFormat))
def test_embeddings(kernels: Kernels, format: WeightFormat) -> None:
    """Tied ones share the head's memory where it has their type; the rest are rounded where the model is."""
    model = Tied()
    model.positions = nn.Embedding(6, 8, padding_idx=0)
    tokens, rows, places = torch.arange(20), model.embedding.weight.detach().clone(), model.positions.weight.detach()
    accelerate(model, kernels, format)
    embedding, head = model.embedding, model.head
    assert isinstance(embedding, modules.Embedding)
    assert isinstance(head, modules.Linear)
    assert (embedding.table.weight is head.packed.weight) == (format in ("float32", "bfloat16"))
    rounded = torch.float32 if format == "float32" else torch.bfloat16
    assert torch.equal(embedding(tokens), rows.to(rounded).float())
    assert torch.equal(model.positions(tokens[:6]), places.to(rounded).float())
    assert torch.equal(embedding.weight, embedding(tokens))  # for modules that do more with it
    assert embedding.weight is embedding.weight
    assert (embedding.num_embeddings, embedding.embedding_dim) == (20, 8)
    assert torch.equal(embedding(tokens.int()), embedding(tokens))


def test_embeddings_lose_nothing_unless_they_are_to(kernels: Kernels) -> None:
    """What bfloat16 holds is kept in it; float32 beside whole numbers stays float32; one that renormalises stays."""
    exact, inexact, own = nn.Embedding(20, 8), nn.Embedding(20, 8), nn.Embedding(20, 8, max_norm=1.0)
    with torch.no_grad():
        exact.weight.copy_(exact.weight.bfloat16())
    model = nn.ModuleList((exact, inexact, own))
    before = [each.weight.detach().clone() for each in (exact, inexact)]
    accelerate(model, kernels, "int8", torch.float32)
    assert [each.table.format for each in model[:2]] == ["bfloat16", "float32"]  # type: ignore[union-attr]
    assert all(torch.equal(each(torch.arange(20)), rows) for each, rows in zip(model, before, strict=False))
    assert model[2] is own


def test_packing_copies(kernels: Kernels) -> None:
    linear = nn.Linear(32, 32)
    model = nn.Sequential(linear)
    x = torch.randn(2, 32)
    expected = linear(x)
    accelerate(model, kernels, "float32")
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.zero_()
    torch.testing.assert_close(model(x), expected)


def test_integer_weights(kernels: Kernels) -> None:
    """Heads keep eight bits where the other layers have four."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 800, bias=False))
    x = torch.randn(5, 64)
    expected = model(x)
    accelerate(model, kernels, "int4")
    assert [layer.packed.format for layer in model if isinstance(layer, modules.Linear)] == ["int4", "int8"]
    assert (model(x) - expected).norm() / expected.norm() < 0.15


def test_weights_that_do_not_fit_are_named(kernels: Kernels) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    nn.init.constant_(model[1][0].weight, torch.inf)  # type: ignore[index]
    with pytest.raises(ValueError, match=r"^1\.0: weight holds a number that is not finite"):
        accelerate(model, kernels, "int8")


def test_weight_bytes_counts_what_is_shared_once(kernels: Kernels) -> None:
    tied = Tied()
    accelerate(tied, kernels, "float32")
    assert isinstance(tied.head, modules.Linear)
    assert weight_bytes(tied) == tied.head.packed.weight.nbytes
    untied = nn.Sequential(nn.Embedding(20, 8))
    accelerate(untied, kernels, "bfloat16")
    assert weight_bytes(untied) == 20 * 8 * 2


def test_what_is_not_exactly_a_known_layer_is_left_alone(kernels: Kernels) -> None:
    model = nn.Sequential(Doubled(4, 4), nn.LayerNorm((2, 4)), nn.Softplus(), nn.Dropout())
    before = list(model)
    accelerate(model, kernels, "float32")
    assert list(model) == before


@pytest.mark.parametrize("kind", [NativeKernels, TorchKernels])
def test_implementations_satisfy_the_protocol(kind: type) -> None:
    public = {name for name in vars(Kernels) if not name.startswith("_")}
    methods = public - {"name", "batch_invariant", "cache_layout"}
    assert len(methods) == 9
    assert all(callable(getattr(kind, name)) for name in methods)
