"""How families of models write calls: what the grammar lets through, the reader understands."""

import json
import random
import re
from contextlib import suppress
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest

from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.generation import tool_formats
from swarmnet.gateway.generation.answer_grammars import Literals, answer_grammar, check_tools
from swarmnet.gateway.generation.answer_reader import AnswerReader
from swarmnet.gateway.generation.detokenizer import IncrementalDetokenizer
from swarmnet.gateway.generation.events import AnsweredChoice, Delta, whole_choices
from swarmnet.gateway.generation.requests import (
    ChatMessage,
    ChatPrompt,
    OutputFormat,
    Reasoning,
    Tool,
    ToolCall,
    ToolChoice,
)
from swarmnet.gateway.generation.template_inputs import template_messages
from swarmnet.gateway.generation.tool_formats import HARMONY_FORM, AnswerForm, form_of
from swarmnet.gateway.parsing import BodyParser
from swarmnet.gateway.protocols import schemas
from swarmnet.gateway.protocols.chat_completions import ChatBody
from swarmnet_client.model.grammar import BadGrammar, GrammarCompiler
from swarmnet_protocols.models.text.vocabulary import Vocabulary
from tests.support.models.letters import load_letters

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "metric": {"type": "boolean"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["city", "metric"],
    "additionalProperties": False,
}
TOOLS = (Tool("weather", "", WEATHER), Tool("ping", "", {"type": "object", "additionalProperties": False}))
STRINGS = {"weather": frozenset({"city"})}
FORMATS = [
    "HERMES", "QWEN_CODER", "GLM", "LLAMA_JSON", "PYTHONIC", "MISTRAL_LIST", "MISTRAL_ARGS", "DEEPSEEK",
    "DEEPSEEK_FENCED", "HARMONY",
]  # fmt: skip


