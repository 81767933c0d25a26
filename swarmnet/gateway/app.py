"""The gateway's endpoints, and the life of a request: admitted, tokenized, generated, answered.

A generation request passes these steps, the cheapest first, so that a refusal costs little:

1. The key's quota is checked, then the body is read and parsed (``parsing.py``).
2. The gateway must not be draining (503). The request is counted among the running ones.
3. Its model is opened if it is closed (``models.py``). A forming model is refused (503).
4. The batcher must have places for all choices (503), and the key's quota too (429).
5. Prompts are rendered and tokenized in a thread, and checked against the context (400,
   ``generation/sequence_requests.py``).
6. The choices are generated (``generation/generation.py``).
7. The response is sent whole, or as a stream (``protocols/``). A stream closes the generation and
   gives back what was counted when it ends. Its status is sent with the first token, or after
   ``FIRST_TOKEN_S``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from swarmnet.gateway.accounts import Account, KeyAccounts, Quota, RunningRequest
from swarmnet.gateway.batches.answering import LineAnswerer
from swarmnet.gateway.batches.endpoints import BatchEndpoints
from swarmnet.gateway.batches.queue import AT_ONCE, BatchQueue
from swarmnet.gateway.errors import CLIENT_CLOSED_REQUEST, RETRY_S, ApiError, api_error
from swarmnet.gateway.generation.answering import check_places, embedded, generating
from swarmnet.gateway.generation.events import Usage
from swarmnet.gateway.generation.generation import Generation
from swarmnet.gateway.generation.requests import ChatPrompt, GenerationRequest, Prompt
from swarmnet.gateway.generation.sequence_requests import prepare_prompts, sequence_requests
from swarmnet.gateway.model_life import ModelLife
from swarmnet.gateway.models import ModelEntry, ModelTable, OpenedModel
from swarmnet.gateway.own_answers import OwnRequest, answer_own, check_key
from swarmnet.gateway.page import STATIC
from swarmnet.gateway.parsing import BodyParser, is_json
from swarmnet.gateway.protocols import messages, ollama
from swarmnet.gateway.protocols.chat_completions import CHAT_COMPLETIONS
from swarmnet.gateway.protocols.completions import COMPLETIONS
from swarmnet.gateway.protocols.embeddings import EmbeddingBody
from swarmnet.gateway.protocols.endpoint import (
    AnswerWriter,
    GenerationEndpoint,
    ServedAs,
    answer_parts,
    whole_answer,
)
from swarmnet.gateway.protocols.messages import MESSAGES, CountBody
from swarmnet.gateway.protocols.ollama import OLLAMA_CHAT, OLLAMA_GENERATE, OllamaEmbedBody
from swarmnet.gateway.protocols.responses import RESPONSES, ResponsesBody
from swarmnet.gateway.protocols.schemas import DetokenizeRequest, StrictModel, TokenizeRequest
from swarmnet.gateway.routing.router import AUTO, Router, question
from swarmnet.resident import PATH
from swarmnet.web.middleware import key_name
from swarmnet.web.pages import add_page
from swarmnet_client.model.sampling import Sampling
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import race, within
from swarmnet_protocols.machine.clock import Clock, wall_clock

FIRST_TOKEN_S = 5.0
"""Seconds until a stream's status is sent even without a token. An earlier failure is reported by
the status, a later one by an error event."""
ENDPOINTS: tuple[GenerationEndpoint[Any], ...] = (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
)
"""The endpoints that generate."""
EMBEDDINGS = {"/v1/embeddings": EmbeddingBody, "/api/embed": OllamaEmbedBody}
ERRORS = {messages.PATH: messages.error_body, ollama.PREFIX: ollama.error_body}
"""The error objects of protocols by the beginnings of their paths. All others are OpenAI's."""
ALL_MODELS = "--"
"""The folder of batches of an endpoint of several models."""
R = TypeVar("R", bound=StrictModel)


