"""The configurable decoder: what each switch does, and that training and the reference agree on every combination."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from pellucid_model.attention import ReferenceAttend, TrainingAttend
from pellucid_model.config import DecoderConfig
from pellucid_testing.checkpoints import tiny_config, tiny_model

POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "none")


def tokens_of(config: DecoderConfig, count: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (count,), generator=torch.Generator().manual_seed(5))


def logits(config: DecoderConfig, tokens: torch.Tensor, **extra: Any) -> torch.Tensor:
    model = tiny_model(config, **extra).double()
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        return model.logits(model.forward(tokens, positions, ReferenceAttend([len(tokens)], positions)))


@pytest.mark.parametrize(
    ("position", "placement", "kv_heads", "norm", "activation"),
    [
        (position, placement, kv_heads, norm, activation)
        for (position, placement, kv_heads), (norm, activation) in zip(
            itertools.product(POSITIONS, ("pre", "post"), (6, 2, 1)),
            itertools.cycle(
                itertools.product(
                    ("layernorm", "rmsnorm"), ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "geglu_tanh")
                )
            ),
            strict=False,
        )
    ],
)
def test_training_in_float32_equals_the_reference_in_float64(
    position: str, placement: str, kv_heads: int, norm: str, activation: str
) -> None:
    config = tiny_config(
        position=position, norm_placement=placement, kv_heads=kv_heads, norm=norm, activation=activation
    )
    model = tiny_model(config)
    tokens = tokens_of(config, 3 * 17)
    attend = TrainingAttend(3, 17)
    with torch.no_grad():
        fast = model.logits(model(tokens, attend.positions, attend))
        model.double()
        exact = model.logits(model(tokens, attend.positions, ReferenceAttend([17] * 3, attend.positions)))
    assert exact.std() >= 1
    assert (fast - exact).abs().max() <= 2e-5 * exact.abs().max()


def test_each_switch_changes_the_result() -> None:
    base = tiny_config(position="sinusoidal", activation="gelu")
    tokens = tokens_of(base, 20)
    outputs = [logits(base, tokens)]
    for changes in (
        {"position": "learned"},
        {"position": "rotary"},
        {"position": "rotary", "rotary_base": 500.0},
        {"position": "rotary", "rotary_fraction": 0.5},
        {"position": "rotary", "rotary_interleaved": True},
        {"position": "alibi"},
        {"position": "none"},
        {"norm": "rmsnorm"},
        {"norm_placement": "post"},
        {"norm_eps": 0.1},
        {"activation": "gelu_tanh"},
        {"activation": "relu"},
        {"activation": "swiglu"},
        {"windows": (4, None)},
        {"windows": (None, 4)},
        {"attention_softcap": 1.0},
        {"embedding_scale": 2.0},
        {"attention_bias": False},
        {"attention_output_bias": False},
        {"mlp_bias": False},
        {"head_bias": True},
        {"tied_head": True},
        {"position": "rotary", "rotary_frequencies": (1.0, 0.5, 0.3, 0.1, 0.0, 0.7)},
        {"position": "rotary", "rotary_scale": 1.5},
        {"position": "rotary", "rotary_layers": (True, False)},
        {"position": "rotary", "rotary_window_base": 50.0, "windows": (None, 4)},
        {"position": "rotary", "windows": (None, 4)},
        {"embedding_dim": 24},
        {"embedding_norm": True},
        {"norm_placement": "output"},
        {"norm_placement": "sandwich"},
        {"norm_weight": False},
        {"norm_bias": False},
        {"final_norm": False},
        {"norm_placement": "post", "final_norm": True},
        {"residual": "parallel"},
        {"residual": "parallel_shared"},
        {"residual_scale": 0.5},
        {"query_key_norm": "head"},
        {"query_key_norm": "per_head"},
        {"query_key_norm": "all_heads"},
        {"attention_scale": 0.1},
        {"logit_scale": 0.5},
        {"logit_softcap": 3.0},
        {"activation": "relu2"},
        {"activation": "reglu"},
    ):
        outputs.append(logits(tiny_config(**({"position": "sinusoidal", "activation": "gelu"} | changes)), tokens))
    for one, other in itertools.combinations(outputs, 2):
        assert not torch.allclose(one, other, atol=1e-6)


SWITCHED = (
    {"norm_placement": "sandwich", "query_key_norm": "head", "norm": "rmsnorm", "logit_softcap": 20.0},
    {"norm_placement": "output", "query_key_norm": "all_heads", "activation": "reglu", "embedding_dim": 24},
    {"residual": "parallel", "query_key_norm": "per_head", "embedding_norm": True, "logit_scale": 1.5},
    {"residual": "parallel_shared", "residual_scale": 0.7, "attention_scale": 0.2, "activation": "relu2"},
    {"rotary_frequencies": (1.0, 0.5, 0.3, 0.1, 0.0, 0.7), "rotary_scale": 1.2, "norm_bias": False},
    {"windows": (4, None), "rotary_window_base": 50.0, "rotary_layers": (True, False), "norm_weight": False},
)


@pytest.mark.parametrize("changes", SWITCHED, ids=str)
def test_every_switch_trains_as_the_reference_says(changes: dict[str, Any]) -> None:
    """Also: every parameter has a part in the result, and so a gradient."""
    model = tiny_model(tiny_config(**changes))
    tokens = tokens_of(model.config, 3 * 17)
    attend = TrainingAttend(3, 17)
    fast = model.logits(model(tokens, attend.positions, attend))
    torch.nn.functional.cross_entropy(fast, tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0 or name.endswith("key.bias"), name  # softmax does not see a shift of keys
    model.double()
    with torch.no_grad():
        exact = model.logits(model(tokens, attend.positions, ReferenceAttend([17] * 3, attend.positions)))
    assert exact.std() >= 1
    assert (fast - exact).abs().max() <= 2e-5 * exact.abs().max()


def test_layers_with_the_same_angles_share_one_table() -> None:
    config = tiny_config(layers=4, windows=(4, None, 4, None), rotary_window_base=50.0)
    blocks: Any = tiny_model(config).blocks
    rotaries = [block.attention.rotary for block in blocks]
    assert rotaries[0] is rotaries[2] is not rotaries[1]
    assert rotaries[1] is rotaries[3]


def test_no_token_sees_a_later_one() -> None:
    for position in POSITIONS:
        config = tiny_config(position=position)
        tokens = tokens_of(config, 20)
        changed = tokens.clone()
        changed[12] = (changed[12] + 1) % config.vocab_size
        before, after = logits(config, tokens), logits(config, changed)
        assert torch.equal(before[:12], after[:12])
        assert not torch.equal(before[12], after[12])


def test_tied_head_is_the_embedding_itself() -> None:
    model = tiny_model(tiny_config(tied_head=True))
    assert model.head.weight is model.embedding.weight


def test_position_scheme_says_which_windows_are_possible() -> None:
    schemes = {position: tiny_model(tiny_config(position=position)).position_scheme for position in POSITIONS}
    assert schemes == {
        "sinusoidal": "absolute",
        "learned": "absolute",
        "rotary": "rotary",
        "alibi": "alibi",
        "none": "none",
    }


def test_initialization_has_the_deviation_asked_for() -> None:
    model = tiny_model(tiny_config(d_model=128, d_ff=512))
    model.initialize(0.02)
    weights = model.state_dict()
    assert weights["blocks.0.feed_forward.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.0.attention.query.bias"].abs().max() == 0
