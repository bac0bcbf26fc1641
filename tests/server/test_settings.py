"""Settings: sources and their order, every kind of value at its edges, messages that name what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pellucid_server.options import Address
from pellucid_server.settings import Settings, SettingsError, load_settings, unknown_variables


def load(*argv: str, **environ: str) -> Settings:
    return load_settings(argv, environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load(*argv, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults() -> None:
    assert load() == Settings()
    assert load().listen == Address("127.0.0.1", 50051)
    assert load().max_new_tokens_limit == 16384


def test_command_line_beats_environment_beats_toml(tmp_path: Path) -> None:
    file = tmp_path / "pellucid.toml"
    file.write_text('max-running = 1\nmax-queue = 2\nmax-step-tokens = 30\ndtype = "float32"\n')
    settings = load("--config", str(file), "--max-running", "10", PELLUCID_MAX_RUNNING="20", PELLUCID_MAX_QUEUE="21")
    assert (settings.max_running, settings.max_queue, settings.max_step_tokens) == (10, 21, 30)
    assert settings.dtype == "float32"
    assert load(PELLUCID_CONFIG=str(file)).max_running == 1


def test_every_field_can_be_set_by_every_source(tmp_path: Path) -> None:
    values = {
        "checkpoint": ("here", "here"),
        "module": ("my.py:My", "my.py:My"),
        "listen": ("0.0.0.0:1", Address("0.0.0.0", 1)),
        "metrics_listen": ("off", None),
        "device": ("cpu", "cpu"),
        "dtype": ("float16", "float16"),
        "kv_dtype": ("int8", "int8"),
        "quantize": ("int8", "int8"),
        "kv_cache_memory": ("2GiB", 2**31),
        "kv_block_size": ("16", 16),
        "prefix_cache": ("off", False),
        "speculative_tokens": ("8", 8),
        "cuda_graphs": ("off", "off"),
        "max_context": ("100", 100),
        "max_running": ("3", 3),
        "max_queue": ("0", 0),
        "max_step_tokens": ("7", 7),
        "threads": ("2", 2),
        "default_max_new_tokens": ("5", 5),
        "max_new_tokens_limit": ("999", 999),
        "context_overflow": ("truncate", "truncate"),
        "default_temperature": ("0", 0.0),
        "default_top_k": ("0", 0),
        "default_top_p": ("0.5", 0.5),
        "default_min_p": ("0.25", 0.25),
        "default_typical_p": ("0.75", 0.75),
        "default_repetition_penalty": ("1.5", 1.5),
        "default_presence_penalty": ("-2", -2.0),
        "default_frequency_penalty": ("2", 2.0),
        "max_logprobs": ("0", 0),
        "model_name": ("m", "m"),
        "tls_certificate": ("c.pem", "c.pem"),
        "tls_key": ("k.pem", "k.pem"),
        "tls_client_ca": ("ca.pem", "ca.pem"),
        "auth_token_file": ("tokens", "tokens"),
        "drain_seconds": ("1.5", 1.5),
        "engine_timeout_seconds": ("0", 0.0),
        "slow_reader_seconds": ("2.5", 2.5),
        "slow_reader_bytes": ("64KiB", 2**16),
        "log_level": ("debug", "debug"),
        "log_format": ("json", "json"),
    }
    assert set(values) == {field.name for field in dataclasses.fields(Settings)}
    expected = Settings(**{name: value for name, (_, value) in values.items()})  # type: ignore[arg-type]
    flags = [part for name, (text, _) in values.items() for part in ("--" + name.replace("_", "-"), text)]
    flags[:2] = ["here"]
    assert load(*flags) == expected
    assert load(**{"PELLUCID_" + name.upper(): text for name, (text, _) in values.items()}) == expected
    file = tmp_path / "all.toml"
    file.write_text("".join(f'{name.replace("_", "-")} = "{text}"\n' for name, (text, _) in values.items()))
    assert load("--config", str(file)) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("2GiB", 2**31), ("1e9", 10**9), ("1.5 kib", 1536), ("2000", 2000), ("1GB", 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert load("--kv-cache-memory", text).kv_cache_memory == size


def test_auto_reads_zero() -> None:
    flags = ("--kv-cache-memory", "--kv-block-size", "--max-context", "--max-step-tokens", "--threads")
    settings = load(*[word for flag in flags for word in (flag, "auto")])
    assert (settings.kv_cache_memory, settings.kv_block_size, settings.max_context, settings.threads) == (0, 0, 0, 0)
    assert settings.max_step_tokens == load("--max-running", "2000").max_step_tokens == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-running", "0"),
        ("--max-running", "4097"),
        ("--max-running", "3.0"),
        ("--max-running", "many"),
        ("--max-queue", "-1"),
        ("--kv-block-size", "24"),
        ("--kv-block-size", "0"),
        ("--kv-cache-memory", "1"),
        ("--kv-cache-memory", "2 parsecs"),
        ("--kv-cache-memory", "-5GiB"),
        ("--kv-cache-memory", "1e99"),
        ("--default-temperature", "nan"),
        ("--default-temperature", "-0.1"),
        ("--default-temperature", "inf"),
        ("--default-temperature", "100.1"),
        ("--default-top-p", "0"),
        ("--default-top-p", "1.01"),
        ("--default-min-p", "1"),
        ("--default-top-k", "-1"),
        ("--default-top-k", str(2**31)),
        ("--device", "tpu"),
        ("--log-level", "INFO"),
        ("--listen", "localhost"),
        ("--listen", ":50051"),
        ("--listen", "::1:50051"),
        ("--listen", "127.0.0.1:65536"),
        ("--listen", "off"),
        ("--model-name", ""),
        ("--module", "nope"),
        ("--module", "my.py:"),
        ("--module", ":My"),
        ("--module", "my.py:not a class"),
        ("--drain-seconds", "nan"),
    ],
)
def test_refused_values_are_named_with_their_source_and_range(flag: str, value: str) -> None:
    message = refusal(f"{flag}={value}")
    assert message.startswith(f"command line {flag}: {flag[2:]} = {value!r} is not accepted; accepted: ")
    variable = "PELLUCID_" + flag[2:].replace("-", "_").upper()
    assert refusal(**{variable: value}).startswith(f"environment {variable}: {flag[2:]} = {value!r}")


@pytest.mark.parametrize("line", ["max-runing = 3", "max_running = 3", "nonsense = 3", "[serve]\nmax-running = 3"])
def test_unknown_toml_keys_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(line)
    message = refusal("--config", str(file))
    assert str(file) in message
    assert "unknown key" in message
    if "run" in line and "[" not in line:
        assert "did you mean max-running?" in message


@pytest.mark.parametrize("line", ["max-running = true", "max-running = 2.5", "default-temperature = nan", "dtype = 16"])
def test_toml_values_are_typed(tmp_path: Path, line: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(line)
    assert "is not accepted" in refusal("--config", str(file))


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in refusal("--config", str(tmp_path / "missing.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("max-running = = 3")
    assert "not valid TOML" in refusal("--config", str(broken))


def test_default_length_stays_below_the_limit() -> None:
    assert load("--max-new-tokens-limit", "100").default_max_new_tokens == 100
    flags = ("--max-new-tokens-limit", "100", "--default-max-new-tokens", "101")
    assert "max-new-tokens-limit = 100" in refusal(*flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tls-key", "k.pem"), "tls-key = 'k.pem' needs tls-certificate too"),
        (("--max-step-tokens", "31"), "max-step-tokens = 31 is not accepted; accepted: from max-running = 32 on"),
        (("--tls-certificate", "c.pem"), "tls-certificate = 'c.pem' needs tls-key too"),
        (("--tls-client-ca", "ca.pem"), "tls-client-ca = 'ca.pem' needs tls-certificate and tls-key too"),
    ],
)
def test_settings_that_do_not_go_together(flags: tuple[str, ...], message: str) -> None:
    assert refusal(*flags) == message


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(Settings):
        if field.name != "checkpoint":
            assert "--" + field.name.replace("_", "-") in text
        assert f"Default: {field.metadata['default_text']}" in text


def test_abbreviated_flags_are_not_guessed() -> None:
    with pytest.raises(SystemExit) as caught:
        load("--max-run", "3")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "loopback"), [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("[::]:1", False)]
)
def test_addresses(text: str, loopback: bool) -> None:
    address = load("--listen", text).listen
    assert str(address) == text
    assert address.is_loopback is loopback


def test_the_document_lists_every_setting() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "settings.md").read_text().splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if "`PELLUCID_" in line]
    listed = {row[1]: row for row in rows if len(row) == 5}
    for field in dataclasses.fields(Settings):
        variable = f"`PELLUCID_{field.name.upper()}`"
        _, _, default, accepted, meaning = listed.pop(variable)
        assert default == field.metadata["default_text"]
        assert accepted == field.metadata["option"].accepts
        assert meaning == field.metadata["help"]
    assert listed == {}


def test_a_module_may_stand_before_its_checkpoint() -> None:
    assert (load("my.py:My", "folder").module, load("my.py:My", "folder").checkpoint) == ("my.py:My", "folder")
    for words, says in ((("my.py:My",), "checkpoint folder is missing"), (("a", "b"), "'b' is one folder too many")):
        with pytest.raises(SettingsError, match=says):
            load(*words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-runing", "3"], "unrecognized arguments: --max-runing; did you mean --max-running?"),
        (["--dtyp=float32"], "unrecognized arguments: --dtyp=float32; did you mean --dtype?"),
        (["--colour"], "unrecognized arguments: --colour; --help tells what is accepted"),
        (["--threads"], "argument --threads: expected one argument; --help tells what is accepted"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as end:
        load(*words)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"pellucid serve: {says}\n"


def test_variables_that_are_no_settings_are_found() -> None:
    environ = {"PELLUCID_MAX_RUNNING": "4", "PELLUCID_MAX_RUNING": "4", "PELLUCID_SERVER": "x", "PATH": "y"}
    assert unknown_variables(environ) == ["PELLUCID_MAX_RUNING"]
