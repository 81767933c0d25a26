"""The chat page over an endpoint whose answers a test writes, served in this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from swarmnet.gateway.page import PUBLIC_PATHS, STATIC, add_kill
from swarmnet.web.middleware import AccessPolicy, ApiKeys, protect
from swarmnet.web.pages import add_page
from swarmnet.web.server import serve_http
from tests.support.network.loop_thread import LoopThread

PEERS = ("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq", "12D3KooWQ1xpcF", "12D3KooWs6ZqRu")
ROUTE = [{"peer": peer, "start": 10 * at, "end": 10 * at + 10} for at, peer in enumerate(PEERS)]
MODEL = "smollm2-135m-instruct"
Delta = dict[str, Any]


def step(tokens: int, number: int) -> dict[str, Any]:
    """A trip around the chain, every seventh of which waits."""
    wait_s = 0.05 if number % 7 == 3 else 0.002
    hops = [hop | {"wire_s": 0.011, "wait_s": wait_s, "compute_s": 0.014, "send_s": 0.001} for hop in ROUTE]
    took_s = 0.002 + 0.011 + sum(0.026 + wait_s for _ in hops)
    return {
        "tokens": tokens,
        "positions": tokens,
        "took_s": took_s,
        "here_s": 0.002,
        "back_s": 0.011,
        "hops": hops,
    }


def said(text: str) -> list[Delta]:
    """An answer in pieces of three words."""
    words = text.split(" ")
    return [
        {"content": " ".join(words[at : at + 3]) + (" " if at + 3 < len(words) else "")}
        for at in range(0, len(words), 3)
    ]


@dataclass
class ScriptedEndpoint:
    """An endpoint at ``url``. ``answers``: the deltas of the next answers. The last one repeats.

    - ``pause``: awaited between two deltas.
    - ``asked``: the bodies of requests.
    - ``missing``: blocks of the model ``large`` without a host.
    - ``running``: ids of other running requests of the key.
    - ``killed``: hosts that the page of a demo killed.
    """

    answers: list[Sequence[Delta]]
    pause: Callable[[], Any] = lambda: asyncio.sleep(0)
    asked: list[dict[str, Any]] = field(default_factory=list)
    missing: list[list[int]] = field(default_factory=lambda: [[20, 30]])
    running: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()
        add_page(app, STATIC)
        add_kill(app, self.killed.append)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/usage", self.usage)
        app.add_api_route("/v1/usage/{request_id}", self.cancel, methods=["DELETE"])
        app.add_api_route("/v1/chat/completions", self.answer, methods=["POST"], response_model=None)
        return app

    async def models(self) -> Any:
        missing = {"missing_blocks": self.missing, "missing_gb": 0.07}
        forming = {"available": not self.missing, "blocks": 30, **missing}
        adapted = {"id": f"{MODEL}:law", "parent": MODEL}
        return {"data": [{"id": "large", **forming}, {"id": MODEL}, adapted]}

    async def usage(self) -> Any:
        used = {"prompt_tokens": 1234, "completion_tokens": 56, "cached_tokens": 7, "trips": 8}
        running = [{"id": each, "model": "large", "completion_tokens": 9} for each in self.running]
        return {"requests": len(self.asked), **used, "running": running}

    async def cancel(self, request_id: str) -> Any:
        self.running.remove(request_id)
        return {}

    async def answer(self, request: Request) -> StreamingResponse:
        self.asked.append(await request.json())
        deltas = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return StreamingResponse(self._events(deltas), media_type="text/event-stream")

    async def _events(self, deltas: Sequence[Delta]) -> AsyncIterator[str]:
        def event(choices: list[Any], **fields: Any) -> str:
            return f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': choices, **fields})}\n\n"

        yield ": prefill 256/512\n\n"
        for number, delta in enumerate(deltas):
            await self.pause()
            news = {"tokens": 1, "steps": [step(1, number)], **({"route": ROUTE} if number == 0 else {})}
            yield event([{"index": 0, "delta": delta, "finish_reason": None}], swarmnet=news)
        reason = "tool_calls" if any("tool_calls" in delta for delta in deltas) else "stop"
        yield event([{"index": 0, "delta": {}, "finish_reason": reason}])
        yield event([], usage={"completion_tokens": len(deltas), "trips": len(deltas)}, swarmnet={})
        yield "data: [DONE]\n\n"


@contextmanager
def scripted(endpoint: ScriptedEndpoint, key: str = "") -> Iterator[ScriptedEndpoint]:
    """Serve an endpoint while the context is open, behind ``key`` if there is one."""
    keys = ApiKeys({"alice": key} if key else {})
    app = protect(endpoint.app(), AccessPolicy(keys, public_paths=PUBLIC_PATHS))
    with LoopThread(asyncio.new_event_loop) as loop:
        serving = serve_http(app, "127.0.0.1", 0)
        endpoint.url = loop.run(serving.__aenter__()).url
        try:
            yield endpoint
        finally:
            loop.run(serving.__aexit__(None, None, None))
