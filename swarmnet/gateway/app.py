"""The endpoints, and what a request passes through before its first token."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from swarmnet.gateway.answers import ChatForm, EventStream, Form, chunks, collect
from swarmnet.gateway.failures import RETRY_S, ApiError, explain
from swarmnet.gateway.generation import Generation
from swarmnet.gateway.metrics import Meter
from swarmnet.gateway.quotas import Quota, Quotas
from swarmnet.gateway.reading import BodyBounds, is_json
from swarmnet.gateway.schemas import (
    MAX_CHOICES,
    ChatMessage,
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    Strict,
    TokenizeRequest,
)
from swarmnet.web.middleware import key_name
from swarmnet_client.batching import sequences
from swarmnet_client.batching.engine import Engine
from swarmnet_client.model.sampling import Sampling
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import race
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.models.chat_template import TemplateFailed, TemplateRefused, render_chat

FIRST_S = 5.0
"""What fails within this is told by the status of an answer; later, in the stream."""
CHARS_PER_TOKEN = 64
"""Text with more than this for each position of the model is not even tokenized."""
PART_CHARS = 1 << 14
"""Longer texts are first tokenized in parts of so much, up to the one that does not fit: a token takes a hundred bytes on the way."""
CUT_TOKENS = 16
"""A cut between two parts makes no more additional tokens than this."""
CLIENT_LEFT = 499
"""Nobody reads it; logs do."""
R = TypeVar("R", bound=Strict)


@dataclass(frozen=True)
class Wanted:
    """A request as it is to be generated: token ids of each prompt, and how many choices of each."""

    prompts: list[list[int]]
    max_tokens: int | None
    alternatives: int | None
    body: Common
    form: Form
    param: str
    """Where in the request the prompts are."""


@dataclass
class Gateway:
    """One model's endpoint."""

    engine: Engine
    quota: Quota = field(default_factory=Quota)
    clock: Clock = wall_clock

    def __post_init__(self) -> None:
        self.model = model_id(self.engine.local.name)
        self.bounds = BodyBounds(self.engine.max_length)
        self.meter = Meter(self.model, self.engine.batcher)
        self._quotas = Quotas(self.quota)
        self._started = int(self.clock())
        self._fingerprint = f"swarm-{self.engine.local.manifest.hash.hex()[:12]}"
        # Its own thread: long prompts must not keep the loop, and it knows no torch.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> FastAPI:
        """Its ASGI app, without the guards."""
        app = FastAPI(title="swarmnet", docs_url=None, redoc_url=None)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.one_model)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route("/health", self.health)
        app.add_api_route("/version", self.version)
        app.add_api_route("/metrics", self.metrics)
        for kind in (ApiError, SwarmnetError, HTTPException, Exception):
            app.add_exception_handler(kind, self._failed)
        return app

    async def drain(self) -> None:
        """Refuse new requests, and return when those that run are over."""
        self._draining = True
        await self._idle.wait()

    def close(self) -> None:
        """Take no more texts to tokenize."""
        self._tokenizing.shutdown(wait=False)

    # ---- endpoints --------------------------------------------------------------------------------------

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._described()

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)

        async def prepare() -> Wanted:
            form = ChatForm(*self._form_arguments())
            ids = await self._in_thread(self._chat_ids, body.messages, True)
            return Wanted([ids], body.limit, body.alternatives, body, form, "messages")

        return await self._respond(request, body, prepare)

    async def complete(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)

        async def prepare() -> Wanted:
            form = Form(*self._form_arguments())
            ids = [
                await self._in_thread(self._ids, prompt, True) if isinstance(prompt, str) else prompt
                for prompt in body.prompt
            ]
            return Wanted(ids, body.max_tokens, body.logprobs, body, form, "prompt")

        return await self._respond(request, body, prepare)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = await self._read(request, TokenizeRequest)
        self._check_model(body.model or self.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "invalid_value", param="prompt")
        if body.messages is not None:
            ids = await self._in_thread(self._chat_ids, body.messages, body.add_generation_prompt)
        else:
            ids = await self._in_thread(self._ids, body.prompt, body.add_special_tokens)
        return {"count": len(ids), "max_model_len": self.engine.max_length, "tokens": ids}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        body = await self._read(request, DetokenizeRequest)
        self._check_model(body.model or self.model)
        if len(body.tokens) > self.engine.max_length:
            message = f"this model has no more than {self.engine.max_length} tokens at a time"
            raise ApiError(400, message, "context_length_exceeded", param="tokens")
        self._check_ids(body.tokens, "tokens")
        return {"prompt": await self._in_thread(self.engine.tokenizer.decode, body.tokens)}

    async def health(self) -> Response:
        if self._draining:
            return JSONResponse({"status": "draining"}, 503)
        if missing := self.engine.missing:
            return JSONResponse({"status": "nobody hosts some blocks", "missing": missing}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> dict[str, str]:
        return {"version": version("swarmnet-p2p")}

    async def metrics(self) -> Response:
        return Response(self.meter.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- a request --------------------------------------------------------------------------------------

    async def _read(self, request: Request, kind: type[R]) -> R:
        """The fields of a request, of which nothing is read if its key may have no answer now. Raises ``ApiError``."""
        key = key_name(request)
        self._quotas.check(key, asyncio.get_running_loop().time())
        if not is_json(request.headers.get("content-type", "")):
            message = "the body is not a JSON object, sent with the header content-type: application/json"
            raise ApiError(400, message, "invalid_json")
        try:
            return self.bounds.read(await request.body(), kind)
        except ApiError:
            self._quotas.count_wrong(key, asyncio.get_running_loop().time())
            raise

    async def _respond(self, request: Request, body: Common, prepare: Callable[[], Any]) -> Response:
        """Admit, prepare, generate. Whatever the caller is charged or given ends with the response."""
        self._check_model(body.model)
        if self._draining:
            raise ApiError(503, "the gateway is stopping", "stopping", "server_error", retry_after_s=RETRY_S)
        self._check_room(body.choices)
        key = key_name(request)
        async with AsyncExitStack() as stack:
            self._quotas.enter(key, body.choices, asyncio.get_running_loop().time())
            stack.callback(self._quotas.leave, key, body.choices)
            self._enter()
            stack.callback(self._leave)
            wanted: Wanted = await prepare()
            requests = self._requests(wanted, key)
            prompt_tokens = sum(map(len, wanted.prompts))
            generation = await stack.enter_async_context(
                Generation.run(self.engine, requests, body.stop, self.meter)
            )
            self._quotas.use(key, sum(len(each.ids) for each in requests), asyncio.get_running_loop().time())
            stack.callback(
                lambda: self._quotas.use(key, generation.tokens, asyncio.get_running_loop().time())
            )
            if not body.stream:
                whole = await race(collect(generation, wanted.form, prompt_tokens), _left(request))
                return Response(status_code=CLIENT_LEFT) if whole is None else JSONResponse(whole)
            if not await race(_begin(generation), _left(request)):
                return Response(status_code=CLIENT_LEFT)
            events = chunks(
                generation, wanted.form, prompt_tokens, with_usage=body.stream_options.include_usage
            )
            return EventStream(events, stack.pop_all())

    def _requests(self, wanted: Wanted, key: str) -> list[sequences.Request]:
        """One for each choice of each prompt. Raises ``ApiError`` for prompts that do not fit."""
        body = wanted.body
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests: list[sequences.Request] = []
        self._check_ids(body.logit_bias, "logit_bias")
        biases = tuple(body.logit_bias.items())
        for prompt in wanted.prompts:
            self._check_ids(prompt, wanted.param)
            room = self.engine.max_length - len(prompt)
            if not 1 <= len(prompt) < self.engine.max_length:
                message = (
                    f"the prompt has {len(prompt)} tokens; this model takes 1 to {self.engine.max_length - 1}"
                )
                raise ApiError(400, message, "context_length_exceeded", param=wanted.param)
            for _ in range(body.n):
                sampling = Sampling(
                    temperature=body.temperature,
                    top_p=body.top_p,
                    seed=seed + len(requests),
                    top_logprobs=wanted.alternatives,
                    presence_penalty=body.presence_penalty,
                    frequency_penalty=body.frequency_penalty,
                    biases=biases,
                )
                requests.append(
                    sequences.Request(
                        tuple(prompt),
                        min(room, wanted.max_tokens or room),
                        sampling,
                        frozenset() if body.ignore_eos else self.engine.end_ids,
                        owner=key,
                    )
                )
        return requests

    def _check_room(self, choices: int) -> None:
        """Raise ``Busy`` where there is no room for these now, ``ApiError`` where there never is."""
        limits = self.engine.batcher.limits
        most = min(MAX_CHOICES, limits.active + limits.waiting)
        if choices > most:
            message = (
                f"at most {most} choices may be asked for at once, over all prompts; these are {choices}"
            )
            raise ApiError(400, message, "invalid_value", param="n")
        self.engine.batcher.check_room(choices)

    def _enter(self) -> None:
        self._running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *arguments)

    def _ids(self, text: str, special: bool) -> list[int]:
        if len(text) > self._max_chars or self._is_too_long(text):
            raise ApiError(
                400, f"{len(text)} characters do not fit into this model", "context_length_exceeded"
            )
        ids: list[int] = self.engine.tokenizer(text, add_special_tokens=special).input_ids
        return ids

    def _is_too_long(self, text: str) -> bool:
        """Whether parts of a long text have more tokens than fit, and some more, for a cut between them makes few."""
        if len(text) <= PART_CHARS:
            return False
        count = 0
        for start in range(0, len(text), PART_CHARS):
            part = text[start : start + PART_CHARS]
            count += len(self.engine.tokenizer(part, add_special_tokens=False).input_ids) - CUT_TOKENS
            if count > self.engine.max_length:
                return True
        return False

    @property
    def _max_chars(self) -> int:
        return CHARS_PER_TOKEN * self.engine.max_length

    def _chat_ids(self, messages: Sequence[ChatMessage], generation_prompt: bool) -> list[int]:
        tokenizer = self.engine.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", "no_chat_template")
        try:
            text = render_chat(
                tokenizer,
                [message.for_template() for message in messages],
                add_generation_prompt=generation_prompt,
                max_chars=self._max_chars,
            )
        except TemplateRefused as error:
            raise ApiError(400, str(error), "invalid_value", param="messages") from error
        except TemplateFailed as error:
            raise ApiError(500, str(error), "chat_template_failed", "server_error") from error
        return self._ids(text, False)

    def _check_ids(self, ids: Collection[int], param: str) -> None:
        vocabulary = self.engine.local.config.vocab_size
        if ids and max(ids) >= vocabulary:
            raise ApiError(400, f"token ids go up to {vocabulary - 1}", "invalid_value", param=param)

    def _check_model(self, name: str) -> None:
        if name != self.model:
            message = f"there is no model {name[:200]!r} here, only {self.model!r}"
            raise ApiError(404, message, "model_not_found", param="model")

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self._started,
            "owned_by": "swarmnet",
            "max_model_len": self.engine.max_length,
        }

    def _form_arguments(self) -> tuple[str, Any, int, str]:
        return self.model, self.engine.tokenizer, int(self.clock()), self._fingerprint

    async def _failed(self, _request: Request, error: Exception) -> Response:
        said = explain(error)
        self.meter.refused(said.code)
        return JSONResponse(said.body(), said.status, said.headers())


def model_id(name: str) -> str:
    """How callers name a model: as it is known, or, where that is a place on this machine, by its last part."""
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name


async def _begin(generation: Generation) -> bool:
    """Wait a while for the first piece. Raises what the generation is refused for."""
    try:
        async with asyncio.timeout(FIRST_S):
            await generation.begun()
    except TimeoutError:
        pass
    return True


async def _left(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
