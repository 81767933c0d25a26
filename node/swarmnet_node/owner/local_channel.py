"""The channel between a node and its owner's commands.

The channel is a unix socket in the data directory, or on Windows a port of the loopback interface.
Other machines reach neither. Every process that may write to the data directory may control the
node through the socket, without another check. All users of the machine reach the port, so each
call carries a token from the data directory.
"""

import asyncio
import hmac
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import MAX_SOCKET_PATH_BYTES, write_whole
from swarmnet_protocols.machine.platform import HAS_UNIX_SOCKETS

SOCKET_NAME = "control.sock"
PORT_NAME = "control.port"
"""The file with the port and the token."""
OPTIONS = (
    ("grpc.max_receive_message_length", 1 << 20),
    # otherwise a call reuses an earlier call's failed connection
    ("grpc.use_local_subchannel_pool", 1),
)
_MAX_FILE_BYTES = 4096
_TOKEN_KEY = "swarmnet-token"  # noqa: S105 - the name of a header
Token = Sequence[tuple[str, str]]
"""The metadata of a call."""


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler, data_dir: Path) -> AsyncIterator[None]:
    """Serve ``handler`` while the context is open, to processes here that may read ``data_dir``.

    The caller holds the lock of ``data_dir``. So an existing socket or token was left by a dead
    process, and is replaced. Raises ``ConfigError`` if neither can be created.
    """
    token = secrets.token_urlsafe(32)
    checks = () if HAS_UNIX_SOCKETS else (_TokenCheck(token),)
    server = grpc.aio.server(options=OPTIONS, interceptors=checks)
    server.add_generic_rpc_handlers((handler,))
    path = data_dir / (SOCKET_NAME if HAS_UNIX_SOCKETS else PORT_NAME)
    with _short_path(data_dir) if HAS_UNIX_SOCKETS else nullcontext() as directory:
        try:
            path.unlink(missing_ok=True)
            if directory is None:
                port = server.add_insecure_port("127.0.0.1:0")
                write_whole(path, json.dumps({"port": port, "token": token}).encode())
            else:
                _listen_on_socket(server, f"{directory}/{SOCKET_NAME}")
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot create {path}", hint="choose a --data-dir on a local disk") from error
        await server.start()
        try:
            yield
        finally:
            # Let answers in progress, such as the answer to `finish` itself, reach their callers.
            await asyncio.shield(server.stop(grace=1.0))
            path.unlink(missing_ok=True)


@contextmanager
def dialling(data_dir: Path) -> Iterator[tuple[grpc.Channel, Token] | None]:
    """Yield a channel to the node in ``data_dir`` and the metadata of every call. None without a
    node."""
    if not HAS_UNIX_SOCKETS:
        found = _read_port(data_dir / PORT_NAME)
        if found is None:
            yield None
            return
        port, token = found
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
            yield channel, ((_TOKEN_KEY, token),)
    elif not (data_dir / SOCKET_NAME).is_socket():
        yield None
    else:
        with (
            _short_path(data_dir) as directory,
            grpc.insecure_channel(f"unix:{directory}/{SOCKET_NAME}", options=OPTIONS) as channel,
        ):
            yield channel, ()


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata).get(_TOKEN_KEY, "")
        if hmac.compare_digest(str(given).encode(), self._token):
            return await continuation(details)
        return self._refusal


async def _refuse(_request: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is wrong")


def _read_port(path: Path) -> tuple[int, str] | None:
    """Return the port and the token of a node. None without a node, or if its file is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with path.open("rb") as file:
            fields = json.loads(file.read(_MAX_FILE_BYTES))
        port, token = fields["port"], fields["token"]
        if type(port) is int and isinstance(token, str) and token.isascii() and token.isprintable():
            return port, token
    return None


def _listen_on_socket(server: grpc.aio.Server, path: str) -> None:
    """Listen on a new socket with mode 0600. Raises ``RuntimeError`` if it cannot be created."""
    previous = os.umask(0o177)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(previous)


@contextmanager
def _short_path(data_dir: Path) -> Iterator[str]:
    """Yield a path of ``data_dir`` that is short enough for the address of a unix socket."""
    path = str(data_dir.absolute())
    if len(os.fsencode(path)) + 1 + len(SOCKET_NAME) <= MAX_SOCKET_PATH_BYTES:
        yield path
        return
    if sys.platform != "linux":
        raise ConfigError(
            f"the path of the data directory {path} is too long for a socket",
            hint="choose a shorter --data-dir",
        )
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
