"""Every setting of `pellucid serve`: name, default, accepted values and help in one frozen dataclass.

In come the command line, the environment (PELLUCID_MAX_RUNNING for max-running) and a TOML file (max-running = 32); out
comes one `Settings`. The earlier source wins: command line, environment, TOML, default. A value that is not accepted,
or a key that does not exist, raises SettingsError with one line naming source, key, value and what is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pellucid_model.one_line_parser import OneLineParser
from pellucid_server.options import (
    Address,
    Choice,
    FileName,
    Integer,
    ListenAddress,
    NameInFile,
    Number,
    Option,
    Size,
    Switch,
    Text,
    size_text,
)
from pellucid_server.ranges import (
    FREQUENCY_PENALTY,
    MIN_P,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
)

ENVIRONMENT_PREFIX = "PELLUCID_"
BUNDLED = "the bundled demo"


class SettingsError(Exception):
    """A setting that is not accepted; one line for the operator."""


def _setting(default: object, option: Option, help: str, *, default_text: str | None = None) -> Any:
    return dataclasses.field(
        default=default, metadata={"option": option, "help": help, "default_text": default_text or _text(default)}
    )


def _text(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


@dataclass(frozen=True)
class Settings:
    """The settings in force. 0 in a field whose default is "auto" leaves the choice to the engine."""

    checkpoint: str | None = _setting(
        None,
        Text("a checkpoint folder or file"),
        "folder with config.json and model.safetensors, or a file: .gguf, .pt, .pth, .bin, .ckpt, .safetensors",
        default_text=BUNDLED,
    )
    module: str | None = _setting(
        None,
        NameInFile("FILE.py:CLASS"),
        "your own module, built from the checkpoint's config.json; the file is executed; see docs/add-your-model.md",
        default_text="none: what config.json names",
    )
    listen: Address = _setting(Address("127.0.0.1", 50051), ListenAddress(), "where to serve gRPC")  # noqa: RUF009
    metrics_listen: Address | None = _setting(  # noqa: RUF009
        Address("127.0.0.1", 9464), ListenAddress(may_be_off=True), "where to serve Prometheus metrics; off: nowhere"
    )
    device: str = _setting("auto", Choice(("auto", "cpu", "cuda")), "where the model runs")
    dtype: str = _setting(
        "auto",
        Choice(("auto", "float32", "bfloat16", "float16")),
        "number format of weights and KV cache; auto: bfloat16 where the device multiplies it, else float32",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = _setting(
        "auto",
        Choice(("auto", "float32", "bfloat16", "int8")),
        "number format of the KV cache; auto: that of dtype; int8: nearly twice the tokens in the same memory; see "
        "docs/kv-cache.md",
    )
    quantize: Literal["none", "int8", "int4"] = _setting(
        "none",
        Choice(("none", "int8", "int4")),
        "weights of linear layers as whole numbers: smaller and faster, less exact; see docs/performance.md",
    )
    kv_cache_memory: int = _setting(
        0,
        Size(2**10, 2**50, auto=True),
        "memory for the KV cache; auto: max-running full contexts, at most 40 % of what is free, 80 % on a GPU",
        default_text="auto",
    )
    kv_block_size: int = _setting(
        0,
        Integer(1, 4096, auto=True, power_of_two=True),
        "tokens per KV block; auto: the largest power of two up to 128 and a quarter of the context; 256 on CUDA",
        default_text="auto",
    )
    prefix_cache: bool = _setting(
        True, Switch(), "keep computed KV blocks for later requests that begin alike", default_text="on"
    )
    cuda_graphs: Literal["auto", "off"] = _setting(
        "auto", Choice(("auto", "off")), "decode in CUDA graphs where the model runs on CUDA; see docs/gpu.md"
    )
    speculative_tokens: int = _setting(
        0,
        Integer(0, 16),
        "tokens of a sequence that a step may guess from its own past, to the same output; 0 = off; "
        "see docs/speculative-decoding.md",
    )
    max_context: int = _setting(
        0, Integer(1, 2**24, auto=True), "context in tokens; auto: what the model was trained on", default_text="auto"
    )
    max_running: int = _setting(32, Integer(1, 4096), "requests that run at once")
    max_queue: int = _setting(256, Integer(0, 100_000), "requests that wait beside them; one more is refused")
    max_step_tokens: int = _setting(
        0,
        Integer(1, 2**20, auto=True),
        "tokens that one step computes at the most, not below --max-running; auto: 512, in bfloat16 on a CPU with AMX "
        "1024, for models of under 134 million parameters up to 2048, or --max-running where that is more",
        default_text="auto",
    )
    threads: int = _setting(
        0, Integer(1, 1024, auto=True), "threads of the engine; auto: the cores it may use", default_text="auto"
    )
    default_max_new_tokens: int = _setting(256, Integer(1, 2**31 - 1), "max_new_tokens of requests that set none")
    max_new_tokens_limit: int = _setting(16384, Integer(1, 2**31 - 1), "largest max_new_tokens a request may ask for")
    context_overflow: str = _setting(
        "auto",
        Choice(("auto", "reject", "truncate", "roll", "reencode")),
        "what happens when prompt and output pass the context, where a request does not say; see docs/windows.md",
    )
    default_temperature: float | None = _setting(
        None, TEMPERATURE, "temperature of requests that set none", default_text="the model's, else 1"
    )
    default_top_k: int | None = _setting(
        None, TOP_K, "top_k of requests that set none; 0 = off", default_text="the model's, else 0"
    )
    default_top_p: float | None = _setting(
        None, TOP_P, "top_p of requests that set none; 1 = off", default_text="the model's, else 1"
    )
    default_min_p: float | None = _setting(
        None, MIN_P, "min_p of requests that set none; 0 = off", default_text="the model's, else 0"
    )
    default_typical_p: float | None = _setting(
        None, TYPICAL_P, "typical_p of requests that set none; 1 = off", default_text="the model's, else 1"
    )
    default_repetition_penalty: float | None = _setting(
        None,
        REPETITION_PENALTY,
        "repetition_penalty of requests that set none; 1 = off",
        default_text="the model's, else 1",
    )
    default_presence_penalty: float | None = _setting(
        None,
        PRESENCE_PENALTY,
        "presence_penalty of requests that set none; 0 = off",
        default_text="the model's, else 0",
    )
    default_frequency_penalty: float | None = _setting(
        None,
        FREQUENCY_PENALTY,
        "frequency_penalty of requests that set none; 0 = off",
        default_text="the model's, else 0",
    )
    max_logprobs: int = _setting(20, Integer(0, 1024), "largest top_count of log-probabilities a request may ask for")
    model_name: str | None = _setting(
        None, Text("a name"), "name under which the model is served", default_text="the folder's name"
    )
    tls_certificate: str | None = _setting(
        None,
        FileName("a PEM file"),
        "serve gRPC over TLS with this certificate, its issuers below it; read again when it changes",
        default_text="none: no TLS",
    )
    tls_key: str | None = _setting(
        None, FileName("a PEM file"), "private key of the certificate, without a passphrase", default_text="none"
    )
    tls_client_ca: str | None = _setting(
        None,
        FileName("a PEM file"),
        "let in only clients with a certificate from one of these authorities",
        default_text="none: no client certificates",
    )
    auth_token_file: str | None = _setting(
        None,
        FileName("a file with one token a line"),
        "let in only callers with one of these bearer tokens; read again when it changes",
        default_text="none: no tokens",
    )
    drain_seconds: float = _setting(30.0, Number(0, 86400), "on SIGTERM, how long running requests may go on")
    engine_timeout_seconds: float = _setting(
        60.0, Number(0, 86400), "an engine that is silent for so long is killed and started again; 0 = off"
    )
    slow_reader_seconds: float = _setting(
        60.0, Number(0, 86400), "how long a stream may go unread while more than slow-reader-bytes wait"
    )
    slow_reader_bytes: int = _setting(
        2**20, Size(0, 2**40), "output that may wait for a slow reader for ever", default_text="1MiB"
    )
    log_level: str = _setting("info", Choice(("debug", "info", "warning", "error")), "least level that is logged")
    log_format: str = _setting("text", Choice(("text", "json")), "one line of text or one JSON object per event")


_OTHER_VARIABLES = (
    *("CONFIG", "COMMIT", "KERNELS"),
    *("SERVER", "TLS", "CA_CERTIFICATE", "CERTIFICATE", "KEY", "TOKEN_FILE"),
)


def load_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from all sources. Raises SettingsError; argparse itself exits with 2 on flags it does not know."""
    environ = os.environ if environ is None else environ
    given = _with_positionals(vars(_parser().parse_args(argv)))
    config = given.pop("config", None)
    from_environment = {name: environ[_variable(name)] for name in _fields() if _variable(name) in environ}
    file = config if config is not None else environ.get(ENVIRONMENT_PREFIX + "CONFIG")
    values = _from_toml(Path(file)) if file else {}
    values |= {name: _parse(name, text, f"environment {_variable(name)}") for name, text in from_environment.items()}
    values |= {name: _parse(name, text, f"command line {_flag(name)}") for name, text in given.items()}
    settings = Settings(**values)
    if "default_max_new_tokens" not in values:
        default = min(settings.default_max_new_tokens, settings.max_new_tokens_limit)
        settings = dataclasses.replace(settings, default_max_new_tokens=default)
    if not settings.default_max_new_tokens <= settings.max_new_tokens_limit:
        raise SettingsError(
            f"default-max-new-tokens = {settings.default_max_new_tokens} is above "
            f"max-new-tokens-limit = {settings.max_new_tokens_limit}; lower the first or raise the second"
        )
    _check_tls(settings)
    _check_step(settings)
    return settings


