"""The dashboard over HTTP: pages, the same as JSON, and events (SSE) as the swarm changes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware

from swarmnet.dashboard import charts
from swarmnet.dashboard.feed import MAX_VIEWERS, Encoded, Feed
from swarmnet.dashboard.files import PAGE, File, files
from swarmnet.web.middleware import AccessPolicy, ApiKeys, check_exposed, protect
from swarmnet.web.server import Endpoint, serve_http

KEEP_ALIVE_S = 15
CSP = "default-src 'self'; img-src 'self' data:; style-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
MAX_PEER_EVENTS = 100
_GZIP_MIN_BYTES = 1024

Window = Annotated[Literal["24h", "30d"], Query()]
Manifest = Annotated[str, Query(pattern="^([0-9a-f]{64})?$")]
ETag = Annotated[str, Query(max_length=64)]


@dataclass(frozen=True)
class Place:
    """Where a dashboard is served, and with which key."""

    host: str = "127.0.0.1"
    port: int = 8080
    key: str | None = None
    names: tuple[str, ...] = ()
    """By which it is known, besides addresses and localhost."""

    def check(self, key_option: str = "--api-key-file FILE") -> ApiKeys:
        """Its keys. Raises ``ConfigError`` where others could reach it without one."""
        keys = ApiKeys({"dashboard": self.key} if self.key else {})
        check_exposed(self.host, keys, option=key_option)
        return keys


@asynccontextmanager
async def serve(feed: Feed, place: Place) -> AsyncIterator[Endpoint]:
    """Serve ``feed`` while the context is open. Raises ``ConfigError`` for a place that will not do."""
    access = AccessPolicy(keys=place.check(), host_names=place.names, basic_auth=True)
    app = protect(create_app(feed), access, csp=CSP, max_body_bytes=0)
    async with serve_http(app, place.host, place.port) as endpoint:
        yield endpoint


def create_app(feed: Feed) -> FastAPI:
    """The ASGI app, without guards."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=_GZIP_MIN_BYTES, compresslevel=6)
    _add_files(app)
    _add_state(app, feed)
    _add_history(app, feed)
    return app


def _add_files(app: FastAPI) -> None:
    known = files()

    @app.get("/")
    @app.get("/peers/{_id}")
    @app.get("/jobs/{_id}")
    async def page(request: Request) -> Response:
        return _answer(request, known[PAGE])

    @app.get("/static/{path:path}")
    async def static(request: Request, path: str) -> Response:
        if path not in known:
            raise HTTPException(404)
        return _answer(request, known[path])


def _add_state(app: FastAPI, feed: Feed) -> None:
    @app.get("/api/v1/state")
    async def state(request: Request) -> Response:
        return _answer(request, feed.now)

    @app.get("/api/v1/events")
    async def events(have: ETag = "") -> Response:
        if feed.is_full:
            message = f"{MAX_VIEWERS} viewers are sent changes already; /api/v1/state may be asked instead"
            raise HTTPException(503, message, headers={"retry-after": "30"})

        async def stream() -> AsyncIterator[dict[str, str]]:
            async with feed.watching(have) as viewer:
                while True:
                    name, data = await viewer.next(feed)
                    yield {"event": name, "data": data}

        return EventSourceResponse(
            stream(), ping=KEEP_ALIVE_S, send_timeout=30, headers={"cache-control": "no-store"}
        )


def _add_history(app: FastAPI, feed: Feed) -> None:
    history = feed.history

    @app.get("/api/v1/history")
    async def model_history(window: Window = "24h", model: Manifest = "") -> Mapping[str, Any]:
        return await run_in_threadpool(charts.model_chart, history, model, window, feed.now_s)

    @app.get("/api/v1/contributions")
    async def contributions(window: Window = "30d") -> list[dict[str, Any]]:
        return await run_in_threadpool(charts.contributions, history, feed.now_s, window)

    @app.get("/api/v1/peers/{peer}")
    async def peer(peer: str) -> Mapping[str, Any]:
        entry = feed.now.body["peers"].get(peer)
        if entry is None:
            raise HTTPException(404, "no such peer is, or was lately, in this swarm")

        def read() -> dict[str, Any]:
            return {
                **entry,
                "history": charts.peer_chart(history, peer, feed.now_s),
                "events": history.events(MAX_PEER_EVENTS, peer),
                "contribution": charts.contribution(history, peer, feed.now_s),
            }

        return await run_in_threadpool(read)

    @app.get("/api/v1/jobs/{job}")
    async def job(job: str) -> Mapping[str, Any]:
        entry = feed.now.body["jobs"].get(job)
        if entry is None:
            raise HTTPException(404, "no peer in this swarm knows this job")
        points = await run_in_threadpool(history.curve, job)
        return {**entry, "curve": charts.job_chart(points), "rounds": charts.last_rounds(points)}


def _answer(request: Request, what: File | Encoded) -> Response:
    """Addresses stay while what is behind them changes: browsers ask each time, and mostly hear that they have it already."""
    headers = {"etag": what.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if what.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", "") and what.zipped is not None:
        zipped = {"content-encoding": "gzip"}
        return Response(what.zipped, media_type=what.media_type, headers=headers | zipped)
    return Response(what.content, media_type=what.media_type, headers=headers)
