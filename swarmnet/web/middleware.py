"""ASGI middleware of every HTTP endpoint: API keys, host and origin checks, body limits, security
headers.

``protect`` wraps an app in all of it. From outside in:

1. ``SecurityHeaders`` completes every response, refusals included.
2. ``HostCheck`` refuses unknown host names (421), against DNS rebinding.
3. ``OriginCheck`` refuses requests sent by pages of other sites (403), against cross-site request
   forgery.
4. Starlette's ``CORSMiddleware`` answers preflight requests of the origins that are allowed.
5. Starlette's ``AuthenticationMiddleware`` with ``ApiKeyBackend`` refuses callers without a key
   (401).
6. ``BodyLimit`` bounds the size, the time and the memory of request bodies, for each caller and for
   all (413, 408, 503).

Errors are OpenAI's error object, which is plain JSON to other clients, unless the app gives its own
``Refusal``.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager
from swarmnet_protocols.net.limits.resources import Scope as CallerScope
from swarmnet_protocols.net.limits.subnets import subnet_of

MAX_BODY_BYTES = 8 << 20
MAX_BUFFERED_BODY_BYTES = 24 << 20
"""Most bytes of all request bodies in progress. The limits of one caller follow from it: see
``BodyLimit``."""
BODY_TIMEOUT_S = 30.0
"""Seconds within which the body of a request must arrive."""
BODY_PAUSE_S = 10.0
"""Longest pause in a body, in seconds. With more, unfinished bodies hold memory for longer; with
less, slow links lose requests."""
MIN_BODY_BYTES_PER_S = 16_000.0
"""Least mean rate of a body after ``BODY_PAUSE_S``, in bytes per second."""
API_CSP = "default-src 'none'; frame-ancestors 'none'"
"""Content-Security-Policy of endpoints that serve no pages."""


Refusal = Callable[[str, int, str, str], Mapping[str, Any]]
"""Returns the error object for a path, a status, a message and OpenAI's code."""


def openai_refusal(_path: str, _status: int, message: str, code: str) -> Mapping[str, Any]:
    """Return an error in the format of OpenAI's API."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


class ApiKeys:
    """API keys by name. Only SHA-256 digests are kept; names may appear in logs and quotas."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """``keys`` maps names to secrets. Raises ``ConfigError`` for a secret that is too short or
        cannot be sent in a header."""
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
        """Return the name of the key ``secret``, or None. Takes the same time for every wrong
        secret."""
        digest = _digest(secret)
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


@dataclass(frozen=True)
class AccessPolicy:
    """The callers, names and web origins with access to an endpoint.

    - ``host_names``: names of the server, in addition to IP addresses and localhost.
    - ``origins``: web origins whose pages may use it, such as ``https://example.org``.
    - ``public_paths``: paths that need no key.
    - ``basic_auth``: whether the password of HTTP Basic authentication counts as a key. Browsers
      prompt for it.
    """

    keys: ApiKeys = field(default_factory=lambda: ApiKeys({}))
    host_names: Sequence[str] = ()
    origins: Sequence[str] = ()
    public_paths: Sequence[str] = ()
    basic_auth: bool = False


def check_exposed(host: str, keys: ApiKeys, *, option: str = "--api-key-file FILE") -> None:
    """Raise ``ConfigError`` if other machines can reach ``host`` and there are no keys. Its hint
    names ``option``."""
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"on {host or 'every address'} other machines could use this server without a key",
            hint=f"add {option}, or listen on this machine only: --host 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Return whether ``host``, an address or a name, is reachable from this machine only."""
    if not host:
        return False
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in addresses)


def protect(
    app: ASGIApp,
    access: AccessPolicy,
    *,
    csp: str = API_CSP,
    max_body_bytes: int = MAX_BODY_BYTES,
    refusal: Refusal = openai_refusal,
    long_bodies: Mapping[str, int] = MappingProxyType({}),
) -> ASGIApp:
    """Wrap ``app`` in all middleware of this module.

    ``csp`` is the Content-Security-Policy of its responses, ``refusal`` the form of errors.
    ``long_bodies`` maps a path to a limit of its own, in place of ``max_body_bytes``.
    """
    app = BodyLimit(app, max_body_bytes, long_bodies, refusal)
    if access.keys:
        backend = ApiKeyBackend(access.keys, access.public_paths, refusal, basic_auth=access.basic_auth)
        app = AuthenticationMiddleware(app, backend, on_error=backend.challenge)
    if access.origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    app = OriginCheck(app, access.origins, refusal)
    app = HostCheck(app, access.host_names, refusal)
    return SecurityHeaders(app, csp)


