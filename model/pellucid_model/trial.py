"""Tries a user's module out before it serves: does it keep the contract, and is what it declares true?

In: a module with its weights. Out: what the engine must know of it, or a ModelError, one line that says what it does
wrong. A few forwards of up to four tokens through the slow reference, and of an adopted module a longer one beside its
own; nothing is trusted that can be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pellucid_model.adopt import AdoptedModule
from pellucid_model.attention import ReferenceAttend
from pellucid_model.contract import DecoderModel, PositionScheme
from pellucid_model.errors import ModelError
from pellucid_model.recording import LayerCall, record_calls
from pellucid_model.user_module import one_line, part_of

TOLERANCE = 1e-3
"""Of the largest number: far above rounding, far below what another token changes."""
OWN_TOKENS = 128
"""Of the sequence that an adopted module's own forward is given: what a mask hides farther back is not seen here."""
_GUIDE = "see docs/add-your-model.md"


@dataclass(frozen=True)
class Trial:
    """What came out."""

    vocab_size: int
    position_scheme: PositionScheme
    notices: tuple[str, ...]


@torch.inference_mode()
def try_out(module: nn.Module, source: str, scheme: PositionScheme, context_length: int | None) -> Trial:
    """`source` begins every message."""
    model = cast("DecoderModel", module)
    try:
        calls = record_calls(model)
        vocab_size = _one_token(model)
        _keeps_no_state(module)
        _tokens_meet_in_attend_alone(model, vocab_size, context_length or 3)
        if context_length is not None:
            _reaches_its_context(model, context_length)
        if isinstance(module, AdoptedModule):
            _is_its_own_forward(module, vocab_size, context_length or OWN_TOKENS)
        notices, scheme = _declares_the_truth(model, scheme, calls, vocab_size, context_length or 8)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    except (Exception, SystemExit) as error:
        part = part_of(error, module)
        where = f", in {part}" if part else ""
        raise ModelError(f"{source} breaks the contract of docs/add-your-model.md{where}: {one_line(error)}") from error
    return Trial(vocab_size, scheme, notices)


def _run(
    model: DecoderModel, sequences: Sequence[Sequence[int]], first_position: int = 0, *, backwards: bool = False
) -> Tensor:
    """hidden [T, d_model] of whole sequences; backwards: the rows of each lie from its last token to its first."""
    lengths = [len(tokens) for tokens in sequences]
    positions = torch.cat([torch.arange(first_position, first_position + length) for length in lengths])
    tokens = torch.tensor([token for tokens in sequences for token in tokens])
    if backwards:
        rows = torch.cat([part.flip(0) for part in torch.arange(len(tokens)).split(lengths)])
        tokens, positions = tokens[rows], positions[rows]
    return model.forward(tokens, positions, ReferenceAttend(lengths, positions))


def _one_token(model: DecoderModel) -> int:
    """-> vocabulary size"""
    hidden = _run(model, [[0]])
    if not isinstance(hidden, Tensor) or hidden.dim() != 2 or hidden.shape[0] != 1:
        raise ModelError(f"forward gives {_shape(hidden)} for one token, not hidden [1, d_model]; {_GUIDE}")
    logits = model.logits(hidden)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[0] != 1:
        raise ModelError(f"logits gives {_shape(logits)} for one row, not [1, V]; {_GUIDE}")
    if not logits.is_floating_point():
        raise ModelError(f"logits gives {logits.dtype}; accepted: a floating-point type")
    if not bool(logits.isfinite().all()):
        raise ModelError("the logits of token 0 are not finite; are its weights?")
    return logits.shape[1]


def _keeps_no_state(module: nn.Module) -> None:
    """State other than keys and values would have to be kept per sequence, and is not."""
    model = cast("DecoderModel", module)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    first, second = _run(model, [[0]]), _run(model, [[0]])
    for name, buffer in module.named_buffers():
        if name in before and not torch.equal(torch.nan_to_num(buffer), torch.nan_to_num(before[name])):
            raise ModelError(
                f"its buffer {name} changes during forward; state besides keys and values is not served yet"
            )
    if _differ(first, second):
        raise ModelError(
            "the same token gives something else the second time: it keeps state besides keys and values, which is not "
            "served yet, or draws at random (F.dropout needs training=self.training)"
        )


