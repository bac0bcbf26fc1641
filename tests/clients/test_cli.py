"""The command `pellucid` from outside: output, exit codes, and what happens when it is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2

import pellucid_client
from pellucid.v1 import inference_pb2, types_pb2
from pellucid_client import cli
from pellucid_client.commands import dispatch

from .conftest import Scripted, answer, fail, serve
from .test_client import Endless
from .test_errors import free_address

COMMAND = [sys.executable, "-m", "pellucid_client.cli"]


@pytest.fixture(autouse=True)
def usual_interrupts() -> Iterator[None]:
    """`main` leaves its own handler behind, as its process is about to end."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)


def environment(**more: str) -> dict[str, str]:
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def pellucid(*arguments: str, stdin: bytes = b"", server: str = "", **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        env=environment(**({"PELLUCID_SERVER": server} if server else {}), **env),
        timeout=60,
        check=False,
    )


def test_generate_prints_the_text(scripted: Scripted) -> None:
    done = pellucid("generate", "你好", server=scripted.address)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "今天天气\n", b"")
    assert scripted.requests[0] == inference_pb2.GenerateRequest(text="你好")


def test_text_is_utf8_whatever_the_locale(scripted: Scripted) -> None:
    done = pellucid("generate", stdin="你好\n".encode(), server=scripted.address, LC_ALL="C", PYTHONUTF8="0")
    assert done.stdout.decode() == "今天天气\n"
    assert scripted.requests[0].text == "你好"


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "-"]])
def test_generate_reads_standard_input(scripted: Scripted, arguments: list[str]) -> None:
    assert pellucid(*arguments, stdin=b"a\n\nb \n", server=scripted.address).returncode == 0
    assert scripted.requests[0].text == "a\n\nb "


def test_every_flag_reaches_its_field(scripted: Scripted) -> None:
    flags = (
        "--token-ids 3,1,2 --temperature 0 --top-k 0 --top-p 0.5 --min-p 0 --seed 0 --max-new-tokens 0 "
        "--min-new-tokens 1 --stop 。 --stop ab --stop-token-ids 4,5 --include-stop-in-text --ignore-eos "
        "--time-limit 1.5 --model m --request-id r --context truncate --omit-special-tokens --parse-special-tokens "
        "--keep-special-tokens --typical-p 0.5 --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 2 "
        "--logit-bias 5:-1,7:2.5 --allowed-token-ids 5,7 --n 2 --priority -3 --choices a --choices 。 "
        "--bypass-cache-read --bypass-cache-write --cache-salt s --json --logprobs 0 --logprob-token-ids 5 "
        "--prompt-logprobs 2 --prompt-logprob-token-ids 6 --prompt-logprobs-start 1"
    )
    assert pellucid("generate", *flags.split(), "--server", scripted.address).returncode == 0
    expected = inference_pb2.GenerateRequest(
        request_id="r",
        model="m",
        token_ids={"ids": [3, 1, 2]},
        omit_special_tokens=True,
        parse_special_tokens=True,
        sampling=types_pb2.SamplingParams(
            temperature=0,
            top_k=0,
            top_p=0.5,
            min_p=0,
            seed=0,
            typical_p=0.5,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={5: -1, 7: 2.5},
            allowed_token_ids=[5, 7],
            sequence_count=2,
        ),
        priority=-3,
        constraint={"choices": {"values": ["a", "。"]}},
        cache={"bypass_read": True, "bypass_write": True, "salt": "s"},
        stopping=inference_pb2.StoppingCriteria(
            max_new_tokens=0,
            min_new_tokens=1,
            stop_strings=["。", "ab"],
            stop_token_ids=[4, 5],
            include_stop_in_text=True,
            ignore_eos=True,
            time_limit={"seconds": 1, "nanos": 500_000_000},
        ),
        output=inference_pb2.OutputOptions(
            keep_special_tokens=True,
            output_logprobs={"top_count": 0, "token_ids": [5]},
            prompt_logprobs={"top_count": 2, "token_ids": [6], "start_position": 1},
        ),
        context=inference_pb2.ContextPolicy(overflow=inference_pb2.CONTEXT_OVERFLOW_TRUNCATE),
    )
    assert [each for each in scripted.requests if isinstance(each, inference_pb2.GenerateRequest)] == [expected]


