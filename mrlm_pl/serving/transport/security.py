"""Authentication of callers: tokens and TLS. Serving beyond this machine requires a token."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from grpc.experimental import insecure_channel_credentials

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import is_loopback

TOKEN_VARIABLE = "MRLM_TOKEN"
HEADER = "authorization"
"""Metadata that holds the token of a call."""


@dataclass(frozen=True)
class Identity:
    """Keys of one end of a connection, as PEM files.

    Args:
        certificate: certificate of this end.
        key: private key of the certificate.
        authority: certificates that sign the other end's; a server with an authority requires a certificate of every
            client.
    """

    certificate: str | None = None
    key: str | None = None
    authority: str | None = None

    @property
    def empty(self) -> bool:
        """True if no file is given: the connection is not encrypted."""
        return not (self.certificate or self.key or self.authority)

    def for_server(self) -> grpc.ServerCredentials:
        """Credentials of a server; without files the connection is plain.

        Raises:
            ConfigurationError: a file is missing or no such file, or the certificate or its key is not given.
        """
        if self.empty:
            return grpc.insecure_server_credentials()
        if not (self.certificate and self.key):
            raise ConfigurationError("tls: a server needs both tls_certificate and tls_key")
        pair = (_pem(self.key, "tls_key"), _pem(self.certificate, "tls_certificate"))
        authority = _pem(self.authority, "tls_authority")
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)

    def for_client(self) -> grpc.ChannelCredentials:
        """Credentials of a client; without files the connection is plain.

        Raises:
            ConfigurationError: a file is missing or no such file, or one of certificate and key is not given.
        """
        if self.empty:
            return insecure_channel_credentials()
        if bool(self.certificate) != bool(self.key):
            raise ConfigurationError("tls: give both tls_certificate and tls_key, or neither")
        return grpc.ssl_channel_credentials(
            _pem(self.authority, "tls_authority"), _pem(self.key, "tls_key"), _pem(self.certificate, "tls_certificate")
        )


PLAIN = Identity()
"""No TLS."""


def identity_of_environment() -> Identity:
    """Return the files that ``MRLM_TLS_CERTIFICATE``, ``MRLM_TLS_KEY`` and ``MRLM_TLS_AUTHORITY`` name, if any."""
    return Identity(*(os.environ.get(f"MRLM_TLS_{part}") for part in ("CERTIFICATE", "KEY", "AUTHORITY")))


def read_token(path: str | None) -> str | None:
    """Return the token in a file, else that of the environment variable ``MRLM_TOKEN``, else None.

    Raises:
        ConfigurationError: the file is missing or empty, or the token has other characters than printable ASCII.
    """
    if path is None:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
    else:
        source, token = f"token_file: {path!r}", _file(path, "token_file").decode(errors="replace").strip()
        if not token:
            raise ConfigurationError(f"{source} is empty")
    if not (token.isascii() and token.isprintable()):  # gRPC sends no others as metadata
        raise ConfigurationError(f"{source}: the token may have printable ASCII characters only; use another")
    return token or None


def carries_token(header: str, token: str) -> bool:
    """Return whether the header ``authorization`` of a call has the token, in a time that says nothing of it."""
    return hmac.compare_digest(header.encode(errors="replace"), f"Bearer {token}".encode())


def is_foreign(origin: str | None) -> bool:
    """Return whether a header ``Origin`` is of another machine's page, which a browser here may let send requests.

    >>> is_foreign(None), is_foreign("http://localhost:8000"), is_foreign("https://evil.example"), is_foreign("null")
    (False, False, True, True)
    """
    try:
        return origin is not None and not is_loopback(urlsplit(origin).hostname or "")
    except ValueError:  # brackets without an address
        return True


def _file(path: str, name: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{name}: {path!r} cannot be read: {error.strerror}") from error


def _pem(path: str | None, name: str) -> bytes | None:
    """Return the content of a file with a key or certificates; gRPC would only fail later, at the connection."""
    if not path:
        return None
    content = _file(path, name)
    label = "PRIVATE KEY" if name == "tls_key" else "CERTIFICATE"
    if f"{label}-----".encode() not in content:
        raise ConfigurationError(f"{name}: {path!r} is no PEM file with a {label.lower()}")
    return content
