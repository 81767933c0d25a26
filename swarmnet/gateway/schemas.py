"""Request schemas of OpenAI's API. Unknown parameters are refused unless they cannot change the
response.

Validation of a list ends at its first invalid item, because the errors of all items would take more
memory than the items.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from swarmnet.gateway.errors import UNSUPPORTED

MAX_CHOICES = 16
MAX_STOPS = 8
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Most content parts of one message."""
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_OWNER_CHARS = 512

LABELS = frozenset(
    {
        "cache_control",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
    }
)
"""Fields that are ignored, because they never change an answer: labels, and hints for caches and
speed."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": ({},),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "reasoning_content": ("",),
    "refusal": ("",),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tfs_z": (1,),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_k": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Unsupported fields of requests, messages and parts, with the values that change nothing."""


def _as_list(value: Any) -> Any:
    """Return a single string or token list as a list of one, because OpenAI's API accepts both."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    return [value] if is_one else value


def _at_most(count: int) -> BeforeValidator:
    """Limit the length of a list or object before its items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > count:
            raise PydanticCustomError("too_long", "there are more than {count}", {"count": count})
        return value

    return BeforeValidator(check)


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31, strict=True)]], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Tokens, Tag("tokens")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "tokens"),
]
"""A text, or its tokens. The tag decides which of the two an error speaks of."""
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
BiasedToken = Annotated[int, Field(ge=0, lt=1 << 31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class StrictModel(BaseModel):
    """Refuses unknown fields; null counts as absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None or name in LABELS or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name not in cls.model_fields:
                raise PydanticCustomError(UNSUPPORTED, "Unsupported parameter", {"name": name})
            kept[name] = value
        return kept


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(StrictModel):
    """Parameters that chat and plain completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[Stop], Field(fail_fast=True), _at_most(MAX_STOPS), BeforeValidator(_as_list)] = []
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[BiasedToken, Bias], _at_most(MAX_BIASES)] = {}
    """Keyed by token id, which is a string in JSON."""
    ignore_eos: bool = False
    """vLLM's parameter: generate ``max_tokens`` tokens, past end tokens."""
    user: str = Field("", max_length=MAX_OWNER_CHARS)
    """OpenAI's id of the end user. Prompts of different users never share caches."""
    cache_salt: str = Field("", max_length=MAX_OWNER_CHARS)
    """vLLM's parameter: prompts of different salts never share caches."""

    @property
    def choices(self) -> int:
        """The number of choices in the response."""
        return self.n


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    """Return a string as a list of one part, so that errors speak of parts only where there are
    some."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "this should be a string or a list of parts")
    return value


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], Field(fail_fast=True), _at_most(MAX_PARTS), BeforeValidator(_as_parts)
    ] = []
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message as ``render_chat`` takes it."""
        content = "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), _at_most(MAX_MESSAGES)]


class ChatRequest(GenerationRequest):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of tokens to generate, if given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """The number of alternative tokens returned with each token's log probability; None: no log
        probabilities."""
        return self.top_logprobs if self.logprobs else None


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        list[Prompt],
        Field(fail_fast=True, min_length=1),
        _at_most(MAX_CHOICES),
        BeforeValidator(_as_list),
    ]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def choices(self) -> int:
        return len(self.prompt) * self.n


class TokenizeRequest(StrictModel):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Tokens
