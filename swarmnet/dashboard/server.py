"""The dashboard's HTTP server: the page, its JSON API, and events (SSE); ``run_dashboard`` starts
it with its observer and history."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Request, Response
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware

from swarmnet.dashboard import charts
from swarmnet.dashboard.feed import MAX_VIEWERS, Feed
from swarmnet.dashboard.history import History
from swarmnet.dashboard.observing.observations import SwarmInfo
from swarmnet.dashboard.observing.observer import Observer
from swarmnet.dashboard.observing.polling import ObserverDependencies
from swarmnet.swarm_file.entry import Entry
from swarmnet.swarm_file.household import is_household
from swarmnet.web.middleware import AccessPolicy, check_exposed, protect
from swarmnet.web.pages import CSP, add_page, conditional_response
from swarmnet.web.server import HttpEndpoint, serve_http
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId

STATIC = Path(__file__).parent / "static"
KEEP_ALIVE_S = 15
"""Seconds between comments on an idle event stream, so that proxies keep it open."""
MAX_PEER_EVENTS = 100
INVITE_PLACEHOLDER = "INVITE"
ADDRESS_PLACEHOLDER = "ADDR"
_GZIP_MIN_BYTES = 1024

Members = Callable[[], Mapping[str, object]]
"""Returns the members and the open invites of a swarm. Raises ``SwarmnetError``."""
Window = Annotated[Literal["24h", "30d"], Query()]
Manifest = Annotated[str, Query(pattern="^([0-9a-f]{64})?$")]
ETag = Annotated[str, Query(max_length=64)]


@asynccontextmanager
async def run_dashboard(
    dependencies: ObserverDependencies,
    entry: Entry,
    history_dir: Path,
    address: tuple[str, int],
    access: AccessPolicy,
    members: Members | None = None,
) -> AsyncIterator[tuple[HttpEndpoint, Feed]]:
    """Observe the swarm of ``entry`` and serve its dashboard while the context is open.

    ``address``: host and port. ``members``: what the owner of the swarm may see of its members;
    None for any other page. Each swarm has its own history, in a folder of ``history_dir``.

    Raises ``ConfigError`` if the history cannot be written or the address cannot be bound.
    """
    folder = history_dir / entry.file.swarm_id.hex()[:16]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot keep a history in {folder}: {error.strerror}", hint="choose another --data-dir"
        ) from error
    model_names = {model.manifest: model.name for model in entry.file.models}
    info = swarm_info(entry, dependencies.transport.peer_id)
    async with AsyncExitStack() as stack:
        history = stack.enter_context(History.open(folder))
        observer = await stack.enter_async_context(Observer(dependencies, info, model_names).running())
        feed = await stack.enter_async_context(Feed(observer, history).running())
        yield await stack.enter_async_context(serve(feed, *address, access, members)), feed


def swarm_info(entry: Entry, observer: PeerId) -> SwarmInfo:
    """Return what the page says about a swarm. The command to join has placeholders for the invite
    and the address, because the page may be public. In a household a code is enough."""
    file = entry.file
    join = ["swarm.toml" if file.is_open else INVITE_PLACEHOLDER]
    if is_household(entry.peer.data_dir, file):
        join = []
    elif file.is_open and not file.bootstrap and not file.mdns:
        join += ["--bootstrap", ADDRESS_PLACEHOLDER]
    return SwarmInfo(file.name, file.swarm_id.hex(), str(file.admission), observer, tuple(join))


@asynccontextmanager
async def serve(
    feed: Feed, host: str, port: int, access: AccessPolicy, members: Members | None = None
) -> AsyncIterator[HttpEndpoint]:
    """Serve ``feed`` while the context is open. Raises ``ConfigError`` if the address cannot be
    bound or needs a key."""
    check_exposed(host, access.keys)
    app = protect(create_app(feed, members), access, csp=CSP, max_body_bytes=0)
    async with serve_http(app, host, port) as endpoint:
        yield endpoint


def create_app(feed: Feed, members: Members | None = None) -> FastAPI:
    """Return the ASGI app, without the middleware of ``swarmnet.web``."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=_GZIP_MIN_BYTES, compresslevel=6)
    add_page(app, STATIC, "/peers/{_id}", "/jobs/{_id}")
    _add_state(app, feed)
    _add_history(app, feed)
    _add_members(app, members)
    return app


def _add_members(app: FastAPI, members: Members | None) -> None:
    @app.get("/api/v1/members")
    async def listed() -> Mapping[str, object] | None:
        return None if members is None else await run_in_threadpool(members)


def _add_state(app: FastAPI, feed: Feed) -> None:
    @app.get("/api/v1/state")
    async def state(request: Request) -> Response:
        return conditional_response(request, feed.now.content)

    @app.get("/api/v1/events")
    async def events(have: ETag = "") -> Response:
        if feed.is_full:
            message = f"{MAX_VIEWERS} viewers are connected already; poll /api/v1/state instead"
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
        return await run_in_threadpool(
            charts.model_chart, history, model, window, feed.now_s, feed.begun_models(model)
        )

    @app.get("/api/v1/contributions")
    async def contributions(window: Window = "30d") -> list[dict[str, Any]]:
        return await run_in_threadpool(charts.contributions, history, feed.now_s, window, feed.begun_peers())

    @app.get("/api/v1/peers/{peer}")
    async def peer(peer: str) -> Mapping[str, Any]:
        entry = feed.now.body["peers"].get(peer)
        if entry is None:
            raise HTTPException(404, "this swarm has no such peer, and had none in the last minutes")

        begun, given = feed.begun_peers(), feed.given(peer)

        def read() -> dict[str, Any]:
            return {
                **entry,
                "history": charts.peer_chart(history, peer, feed.now_s, begun),
                "events": history.events(MAX_PEER_EVENTS, peer),
                "given": given,
                "contribution": charts.contribution(history, peer, feed.now_s, begun),
            }

        return await run_in_threadpool(read)

    @app.get("/api/v1/jobs/{job}")
    async def job(job: str) -> Mapping[str, Any]:
        entry = feed.now.body["jobs"].get(job)
        if entry is None:
            raise HTTPException(404, "this swarm has no such training job")
        points = await run_in_threadpool(history.job_points, job)
        return {**entry, "curve": charts.job_chart(points), "last_rounds": charts.last_rounds(points)}