@dataclass
class Gateway:
    """The endpoint of the models of a table, for the protocols in ``ENDPOINTS``. All requests to a
    model share its batcher."""

    models: ModelTable
    quota: Quota = field(default_factory=Quota)
    clock: Clock = wall_clock
    own_key: str = ""
    """The secret of this user's own commands (``own_answers.py``); empty to refuse them."""
    batches_dir: Path | None = None
    """The folder of files and batches. None to refuse batches."""
    router: Router | None = None
    """Chooses the model of requests for ``auto``. None: there is no such model."""

    def __post_init__(self) -> None:
        self.parser = BodyParser(self.models.max_context)
        self.accounts = KeyAccounts(self.quota, self.clock)
        self._created = int(self.clock())
        self._batches = None
        if self.batches_dir is not None:
            folder = self.batches_dir / (self.models.usual_name.replace("/", "--") or ALL_MODELS)
            self._batches = BatchQueue(folder, self.accounts, self.line_answerer, self.parser, self.clock)
        self._batch_places = asyncio.Semaphore(AT_ONCE)
        self._running = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> FastAPI:
        """Return the ASGI app, without the middleware of ``swarmnet.web``."""
        app = FastAPI(title="swarmnet", docs_url=None, redoc_url=None)
        get_routes: list[tuple[str, Callable[..., Any]]] = [
            ("/v1/models", self.all_models),
            ("/v1/models/{name:path}", self.one_model),
            ("/health", self.health),
            ("/version", self.version),
            ("/metrics", self.metrics),
            ("/v1/responses/{response_id}", self.kept_response),
            ("/v1/usage", self.usage),
            ("/api/version", self.ollama_version),
            ("/api/tags", self.ollama_tags),
            ("/api/ps", self.ollama_ps),
        ]
        for path, endpoint in get_routes:
            app.add_api_route(path, endpoint)
            # monitors send HEAD requests
            app.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
        for each in ENDPOINTS:
            answer = partial(self.answer, each)
            app.add_api_route(each.path, answer, methods=["POST"], response_model=None)
        for path, schema in EMBEDDINGS.items():
            embed = partial(self.embed, schema)
            app.add_api_route(path, embed, methods=["POST"], response_model=None)
        app.add_api_route(f"{messages.PATH}/count_tokens", self.count_tokens, methods=["POST"])
        app.add_api_route("/v1/responses/{response_id}", self.forget_response, methods=["DELETE"])
        app.add_api_route("/v1/usage/{request_id}", self.cancel_request, methods=["DELETE"])
        app.add_api_route("/api/show", self.ollama_show, methods=["POST"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route(
            PATH, self.answer_own, methods=["POST"], response_model=None, include_in_schema=False
        )
        add_page(app, STATIC)
        if self._batches is not None:
            BatchEndpoints(self.accounts, self.parser, self._batches).add_routes(app)
        for kind in (ApiError, SwarmnetError, HTTPException, Exception):
            app.add_exception_handler(kind, self._handle_error)
        return app

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer batches while the context is open."""
        if self._batches is None:
            yield
            return
        async with self._batches.running():
            yield

    def line_answerer(self, account: Account, places: asyncio.Semaphore | None = None) -> LineAnswerer:
        """Return the answerer of a batch's lines.

        ``places``: bounds the lines that are answered at a time. Without it, all accounts share
        ``AT_ONCE`` places.
        """

        def using(name: str, prompt: Callable[[], Prompt]) -> AbstractAsyncContextManager[OpenedModel]:
            return self.models.using(self._resolved(name, prompt))

        name, places = self.models.usual_name, places or self._batch_places
        return LineAnswerer(using, self._served_as, name, account, places)

    async def drain(self) -> None:
        """Refuse new requests and wait until the running ones have ended."""
        self._draining = True
        await self._idle.wait()

    # ---- endpoints ------------------------------------------------------------------------------

    async def all_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_object(each) for each in self._listed()]}

    async def one_model(self, name: str) -> dict[str, Any]:
        return self._model_object(self._find(name))

    async def answer(self, endpoint: GenerationEndpoint[Any], request: Request) -> Response:
        body = await self._parse(request, endpoint.body)
        before = ""
        if isinstance(body, ResponsesBody):
            body.continue_from(self._account(request).kept)
            before = body.answered_by
        body.model = self._resolved(body.model, lambda: endpoint.request(body, Sampling()).prompt, before)
        async with self._using(request, body.model) as (model, stack):
            served = self._served_as(model, self._account(request))
            wanted = endpoint.request(body, model.batched.sampling)
            return await self._generate(request, wanted, model, endpoint.writer(body, served), stack)

    async def embed(self, schema: type[EmbeddingBody], request: Request) -> Response:
        body = await self._parse(request, schema)
        wanted = body.request()
        async with self._using(request, wanted.model) as (model, stack):
            batched = model.batched
            width = batched.local.manifest.hidden_size
            if (body.dimensions or 1) > width:
                message = f"an embedding of this model has {width} dimensions"
                raise ApiError(400, message, "invalid_value", param="dimensions")
            account = self._admit(request, model, 1, stack)
            prompts = await prepare_prompts(wanted, model.tokenizer)
            requests = sequence_requests(wanted, prompts, batched, model.tokenizer, account.name)
            tokens = sum(len(each.ids) for each in requests)
            account.count(Usage(tokens))
            vectors = await race(embedded(batched, requests, body.dimensions), _client_left(request))
            if vectors is None:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            return JSONResponse(body.response(model.name, vectors, tokens))

    async def count_tokens(self, request: Request) -> dict[str, int]:
        body = await self._parse(request, CountBody)
        body.model = self._resolved(body.model, body.chat)
        async with self._using(request, body.model) as (model, _):
            ids = await model.tokenizer.encode_chat(body.chat(), generation_prompt=True)
            return {"input_tokens": len(ids)}

    async def kept_response(self, response_id: str, request: Request) -> dict[str, Any]:
        return self._account(request).kept.find(response_id).fields

    async def forget_response(self, response_id: str, request: Request) -> dict[str, Any]:
        self._account(request).kept.forget(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def usage(self, request: Request) -> dict[str, Any]:
        return self._account(request).fields()

    async def cancel_request(self, request_id: str, request: Request) -> dict[str, Any]:
        self._account(request).cancel(request_id)
        return {"id": request_id, "object": "request", "cancelled": True}

    async def ollama_version(self) -> dict[str, str]:
        return {"version": ollama.API_VERSION}

    async def ollama_tags(self) -> dict[str, Any]:
        return {"models": [self._ollama_object(each) for each in self._listed()]}

    async def ollama_ps(self) -> dict[str, Any]:
        loaded = [each for each in self.models.listed() if each.served is not None]
        return {"models": [self._ollama_object(each) for each in loaded]}

    async def ollama_show(self, request: Request) -> dict[str, Any]:
        body = await self._parse(request, ollama.ShowBody)
        return ollama.shown(self._ollama_object(self._find(body.model)))

    async def answer_own(self, request: Request) -> Response:
        check_key(request, self.own_key)
        body = self.parser.parse(await request.body(), OwnRequest)
        async with self._using(request, body.model or self.models.usual_name) as (model, stack):
            return await answer_own(model.batched, model.tokenizer, body, stack)

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = await self._parse(request, TokenizeRequest)
        async with self._using(request, body.model or self.models.usual_name) as (model, _):
            if body.messages is not None and body.prompt is None:
                chat = ChatPrompt(tuple(message.message() for message in body.messages))
                ids = await model.tokenizer.encode_chat(chat, generation_prompt=body.add_generation_prompt)
            elif body.prompt is not None and body.messages is None:
                ids = await model.tokenizer.encode(body.prompt, special_tokens=body.add_special_tokens)
            else:
                raise ApiError(400, "give either prompt or messages", "invalid_value", param="prompt")
            return {"count": len(ids), "max_model_len": model.batched.max_length, "tokens": ids}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        body = await self._parse(request, DetokenizeRequest)
        async with self._using(request, body.model or self.models.usual_name) as (model, _):
            most = model.batched.max_length
            if len(body.tokens) > most:
                message = f"at most {most} tokens fit into the context of this model"
                raise ApiError(400, message, "context_length_exceeded", param="tokens")
            model.tokenizer.check_ids(body.tokens, "tokens")
            return {"prompt": await model.tokenizer.decode(body.tokens)}

    async def health(self) -> Response:
        if self._draining:
            return JSONResponse({"status": "draining"}, 503)
        offers = [each.offer for each in self.models.listed()]
        if offers and all(each.missing for each in offers):
            missing = {each.name: each.missing for each in offers}
            return JSONResponse({"status": "some blocks have no host", "missing": missing}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> dict[str, str]:
        return {"version": version("swarmnet-p2p")}

    async def metrics(self) -> Response:
        return Response(self.models.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # ---- a request ------------------------------------------------------------------------------

    async def _parse(self, request: Request, schema: type[R]) -> R:
        """Read and parse the body. Raises ``ApiError`` if the key's quota is used up, before the
        body is read, and for an invalid body."""
        account = self._account(request)
        account.check()
        if not is_json(request.headers.get("content-type", "")):
            message = "the body is not a JSON object, sent with the header content-type: application/json"
            raise ApiError(400, message, "invalid_json")
        try:
            return self.parser.parse(await request.body(), schema)
        except ApiError:
            account.count_invalid()
            raise

    async def _generate(
        self,
        request: Request,
        wanted: GenerationRequest,
        model: OpenedModel,
        writer: AnswerWriter,
        stack: AsyncExitStack,
    ) -> Response:
        """Admit a request, tokenize it, generate its choices and respond. A streamed response takes
        over ``stack``."""
        account = self._admit(request, model, wanted.choices, stack)
        generation = await stack.enter_async_context(
            generating(wanted, model.batched, model.tokenizer, model.metrics, account.name)
        )
        running = RunningRequest(request.url.path, model.name, int(self.clock()), generation)
        stack.enter_context(account.running(running))
        if not wanted.stream:
            response = whole_answer(generation, writer)
            fields = await race(response, _client_left(request))
            return Response(status_code=CLIENT_CLOSED_REQUEST) if fields is None else JSONResponse(fields)
        if not await race(_wait_first_token(generation), _client_left(request)):
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return writer.response(answer_parts(generation, writer), stack.pop_all())

    @asynccontextmanager
    async def _using(self, request: Request, name: str) -> AsyncIterator[tuple[OpenedModel, AsyncExitStack]]:
        """Count a request as running and keep its model open, until the yielded stack is closed.

        That is the end of the context, unless a streamed response takes the stack over. Raises
        ``ApiError`` or ``Overloaded`` if the model is unknown or cannot be used now.
        """
        self._check_not_draining()
        async with AsyncExitStack() as stack:
            self._count_running(1)
            stack.callback(self._count_running, -1)
            model = await stack.enter_async_context(self.models.using(name))
            request.state.model = model.name
            yield model, stack

    def _account(self, request: Request) -> Account:
        return self.accounts[key_name(request)]

    def _admit(self, request: Request, model: OpenedModel, choices: int, stack: AsyncExitStack) -> Account:
        """Count a request in the quota of its key until ``stack`` is closed, and return the account
        of the key. Raises ``ApiError`` or ``Overloaded`` if it cannot run now."""
        check_places(model.batched, choices)
        account = self._account(request)
        stack.enter_context(account.admitted(choices))
        return account

    def _check_not_draining(self) -> None:
        if self._draining:
            raise ApiError(503, "the gateway is stopping", "stopping", "server_error", retry_after_s=RETRY_S)

    def _count_running(self, change: int) -> None:
        self._running += change
        if self._running == 0:
            self._idle.set()
        else:
            self._idle.clear()

    def _served_as(self, model: OpenedModel, account: Account) -> ServedAs:
        fingerprint = model.offer.fingerprint
        return ServedAs(model.name, model.batched.tokenizer, int(self.clock()), fingerprint, account.kept)

    def _resolved(self, name: str, prompt: Callable[[], Prompt], before: str = "") -> str:
        """Return the model that answers a request for ``name``: for ``auto``, the router's choice.

        ``before``: the model of the previous response. Raises ``ApiError`` if none can answer.
        """
        if name != AUTO or self.router is None:
            return name
        speeds = self.router.speeds(each.offer for each in self.models.listed())
        return self.router.choose(question(prompt()), speeds, before)

    def _listed(self) -> list[ModelEntry]:
        """Return the entries of all models, and last ``auto`` if there is a router."""
        entries = self.models.listed()
        if self.router is None:
            return entries
        entries = [each for each in entries if each.offer.name != AUTO]  # hosts choose any name
        auto = self.router.offer(each.offer for each in entries)
        if auto is None:
            return entries
        # never opens: a request for auto opens the model that the router chooses
        return [*entries, ModelEntry(auto, ModelLife(AUTO, lambda: nullcontext({})))]

    def _find(self, name: str) -> ModelEntry:
        """Return a model of the list. Raises ``ApiError`` for an unknown name."""
        found = next((each for each in self._listed() if each.offer.name == name), None)
        return found or self.models.find(name)

    def _model_object(self, entry: ModelEntry) -> dict[str, Any]:
        return {
            "id": entry.offer.name,
            "object": "model",
            "created": self._created,
            "owned_by": "swarmnet",
            "max_model_len": entry.offer.context or None,
            **entry.fields(),
        }

    def _ollama_object(self, entry: ModelEntry) -> dict[str, Any]:
        left_s = self.models.left_s(entry)
        closes = None if left_s is None else self.clock() + left_s
        return {**entry.fields(), **ollama.listed(entry.offer, self._created, closes)}

    async def _handle_error(self, request: Request, error: Exception) -> Response:
        response = api_error(error)
        model = getattr(request.state, "model", self.models.usual_name)
        self.models.metrics.count_error(model, response.code)
        return JSONResponse(_error_body(request.url.path, response), response.status, response.headers())


def refusal(path: str, status: int, message: str, code: str) -> dict[str, Any]:
    """Return the error object of the middleware's refusals, in the protocol of the path."""
    return _error_body(path, ApiError(status, message, code))


def _error_body(path: str, error: ApiError) -> dict[str, Any]:
    write = next((body for begin, body in ERRORS.items() if path.startswith(begin)), ApiError.body)
    return write(error)


async def _wait_first_token(generation: Generation) -> bool:
    """Wait for the first token, at most ``FIRST_TOKEN_S``; returns True. Raises ``SwarmnetError``
    if the generation fails before."""
    await within(FIRST_TOKEN_S, generation.wait_started())
    return True


async def _client_left(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