class Speaker:
    """A model that chooses among the allowed tokens at random."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokenizer = vocabulary.tokenizer
        self.compiler = GrammarCompiler(vocabulary)
        self._ends = vocabulary.end_ids
        added = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {each.content: token for token, each in added.items() if self.compiler.is_special(token)}
        self.literals = Literals(special)
        self._added = {token: each.content for token, each in added.items()}

    def answer(
        self, chat: ChatPrompt, form: AnswerForm, seed: int, begins: str = ""
    ) -> tuple[AnsweredChoice, bool]:
        """Return an answer as its reader understands it, and whether it ended by itself."""
        text, limits = answer_grammar(chat, None, form, self.literals, thinks=False)
        grammar = self.compiler.compile(text, limits)
        state, ids, is_last = grammar.start(), list(grammar.first), False
        state.follow(ids)
        chance = random.Random(seed)
        coming = self.tokenizer.encode(begins, add_special_tokens=False)
        while not is_last and len(ids) < 500:
            (mask,) = state.masks(())
            allowed = [int(each) for each in np.flatnonzero(mask)]
            token = coming.pop(0) if coming else chance.choice(allowed)
            assert token in allowed
            if not coming and self._ends[0] in allowed and chance.random() < 0.5:
                break
            found = state.accept([token], force=True)
            ids, is_last = [*ids, token, *found.forced], found.is_last
        marks = {
            token: text for token, text in self._added.items() if any(text in mark for mark in form.marks)
        }
        detokenizer = IncrementalDetokenizer(self.tokenizer, (), marks)
        reader = AnswerReader(0, form, calls=True, strings=STRINGS)
        events: list[Delta] = []
        for token in ids:
            events += reader.push(detokenizer.push(token))
        events += [*reader.push(detokenizer.flush()), *reader.flush()]
        return (whole_choices(events) or [AnsweredChoice(0)])[0], len(ids) < 500


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    return Speaker(load_letters(tmp_path_factory.mktemp("letters")).local.vocabulary())


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_parses_and_validates(speaker: Speaker, name: str) -> None:
    """Also by a model that knows nothing."""
    form = HARMONY_FORM if name == "HARMONY" else AnswerForm(getattr(tool_formats, name))
    chat = ChatPrompt((), TOOLS, ToolChoice("required"))
    ended = [
        choice for choice, is_whole in (speaker.answer(chat, form, seed) for seed in range(4)) if is_whole
    ]
    assert ended
    for choice in ended:
        assert choice.calls
        for call in choice.calls:
            schema = next(tool.parameters for tool in TOOLS if tool.name == call.name)
            jsonschema.validate(json.loads(call.arguments), schema)


@pytest.mark.parametrize("name", ["HERMES", "GLM", "MISTRAL_LIST", "MISTRAL_ARGS", "DEEPSEEK"])
def test_a_text_may_turn_into_a_call(speaker: Speaker, name: str) -> None:
    form = AnswerForm(getattr(tool_formats, name))
    choice, _ = speaker.answer(ChatPrompt((), TOOLS), form, 5, f"Hi! {form.tools.marker}")
    assert choice.text == "Hi! "
    assert choice.calls


@pytest.mark.parametrize("name", ["GLM", "QWEN_CODER", "PYTHONIC", "HERMES"])
def test_values_may_contain_the_marks_of_calls(speaker: Speaker, name: str) -> None:
    """Also when the answer comes letter by letter."""
    tools = getattr(tool_formats, name)
    values = {"city": 'a "town', "list": [f"x{tools.end}{tools.tags[0]}b=1)\\"], "metric": False}
    strings = {"weather": frozenset({"city"})}
    if tools.arguments == "tags":
        before, between, after = tools.tags
        texts = [f"{before}city{between}{values['city']}{after}"]
        texts += [f"{before}{key}{between}{json.dumps(values[key])}{after}" for key in ("list", "metric")]
        body = "".join(texts)
    elif tools.arguments == "python":
        body = f"city={json.dumps(values['city'])}, list={json.dumps(values['list'])}, metric=False"
    else:
        body = json.dumps(values)
    answer = f"{tools.marker}{tools.first}{tools.begin}weather{tools.middle}{body}{tools.end}{tools.close}"
    for pieces in (answer, [answer]):
        reader = AnswerReader(0, AnswerForm(tools), calls=True, strings=strings)
        events = [event for piece in pieces for event in reader.push(piece)]
        (choice,) = whole_choices([*events, *reader.flush()])
        assert [json.loads(call.arguments) for call in choice.calls] == [values]
        assert choice.text == ""


def test_thoughts_end_within_their_budget(speaker: Speaker) -> None:
    form = AnswerForm(think=("<think>", "</think>"))
    chat = ChatPrompt((), reasoning=Reasoning(budget=8))
    choice, _ = speaker.answer(chat, form, 1, "<think>one two three four")
    assert choice.reasoning.startswith("one two ")
    assert len(choice.reasoning) < 40
    assert "think>" not in choice.text


TEMPLATES = {
    "{{ tools }} <tool_call>": tool_formats.HERMES,
    "{{ tools }} <tool_call> <function= <parameter=": tool_formats.QWEN_CODER,
    "{{ tools }} <tool_call> <arg_key>": tool_formats.GLM,
    '{{ tools }} <|python_tag|> "parameters": ': tool_formats.LLAMA_JSON,
    "{{ tools }} [func_name1(params_name1=": tool_formats.PYTHONIC,
    "{{ tools }} [TOOL_CALLS]": tool_formats.MISTRAL_LIST,
    "{{ tools }} [TOOL_CALLS] [ARGS]": tool_formats.MISTRAL_ARGS,
    "{{ tools }} <｜tool▁calls▁begin｜>": tool_formats.DEEPSEEK,
    "{{ tools }} <｜tool▁calls▁begin｜> ```json": tool_formats.DEEPSEEK_FENCED,
    "{{ tools }} <|channel|> <|message|>": tool_formats.HARMONY,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_shows_the_form_of_calls(template: str) -> None:
    assert form_of(template).tools == TEMPLATES[template]
    assert form_of(template).knows_tools


def test_a_template_without_tools_is_told_how_to_call() -> None:
    assert not form_of("{{ messages }}").knows_tools


def test_a_pattern_of_a_caller_stays_one_pattern() -> None:
    """Rules after it would escape the limits on a caller's own grammar."""
    plain = Literals({})
    for value in ('x/ "rules" /x', r'x\\/ "rules" /x', r'x\\\/ "rules" /x'):
        text, _ = answer_grammar(
            ChatPrompt(()), OutputFormat("regex", value), AnswerForm(), plain, thinks=False
        )
        rule = text.partition("output: ")[2]
        assert re.fullmatch(r"/([^/\\\n]|\\.)*/", rule)