def _with_positionals(given: dict[str, Any]) -> dict[str, Any]:
    """`[FILE.py:CLASS] [CHECKPOINT]` as the two settings they are."""
    words: list[str] = given.pop("checkpoint", [])
    if words and ".py:" in words[0]:
        given["module"] = words.pop(0)
        if not words:
            raise SettingsError(f"command line: the checkpoint folder is missing after {given['module']}")
    if len(words) > 1:
        raise SettingsError(f"command line: {words[1]!r} is one folder too many; accepted: [FILE.py:CLASS] CHECKPOINT")
    return given | ({"checkpoint": words[0]} if words else {})


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like settings of ours and are none; those of the client and of the kernels aside."""
    known = {_variable(name) for name in _fields()} | {ENVIRONMENT_PREFIX + name for name in _OTHER_VARIABLES}
    return sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX) and name not in known)


def _check_tls(settings: Settings) -> None:
    """Raises SettingsError for a part of TLS without the others: it must never come to none at all."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if (certificate is None) != (key is None):
        given, missing = ("tls-key", "tls-certificate") if certificate is None else ("tls-certificate", "tls-key")
        raise SettingsError(f"{given} = {certificate or key!r} needs {missing} too")
    if settings.tls_client_ca is not None and certificate is None:
        raise SettingsError(f"tls-client-ca = {settings.tls_client_ca!r} needs tls-certificate and tls-key too")