def test_json_echo_and_usage(scripted: Scripted) -> None:
    done = pellucid("generate", "x", "--json", server=scripted.address)
    found = json.loads(done.stdout)
    assert (found["text"], found["token_ids"]) == ("今天天气", [1, 2])
    assert found["finish"] == {"reason": "eos", "matched": 2, "output_token_count": 2}
    assert found["usage"] == {"prompt_token_count": 3, "output_token_count": 2, "cached_token_count": 0}
    assert found["timings"]["total_time"] == 1.5
    assert found["prompt"]["sampling"]["seed"] == 7

    done = pellucid("generate", "你好，", "--echo", "--show-usage", server=scripted.address)
    assert done.stdout.decode() == "你好，今天天气\n"
    assert done.stderr.decode() == (
        "prompt 3 tokens, output 2 tokens, finish eos 2, first token none, total 1500.0 ms, seed 7, request assigned\n"
    )


def test_tokenize_and_detokenize(scripted: Scripted) -> None:
    assert pellucid("tokenize", "ab", server=scripted.address).stdout == b"97,98\n"
    assert json.loads(pellucid("tokenize", "--json", stdin=b"ab\n", server=scripted.address).stdout) == {
        "token_ids": [97, 98],
        "tokens": [],
    }
    assert pellucid("detokenize", "97,22825", server=scripted.address).stdout.decode() == "a天\n"
    assert pellucid("detokenize", stdin=b"97 98\n", server=scripted.address).stdout == b"ab\n"
    done = pellucid("detokenize", "a,b", server=scripted.address)
    assert (done.returncode, done.stderr) == (1, b"pellucid: 'a,b' is not a list of token ids such as 1,2,3\n")


def test_info(scripted: Scripted) -> None:
    text = pellucid("info", server=scripted.address).stdout.decode()
    assert scripted.address in text
    assert "9.8.7" in text
    assert "1024 tokens (64 blocks of 16)" in text
    assert "at most 0 tokens a request; where the window slides, past the context too" in text
    found = json.loads(pellucid("info", "--json", server=scripted.address).stdout)
    assert found["server"]["version"] == "9.8.7"
    assert [model["name"] for model in found["models"]] == ["scripted"]
    assert found["load"]["running_request_count"] == 2


def test_ids_are_printed_where_there_is_no_tokenizer(scripted: Scripted) -> None:
    scripted.generate = answer("", "", "")
    assert pellucid("generate", "--token-ids", "7,8", server=scripted.address).stdout == b"1 2 3\n"
    assert pellucid("generate", "--token-ids", "7,8", "--echo", server=scripted.address).stdout == b"7 8 1 2 3\n"
    done = pellucid("generate", "--token-ids", "7,8", "--json", server=scripted.address)
    assert json.loads(done.stdout)["token_ids"] == [1, 2, 3]
    scripted.tokenizer_sha256 = "0" * 64
    scripted.generate = answer("a", "", "b")
    assert pellucid("generate", "--token-ids", "7,8", server=scripted.address).stdout == b"ab\n"


def test_an_answer_that_somebody_else_cancelled(scripted: Scripted) -> None:
    scripted.generate = answer("今天", reason=inference_pb2.FINISH_REASON_CANCELLED)
    for flags in ([], ["--json"]):
        done = pellucid("generate", "x", "--request-id", "r", *flags, server=scripted.address)
        assert done.returncode == 3
        assert "今天" in done.stdout.decode()
        assert done.stderr == b"pellucid: request r was cancelled from elsewhere; its text ends early\n"


