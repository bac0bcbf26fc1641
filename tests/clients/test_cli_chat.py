"""`pellucid chat`, piped and at a terminal; and several outputs and log-probabilities of `pellucid generate`."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from pellucid.v1 import inference_pb2

from .conftest import Scripted, answer, fail, several
from .test_cli import COMMAND, environment, pellucid
from .test_client import Endless


def conversations(scripted: Scripted) -> list[list[tuple[str, str]]]:
    return [[(each.role, each.content) for each in request.chat.messages] for request in scripted.requests]


def test_each_line_is_a_turn_and_sees_the_ones_before(scripted: Scripted) -> None:
    lines = "你好\r\n\nand you?\n/reset\n again \n/system Be kind.\nlast"
    flags = ["--system", "Be brief.", "--temperature", "0", "--show-usage"]
    done = pellucid("chat", *flags, stdin=lines.encode(), server=scripted.address)
    assert (done.returncode, done.stdout.decode()) == (0, "今天天气\n" * 4)
    assert done.stderr.decode().count("prompt 3 tokens") == 4
    brief, said = ("system", "Be brief."), ("assistant", "今天天气")
    assert conversations(scripted) == [
        [brief, ("user", "你好")],
        [brief, ("user", "你好"), said, ("user", "and you?")],
        [brief, ("user", " again ")],
        [("system", "Be kind."), ("user", "last")],
    ]
    assert [request.sampling.HasField("temperature") for request in scripted.requests] == [True] * 4


def test_a_turn_that_fails_ends_a_piped_chat(scripted: Scripted) -> None:
    def refuse(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        fail(context, grpc.StatusCode.INVALID_ARGUMENT, "no template")

    scripted.generate = refuse
    done = pellucid("chat", stdin=b"a\nb\n", server=scripted.address)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"pellucid: no template\n")
    assert len(scripted.requests) == 1


class Terminal:
    """A command at a terminal."""

    def __init__(self, *arguments: str, server: str) -> None:
        self._own, other = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment(PELLUCID_SERVER=server),
            start_new_session=True,
        )
        os.close(other)
        self._seen = ""

    def read_until(self, text: str) -> str:
        """What it shows up to and with the text."""
        while text not in self._seen:
            self._seen += os.read(self._own, 4096).decode()
        shown, _, rest = self._seen.partition(text)
        self._seen = rest
        return shown + text

    def type(self, text: str) -> None:
        os.write(self._own, text.encode())

    def close(self) -> int:
        code = self.process.wait(100)
        os.close(self._own)
        return code


@pytest.mark.timeout(60)
def test_at_a_terminal_an_answer_can_be_stopped_and_a_failed_turn_tried_again(scripted: Scripted) -> None:
    terminal = Terminal("chat", server=scripted.address)
    assert "Ctrl-D ends" in terminal.read_until("> ")
    terminal.type("one\n")
    terminal.read_until("今天天气")
    terminal.read_until("> ")
    scripted.generate = endless = Endless()
    terminal.type("two\n")
    terminal.read_until("two\r\na")
    os.kill(terminal.process.pid, signal.SIGINT)
    terminal.read_until("> ")
    assert endless.ended.wait(10)

    def refuse(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    scripted.generate = refuse
    terminal.type("three\n")
    terminal.read_until("pellucid: full")
    terminal.read_until("> ")
    scripted.generate = answer("so")
    terminal.type("four\n")
    terminal.read_until("so")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    turns = [[content for _, content in turns] for turns in conversations(scripted)]
    assert turns == [
        ["one"],
        ["one", "今天天气", "two"],
        ["one", "今天天气", "two", "a", "three"],
        ["one", "今天天气", "two", "a", "four"],
    ]


def test_several_outputs_stand_below_each_other(scripted: Scripted) -> None:
    scripted.generate = several
    done = pellucid("generate", "x", "--n", "2", "--echo", "--show-usage", server=scripted.address)
    assert (done.returncode, done.stdout) == (0, b"xa\nxbcd\n")
    assert b"prompt 3 tokens (2 cached), output 4 tokens" in done.stderr


def test_json_has_every_output_and_its_logprobs(scripted: Scripted) -> None:
    scripted.generate = several
    flags = ("generate", "--n", "2", "--json", "--logprobs", "1", "--prompt-logprobs", "0")
    found = json.loads(pellucid(*flags, "x", server=scripted.address).stdout)
    assert [output["text"] for output in found["outputs"]] == ["a", "bcd"]
    (first, second) = found["outputs"][0]["logprobs"]
    assert (first["token"], first["text"], first["logprob"], second["token_id"]) == ("e5a4", "\ufffd", -1.5, 4)
    assert first["alternatives"] == [{"token_id": 9, "token": "61", "text": "a", "logprob": -0.25, "rank": 1}]
    assert found["prompt"]["logprobs"][0]["logprob"] is None
    (line,) = pellucid(*flags, "--file", "-", stdin=b"x\n", server=scripted.address).stdout.splitlines()
    assert json.loads(line) == {"line": 1, **found}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["x", "--logprobs", "1"], "log-probabilities are shown with --json only"),
        (["--file", "-", "--n", "2"], "--n goes with --file only where there is --json"),
        (["x", "--regex", "a", "--choices", "b"], "not allowed with argument"),
        (["x", "--logit-bias", "5"], "'5' is not a list of biases such as 5:-1,7:2.5"),
        (["x", "--json-schema", "@/no/such/file"], "/no/such/file: No such file or directory"),
    ],
)
def test_what_does_not_go_together_is_said(scripted: Scripted, flags: list[str], says: str) -> None:
    done = pellucid("generate", *flags, server=scripted.address)
    assert done.returncode in (1, 2)
    assert says in done.stderr.decode()
    assert scripted.requests == []
