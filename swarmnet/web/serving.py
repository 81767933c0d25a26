"""An ASGI app served by uvicorn in the loop that is already running, for as long as a context is open."""

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
"""Connections beyond these are closed at once: what is idle must not use up the file descriptors of the process."""
HEADERS_S = 30.0
"""A connection on which no whole request has begun for this long is closed."""
HARD_STOP_S = 5
"""Requests whose client was cut off are cancelled after this."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """An app that is being served at ``url``."""

    url: str
    _running: asyncio.Task[None]

    async def broke(self) -> None:
        """Raise ``SwarmnetError`` when the server ends though nobody ended it; until then, wait."""
        await asyncio.wait([self._running])
        raise SwarmnetError(f"the HTTP server on {self.url} broke", hint="start it again")


@asynccontextmanager
async def serving(
    app: Any, host: str, port: int, *, drain_s: float = 1.0, option: str = "--port"
) -> AsyncIterator[Endpoint]:
    """Serve the ASGI ``app`` on ``host``. Port 0 takes a free one; ``option`` is what a person types to choose another.

    A server that breaks is logged; whoever cannot do without it waits for ``Endpoint.broke``. No signal handlers are set and no
    ASGI lifespan events are sent. At the end running requests have ``drain_s``; then they are cut off, so an open stream of
    events keeps nobody. Raises ``ConfigError`` when it cannot listen there.
    """
    listener = listen(host, port, option=option)
    config = uvicorn.Config(
        app,
        http=_Connection,
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
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    running.add_done_callback(_tell)
    try:
        yield Endpoint(url_of(host, listener.getsockname()[1]), running)
    finally:
        server.should_exit = True
        cut = asyncio.get_running_loop().call_later(drain_s, server.cut_off)
        try:
            await asyncio.wait([running])
        finally:
            cut.cancel()
            await cancel(running)
            server.abandon()
            listener.close()


def listen(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A listening TCP socket. Raises ``ConfigError`` with what to type instead."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0",  # noqa: S104 - only a caller who checked for keys gets here with no host
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # What is accepted inherits it. uvloop sets it anyway; in asyncio's loop a body would wait 40 ms for its headers' ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {why}",
            hint=f"take another port: {option} 0 takes a free one",
        ) from error


def url_of(host: str, port: int) -> str:
    """Where a browser on this machine finds what listens on ``host``."""
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tell(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (error := running.exception()):
        _log.error("the HTTP server broke", exc_info=error)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Signals belong to the command that serves."""
        yield

    def cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            transport: Any = connection.transport
            transport.abort()

    def abandon(self) -> None:
        """Close what it still has open, which is nothing unless it broke: a loop of uvloop's would wait for that at its end."""
        for each in getattr(self, "servers", ()):
            each.close()
        self.cut_off()


class _Connection(H11Protocol):
    """uvicorn's connection, which also ends when a request does not begin, or its headers do not end, in time."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEADERS_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