def _check_step(settings: Settings) -> None:
    """Raises SettingsError where a step could not take every request that runs one token further."""
    most, running = settings.max_step_tokens, settings.max_running
    if 0 < most < running:
        raise SettingsError(f"max-step-tokens = {most} is not accepted; accepted: from max-running = {running} on")


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(Settings)}


def _key(name: str) -> str:
    return name.replace("_", "-")


def _flag(name: str) -> str:
    return "CHECKPOINT" if name == "checkpoint" else "--" + _key(name)


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _parse(name: str, value: object, source: str) -> object:
    option: Option = _fields()[name].metadata["option"]
    try:
        return option.parse(value)
    except ValueError:
        raise SettingsError(f"{source}: {_key(name)} = {value!r} is not accepted; accepted: {option.accepts}") from None


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}; name a readable TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: not valid TOML: {error}") from None
    names = {_key(name): name for name in _fields()}
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key.replace("_", "-"), names, n=1)
            hint = f"did you mean {near[0]}?" if near else "accepted: " + ", ".join(names)
            raise SettingsError(f"{path}: unknown key {key!r} = {table[key]!r}; {hint}")
    return {names[key]: _parse(names[key], value, str(path)) for key, value in table.items()}


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="pellucid serve",
        description="Serve a checkpoint over gRPC.",
        epilog="Each option can also be given as an environment variable (--max-running: PELLUCID_MAX_RUNNING) or in a "
        "TOML file (max-running = 32). The command line wins over the environment, and that over the file. "
        "Sizes: " + size_text(2**31) + ", 512MiB or 1e9.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in _fields().items():
        option: Option = field.metadata["option"]
        words = f"{field.metadata['help']}. Accepted: {option.accepts}. Default: {field.metadata['default_text']}"
        words = words.replace("%", "%%")
        if name == "checkpoint":
            words = f"[FILE.py:CLASS] CHECKPOINT: {words}. FILE.py:CLASS before it is the same as --module"
            parser.add_argument(name, nargs="*", metavar="CHECKPOINT", help=words)
        else:
            parser.add_argument(_flag(name), metavar=_metavar(option), help=words)
    parser.add_argument("--config", metavar="FILE.toml", help="TOML file of settings. Default: none")
    return parser


def _metavar(option: Option) -> str:
    match option:
        case Choice():
            return "|".join(option.words)
        case Switch():
            return "on|off"
        case ListenAddress():
            return "HOST:PORT"
        case FileName():
            return "FILE"
        case Size():
            return "SIZE"
        case Integer():
            return "N"
        case Number():
            return "X"
        case _:
            return "NAME"
