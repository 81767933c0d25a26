"""Ollama's API: ``/api/chat``, ``/api/generate``, ``/api/embed``, and what it tells of the model.

Ollama's options about its own memory and threads are ignored: hosts decide these.
"""

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi.responses import Response
from pydantic import AfterValidator, Field

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.events import (
    AnsweredChoice,
    ArgumentsDelta,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    Usage,
    whole_choices,
)
from swarmnet.gateway.generation.requests import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    OutputFormat,
    Reasoning,
    ToolCall,
)
from swarmnet.gateway.protocols.embeddings import EmbeddingBody
from swarmnet.gateway.protocols.endpoint import (
    AnswerWriter,
    GenerationEndpoint,
    LineStreamResponse,
    ServedAs,
)
from swarmnet.gateway.protocols.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    AgentTool,
    OpenModel,
    RepetitionPenalty,
    SamplingBody,
    StrictModel,
    at_most,
)
from swarmnet_client.batching.answers import Prefill
from swarmnet_client.hosts.model_offers import ModelOffer
from swarmnet_client.model.sampling import Sampling
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.machine.aio import loop_time

PREFIX = "/api/"
API_VERSION = "0.12.0"
"""The version of Ollama's API that these endpoints speak. Clients require some version."""
FOREVER = datetime(9999, 1, 1, tzinfo=UTC).isoformat()

TAG = ":latest"
"""The tag of a name without one. Ollama lists names with tags. Some of its clients, such as Open
WebUI, find a model only by a name with a tag."""
Model = Annotated[str, AfterValidator(lambda name: name.removesuffix(TAG))]


class Options(SamplingBody):
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa"}
        | {"repeat_last_n", "use_mlock", "use_mmap"}
    )
    repeat_penalty: RepetitionPenalty = 1
    """Counts all tokens of prompt and answer, whatever ``repeat_last_n`` says."""
    num_predict: int = Field(-1, ge=-2)
    """Most tokens of the answer; below 1 for no limit."""


class OllamaBody(StrictModel):
    """Parameters that chats and completions share."""

    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive", "truncate", "shift"})
    model: Model
    stream: bool = True
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    format: Literal["", "json"] | dict[str, Any] = ""
    think: bool | str = ""

    def common(self, usual: Sampling) -> dict[str, Any]:
        """Return the fields of the core's request that do not depend on the prompt."""
        options = self.options
        schema = {"type": "object"} if self.format == "json" else self.format
        return {
            "model": self.model,
            "sampling": options.sampling(usual, repetition_penalty=options.repeat_penalty),
            "max_tokens": options.num_predict if options.num_predict > 0 else None,
            "stop": tuple(options.stop),
            "output": OutputFormat("json_schema", schema) if schema else None,
            "stream": self.stream,
        }

    @property
    def reasoning(self) -> Reasoning:
        if isinstance(self.think, str):
            return Reasoning(self.think)
        return Reasoning("" if self.think else "none")


class OllamaFunction(AgentTool):
    arguments: dict[str, Any] = Field({})


class OllamaTool(OpenModel):
    id: str = ""
    function: OllamaFunction


class OllamaMessage(StrictModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"name"})
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str = ""
    images: Annotated[list[str], Field(max_length=0)] = Field([])
    tool_calls: Annotated[list[OllamaTool], Field(fail_fast=True), at_most(MAX_PARTS)] = Field([])
    tool_call_id: str = ""
    tool_name: str = ""

    def message(self, number: int) -> ChatMessage:
        """Return the message for the core. Calls may come without ids, and results with the name of
        the tool alone."""
        calls = tuple(
            ToolCall(
                call.id or f"call_{number}_{at}", call.function.name, json.dumps(call.function.arguments)
            )
            for at, call in enumerate(self.tool_calls)
        )
        return ChatMessage(self.role, self.content, self.thinking, calls, self.tool_call_id, self.tool_name)


class OllamaChatBody(OllamaBody):
    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]
    tools: Annotated[list[OllamaTool], Field(fail_fast=True), at_most(MAX_TOOLS)] = Field([])

    def request(self, usual: Sampling) -> GenerationRequest:
        chat = ChatPrompt(
            tuple(message.message(number) for number, message in enumerate(self.messages)),
            tuple(tool.function.tool() for tool in self.tools),
            reasoning=self.reasoning,
        )
        return GenerationRequest(prompt=chat, param="messages", **self.common(usual))


class OllamaGenerateBody(OllamaBody):
    prompt: Annotated[str, Field(min_length=1)]
    system: str = ""
    raw: bool = False

    def request(self, usual: Sampling) -> GenerationRequest:
        prompt: ChatPrompt | tuple[str, ...] = (self.prompt,)
        if not self.raw:
            begin = [ChatMessage("system", self.system)] if self.system else []
            prompt = ChatPrompt((*begin, ChatMessage("user", self.prompt)), reasoning=self.reasoning)
        return GenerationRequest(prompt=prompt, param="prompt", **self.common(usual))


