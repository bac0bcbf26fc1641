"""Flags: defaults that are valid, texts that are refused with the flag's name."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from pellucid.v1 import inference_pb2
from pellucid_loadtest.options import CONTEXT_POLICIES, FLAGS, LoadOptions, add_flags, load_options


def parsed(*arguments: str) -> LoadOptions:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return load_options(vars(parser.parse_args(arguments)))


def test_defaults_are_valid_and_named_after_their_fields() -> None:
    options = parsed()
    assert {flag.field for flag in FLAGS} == set(LoadOptions.__dataclass_fields__)
    assert options.workload == "random"
    assert options.ignore_eos is True
    assert options.slo_ttft is None
    assert not options.open_loop


def test_the_command_line_sets_them() -> None:
    options = parsed(
        *("--arrivals", "gamma", "--rate", "2.5", "--slo-ttft", "150", "--ignore-eos", "no", "--temperature", "0"),
        *("--context", "reject", "--output-length", "fixed:9"),
    )
    assert options.open_loop
    assert (options.rate, options.slo_ttft, options.ignore_eos, options.temperature) == (2.5, 150.0, False, 0.0)
    assert options.context == "reject"
    assert options.output_length is not None


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("rate", "0"),
        ("rate", "nan"),
        ("rate", "many"),
        ("workload", "chats"),
        ("seed", "1.5"),
        ("warm_up", "-1"),
        ("slo_attainment", "1.01"),
        ("prompt_length", "fixed:0"),
        ("context", "slide-away"),
        ("burstiness", "inf"),
        ("ignore_eos", "true"),
    ],
)
def test_a_bad_value_names_flag_and_value(make_options: Callable[..., LoadOptions], flag: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')}: ") as caught:
        make_options(**{flag: text})
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_value_on_the_command_line_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed("--rate", "0")
    assert caught.value.code == 2
    assert "argument --rate: '0' is not a number from 0.001" in capsys.readouterr().err


def test_context_policies_are_those_of_the_api() -> None:
    names = {name for name, value in inference_pb2.ContextOverflow.items() if value}
    assert {f"CONTEXT_OVERFLOW_{policy.upper()}" for policy in CONTEXT_POLICIES} == names
    assert {"reject", "truncate"} <= set(CONTEXT_POLICIES)