class HostCheck:
    """Refuses requests whose ``Host`` header is neither an IP address nor a known name.

    In DNS rebinding an attacker's domain resolves to this server. The attacker's page is then
    same-origin to the browser, and only the ``Host`` header shows the domain. IP addresses cannot
    be rebound, so all are accepted. Starlette's ``TrustedHostMiddleware`` cannot do that.
    """

    def __init__(self, app: ASGIApp, host_names: Sequence[str], refusal: Refusal) -> None:
        self._app, self._refusal = app, refusal
        self._host_names = {"localhost", *(name.lower() for name in host_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_trusted(Headers(scope=scope).get("host", "")):
            message = "this server is not known by that name; its operator can add it with --allow-host"
            body = self._refusal(scope["path"], 421, message, "wrong_host")
            await JSONResponse(body, 421)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_trusted(self, header: str) -> bool:
        try:
            name = urlsplit(f"//{header}").hostname
        except ValueError:
            return False
        return name is not None and (name in self._host_names or _is_address(name))


class OriginCheck:
    """Refuses requests that a browser sends for a page of another origin, unless that origin is
    allowed."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], refusal: Refusal) -> None:
        self._app, self._refusal = app, refusal
        self._origins = set(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin, host = headers.get("origin"), headers.get("host", "")
            if origin is not None and origin not in self._origins | {f"http://{host}", f"https://{host}"}:
                message = "pages of this origin may not use this server; its operator can add it with --cors"
                body = self._refusal(scope["path"], 403, message, "wrong_origin")
                await JSONResponse(body, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ApiKeyBackend(AuthenticationBackend):
    """Authenticates ``Authorization: Bearer KEY`` and Anthropic's ``x-api-key: KEY``.

    With ``basic_auth``, the password of HTTP Basic may be a key, too.
    """

    def __init__(
        self, keys: ApiKeys, public_paths: Sequence[str], refusal: Refusal, *, basic_auth: bool
    ) -> None:
        self._keys, self._refusal = keys, refusal
        self._public_paths = frozenset(public_paths)
        self._basic_auth = basic_auth

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        """Return the key's name as the user; None on public paths. Raises ``AuthenticationError``
        without a valid key."""
        if conn.scope["path"] in self._public_paths:
            return None
        secret = self._secret(conn.headers.get("authorization", "")) or conn.headers.get("x-api-key", "")
        name = self._keys.name_of(secret)
        if name is None:
            raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")
        return AuthCredentials(["api"]), SimpleUser(name)

    def challenge(self, conn: HTTPConnection, error: AuthenticationError) -> Response:
        """Return the 401 response, with the scheme that the client should use."""
        scheme = 'Basic realm="swarmnet", charset="UTF-8"' if self._basic_auth else "Bearer"
        body = self._refusal(conn.scope["path"], 401, str(error), "invalid_api_key")
        return JSONResponse(body, 401, {"www-authenticate": scheme})

    def _secret(self, header: str) -> str:
        scheme, _, value = header.partition(" ")
        if scheme.lower() == "bearer":
            return value.strip()
        if scheme.lower() == "basic" and self._basic_auth:
            try:
                return base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return ""
        return ""


def key_name(connection: HTTPConnection) -> str:
    """Return the name of the API key that authenticated a request; "" if none was needed."""
    user = connection.scope.get("user")
    return "" if user is None else str(user.display_name)


class BodyLimit:
    """Limits the size of a request body, its arrival time, and the memory of all unfinished bodies.

    Bytes count as they arrive. Callers share the limit like peers (``net/limits/resources.py``):
    no group of callers can use all of it. A group is all addresses with one API key or, without
    keys, one subnet.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, by_path: Mapping[str, int], refusal: Refusal) -> None:
        self._app, self._refusal = app, refusal
        self._max_bytes = max_bytes
        self._by_path = by_path
        self._resources = ResourceManager()
        self._resources.limit(Resource.BODIES, system=MAX_BUFFERED_BODY_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._by_path.get(scope["path"], self._max_bytes)
        too_long = f"the body is longer than {most} bytes"
        announced = Headers(scope=scope).get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > most:
            body = self._refusal(scope["path"], 413, too_long, "body_too_large")
            await JSONResponse(body, 413)(scope, receive, send)
            return
        received_bytes = 0
        ended = False
        began = loop_time()

        async def limited() -> Message:
            nonlocal received_bytes, ended
            if ended:  # the next message is the client's disconnect, which has no deadline
                return await receive()
            try:
                async with asyncio.timeout_at(began + _body_within_s(received_bytes)):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not arrive in time") from None
            received_bytes += len(message.get("body", b""))
            ended = not message.get("more_body", False)
            if received_bytes > most:
                raise HTTPException(413, too_long)
            try:
                held.resize(received_bytes)
            except ResourceLimitReached:
                raise HTTPException(503, "too many bodies at once", {"Retry-After": "1"}) from None
            return message

        with self._caller(scope).reserve(Resource.BODIES, 0) as held:
            await self._app(scope, limited, send)

    def _caller(self, scope: Scope) -> CallerScope:
        host = (scope.get("client") or ("",))[0]
        address = f"/ip6/{host}" if ":" in host else f"/ip4/{host}"
        key = key_name(HTTPConnection(scope))
        group = f"key {key}" if key else subnet_of(address) or "local"
        return self._resources.peer(f"{host} {key}", loop_time(), group)


def _body_within_s(received_bytes: int) -> float:
    """Return the seconds within which more of a body must arrive after ``received_bytes``."""
    return min(BODY_TIMEOUT_S, BODY_PAUSE_S + received_bytes / MIN_BODY_BYTES_PER_S)


class SecurityHeaders:
    """Adds security headers to every response that does not set them itself."""

    def __init__(self, app: ASGIApp, csp: str) -> None:
        self._app = app
        self._headers = {
            "content-security-policy": csp,
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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
