"""What a machine asks of a node over HTTP: is it alive, is it ready, how is it doing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from swarmnet.web.guards import API_POLICY, Access, SecurityHeaders, guarded, is_loopback
from swarmnet.web.serving import serving

if TYPE_CHECKING:
    from swarmnet_node.metrics import Measured


class Monitor:
    """``/livez``, ``/readyz`` and ``/metrics`` of a node, which may still be starting."""

    def __init__(self) -> None:
        self._node: Measured | None = None
        self._registry = CollectorRegistry()

    @asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[str]:
        """Answer while the context is open; yields the URL. Raises ``ConfigError`` when it cannot listen there.

        There is nothing secret in it: whoever may connect may read. Only on this machine's own address names are checked, for
        there a web page could make a browser ask.
        """
        app: ASGIApp = Starlette(
            routes=[
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
            ]
        )
        app = guarded(app, Access()) if is_loopback(host) else SecurityHeaders(app, API_POLICY)
        async with serving(app, host, port, option="--metrics") as endpoint:
            yield endpoint.url

    def watch(self, node: "Measured") -> None:
        """From now on this is about ``node``, which serves."""
        from swarmnet_node.metrics import registry_of

        self._node = node
        self._registry = registry_of(node)

    async def _livez(self, _request: Request) -> Response:
        """That this answers says it: the loop runs."""
        return JSONResponse({"alive": True})

    async def _readyz(self, _request: Request) -> Response:
        state = self._node.status().state if self._node else "starting"
        ready = state == "online"
        return JSONResponse({"ready": ready, "state": state}, status_code=200 if ready else 503)

    async def _metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
