"""Parts of request bodies that protocols share. Unknown parameters are refused unless they cannot
change the response.

Validation of a list ends at its first invalid item, because the errors of all items would take more
memory than the items.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from swarmnet.gateway.errors import UNSUPPORTED, ApiError
from swarmnet.gateway.generation.requests import MAX_CHOICES, ChatMessage, OutputFormat, Tool, ToolCall
from swarmnet_client.model.grammar import MAX_GRAMMAR_BYTES
from swarmnet_client.model.sampling import Sampling

MAX_STOPS = 8
MAX_MESSAGES = 4096
MAX_PARTS = 256
"""Most content parts of one message."""
MAX_STOP_CHARS = 256
MAX_TOOLS = 256
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
"""The schema of a function without arguments."""
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_GUIDED_CHOICES = 10_000
MAX_NAME_CHARS = 256
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
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "priority": (0,),
    "refusal": ("",),
    "repeat_penalty": (1,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "store": (False,),
    "suffix": ("",),
    "tfs_z": (1,),
    "top_a": (0,),
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
Temperature = Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float | None, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)]
BadWords = Annotated[list[Stop], Field(fail_fast=True), at_most(MAX_BAD_WORDS)]


class StrictModel(BaseModel):
    """Refuses unknown fields; null counts as absent."""

    model_config = ConfigDict(extra="forbid")
    ignored: ClassVar[frozenset[str]] = frozenset()
    """Further fields that never change an answer."""

    @classmethod
    def _known(cls) -> set[str]:
        return {each.alias or name for name, each in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        kept: dict[str, Any] = {}
        ignored = (LABELS | cls.ignored) - cls._known()
        for name, value in fields.items():
            if value is None or name in ignored or (name in NEUTRAL and value in NEUTRAL[name]):
                continue
            if name not in cls._known():
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


def _schema(value: Any) -> Any:
    """Return a JSON schema that may be given as text."""
    return from_json(value) if isinstance(value, str) else value


GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
SchemaOrText = Annotated[dict[str, Any], BeforeValidator(_schema)]
GuidedChoice = Annotated[list[GrammarText], Field(fail_fast=True, min_length=1), at_most(MAX_GUIDED_CHOICES)]


class JsonSchemaFormat(StrictModel):
    name: str = Field("", max_length=MAX_NAME_CHARS)
    description: str = ""
    json_schema: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: bool = False


class ResponseFormat(StrictModel):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def output(self) -> OutputFormat | None:
        """Return the form for the core."""
        if self.type == "text":
            return None
        schema = self.json_schema.json_schema if self.json_schema is not None else {"type": "object"}
        return OutputFormat("json_schema", schema)


class StructuredOutputs(StrictModel):
    """vLLM's ``structured_outputs``. One of its fields is set."""

    json_schema: SchemaOrText | None = Field(None, alias="json")
    json_object: bool = False
    regex: GrammarText | None = None
    choice: GuidedChoice | None = None
    grammar: GrammarText | None = None

    def outputs(self) -> Iterator[OutputFormat]:
        """Yield the form of each field that is set."""
        if self.json_schema is not None or self.json_object:
            yield OutputFormat("json_schema", self.json_schema or {"type": "object"})
        if self.regex is not None:
            yield OutputFormat("regex", self.regex)
        if self.choice is not None:
            yield OutputFormat("choice", tuple(self.choice))
        if self.grammar is not None:
            yield OutputFormat("grammar", self.grammar)


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_trace: bool = False
    """swarmnet's own: whether chunks tell the route and the times of each trip."""
    include_obfuscation: Literal[False] = False


class SamplingBody(StrictModel):
    """The choice of tokens, as OpenAI's and Ollama's clients describe it."""

    temperature: Temperature = None
    top_p: TopP = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[Stop], Field(fail_fast=True), at_most(MAX_STOPS), BeforeValidator(as_list)] = []
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    top_k: TopK = 0
    min_p: MinP = 0

    def sampling(self, usual: Sampling, **others: Any) -> Sampling:
        """Return how tokens are chosen: as the body says, or else as usual."""
        return usual.given(
            self.temperature,
            self.top_p,
            self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            **others,
        )


