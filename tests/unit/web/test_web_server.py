"""The HTTP server over real sockets: taken ports, idle connections, connection limits and
shutdown."""

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from swarmnet.web import server as module
from swarmnet.web.server import listen, local_url, serve_http
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from tests.defences import defence, nothing, replacing

TIMEOUT_S = 50.0
"""Seconds until a test gives up on an event that comes at once."""


class App:
    """An app that answers ``/`` at once; on other paths it begins a stream, and records when the
    client has disconnected."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/":
            await send({"type": "http.response.body", "body": b"hello"})
            return
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.ended.set()


def test_a_web_server_serves_while_its_context_is_open() -> None:
    async def main() -> str:
        async with httpx.AsyncClient() as client:
            async with serve_http(App(), "127.0.0.1", 0) as endpoint:
                text = (await client.get(endpoint.url)).text
            with pytest.raises(httpx.ConnectError):
                await client.get(endpoint.url)
        return text

    assert asyncio.run(main()) == "hello"


def test_a_server_that_fails_is_reported_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = asyncio.Event()

    async def on_tick(_server: Any, _counter: int) -> bool:
        if broken.is_set():
            raise MemoryError("not a page left")
        return False

    monkeypatch.setattr(module._Server, "on_tick", on_tick)

    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S), serve_http(App(), "127.0.0.1", 0) as endpoint:
            waiting = asyncio.create_task(endpoint.failed())
            async with httpx.AsyncClient() as client:
                assert (await client.get(endpoint.url)).text == "hello"
            assert not waiting.done()
            broken.set()
            with pytest.raises(SwarmnetError, match=endpoint.url):
                await waiting

    asyncio.run(main())
    assert "not a page left" in caplog.text


def with_short_timeout(where: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace an attribute as ``replacing`` does; the test gives up after 2 s."""

    def switch_off(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(where, name, value)
        patch.setattr(sys.modules[__name__], "TIMEOUT_S", 2.0)

    return switch_off


@defence(
    "open streams do not block a shutdown",
    off=with_short_timeout(module._Server, "abort_connections", nothing),
)
def test_an_open_stream_is_aborted_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HARD_STOP_S", 1000)

    async def main() -> None:
        app = App()
        async with httpx.AsyncClient() as client:
            async with asyncio.timeout(TIMEOUT_S):
                async with serve_http(app, "127.0.0.1", 0, drain_s=0.01) as endpoint:
                    request = client.build_request("GET", f"{endpoint.url}/stream")
                    response = await client.send(request, stream=True)
                await app.ended.wait()
            with pytest.raises(httpx.RemoteProtocolError):
                await response.aread()

    asyncio.run(main())


def test_a_taken_port_is_a_config_error() -> None:
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(ConfigError, match=str(taken.getsockname()[1])) as caught,
    ):
        listen("127.0.0.1", taken.getsockname()[1], option="--metrics")
    assert "--metrics 0" in caught.value.hint


def test_an_unknown_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no-such-name"):
        listen("no-such-name.invalid", 0)


@defence(
    "idle connections are closed",
    off=with_short_timeout(module._TimedConnection, "_start_request_timer", nothing),
    sent=b"",
)
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: loc"])
def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with serve_http(App(), "127.0.0.1", 0) as endpoint:
            reader, writer = await asyncio.open_connection(*_address(endpoint.url))
            with closing(writer):
                writer.write(sent)
                async with asyncio.timeout(TIMEOUT_S):
                    assert await reader.read() == b""

    asyncio.run(main())


def test_the_request_timeout_does_not_end_a_slow_response(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.5)

    async def main() -> None:
        app = App()
        async with serve_http(app, "127.0.0.1", 0, drain_s=0) as endpoint:
            reader, writer = await asyncio.open_connection(*_address(endpoint.url))
            writer.write(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"begun")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.6):
                    await app.ended.wait()
            writer.close()
            await app.ended.wait()

    asyncio.run(main())


@defence(
    "connections have a limit",
    off=with_short_timeout(module._TimedConnection, "connection_made", H11Protocol.connection_made),
)
def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)

    async def main() -> None:
        async with serve_http(App(), "127.0.0.1", 0) as endpoint:
            opened = [await asyncio.open_connection(*_address(endpoint.url)) for _ in range(3)]
            with ExitStack() as stack:
                for _, writer in opened:
                    stack.enter_context(closing(writer))
                async with asyncio.timeout(TIMEOUT_S):
                    assert await opened[2][0].read() == b""

    asyncio.run(main())


def too_many_in_all(connection: Any) -> bool:
    return len(connection.connections) > module.MAX_CONNECTIONS


@defence(
    "one address leaves connections to others",
    off=replacing(module._TimedConnection, "_is_one_too_many", too_many_in_all),
)
def test_one_address_leaves_connections_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux connects from any address of 127.0.0.0/8."""
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 8)

    async def main() -> None:
        async with serve_http(App(), "127.0.0.1", 0) as endpoint:
            host, port = _address(endpoint.url)
            with ExitStack() as stack:
                for _ in range(8):
                    _, writer = await asyncio.open_connection(host, port)
                    stack.enter_context(closing(writer))
                reader, writer = await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0))
                stack.enter_context(closing(writer))
                writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                async with asyncio.timeout(TIMEOUT_S):
                    assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_is_reachable_from_this_machine(host: str, url: str) -> None:
    assert local_url(host, 80) == url


def _address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    return parsed.host, parsed.port or 0


def test_a_web_server_listens_on_the_given_address() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "127.0.0.1"


def test_connections_send_without_delay() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
