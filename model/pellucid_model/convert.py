"""`pellucid convert SOURCE OUT`: any checkpoint that can be read, as a folder that serves as it is.

In: a folder, a .gguf, or a file by torch.save or safetensors; with --module the user's own class says what its tensors
are. Out: config.json, model.safetensors, and the tokenizer's files where there are any. Loading is strict, and pickles
are read for tensors and plain values alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pellucid_model.checkpoint_kind import companions
from pellucid_model.errors import CheckpointError, ModelError
from pellucid_model.gguf import is_gguf
from pellucid_model.one_line_parser import OneLineParser

if TYPE_CHECKING:
    from torch import Tensor

_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt"),
    *("added_tokens.json", "generation_config.json"),
)
"""What goes along with the weights as it is."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Conversion:
    """What is asked for."""

    source: Path
    out: Path
    module: str = ""
    """ "FILE.py:CLASS" of the user's own module; "": a known architecture."""
    tokenizer: Path | None = None
    """A tokenizer.json, a folder with one, or nanoGPT's meta.pkl; None: what lies with the source."""
    dtype: str | None = None
    """None: as stored."""


def convert_command(argv: list[str]) -> int:
    """The entry point; argv without the words `pellucid convert`. 0 done, 1 it cannot be converted, 2 usage."""
    try:
        asked = _parse(argv)
        print(convert(asked))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except ModelError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'files'}: {error.strerror or error}")
    return 0


def convert(asked: Conversion) -> str:
    """Writes the folder -> one line that says what is in it. Raises ModelError and OSError."""
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        raise CheckpointError(f"{asked.out} exists already; name a folder that does not exist or is empty")
    tokenizer_files = _tokenizer_files(asked)
    what = _write_module(asked) if asked.module else _write_known(asked)
    for name, content in tokenizer_files.items():
        (asked.out / name).write_bytes(content)
    _keep_end_tokens(asked)
    copied = (
        f"with {', '.join(sorted(tokenizer_files))}" if tokenizer_files else "without a tokenizer: serves token ids"
    )
    return f"{asked.out}: {what}; {copied}"


def _write_known(asked: Conversion) -> str:
    """A checkpoint that says by itself what it is becomes one of the configurable decoder."""
    import torch

    from pellucid_model.checkpoint import save_checkpoint
    from pellucid_model.decoder import Decoder
    from pellucid_model.servable import load_servable

    servable = load_servable(asked.source)
    if not isinstance(servable.module, Decoder):
        raise CheckpointError(f"{asked.source} holds no decoder; name your module with --module")
    save_checkpoint(asked.out, servable.module, None if asked.dtype is None else getattr(torch, asked.dtype))
    parameters = sum(parameter.numel() for parameter in servable.module.parameters())
    return f"{servable.architecture}, {parameters:,} parameters"


def _write_module(asked: Conversion) -> str:
    """The user's own module keeps its names and its config, without the prefixes of wrappers."""
    import torch
    from safetensors.torch import save_file

    from pellucid_model.checkpoint import write_json
    from pellucid_model.servable import load_module
    from pellucid_model.user_module import matched, without_wrappers

    module, saved = load_module(asked.source, asked.module)
    expected = module.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = {}
    met: set[int] = set()
    for name, tensor in matched(asked.source, module, saved.tensors).items():
        if id(expected[name]) in met:  # tied: once is enough
            continue
        met.add(id(expected[name]))
        cast = asked.dtype is not None and tensor.is_floating_point()
        stored = tensor.to(getattr(torch, str(asked.dtype))) if cast else tensor
        tensors[without_wrappers(name)] = stored.clone().contiguous()
    asked.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, asked.out / "model.safetensors", metadata={"format": "pt"})
    (asked.out / "model.safetensors").chmod(0o644)
    write_json(asked.out / "config.json", saved.settings)
    return f"{asked.module.rpartition(':')[2]}, {len(tensors)} tensors"


def _tokenizer_files(asked: Conversion) -> dict[str, bytes]:
    """Contents by name, of what --tokenizer names or what lies with the source."""
    given = asked.tokenizer
    if given is not None and given.suffix == ".pkl":
        from pellucid_model.plain_pickle import read_characters
        from pellucid_model.tokenizers.base import TokenizerError
        from pellucid_model.tokenizers.character import CharacterTokenizer

        try:
            return {"tokenizer.json": CharacterTokenizer(read_characters(given), {}).to_json()}
        except TokenizerError as error:
            raise CheckpointError(f"{given}: {error}") from None
    if given is not None and given.is_file():
        return {"tokenizer.json": given.read_bytes()}
    if given is not None and not given.is_dir():
        raise CheckpointError(f"--tokenizer {given}: there is no such file or folder")
    if given is None and is_gguf(asked.source):
        from pellucid_model.tokenizers.from_gguf import read_gguf_tokenizer

        files = read_gguf_tokenizer(asked.source)
        return (
            {}
            if files is None
            else {
                "tokenizer.json": files.to_json(),
                "tokenizer_config.json": json.dumps(files.config, ensure_ascii=False, indent=2).encode(),
            }
        )
    folder = companions(asked.source) if given is None else given
    return {name: (folder / name).read_bytes() for name in _COPIED if (folder / name).is_file()}


def _keep_end_tokens(asked: Conversion) -> None:
    """End ids that the source keeps in config.json or GGUF metadata move to generation_config.json."""
    from pellucid_model.checkpoint import write_json
    from pellucid_model.tokenizers.from_gguf import gguf_end_ids
    from pellucid_model.weight_files import read_json

    file, config = asked.out / "generation_config.json", companions(asked.source) / "config.json"
    values: dict[str, Any] = read_json(file) if file.exists() else {}
    if is_gguf(asked.source):
        from pellucid_model.gguf import read_header

        ids: Any = list(gguf_end_ids(read_header(asked.source).metadata))
    else:
        ids = read_json(config).get("eos_token_id") if config.exists() else None
    if ids not in (None, []) and values.get("eos_token_id") is None:
        write_json(file, {**values, "eos_token_id": ids})


def _parse(argv: Sequence[str]) -> Conversion:
    parser = OneLineParser(
        prog="pellucid convert", description="Turns a checkpoint into a folder that serves as it is."
    )
    parser.add_argument("source", type=Path, help="folder, .gguf, or file by torch.save or safetensors")
    parser.add_argument("out", type=Path, help="folder to write; it must not hold anything yet")
    parser.add_argument("--module", default="", metavar="FILE.py:CLASS", help="your own module; its file is executed")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json, a folder with one, or nanoGPT's meta.pkl"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the stored weights (default: as they are)")
    asked = parser.parse_args(argv)
    return Conversion(asked.source, asked.out, asked.module, asked.tokenizer, asked.dtype)


def _fail(message: str) -> int:
    print(f"pellucid convert: {message}", file=sys.stderr)
    return 1
