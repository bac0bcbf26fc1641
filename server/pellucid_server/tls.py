"""The TLS files of the gRPC port: held against each other at the start, and again whenever they change.

In come the names of PEM files; out go gRPC's server credentials. Before every handshake gRPC asks for what is new, so
that a renewed certificate needs no restart. Files that do not work stop the start; later they leave what worked before
in place and are told in the log.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from pellucid_server.errors import StartError
from pellucid_server.logs import log

Versions = list[tuple[int, int, int] | None]


@dataclass(frozen=True)
class TlsFiles:
    """`client_ca`: authorities of client certificates, which are then required."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class Certificates:
    """What handshakes use. Raises StartError where the files do not work."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._versions = self._current_versions()
        self._first = _read(files)

    def credentials(self) -> grpc.ServerCredentials:
        """For a server's secure port."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._newer,  # type: ignore[arg-type] # None is documented: it means "no change".
            require_client_authentication=self._files.client_ca is not None,
        )

    def _newer(self) -> grpc.ServerCertificateConfiguration | None:
        """What has changed since the last handshake; None: nothing that works. Called on a thread of gRPC's."""
        versions = self._current_versions()
        if versions == self._versions:
            return None
        try:
            configuration = _read(self._files)
        except StartError as error:
            self._versions = versions
            log(logging.ERROR, f"{error}; the TLS files read before stay in use")
            return None
        # Files that were replaced while they were read are read again at the next handshake.
        if versions != self._current_versions():
            return None
        self._versions = versions
        log(logging.INFO, "the TLS files have changed and are in use")
        return configuration

    def _current_versions(self) -> Versions:
        files = self._files
        return [version(file) for file in (files.certificate, files.key, files.client_ca) if file is not None]


def version(file: Path) -> tuple[int, int, int] | None:
    """What tells one state of a file from another; None where it is missing."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    certificate = _content("--tls-certificate", files.certificate)
    key = _content("--tls-key", files.key)
    client_ca = None if files.client_ca is None else _content("--tls-client-ca", files.client_ca)
    _check(files)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)


def _content(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise StartError(f"{flag} {file}: {error.strerror}; name a readable PEM file") from None


def _check(files: TlsFiles) -> None:
    """gRPC would find out at the first handshake only. Raises StartError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except OSError:
            raise StartError(f"--tls-client-ca {files.client_ca}: holds no PEM certificate") from None
    try:
        # An empty passphrase, so that a key with one is refused and not asked for on the terminal.
        context.load_cert_chain(files.certificate, files.key, password="")
    except OSError as error:
        raise StartError(
            f"--tls-certificate {files.certificate} and --tls-key {files.key}: {_reason(error)}; name a PEM "
            "certificate and its private key without a passphrase"
        ) from None


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return "they cannot be read as such"
