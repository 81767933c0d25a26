"""OpenAI's chats: ``/v1/chat/completions``."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

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
from swarmnet.gateway.generation.requests import ChatPrompt, GenerationRequest, Reasoning, ToolChoice
from swarmnet.gateway.protocols.completions import CompletionWriter, token_name
from swarmnet.gateway.protocols.endpoint import GenerationEndpoint, ServedAs
from swarmnet.gateway.protocols.schemas import GenerationBody, Messages, ToolByName, Tools, at_most
from swarmnet_client.model.sampling import Sampling, Token

MAX_TEMPLATE_VARIABLES = 32


class ChatBody(GenerationBody):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Tools = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ToolByName = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str = Field("", max_length=16)
    thinking_budget: int | None = Field(None, ge=0)
    """Most tokens of thoughts."""
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_TEMPLATE_VARIABLES)] = Field(
        default_factory=dict
    )

    def request(self, usual: Sampling) -> GenerationRequest:
        chat = ChatPrompt(
            tuple(message.message() for message in self.messages),
            tuple(tool.tool() for tool in self.tools),
            self._tool_choice(),
            Reasoning(self.reasoning_effort, self.thinking_budget),
            self.chat_template_kwargs,
        )
        return GenerationRequest(
            prompt=chat,
            param="messages",
            max_tokens=self.max_completion_tokens or self.max_tokens,
            **self.options(usual, self.top_logprobs if self.logprobs else None),
        )

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, ToolByName):
            return ToolChoice("required", self.tool_choice.function.name, parallel=False)
        return ToolChoice(self.tool_choice, parallel=self.parallel_tool_calls)


class ChatWriter(CompletionWriter):
    """Writes the response to one request to ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, body: GenerationBody, served: ServedAs) -> None:
        super().__init__(body, served)
        self._begun: set[int] = set()
        """Choices whose first chunk was written."""

    def event(self, event: Delta, usage: Usage) -> Iterable[bytes]:
        if event.index not in self._begun:
            self._begun.add(event.index)
            yield self._chunk(
                [self._fields_of(AnsweredChoice(event.index), delta={"role": "assistant", "content": ""})]
            )
        yield from super().event(event, usage)

    def _choice(self, choice: AnsweredChoice) -> dict[str, Any]:
        content = None if choice.calls and not choice.text else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return self._fields_of(choice, message=message)

    def _chunk_choice(self, event: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        match event:
            case TextDelta():
                delta = {"content": event.text}
            case ReasoningDelta():
                delta = {"reasoning_content": event.text}
            case ToolCallBegin():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.call, "id": event.id, "type": "function", "function": function}
                delta = {"tool_calls": [call]}
            case ArgumentsDelta():
                delta = {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
        reason = event.reason if isinstance(event, ChoiceEnd) else None
        news = AnsweredChoice(event.index, tokens=[*event.tokens], reason=reason)
        return self._fields_of(news, delta=delta)

    def _fields_of(self, choice: AnsweredChoice, **content: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": choice.index,
            **content,
            "logprobs": self._logprobs(choice.index, choice.tokens),
            "finish_reason": choice.reason,
        }

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        content = []
        for token in known:
            begins = self._count_chars(index, self._bytes.of(token.id)) == 0
            top = [self._entry(one, value, begins=begins) for one, value in token.top]
            content.append({**self._entry(token.id, token.logprob, begins=begins), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None, *, begins: bool) -> dict[str, Any]:
        spelled = self._bytes.of(token_id, begins=begins)
        return {"token": token_name(spelled), "logprob": logprob, "bytes": list(spelled)}


CHAT_COMPLETIONS = GenerationEndpoint("/v1/chat/completions", ChatBody, ChatBody.request, ChatWriter)
