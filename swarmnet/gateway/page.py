"""The chat page of the gateway: its files, the paths that need no key, and the button of a demo."""

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Response
from pydantic import BaseModel, Field

from swarmnet.web.pages import page_paths

STATIC = Path(__file__).parent / "static"
PUBLIC_PATHS = ("/health", *page_paths(STATIC))
"""Paths that need no key. The page asks for the key itself."""


class KilledHost(BaseModel):
    """The host that the reader of a demo wants to kill: the peer id of a host of the present
    answer, or "" for any host."""

    peer: str = Field("", max_length=128)


def add_kill(app: FastAPI, kill: Callable[[str], object]) -> None:
    """Let the page of a demo kill one of its hosts: ``kill`` gets ``KilledHost.peer``."""

    async def answer(body: KilledHost) -> Response:
        kill(body.peer)
        return Response(status_code=204)

    app.add_api_route("/demo/kill", answer, methods=["POST"], include_in_schema=False)
