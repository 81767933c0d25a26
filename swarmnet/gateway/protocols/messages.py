"""Anthropic's messages: ``/v1/messages``, and the counting of their tokens."""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.events import (
    AnsweredChoice,
    ArgumentsDelta,
    ChoiceEnd,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    Usage,
)
from swarmnet.gateway.generation.requests import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Reasoning,
    ToolCall,
    ToolChoice,
)
from swarmnet.gateway.protocols.endpoint import AnswerWriter, GenerationEndpoint, ServedAs, server_sent
from swarmnet.gateway.protocols.schemas import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    AgentFormat,
    AgentTools,
    OpenModel,
    Stop,
    StrictModel,
    Temperature,
    TopP,
    as_parts,
    at_most,
    merged,
    text_of,
)
from swarmnet_client.model.sampling import Sampling

PATH = "/v1/messages"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_STAMP = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's first line. Its ``cch=…`` changes with each request, and no prefix could be
reused."""


class Block(OpenModel):
    """A part of a message. Its ``type`` says which of the other fields count."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field({})
    tool_use_id: str = ""
    content: Any = ""
    is_error: bool = False


Blocks = Annotated[list[Block], Field(fail_fast=True), at_most(MAX_PARTS), BeforeValidator(as_parts)]


class AnthropicMessage(OpenModel):
    role: Literal["system", "user", "assistant"]
    content: Blocks

    def messages(self, *, is_first: bool) -> Iterator[ChatMessage]:
        """Yield the message for the core, after the results of tools that it has."""
        texts, thoughts, calls = [], [], []
        for block in self.content:
            match block.type:
                case "text":
                    texts.append(block.text)
                case "thinking":
                    thoughts.append(block.thinking)
                case "redacted_thinking":
                    pass
                case "tool_use":
                    calls.append(ToolCall(block.id, block.name, json.dumps(block.input)))
                case "tool_result":
                    failed = "Error: " if block.is_error else ""
                    yield ChatMessage(
                        "tool", failed + text_of(block.content, "messages"), call_id=block.tool_use_id
                    )
                case _:
                    raise ApiError(
                        400,
                        f"this model reads text only, no {block.type[:64]}",
                        "invalid_value",
                        param="messages",
                    )
        if texts or thoughts or calls:
            # templates take instructions at the beginning only
            role = "user" if self.role == "system" and not is_first else self.role
            yield ChatMessage(role, "\n".join(texts), "\n".join(thoughts), tuple(calls))


class AnthropicToolChoice(OpenModel):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(OpenModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputConfig(OpenModel):
    effort: str = ""
    format: AgentFormat = AgentFormat()


class CountBody(StrictModel):
    """A prompt whose tokens are counted."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"betas", "container", "context_management", "inference_geo", "service_tier", "speed"}
    )
    model: str
    messages: Annotated[list[AnthropicMessage], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]
    system: Blocks = Field([])
    tools: AgentTools = Field([])
    tool_choice: AnthropicToolChoice = AnthropicToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def chat(self) -> ChatPrompt:
        """Return the prompt without the stamp of its client."""
        system = "\n\n".join(filter(None, (_STAMP.sub("", block.text) for block in self.system)))
        begin = [ChatMessage("system", system)] if system else []
        rest = [
            each
            for number, message in enumerate(self.messages)
            for each in message.messages(is_first=number == 0)
        ]
        choice, thinking = self.tool_choice, self.thinking
        mode: Literal["none", "auto", "required"] = "required" if choice.type in ("any", "tool") else "auto"
        return ChatPrompt(
            merged([*begin, *rest]),
            tuple(tool.tool() for tool in self.tools),
            ToolChoice(
                "none" if choice.type == "none" else mode, choice.name, not choice.disable_parallel_tool_use
            ),
            Reasoning("none", None)
            if thinking is not None and thinking.type == "disabled"
            else Reasoning(self.output_config.effort, thinking.budget_tokens if thinking else None),
        )


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1)
    stream: bool = False
    temperature: Temperature = None
    top_p: TopP = None
    top_k: int = Field(0, ge=0, lt=1 << 31)
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True), at_most(MAX_STOPS)] = Field([])

    def request(self, usual: Sampling) -> GenerationRequest:
        return GenerationRequest(
            model=self.model,
            prompt=self.chat(),
            param="messages",
            sampling=usual.given(self.temperature, self.top_p, top_k=self.top_k),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
            output=self.output_config.format.output(),
            stream=self.stream,
        )


class MessagesWriter(AnswerWriter):
    """Writes the response to one request to ``/v1/messages``, whole or as named events."""

    def __init__(self, _body: MessagesBody, served: ServedAs) -> None:
        self._fields = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": served.model,
        }
        self._blocks = 0
        """Blocks of the stream that have begun."""
        self._open = ""
        """The type of the block that has not ended."""
        self._reason: str | None = None

    def whole(self, choices: Sequence[AnsweredChoice], usage: Usage) -> dict[str, Any]:
        (choice,) = choices
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
        if choice.text or not choice.calls:
            content.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            use = {"type": "tool_use", "id": call.id, "name": call.name, "input": call.values()}
            content.append(use)
        return self._message(content, choice.reason, usage)

    def begin(self, usage: Usage) -> Iterable[bytes]:
        yield _event("message_start", message=self._message([], None, usage))

    def event(self, event: Delta, usage: Usage) -> Iterable[bytes]:
        match event:
            case TextDelta():
                yield from self._in("text", text="")
                yield self._delta("text_delta", text=event.text)
            case ReasoningDelta():
                yield from self._in("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=event.text)
            case ToolCallBegin():
                yield from self._close()
                yield from self._in("tool_use", id=event.id, name=event.name, input={})
            case ArgumentsDelta():
                yield self._delta("input_json_delta", partial_json=event.text)
            case ChoiceEnd():
                if not self._blocks:
                    yield from self._in("text", text="")
                yield from self._close()
                self._reason = event.reason

    def end(self, usage: Usage) -> Iterable[bytes]:
        delta = {"stop_reason": STOP_REASONS.get(self._reason or ""), "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=_usage(usage))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return (server_sent(error_body(error), "error"),)

    def _message(self, content: list[dict[str, Any]], reason: str | None, usage: Usage) -> dict[str, Any]:
        stop = {"stop_reason": STOP_REASONS.get(reason or ""), "stop_sequence": None}
        return {**self._fields, "content": content, **stop, "usage": _usage(usage)}

    def _in(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Begin a block unless one of this ``kind`` is open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            self._blocks += 1
            block = {"type": kind, **fields}
            yield _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind, **fields})

    def _close(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._blocks - 1)


def _event(name: str, **fields: Any) -> bytes:
    return server_sent({"type": name, **fields}, name)


def _usage(usage: Usage) -> dict[str, int]:
    """Return Anthropic's usage object. Positions that were found in the hosts' caches do not count
    as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def error_body(error: ApiError) -> dict[str, Any]:
    """Return Anthropic's error object."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    # the words by which Claude Code knows that it has to shorten a conversation
    long = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": long + error.message}}


MESSAGES = GenerationEndpoint(PATH, MessagesBody, MessagesBody.request, MessagesWriter)