def test_floats_are_as_short_as_they_were_given(scripted: Scripted) -> None:
    def generate(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        for message in answer("x")(request, context):
            message.prompt.effective_sampling.MergeFrom(request.sampling)
            yield message

    scripted.generate = generate
    flags = ["--temperature", "0.8", "--top-p", "0.9999999", "--min-p", "1e-30"]
    done = pellucid("generate", "x", "--json", *flags, server=scripted.address)
    for part in ('"temperature": 0.8,', '"top_p": 0.9999999,', '"min_p": 1e-30,'):
        assert part in done.stdout.decode()


def test_control_characters_in_names_are_escaped(scripted: Scripted) -> None:
    scripted.model_name = "red \x1b[31m\u202emodel\n"
    done = pellucid("info", server=scripted.address)
    assert r"red \x1b[31m\u202emodel\n" in done.stdout.decode()
    done = pellucid("generate", "x", "--show-usage", "--request-id", "a\x1b[2J", server=scripted.address)
    assert done.stderr.endswith(b", request a\\x1b[2J\n")
    scripted.generate = lambda request, context: fail(context, grpc.StatusCode.INTERNAL, "a\x9b\nb", [])
    assert pellucid("generate", "x", server=scripted.address).stderr == b"pellucid: a\\x9b b [INTERNAL]\n"
    assert b"\x1b" not in pellucid("generate", "x", "--\x1b[31m").stderr


def test_health_and_cancel_speak_by_exit_code(scripted: Scripted) -> None:
    done = pellucid("health", server=scripted.address)
    assert (done.returncode, done.stdout) == (0, b"ready\n")
    assert pellucid("health", "--wait", "5", server=scripted.address).returncode == 0
    scripted.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    done = pellucid("health", server=scripted.address)
    assert (done.returncode, done.stdout) == (1, b"not ready\n")
    done = pellucid("health", "--wait", "0.2", server=scripted.address)
    assert done.returncode == 1
    assert b"was not ready in time" in done.stderr
    assert pellucid("cancel", "running", server=scripted.address).returncode == 0
    done = pellucid("cancel", "gone", server=scripted.address)
    assert (done.returncode, done.stdout) == (1, b"not found\n")


def test_errors_are_one_line(scripted: Scripted) -> None:
    bad = BadRequest()
    bad.field_violations.add(field="sampling.temperature", description="200 is not in [0, 100]")
    bad.field_violations.add(field="sampling.top_p", description="0 is not\n in (0, 1]")
    scripted.generate = lambda request, context: fail(context, grpc.StatusCode.INVALID_ARGUMENT, "two fields", [bad])
    done = pellucid("generate", "x", "--temperature", "200", "--top-p", "0", server=scripted.address)
    expected = "pellucid: sampling.temperature: 200 is not in [0, 100]; sampling.top_p: 0 is not in (0, 1]\n"
    assert (done.returncode, done.stdout, done.stderr.decode()) == (1, b"", expected)

    busy = RetryInfo()
    busy.retry_delay.seconds = 2
    scripted.generate = lambda request, context: fail(
        context, grpc.StatusCode.RESOURCE_EXHAUSTED, "288 requests in flight", [ErrorInfo(reason="QUEUE_FULL"), busy]
    )
    done = pellucid("generate", "x", server=scripted.address)
    assert done.stderr == b"pellucid: 288 requests in flight; try again in 2 s [QUEUE_FULL]\n"


def test_a_very_long_timeout_is_none(scripted: Scripted) -> None:
    for timeout, command in (("1e10", ["generate", "x"]), ("1e300", ["info"]), ("inf", ["tokenize", "x"])):
        done = pellucid(*command, "--timeout", timeout, server=scripted.address)
        assert (done.returncode, done.stderr) == (0, b"")
    assert pellucid("health", "--timeout", "inf", "--wait", "1e300", server=scripted.address).returncode == 0


def test_no_server(scripted: Scripted) -> None:
    address = free_address()
    for command in (["generate", "x"], ["info"], ["health"]):
        done = pellucid(*command, server=address)
        assert done.returncode == 1
        stderr = done.stderr.decode()
        assert stderr.startswith(f"pellucid: no connection to the server at {address}: Connection refused")
        assert "Is `pellucid serve` running there? --server or PELLUCID_SERVER names another." in stderr
        assert stderr.count("\n") == 1


def test_a_server_that_hangs_up_is_one_line() -> None:
    """gRPC would log the end of the connection."""
    script = Scripted()
    script.generate = endless = Endless()
    server = serve(script)
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "--server", script.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"a"
    server.stop(grace=None).wait()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.startswith(b"pellucid: ")
    assert stderr.count(b"\n") == 1
    assert endless.ended.wait(30)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "COMMAND"),
        (["generat"], "generat"),
        (["generate", "x", "--top-k", "many"], "--top-k"),
        (["generate", "x", "--timeout", "-1"], "--timeout"),
        (["generate", "x", "--timeout", "soon"], "--timeout"),
        (["generate", "x", "--token-ids", "1"], "--token-ids"),
        (["generate", "--token-ids", "1,x"], "1,x"),
        (["generate", "--file", "f", "--concurrency", "0"], "--concurrency"),
        (["cancel"], "ID"),
        (["info", "--timeout", "nan"], "greater than 0"),
        (["info", "--timeout", "0"], "greater than 0"),
        (["info", "--server", "nonsense"], "--server: 'nonsense' is not accepted; accepted: HOST:PORT"),
        (["info", "--server", ""], "--server: '' is not accepted; accepted: HOST:PORT"),
    ],
)
def test_a_wrong_command_line_exits_2(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "stdin", "part"),
    [
        (["generate", "--file", "/nonexistent"], b"", "--file /nonexistent: No such file"),
        (["generate", "--file", "-"], b"\xff\n", "--file -: not UTF-8"),
        (["generate"], b"a\xff\n", "standard input is not UTF-8"),
        (["generate", "x", "--top-k", "-1"], b"", "sampling.top_k: -1 is not accepted; accepted: a whole"),
        (
            ["generate", "x", "--seed", "-1"],
            b"",
            "sampling.seed: -1 is not accepted; accepted: a whole number from 0 to",
        ),
        (["generate", "--token-ids", "-1"], b"", "token_ids.ids: [-1] is not accepted; accepted: a list, each a whole"),
        (["generate", "x", "--time-limit", "inf"], b"", "stopping.time_limit: inf is not accepted; accepted: a number"),
        (["generate", "--file", "-", "--request-id", "r"], b"a\n", "--request-id"),
    ],
)
def test_an_unusable_input_exits_1(arguments: list[str], stdin: bytes, part: str) -> None:
    done = pellucid(*arguments, stdin=stdin)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"pellucid: {part}")
    assert done.stderr.count(b"\n") == 1