def _tokens_meet_in_attend_alone(model: DecoderModel, vocab_size: int, context_length: int) -> None:
    """In the ragged batch a token's neighbour may belong to somebody else, and its place says nothing of its position.

    Two sequences side by side must be what each is alone; and a sequence the same where its rows lie backwards, which
    shows rotations by counting: side by side they turn all of a sequence alike.
    """
    one, two = [vocab_size - 1], [0, vocab_size // 2, vocab_size - 1][: min(3, context_length)]
    together = _run(model, [one, two])
    if len(together) != 1 + len(two):
        raise ModelError(f"forward gives {_shape(together)} for {1 + len(two)} tokens, not one row for each; {_GUIDE}")
    if _differ(together, torch.cat([_run(model, [one]), _run(model, [two])])):
        raise ModelError(
            "two sequences in one batch are not what each is alone: tokens meet outside attend, or positions are made "
            f"by counting instead of taken from `positions`; {_GUIDE}"
        )
    if _differ(_run(model, [two], backwards=True).flip(0), _run(model, [two])):
        raise ModelError(
            "a token's place in the batch changes what it gives: positions, such as those of a rotation, are made by "
            f"counting instead of taken from `positions`; {_GUIDE}"
        )


def _reaches_its_context(model: DecoderModel, context_length: int) -> None:
    try:
        _run(model, [[0]], context_length - 1)
    except Exception as error:
        raise ModelError(
            f"context_length = {context_length}, but at position {context_length - 1} forward fails: {one_line(error)}"
        ) from error


def _is_its_own_forward(module: AdoptedModule, vocab_size: int, context_length: int) -> None:
    """Compared as probabilities, since a forward may end in log_softmax."""
    model = cast("DecoderModel", module)
    tokens = [7 * i % vocab_size for i in range(min(context_length, OWN_TOKENS))]
    own = module.own_logits(torch.tensor(tokens))
    served = model.logits(_run(model, [tokens]))[-len(own) :]
    if _differ(served.log_softmax(-1), own.log_softmax(-1)):
        raise ModelError(
            f"what would be served is not what its own forward gives for {len(tokens)} tokens: it does something "
            "behind the output layer (a scale, a softcap), masks more than the future, or has positions that are not "
            f"named; {_GUIDE}"
        )


def _declares_the_truth(
    model: DecoderModel, scheme: PositionScheme, calls: list[LayerCall], vocab_size: int, context_length: int
) -> tuple[tuple[str, ...], PositionScheme]:
    """What rolls has to depend on distances alone, and to leave them to attend."""
    notices = []
    gathering = [layer for layer, call in enumerate(calls) if call.gathered]
    if gathering:
        layers = ", ".join(map(str, gathering))
        notices.append(
            f"layers {layers} gather all keys and values for a score matrix of their own: slower than attend, and for "
            "few sequences at a time"
        )
    if scheme == "absolute":
        return tuple(notices), scheme
    handed = {name for call in calls for name in call.positions} | ({"distance"} if gathering else set())
    if scheme != "none" and scheme not in handed:
        raise ModelError(f"position_scheme = {scheme!r}, but no layer hands attend what that needs; {_GUIDE}")
    shift = min(5, context_length - 3)
    tokens = [0, vocab_size // 2, vocab_size - 1]
    if shift >= 1 and _differ(_run(model, [tokens]), _run(model, [tokens], shift)):
        raise ModelError(
            f"position_scheme = {scheme!r}, but the same tokens further on in a sequence give something else; leave it "
            'out, or say "absolute"'
        )
    if any("rotary" in calls[layer].positions for layer in gathering):
        notices.append("rotated keys that are gathered cannot roll: long inputs are re-encoded (docs/windows.md)")
        return tuple(notices), "absolute"
    return tuple(notices), scheme


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > TOLERANCE * b.abs().max())


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
