"""One set of tokens ends an answer, wherever the checkpoint names them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from swarmnet_protocols.models.text.end_tokens import end_ids
from tests.support.models.tiny import save_tiny_llama
from tests.unit.protocols.models.checkpoints.gguf.test_gguf_tokenizer import CONTROL, NORMAL, write_vocabulary


def tokenizer_with(*special: str, eos: str | None = None, template: str | None = None) -> Any:
    """Ids 0 and 1 are ordinary tokens; the special ones follow."""
    backend = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    backend.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


@pytest.mark.parametrize(("special", "eos", "stated", "expected"), [
    ((), None, [None], ()),
    (("<x>", "<y>"), "<x>", [3], (2, 3)),
    (("<x>",), None, [[2, 1], 0], (0, 1, 2)),
    (("<|endoftext|>", "<|im_end|>"), "<|endoftext|>", [None], (2, 3)),
    (("<|end|>", "<|return|>", "<|call|>"), None, [], (3, 4)),
    (("<|end|>", "<|return|>"), None, [], (2, 3)),
    (("<|end|>", "<|calls|>", "<|flush|>"), None, [], (3, 4)),
    (("<|tool_response>", "<turn|>"), None, [], (2, 3)),
    ((), None, [1_000_000, -1, 1], (1,)),
])  # fmt: skip
def test_every_place_that_names_an_end_counts(
    special: tuple[str, ...], eos: str | None, stated: list[Any], expected: tuple[int, ...]
) -> None:
    assert end_ids(tokenizer_with(*special, eos=eos), stated, 100) == expected


CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}ENDING{% endfor %}"


@pytest.mark.parametrize(("ending", "expected"), [
    ("<stop>", (2, 3)),
    ("\n<stop>\n", (2, 3)),
    ("<stop>er", (2, 3)),
    ("<x>", (2,)),
    ("{{ eos_token }}<stop>", (2,)),
    ("", (2,)),
    ("{{ raise_exception('no') }}", (2,)),
])  # fmt: skip
def test_what_the_chat_template_writes_after_an_answer_ends_one(
    ending: str, expected: tuple[int, ...]
) -> None:
    tokenizer = tokenizer_with("<x>", "<stop>", eos="<x>", template=CHAT.replace("ENDING", ending))
    assert end_ids(tokenizer, [], 100) == expected


def test_a_gguf_file_names_ends_of_texts_turns_and_messages(tmp_path: Path) -> None:
    names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    special = [f"<{name}>" for name in (*names, "another")]
    tokens, types = ["a", "b", *special], [NORMAL, NORMAL, *[CONTROL] * len(special)]
    ends = {f"{name}_token_id": tokens.index(f"<{name}>") for name in names}
    path = write_vocabulary(
        tmp_path / "model.gguf", "gpt2", tokens, types, pre="gpt-2", merges=list[str](), **ends
    )
    checkpoint = GgufCheckpoint([path], tmp_path / "metadata")
    assert checkpoint.end_ids == (2, 3, 4, 5, 6, 7)
    assert end_ids(checkpoint.tokenizer(), checkpoint.end_ids, len(tokens)) == (2, 3, 4, 5, 6, 7)


def test_config_and_generation_config_both_count(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model")
    for name, ends in (("config.json", 5), ("generation_config.json", [7, 9])):
        path = tmp_path / "model" / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | {"eos_token_id": ends}))
    local = resolve(str(tmp_path / "model"), cache_dir=tmp_path / "cache")
    assert local.end_ids(tokenizer_with("<|im_end|>")) == (2, 5, 7, 9)
