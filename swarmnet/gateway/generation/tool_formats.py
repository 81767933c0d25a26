"""The forms in which families of models write thoughts and calls of tools.

A family is recognised by its chat template.

The grammar of an answer (``answer_grammars.py``) fixes the form of a call to the letter, so the
reader (``answer_reader.py``) meets nothing else. Formats follow the templates that the publishers
of the models give.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ToolFormat:
    """One family's way to write calls.

    - ``marker``: the text that turns an answer into calls; empty if calls begin the answer.
    - ``call``: the text of a call, with ``NAME`` and ``ARGUMENTS`` in their places.
    - ``separator``: the text between two calls.
    - ``first``, ``close``: the texts before the first call and after the last one.
    - ``arguments``: one JSON object; a tagged value for each argument; or as in a call in Python.
    - ``tags``: the texts before a name, between name and value, and after a value.
    - ``most``: calls of one answer.
    """

    marker: str
    call: str
    separator: str = ""
    first: str = ""
    close: str = ""
    arguments: Literal["json", "tags", "python"] = "json"
    tags: tuple[str, str, str] = ("", "", "")
    most: int = 8
    id_chars: int = 24

    @property
    def begin(self) -> str:
        return self.call.partition("NAME")[0]

    @property
    def middle(self) -> str:
        return self.call.partition("NAME")[2].partition("ARGUMENTS")[0]

    @property
    def end(self) -> str:
        return self.call.partition("ARGUMENTS")[2]

    def written(self, name: str, arguments: str) -> str:
        """Return an answer that is one call."""
        return self.marker + self.first + self.begin + name + self.middle + arguments + self.end


HERMES = ToolFormat(
    "<tool_call>", '\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "\n<tool_call>"
)
"""Hermes, Qwen 2.5 and 3, SmolLM3, and the instruction for templates without tools."""
QWEN_CODER = replace(
    HERMES,
    call="\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    arguments="tags",
    tags=("<parameter=", ">\n", "\n</parameter>\n"),
)
GLM = replace(
    HERMES,
    call="NAME\nARGUMENTS</tool_call>",
    arguments="tags",
    tags=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
LLAMA_JSON = ToolFormat("", '{"name": "NAME", "parameters": ARGUMENTS}', most=1)
PYTHONIC = ToolFormat("", "NAME(ARGUMENTS)", ", ", "[", "]", arguments="python")
MISTRAL_LIST = ToolFormat(
    "[TOOL_CALLS]", '{"name": "NAME", "arguments": ARGUMENTS}', ", ", "[", "]", id_chars=9
)
"""Mistral up to its tokenizer v7. Its templates take ids of nine letters and digits."""
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", "[TOOL_CALLS]", id_chars=9)
DEEPSEEK = ToolFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)
"""From DeepSeek V3.1 on."""
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
    separator="\n",
)
HARMONY = ToolFormat(
    "<|channel|>commentary", " to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>", most=1
)


@dataclass(frozen=True)
class AnswerForm:
    """A family's way to write an answer.

    - ``think``: the texts around thoughts; empty if the template knows none.
    - ``text_open``: the text before what the user reads.
    - ``knows_tools``: whether the chat template writes tools into the prompt.
    """

    tools: ToolFormat = HERMES
    think: tuple[str, str] = ("", "")
    text_open: str = ""
    knows_tools: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that may contain special tokens."""
        tools = self.tools
        around = tools.begin, tools.middle, tools.end, tools.separator, tools.close
        return tools.marker, tools.first, *around, *tools.tags, *self.think, self.text_open


HARMONY_FORM = AnswerForm(
    HARMONY, ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"), "<|channel|>final<|message|>"
)
_FAMILIES: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<arg_key>",), GLM),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    (("[func_name1(",), PYTHONIC),
    (('"parameters": ',), LLAMA_JSON),
    (("<|python_tag|>",), LLAMA_JSON),
)
"""Texts in a template that show a family, the most telling first."""


def form_of(template: str) -> AnswerForm:
    """Return how the models with a chat template write answers."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY_FORM
    think = next(
        (pair for pair in (("<think>", "</think>"), ("[THINK]", "[/THINK]")) if pair[1] in template), ("", "")
    )
    known = (
        tools for texts, tools in _FAMILIES if "tools" in template and all(text in template for text in texts)
    )
    tools = next(known, None)
    return AnswerForm(tools or HERMES, think, knows_tools=tools is not None)


def instruction(tools: str) -> str:
    """Return what a model without tools in its template is told. ``tools``: their JSON, one a
    line."""
    return (
        "You can call these functions:\n"
        f"<tools>\n{tools}\n</tools>\n"
        "To call one, write its name and arguments as JSON between tags:\n"
        + HERMES.written("NAME", '{"ARGUMENT": "VALUE"}')
    )
