"""Training data: documents, tokens, and the sequences of each slot."""

import json
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

from swarmnet_node.training.data import corpus as corpus_module
from swarmnet_node.training.data import documents
from swarmnet_node.training.data.corpus import Sequences, SourceTokens, Tokenizer, open_source, tokenizer_of
from swarmnet_node.training.data.sampler import BatchSampler, Share, permute, shares_of
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.models import Progress
from swarmnet_protocols.training.job_settings import DataSection, JobError
from tests.defences import defence, replacing


def _section(path: Path | str, **more: object) -> DataSection:
    return DataSection.model_validate({"path": str(path), "sequence_length": 8, "validation": 0.25, **more})


def _open(section: DataSection, cache: Path, progress: Progress = lambda *_: None) -> SourceTokens:
    return open_source(section, section.sources[0], tokenizer_of(section, cache), cache, progress)


def _contents(section: DataSection, path: Path) -> list[bytes]:
    return [each.row.content for each in documents.documents(section.sources[0], (path,))]


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
    sampler = BatchSampler(seed=1, shares=(Share(1000),), batch_size=1000, steps_per_round=1, slots=1)
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
    sampler = BatchSampler(seed, (Share(sequences),), batch_size, steps, slots)
    taken: list[int] = []
    for place in range(-(-2 * sequences // batch_size)):  # two epochs, in order
        step, slot = divmod(place, slots)
        taken += sampler.batch(step // steps, step % steps, slot).tolist()
    for start in (0, sequences):
        assert Counter(taken[start : start + sequences]) == Counter(range(sequences))


def test_sources_are_mixed_by_their_weights_and_own_ones_not_divided() -> None:
    shares = (Share(500, weight=3.0), Share(70, weight=1.0, is_own=True))
    sampler = BatchSampler(seed=5, shares=shares, batch_size=64, steps_per_round=4, slots=2)
    batches = {
        slot: np.concatenate([sampler.batch(round, step, slot) for round in range(4) for step in range(4)])
        for slot in range(2)
    }
    shared, own = (
        [taken[taken < 500] for taken in batches.values()],
        [taken[taken >= 500] for taken in batches.values()],
    )
    assert [len(taken) for taken in own] == [256, 256]  # a quarter of 1024
    assert own[0].tolist() == own[1].tolist()  # each slot has the numbers of its own files
    assert {*range(500, 570)} == set(own[0].tolist())
    assert set(Counter(own[0].tolist()).values()) == {3, 4}
    both = Counter(np.concatenate(shared).tolist())
    assert set(both.values()) == {3, 4}  # 1536 of 500 in an epoch, each in one slot
    assert len(both) == 500


@given(total=st.integers(1, 2000), weights=st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=16))
def test_shares_fill_the_total_and_leave_no_source_out(total: int, weights: list[float]) -> None:
    counts = shares_of(total, weights)
    assert sum(counts) == max(total, len(weights))
    assert min(counts) >= 1
    exact = [total * weight / sum(weights) for weight in weights]
    assert all(abs(count - share) <= len(weights) for count, share in zip(counts, exact, strict=True))


def test_batches_follow_from_the_seed_alone() -> None:
    mine, theirs = (BatchSampler(7, (Share(100),), 4, 10, 8) for _ in range(2))
    assert mine.batch(3, 2, 5).tolist() == theirs.batch(3, 2, 5).tolist()
    assert BatchSampler(8, (Share(100),), 4, 10, 8).batch(3, 2, 5).tolist() != mine.batch(3, 2, 5).tolist()


@pytest.mark.parametrize("place", [(-1, 0, 0), (0, 10, 0), (0, -1, 0), (0, 0, 8)])
def test_a_batch_outside_the_job_is_a_value_error(place: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no batch"):
        BatchSampler(7, (Share(100),), 4, 10, 8).batch(*place)


def test_every_document_is_tokenised_into_one_part(tmp_path: Path) -> None:
    texts = _write_texts(tmp_path / "texts")
    corpus = _open(_section(tmp_path / "texts"), tmp_path / "cache")
    parts = [bytes(part.astype(np.uint8)) for part in (corpus.train, corpus.validation)]
    found = [part.rstrip(b"\0").split(b"\0") for part in parts]
    assert sorted(found[0] + found[1]) == sorted(texts)
    assert 3 <= len(found[1]) <= 20
    assert found[0] == [text for text in texts if text in found[0]]


def test_the_part_of_a_document_depends_on_its_content_only(tmp_path: Path) -> None:
    _write_texts(tmp_path / "few", 40)
    _write_texts(tmp_path / "many", 60)
    few, many = (
        set(
            bytes(_open(_section(tmp_path / name), tmp_path / "cache").validation.astype(np.uint8)).split(
                b"\0"
            )
        )
        for name in ("few", "many")
    )
    assert few <= many


def test_a_sequence_has_one_target_more(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts")
    tokens = _open(_section(tmp_path / "texts"), tmp_path / "cache").train
    train = Sequences((tokens, tokens[:100]), 8)
    assert (len(train), train.counts) == (len(tokens) // 8 + 12, (len(tokens) // 8, 12))
    rows = train.take(np.array([0, 1, train.counts[0] - 1, train.counts[0] + 2]))
    assert rows.shape == (4, 9)
    assert rows[0].tolist() == tokens[:9].tolist()
    assert rows[0, -1] == rows[1, 0]
    assert rows[2].tolist() == tokens[(train.counts[0] - 1) * 8 :][:9].tolist()
    assert rows[3].tolist() == tokens[16:25].tolist()  # a number counts from source to source


def test_the_cache_is_used_again_until_the_content_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_texts(tmp_path / "texts")
    section = _section(tmp_path / "texts")
    first = _open(section, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", None)  # the cache must be used
        again = _open(section, tmp_path / "cache")
        with pytest.raises(TypeError):
            _open(_section(tmp_path / "texts", validation=0.3), tmp_path / "cache")
    assert again.digest == first.digest
    (tmp_path / "texts" / "000.txt").write_bytes(b"something else\n")
    assert _open(section, tmp_path / "cache").digest != first.digest
    assert isinstance(first.train, np.memmap)


@defence(
    "data beyond the size in the job is not read",
    off=replacing(corpus_module, "_with_progress", lambda source, *_: source),
)
def test_data_beyond_the_jobs_size_is_not_read(tmp_path: Path) -> None:
    size = sum(map(len, _write_texts(tmp_path / "texts")))
    assert _open(_section(tmp_path / "texts", size_bytes=size), tmp_path / "cache").size_bytes == size
    (tmp_path / "texts" / "999.txt").write_bytes(b"x" * 10)
    with pytest.raises(JobError, match=f"size_bytes.* is {size}"):
        _open(_section(tmp_path / "texts", size_bytes=size), tmp_path / "cache")


@pytest.mark.parametrize(("path", "hint"), [("texts", "same files"), ("python-stdlib", "the Python")])
def test_different_data_is_refused_with_both_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, hint: str
) -> None:
    _write_texts(tmp_path / "texts")
    monkeypatch.setattr(corpus_module, "files_of", lambda _: tuple(sorted((tmp_path / "texts").iterdir())))
    first = _open(_section(path), tmp_path / "cache").digest
    assert _open(_section(path, digest=first), tmp_path / "cache").digest == first
    (tmp_path / "texts" / "000.txt").write_bytes(b"something else\n")
    other = _open(_section(path), tmp_path / "cache").digest
    with pytest.raises(JobError, match=f"is {first}: .* {other}") as caught:
        _open(_section(path, digest=first), tmp_path / "cache")
    assert hint in caught.value.hint


def test_reading_and_tokenising_report_progress(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts", 5)
    heard: list[tuple[str, int, int | None]] = []
    section = _section(tmp_path / "texts", sequence_length=2, validation=0.5)
    _open(section, tmp_path / "cache", lambda *each: heard.append(each))
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    assert heard[:5] == [("reading the data", number, 5) for number in range(1, 6)]
    assert heard[5] == ("tokenising the data", 0, size)
    assert heard[-1] == ("tokenising the data", size, size)


def test_a_failed_tokenisation_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": 2}\n')
    with pytest.raises(JobError, match=r"rows\.jsonl:2: \"text\" is not a text"):
        _open(_section(path, format="jsonl"), tmp_path / "cache")
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_an_unwritable_cache_is_out_of_resources(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutOfResources, match="cannot keep the tokens"):
        _open(_section(tmp_path / "texts"), tmp_path / "cache")


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps({"body": f"row {number}"}) for number in range(50)))
    section = _section(path, format="jsonl", field="body", max_documents=30)
    assert _contents(section, path) == [f"row {number}".encode() for number in range(30)]


def test_only_answers_count_in_the_loss(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n} + 1 = ", "completion": f"{n + 1}"} for n in range(40)] + [{"text": "plain"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = _open(_section(path, format="jsonl"), tmp_path / "cache")
    tokens = np.concatenate([read.train, read.validation])
    said = bytes(np.where(tokens < 0, ~tokens, tokens).astype(np.uint8)).split(b"\0")
    learned = bytes(tokens[tokens >= 0].astype(np.uint8)).split(b"\0")
    assert sorted(said) == sorted([b"", b"plain", *(b"%d + 1 = %d" % (n, n + 1) for n in range(40))])
    assert sorted(learned) == sorted([b"", b"plain", *(b"%d" % (n + 1) for n in range(40))])


def test_messages_need_a_tokenizer_with_a_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"messages": [{"role": "assistant", "content": "two"}]}\n')
    with pytest.raises(JobError, match=r"rows\.jsonl:2: the model has no chat template"):
        _open(_section(path, format="jsonl"), tmp_path / "cache")


@pytest.mark.parametrize("line", ["{", "[1]", "{}", "[" * 5000, '{"text": null}'])
def test_an_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(JobError, match=r"rows\.jsonl:2"):
        _contents(_section(path, format="jsonl"), path)


def test_the_standard_library_excludes_tests_and_packages() -> None:
    files = documents.files_of(_section("python-stdlib").sources[0])
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "json" / "decoder.py" in files
    assert not [
        file for file in files if {"site-packages", "test", "tests"} & set(file.relative_to(root).parts)
    ]
    assert list(files) == sorted(files, key=Path.as_posix)


def test_data_may_be_a_glob_a_file_or_a_directory(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts", 12)
    assert len(documents.files_of(_section(tmp_path / "texts").sources[0])) == 12
    assert len(documents.files_of(_section(tmp_path / "texts" / "00*.txt").sources[0])) == 10
    assert len(documents.files_of(_section(tmp_path / "texts" / "003.txt").sources[0])) == 1


@pytest.mark.parametrize("path", ["nowhere", "empty", "no*thing"])
def test_missing_data_is_a_job_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"'path' in \[data\] is wrong: there is no text file") as caught:
        _open(_section(tmp_path / path), tmp_path / "cache")
    assert caught.value.hint


def test_an_unknown_tokenizer_is_a_job_error(tmp_path: Path) -> None:
    _write_texts(tmp_path / "texts", 2)
    section = _section(tmp_path / "texts").model_copy(update={"tokenizer": "byts"})
    with pytest.raises(JobError, match=r"'tokenizer' in \[data\] is wrong: there is no model 'byts'"):
        _open(section, tmp_path / "cache")


def test_too_short_data_is_a_job_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    for size in (0, 16):
        (tmp_path / "short.txt").write_bytes(b"x" * size)
        with pytest.raises(JobError, match="part has 0 tokens, and a sequence needs 9") as caught:
            _open(_section(tmp_path / "short.txt"), tmp_path / "cache")
        assert "18 tokens suffice" in caught.value.hint


@settings(max_examples=20)
@given(text=st.binary(min_size=17, max_size=300).map(bytes.hex), validation=st.floats(0.01, 0.5))
def test_of_a_small_file_a_sequence_or_the_share_is_held_out(text: str, validation: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "book.txt")
        path.write_text(text)
        corpus = _open(_section(path, validation=validation), Path(folder, "cache"))
        total = len(text) + 1
        assert len(corpus.train) + len(corpus.validation) == total
        assert len(corpus.validation) == max(9, round(validation * total))
        tokens = bytes([*corpus.train, *corpus.validation])
        assert sorted(tokens) == sorted(text.encode() + b"\0")


def test_a_missing_optional_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(JobError, match="pyarrow") as caught:
        _open(_section(tmp_path, format="parquet"), tmp_path / "cache")
    assert "pip install pyarrow" in caught.value.hint


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [f"row {number}" for number in range(200)]
    parquet.write_table(pyarrow.table({"text": rows, "other": list(range(200))}), path)
    section = _section(path, format="parquet")
    assert _contents(section, path) == [row.encode() for row in rows]
    for field, words in (("missing", "no column"), ("other", "not a text")):
        with pytest.raises(JobError, match=words):
            _contents(_section(path, format="parquet", field=field), path)
    path.write_bytes(b"not parquet at all")
    with pytest.raises(JobError, match=r"rows\.parquet:1: the parquet file is cut off or damaged"):
        _contents(section, path)
