"""Serving an ASGI app with uvicorn inside a running event loop, with limits on connections and on
shutdown."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.machine.aio import cancel

BACKLOG = 2048
MAX_CONNECTIONS = 4096
"""Most open connections; further ones are closed at once, so that idle clients cannot exhaust the
process's descriptors.

No address may hold more connections than are left for other addresses.
"""
REQUEST_TIMEOUT_S = 30.0
"""Seconds that a client has to send the complete headers of its next request. Then its connection
is closed."""
HARD_STOP_S = 5
"""Seconds between aborting the connections and cancelling requests that still run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpEndpoint:
    """A server that is running at ``url``."""

    url: str
    _task: asyncio.Task[None]

    async def failed(self) -> None:
        """Wait until the server ends by itself, and raise ``SwarmnetError``."""
        await asyncio.wait([self._task])
        raise SwarmnetError(f"the HTTP server on {self.url} failed", hint="start it again")


@asynccontextmanager
async def serve_http(
    app: Any, host: str, port: int, *, drain_s: float = 1.0, option: str = "--port"
) -> AsyncIterator[HttpEndpoint]:
    """Serve the ASGI ``app`` on ``host`` while the context is open. Port 0 picks a free port.

    On exit, running requests have ``drain_s`` seconds to finish; then their connections are
    aborted, because an open event stream would never finish. No signal handlers are set, and no
    ASGI lifespan events sent. A failure of the server is logged; await ``HttpEndpoint.failed`` to
    receive it. Raises ``ConfigError`` if the address cannot be bound; its hint names ``option``.
    """
    listener = listen(host, port, option=option)
    config = uvicorn.Config(
        app,
        http=_TimedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(drain_s) + HARD_STOP_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    task.add_done_callback(_log_failure)
    try:
        yield HttpEndpoint(local_url(host, listener.getsockname()[1]), task)
    finally:
        server.should_exit = True
        abort_timer = asyncio.get_running_loop().call_later(drain_s, server.abort_connections)
        try:
            await asyncio.wait([task])
        finally:
            abort_timer.cancel()
            await cancel(task)
            server.close_sockets()
            listener.close()


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """Return a listening TCP socket. Raises ``ConfigError`` with a hint that names ``option``."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0",  # noqa: S104 - callers check for keys before they bind all addresses
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # Accepted connections inherit the option. Without it, asyncio's loop sends a body only
        # after its headers are acknowledged, up to 40 ms later. uvloop sets it itself.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # create_server repeats the address
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why}",
            hint=f"take another port: {option} 0 takes a free one",
        ) from error


def local_url(host: str, port: int) -> str:
    """Return the URL at which a browser on this machine reaches a server bound to ``host``."""
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("the HTTP server failed", exc_info=error)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Install no handlers: the command handles signals."""
        yield

    def abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            transport.abort()

    def close_sockets(self) -> None:
        """Close the sockets that a failed server left open, because uvloop's loop would wait for
        them when it closes."""
        for each in getattr(self, "servers", ()):
            each.close()
        self.abort_connections()


class _TimedConnection(H11Protocol):
    """uvicorn's HTTP/1.1 connection with a timeout for request headers and a limit on the number of
    connections."""

    _request_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._is_one_too_many():
            transport.abort()
        else:
            self._start_request_timer()

    def _is_one_too_many(self) -> bool:
        left = MAX_CONNECTIONS - len(self.connections)
        # Then all addresses together hold no more than ``left``, so there is nothing to count.
        if left >= MAX_CONNECTIONS // 2:
            return False
        same = sum(_host(each) == _host(self) for each in list(self.connections))
        return left < 0 or same > left + 1

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_request_timer()
        elif self._request_timer is None:
            self._start_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        super().connection_lost(exc)

    def _start_request_timer(self) -> None:
        self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None


def _host(connection: Any) -> str:
    """Return the address of a connection's client; empty for one that is gone."""
    return "" if connection.client is None else str(connection.client[0])
