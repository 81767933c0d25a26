"""The grammar of an answer: thoughts, then text, calls of tools, or the form that was asked for.

The texts are in Lark's notation as llguidance extends it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from swarmnet.gateway.generation.requests import ChatPrompt, OutputFormat, Tool
from swarmnet.gateway.generation.tool_formats import AnswerForm, ToolFormat
from swarmnet_client.model.grammar import (
    MAX_GRAMMAR_BYTES,
    RULE_LIMITS,
    SCHEMA_LIMITS,
    BadGrammar,
    GrammarLimits,
    check_rules,
    check_schema,
)

ANY_TEXT = r"/(.|\n)*/"
EMPTY = '""'
_LITERALS = {"boolean": '("True" | "False")', "null": '"None"'}


class Literals:
    """Texts as a grammar writes them. ``special``: ids of the special tokens by their text, which a
    grammar names by id."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def of(self, text: str) -> str:
        """Return a text as a sequence of literals and special tokens."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def is_token(self, text: str) -> bool:
        """Return whether a text is one special token."""
        return text in self._special

    def without(self, text: str) -> str:
        """Return a terminal of texts that do not contain ``text``."""
        return ANY_TEXT if self.is_token(text) else rf"{ANY_TEXT} & ~/(.|\n)*{_pattern(text)}(.|\n)*/"

    def _piece(self, piece: str) -> str:
        return f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece)


def _pattern(text: str) -> str:
    return re.sub(r"([][(){}.*+?^$|/\\&~])", r"\\\1", text).replace("\n", r"\n")


def json_rule(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return the rule of a JSON schema. Spacing is fixed, because each free space would be a choice
    that takes a trip."""
    check_schema(schema)
    spacing = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    guided = {**schema, "x-guidance": {**spacing, "lenient": lenient}}
    return f"%json {json.dumps(guided)}"


def check_tools(chat: ChatPrompt) -> None:
    """Raise ``BadGrammar`` if an answer must call a tool that is not given, if two tools have one
    name, or if the properties of a tool's parameters are no object."""
    names = [tool.name for tool in chat.tools]
    if chat.choice.name and chat.choice.name not in names:
        raise BadGrammar(f"there is no tool {chat.choice.name[:64]!r} among the tools")
    if chat.choice.mode == "required" and not names:
        raise BadGrammar("a required call needs tools")
    if len(set(names)) < len(names):
        raise BadGrammar("two tools have the same name")
    if not all(isinstance(tool.parameters.get("properties") or {}, dict) for tool in chat.tools):
        raise BadGrammar("`properties` in the parameters of a tool is an object")


def is_free(chat: ChatPrompt, output: OutputFormat | None, form: AnswerForm) -> bool:
    """Return whether a chat takes every answer, so that it needs no grammar."""
    has_budget = chat.reasoning.budget is not None and bool(form.think[1])
    return output is None and not has_budget and (not chat.tools or chat.choice.mode == "none")


def answer_grammar(
    chat: ChatPrompt, output: OutputFormat | None, form: AnswerForm, literals: Literals, *, thinks: bool
) -> tuple[str, GrammarLimits]:
    """Return the grammar of the answer to a chat, and its limits.

    ``thinks``: the prompt ends within the thoughts. Raises ``BadGrammar``.
    """
    tools = chat.tools if chat.choice.mode != "none" else ()
    budget = chat.reasoning.budget
    if output is not None and output.kind == "grammar" and not tools and not form.think[1]:
        check_rules(output.value)
        return output.value, RULE_LIMITS
    rules: list[str] = []
    ways = []
    if tools:
        rules += call_rules(
            tools, form.tools, literals, parallel=chat.choice.parallel, named=chat.choice.name
        )
    needs_call = bool(tools) and (chat.choice.mode == "required" or bool(chat.choice.name))
    opening = literals.of(form.text_open)
    if output is not None and not needs_call:
        ways.append(f"{opening} output")
        rules.append(f"output: {_output_rule(output)}")
    elif not needs_call:
        ways.append(f"{opening} TEXT")
        rules.append(f"TEXT: {_free_text(form, literals) if tools and not form.text_open else ANY_TEXT}")
    if tools:
        marker = literals.of(form.tools.marker)
        ways.append(f"{marker} calls")
        if not needs_call and output is None and marker and not form.text_open:
            ways.append("head calls" if "<[" not in marker else f"TEXT {marker} calls")
            if "<[" not in marker:
                rules.append(f"head[lazy]: /(.|\\n)*{_pattern(form.tools.marker)}/")
    thoughts = _thought_rules(form, literals, budget, thinks=thinks)
    start = f"start: {'thoughts ' if thoughts else ''}body\nbody: {' | '.join(ways)}"
    return "\n".join([start, *thoughts, *rules]), SCHEMA_LIMITS


def _free_text(form: AnswerForm, literals: Literals) -> str:
    if form.tools.marker:
        return literals.without(form.tools.marker)
    begin = re.escape((form.tools.first + form.tools.begin)[0])
    return rf"/([^{begin}](.|\n)*)?/"


