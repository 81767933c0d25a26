"""The vocabulary of a model: its tokenizer, and the tokens that end an answer.

transformers reads the tokenizers of all families, but takes seconds to import. So what it made of a
model's files is kept in the cache folder, and later processes read it without transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnet_protocols.machine.files import write_whole

_FORMAT = 1
"""Version of the cached files. Raise it with every change of what is in them."""
_CLEANED = {" .": ".", " ?": "?", " !": "!", " ,": ",", " ' ": "'", " n't": "n't"} | {
    f" '{end}": f"'{end}" for end in ("m", "s", "ve", "re")
}
"""Replacements that some tokenizers make in decoded text, in this order."""


class LightTokenizer:
    """A tokenizer of the package ``tokenizers``, with those methods of transformers' tokenizers
    that turn text into ids, and back."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.backend_tokenizer = Tokenizer.from_str(fields["backend"])
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        self.chat_template: str | dict[str, str] | None = fields["chat_template"]
        self.special_tokens_map: dict[str, str] = fields["special_tokens_map"]
        self._cleans = bool(fields["cleans"])

    @staticmethod
    def fields(tokenizer: Any) -> dict[str, Any] | None:
        """Return what makes a twin of transformers' ``tokenizer``. None if it is written in
        Python."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        anyway = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        is_left = type(backend.model).__name__ == "BPE" and not getattr(tokenizer, anyway, False)
        return {
            "backend": backend.to_str(),
            "chat_template": tokenizer.chat_template,
            "special_tokens_map": tokenizer.special_tokens_map,
            "cleans": cleans and not is_left,
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        for each, clean in _CLEANED.items() if self._cleans else ():
            text = text.replace(each, clean)
        return text

    def convert_ids_to_tokens(self, id: int) -> str | None:
        token: str | None = self.backend_tokenizer.id_to_token(id)
        return token

    def get_chat_template(self) -> str:
        """Raise ``ValueError`` if there is none, or several without a default."""
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if template is None:
            raise ValueError("no default chat template")
        return template


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    - ``tokenizer``: a ``LightTokenizer``, or transformers' tokenizer if it is written in Python.
    - ``size``: number of tokens that the model knows; ids are below it.
    - ``end_ids``: the tokens that end an answer.
    - ``sampling``: temperature and top_p, as far as the model's files state them.
    """

    tokenizer: Any
    size: int
    end_ids: tuple[int, ...]
    sampling: Mapping[str, float]


def cached_vocabulary(path: Path, make: Callable[[], Vocabulary]) -> Vocabulary:
    """Return the vocabulary in the file ``path``. ``make`` makes it with transformers if there is
    none, or none of this version."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        fields = json.loads(path.read_bytes())
        if fields["format"] == _FORMAT:
            ends = tuple(map(int, fields["end_ids"]))
            tokenizer = LightTokenizer(fields["tokenizer"])
            return Vocabulary(tokenizer, int(fields["size"]), ends, dict(fields["sampling"]))
    made = make()
    if (twin := LightTokenizer.fields(made.tokenizer)) is None:
        return made
    others = {"size": made.size, "end_ids": made.end_ids, "sampling": made.sampling}
    with suppress(OSError):  # without the file, the next process makes it again
        write_whole(path, json.dumps({"format": _FORMAT, "tokenizer": twin, **others}).encode())
    return Vocabulary(LightTokenizer(twin), made.size, made.end_ids, made.sampling)
