"""The command `pellucid` where its streams are closed, full or not text, and where Ctrl-C comes early."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pellucid.v1 import inference_pb2

from .conftest import Scripted, answer
from .test_cli import COMMAND, environment

FULL = b"pellucid: standard output: No space left on device\n"
CLOSED = b"pellucid: standard output is closed\n"

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def shell(command: str, server: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    """Runs `pellucid`, with the shell's redirections."""
    return subprocess.run(
        ["sh", "-c", f"{shlex.join(COMMAND)} {command}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(PELLUCID_SERVER=server, **env),
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "generate x",
        "generate x --json",
        "generate --file {prompts}",
        "generate --file {prompts} --json",
        "generate --token-ids 1",
        "info",
        "info --json",
        "tokenize x",
        "detokenize 97",
        "health",
        "cancel running",
        "version",
        "--version",
        "--help",
        "serve --help",
    ],
)
def test_a_full_disk_is_one_line(scripted: Scripted, tmp_path: Path, command: str) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("a\nb\n")
    done = shell(command.format(prompts=prompts) + " >/dev/full", scripted.address)
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("command", ["generate x", "tokenize 今", "info", "version"])
def test_a_closed_standard_output_is_told_before_anything_is_sent(scripted: Scripted, command: str) -> None:
    done = shell(f"{command} >&-", scripted.address)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", CLOSED)
    assert scripted.requests == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate <&-", b"standard input is closed"),
        ("tokenize - <&-", b"standard input is closed"),
        ("generate --file - <&-", b"--file -: standard input is closed"),
        ("generate 0>/dev/null", b"standard input: Bad file descriptor"),
        ("generate --file - 0>/dev/null", b"--file -: Bad file descriptor"),
        ("generate --file /", b"--file /: Is a directory"),
    ],
)
def test_an_input_that_cannot_be_read_is_one_line(scripted: Scripted, command: str, message: bytes) -> None:
    done = shell(command, scripted.address)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"pellucid: " + message + b"\n")
    assert scripted.requests == []


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_errors_that_nobody_can_read_keep_their_exit_code(scripted: Scripted, redirection: str) -> None:
    for command, code in (("detokenize x", 1), ("nonsense", 2), ("info --timeout 0", 2), ("version", 0)):
        done = shell(f"{command} {redirection}", scripted.address)
        assert done.returncode == code
        assert b"not" not in done.stdout
    done = shell(f"generate x --show-usage {redirection}", scripted.address)
    assert (done.returncode, done.stdout.decode()) == (0, "今天天气\n")


def test_with_every_stream_closed_no_connection_takes_their_place(scripted: Scripted) -> None:
    scripted.generate = answer("x")
    assert shell("health <&- 2>&-", scripted.address).stdout == b"ready\n"
    assert shell("generate x <&- >&- 2>&-", scripted.address).returncode == 1
    assert inference_pb2.GenerateRequest(text="x") not in scripted.requests


@pytest.mark.parametrize("module", ["grpc", "argparse", "google.protobuf"])
def test_ctrl_c_while_loading_is_quiet(tmp_path: Path, module: str) -> None:
    """The interrupt comes in the midst of an import."""
    package = tmp_path / module.replace(".", "/")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ENTRY}"],
        capture_output=True,
        env=environment(),
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


# As the installed command begins.
ENTRY = "from pellucid_client.cli import main; main(['version'])"


def test_ctrl_c_while_ending_is_quiet() -> None:
    late = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    done = subprocess.run(
        [sys.executable, "-c", late + ENTRY], capture_output=True, env=environment(), timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")
    assert done.stdout.startswith(b"pellucid ")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in a shell's background job."""
    program = f"import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{ENTRY}"
    early = "import atexit, os, signal; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
    done = subprocess.run(
        [sys.executable, "-c", early + program], capture_output=True, env=environment(), timeout=20, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_starts_without_grpc_in_the_way() -> None:
    code = "import sys, pellucid_client.cli; sys.exit('grpc' in sys.modules or 'argparse' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment()}, check=False).returncode == 0
    )
