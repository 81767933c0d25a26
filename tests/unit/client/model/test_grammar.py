"""Grammars of strangers: refused, or served within little time and memory."""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

from swarmnet_client.model import grammar
from swarmnet_client.model.grammar import (
    MAX_GRAMMAR_BYTES,
    RULE_LIMITS,
    SCHEMA_LIMITS,
    BadGrammar,
    GrammarCompiler,
    check_rules,
    check_schema,
)
from tests.defences import defence, replacing
from tests.support.models.letters import load_letters

STALL_S = 0.05
MEMORY_BYTES = 64 << 20


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler(load_letters(tmp_path_factory.mktemp("letters")).local.vocabulary())


def refs(count: int) -> dict[str, Any]:
    """Objects whose only property refers to the next one."""
    names = {f"d{at}": {"properties": {"x": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{count}": {"type": "string"}}}


def text_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "string", **fields}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "a megabyte": lambda: {"properties": {f"property {at}": text_schema() for at in range(40_000)}},
    "10,000 alternatives": lambda: {"enum": [f"v{at}" for at in range(10_000)]},
    "10,000 unions": lambda: {"anyOf": [{"required": [f"k{at}"]} for at in range(10_000)]},
    "a product of unions": lambda: {
        "allOf": [{"anyOf": [{"properties": {f"k{at}{each}": {}}} for each in range(10)]} for at in range(12)]
    },
    "nested repetition": lambda: text_schema(pattern="^(([a-z]{1,1000}){1,1000}){1,1000}$"),
    "a catastrophic pattern": lambda: text_schema(pattern="^(.*a){20}.{200}$"),
    "an exponential pattern": lambda: text_schema(pattern="^[a-z]*a[a-z]{60}$"),
    "a long string": lambda: text_schema(minLength=1_000_000),
    "a chain of 10,000 references": lambda: refs(10_000),
    "a circle": lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
}
RULES = {
    "depth of 100,000": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
    "10,000 rules": "start: a0\n" + "\n".join(f"a{at}: a{at + 1}" for at in range(10_000)),
    "ambiguity": 'start: e\ne: e e e | e e | "a" |',
    "doubling": "start: a0\n" + "\n".join(f"a{at}: a{at + 1} a{at + 1}" for at in range(60)) + '\na60: "a"?',
    "a schema inside": "start: %json " + json.dumps(refs(1000)),
    "nested repetition": 'start: a{1,1000}\na: b{1,1000}\nb: "x"{1,1000}',
}
HOSTILE = [*SCHEMAS, *(f"rules: {name}" for name in RULES)]


def compiled(compiler: GrammarCompiler, name: str) -> grammar.Grammar:
    kind, _, rules = name.partition(": ")
    if rules:
        check_rules(RULES[rules])
        return compiler.compile(RULES[rules], RULE_LIMITS)
    schema = SCHEMAS[kind]()
    check_schema(schema)
    return compiler.compile(f"start: %json {json.dumps(schema)}", SCHEMA_LIMITS)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_costs_little(compiler: GrammarCompiler, name: str) -> None:
    """Time counts as processor time of one call: other programs on the machine do not."""
    spent: list[float] = []

    def timed(call: Callable[[], Any]) -> Any:
        before = time.thread_time()
        found = call()
        spent.append(time.thread_time() - before)
        return found

    before = psutil.Process().memory_info().rss
    try:
        state = compiled(compiler, name).start()
        for _ in range(40):
            (mask,) = timed(lambda: state.masks(()))
            allowed = np.flatnonzero(mask)
            if not allowed.size or timed(partial(state.accept, [int(allowed[-1])], force=True)).is_last:
                break
    except BadGrammar:
        pass  # refused, now or at the token that goes beyond a limit
    assert psutil.Process().memory_info().rss - before < MEMORY_BYTES
    assert max(spent, default=0.0) < STALL_S


@defence("references chain few levels", off=replacing(grammar, "MAX_REFERENCE_LEVELS", 1 << 30))
def test_a_long_chain_of_references_is_refused() -> None:
    """Compiling it would overflow the stack, and end the process."""
    with pytest.raises(BadGrammar, match="references"):
        check_schema(refs(1000))


@defence("a caller's grammar has few rules", off=replacing(grammar, "MAX_RULES", 1 << 30))
def test_a_grammar_of_many_rules_is_refused() -> None:
    with pytest.raises(BadGrammar, match="256 rules"):
        check_rules("\n".join(f"a{at}: a{at + 1}" for at in range(1000)))


@defence("the text of a grammar is bounded", off=replacing(grammar, "MAX_GRAMMAR_BYTES", 1 << 30))
def test_a_long_grammar_is_not_compiled(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadGrammar, match="longer than"):
        compiler.compile('start: "' + "a" * MAX_GRAMMAR_BYTES + '"')


CHOICE = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("rules", "valid"),
    [(f"start: %json {json.dumps(CHOICE)}", 1), ('start: think "b"\nthink[max_tokens=3]: /a*/', 2)],
    ids=["a schema", "a budget"],
)
def test_a_state_goes_back_with_its_answer(compiler: GrammarCompiler, rules: str, valid: int) -> None:
    """A draft may be wrong, and a step that was given up may have chosen tokens that the answer
    never got."""
    state = compiler.compile(rules).start()
    (before,) = state.masks(())
    token = int(np.flatnonzero(before)[0])
    state.masks([token])
    state.accept([token], force=True)
    state.follow([])
    (after,) = state.masks(())
    assert (after == before).all()
    assert state.valid([token, token]) == (token,) * valid


def test_choices_after_the_end_are_no_part_of_an_answer(compiler: GrammarCompiler) -> None:
    """A draft may end the answer; the choice after it is made all the same."""
    state = compiler.compile('start: "a" ("b" | "c")').start()
    draft: list[int] = []
    while (masks := state.masks(draft))[-1].size:
        draft.append(int(np.flatnonzero(masks[-1])[0]))
    found = state.accept([*draft, draft[0]], force=True)
    assert (found.count, found.forced, found.is_last) == (len(draft), (), True)
