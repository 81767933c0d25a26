"""Rows of data files: the tokens that count in the loss, and the messages for bad rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from swarmnet_client.tuning import rows as rows_module
from swarmnet_client.tuning.batches import IGNORED, MAX_LABELS, Dataset, classes, epoch_order, split
from swarmnet_client.tuning.rows import RowFile, check_rows, read_rows
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.text import data_files
from swarmnet_protocols.models.text.rows import Encoder, Example, row_of
from tests.support.swarm.tiny_swarm import load_tiny
from tests.support.training.tuning_rows import counting_rows, labelled_rows, write_rows

CHATML = (
    "{% for m in messages %}w1 {{ m['role'] }} {{ m['content'] }} w2\n{% endfor %}"
    "{% if add_generation_prompt %}w1 assistant {% endif %}"
)
HIDES_EARLIER_TURNS = (
    "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}w1 {{ m['role'] }} {{ m['content'] }} w2\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}w1 assistant {% endif %}"
)
THINKS_IN_THE_LAST_TURN = (
    "{% for m in messages %}w1 {{ m['role'] }} {% if loop.last and m['role'] == 'assistant' %}w9 {% endif %}"
    "{{ m['content'] }} w2\n{% endfor %}{% if add_generation_prompt %}w1 assistant {% endif %}"
)
END = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tiny(tmp_path_factory.mktemp("tiny")).local.tokenizer()


def encoded(tokenizer: Any, fields: dict[str, Any], *, limit: int = 32, labelled: bool = False) -> Example:
    return Encoder(tokenizer, limit, labelled=labelled).encode(1, fields)


def learned(row: Example) -> list[int]:
    return [int(token) for token in row.ids[row.learned]]


def test_a_row_of_text_trains_on_all_its_tokens_and_the_end_token(tokenizer: Any) -> None:
    row = encoded(tokenizer, {"text": "w5 w6 w7", "id": 17})
    assert row.ids.tolist() == learned(row) == [5, 6, 7, END]


def test_a_row_with_prompt_and_completion_trains_on_the_completion(tokenizer: Any) -> None:
    row = encoded(tokenizer, {"prompt": "w5 w6", "completion": "w7 w8"})
    assert row.ids.tolist() == [5, 6, 7, 8, END]
    assert learned(row) == [7, 8, END]


@pytest.mark.parametrize("template", [CHATML, THINKS_IN_THE_LAST_TURN], ids=["plain", "thinks"])
def test_a_row_of_messages_trains_on_those_of_the_assistant(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    said = [("system", "w4"), ("user", "w5"), ("assistant", "w6"), ("user", "w7"), ("assistant", "w6 w8")]
    messages = [{"role": role, "content": content} for role, content in [*said, ("user", "w11")]]
    last = [9, 6, 8, 2] if template is THINKS_IN_THE_LAST_TURN else [6, 8, 2]
    row = encoded(tokenizer, {"messages": messages[:5]})
    assert learned(row) == [6, 2, *last]
    assert 5 in row.ids
    row = encoded(tokenizer, {"messages": messages})
    assert learned(row) == [6, 2, 6, 8, 2]


def test_a_row_of_sharegpt_is_the_same_as_messages(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    turns = [
        {"from": "system", "value": "w4"},
        {"from": "human", "value": "w5"},
        {"from": "gpt", "value": "w6"},
    ]
    roles = ("system", "user", "assistant")
    messages = [{"role": role, "content": turn["value"]} for role, turn in zip(roles, turns, strict=True)]
    row, same = encoded(tokenizer, {"conversations": turns}), encoded(tokenizer, {"messages": messages})
    assert (row.ids.tolist(), learned(row)) == (same.ids.tolist(), learned(same))


def test_a_row_of_alpaca_is_an_instruction_and_its_answer(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"instruction": "w5", "input": "w6", "output": "w7", "text": "w5 w6 w7"}
    plain = row_of(asked, labelled=False)
    assert plain.prompt is not None
    assert plain.prompt.endswith("### Instruction:\nw5\n\n### Input:\nw6\n\n### Response:\n")
    assert "further context. Write a response" in plain.prompt
    bare = row_of(asked | {"input": ""}, labelled=False)
    assert bare.prompt is not None
    assert "Input" not in bare.prompt
    assert learned(encoded(tokenizer, asked, limit=64)) == [7, END]

    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    messages = [{"role": "user", "content": "w5\n\nw6"}, {"role": "assistant", "content": "w7"}]
    row, same = encoded(tokenizer, asked), encoded(tokenizer, {"messages": messages})
    assert (row.ids.tolist(), learned(row)) == (same.ids.tolist(), learned(same))


def test_fields_are_checked_without_a_model(tmp_path: Path) -> None:
    rows = [
        {"text": "w5"},
        {"instruction": "w5"},
        {"instruction": "w5", "input": 7, "output": "w6"},
        {"conversations": [{"from": "human", "value": "w5"}]},
        {"conversations": [{"from": "narrator", "value": "w5"}]},
        {"conversations": "w5"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        check_rows(path, labelled=False)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4", "5", "6"]
    for line, said in zip(
        lines,
        ("one has", '"input" is not a text', "nothing to learn", "none of human", "not a list"),
        strict=True,
    ):
        assert said in line
    check_rows(write_rows(path, rows[:1]), labelled=False)


@pytest.mark.parametrize("answer", ["w2", "w", "2", "w1", "assistant"])
def test_an_answer_may_also_be_part_of_a_mark(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    messages = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": answer}]
    turns = list(Encoder(tokenizer, 32)._turns(messages))
    assert turns == [("w1 user w5 w2\nw1 assistant ", False), (f"{answer} w2\n", True)]


def test_a_template_that_hides_turns_is_not_guessed_at(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", HIDES_EARLIER_TURNS)
    said = [("user", "w5"), ("assistant", "w6"), ("user", "w7"), ("assistant", "w8")]
    with pytest.raises(ValueError, match="message 2"):
        encoded(tokenizer, {"messages": [{"role": role, "content": content} for role, content in said]})


def test_a_long_row_loses_its_end_and_says_so(tokenizer: Any) -> None:
    row = encoded(tokenizer, {"text": "w5 w6 w7 w8"}, limit=3)
    assert row.cut
    assert row.ids.tolist() == [5, 6, 7]
    assert not encoded(tokenizer, {"text": "w5 w6"}, limit=3).cut


def test_a_row_for_a_classifier_has_a_label(tokenizer: Any) -> None:
    for given, label in (("good", "good"), (3, "3")):
        row = encoded(tokenizer, {"text": "w5 w6", "label": given}, labelled=True)
        assert (row.label, row.ids.tolist()) == (label, [5, 6])


BAD = [
    ("{", "not JSON"),
    ('["text"]', "not an object"),
    ('{"text": NaN}', "not a text"),
    ('{"txt": "w5"}', '"txt"'),
    ('{"text": "w5", "prompt": "w5", "completion": "w6"}', "this one has"),
    ('{"text": 5}', "not a text"),
    ('{"text": "  "}', "empty"),
    ('{"text": "w5 \\ud800"}', "surrogate"),
    ('{"prompt": "w5"}', '"completion"'),
    ('{"prompt": "w5", "completion": ""}', "empty"),
    ('{"prompt": "' + "w5 " * 40 + '", "completion": "w6"}', "nothing to learn in the first 32 of its 42"),
    ('{"messages": []}', "1 to 256"),
    ('{"messages": [{"role": "user"}]}', "message 1"),
    ('{"messages": [{"role": "user", "content": "w5"}]}', "assistant"),
    ('{"messages": [{"role": "assistant", "content": [1]}]}', 'no "content"'),
    ("[" * 100_000, "nesting"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[words for _, words in BAD])
def test_a_bad_row_is_named_by_its_line(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "w5 w6"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=words) as caught:
        read_rows(path, Encoder(tokenizer, 32))
    assert str(caught.value).startswith(f"{path}:3: ")


def test_messages_need_a_chat_template(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="chat template"):
        encoded(tokenizer, {"messages": [{"role": "assistant", "content": "w5"}]})


@pytest.mark.parametrize("label", [None, True, 1.5, "", ["a"]])
def test_a_bad_label_is_named(tokenizer: Any, label: object) -> None:
    with pytest.raises(ValueError, match="label"):
        encoded(tokenizer, {"text": "w5 w6", "label": label}, labelled=True)
    with pytest.raises(ValueError, match='"label"'):
        encoded(tokenizer, {"text": "w5 w6"}, labelled=True)


def test_the_error_for_many_bad_rows_names_some_and_counts_all(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\n" * 9 + b'{"text": "w5 w6"}\n')
    with pytest.raises(ConfigError) as caught:
        read_rows(path, Encoder(tokenizer, 32))
    assert str(caught.value).count("not UTF-8 at byte 1") == 5
    assert "4 more" in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "w5 w6"}\n{"text": "w7 w8"}\n', encoding="utf-8-sig")
    assert len(read_rows(path, Encoder(tokenizer, 32)).rows) == 2


def test_a_file_may_be_compressed_or_parquet(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "w5", "completion": "w6"}, {"prompt": "w7", "completion": "w8 w9"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    zipped, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    for file in (path, zipped, table):
        assert [learned(row) for row in read_rows(file, Encoder(tokenizer, 32)).rows] == [
            [6, END],
            [8, 9, END],
        ]
    parquet.write_table(pyarrow.table({"prompt": ["w5", "w6"], "completion": ["w7", None]}), table)
    with pytest.raises(ConfigError, match=r"rows\.parquet:2: a row has the fields"):
        read_rows(table, Encoder(tokenizer, 32))


def test_a_file_is_bounded(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", counting_rows(4))
    encoder = Encoder(tokenizer, 32)
    assert len(read_rows(path, encoder).rows) == 4
    monkeypatch.setattr(rows_module, "MAX_ROWS", 3)
    with pytest.raises(ConfigError, match="more than 3 rows"):
        read_rows(path, encoder)
    monkeypatch.setattr(data_files, "MAX_LINE_BYTES", 10)
    with pytest.raises(ConfigError, match=":1: a line of more than"):
        read_rows(path, encoder)
    with pytest.raises(ConfigError, match="cannot read"):
        read_rows(tmp_path / "none.jsonl", encoder)
    with pytest.raises(ConfigError, match="no rows"):
        read_rows(write_rows(tmp_path / "empty.jsonl", []), encoder)


# ---- batches -----------------------------------------------------------------------------------


def dataset(rows: list[Example], *, batch_size: int = 3, seed: int = 0) -> Dataset:
    return Dataset(rows, [], (), batch_size, seed, pad_id=0)


def some_rows(count: int) -> list[Example]:
    return [
        Example(n + 1, np.arange(n + 2, dtype=np.int32), np.ones(n + 2, dtype=bool)) for n in range(count)
    ]


def test_every_epoch_sees_every_row_once_in_an_order_of_its_own() -> None:
    data = dataset(some_rows(7))
    epochs = []
    for epoch in range(2):
        batches = [data.batch(epoch * 3 + number) for number in range(3)]
        lengths = [int(length) for batch in batches for length in batch["attention_mask"].sum(dim=1)]
        assert sorted(lengths) == list(range(2, 9))
        epochs.append(lengths)
    assert epochs[0] != epochs[1]
    again = dataset(some_rows(7)).batch(4)
    assert all(again[name].equal(value) for name, value in data.batch(4).items())
    assert [dataset(some_rows(7), seed=seed).batch(0)["input_ids"].shape for seed in range(8)].count(
        data.batch(0)["input_ids"].shape
    ) < 8


def test_the_order_of_an_epoch_is_drawn_once() -> None:
    data = dataset(some_rows(7), seed=1234)
    epoch_order.cache_clear()
    for step in range(2 * data.steps_per_epoch):
        data.batch(step)
    assert epoch_order.cache_info().misses == 2


def test_padding_and_first_tokens_are_not_learned() -> None:
    batch = dataset(some_rows(2), batch_size=2).batch(0)
    unlearned = batch["labels"] == IGNORED
    assert unlearned[:, 0].all()
    assert unlearned[batch["attention_mask"] == 0].all()
    assert batch["labels"][~unlearned].equal(batch["input_ids"][~unlearned])


def test_rows_are_held_out_by_share_or_by_file(tmp_path: Path) -> None:
    file = RowFile(tmp_path, some_rows(10), "")
    train, held_out = split(file, [], held_out=0.2, seed=1)
    assert (len(train), len(held_out)) == (8, 2)
    assert {row.line for row in train} | {row.line for row in held_out} == set(range(1, 11))
    assert split(file, [], held_out=0.2, seed=1)[1] == held_out
    assert split(file, [], held_out=0, seed=1)[1] == []
    other = RowFile(tmp_path, some_rows(3), "")
    assert split(file, [other], held_out=0.2, seed=1) == (file.rows, other.rows)
    with pytest.raises(ConfigError, match="1 rows"):
        split(RowFile(tmp_path, some_rows(1), ""), [], held_out=0.1, seed=1)


def test_classes_are_those_of_the_rows_to_learn_from(tokenizer: Any, tmp_path: Path) -> None:
    rows = read_rows(
        write_rows(tmp_path / "rows.jsonl", labelled_rows(6)), Encoder(tokenizer, 32, labelled=True)
    ).rows
    assert classes(rows[:5], rows[5:]) == ("high", "low")
    with pytest.raises(ConfigError, match="line 6"):
        classes([*rows[:4:2], Example(9, rows[0].ids, rows[0].learned, "else")], rows[5:])
    with pytest.raises(ConfigError, match="two labels"):
        classes(rows[::2], [])
    many = [Example(line, rows[0].ids, rows[0].learned, f"text {line}") for line in range(MAX_LABELS + 1)]
    assert len(classes(many[1:], [])) == MAX_LABELS
    with pytest.raises(ConfigError, match=f"{MAX_LABELS} is the most"):
        classes(many, [])
    batch = Dataset(rows, [], ("high", "low"), 6, 0, 0).batch(0)
    assert sorted(batch["labels"].tolist()) == [0, 0, 0, 1, 1, 1]


def test_json_numbers_that_are_too_long_are_bad_rows(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "w5"})[:-1] + ', "n": ' + "9" * 5000 + "}\n")
    with pytest.raises(ConfigError, match=":1: not JSON"):
        read_rows(path, Encoder(tokenizer, 32))
