"""How families of models write thoughts and calls of tools, recognised by their chat template.

A call is written as ``begin`` NAME ``middle`` ARGUMENTS ``end``. The grammar of an answer
(``answer_grammars.py``) fixes this form to the letter, so the reader (``answer_reader.py``) meets
nothing else. Formats follow the templates that the publishers of the models give.
"""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class ToolFormat:
    """One family's way to write calls.

    - ``marker``: the text that turns an answer into calls; empty if calls begin the answer.
    - ``begin``: the text before each name. The first call has ``marker`` and ``first`` before it.
    - ``separator``, ``close``: texts between calls, and after the last one.
    - ``arguments``: one JSON object; a tagged value for each argument; or as in a call in Python.
    - ``tags``: the texts before a name, between name and value, and after a value.
    - ``most``: calls of one answer.
    """

    marker: str = "<tool_call>"
    first: str = ""
    begin: str = '\n{"name": "'
    middle: str = '", "arguments": '
    end: str = "}\n</tool_call>"
    separator: str = "\n<tool_call>"
    close: str = ""
    arguments: Literal["json", "tags", "python"] = "json"
    tags: tuple[str, str, str] = ("", "", "")
    most: int = 8
    id_chars: int = 24


HERMES = ToolFormat()
"""Hermes, Qwen 2.5 and 3, SmolLM3, and the instruction for templates without tools."""
QWEN_CODER = ToolFormat(
    begin="\n<function=",
    middle=">\n",
    end="</function>\n</tool_call>",
    arguments="tags",
    tags=("<parameter=", ">\n", "\n</parameter>\n"),
)
GLM = ToolFormat(
    begin="",
    middle="\n",
    end="</tool_call>",
    arguments="tags",
    tags=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
LLAMA_JSON = ToolFormat(
    marker="", begin='{"name": "', middle='", "parameters": ', end="}", separator="", most=1
)
PYTHONIC = ToolFormat(
    marker="", first="[", begin="", middle="(", end=")", separator=", ", close="]", arguments="python"
)
MISTRAL_LIST = ToolFormat(
    marker="[TOOL_CALLS]",
    first="[",
    begin='{"name": "',
    middle='", "arguments": ',
    end="}",
    separator=", ",
    close="]",
    id_chars=9,
)
"""Mistral up to its tokenizer v7. Its templates take ids of nine letters and digits."""
MISTRAL_ARGS = ToolFormat(
    marker="[TOOL_CALLS]", begin="", middle="[ARGS]", end="", separator="[TOOL_CALLS]", id_chars=9
)
DEEPSEEK = ToolFormat(
    marker="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    separator="",
    close="<｜tool▁calls▁end｜>",
)
"""From DeepSeek V3.1 on."""
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    end="\n```<｜tool▁call▁end｜>",
    separator="\n",
)
HARMONY = ToolFormat(
    marker="<|channel|>commentary",
    begin=" to=functions.",
    middle=" <|constrain|>json<|message|>",
    end="<|call|>",
    separator="",
    most=1,
)


@dataclass(frozen=True)
class AnswerForm:
    """How a family of models writes an answer.

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
        return (
            *(tools.marker, tools.first, tools.begin, tools.middle, tools.end, tools.separator, tools.close),
            *(*tools.tags, *self.think, self.text_open),
        )


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
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )
