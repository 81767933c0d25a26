"""OpenAI's responses: ``/v1/responses``."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

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
from swarmnet.gateway.protocols.kept_responses import KeptResponses
from swarmnet.gateway.protocols.schemas import (
    MAX_MESSAGES,
    MAX_OWNER_CHARS,
    AgentFormat,
    AgentTools,
    OpenModel,
    StrictModel,
    Temperature,
    TopP,
    at_most,
    merged,
    text_of,
)
from swarmnet_client.model.sampling import Sampling

PATH = "/v1/responses"


class Item(OpenModel):
    """An item of the input. Its ``type`` says which of the other fields count."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Any = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Any = ""

    def message(self) -> ChatMessage | None:
        """Return the item for the core. None for thoughts: the model does not read them again.

        Raises ``ApiError`` for an item that is no text.
        """
        match self.type:
            case "message":
                role = "system" if self.role == "developer" else self.role
                return ChatMessage(role, text_of(self.content, "input"))
            case "function_call":
                call = ToolCall(self.call_id, self.name, self.arguments)
                return ChatMessage("assistant", calls=(call,))
            case "function_call_output":
                return ChatMessage("tool", text_of(self.output, "input"), call_id=self.call_id)
            case "reasoning":
                return None
        message = f"items of the type {self.type[:64]!r} are not supported"
        raise ApiError(400, message, "invalid_value", param="input")


class NamedTool(OpenModel):
    type: str
    name: str = ""


class ReasoningBody(OpenModel):
    effort: str = ""


class TextBody(OpenModel):
    format: AgentFormat = AgentFormat()


def _as_items(value: Any) -> Any:
    return [{"content": value}] if isinstance(value, str) else value


class ResponsesBody(StrictModel):
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"background", "client_metadata", "include", "max_tool_calls", "stream_options", "truncation"}
    )
    model: str
    input: Annotated[
        list[Item], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES), BeforeValidator(_as_items)
    ]
    instructions: str = ""
    previous_response_id: str | None = None
    stream: bool = False
    store: bool = True
    tools: AgentTools = Field([])
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningBody = ReasoningBody()
    text: TextBody = TextBody()
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature = None
    top_p: TopP = None
    user: str = Field("", max_length=MAX_OWNER_CHARS)
    _said: tuple[ChatMessage, ...] = PrivateAttr(())
    _answered_by: str = PrivateAttr("")

    @property
    def said(self) -> tuple[ChatMessage, ...]:
        """The conversation up to this request, without instructions."""
        return self._said

    @property
    def answered_by(self) -> str:
        """The model of the previous response; "" if there is none."""
        return self._answered_by

    def continue_from(self, kept: KeptResponses) -> None:
        """Take the conversation of the previous response. Raises ``ApiError`` if it is not kept."""
        before: tuple[ChatMessage, ...] = ()
        if self.previous_response_id:
            previous = kept.find(self.previous_response_id)
            before, self._answered_by = previous.messages, previous.fields["model"]
        found = (item.message() for item in self.input)
        self._said = (*before, *(message for message in found if message is not None))

    def request(self, usual: Sampling) -> GenerationRequest:
        """Return the request; ``continue_from`` comes before."""
        begin = [ChatMessage("system", self.instructions)] if self.instructions else []
        choice = self.tool_choice
        named = choice.name if isinstance(choice, NamedTool) else ""
        return GenerationRequest(
            model=self.model,
            prompt=ChatPrompt(
                merged([*begin, *self._said]),
                tuple(tool.tool() for tool in self.tools),
                ToolChoice(
                    "required" if isinstance(choice, NamedTool) else choice, named, self.parallel_tool_calls
                ),
                Reasoning(self.reasoning.effort),
            ),
            param="input",
            sampling=usual.given(self.temperature, self.top_p),
            max_tokens=self.max_output_tokens,
            output=self.text.format.output(),
            stream=self.stream,
            user=self.user,
        )