HUGE = {"type": "object", "properties": {str(at): {} for at in range(3000)}, "$defs": {"a": "x" * 1000}}
BAD_PARAMETERS: list[dict[str, Any]] = [
    {"properties": {"a": {"type": "string"}}, "required": 3},
    {"properties": {"a": {"type": "string", "minLength": "3"}}},
    {"properties": {"a": {"type": "string", "maxLength": 0.5}}},
    HUGE,
]


@pytest.mark.parametrize("form", ["QWEN_CODER", "GLM"])
@pytest.mark.parametrize("parameters", BAD_PARAMETERS, ids=range(len(BAD_PARAMETERS)))
def test_bad_parameters_of_a_tool_are_refused(form: str, parameters: dict[str, Any]) -> None:
    chat = ChatPrompt((), (Tool("bad", "", parameters),))
    with pytest.raises(BadGrammar):
        answer_grammar(chat, None, AnswerForm(getattr(tool_formats, form)), Literals({}), thinks=False)


def test_a_thousand_tools_are_refused() -> None:
    with pytest.raises(ApiError, match="more than 256"):
        _parsed(1000)


def test_many_tools_are_served_at_little_cost(speaker: Speaker) -> None:
    chat = ChatPrompt(
        (), tuple(tool.tool() for tool in _parsed(schemas.MAX_TOOLS).tools), ToolChoice("required")
    )
    for name in FORMATS:
        before = psutil.Process().memory_info().rss
        form = HARMONY_FORM if name == "HARMONY" else AnswerForm(getattr(tool_formats, name))
        text, limits = answer_grammar(chat, None, form, speaker.literals, thinks=False)
        with suppress(BadGrammar):  # refused: the grammar is too long
            state = speaker.compiler.compile(text, limits).start()
            state.masks(())
        assert psutil.Process().memory_info().rss - before < 64 << 20, name


def _parsed(count: int) -> Any:
    """Return the body of a chat with tools, parsed as on the event loop."""
    schema = {"type": "object", "properties": {f"argument {at}": {"type": "string"} for at in range(10)}}
    tools = [
        {"type": "function", "function": {"name": f"tool{at}", "parameters": schema}} for at in range(count)
    ]
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    return BodyParser(1 << 17).parse(json.dumps(fields).encode(), ChatBody)


def test_properties_of_a_tool_are_an_object() -> None:
    """Also where the answer must call another tool, whose schema alone is compiled."""
    bad = Tool("bad", "", {"properties": [1]})
    with pytest.raises(BadGrammar, match="an object"):
        check_tools(ChatPrompt((), (*TOOLS, bad), ToolChoice("required", "ping")))


def test_a_call_that_was_cut_off_returns_without_arguments() -> None:
    """Agents send it back as it came, and templates want an object."""
    message = ChatMessage("assistant", calls=(ToolCall("1", "weather", '{"city": "Par'),))
    (found,) = template_messages(ChatPrompt((message,)), AnswerForm(knows_tools=True))
    assert found["tool_calls"][0]["function"] == {"name": "weather", "arguments": {}}
