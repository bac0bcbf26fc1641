"""The sampling values that a request, an operator and a checkpoint may set alike, with what is accepted."""

from __future__ import annotations

from pellucid_server.options import Integer, Number, Option

TEMPERATURE = Number(0, 100)
TOP_K = Integer(0, 2**31 - 1)
TOP_P = Number(0, 1, open_low=True)
MIN_P = Number(0, 1, open_high=True)
TYPICAL_P = Number(0, 1, open_low=True)
# The least one is 0.01 as the API's float32 has it.
REPETITION_PENALTY = Number(0.009999999776482582, 100)
PRESENCE_PENALTY = Number(-2, 2)
FREQUENCY_PENALTY = Number(-2, 2)
SAMPLING: dict[str, Option] = {
    "temperature": TEMPERATURE,
    "top_k": TOP_K,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "typical_p": TYPICAL_P,
    "repetition_penalty": REPETITION_PENALTY,
    "presence_penalty": PRESENCE_PENALTY,
    "frequency_penalty": FREQUENCY_PENALTY,
}
"""By name."""
