"""OpenAI's chats: ``/v1/chat/completions``."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field

from swarmnet.gateway.generation.events import AnsweredChoice, Delta, TextDelta, Usage, whole_choices
from swarmnet.gateway.generation.requests import ChatPrompt, GenerationRequest
from swarmnet.gateway.protocols.completions import CompletionWriter, token_name
from swarmnet.gateway.protocols.endpoint import GenerationEndpoint, ServedAs
from swarmnet.gateway.protocols.schemas import GenerationBody, Messages
from swarmnet_client.model.sampling import Sampling, Token


class ChatBody(GenerationBody):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    def request(self, usual: Sampling) -> GenerationRequest:
        return GenerationRequest(
            prompt=ChatPrompt(tuple(message.message() for message in self.messages)),
            param="messages",
            sampling=self.sampling(usual, self.top_logprobs if self.logprobs else None),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            **self.options(),
        )


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
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return self._fields_of(choice, message=message)

    def _chunk_choice(self, event: Delta) -> dict[str, Any]:
        delta = {"content": event.text} if isinstance(event, TextDelta) else {}
        return self._fields_of(whole_choices([event])[0], delta=delta)

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
