"""What protects the gRPC port, from the settings: TLS, client certificates, bearer tokens; and what does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from pellucid_server.settings import Settings
from pellucid_server.tls import Certificates, TlsFiles
from pellucid_server.tokens import TokenFile


@dataclass(frozen=True)
class Security:
    """None: not asked for."""

    certificates: Certificates | None
    tokens: TokenFile | None

    def credentials(self) -> grpc.ServerCredentials | None:
        return None if self.certificates is None else self.certificates.credentials()


def read_security(settings: Settings) -> Security:
    """Raises StartError where a file that was asked for does not work: the server is never less safe than told."""
    certificates = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        certificates = Certificates(
            TlsFiles(
                Path(settings.tls_certificate),
                Path(settings.tls_key),
                None if settings.tls_client_ca is None else Path(settings.tls_client_ca),
            )
        )
    tokens = None if settings.auth_token_file is None else TokenFile(Path(settings.auth_token_file))
    return Security(certificates, tokens)


def protection(settings: Settings) -> str:
    """For the summary."""
    parts = (
        ("TLS", settings.tls_certificate),
        ("client certificates", settings.tls_client_ca),
        ("tokens", settings.auth_token_file),
    )
    return ", ".join(name for name, file in parts if file is not None) or "none"


def exposure(settings: Settings) -> list[str]:
    """Warnings about ports that other machines reach."""
    warnings = []
    has_tls = settings.tls_certificate is not None
    asks_who = settings.tls_client_ca is not None or settings.auth_token_file is not None
    if not settings.listen.is_loopback and not (has_tls and asks_who):
        if not has_tls and not asks_who:
            lack = "without TLS and without tokens: anybody who reaches it can use it, and listen on the way"
        elif not has_tls:
            lack = "without TLS: tokens and texts can be read on the way"
        else:
            lack = "without tokens or client certificates: anybody who reaches it can use it"
        warnings.append(f"--listen {settings.listen} is open to other machines, {lack}; see docs/security.md")
    if settings.metrics_listen is not None and not settings.metrics_listen.is_loopback:
        warnings.append(
            f"--metrics-listen {settings.metrics_listen} is open to other machines, without TLS and without a password"
        )
    return warnings
