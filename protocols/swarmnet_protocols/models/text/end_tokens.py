"""The tokens that end an answer, which checkpoints name in several places that often disagree."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.tokenizer import ENDS
from swarmnet_protocols.models.text.chat_template import render_chat

_QUESTION, _ANSWER = "question", "answer"


def end_ids(tokenizer: Any, stated: Iterable[int | list[int] | None], vocabulary: int) -> tuple[int, ...]:
    """Return the ids of the tokens that end an answer, in ascending order.

    ``stated``: the ids in the config, the generation config and the header of a gguf file. The
    result adds the tokenizer's end token, its special tokens with well-known names, and the token
    that ends a turn in its chat template. Ids outside the ``vocabulary`` are left out.
    """
    found = {each for value in (*stated, tokenizer.eos_token_id) for each in _as_list(value)}
    special = _special_tokens(tokenizer)
    found |= {id for name, id in special.items() if name in _known_ends(special)}
    found.update(_end_of_turn(tokenizer, found))
    return tuple(sorted(id for id in found if 0 <= id < vocabulary))


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    return {each.content: id for id, each in tokenizer.added_tokens_decoder.items() if each.special}


def _known_ends(special: Iterable[str]) -> frozenset[str]:
    """Return the names that end an answer in a vocabulary with the ``special`` tokens."""
    names = {*special}
    if {"<|return|>", "<|call|>"} <= names or {"<|calls|>", "<|flush|>"} <= names:
        return ENDS - {"<|end|>"}  # an answer may be several messages, which end with it
    return ENDS


def _end_of_turn(tokenizer: Any, ends: set[int]) -> Iterator[int]:
    """Return the special token that the chat template writes after an answer.

    Return nothing if the text of the template contains one of ``ends``.

    The template is rendered only if that check finds nothing, because rendering starts a
    process.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or "eos_token" in template:
        return
    if any(text in template for text in map(tokenizer.convert_ids_to_tokens, ends) if text):
        return
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    with suppress(ConfigError):  # a template that refuses such a chat shows no end
        rendered = render_chat(tokenizer, messages, add_generation_prompt=False, max_chars=1 << 20)
        after = rendered.rpartition(_ANSWER)[2].strip()
        following = [
            (name, id) for name, id in _special_tokens(tokenizer).items() if name and after.startswith(name)
        ]
        if following:
            yield max(following)[1]  # one name may begin like another: take the longest
