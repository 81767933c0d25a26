"""Events of an answer that is generated. Every protocol tells them its clients in its own form.

The events of one choice come in this order: reasoning, text, calls of tools (each begins, then
come its arguments), the end. Events of different choices mix.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from swarmnet.gateway.generation.answer_trace import AnswerTrace
from swarmnet.gateway.generation.requests import ToolCall
from swarmnet_client.model.sampling import Token

Reason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Delta:
    """News of choice ``index``, and the tokens that brought them."""

    index: int
    tokens: tuple[Token, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class ReasoningDelta(Delta):
    """The next part of the thoughts."""

    text: str


@dataclass(frozen=True)
class TextDelta(Delta):
    """The next part of the answer's text."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin(Delta):
    """The beginning of call number ``call`` of a choice, from 0."""

    call: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta(Delta):
    """The next part of the JSON of a call's arguments."""

    call: int
    text: str


@dataclass(frozen=True)
class ChoiceEnd(Delta):
    """The end of a choice: a natural end, the limit of tokens, or calls of tools."""

    reason: Reason


@dataclass
class Usage:
    """The tokens and hosts of a request, over all its choices.

    - ``cached_tokens``: prompt tokens that were found in the hosts' caches.
    - ``precisions``: precisions of the hosts of the finished choices; several if no chain of one
      precision was found.
    - ``trips``: steps through chains that gave tokens of the finished choices.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    precisions: list[str] = field(default_factory=list)
    trips: int = 0
    trace: AnswerTrace | None = None
    """The steps of a traced request."""

    def add(self, other: "Usage") -> None:
        """Add the numbers of ``other``, a request of the same key."""
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.reasoning_tokens += other.reasoning_tokens
        self.cached_tokens += other.cached_tokens
        self.trips += other.trips


@dataclass
class AnsweredChoice:
    """A whole choice, made of its events."""

    index: int
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    reason: Reason | None = None

    def add(self, event: Delta) -> None:
        """Add the next event of this choice."""
        self.tokens.extend(event.tokens)
        match event:
            case TextDelta():
                self.text += event.text
            case ReasoningDelta():
                self.reasoning += event.text
            case ToolCallBegin():
                self.calls.append(ToolCall(event.id, event.name, ""))
            case ArgumentsDelta():
                call = self.calls[event.call]
                self.calls[event.call] = replace(call, arguments=call.arguments + event.text)
            case ChoiceEnd():
                self.reason = event.reason


def whole_choices(events: Iterable[Delta]) -> list[AnsweredChoice]:
    """Return the choices that ``events`` make, by their indices."""
    found: dict[int, AnsweredChoice] = {}
    for event in events:
        found.setdefault(event.index, AnsweredChoice(event.index)).add(event)
    return [found[index] for index in sorted(found)]
