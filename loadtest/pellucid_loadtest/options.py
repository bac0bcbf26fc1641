"""The flags of the load test: one table, from which the command line, the web form and LoadOptions are made.

In: Locust's namespace of strings. Out: LoadOptions, checked. A bad value is a ValueError of one line that names the
value and what is accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pellucid.v1 import inference_pb2
from pellucid_loadtest.lengths import Lengths, parse_lengths

CLOSED, POISSON, GAMMA = "closed", "poisson", "gamma"
RANDOM, CHAT, SHARED_PREFIX, LONG_INPUT = "random", "chat", "shared-prefix", "long-input"

OVERFLOW = "CONTEXT_OVERFLOW_"
CONTEXT_POLICIES = tuple(
    name.removeprefix(OVERFLOW).lower()
    for name, value in inference_pb2.ContextOverflow.items()
    if value != inference_pb2.CONTEXT_OVERFLOW_UNSPECIFIED
)
"""Those that this version of the API knows."""


@dataclass(frozen=True)
class LoadOptions:
    """What a run does. Fields are the flags; None is a flag left empty."""

    workload: str
    prompt_length: Lengths | None
    output_length: Lengths | None
    prefix_length: int
    prefix_count: int
    context: str | None
    model: str | None
    ignore_eos: bool
    temperature: float | None
    tls: bool
    ca_certificate: str | None
    certificate: str | None
    key: str | None
    token_file: str | None
    arrivals: str
    rate: float
    burstiness: float
    concurrency: int
    seed: int
    warm_up: float
    drain: float
    request_timeout: float | None
    slo_ttft: float | None
    slo_tpot: float | None
    slo_e2e: float | None
    slo_attainment: float
    max_failure_ratio: float
    output_folder: str

    @property
    def open_loop(self) -> bool:
        return self.arrivals != CLOSED


@dataclass(frozen=True)
class Flag:
    """One flag. `parse` turns its text into the field's value or raises ValueError."""

    name: str
    default: str
    parse: Callable[[str], Any]
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


def number(low: float, high: float, kind: type[int] | type[float] = float) -> Callable[[str], Any]:
    """A parser of numbers in [low, high]."""
    wanted = f"a {'whole ' if kind is int else ''}number from {low:g} to {high:g}"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {wanted}") from None
        if not low <= value <= high:
            raise ValueError(f"{text!r} is not {wanted}")
        return value

    return parse


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Empty text is None."""
    return lambda text: parse(text) if text.strip() else None


def one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _chosen(name: str, default: str, choices: tuple[str, ...], text: str) -> Flag:
    parse = one_of(*choices)
    return Flag(name, default, optional(parse) if default == "" else parse, text, choices=choices)


def yes_or_no(text: str) -> bool:
    return one_of("yes", "no")(text) == "yes"


_MILLISECONDS = optional(number(0.001, 1e9))
_DAY = 86_400.0

FLAGS = (
    _chosen(
        "workload",
        RANDOM,
        (RANDOM, CHAT, SHARED_PREFIX, LONG_INPUT),
        "random: uniform lengths; chat: lognormal lengths; shared-prefix: prompts that begin alike; long-input: "
        "prompts longer than the context",
    ),
    Flag("prompt-length", "", optional(parse_lengths), "tokens a prompt; empty: the workload's own", "DIST"),
    Flag("output-length", "", optional(parse_lengths), "tokens an answer; empty: the workload's own", "DIST"),
    Flag("prefix-length", "96", number(1, 1e6, int), "shared-prefix: tokens that prompts have in common", "N"),
    Flag("prefix-count", "4", number(1, 1e6, int), "shared-prefix: different beginnings", "N"),
    _chosen("context", "", CONTEXT_POLICIES, "context policy of every request; empty: the server's"),
    Flag("model", "", optional(str), "model to ask for; empty: the only one", "NAME"),
    Flag(
        "ignore-eos",
        "yes",
        yes_or_no,
        "yes: every answer has its full length; no: answers end where the model ends them",
        choices=("yes", "no"),
    ),
    Flag("temperature", "", optional(number(0, 100)), "sampling temperature; empty: the server's", "X"),
    Flag("tls", "no", yes_or_no, "yes: encrypt, and check the server's certificate", choices=("yes", "no")),
    Flag(
        "ca-certificate", "", optional(str), "PEM file of authorities to check it against; empty: the system's", "FILE"
    ),
    Flag("certificate", "", optional(str), "PEM file of a client certificate, for servers that want one", "FILE"),
    Flag("key", "", optional(str), "PEM file of its private key", "FILE"),
    Flag("token-file", "", optional(str), "file whose first line is a bearer token, for servers that want one", "FILE"),
    _chosen(
        "arrivals",
        CLOSED,
        (CLOSED, POISSON, GAMMA),
        "closed: each user sends its next request when the last one has ended; poisson, gamma: requests arrive on "
        "their own, whatever the server does",
    ),
    Flag("rate", "10", number(0.001, 1e6), "poisson, gamma: requests a second, of all processes together", "X"),
    Flag("burstiness", "0.5", number(0.001, 1000), "gamma: shape of the gaps; 1 is Poisson, less is burstier", "X"),
    Flag(
        "concurrency",
        "100",
        number(1, 10_000, int),
        "poisson, gamma: requests in flight at most; later ones wait and are timed from their arrival. --users wins",
        "N",
    ),
    Flag("seed", "0", number(0, 2**63 - 1, int), "the same seed gives the same requests and arrival times", "N"),
    Flag("warm-up", "2", number(0, _DAY), "seconds, from the moment all users run, that are not measured", "X"),
    Flag("drain", "5", number(0, _DAY), "seconds that requests in flight may go on after the end", "X"),
    Flag("request-timeout", "", optional(number(0.001, _DAY)), "deadline of a request; empty: none", "X"),
    Flag("slo-ttft", "", _MILLISECONDS, "time to first token that a good request keeps; empty: any", "MS"),
    Flag("slo-tpot", "", _MILLISECONDS, "time per output token that a good request keeps; empty: any", "MS"),
    Flag("slo-e2e", "", _MILLISECONDS, "time to the end that a good request keeps; empty: any", "MS"),
    Flag("slo-attainment", "0.99", number(0, 1), "share of requests that must be good where an SLO is set", "X"),
    Flag("max-failure-ratio", "0", number(0, 1), "share of requests that may fail", "X"),
    Flag("output-folder", "runs/load", str, "reports go to a folder in it, named after the time", "FOLDER"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag to a command line. Values stay text, so that the web form can give them too."""
    group = parser.add_argument_group("Pellucid load test")
    for flag in FLAGS:
        # Help goes through %-formatting; an empty choice is a flag left empty in the web form.
        choices = None if flag.choices is None else [*([""] if flag.default == "" else []), *flag.choices]
        group.add_argument(
            f"--{flag.name}",
            default=flag.default,
            type=_checked(flag),
            metavar=flag.metavar,
            choices=choices,
            help=f"{flag.help}. Default: {flag.default or 'empty'}".replace("%", "%%"),
        )


def load_options(values: Mapping[str, Any]) -> LoadOptions:
    """The options of Locust's namespace; raises ValueError."""
    fields = {}
    for flag in FLAGS:
        try:
            fields[flag.field] = flag.parse(str(values[flag.field]))
        except ValueError as error:
            raise ValueError(f"--{flag.name}: {error}") from None
    return LoadOptions(**fields)


def described(values: Mapping[str, Any]) -> dict[str, str]:
    """The flags as text, for the report."""
    return {flag.name: str(values[flag.field]) for flag in FLAGS}


def _checked(flag: Flag) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            flag.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check
