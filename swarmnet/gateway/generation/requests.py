"""A request for an answer, as every protocol translates it for the core.

1. An endpoint of ``protocols/`` parses a body and returns a :class:`GenerationRequest`.
2. The gateway renders its chat, or takes its prompts, and generates the choices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from swarmnet_client.model.sampling import Sampling

Role = Literal["system", "user", "assistant", "tool"]
MAX_CHOICES = 16
"""Most choices of a request, over all its prompts."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function by the model. ``arguments`` is the JSON text of an object, cut off where
    the answer reached its limit of tokens."""

    id: str
    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """Return the arguments as an object. It is empty if their text was cut off."""
        try:
            fields = json.loads(self.arguments)
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}


@dataclass(frozen=True)
class ChatMessage:
    """A message of a chat. Its content parts are joined to one text.

    - ``reasoning``: the thoughts before an assistant's ``text``.
    - ``calls``: the calls that an assistant's message makes.
    - ``call_id``: the call whose result a message of the role ``tool`` has.
    """

    role: Role
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the answer calls: none, some if the model wants to, at least one, or the function
    ``name``. ``parallel``: whether it may make several calls."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True)
class Reasoning:
    """The thinking of a model before it answers.

    - ``effort``: as the chat template takes it, such as ``low``. ``none`` switches thinking off.
    - ``budget``: most tokens of thoughts; None for no limit.
    """

    effort: str = ""
    budget: int | None = None


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation to be continued. ``template``: further variables of the chat template."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    reasoning: Reasoning = Reasoning()
    template: Mapping[str, Any] = field(default_factory=dict)


Prompt = ChatPrompt | tuple[str | list[int], ...]
"""A chat, or the texts and token lists to be continued."""


@dataclass(frozen=True)
class OutputFormat:
    """The form that an answer must have.

    ``value``: a JSON schema, a regular expression, a tuple of texts, or a grammar in the notation
    of llguidance (Lark) or of llama.cpp (GBNF).
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any


@dataclass(frozen=True)
class GenerationRequest:
    """The request of a caller, whichever protocol they speak.

    - ``prompt``: each text or token list has one answer.
    - ``param``: the parameter with the prompt, for error messages.
    - ``sampling``: its seed is the first choice's. Each further choice adds one.
    - ``echo``: whether choices begin with their prompts, which are texts or token lists.
    - ``max_tokens``: None for as many as the context has room for; 0 only with ``echo``.
    - ``bad_words``: texts that the answer never contains.
    - ``traced``: whether the answer tells the times of its steps.
    - ``user``, ``salt``: prompts of different users and salts never share caches.
    """

    model: str
    prompt: Prompt
    param: str
    sampling: Sampling
    max_tokens: int | None = None
    echo: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    output: OutputFormat | None = None
    stream: bool = False
    traced: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    user: str = ""
    salt: str = ""

    @property
    def choices(self) -> int:
        """The number of choices over all prompts."""
        return self.n * (1 if isinstance(self.prompt, ChatPrompt) else len(self.prompt))
