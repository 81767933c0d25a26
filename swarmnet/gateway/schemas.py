"""The requests that the gateway takes. A parameter that would change the answer and that it does not know is refused by name.

Each list and each object is checked up to the first thing that is wrong: an error for every value would cost more than the values.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from swarmnet.gateway.failures import UNSUPPORTED

MAX_CHOICES = 16
MAX_STOPS = 8
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Of one message."""
MAX_STOP_CHARS = 256
MAX_BIASES = 1024

LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Parameters that never change an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "functions": ([],),
}
"""Parameters that are not supported, and their values that ask for nothing."""


def _as_list(value: Any) -> Any:
    """One of something where a list of them is taken as well."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    return [value] if is_one else value


def _at_most(count: int) -> BeforeValidator:
    """Of a list or an object, before anything in it is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise PydanticCustomError("too_long", "there are more than {count}", {"count": count})
        return value

    return BeforeValidator(check)


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]], Field(fail_fast=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
BiasedToken = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class Strict(BaseModel):
    """Knows all its fields; null is the same as not there."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        asked: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None or name in LABELS or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name not in cls.model_fields:
                raise PydanticCustomError(UNSUPPORTED, "Unsupported parameter", {"name": name})
            asked[name] = value
        return asked


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Common(Strict):
    """What chat and plain completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[Stop], Field(fail_fast=True), _at_most(MAX_STOPS), BeforeValidator(_as_list)] = []
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[BiasedToken, Bias], _at_most(MAX_BIASES)] = {}
    """By token ids, which JSON has as text."""
    ignore_eos: bool = False
    """vLLM's: go on to ``max_tokens`` whatever comes."""

    @property
    def choices(self) -> int:
        """How many answers this asks for."""
        return self.n


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True), _at_most(MAX_PARTS)] = ""
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates take it."""
        content = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), _at_most(MAX_MESSAGES)]


class ChatRequest(Common):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def limit(self) -> int | None:
        """The most tokens to answer with, if the caller says."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many log probabilities are wanted besides each token's own; None: not even that."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(Common):
    prompt: Annotated[
        list[str | Tokens],
        Field(fail_fast=True, min_length=1),
        _at_most(MAX_CHOICES),
        BeforeValidator(_as_list),
    ]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def choices(self) -> int:
        return len(self.prompt) * self.n


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Tokens
