"""Grammars that answers obey, with llguidance (docs/decisions/0179).

1. A :class:`GrammarCompiler` holds the tokens of one model.
2. It compiles a grammar, away from the event loop and within limits, to a :class:`Grammar`.
3. Each answer follows its own :class:`GrammarState`. For each step, the state says which tokens a
   draft may have, which tokens may come next, and which tokens must follow the chosen ones.

A grammar comes from a stranger. llguidance bounds the work and memory of one compilation and one
mask, but recurses through references between rules and overflows the stack on long chains. So
:func:`check_schema` and :func:`check_rules` bound the chains first.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import SwarmnetError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from swarmnet_protocols.models.text.vocabulary import Vocabulary

MAX_GRAMMAR_BYTES = 1 << 18
"""Longest text of a grammar. Compiling one of this length takes some 100 ms and 50 MB."""
MAX_REFERENCE_LEVELS = 1 << 11
"""Most levels of a schema that references may chain. 8 MB of stack are enough for twice as many."""
MAX_RULES = 256
"""Most rules and terminals of a caller's own grammar. Each may refer to the next one."""
MAX_LEXER_STATES = 20_000
"""States of a lexer take 1 to 2 kB each."""
_RULE = re.compile(r"^\s*[?!]?[A-Za-z_][\w.-]*\s*(?:\[[^\]\n]*\])?\s*(?::|::=)", re.MULTILINE)


class BadGrammar(SwarmnetError):
    """A grammar that is invalid, or goes beyond a limit."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of llguidance for each token: Earley items in one row and in one mask, and the work of
    the lexer.

    Schemas with hundreds of optional properties need a thousand items in a row. A caller's own
    rules may be ambiguous, and then the work grows with the third power of the items.
    """

    row_items: int = 2_000
    mask_items: int = 20_000
    lexer_fuel: int = 50_000

    def of_parser(self) -> "LLParserLimits":
        from llguidance import LLParserLimits

        return LLParserLimits(
            max_items_in_row=self.row_items,
            step_max_items=self.mask_items,
            step_lexer_fuel=self.lexer_fuel,
            initial_lexer_fuel=500_000,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=100_000,
            verbose_errors=False,
        )


SCHEMA_LIMITS = GrammarLimits()
RULE_LIMITS = GrammarLimits(row_items=300, mask_items=3_000)
"""For a caller's own rules."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise ``BadGrammar`` if references of a JSON schema may chain too many levels."""
    targets, deepest = set(), 0
    for level, each in _levels(schema):
        deepest = max(deepest, level)
        if isinstance(each, dict) and isinstance(each.get("$ref"), str):
            targets.add(each["$ref"])
    if len(targets) * deepest > MAX_REFERENCE_LEVELS:
        raise BadGrammar(f"{len(targets)} references in a schema of {deepest} levels are too many")


