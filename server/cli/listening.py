"""The socket that the server listens on, at an address or a path. It is opened before anything is loaded."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
import stat
from contextlib import suppress
from pathlib import Path

from headway.engine import ConfigError
from headway.server.base.config import ServerConfig
from headway.server.http.origins import AllowedOrigins, local_origins

MAX_DESCRIPTORS = 1 << 16
SEND_BUFFER_BYTES = (
    1 << 16
)  # of a connection; otherwise it grows to megabytes for a client that stops reading
RESERVED_DESCRIPTORS = 128  # for the engine's socket and pipes, for files, and a quarter for polite refusals


def listen(config: ServerConfig) -> socket.socket:
    """Returns the listening socket. Raises ConfigError, at once for a port in use."""
    if config.unix_socket is not None:
        return _listen_at(Path(config.unix_socket))
    return _listen_on(config.host, config.port)


def remove_path(listener: socket.socket, config: ServerConfig) -> None:
    """Removes the path of the socket, unless the listener is closed: then it may be another server's."""
    if config.unix_socket is not None and listener.fileno() >= 0:
        Path(config.unix_socket).unlink(missing_ok=True)


def allow_many_connections() -> None:
    """Raises the limit of file descriptors. Each connection needs one, and the usual soft limit of 1,024
    is meant for programs that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_limits() -> tuple[int, int]:
    """Returns up to how many open connections a new one is served, and up to how many it is refused politely.

    A process without free descriptors could not restart its engine.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
    reserved = min(RESERVED_DESCRIPTORS, limit // 2)
    return limit - reserved, limit - reserved + reserved // 4


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """Returns the URL of the server for a client on this machine."""
    scheme = "https" if config.tls_cert else "http"
    if config.unix_socket is not None:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{scheme}://{shown}:{port}"


def origins_of(listener: socket.socket, config: ServerConfig) -> AllowedOrigins:
    """Returns the hosts and origins that are allowed if no key is set. No browser connects to a path, and
    a proxy before it has its own rules."""
    if config.api_key or config.unix_socket is not None:
        return AllowedOrigins()
    if _is_loopback(listener.getsockname()[0]):
        return local_origins(config.host, config.cors_origin)
    return AllowedOrigins(origins=tuple(config.cors_origin), checks_origin=True)


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _listen_at(path: Path) -> socket.socket:
    """Replaces the socket of a server that has ended, but no other file."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode) and _is_left_behind(path):
                path.unlink()
        listener.bind(str(path))
        _listen(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {path}: {error.strerror or error}; choose another --unix-socket"
        ) from None
    return listener


def _is_left_behind(path: Path) -> bool:
    """Returns whether no process listens there. It does not wait for a server that is too busy to accept."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        return client.connect_ex(str(path)) == errno.ECONNREFUSED


def _listen_on(host: str, port: int) -> socket.socket:
    """Returns a listening socket of the address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host is {host!r}, it must be an address of this machine: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        _listen(listener)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port or --host"
        ) from None
    return listener


def _listen(listener: socket.socket) -> None:
    """Starts to listen. Accepted TCP connections inherit the size of the send buffer."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.listen(1024)
