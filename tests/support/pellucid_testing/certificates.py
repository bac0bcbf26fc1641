"""Certificate authorities and certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pair:
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; its own stands in `certificate`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        own = Pair(folder / f"{name}.pem", folder / f"{name}.key")
        _openssl("req", "-x509", "-nodes", "-days", "2", "-subj", f"/CN={name}", *_new_key(own))
        self._own = own

    @property
    def certificate(self) -> Path:
        return self._own.certificate

    def issue(self, name: str, file: str = "") -> Pair:
        """A certificate for the host or person `name`, for 127.0.0.1 too; the files are called `file` or `name`."""
        pair = Pair(self._folder / f"{file or name}.pem", self._folder / f"{file or name}.key")
        request, extensions = self._folder / "request", self._folder / "extensions"
        extensions.write_text(f"subjectAltName=DNS:{name},IP:127.0.0.1\n")
        _openssl("req", "-new", "-nodes", "-subj", f"/CN={name}", *_new_key(Pair(request, pair.key)))
        _openssl(
            *("x509", "-req", "-in", request, "-out", pair.certificate, "-days", "2", "-CAcreateserial"),
            *("-CA", self._own.certificate, "-CAkey", self._own.key, "-extfile", extensions),
        )
        return pair


def _new_key(pair: Pair) -> tuple[str | Path, ...]:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    return (*curve, "-keyout", pair.key, "-out", pair.certificate)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
