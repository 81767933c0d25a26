"""HTTP over real sockets: taken ports, connections that do nothing, and an end that waits for nobody."""

import asyncio
import socket
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from swarmnet.web import serving as module
from swarmnet.web.serving import listen, serving, url_of
from swarmnet_protocols.errors import ConfigError, SwarmnetError

PATIENCE_S = 50.0
"""For what happens at once."""


class App:
    """Answers ``/``; elsewhere it sends the start of a stream, and notes when that is over."""

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


def test_it_serves_at_its_url_and_no_longer() -> None:
    async def main() -> str:
        async with httpx.AsyncClient() as client:
            async with serving(App(), "127.0.0.1", 0) as endpoint:
                text = (await client.get(endpoint.url)).text
            with pytest.raises(httpx.ConnectError):
                await client.get(endpoint.url)
        return text

    assert asyncio.run(main()) == "hello"


def test_a_server_that_breaks_is_told_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = asyncio.Event()

    async def on_tick(_server: Any, _counter: int) -> bool:
        if broken.is_set():
            raise MemoryError("not a page left")
        return False

    monkeypatch.setattr(module._Server, "on_tick", on_tick)

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), serving(App(), "127.0.0.1", 0) as endpoint:
            waiting = asyncio.create_task(endpoint.broke())
            async with httpx.AsyncClient() as client:
                assert (await client.get(endpoint.url)).text == "hello"
            assert not waiting.done()
            broken.set()
            with pytest.raises(SwarmnetError, match=endpoint.url):
                await waiting

    asyncio.run(main())
    assert "not a page left" in caplog.text


def test_an_open_stream_is_cut_off_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HARD_STOP_S", 1000)

    async def main() -> None:
        app = App()
        async with httpx.AsyncClient() as client:
            async with asyncio.timeout(PATIENCE_S):
                async with serving(app, "127.0.0.1", 0, drain_s=0.01) as endpoint:
                    request = client.build_request("GET", f"{endpoint.url}/stream")
                    response = await client.send(request, stream=True)
                await app.ended.wait()
            with pytest.raises(httpx.RemoteProtocolError):
                await response.aread()

    asyncio.run(main())


def test_a_taken_port_is_named() -> None:
    with (
        listen("127.0.0.1", 0) as taken,
        pytest.raises(ConfigError, match=str(taken.getsockname()[1])) as caught,
    ):
        listen("127.0.0.1", taken.getsockname()[1], option="--metrics")
    assert "--metrics 0" in caught.value.hint


def test_a_name_nobody_has_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no-such-name"):
        listen("no-such-name.invalid", 0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: loc"])
def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADERS_S", 0.05)

    async def main() -> None:
        async with serving(App(), "127.0.0.1", 0) as endpoint:
            reader, writer = await asyncio.open_connection(*_address(endpoint.url))
            with closing(writer):
                writer.write(sent)
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.read() == b""

    asyncio.run(main())


def test_a_slow_answer_is_not_a_connection_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADERS_S", 0.5)

    async def main() -> None:
        app = App()
        async with serving(app, "127.0.0.1", 0, drain_s=0) as endpoint:
            reader, writer = await asyncio.open_connection(*_address(endpoint.url))
            writer.write(b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await reader.readuntil(b"begun")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.6):
                    await app.ended.wait()
            writer.close()
            await app.ended.wait()

    asyncio.run(main())


def test_connections_beyond_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)

    async def main() -> None:
        async with serving(App(), "127.0.0.1", 0) as endpoint:
            opened = [await asyncio.open_connection(*_address(endpoint.url)) for _ in range(3)]
            with ExitStack() as stack:
                for _, writer in opened:
                    stack.enter_context(closing(writer))
                async with asyncio.timeout(PATIENCE_S):
                    assert await opened[2][0].read() == b""

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
def test_the_url_is_one_to_open_here(host: str, url: str) -> None:
    assert url_of(host, 80) == url


def _address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    return parsed.host, parsed.port or 0


def test_it_listens_where_it_is_told() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.family == socket.AF_INET
        assert listener.getsockname()[0] == "127.0.0.1"


def test_a_body_does_not_wait_until_its_headers_are_acknowledged() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