class OllamaEmbedBody(EmbeddingBody):
    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options", "truncate"})
    model: Model

    def response(self, model: str, vectors: Sequence[Array], tokens: int) -> dict[str, Any]:
        return {
            "model": model,
            "embeddings": [vector.tolist() for vector in vectors],
            "prompt_eval_count": tokens,
        }


class ShowBody(StrictModel):
    ignored: ClassVar[frozenset[str]] = frozenset({"name", "verbose"})
    model: Model


class OllamaWriter(AnswerWriter):
    """Writes the response to one request, whole or as lines of JSON."""

    def __init__(self, _body: OllamaBody, served: ServedAs) -> None:
        self._served = served
        self._began_s = loop_time()
        self._first_s: float | None = None
        """Time of the first event of a stream. None until it has come."""
        self._call: ToolCall | None = None
        """The call whose arguments are incomplete."""
        self._reason = "stop"

    def whole(self, choices: Sequence[AnsweredChoice], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        self._reason = choice.reason or "stop"
        return self._line(self._content(choice), usage)

    def event(self, event: Delta, usage: Usage) -> Iterable[bytes]:
        if self._first_s is None:
            self._first_s = loop_time()
        match event:
            case TextDelta() | ReasoningDelta():
                yield self._encoded(self._content(*whole_choices([event])))
            case ToolCallBegin():
                yield from self._end_call()
                self._call = ToolCall(event.id, event.name, "")
            case ArgumentsDelta() if self._call is not None:
                whole = self._call.arguments + event.text
                self._call = ToolCall(self._call.id, self._call.name, whole)
            case _:
                yield from self._end_call()
                self._reason = getattr(event, "reason", self._reason)

    def end(self, usage: Usage) -> Iterable[bytes]:
        yield self._encoded(self._content(AnsweredChoice(0)), usage)

    def progress(self, prefill: Prefill) -> Iterable[bytes]:
        return ()

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return (json.dumps(error_body(error)).encode() + b"\n",)

    def response(self, parts: AsyncIterator[bytes], resources: AsyncExitStack) -> Response:
        return LineStreamResponse(parts, resources)

    def _end_call(self) -> Iterable[bytes]:
        if self._call is not None:
            yield self._encoded(self._content(AnsweredChoice(0, calls=[self._call])))
            self._call = None

    def _content(self, choice: AnsweredChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if choice.reasoning:
            message["thinking"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": call.values()}} for call in choice.calls
            ]
        return {"message": message}

    def _encoded(self, content: dict[str, Any], usage: Usage | None = None) -> bytes:
        return json.dumps(self._line(content, usage)).encode() + b"\n"

    def _line(self, content: dict[str, Any], usage: Usage | None) -> dict[str, Any]:
        """Return a line of a stream. ``usage``: what the answer took, in its last line."""
        created = datetime.fromtimestamp(self._served.created, UTC).isoformat()
        line = {"model": self._served.model, "created_at": created, **content, "done": usage is not None}
        if usage is None:
            return line
        now_s = loop_time()
        first_s = self._began_s if self._first_s is None else self._first_s
        return line | {
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": _ns(now_s - self._began_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first_s - self._began_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(now_s - first_s),
        }


class OllamaGenerateWriter(OllamaWriter):
    def _content(self, choice: AnsweredChoice) -> dict[str, Any]:
        thinking = {"thinking": choice.reasoning} if choice.reasoning else {}
        return {"response": choice.text, **thinking}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def error_body(error: ApiError) -> dict[str, Any]:
    """Return Ollama's error object."""
    return {"error": error.message}


def listed(offer: ModelOffer, created: int, closes: float | None) -> dict[str, Any]:
    """Return a model as Ollama lists models, stored or running.

    ``created``, ``closes``: seconds since the epoch. None if the model does not close by itself.
    """
    texts = ("parent_model", "format", "family", "parameter_size", "quantization_level")
    name = offer.name if ":" in offer.name else offer.name + TAG
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "expires_at": FOREVER if closes is None else datetime.fromtimestamp(closes, UTC).isoformat(),
        "size": 0,
        "size_vram": 0,
        "digest": offer.fingerprint,
        "details": {**dict.fromkeys(texts, ""), "families": []},
        "context_length": offer.context,
    }


def shown(model: dict[str, Any]) -> dict[str, Any]:
    """Return what Ollama tells of one model, given its entry in the list."""
    return {
        **model,
        "template": "",
        "model_info": {"general.architecture": "swarm", "swarm.context_length": model["context_length"]},
        "capabilities": ["completion", "tools", "embedding"],
    }


OLLAMA_CHAT = GenerationEndpoint("/api/chat", OllamaChatBody, OllamaChatBody.request, OllamaWriter)
OLLAMA_GENERATE = GenerationEndpoint(
    "/api/generate", OllamaGenerateBody, OllamaGenerateBody.request, OllamaGenerateWriter
)
