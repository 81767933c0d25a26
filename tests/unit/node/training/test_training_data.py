"""Training data: documents, tokens, and the sequences of each slot."""

import bz2
import codecs
import gzip
import json
import lzma
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from swarmnet_node.training import data as data_module
from swarmnet_node.training import documents
from swarmnet_node.training.data import BatchSampler, ByteTokenizer, open_corpus, permute
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.training.job_settings import DataSection, JobError
from tests.defences import defence, replacing


def _section(path: Path | str, **more: object) -> DataSection:
    return DataSection.model_validate({"path": str(path), "sequence_length": 8, "validation": 0.25, **more})


def _write_texts(folder: Path, count: int = 40) -> list[bytes]:
    folder.mkdir(exist_ok=True)
    texts = [f"document {number}: {'abcdefgh' * 4}\n".encode() for number in range(count)]
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_bytes(text)
    return texts


@given(size=st.integers(1, 3000), key=st.binary(min_size=32, max_size=32))
def test_an_epoch_is_a_permutation(size: int, key: bytes) -> None:
    images = permute(np.arange(size, dtype=np.uint64), size, key)
    assert sorted(images.tolist()) == list(range(size))


def test_epochs_have_different_permutations() -> None:
    sampler = BatchSampler(seed=1, sequences=1000, batch_size=1000, steps_per_round=1, slots=1)
    first, second = sampler.batch(0, 0, 0), sampler.batch(1, 0, 0)
    assert (first != second).mean() > 0.99
    assert (first != np.arange(1000)).mean() > 0.99
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15


def test_the_permutation_is_stable_across_versions() -> None:
    """Workers of different versions must agree on the permutation."""
    assert permute(np.arange(8, dtype=np.uint64), 1000, bytes(32)).tolist() == GOLDEN


GOLDEN = [458, 439, 611, 706, 210, 891, 373, 521]


