"""Looks inside: numbers that are none, attention without choice, positions that all come out the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pellucid_model.doctor.finding import Finding
from pellucid_model.doctor.subject import Subject
from pellucid_model.reading import Reading

_FIRST_ROW = 7
"""Rows before it see too few tokens to choose among."""
_UNIFORM = 0.99
"""Relative entropy from which a head is uniform."""
_ONE_HOT = 0.99
"""Mean largest weight from which a head is one-hot."""
_ALIKE = 0.02
"""Mean distance of the rows' distributions to their mean, 0 … 1, below which all positions say the same."""


def finite(subject: Subject) -> Finding:
    """Weights first; then the first module, in the order of running, whose output is not finite."""
    for name, tensor in subject.module.state_dict().items():
        if tensor.is_floating_point() and (count := int((~tensor.isfinite()).sum())):
            evidence = f"{name}: {count:,} of {tensor.numel():,} weights are not finite"
            return Finding(
                "finite numbers", "fault", evidence, "go back to an earlier checkpoint; lower --learning-rate"
            )
    for reading in subject.readings:
        bad = ~reading.logits.isfinite().all(dim=-1)
        if bad.any():
            row = int(bad.int().argmax())
            evidence = (
                f"all weights are finite, but logits of token {row} are not; {_first_not_finite(subject, reading)}"
            )
            return Finding(
                "finite numbers", "fault", evidence, "bound what overflows there: a norm before it, a smaller scale"
            )
    largest = max(float(reading.logits.abs().max()) for reading in subject.readings)
    return Finding("finite numbers", "ok", f"weights and logits; the largest logit is {largest:.1f}")


def _first_not_finite(subject: Subject, reading: Reading) -> str:
    from pellucid_model.reading import read

    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                found.append(name)

        return hook

    leaves = [(name, module) for name, module in subject.module.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(watch(name)) for name, module in leaves]
    read(subject.module, reading.tokens)
    for hook in hooks:
        hook.remove()
    return f"{found[0]} is the first to give one" if found else "no module of its own gives one"


def attention_choice(subject: Subject) -> Finding:
    """Heads that weigh all tokens the same, and heads that look at one alone, layer by layer.

    Some such heads are healthy: one that reads the token before, one that rests on the first token, a first layer that
    takes the mean of all. Half of all layers are not.
    """
    long = [reading for reading in subject.readings if len(reading.tokens) > _FIRST_ROW + 1]
    layers = sorted(long[0].attention) if long else []
    if not layers:
        return Finding("attention", "skipped", _no_maps(subject))
    uniform = {layer: _mean_over_rows([r.relative_entropy(layer) for r in long]) for layer in layers}
    largest = {layer: _mean_over_rows([r.attention[layer].amax(dim=-1) for r in long]) for layer in layers}
    even = [layer for layer in layers if bool((uniform[layer] > _UNIFORM).all())]
    single = [layer for layer in layers if bool((largest[layer] > _ONE_HOT).all())]
    heads = sum(len(values) for values in uniform.values())
    evidence = (
        f"{sum(int((v > _UNIFORM).sum()) for v in uniform.values())} of {heads} heads uniform, "
        f"{sum(int((v > _ONE_HOT).sum()) for v in largest.values())} one-hot; relative entropy "
        f"{min(float(v.nanmean()) for v in uniform.values()):.2f} to "
        f"{max(float(v.nanmean()) for v in uniform.values()):.2f} by layer"
    )
    for kind, found, advice in (("uniform", even, _UNIFORM_ADVICE), ("one-hot", single, _ONE_HOT_ADVICE)):
        if found:
            evidence += f"; {kind} in all heads: {_listed(found, len(layers))}"
        if 2 * len(found) >= len(layers):
            return Finding("attention", "fault" if len(found) == len(layers) else "warning", evidence, advice)
    return Finding("attention", "ok", evidence)


def _no_maps(subject: Subject) -> str:
    if subject.readings[0].gathered:
        return "no layer has a map, since all make a score matrix of their own"
    return f"no sequence of {_FIRST_ROW + 2} tokens"


_UNIFORM_ADVICE = (
    "queries and keys say nothing: untrained or decayed to zero, a scale that is too small (1/sqrt(D) twice?), or a "
    "gradient that does not reach them"
)
_ONE_HOT_ADVICE = (
    "scores are so large that softmax has no gradient left: a missing scale 1/sqrt(D), a rate too high, no norm before "
    "attention; normalise queries and keys or lower --learning-rate"
)


def positions_alike(subject: Subject) -> Finding:
    """How far each row's distribution lies from the mean of all rows' ones, in total variation, 0 … 1."""
    spreads, hidden = [], []
    for reading in subject.readings:
        probabilities = reading.logits.softmax(dim=-1)
        spreads.append(0.5 * (probabilities - probabilities.mean(dim=0)).abs().sum(dim=-1).mean())
        rms = reading.hidden.pow(2).mean().sqrt().clamp_min(1e-30)
        hidden.append((reading.hidden - reading.hidden.mean(dim=0)).pow(2).mean().sqrt() / rms)
    spread, different = float(torch.stack(spreads).mean()), float(torch.stack(hidden).mean())
    evidence = (
        f"predictions at different places differ by {spread:.3f} of 1; hidden states by {different:.3f} of their size"
    )
    if spread < _ALIKE:
        advice = (
            "every place says the same, as if only the frequency of tokens was learnt: train on (loss near that of "
            "single-token frequencies?), look whether the last norm or a residual swallows the signal, and whether "
            "embeddings reach the blocks"
        )
        return Finding("positions alike", "fault", evidence, advice)
    return Finding("positions alike", "ok", evidence)


def _mean_over_rows(values: list[Tensor]) -> Tensor:
    """Per sequence [Hq, n] -> [Hq], without the first rows."""
    mean = torch.cat([value[:, _FIRST_ROW:] for value in values], dim=1).nanmean(dim=1)
    return torch.nan_to_num(mean, nan=0.0)


def _listed(layers: list[int], count: int) -> str:
    return "every layer" if len(layers) == count else "layer " + ", ".join(map(str, layers))
