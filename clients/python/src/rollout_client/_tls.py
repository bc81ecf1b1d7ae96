"""TLS of the client's connections, and why a connection fails."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from .errors import InvalidArgument, Misdirected, RolloutError, Unavailable

ADDRESS = re.compile(
    r"(?:dns:(?://[^/]*/)?|ipv[46]:)?(?P<authority>(?:\[(?P<v6>[^]]+)]|(?P<host>[^:/]+)):(?P<port>\d{1,5}))"
)
"""`host:port`, as gRPC takes it too."""

_PROBE_SECONDS = 2.0
# Parts of the messages of the TLS libraries, in capitals, and their meaning.
_MEANINGS = [
    (
        ("WRONG_VERSION_NUMBER", "RECORD_LAYER", "HTTP_REQUEST"),
        "the server does not speak TLS on this port; leave tls= out",
    ),
    (
        ("CERTIFICATE_REQUIRED", "ALERT_HANDSHAKE_FAILURE"),
        "the server asks for a certificate of the client; give cert= and key= of tls=",
    ),
    (
        ("UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_DECRYPT"),
        "the server refuses this client's certificate: its --tls-client-ca has not signed it",
    ),
    (("ALERT_CERTIFICATE_EXPIRED",), "the server refuses this client's certificate: it has expired"),
    (("APPLICATION_PROTOCOL",), "the server does not speak gRPC on this port"),
]
_SPEAKS_TLS = "the server speaks TLS; give tls=True, or the authority of its certificate as tls={'ca': path}"
_IS_HTTP = "a port of HTTP; name that of gRPC, which is 50051 unless the server was given another"
# Messages of gRPC for connections that ended without an answer, perhaps because of TLS or a certificate.
_UNEXPLAINED = re.compile(
    "handshake|closed|reset|eof|stream removed|goaway|protocol error|verification|corrupted|http", re.IGNORECASE
)


@dataclass(frozen=True)
class Tls:
    """TLS settings for a server with `--tls-cert`. Files are PEM, and are read when the client is created."""

    ca: str | os.PathLike[str] | None = None
    """Authorities that may have signed the server's certificate; None is those of the system."""
    cert: str | os.PathLike[str] | None = None
    """This client's certificate chain, for a server with `--tls-client-ca`."""
    key: str | os.PathLike[str] | None = None
    """The private key of `cert`."""
    server_name: str | None = None
    """The name in the server's certificate; None is the host of the address."""


class TlsFiles:
    """The files of a `Tls`, read."""

    def __init__(self, tls: Tls) -> None:
        """Reads them.

        Raises:
            InvalidArgument: a file cannot be read, or has no certificate or key; the message starts with its field.
        """
        if (tls.cert is None) != (tls.key is None):
            raise InvalidArgument("tls: a certificate needs its key; give both cert= and key=, or none")
        self.server_name = tls.server_name
        self._cert = None if tls.cert is None else _read("cert", tls.cert)
        self._key = None if tls.key is None else _read("key", tls.key)
        if tls.ca is None:
            self.context = ssl.create_default_context()
            self._ca = _system_authorities()
        else:
            self._ca = _read("ca", tls.ca)
            if not self._ca:  # it would mean the system's authorities
                raise InvalidArgument(f"tls.ca: {tls.ca} has no certificate in PEM: it is empty")
            try:
                self.context = ssl.create_default_context(cadata=self._ca.decode())
            except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
                raise InvalidArgument(f"tls.ca: {tls.ca} has no certificate in PEM: {error}") from None
        self.context.set_alpn_protocols(["h2"])
        if tls.cert is not None:
            try:
                self.context.load_cert_chain(tls.cert, tls.key, password=_no_password)
            except (ssl.SSLError, OSError, ValueError) as error:
                raise InvalidArgument(
                    f"tls.cert, tls.key: {tls.cert} and {tls.key} are not a certificate and its key in PEM: {error}"
                ) from None

    def credentials(self) -> grpc.ChannelCredentials:
        """For a channel of gRPC."""
        return grpc.ssl_channel_credentials(self._ca, self._key, self._cert)

    def channel_options(self) -> list[tuple[str, Any]]:
        """Further options of such a channel."""
        return [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]

    def wrap(self, connected: socket.socket, host: str) -> ssl.SSLSocket:
        """Begins TLS on a connection to `host`.

        Raises:
            OSError: it failed; `reason` has the cause.
        """
        return self.context.wrap_socket(connected, server_hostname=self.server_name or host)


