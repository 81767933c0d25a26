"""What stands before every endpoint: who may ask, from which page, under which name, and how much.

ASGI middlewares; ``guarded`` puts them around an app in the order that counts. Refusals are OpenAI's error object, which other
readers find as plain as any.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnet_protocols.errors import ConfigError

MAX_BODY_BYTES = 8 << 20
MAX_HELD_BODY_BYTES = 16 << 20
"""Bodies of all requests that are being answered."""
BODY_S = 30.0
"""A request's body has to arrive within this."""
API_POLICY = "default-src 'none'; frame-ancestors 'none'"
KEY_NAME = "swarmnet.key"
"""Where in an ASGI scope the name of the caller's key is; absent where no keys are asked for."""


class ApiKeys:
    """Keys that open an endpoint, each with a name that may be shown. Only hashes are kept."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """``keys``: the secret of every name. Raises ``ConfigError`` for one that is too short or cannot be sent."""
        for name, secret in keys.items():
            if len(secret) < 8 or not secret.isascii() or not secret.isprintable() or " " in secret:
                raise ConfigError(
                    f"the API key {name} is not 8 or more printable characters without spaces",
                    hint="make one: python3 -c 'import secrets; print(secrets.token_urlsafe(24))'",
                )
        self._digests = {name: _digest(secret) for name, secret in keys.items()}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, secret: str) -> str | None:
        """Whose key ``secret`` is. Takes as long for a wrong one, however much of it is right."""
        digest = _digest(secret)
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True)
class Access:
    """Who may use an endpoint.

    ``names``: host names it is known by, besides addresses and localhost. ``origins``: web pages that may use it, as
    ``https://example.org``. ``open_paths`` need no key. ``asks_browsers``: a key is also taken as the password that a browser asks
    for.
    """

    keys: ApiKeys = field(default_factory=lambda: ApiKeys({}))
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    open_paths: Sequence[str] = ()
    asks_browsers: bool = False


def check_exposed(host: str, keys: ApiKeys, *, option: str = "--api-key-file FILE") -> None:
    """Raise ``ConfigError`` where others could reach an endpoint that asks nobody for a key."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"on {host or 'every address'} others could use it without a key",
            hint=f"add {option}, or listen on this machine only: --host 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``, an address or a name."""
    if not host:
        return False
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def guarded(
    app: ASGIApp, access: Access, *, policy: str = API_POLICY, max_body_bytes: int = MAX_BODY_BYTES
) -> ASGIApp:
    """``app`` behind every guard. ``policy`` is its Content-Security-Policy."""
    app = BodyLimit(app, max_body_bytes)
    if access.keys:
        app = KeyGuard(app, access.keys, access.open_paths, asks_browsers=access.asks_browsers)
    if access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    app = OriginGuard(app, access.origins)
    app = HostGuard(app, access.names)
    return SecurityHeaders(app, policy)


class HostGuard:
    """Refuses names that are not ours, so that no page makes a browser take us for its own server (DNS rebinding).

    An address cannot be rebound: any will do.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_ours(Headers(scope=scope).get("host", "")):
            message = "this server is not known by that name; its operator can add it with --allow-host"
            await refuse(send, 421, message, code="wrong_host")
            return
        await self._app(scope, receive, send)

    def _is_ours(self, header: str) -> bool:
        name = _host_name(f"//{header}")
        return name is not None and (name in self._names or _is_address(name))


class OriginGuard:
    """Refuses requests that pages of other sites make a browser send."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._origins = set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and origin not in self._origins | _own_origins(headers.get("host", "")):
                message = "pages of this origin may not use this server; its operator can add it with --cors"
                await refuse(send, 403, message, code="wrong_origin")
                return
        await self._app(scope, receive, send)


class KeyGuard:
    """Lets through who has a key: ``Authorization: Bearer KEY``."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: Sequence[str], *, asks_browsers: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._asks_browsers = asks_browsers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            name = self._keys.name_of(self._secret(Headers(scope=scope).get("authorization", "")))
            if name is None:
                challenge = 'Basic realm="swarmnet", charset="UTF-8"' if self._asks_browsers else "Bearer"
                await refuse(
                    send,
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": challenge},
                )
                return
            scope = {**scope, KEY_NAME: name}
        await self._app(scope, receive, send)

    def _secret(self, header: str) -> str:
        scheme, _, value = header.partition(" ")
        if scheme.lower() == "bearer":
            return value.strip()
        if scheme.lower() == "basic" and self._asks_browsers:
            try:
                return base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
        return ""


class BodyLimit:
    """Refuses bodies that are too long or too slow, and those for which there is no room beside all others."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > self._max_bytes:
            await refuse(send, 413, self._message, code="body_too_large")
            return
        taken = 0
        ended = False
        deadline = asyncio.get_running_loop().time() + BODY_S

        async def limited() -> Message:
            nonlocal taken, ended
            if ended:  # what comes now is the news that the client left, whenever that is
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body did not arrive within {BODY_S:g} s") from None
            size = len(message.get("body", b""))
            taken += size
            self._held_bytes += size
            ended = not message.get("more_body", False)
            if taken > self._max_bytes:
                raise HTTPException(413, self._message)
            if self._held_bytes > MAX_HELD_BODY_BYTES:
                raise HTTPException(503, "too many bodies at once", {"Retry-After": "1"})
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held_bytes -= taken

    @property
    def _message(self) -> str:
        return f"the body is longer than {self._max_bytes} bytes"


class SecurityHeaders:
    """Tells browsers what this server's answers may do, unless an answer says so itself."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        self._headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


def error_object(message: str, *, code: str, kind: str = "invalid_request_error") -> dict[str, object]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def refuse(
    send: Send, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> None:
    """Answer a request with an error."""
    body = json.dumps(error_object(message, code=code)).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _own_origins(host: str) -> set[str]:
    return {f"http://{host}", f"https://{host}"}