class GenerationBody(SamplingBody):
    """Parameters that OpenAI's chats and completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    logit_bias: Annotated[dict[BiasedToken, Bias], at_most(MAX_BIASES)] = {}
    """Keyed by token id, which is a string in JSON."""
    ignore_eos: bool = False
    """vLLM's parameter: generate ``max_tokens`` tokens, past end tokens."""
    user: str = Field("", max_length=MAX_OWNER_CHARS)
    """OpenAI's id of the end user. Prompts of different users never share caches."""
    repetition_penalty: RepetitionPenalty = 1
    bad_words: BadWords = []
    """vLLM's parameter: texts that the answer never contains."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GrammarText | None = None
    cache_salt: str = Field("", max_length=MAX_OWNER_CHARS)
    """vLLM's parameter: prompts of different salts never share caches."""

    def output(self) -> OutputFormat | None:
        """Return the form that the answer must have. Raises ``ApiError`` for several."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        forms = [StructuredOutputs.model_validate(guided), self.structured_outputs]
        found = [output for form in forms if form is not None for output in form.outputs()]
        asked = self.response_format.output() if self.response_format is not None else None
        found += [asked] if asked else []
        if len(found) > 1:
            raise ApiError(
                400,
                "an answer has one format: leave out the others",
                "invalid_value",
                param="response_format",
            )
        return found[0] if found else None

    def options(self, usual: Sampling, top_logprobs: int | None) -> dict[str, Any]:
        """Return the fields of the core's request that all bodies have in common."""
        return {
            "model": self.model,
            "sampling": self.sampling(
                usual,
                top_logprobs=top_logprobs,
                biases=tuple(self.logit_bias.items()),
                repetition_penalty=self.repetition_penalty,
            ),
            "n": self.n,
            "stop": tuple(self.stop),
            "stream": self.stream,
            "traced": self.stream and self.stream_options.include_trace,
            "ignore_eos": self.ignore_eos,
            "user": self.user,
            "salt": self.cache_salt,
            "bad_words": tuple(self.bad_words),
            "output": self.output(),
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


class CalledFunction(StrictModel):
    name: str = Field(max_length=MAX_NAME_CHARS)
    arguments: str = "{}"

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        """Templates write the arguments, so they must be an object."""
        try:
            found = from_json(arguments or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PydanticCustomError("arguments", "the arguments of a call are the JSON of an object")
        return arguments or "{}"


class CallBody(StrictModel):
    id: str = Field("", max_length=MAX_NAME_CHARS)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int = 0


class FunctionBody(StrictModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = NO_ARGUMENTS
    strict: bool = False


class ChatTool(StrictModel):
    type: Literal["function"]
    function: FunctionBody

    def tool(self) -> Tool:
        """Return the tool for the core."""
        return Tool(self.function.name, self.function.description, self.function.parameters)


class NamedFunction(StrictModel):
    name: str = Field(max_length=MAX_NAME_CHARS)


class ToolByName(StrictModel):
    type: Literal["function"] = "function"
    function: NamedFunction


Tools = Annotated[list[ChatTool], Field(fail_fast=True), at_most(MAX_TOOLS)]


class MessageBody(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart], Field(fail_fast=True), at_most(MAX_PARTS), BeforeValidator(as_parts)
    ] = []
    name: str = Field("", max_length=MAX_NAME_CHARS)
    reasoning_content: str = ""
    tool_calls: Annotated[list[CallBody], Field(fail_fast=True), at_most(MAX_PARTS)] = []
    tool_call_id: str = Field("", max_length=MAX_NAME_CHARS)

    def message(self) -> ChatMessage:
        """Return the message for the core."""
        text = "".join(part.text for part in self.content)
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
        )
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, text, self.reasoning_content, calls, self.tool_call_id, self.name)


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


class AgentTool(OpenModel):
    """A tool of an agent. Anthropic calls its parameters ``input_schema``."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(
        NO_ARGUMENTS, validation_alias=AliasChoices("parameters", "input_schema")
    )

    def tool(self) -> Tool:
        """Return the tool for the core."""
        return Tool(self.name, self.description, self.parameters)


def _own(tools: Any) -> Any:
    """Leave out the tools that the servers of OpenAI or Anthropic run: they do not exist here.

    OpenAI's ``custom`` tools take free text, and are left out, too. Anthropic's ``custom`` tools
    have a schema.
    """
    if not isinstance(tools, list):
        return tools

    def is_own(tool: Any) -> bool:
        if not isinstance(tool, dict):
            return True  # validation refuses it
        kind = tool.get("type") or "function"
        return kind == "function" or (kind == "custom" and "input_schema" in tool)

    return [*filter(is_own, tools)]


AgentTools = Annotated[list[AgentTool], Field(fail_fast=True), BeforeValidator(_own), at_most(MAX_TOOLS)]


class AgentFormat(OpenModel):
    """The form of an answer, as agents ask for it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    def output(self) -> OutputFormat | None:
        """Return the form for the core."""
        if self.type == "text" and self.schema_ is None:
            return None
        return OutputFormat("json_schema", {"type": "object"} if self.schema_ is None else self.schema_)


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
