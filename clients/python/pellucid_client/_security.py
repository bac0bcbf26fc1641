"""TLS and tokens: from what a caller names to gRPC's credentials and metadata."""

from __future__ import annotations

import os
import re
from pathlib import Path

import grpc

_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")  # RFC 6750, section 2.1.


def channel_credentials(
    credentials: grpc.ChannelCredentials | None,
    *,
    tls: bool,
    ca_certificate: str | os.PathLike[str] | None,
    certificate: str | os.PathLike[str] | None,
    key: str | os.PathLike[str] | None,
) -> grpc.ChannelCredentials | None:
    """None: plain text. Naming a file asks for TLS too. Raises ValueError for what does not go together or cannot
    be read.
    """
    named = (ca_certificate, certificate, key)
    if credentials is not None:
        if tls or any(named):
            raise ValueError("credentials: leave out tls, ca_certificate, certificate and key, or credentials itself")
        return credentials
    if (certificate is None) != (key is None):
        raise ValueError("certificate, key: a client certificate needs both")
    if not tls and not any(named):
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_content("ca_certificate", ca_certificate),
        private_key=_content("key", key),
        certificate_chain=_content("certificate", certificate),
    )


def call_metadata(metadata: tuple[tuple[str, str], ...], token: str | None) -> tuple[tuple[str, str], ...]:
    """What goes with every call. Raises ValueError for what cannot be a bearer token, without showing it."""
    if token is None:
        return metadata
    if _TOKEN.fullmatch(token) is None:
        raise ValueError("token: accepted are letters, digits and -._~+/, without blanks and line breaks")
    return (*metadata, ("authorization", f"Bearer {token}"))


def read_token(path: str) -> str:
    """The token in a file: its first line that is neither blank nor a comment. Raises ValueError."""
    for line in (_content("token_file", path) or b"").decode(errors="replace").splitlines():
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[0]
    raise ValueError(f"token_file: {path} holds no token")


def _content(name: str, path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: {path}: {error.strerror}") from None