def _levels(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield each container of a JSON value with its level, without recursion."""
    left: list[tuple[int, Any]] = [(1, value)]
    while left:
        level, each = left.pop()
        yield level, each
        inner = each.values() if isinstance(each, dict) else each
        left.extend((level + 1, one) for one in inner if isinstance(one, dict | list))


def check_rules(text: str) -> None:
    """Raise ``BadGrammar`` for a caller's grammar with too many rules, or with a schema inside."""
    if len(_RULE.findall(text)) > MAX_RULES or text.count("\n") > 4 * MAX_RULES:
        raise BadGrammar(f"a grammar may have {MAX_RULES} rules")
    if "%json" in text or "%regex" in text or text.lstrip().startswith("{"):
        raise BadGrammar("a grammar may have no schema inside: use json_schema for it")


class GrammarCompiler:
    """The tokens of one model, for its grammars.

    Make it when the program starts: this holds the interpreter for some tenths of a second. Any
    thread may call the other methods.
    """

    def __init__(self, vocabulary: "Vocabulary") -> None:
        from llguidance import LLTokenizer

        backend = vocabulary.tokenizer.backend_tokenizer.to_str()
        self._tokens = LLTokenizer(backend, n_vocab=vocabulary.size, eos_token=[*vocabulary.end_ids])

    def compile(self, text: str, limits: GrammarLimits = SCHEMA_LIMITS) -> "Grammar":
        """Compile a grammar in Lark's notation, as llguidance extends it. Raises ``BadGrammar``."""
        from llguidance import LLMatcher

        if len(text) > MAX_GRAMMAR_BYTES:
            raise BadGrammar(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(self._tokens, text, log_level=0, limits=limits.of_parser())
        forced = [] if matcher.is_error() else matcher.compute_ff_tokens()
        if matcher.is_error():
            raise BadGrammar(f"the grammar cannot be used: {_printable(matcher.get_error())}")
        whole = matcher.deep_copy()
        whole.consume_tokens(forced)
        # The last token of a text without choices is chosen, so that each answer has a choice.
        return Grammar(matcher, tuple(forced[:-1] if whole.is_stopped() else forced))

    def is_special(self, token: int) -> bool:
        """Return whether a grammar names a token as ``<[id]>``: its text would be other tokens."""
        return self._tokens.is_special_token(token)


def _printable(text: str) -> str:
    return " ".join("".join(each if each.isprintable() else " " for each in text[:300]).split())


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar. ``first``: the tokens with which every answer begins."""

    matcher: "LLMatcher"
    first: tuple[int, ...]

    def start(self) -> "GrammarState":
        """Return the state of an answer without tokens."""
        return GrammarState(self)


@dataclass(frozen=True)
class Accepted:
    """The tokens that a step adds to an answer.

    - ``count``: how many of the chosen tokens belong to the answer. Choices after its end do not.
    - ``forced``: the tokens that must follow.
    - ``is_last``: nothing may follow.
    """

    count: int
    forced: tuple[int, ...]
    is_last: bool


class GrammarState:
    """The place of one answer in its grammar. One thread at a time uses it.

    A draft is tried on a copy of the matcher. llguidance cannot take tokens back in a grammar that
    counts tokens, such as the grammar of a budget of thoughts.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.deep_copy()
        self._count = 0
        """Tokens of the answer that the matcher has."""

    def follow(self, ids: Sequence[int]) -> None:
        """Go to the state after ``ids``, all tokens of the answer so far.

        When a step was given up, ``ids`` are fewer than this state has. Then the matcher begins
        again. Raises ``BadGrammar`` if a limit is reached.
        """
        if self._count > len(ids):
            self._matcher, self._count = self._grammar.matcher.deep_copy(), 0
        if self._count < len(ids):
            self._matcher.consume_tokens([*ids[self._count :]])
        self._count = len(ids)
        _check(self._matcher)

    def valid(self, draft: Sequence[int]) -> tuple[int, ...]:
        """Return the part of a draft that the grammar allows next."""
        return tuple(draft[: self._matcher.validate_tokens([*draft])]) if draft else ()

    def masks(self, draft: Sequence[int]) -> list[Array]:
        """Return which tokens [V] may come next, and which after each token of a valid draft.
        Raises ``BadGrammar`` if a limit is reached."""
        matcher = self._matcher.deep_copy() if draft else self._matcher
        found = [_mask(matcher)]
        for token in draft:
            matcher.consume_token(token)
            found.append(_mask(matcher))
        return found

    def accept(self, chosen: Sequence[int], *, force: bool) -> Accepted:
        """Add chosen tokens up to the end of the answer and, with ``force``, the tokens that must
        follow. Raises ``BadGrammar`` if a limit is reached."""
        before = self._count
        for token in chosen:
            if self._matcher.is_stopped():
                break  # nothing limited the choices after the end, so they mean nothing
            self._matcher.consume_token(token)
            self._count += 1
        count = self._count - before
        can_force = force and not self._matcher.is_stopped()
        forced = tuple(self._matcher.compute_ff_tokens()) if can_force else ()
        self._matcher.consume_tokens([*forced])
        self._count += len(forced)
        _check(self._matcher)
        return Accepted(count, forced, self._matcher.is_stopped())


def _mask(matcher: "LLMatcher") -> Array:
    if matcher.is_stopped():
        return np.ones(0, bool)  # the answer is complete: ``accept`` ignores the choice here
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    _check(matcher)
    return np.unpackbits(bits, bitorder="little").view(bool)


def _check(matcher: "LLMatcher") -> None:
    if matcher.is_error():
        why = _printable(matcher.get_error())
        raise BadGrammar(f"the answer cannot go on in its grammar: {why}")


def lark_text(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return json.dumps(text)
