"""Checkpoints: kills and full disks leave a valid one."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint, _hash_of, params_hash
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.net import PeerId
from tests.support.training.tiny_job import tiny_trainer
from tests.support.training.torn_writes import checkpoint_of, plain_model

KILLS = 25


def _save(root: Path, round: int, job_id: str = "a job") -> Path:
    return CheckpointStore(root).save(checkpoint_of(round, job_id), plain_model)


def test_a_checkpoint_restores_every_bit(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path)
    trainer.steps(0, 0, 3)
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    outer = {"momentum": torch.randn(5), "own.residual": torch.tensor([1.0, -0.0])}
    saved = WorkerCheckpoint(
        "a job", 7, 6, trainer.parameters(), trainer.optimizer_state(), outer, (PeerId("liar"),)
    )
    checkpoints.save(saved, trainer.write)
    loaded = checkpoints.load_newest("a job")
    assert loaded is not None
    assert (loaded.round, loaded.revision, loaded.excluded) == (7, 6, ("liar",))
    assert torch.equal(loaded.parameters, saved.parameters)
    assert params_hash(loaded.parameters) == params_hash(saved.parameters)
    for before, after in ((saved.optimizer, loaded.optimizer), (outer, loaded.outer)):
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items())


def test_transformers_loads_checkpoints_and_exports(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = tiny_trainer(tmp_path)
    checkpoints = CheckpointStore(tmp_path / "checkpoints")
    folder = checkpoints.save(WorkerCheckpoint("a job", 1, 1, trainer.parameters(), {}, {}), trainer.write)
    (copy := tmp_path / "copy").mkdir()
    checkpoints.copy_model(copy)
    for path in (folder, copy):
        model: Any = AutoModelForCausalLM.from_pretrained(path)
        values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        assert torch.equal(values, trainer.parameters())
    assert not (copy / "state").exists()


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for round in range(1, 5):
        _save(tmp_path, round)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000003", "checkpoint-00000004"]
    assert _round_of(tmp_path) == 4


def test_without_a_checkpoint_none_is_loaded(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path / "nothing")
    assert checkpoints.load_newest("a job") is None
    with pytest.raises(ConfigError, match="no checkpoint"):
        checkpoints.copy_model(tmp_path)


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    _save(tmp_path, 1, job_id="b" * 64)
    with pytest.raises(ConfigError, match="another job"):
        CheckpointStore(tmp_path).load_newest("a" * 64)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _progress(path: Path, **changes: object) -> None:
    progress = json.loads(path.read_text()) | changes
    del progress["sha256"]
    path.write_text(json.dumps(progress | {"sha256": _hash_of(progress)}))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "state/optimizer.safetensors", "state/outer.safetensors"]
)
@pytest.mark.parametrize("fault", [_flip, _cut, Path.unlink])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, name: str, fault: Any) -> None:
    _save(tmp_path, 1)
    fault(_save(tmp_path, 2) / name)
    assert _round_of(tmp_path) == 1


@pytest.mark.parametrize(
    "changes",
    [{"files": {}}, {"files": None}, {"round": -1}, {"round": True}, {"revision": "1"}, {"job": None}],
)
def test_a_checkpoint_with_invalid_progress_is_skipped(tmp_path: Path, changes: dict[str, object]) -> None:
    _save(tmp_path, 1)
    _progress(_save(tmp_path, 2) / "progress.json", **changes)
    assert _round_of(tmp_path) == 1


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]"])
def test_a_checkpoint_without_progress_is_skipped(tmp_path: Path, text: str) -> None:
    _save(tmp_path, 1)
    (_save(tmp_path, 2) / "progress.json").write_text(text)
    assert _round_of(tmp_path) == 1


def test_a_checkpoint_with_an_additional_file_is_skipped(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    (_save(tmp_path, 2) / "more.safetensors").touch()
    assert _round_of(tmp_path) == 1


@pytest.mark.timeout(200)
def test_a_kill_at_any_point_of_a_write_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """Every child writes the next checkpoint and is killed before the n-th call that its write
    makes."""
    answer = subprocess.run(
        [sys.executable, "-m", "tests.support.training.torn_writes", str(tmp_path), str(KILLS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert len(report["rounds"]) == KILLS
    assert all(after in (before, before + 1) for before, after in report["rounds"]), report
    assert report["torn"] > KILLS // 2  # most kills happen during a write
    assert len(list(tmp_path.iterdir())) <= 3 + 1


def _save_with_little_disk(root: Path, limit_bytes: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        with pytest.raises(OutOfResources, match="cannot write"):
            _save(root, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit_bytes", [0, 100, 10_000])
def test_a_full_disk_leaves_the_last_checkpoint_valid(tmp_path: Path, limit_bytes: int) -> None:
    _save(tmp_path, 1)
    _save_with_little_disk(tmp_path, limit_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
    assert _round_of(tmp_path) == 1
    _save(tmp_path, 2)
    assert _round_of(tmp_path) == 2


def _round_of(root: Path) -> int | None:
    found = CheckpointStore(root).load_newest("a job")
    return None if found is None else found.round