class ResponsesWriter(AnswerWriter):
    """Writes the response to one request to ``/v1/responses``, whole or as numbered events."""

    def __init__(self, body: ResponsesBody, served: ServedAs) -> None:
        self._body, self._kept = body, served.kept
        self._fields = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": served.created,
            "model": served.model,
            "instructions": body.instructions or None,
            "previous_response_id": body.previous_response_id,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": body.parallel_tool_calls,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "store": body.store,
            "metadata": {},
            "text": {"format": {"type": body.text.format.type}},
        }
        self._number = 0
        self._choice = AnsweredChoice(0)
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        """The item of the stream that is not complete."""

    def whole(self, choices: Sequence[AnsweredChoice], usage: Usage) -> dict[str, Any]:
        (self._choice,) = choices
        choice = self._choice
        if choice.reasoning:
            self._items.append(_reasoning_item(choice.reasoning))
        if choice.text or not choice.calls:
            self._items.append(_message_item(choice.text))
        self._items += [_call_item(call) for call in choice.calls]
        return self._complete(usage)

    def begin(self, usage: Usage) -> Iterable[bytes]:
        response = self._response("in_progress", None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def event(self, event: Delta, usage: Usage) -> Iterable[bytes]:
        self._choice.add(event)
        match event:
            case TextDelta():
                yield from self._begin_text()
                yield self._part_event("response.output_text.delta", delta=event.text, logprobs=[])
                self._text["text"] += event.text
            case ReasoningDelta():
                if self._open is None or self._open["type"] != "reasoning":
                    yield from self._begin_item(_reasoning_item(""))
                yield self._part_event("response.reasoning_text.delta", delta=event.text)
                self._text["text"] += event.text
            case ToolCallBegin():
                yield from self._begin_item(_call_item(ToolCall(event.id, event.name, "")))
            case ArgumentsDelta():
                yield self._item_event("response.function_call_arguments.delta", delta=event.text)
                self._item["arguments"] += event.text
            case ChoiceEnd():
                if not self._items and self._open is None:
                    yield from self._begin_text()
                yield from self._end_item()

    def end(self, usage: Usage) -> Iterable[bytes]:
        response = self._complete(usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> Iterable[bytes]:
        fields = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response={**self._response("failed", None), "error": fields})

    # ---- items ----------------------------------------------------------------------------------

    @property
    def _item(self) -> dict[str, Any]:
        if self._open is None:
            raise TypeError("no item has begun")
        return self._open

    @property
    def _text(self) -> dict[str, Any]:
        part: dict[str, Any] = self._item["content"][0]
        return part

    def _begin_text(self) -> Iterator[bytes]:
        if self._open is None or self._open["type"] != "message":
            yield from self._begin_item(_message_item(""))
            yield self._part_event("response.content_part.added", part=dict(self._text))

    def _begin_item(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield from self._end_item()
        self._open = item
        begun = {**item, "content": []} if item["type"] == "message" else item
        yield self._index_event("response.output_item.added", item={**begun, "status": "in_progress"})

    def _end_item(self) -> Iterator[bytes]:
        if (item := self._open) is None:
            return
        if item["type"] == "message":
            yield self._part_event("response.output_text.done", text=self._text["text"], logprobs=[])
            yield self._part_event("response.content_part.done", part=self._text)
        elif item["type"] == "reasoning":
            yield self._part_event("response.reasoning_text.done", text=self._text["text"])
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        yield self._index_event("response.output_item.done", item=item)
        self._items.append(item)
        self._open = None

    # ---- events ---------------------------------------------------------------------------------

    def _part_event(self, name: str, /, **fields: Any) -> bytes:
        return self._item_event(name, content_index=0, **fields)

    def _item_event(self, name: str, /, **fields: Any) -> bytes:
        return self._index_event(name, item_id=self._item["id"], **fields)

    def _index_event(self, name: str, /, **fields: Any) -> bytes:
        return self._event(name, output_index=len(self._items), **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._number += 1
        return server_sent({"type": name, "sequence_number": self._number - 1, **fields}, name)

    def _complete(self, usage: Usage) -> dict[str, Any]:
        """Return the complete response, and keep it if the request says so."""
        choice = self._choice
        response = self._response("incomplete" if choice.reason == "length" else "completed", usage)
        if self._body.store:
            answer = ChatMessage("assistant", choice.text, choice.reasoning, tuple(choice.calls))
            self._kept.keep(response, (*self._body.said, answer))
        return response

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._fields,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": list(self._items),
            "usage": usage and _usage(usage),
        }


def _message_item(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    fields = {"type": "message", "id": f"msg_{secrets.token_hex(12)}", "status": "completed"}
    return {**fields, "role": "assistant", "content": [part]}


def _reasoning_item(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{secrets.token_hex(12)}", "summary": [], "content": [part]}


def _call_item(call: ToolCall) -> dict[str, Any]:
    fields = {"type": "function_call", "id": f"fc_{secrets.token_hex(12)}", "status": "completed"}
    return {**fields, "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


RESPONSES = GenerationEndpoint(PATH, ResponsesBody, ResponsesBody.request, ResponsesWriter)
