"""The ASGI middleware of HTTP endpoints: which requests reach the app."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from swarmnet.web import middleware
from swarmnet.web.middleware import AccessPolicy, ApiKeys, check_exposed, key_name, protect
from swarmnet_protocols.errors import ConfigError
from tests.defences import defence, replacing, yes
from tests.support.network.virtual_time import run

SECRET = "correct-horse"


async def hello(request: Request) -> PlainTextResponse:
    await request.body()
    return PlainTextResponse(f"hello {key_name(request)}")


def bare() -> Any:
    return Starlette(routes=[Route("/", hello, methods=["GET", "POST"]), Route("/health", hello)])


def ask(app: Any, path: str = "/", method: str = "GET", **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main())


def code(response: httpx.Response) -> Any:
    is_json = response.headers.get("content-type") == "application/json"
    return response.status_code, response.json()["error"]["code"] if is_json else None


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "192.0.2.7", "gate.lan:80"]
)
def test_known_host_names_and_ip_addresses_are_accepted(host: str) -> None:
    assert (
        ask(protect(bare(), AccessPolicy(host_names=["Gate.lan"])), headers={"host": host}).text == "hello "
    )


def letting_through(guard: type) -> Callable[[pytest.MonkeyPatch], None]:
    async def call(self: Any, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)

    return replacing(guard, "__call__", call)


@defence(
    "unknown host names are refused (DNS rebinding)",
    off=letting_through(middleware.HostCheck),
    host="evil.example",
)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[", "a@b"]
)
def test_an_unknown_host_name_is_refused(host: str) -> None:
    assert code(ask(protect(bare(), AccessPolicy()), headers={"host": host})) == (421, "wrong_host")


@defence("pages of other origins are refused", off=letting_through(middleware.OriginCheck))
def test_pages_of_other_origins_are_refused() -> None:
    app = protect(bare(), AccessPolicy())
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9000"):
        assert code(ask(app, method="POST", headers={"origin": origin})) == (403, "wrong_origin")
    assert ask(app, headers={"origin": "http://127.0.0.1:8000"}).status_code == 200


def test_an_allowed_origin_is_accepted() -> None:
    page = {"origin": "https://page.example"}
    app = protect(bare(), AccessPolicy(keys=ApiKeys({"a": SECRET}), origins=["https://page.example"]))
    preflight = {**page, "access-control-request-method": "POST", "access-control-request-headers": "x"}
    assert ask(app, method="OPTIONS", headers=preflight).status_code == 200
    answer = ask(app, headers={**page, "authorization": f"Bearer {SECRET}"})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.text == "hello a"


async def unauthenticated(*_: object) -> None:
    """Accept a request without a key."""


@defence(
    "requests without a key are refused",
    off=replacing(middleware.ApiKeyBackend, "authenticate", unauthenticated),
)
def test_requests_without_a_valid_key_are_refused() -> None:
    app = protect(
        bare(), AccessPolicy(keys=ApiKeys({"a": SECRET, "b": "another-one"}), public_paths=["/health"])
    )
    assert ask(app, "/health").status_code == 200
    assert ask(app, headers={"authorization": f"bearer {SECRET}"}).text == "hello a"
    assert ask(app, headers={"authorization": "Bearer another-one"}).text == "hello b"
    assert ask(app, headers={"x-api-key": "another-one"}).text == "hello b"
    basic = base64.b64encode(f"x:{SECRET}".encode()).decode()
    for header in ("", "Bearer", "Bearer wrong-one", SECRET, f"Basic {basic}"):
        refused = ask(app, headers={"authorization": header})
        assert code(refused) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"


def test_basic_authentication_is_accepted_where_enabled() -> None:
    app = protect(bare(), AccessPolicy(keys=ApiKeys({"a": SECRET}), basic_auth=True))
    assert ask(app).headers["www-authenticate"].startswith("Basic ")
    basic = base64.b64encode(f"any user:{SECRET}".encode()).decode()
    assert ask(app, headers={"authorization": f"Basic {basic}"}).text == "hello a"
    assert ask(app, headers={"authorization": "Basic ?"}).status_code == 401


@pytest.mark.parametrize("secret", ["short", "with a space", "schlüssel", "tab\tinside"])
def test_an_invalid_key_is_a_config_error(secret: str) -> None:
    with pytest.raises(ConfigError, match="API key main"):
        ApiKeys({"main": secret})


@defence("bodies have a size limit", off=letting_through(middleware.BodyLimit))
def test_a_body_that_is_too_long_is_refused() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield bytes(40)

    small = protect(bare(), AccessPolicy(), max_body_bytes=100)
    assert code(ask(small, method="POST", content=bytes(101))) == (413, "body_too_large")
    assert ask(small, method="POST", content=pieces()).status_code == 413
    assert ask(small, method="POST", content=bytes(100)).status_code == 200
    large = protect(bare(), AccessPolicy(), max_body_bytes=120)
    assert ask(large, method="POST", content=pieces()).status_code == 200


def test_all_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    came, answered = asyncio.Event(), asyncio.Event()

    async def hold(request: Request) -> PlainTextResponse:
        await request.body()
        came.set()
        await answered.wait()
        return PlainTextResponse("done")

    async def main() -> list[int]:
        app = protect(Starlette(routes=[Route("/", hold, methods=["POST"])]), AccessPolicy())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            async with asyncio.TaskGroup() as group:
                first = group.create_task(client.post("/", content=bytes(80)))
                await came.wait()
                second = await client.post("/", content=bytes(80))
                answered.set()
            third = await client.post("/", content=bytes(80))
        assert second.headers["retry-after"] == "1"
        return [first.result().status_code, second.status_code, third.status_code]

    monkeypatch.setattr(middleware, "MAX_BUFFERED_BODY_BYTES", 180)
    assert asyncio.run(main()) == [200, 503, 200]


@defence(
    "unfinished bodies of one caller leave room for others",
    off=replacing(middleware.BodyLimit, "_caller", lambda limit, _: limit._resources.system),
)
def test_unfinished_bodies_of_one_caller_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one key from many addresses, and, without keys, of many addresses in one subnet."""

    async def held(app: Any, key: str, host: str, size: int) -> asyncio.Task[int]:
        """A request that sends ``size`` bytes and not the end. The task returns its status."""
        sent = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield bytes(size)
            sent.set()
            await asyncio.Event().wait()

        async def post() -> int:
            transport = httpx.ASGITransport(app, client=(host, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                content = pieces() if size else b"whole"
                return (await client.post("/", content=content, headers=headers)).status_code

        task = asyncio.create_task(post())
        await asyncio.wait([task, ended := asyncio.create_task(sent.wait())], return_when="FIRST_COMPLETED")
        ended.cancel()
        await asyncio.sleep(0)
        return task

    async def main(policy: AccessPolicy, greedy: str, honest: str, elsewhere: str) -> None:
        app = protect(bare(), policy)
        bodies = [await held(app, greedy, f"192.0.2.{n}", 2000) for n in range(55)]
        refused = [task.result() for task in bodies if task.done()]
        assert set(refused) == {503}
        assert await (await held(app, honest, elsewhere, 0)) == 200
        for task in bodies:
            task.cancel()
        await asyncio.gather(*bodies, return_exceptions=True)

    monkeypatch.setattr(middleware, "MAX_BUFFERED_BODY_BYTES", 100_000)
    keys = AccessPolicy(keys=ApiKeys({"greedy": SECRET, "honest": "another-one"}))
    run(main(keys, SECRET, "another-one", "192.0.2.1"))
    run(main(AccessPolicy(), "", "", "198.51.100.1"))


@defence(
    "a body has a minimum rate",
    off=replacing(middleware, "_body_within_s", lambda _: middleware.BODY_TIMEOUT_S),
)
def test_a_body_that_stops_is_refused_long_before_the_last_moment() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1000)
            await asyncio.sleep(1.0)

    async def main() -> float:
        transport = httpx.ASGITransport(protect(bare(), AccessPolicy()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            assert (await client.post("/", content=drip())).status_code == 408
        return asyncio.get_running_loop().time()

    assert run(main()) < middleware.BODY_PAUSE_S + 1.0


def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.Event().wait()
        yield b"b"

    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.01)
    assert ask(protect(bare(), AccessPolicy()), method="POST", content=slow()).status_code == 408


@defence("responses have security headers", off=letting_through(middleware.SecurityHeaders))
def test_every_response_has_security_headers() -> None:
    for headers in ({}, {"host": "evil.example"}):
        answer = ask(protect(bare(), AccessPolicy(), csp="default-src 'self'"), headers=headers)
        assert answer.headers.get("content-security-policy") == "default-src 'self'"
        assert answer.headers.get("x-content-type-options") == "nosniff"
        assert answer.headers.get("referrer-policy") == "no-referrer"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposed(host, ApiKeys({}))


@defence("exposed endpoints need a key", off=replacing(middleware, "is_loopback", yes), host="0.0.0.0")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.7", "no-such-name.invalid"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="without a key") as caught:
        check_exposed(host, ApiKeys({}))
    assert "--api-key" in caught.value.hint
    check_exposed(host, ApiKeys({"a": SECRET}))