def _thought_rules(form: AnswerForm, literals: Literals, budget: int | None, *, thinks: bool) -> list[str]:
    begin, end = form.think
    if not end:
        return []
    limit = f"[max_tokens={budget}]" if budget else ""
    if "<[" in literals.of(end):
        rules = [f"inside: {literals.of(end)}" if budget == 0 else f"inside: think {literals.of(end)}"]
        rules += [] if budget == 0 else [f"think{limit}: /(.|\\n)*/"]
    else:
        rules = [f"inside: {literals.of(end)}" if budget == 0 else f"inside[lazy]: /(.|\\n)*{_pattern(end)}/"]
    rules.append(r"space: /\n{0,2}/")
    if thinks:
        return ["thoughts: inside space", *rules]
    # a budget of 0 leaves out thoughts that the prompt has not begun
    if budget == 0:
        return []
    return [f"thoughts: ({literals.of(begin)} inside space)?", *rules]


def _output_rule(output: OutputFormat) -> str:
    match output.kind:
        case "json_schema":
            return json_rule(output.value, lenient=False)
        case "regex":
            # a slash that ended the pattern would let the caller go on with rules of their own
            pattern = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", output.value, flags=re.DOTALL)
            return "/" + pattern.replace("\n", r"\n") + "/"
        case "choice":
            return " | ".join(map(json.dumps, output.value))
        case "grammar":
            raise BadGrammar(
                "a grammar of your own goes without tools, and with models that write no thoughts"
            )


def call_rules(
    tools: tuple[Tool, ...], form: ToolFormat, literals: Literals, *, parallel: bool, named: str
) -> list[str]:
    """Return the rule ``calls``: what follows the marker in an answer that calls ``tools``."""
    chosen = [tool for tool in tools if not named or tool.name == named]
    more = form.most - 1 if parallel else 0
    again = f"({literals.of(form.separator)} call){{0,{more}}}" if more else ""
    rules = [f"calls: {literals.of(form.first)} call {again} {literals.of(form.close)}"]
    names = []
    for number, tool in enumerate(chosen):
        names.append(f"{literals.of(tool.name + form.middle)} args{number}")
        rules += _argument_rules(number, tool.parameters, form, literals)
    rules.append(f"call: {literals.of(form.begin)} ({' | '.join(names)}) {literals.of(form.end)}")
    return rules


def _argument_rules(
    number: int, schema: Mapping[str, Any], form: ToolFormat, literals: Literals
) -> list[str]:
    if form.arguments == "json":
        return [f"args{number}: {json_rule({'type': 'object', **schema}, lenient=True)}"]
    check_schema(schema)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(required, list):
        raise BadGrammar("`required` in the parameters of a tool is a list of names")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if len(properties) * len(json.dumps(shared)) > MAX_GRAMMAR_BYTES:
        raise BadGrammar("the definitions of a tool's parameters are too long")
    rules, parts = [], []
    for place, (name, inner) in enumerate(properties.items()):
        value = _value_rule(inner, shared, form)
        rule = f"arg{number}_{place}"
        if form.arguments == "tags":
            before, between, after = form.tags
            rules.append(f"{rule}: {literals.of(before + name + between)} {value} {literals.of(after)}")
        else:
            rules.append(f"{rule}: {json.dumps(name + '=')} {value}")
        parts.append((rule, name in required))
    if form.arguments == "tags":
        whole = " ".join(rule if must else f"{rule}?" for rule, must in parts)
        return [f"args{number}: {whole or EMPTY}", *rules]
    return [*_with_commas(number, parts), *rules]


def _with_commas(number: int, parts: list[tuple[str, bool]]) -> list[str]:
    """Return rules of arguments in their order, with commas between given arguments."""
    rules = [f'first{number}_{len(parts)}: ""', f'rest{number}_{len(parts)}: ""']
    for place in reversed(range(len(parts))):
        rule, must = parts[place]
        skip = "" if must else f" | {{}}{number}_{place + 1}"
        given = f"{rule} rest{number}_{place + 1}"
        rules.append(f"first{number}_{place}: {given}{skip.format('first')}")
        rules.append(f'rest{number}_{place}: ", " {given}{skip.format("rest")}')
    return [f"args{number}: first{number}_0", *reversed(rules)]


def _value_rule(schema: Any, shared: Mapping[str, Any], form: ToolFormat) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if form.arguments == "python" and kind in _LITERALS:
        return _LITERALS[kind]
    if form.arguments == "tags" and kind == "string":
        options = schema.get("enum")
        if isinstance(options, list) and options and all(isinstance(each, str) for each in options):
            return "(" + " | ".join(map(json.dumps, options)) + ")"
        least, most = schema.get("minLength") or 0, schema.get("maxLength")
        if not isinstance(least, int) or not isinstance(most, int | None):
            raise BadGrammar("minLength and maxLength are whole numbers")
        return f"/[^<]{{{least:d},{'' if most is None else int(most)}}}/"
    return json_rule({**(schema if isinstance(schema, dict) else {}), **shared}, lenient=True)
