"""Endpoints of a running command for orchestrators and Prometheus: ``/livez``, ``/readyz`` and
``/metrics``."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from swarmnet.web.middleware import API_CSP, AccessPolicy, SecurityHeaders, is_loopback, protect
from swarmnet.web.server import serve_http

if TYPE_CHECKING:
    from swarmnet_node.owner.control import Watched


class Monitor:
    """The monitoring endpoints of one command. They can be served before its peer, so that its
    start is observable."""

    def __init__(self) -> None:
        self._peer: Watched | None = None
        self._registry = CollectorRegistry()

    @asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve the endpoints at the yielded URL while the context is open. Raises ``ConfigError``
        if the address cannot be bound.

        No key is needed, because the responses contain no secrets. Host names are checked on
        loopback only, against pages in a browser on this machine. On other addresses Prometheus may
        use any name of the machine.
        """
        app: ASGIApp = Starlette(
            routes=[
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
            ]
        )
        app = protect(app, AccessPolicy()) if is_loopback(host) else SecurityHeaders(app, API_CSP)
        async with serve_http(app, host, port, option="--metrics") as endpoint:
            yield endpoint.url

    def watch(self, peer: "Watched", more: Collector | None = None) -> None:
        """Serve the state and the metrics of ``peer`` from now on, and ``more`` metrics."""
        from swarmnet_node.metrics import registry_of

        self._peer = peer
        self._registry = registry_of(peer)
        if more is not None:
            self._registry.register(more)

    async def _livez(self, _request: Request) -> Response:
        """Answer 200 while the event loop runs."""
        return JSONResponse({"alive": True})

    async def _readyz(self, _request: Request) -> Response:
        """Answer 200 while the peer serves, else 503. The body has its state."""
        state = self._peer.status().state if self._peer else "starting"
        ready = state == "online"
        return JSONResponse({"ready": ready, "state": state}, status_code=200 if ready else 503)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