TlsInput = bool | Tls | Mapping[str, Any] | TlsFiles | None
"""The argument `tls`: True is TLS with the system's authorities, a mapping has fields of `Tls`, None is plain text."""


def tls_files(tls: TlsInput) -> TlsFiles | None:
    """The files of a client's argument `tls`; None for plain text.

    Raises:
        InvalidArgument: the argument has another type, or a file is invalid.
    """
    if tls is None or tls is False:
        return None
    if isinstance(tls, TlsFiles):
        return tls
    if tls is True:
        return TlsFiles(Tls())
    if isinstance(tls, Mapping):
        known = [field.name for field in fields(Tls)]
        unknown = sorted(set(tls) - set(known))
        if unknown:
            raise InvalidArgument(f"tls: unknown {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        tls = Tls(**tls)
    if not isinstance(tls, Tls):
        raise InvalidArgument(f"tls: expected True, Tls(...) or a dict, got {type(tls).__name__}")
    return TlsFiles(tls)


def failure(error: OSError, address: str) -> Unavailable | None:
    """The error of a failed TLS handshake: `Misdirected` if a retry would fail too. None for other failures."""
    meaning = _meaning(error)
    if meaning is not None:
        return Misdirected(f"{address}: {meaning}")
    return Unavailable(f"{address}: TLS: {error}") if isinstance(error, ssl.SSLError) else None


def _meaning(error: OSError) -> str | None:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message.rstrip(".")
        hint = ""
        if "issuer" in why or "self" in why:
            hint = "; give the authority that signed it as ca= of tls="
        elif "match" in why or "valid for" in why:
            hint = "; reach it by a name that is in its certificate, or give that as server_name= of tls="
        return f"the server's certificate is refused: {why}{hint}"
    if not isinstance(error, ssl.SSLError):
        return None
    said = f"{error.reason or ''} {error}".upper().replace(" ", "_")
    return next((meaning for parts, meaning in _MEANINGS if any(part in said for part in parts)), None)


def explained(error: RolloutError, address: str, tls: TlsFiles | None) -> RolloutError:
    """The error of a call, or `Misdirected` with a better message if something else listens at the address.

    gRPC only reports that the connection is closed, so this probes the address with another connection.
    """
    found = ADDRESS.fullmatch(address)
    if not isinstance(error, Unavailable) or found is None or not _UNEXPLAINED.search(str(error)):
        return error
    host, port = found["v6"] or found["host"], int(found["port"])
    if tls is not None:
        return _with_tls(address, host, port, tls) or error
    why = _IS_HTTP if _speaks_http(host, port) else _SPEAKS_TLS if _speaks_tls(host, port) else None
    return error if why is None else Misdirected(f"{address}: {why}")


def _with_tls(address: str, host: str, port: int, tls: TlsFiles) -> Unavailable | None:
    try:
        connected = socket.create_connection((host, port), _PROBE_SECONDS)
        with connected, tls.wrap(connected, host) as wrapped:
            # In TLS 1.3 the server checks the client's certificate after the client's part of the handshake.
            wrapped.recv(1)
    except OSError as error:
        return failure(error, address)
    return None


def _speaks_http(host: str, port: int) -> bool:
    """Whether the address answers HTTP/1, as a gRPC port does not."""
    with suppress(OSError), socket.create_connection((host, port), _PROBE_SECONDS) as connected:
        connected.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return connected.recv(8).startswith(b"HTTP/1.")
    return False


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        connected = socket.create_connection((host, port), _PROBE_SECONDS)
        with connected, context.wrap_socket(connected):
            return True
    except ssl.SSLError as error:
        # A TLS alert shows that the server speaks TLS.
        return "ALERT" in (error.reason or "").upper()
    except OSError:
        return False


def _read(field: str, path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, TypeError) as error:
        raise InvalidArgument(f"tls.{field}: {error}") from None


def _system_authorities() -> bytes | None:
    """The authorities that Python trusts, in PEM; None lets gRPC use its own list."""
    file = ssl.get_default_verify_paths().cafile
    return None if file is None else Path(file).read_bytes()


def _no_password() -> str:
    """Raises an error instead of asking on the terminal."""
    raise ValueError("the key has a passphrase; give it without one")
