"""Modules that were never written for us: their own logits come out, from their state_dict as it was saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pellucid_model.adopt import AdoptedModule
from pellucid_model.attention import ReferenceAttend
from pellucid_model.contract import DecoderModel
from pellucid_model.errors import ModelError
from pellucid_model.servable import load_servable
from pellucid_model.trial import try_out
from pellucid_testing.own_modules import NANOGPT, TEXTBOOK, VOCAB, randomized, saved_checkpoint

N, D, H = 24, 36, 3
LENGTHS = [5, 1, 9]


def own_logits(module: AdoptedModule, tokens: Tensor) -> Tensor:
    """What the module itself says, all rows."""
    rows = [module.own_forward(tokens[: t + 1]) for t in range(len(tokens))]
    out = [(row[0] if isinstance(row, tuple) else row).flatten(0, -2)[-1] for row in rows]
    return torch.stack(out)


@torch.no_grad()
def assert_equal_to_its_own_forward(module: nn.Module) -> None:
    """Three sequences in one ragged batch, each as the module alone sees it."""
    tokens = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    adopted = cast("AdoptedModule", module)
    have = adopted.logits(cast("DecoderModel", module).forward(tokens, positions, ReferenceAttend(LENGTHS, positions)))
    want = torch.cat([own_logits(adopted, part) for part in tokens.split(LENGTHS)])
    assert want.std() > 0.5
    assert (have - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module._orig_mod."])
def test_the_textbook_module_from_its_state_dict(tmp_path: Path, prefix: str) -> None:
    path = saved_checkpoint(tmp_path / "textbook.pt", TEXTBOOK, prefix)
    servable = load_servable(path, TEXTBOOK.source)
    assert (servable.vocab_size, servable.context_length, servable.custom) == (VOCAB, 64, True)
    assert_equal_to_its_own_forward(servable.module)


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_with_an_adapter_and_without(tmp_path: Path, bias: bool) -> None:
    """Its forward keeps the last token only, and refuses more tokens than its context: both are dealt with."""
    example = type(NANOGPT)(NANOGPT.file, NANOGPT.name, {**NANOGPT.config, "bias": bias})
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    path = saved_checkpoint(tmp_path / "ckpt.pt", example, config={"batch_size": 12}, best_val_loss=torch.tensor(1.5))
    content = torch.load(path)
    torch.save({**content, "model": content["model"] | masks}, path)
    adapted, known = load_servable(path, example.source), load_servable(path)
    assert_equal_to_its_own_forward(adapted.module)
    assert (known.architecture, known.context_length, known.custom) == ("nanogpt", 64, False)
    tokens, positions = torch.arange(20), torch.arange(20)
    with torch.no_grad():
        attend = ReferenceAttend([20], positions)
        have, want = (s.model.logits(s.model.forward(tokens, positions, attend)) for s in (known, adapted))
    assert (have - want).abs().max() <= 2e-5 * want.abs().max()


class Layers(nn.Module):
    """The body of the variants below: embedding, something by position, layers, a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, D)
        self.table = nn.Parameter(torch.zeros(1, N, D))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.table[:, : tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class TorchLayers(Layers):
    """torch's own encoder layers with a causal mask, sequence first, and a head tied by hand."""

    def __init__(self) -> None:
        super().__init__([nn.TransformerEncoderLayer(D, H, 50, dropout=0.1) for _ in range(2)])
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.table[0, : len(tokens), None]
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens), dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.linear(x, self.tokens.weight)


class Grouped(nn.Module):
    """Fused attention with a mask, fewer kv heads, and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(D, 6 * 8), nn.Linear(D, 2 * 2 * 8)
        self.out = nn.Linear(6 * 8, D)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (6, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return x + out


class WrittenOut(nn.Module):
    """As most tutorials have it: a mask from a buffer, one softmax over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Dropout(0.1)
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(N, N)).view(1, 1, N, N))

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).split(D, dim=2))
        mixed = self.mix(q, k, v, self.mask[:, :, :length, :length])
        out: Tensor = self.out(mixed.transpose(1, 2).contiguous().view(1, length, D))
        return x + out

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(mask == 0, float("-inf"))
        weights: Tensor = self.drop(F.softmax(scores, dim=-1))
        return weights @ v


class Added(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)).float() / torch.tensor(1.7)
        return torch.matmul((scores + (1.0 - mask) * -1e9).softmax(dim=3).type_as(v), v)