@given(
    sequences=st.integers(1, 70),
    batch_size=st.integers(1, 7),
    steps=st.integers(1, 4),
    slots=st.integers(1, 5),
    seed=st.integers(0, 2**62),
)
def test_no_sequence_occurs_twice_in_an_epoch(
    sequences: int, batch_size: int, steps: int, slots: int, seed: int
) -> None:
    sampler = BatchSampler(seed, sequences, batch_size, steps, slots)
    taken: list[int] = []
    for place in range(-(-2 * sequences // batch_size)):  # two epochs, in order
        step, slot = divmod(place, slots)
        taken += sampler.batch(step // steps, step % steps, slot).tolist()
    for start in (0, sequences):
        assert Counter(taken[start : start + sequences]) == Counter(range(sequences))


def test_batches_follow_from_the_seed_alone() -> None:
    mine, theirs = (BatchSampler(7, 100, 4, 10, 8) for _ in range(2))
    assert mine.batch(3, 2, 5).tolist() == theirs.batch(3, 2, 5).tolist()
    assert BatchSampler(8, 100, 4, 10, 8).batch(3, 2, 5).tolist() != mine.batch(3, 2, 5).tolist()


@pytest.mark.parametrize("place", [(-1, 0, 0), (0, 10, 0), (0, -1, 0), (0, 0, 8)])
def test_a_batch_outside_the_job_is_a_value_error(place: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no batch"):
        BatchSampler(7, 100, 4, 10, 8).batch(*place)


def test_every_document_is_tokenised_into_one_part(tmp_path: Path) -> None:
    texts = _write_texts(tmp_path / "texts")
    corpus = open_corpus(_section(tmp_path / "texts"), tmp_path / "cache")
    parts = [bytes(part.tokens.astype(np.uint8)) for part in (corpus.train, corpus.validation)]
    found = [part.rstrip(b"\0").split(b"\0") for part in parts]
    assert sorted(found[0] + found[1]) == sorted(texts)
    assert 3 <= len(found[1]) <= 20
    assert found[0] == [text for text in texts if text in found[0]]


def test_the_part_of_a_document_depends_on_its_content_only(tmp_path: Path) -> None:
    _write_texts(tmp_path / "few", 40)
    _write_texts(tmp_path / "many", 60)
    few, many = (
        set(
            bytes(
                open_corpus(_section(tmp_path / name), tmp_path / "cache").validation.tokens.astype(np.uint8)
            ).split(b"\0")
        )
        for name in ("few", "many")
    )
    assert few <= many


def test_a_sequence_has_one_target_more(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts")
    train = open_corpus(_section(tmp_path / "texts"), tmp_path / "cache").train
    rows = train.take(np.array([0, 1, len(train) - 1]))
    assert rows.shape == (3, 9)
    assert rows[0].tolist() == train.tokens[:9].tolist()
    assert rows[0, -1] == rows[1, 0]
    assert rows[2].tolist() == train.tokens[(len(train) - 1) * 8 : len(train) * 8 + 1].tolist()


def test_the_cache_is_used_again_until_the_content_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_texts(tmp_path / "texts")
    section = _section(tmp_path / "texts")
    first = open_corpus(section, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", None)  # the cache must be used
        again = open_corpus(section, tmp_path / "cache")
        with pytest.raises(TypeError):
            open_corpus(_section(tmp_path / "texts", validation=0.3), tmp_path / "cache")
    assert again.digest == first.digest
    (tmp_path / "texts" / "000.txt").write_bytes(b"something else\n")
    assert open_corpus(section, tmp_path / "cache").digest != first.digest
    assert isinstance(first.train.tokens, np.memmap)


@defence(
    "data beyond the size in the job is not read",
    off=replacing(data_module, "_with_progress", lambda source, *_: source),
)
def test_data_beyond_the_jobs_size_is_not_read(tmp_path: Path) -> None:
    size = sum(map(len, _write_texts(tmp_path / "texts")))
    assert open_corpus(_section(tmp_path / "texts", size_bytes=size), tmp_path / "cache").size_bytes == size
    (tmp_path / "texts" / "999.txt").write_bytes(b"x" * 10)
    with pytest.raises(JobError, match=f"size_bytes.* is {size}"):
        open_corpus(_section(tmp_path / "texts", size_bytes=size), tmp_path / "cache")


@pytest.mark.parametrize(("path", "hint"), [("texts", "same files"), ("python-stdlib", "the Python")])
def test_different_data_is_refused_with_both_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    _write_texts(tmp_path / "texts")
    monkeypatch.setattr(data_module, "files_of", lambda _: tuple(sorted((tmp_path / "texts").iterdir())))
    first = open_corpus(_section(path), tmp_path / "cache").digest
    assert open_corpus(_section(path, digest=first), tmp_path / "cache").digest == first
    (tmp_path / "texts" / "000.txt").write_bytes(b"something else\n")
    other = open_corpus(_section(path), tmp_path / "cache").digest
    with pytest.raises(JobError, match=f"is {first}: .* {other}") as caught:
        open_corpus(_section(path, digest=first), tmp_path / "cache")
    assert hint in caught.value.hint


def test_reading_and_tokenising_report_progress(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts", 5)
    heard: list[tuple[str, int, int | None]] = []
    section = _section(tmp_path / "texts", sequence_length=2, validation=0.5)
    open_corpus(section, tmp_path / "cache", lambda *each: heard.append(each))
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert heard[:5] == [("reading the data", number, 5) for number in range(1, 6)]
    assert heard[5] == ("tokenising the data", 0, size)
    assert heard[-1] == ("tokenising the data", size, size)


def test_a_failed_tokenisation_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": 2}\n')
    with pytest.raises(JobError, match=r"rows\.jsonl:2 has no text"):
        open_corpus(_section(path, format="jsonl"), tmp_path / "cache")
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_an_unwritable_cache_is_out_of_resources(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutOfResources, match="cannot keep the tokens"):
        open_corpus(_section(tmp_path / "texts"), tmp_path / "cache")


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps({"body": f"row {number}"}) for number in range(50)))
    section = _section(path, format="jsonl", field="body", max_documents=30)
    assert list(documents.documents(section, (path,))) == [f"row {number}".encode() for number in range(30)]


@pytest.mark.parametrize("line", ["{", "[1]", "{}", "[" * 5000, '{"text": null}'])
def test_an_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(JobError, match=r"rows\.jsonl:2"):
        list(documents.documents(_section(path, format="jsonl"), (path,)))


def test_an_endless_line_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "x" * 100}))
    with pytest.raises(JobError, match="longer than 100"):
        list(documents.documents(_section(path, format="jsonl"), (path,)))


def test_a_long_text_is_split_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    text = b"".join(b"line %d\n" % number for number in range(30_000))
    path.write_bytes(text)
    parts = list(documents.documents(_section(path), (path,)))
    assert b"".join(parts) == text
    assert len(parts) == -(-len(text) // documents.TEXT_DOCUMENT_BYTES)
    assert all(part.endswith(b"\n") for part in parts)
    path.write_bytes(b"x" * 10 * documents.TEXT_DOCUMENT_BYTES)  # a file without line ends
    assert max(map(len, documents.documents(_section(path), (path,)))) <= 2 * documents.TEXT_DOCUMENT_BYTES


def test_the_standard_library_excludes_tests_and_packages() -> None:
    files = documents.files_of(_section("python-stdlib"))
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "json" / "decoder.py" in files
    assert not [
        file for file in files if {"site-packages", "test", "tests"} & set(file.relative_to(root).parts)
    ]
    assert list(files) == sorted(files, key=Path.as_posix)


def test_data_may_be_a_glob_a_file_or_a_directory(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts", 12)
    assert len(documents.files_of(_section(tmp_path / "texts"))) == 12
    assert len(documents.files_of(_section(tmp_path / "texts" / "00*.txt"))) == 10
    assert len(documents.files_of(_section(tmp_path / "texts" / "003.txt"))) == 1


@pytest.mark.parametrize("path", ["nowhere", "empty", "no*thing"])
def test_missing_data_is_a_job_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"'path' in \[data\] is wrong: there is no text file") as caught:
        open_corpus(_section(tmp_path / path), tmp_path / "cache")
    assert caught.value.hint


def test_an_unknown_tokenizer_is_a_job_error(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts", 2)
    section = _section(tmp_path / "texts").model_copy(update={"tokenizer": "byts"})
    with pytest.raises(JobError, match=r"'tokenizer' in \[data\] is wrong: there is no model 'byts'"):
        open_corpus(section, tmp_path / "cache")


def test_too_short_data_is_a_job_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    for size in (0, 16):
        (tmp_path / "short.txt").write_bytes(b"x" * size)
        with pytest.raises(JobError, match="part has 0 tokens, and a sequence needs 9") as caught:
            open_corpus(_section(tmp_path / "short.txt"), tmp_path / "cache")
        assert "18 tokens suffice" in caught.value.hint


@settings(max_examples=20)
@given(text=st.binary(min_size=17, max_size=300).map(bytes.hex), validation=st.floats(0.01, 0.5))
def test_of_a_small_file_a_sequence_or_the_share_is_held_out(text: str, validation: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "book.txt")
        path.write_text(text)
        corpus = open_corpus(_section(path, validation=validation), Path(folder, "cache"))
        total = len(text) + 1
        assert len(corpus.train.tokens) + len(corpus.validation.tokens) == total
        assert len(corpus.validation.tokens) == max(9, round(validation * total))
        tokens = bytes([*corpus.train.tokens, *corpus.validation.tokens])
        assert sorted(tokens) == sorted(text.encode() + b"\0")


NO_TEXT = {
    "gzip": (gzip.compress(b"text"), "compressed by gzip"),
    "bzip2": (bz2.compress(b"text"), "compressed by bzip2"),
    "xz": (lzma.compress(b"text"), "compressed by xz"),
    "UTF-16": ("text".encode("utf-16"), "in UTF-16"),
    "UTF-16 big endian": (codecs.BOM_UTF16_BE + "text".encode("utf-16-be"), "in UTF-16"),
    "UTF-32": ("text".encode("utf-32"), "in UTF-16 or UTF-32"),
    "UTF-16 without a mark": (b"one\n" + "text".encode("utf-16-le"), "zero byte at byte 6"),
    "Latin-1": ("ein schöner Tag".encode("latin-1"), "not UTF-8 at byte 8"),
    "Latin-1 far behind": (b"x" * 100_000 + b"\n" + b"y" * 40_000 + b"\xf6", "not UTF-8 at byte 140002"),
    "half a character at the end": ("ö".encode()[:1], "not UTF-8 at byte 1"),
}


@defence(
    "a compressed file is not trained on", off=replacing(documents, "_KINDS", {}), what="in UTF-16 or UTF-32"
)
@pytest.mark.parametrize(("content", "what"), NO_TEXT.values(), ids=NO_TEXT)
def test_a_file_that_is_no_text_in_utf8_is_refused_with_the_place(
    tmp_path: Path, content: bytes, what: str
) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    with pytest.raises(JobError, match=rf"book\.txt (is|has a) {what}") as caught:
        open_corpus(_section(path), tmp_path / "cache")
    assert caught.value.hint


def test_compressed_json_lines_and_half_characters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    section = _section(path, format="jsonl")
    path.write_bytes(gzip.compress(b'{"text": "one"}'))
    with pytest.raises(JobError, match="compressed by gzip"):
        list(documents.documents(section, (path,)))
    path.write_text('{"text": "one"}\n{"text": "two \\ud83d"}\n')
    with pytest.raises(JobError, match=r"rows\.jsonl:2 has half a character in 'text': \\ud83d"):
        list(documents.documents(section, (path,)))


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["plain", "with a byte order mark"])
def test_no_character_of_a_long_line_is_cut(tmp_path: Path, mark: bytes) -> None:
    path = tmp_path / "one-line.txt"
    text = "日本語の長い文" * 20_000
    path.write_bytes(mark + text.encode())
    parts = [part.decode() for part in documents.documents(_section(path), (path,))]
    assert "".join(parts) == text
    assert len(parts) > 10


def test_a_missing_optional_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(JobError, match="pyarrow") as caught:
        open_corpus(_section(tmp_path, format="parquet"), tmp_path / "cache")
    assert "pip install pyarrow" in caught.value.hint


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [f"row {number}" for number in range(200)]
    parquet.write_table(pyarrow.table({"text": rows, "other": list(range(200))}), path)
    section = _section(path, format="parquet")
    assert list(documents.documents(section, (path,))) == [row.encode() for row in rows]
    for field, words in (("missing", "no column"), ("other", "no text")):
        with pytest.raises(JobError, match=words):
            list(documents.documents(_section(path, format="parquet", field=field), (path,)))
    path.write_bytes(b"not parquet at all")
    with pytest.raises(JobError, match="not a parquet file"):
        list(documents.documents(section, (path,)))