def test_ctrl_c_ends_the_request_and_exits_130(scripted: Scripted) -> None:
    scripted.generate = endless = Endless()
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "--server", scripted.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"a"  # Flushed as it came: the stream has not ended.
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
    assert endless.ended.wait(30)


def test_ctrl_c_ends_a_file_of_prompts(scripted: Scripted) -> None:
    def some_endless(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        yield from (answer("done") if request.text == "a" else endless)(request, context)

    endless = Endless()
    scripted.generate = some_endless
    process = subprocess.Popen(
        [*COMMAND, "generate", "--file", "-", "--server", scripted.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"a\nb\nc\n")
    process.stdin.close()
    assert process.stdout.readline() == b"done\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stdout.close()
    process.stderr.close()
    assert endless.ended.wait(30)


@pytest.mark.parametrize("arguments", [["generate", "x"], ["generate", "--file", "-"], ["info"]])
def test_a_broken_pipe_is_quiet(scripted: Scripted, arguments: list[str]) -> None:
    scripted.generate = answer(*["x" * 1000] * 200)
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--server", scripted.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(b"a\nb\n")
    process.stdin.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_version() -> None:
    expected = f"pellucid {pellucid_client.__version__}\n".encode()
    assert pellucid("version").stdout == expected
    assert pellucid("--version").stdout == expected


class FoundCommands:
    """Stands in for the installed entry points."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
        self.targets = targets
        monkeypatch.setattr(dispatch, "entry_points", self)

    def __call__(self, *, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "pellucid.commands"
        return [EntryPoint(found, target, group) for found, target in self.targets.items() if name in (None, found)]


def record(argv: list[str]) -> int:
    print(argv)
    return 7


def needs_more(argv: list[str]) -> int:
    raise ModuleNotFoundError("No module named 'wanted'", name="wanted")


def run_main(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(argv))
    return caught.value.code


def test_the_help_lists_every_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    FoundCommands(monkeypatch, serve="m:f", train="m:f", mine="m:f")
    monkeypatch.setattr(dispatch, "requires", lambda name: ["grpcio>=1", "pytest>=1; extra == 'server'"])
    assert run_main("--help") == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +serve +run a server$", text, re.MULTILINE)
    assert re.search(r"^ +train +train a checkpoint$", text, re.MULTILINE)
    assert re.search(r"^ +mine ", text, re.MULTILINE)

    wanted = ["pytest>=1; extra == 'server'", 'no-such.package>=2; python_version > "3" and extra == "server"']
    monkeypatch.setattr(dispatch, "requires", lambda name: wanted)
    assert run_main("nonsense") == 2
    assert "choose from 'serve', 'train', " in capsys.readouterr().err
    assert run_main() == 2
    assert run_main("-h") == 0
    assert re.search(r"^ +serve +run a server \(needs pellucid\[server\]\)$", capsys.readouterr().out, re.MULTILINE)

    FoundCommands(monkeypatch)
    assert run_main("-h") == 0
    assert "train a checkpoint (needs pellucid[train])" in capsys.readouterr().out


def test_the_help_loads_no_torch() -> None:
    code = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {START}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), check=True)
    assert b" serve " in done.stdout
    assert done.stdout.endswith(b"False\n")


START = "from pellucid_client.cli import main; main(['--help'])"


def test_commands_of_extras(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "extra_commands", sys.modules[__name__])
    FoundCommands(monkeypatch, serve="extra_commands:record", mine="extra_commands:record")
    assert run_main("serve", "--listen", "x", "generate") == 7
    assert run_main("mine", "--help") == 7
    assert capsys.readouterr().out == "['--listen', 'x', 'generate']\n['--help']\n"
    assert run_main("train") == 2
    assert "needs pellucid[train]; in a checkout of Pellucid: pip install '.[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["no_such_module:run", "extra_commands:needs_more"])
def test_an_extra_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    monkeypatch.setitem(sys.modules, "extra_commands", sys.modules[__name__])
    FoundCommands(monkeypatch, serve=target, mine=target)
    assert run_main("serve") == 2
    captured = capsys.readouterr().err
    assert captured.startswith("pellucid: `pellucid serve` is not installed here (")
    assert captured.endswith("pip install '.[server]'\n")
    with pytest.raises(ModuleNotFoundError):  # Somebody else's command: we cannot know what it lacks.
        cli.main(["mine"])


def test_a_missing_module_of_our_own_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    FoundCommands(monkeypatch, serve="pellucid_client.no_such_module:run")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["serve"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate x --nope", "pellucid: unrecognized arguments: --nope"),
        ("generate x --temperature warm", "pellucid generate: argument --temperature: invalid float value: 'warm'"),
        ("", "pellucid: the following arguments are required: COMMAND"),
    ],
)
def test_a_wrong_command_line_is_one_line(words: str, says: str) -> None:
    done = pellucid(*words.split())
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == f"{says}; --help tells what is accepted\n"
