"""OpenAI's completions: ``/v1/completions``."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation.detokenizer import TokenBytes
from swarmnet.gateway.generation.events import AnsweredChoice, ChoiceEnd, Delta, Usage, whole_choices
from swarmnet.gateway.generation.requests import MAX_CHOICES, GenerationRequest
from swarmnet.gateway.protocols.endpoint import AnswerWriter, GenerationEndpoint, ServedAs, server_sent
from swarmnet.gateway.protocols.schemas import GenerationBody, Tokens, as_list, at_most
from swarmnet_client.model.sampling import Sampling, Token

DONE = b"data: [DONE]\n\n"
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Tokens, Tag("tokens")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "tokens"),
]
"""A text, or its tokens. The tag decides which of the two an error speaks of."""


class CompletionBody(GenerationBody):
    prompt: Annotated[
        list[Prompt],
        Field(fail_fast=True, min_length=1),
        at_most(MAX_CHOICES),
        BeforeValidator(as_list),
    ]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    """True if a choice begins with its prompt. With ``logprobs``, the prompt's tokens have log
    probabilities, too."""

    def request(self, usual: Sampling) -> GenerationRequest:
        if self.max_tokens == 0 and not self.echo:
            message = "max_tokens must be at least 1, unless echo is true"
            raise ApiError(400, message, "invalid_value", param="max_tokens")
        return GenerationRequest(
            prompt=tuple(self.prompt),
            param="prompt",
            max_tokens=self.max_tokens,
            echo=self.echo,
            **self.options(usual, self.logprobs),
        )


class CompletionWriter(AnswerWriter):
    """Writes the response to one request to ``/v1/completions``, whole or in chunks."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, body: GenerationBody, served: ServedAs) -> None:
        self._with_usage = body.stream_options.include_usage
        self._bytes = TokenBytes(served.tokenizer)
        self._chars: dict[int, int] = {}
        """Characters of each choice's tokens so far."""
        self._fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": served.created,
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }

    def whole(self, choices: Sequence[AnsweredChoice], usage: Usage) -> dict[str, Any]:
        return {
            **self._fields,
            "object": self.object_name,
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage_fields(usage),
            "precisions": usage.precisions,
        }

    def event(self, event: Delta, usage: Usage) -> Iterable[bytes]:
        fields: dict[str, Any] = {"precisions": usage.precisions} if isinstance(event, ChoiceEnd) else {}
        if usage.trace is not None:
            fields["swarmnet"] = {"tokens": len(event.tokens), **usage.trace.news()}
        yield self._chunk([self._chunk_choice(event)], **fields)

    def end(self, usage: Usage) -> Iterable[bytes]:
        traced = {} if usage.trace is None else {"swarmnet": usage.trace.news(is_end=True)}
        if self._with_usage or traced:
            yield self._chunk([], **({"usage": usage_fields(usage)} if self._with_usage else {}), **traced)
        yield DONE

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return server_sent(error.body()), DONE

    def _choice(self, choice: AnsweredChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._logprobs(choice.index, choice.tokens),
            "finish_reason": choice.reason,
        }

    def _chunk_choice(self, event: Delta) -> dict[str, Any]:
        return self._choice(whole_choices([event])[0])

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return server_sent({**self._fields, "object": self.chunk_object_name, "choices": choices, **fields})

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if all(token.logprob is None for token in tokens):
            return None
        return {
            "tokens": [token_name(self._bytes.of(token.id)) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None if token.logprob is None else self._alternatives(token) for token in tokens
            ],
            "text_offset": [self._count_chars(index, self._bytes.of(token.id)) for token in tokens],
        }

    def _alternatives(self, token: Token) -> dict[str, float]:
        """Return the log probability of each alternative by its text. If two alternatives have the
        same text, the second one's id is added to its key."""
        found: dict[str, float] = {}
        for one, value in token.top:
            name = token_name(self._bytes.of(one))
            found[f"{name} (token {one})" if name in found else name] = value
        return found

    def _count_chars(self, index: int, token: bytes) -> int:
        """Add a token's characters to a choice, and return how many it had before."""
        before = self._chars.get(index, 0)
        self._chars[index] = before + sum(byte & 0xC0 != 0x80 for byte in token)
        return before


def token_name(token: bytes) -> str:
    """Return the text of a token. Bytes that are no text are written as in OpenAI's responses."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's usage object, and the steps through chains (``trips``).

    All values are whole numbers: clients add them up.
    """
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "trips": usage.trips,
    }


COMPLETIONS = GenerationEndpoint("/v1/completions", CompletionBody, CompletionBody.request, CompletionWriter)
