"""Parts of request bodies that protocols share. Unknown parameters are refused unless they cannot
change the response.

Validation of a list ends at its first invalid item, because the errors of all items would take more
memory than the items.
"""

import json
import secrets
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from swarmnet.gateway.errors import UNSUPPORTED, ApiError
from swarmnet.gateway.generation.requests import ChatMessage, ToolCall
from swarmnet_client.model.sampling import Sampling

MAX_CHOICES = 16
MAX_STOPS = 8
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Most content parts of one message."""
MAX_STOP_CHARS = 256
MAX_TOOLS = 256
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
"""The schema of a function without arguments."""
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


def as_list(value: Any) -> Any:
    """Return a single string or token list as a list of one, because OpenAI's API accepts both."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    return [value] if is_one else value


def at_most(count: int) -> BeforeValidator:
    """Limit the length of a list or object before its items are validated."""

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


class StrictModel(BaseModel):
    """Refuses unknown fields; null counts as absent."""

    model_config = ConfigDict(extra="forbid")
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Further fields that never change an answer."""

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept: dict[str, Any] = {}
        for name, value in fields.items():
            if value is None or name in LABELS | cls.ignored or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name not in cls.model_fields:
                raise PydanticCustomError(UNSUPPORTED, "Unsupported parameter", {"name": name})
            kept[name] = value
        return kept


class OpenModel(BaseModel):
    """A part of an agent's request. Fields that it does not know are ignored: agents add some with
    every release, and the model sees no difference."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        is_object = isinstance(fields, dict)
        return {name: value for name, value in fields.items() if value is not None} if is_object else fields


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(StrictModel):
    """Parameters that OpenAI's chats and completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[Stop], Field(fail_fast=True), at_most(MAX_STOPS), BeforeValidator(as_list)] = []
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[BiasedToken, Bias], at_most(MAX_BIASES)] = {}
    """Keyed by token id, which is a string in JSON."""
    ignore_eos: bool = False
    """vLLM's parameter: generate ``max_tokens`` tokens, past end tokens."""
    user: str = Field("", max_length=MAX_OWNER_CHARS)
    """OpenAI's id of the end user. Prompts of different users never share caches."""
    cache_salt: str = Field("", max_length=MAX_OWNER_CHARS)
    """vLLM's parameter: prompts of different salts never share caches."""

    def sampling(self, usual: Sampling, top_logprobs: int | None) -> Sampling:
        """Return how tokens are chosen: as the body says, or else as usual."""
        return Sampling(
            temperature=usual.temperature if self.temperature is None else self.temperature,
            top_p=usual.top_p if self.top_p is None else self.top_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            top_logprobs=top_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            biases=tuple(self.logit_bias.items()),
        )

    def options(self) -> dict[str, Any]:
        """Return the fields of the core's request that all bodies have in common."""
        return {
            "model": self.model,
            "n": self.n,
            "stop": tuple(self.stop),
            "stream": self.stream,
            "ignore_eos": self.ignore_eos,
            "user": self.user,
            "salt": self.cache_salt,
        }


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


def as_parts(value: Any) -> Any:
    """Return a string as a list of one part, so that errors speak of parts only where there are
    some."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "this should be a string or a list of parts")
    return value


class MessageBody(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        list[TextPart], Field(fail_fast=True), at_most(MAX_PARTS), BeforeValidator(as_parts)
    ] = []
    name: str | None = None

    def message(self) -> ChatMessage:
        """Return the message for the core."""
        text = "".join(part.text for part in self.content)
        return ChatMessage("system" if self.role == "developer" else self.role, text)


Messages = Annotated[list[MessageBody], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]


class TokenizeRequest(StrictModel):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Tokens


def text_of(content: Any, param: str) -> str:
    """Return the text of content that is a string or a list of parts. Raises ``ApiError`` that
    names ``param`` for a part without text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ApiError(400, "this model reads text only", "invalid_value", param=param)
    return "\n".join(part["text"] for part in parts)


def merged(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return a chat whose neighbouring messages of one role are one, except results of tools: many
    templates want roles to alternate."""
    found: list[ChatMessage] = []
    for role, group in groupby(messages, lambda each: each.role):
        parts = list(group)
        if role == "tool" or len(parts) == 1:
            found += parts
            continue
        text = "\n\n".join(each.text for each in parts if each.text)
        reasoning = "\n\n".join(each.reasoning for each in parts if each.reasoning)
        calls = tuple(call for each in parts for call in each.calls)
        found.append(ChatMessage(role, text, reasoning, calls))
    return tuple(found)


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call; none if the limit of tokens cut it off."""
    try:
        fields = json.loads(call.arguments)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
