"""A gateway over the nodes of a lab, and clients that read streams and may disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from swarmnet.gateway.accounts import Quota
from swarmnet.gateway.app import Gateway, refusal
from swarmnet.gateway.batches.endpoints import FILES, MAX_UPLOAD_BYTES
from swarmnet.gateway.models import ModelTable
from swarmnet.gateway.routing.router import Router
from swarmnet.web.middleware import AccessPolicy, ApiKeys, protect
from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.timing import Timing
from tests.support.network.memory_network import LinkProfile
from tests.support.swarm.swarm_lab import EPOCH, Lab, Reference, simulate

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
"""With the tokenizer of ``tiny_swarm``: a role is an unknown word."""


@dataclass
class Caller:
    """An HTTP client of one gateway in this process."""

    gateway: Gateway
    app: Any
    http: httpx.AsyncClient

    @property
    def served(self) -> BatchedModel:
        """The model of a gateway of one model."""
        (entry,) = self.gateway.models.entries.values()
        assert entry.served is not None
        return entry.served.batched

    async def chat(self, content: str = "w5 w6", **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", chat_body(content, **fields))

    async def complete(self, prompt: Any = "w5 w6", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", completion_body(prompt, **fields))

    async def post(self, path: str, body: Any, key: str = "") -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await self.http.post(path, json=body, headers=headers)

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator["Stream"]:
        """A streamed response. Leaving the context disconnects the client."""
        stream = Stream(json.dumps(body).encode())
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        task = asyncio.create_task(self.app(scope, stream.receive, stream.send))
        try:
            yield stream
            stream.gone.set()
            await task
        finally:
            await cancel(task)


@dataclass
class Stream:
    """One request as an ASGI server sees it."""

    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    sent: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    _asked: bool = False

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.sent.put_nowait(message.get("body", b""))
            if not message.get("more_body", False):
                self.sent.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[str]:
        """The events and comments of the stream."""
        rest = ""
        while (part := await self.sent.get()) is not None:
            *whole, rest = (rest + part.decode()).split("\n\n")
            for event in whole:
                yield event


SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
COMMON = {"model": "model", "temperature": 0, "ignore_eos": True}


def chat_body(content: str = "w5 w6", **fields: Any) -> dict[str, Any]:
    return {**COMMON, "messages": [{"role": "user", "content": content}], **fields}


def completion_body(prompt: Any = "w5 w6", **fields: Any) -> dict[str, Any]:
    return {**COMMON, "prompt": prompt, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON of all server-sent events before ``[DONE]``."""
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@asynccontextmanager
async def calling(
    models: ModelTable,
    quota: Quota | None = None,
    keys: dict[str, str] | None = None,
    batches: Path | None = None,
    router: Router | None = None,
) -> AsyncIterator[Caller]:
    """A client of a gateway of these models."""
    clock = asyncio.get_running_loop().time
    served = Gateway(
        models, quota or Quota(), clock=lambda: EPOCH + clock(), batches_dir=batches, router=router
    )
    access = AccessPolicy(ApiKeys(keys or {}), public_paths=["/health"])
    most, long_bodies = served.parser.max_bytes, {FILES: MAX_UPLOAD_BYTES}
    app = protect(served.app(), access, max_body_bytes=most, long_bodies=long_bodies, refusal=refusal)
    transport = httpx.ASGITransport(app)
    async with (
        served.running(),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        yield Caller(served, app, http)


@asynccontextmanager
async def gateway(
    lab: Lab,
    *,
    limits: BatchLimits | None = None,
    quota: Quota | None = None,
    keys: dict[str, str] | None = None,
    batches: Path | None = None,
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
) -> AsyncIterator[Caller]:
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(lab.client())
        model = await stack.enter_async_context(
            BatchedModel.open(
                lab.reference.local, hosts, LoadOptions.picked("float32", "cpu"), limits or BatchLimits()
            )
        )
        model.tokenizer.chat_template = TEMPLATE
        models = await stack.enter_async_context(ModelTable.of(model, adapters))
        caller = await stack.enter_async_context(calling(models, quota, keys, batches))
        # until the nodes' announcements have been read
        await asyncio.sleep(hosts.timing.refresh_s + 1)
        yield caller


def served(
    tiny: Reference,
    scenario: Callable[[Lab, Caller], Awaitable[Any]],
    spans: dict[str, Any] = SPANS,
    *,
    timing: Timing | None = None,
    link: LinkProfile | None = None,
    limit_s: float = 120.0,
    **options: Any,
) -> Any:
    """Run ``scenario`` in a lab with nodes and a gateway; returns its result."""

    async def within(lab: Lab) -> Any:
        await lab.start_all(spans)
        async with gateway(lab, **options) as caller:
            return await scenario(lab, caller)

    lab = {} if link is None else {"link": link}
    return simulate(tiny, within, timing=timing or Timing(), limit_s=limit_s, **lab)


def words(ids: list[int]) -> str:
    """The text of token ids; special tokens have none."""
    return " ".join(f"w{number}" for number in ids if number > 1)


def continued(ids: list[int]) -> str:
    """The text of token ids after a prompt's."""
    return "".join(f" w{number}" for number in ids if number > 1)


def refused(response: Any) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]
