"""Hugging Face datasets: which files are read and how much, and that repositories run no code."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from swarmnet_node.training.data.corpus import open_corpus
from swarmnet_node.training.data.documents import documents
from swarmnet_node.training.job_store import pinned
from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.training.job_settings import DataSection, JobError
from tests.support.models.dataset_hub import NAME, DatasetHub, serving
from tests.support.training.tiny_job import tiny_job
from tests.unit.node.training.test_training_start import hear_of_files


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DatasetHub]:
    made = DatasetHub()
    with serving(made, tmp_path):
        yield made


def section(**more: object) -> DataSection:
    return DataSection.model_validate({"hub": NAME, "sequence_length": 8, **more})


def _contents(data: DataSection) -> list[bytes]:
    return [each.row.content for each in documents(data.sources[0], ())]


def rows(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def table(*texts: str) -> bytes:
    written = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": list(texts)}), written)
    return written.getvalue()


@pytest.mark.parametrize(
    ("kind", "suffix", "one", "two"),
    [
        ("text", "txt", b"one", b"two"),
        ("jsonl", "jsonl", rows("one"), rows("two")),
        ("parquet", "parquet", table("one"), table("two")),
    ],
)
def test_the_files_whose_names_begin_with_the_split_are_read_in_order(
    hub: DatasetHub, kind: str, suffix: str, one: bytes, two: bytes
) -> None:
    hub.files = {
        f"data/train-1.{suffix}": two,
        f"data/train-0.{suffix}": one,
        f"data/test-0.{suffix}": b"other",
        "data/train.csv": b"other",
    }
    assert _contents(section(format=kind)) == [b"one", b"two"]
    assert not {f"data/test-0.{suffix}", "data/train.csv"} & hub.sent.keys()


def test_scripts_and_settings_of_a_repository_have_no_effect(hub: DatasetHub, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("private")
    settings = f"---\nconfigs:\n- config_name: default\n  data_files: {secret}\n---\n"
    hub.files = {"README.md": settings.encode(), "name.py": b"raise SystemExit", "train.txt": b"public"}
    heard: list[str] = []
    stop = hear_of_files(heard)
    try:
        assert _contents(section()) == [b"public"]
    finally:
        stop()
    assert hub.sent.keys() == {"train.txt"}
    assert not [each for each in heard if "secret" in each]


def test_data_beyond_the_jobs_size_is_not_fetched(hub: DatasetHub, tmp_path: Path) -> None:
    hub.files = {"train.txt": b"x" * (40 << 20)}
    with pytest.raises(JobError, match="size_bytes"):
        open_corpus(section(size_bytes=100_000), tmp_path / "cache")
    assert hub.sent["train.txt"] < 12 << 20


def test_an_endless_line_is_refused(hub: DatasetHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnet_protocols.models.text.data_files.MAX_LINE_BYTES", 1000)
    hub.files = {"train.jsonl": rows("x" * 1000)}
    with pytest.raises(JobError, match=r"train\.jsonl:1: a line of more than"):
        _contents(section(format="jsonl"))


def test_a_missing_dataset_is_a_job_error(hub: DatasetHub) -> None:
    with pytest.raises(JobError, match="no file whose name begins with 'train'"):
        _contents(section())
    other = section(hub=NAME.replace("org", "gro"))
    with pytest.raises(JobError, match="no dataset gro/name"):
        _contents(other)


def test_an_unreachable_hub_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.AGENT_HARNESSES_PATH", str(tmp_path / "agents.json"))
    with pytest.raises(Unreachable, match="the hub does not answer"):
        _contents(section())


def test_names_of_the_hub_are_pinned_to_their_newest_commit(hub: DatasetHub, tmp_path: Path) -> None:
    names = {"path": None, "hub": "org/name", "tokenizer": "org/name@v1"}
    job = pinned(tiny_job(tmp_path, data=names, model={"config": None, "checkpoint": "org/name@v1"}))
    assert (job.data.sources[0].hub, job.data.tokenizer, job.model.checkpoint) == (NAME, NAME, NAME)
    assert pinned(job) == job


def test_a_folder_of_this_machine_is_not_a_name_of_the_hub(
    hub: DatasetHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    job = tiny_job(tmp_path, model={"config": None, "checkpoint": "models/mine"})
    assert pinned(job) == job


def test_a_name_that_the_hub_does_not_have_is_refused_with_its_key(
    hub: DatasetHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path, data={"path": None, "hub": "org/other"})
    with pytest.raises(JobError, match="the hub has no dataset org/other") as caught:
        pinned(job)
    assert (caught.value.section, caught.value.key) == ("data", "hub")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(Unreachable, match="the hub does not answer for org/other"):
        pinned(job)