class Chosen(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.where(mask.bool(), 0.5 * (q @ k.mT), torch.tensor(-1e9))
        return torch.softmax(scores, -1) @ v


class InPlace(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.mT
        scores.div_(1.7)
        scores.masked_fill_(mask == 0, -1e9)
        return scores.softmax(-1) @ v


class TrueHides(nn.Module):
    """nn.MultiheadAttention, whose boolean masks say what is hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)

    def hidden(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.attention(x, x, x, attn_mask=self.hidden(x.size(1)), need_weights=False)[0]
        return x + mixed


class FutureAlone(TrueHides):
    """The other way round: a token sees what comes after it."""

    def hidden(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril(-1)


class Einsum(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [1, L, H, D]
        scores = torch.einsum("b i h d, b j h d -> b h i j", q, k) * 0.4
        weights = scores.masked_fill(mask == 0, -torch.finfo(scores.dtype).max).softmax(dim=-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2)


class HeadByHead(WrittenOut):
    """One small attention for each head, concatenated."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        heads = []
        for h in range(H):
            scores = torch.bmm(q[:, h], k[:, h].transpose(1, 2)).div_(3.0)
            heads.append(torch.bmm(nn.Softmax(dim=-1)(scores.masked_fill_(mask[0] == 0, -1e9)), v[:, h]))
        return torch.stack(heads, dim=1)


class Batched(WrittenOut):
    """Weights that are multiplied as a batch, and have as many columns as a step may have rows."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(1, H, D // H, sum(LENGTHS)))
        self.back = nn.Parameter(torch.zeros(1, H, sum(LENGTHS), D // H))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return super().mix(q, k, v @ self.values @ self.back, mask)


class AdoptedTorch(AdoptedModule):
    positions, head, hidden, batch_first, context_length = ("table",), "tokens.weight", "layers.1", False, N

    def build(self, config: dict[str, Any]) -> nn.Module:
        return TorchLayers()


class AdoptedGrouped(AdoptedModule):
    positions, head, context_length = ("table",), "head", N

    def build(self, config: dict[str, Any]) -> nn.Module:
        return Layers([Grouped(), Grouped()])


@pytest.mark.parametrize("kind", [AdoptedTorch, AdoptedGrouped])
def test_attention_of_torch_is_caught(kind: type[AdoptedModule]) -> None:
    module = randomized(kind({}))
    assert_equal_to_its_own_forward(module)
    assert try_out(module, "x", "absolute", N).vocab_size == VOCAB


def test_what_attend_computes_itself_is_not_caught() -> None:
    """The reference writes its attention out too, and must be asked once a layer."""
    module, positions = randomized(AdoptedTorch({})), torch.arange(5)
    attend = ReferenceAttend([5], positions, record=True)
    with torch.no_grad():
        module.forward(positions, positions, attend)
    assert attend.maps is not None
    assert {layer: len(maps) for layer, maps in attend.maps.items()} == {0: 1, 1: 1}


@pytest.mark.parametrize("layer", [WrittenOut, Added, Chosen, InPlace, TrueHides, Einsum, HeadByHead, Batched])
def test_attention_that_is_written_out_is_caught(layer: type[nn.Module]) -> None:
    module = adopted(layer)
    assert_equal_to_its_own_forward(module)
    assert try_out(module, "x", "absolute", N).vocab_size == VOCAB


def test_a_forward_that_ends_in_log_softmax_serves() -> None:
    assert try_out(adopted(Grouped, Normalised), "x", "absolute", N).vocab_size == VOCAB


class BaseTwo(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        powers = torch.pow(2.0, (q @ k.mT).masked_fill(mask == 0, -1e9))
        return powers / powers.sum(-1, keepdim=True) @ v


class Reweighted(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT).masked_fill(mask == 0, -1e9).softmax(-1) * mask) @ v


class Windowed(WrittenOut):
    """Sees ten tokens, which no mask of the first ten shows."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill((mask == 0) | (mask.tril(-10) == 1), -1e9).softmax(-1) @ v


class Capped(Layers):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * torch.tanh(super().forward(tokens) / 2)


class Normalised(Layers):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).log_softmax(-1)


class Linearised(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(mask == 0, -1e9) @ v


class Biased(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return ((q @ k.mT) + 0.1 * mask).softmax(-1) @ v


class Unmasked(WrittenOut):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Bidirectional(Grouped):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)


class Crossing(Grouped):
    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        k = torch.cat((q, q), dim=2)
        return x + F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(-2)


def adopted(layer: type[nn.Module], body: type[Layers] = Layers, **attributes: Any) -> AdoptedModule:
    values = {"positions": ("table",), "head": "head", "context_length": N, **attributes}
    kind = type("Mine", (AdoptedModule,), {**values, "build": lambda self, config: body([layer()])})
    module: AdoptedModule = kind({})
    return cast("AdoptedModule", randomized(module))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: adopted(Bidirectional), "attention 0 has no causal mask"),
        (lambda: adopted(Crossing), "only self-attention serves"),
        (lambda: adopted(Grouped, positions=()), "made by counting"),
        (lambda: adopted(Grouped, positions=("tabel",)), "positions: Layers has nothing named 'tabel'; it has tokens"),
        (lambda: adopted(Grouped, head="lm_head"), "head: Layers has nothing named 'lm_head'"),
        (lambda: adopted(Unmasked), "attention 0 has no causal mask"),
        (lambda: adopted(FutureAlone), "attention 0 has no causal mask"),
        (lambda: adopted(Windowed), f"not what its own forward gives for {N} tokens"),
        (lambda: adopted(Grouped, Capped), "does something behind the output layer (a scale, a softcap)"),
        (lambda: adopted(BaseTwo), "in a way that is not known: pow of its scores; known are a scale, masks, softmax"),
        (lambda: adopted(Reweighted), "in a way that is not known: mul after its softmax"),
        (lambda: adopted(Linearised), "no softmax before the values"),
        (lambda: adopted(Biased), "in a way that is not known: add of its scores"),
        (lambda: adopted(Grouped, hidden="layers.7"), "hidden: Layers has nothing named 'layers.7'"),
        (lambda: AdoptedModule({}), "has no method build"),
    ],
)
def test_what_an_adapter_gets_wrong_is_said(make: Any, says: str) -> None:
    with pytest.raises(ModelError) as error:
        try_out(make(), "mine.py:Mine", "absolute", N)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
