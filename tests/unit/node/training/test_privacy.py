"""Differential privacy of rows: clipped gradients, noise, and the epsilon of what is sent."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.data.sampler import BatchSampler, Share
from swarmnet_node.training.steps.privacy import Privacy, epsilon, most_uses
from swarmnet_protocols.training.job_settings import JobError
from tests.defences import defence, nothing, replacing
from tests.support.network.virtual_time import run
from tests.support.training.tiny_job import tiny_job, tiny_trainer
from tests.support.training.workers import WorkerLab, train, write_job

CLIP = 1e-3
BATCH = 4


def unclipped(self: Privacy, total: torch.Tensor, gradient: torch.Tensor) -> None:
    total.add_(gradient)


def gradients(folder: Path, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two gradients of the same batch."""
    data = {"path": str(folder / "text.txt"), "sequence_length": 16, "validation": 0.3, "source": "own"}
    trainer = tiny_trainer(folder, data=data, privacy={"clip_norm": CLIP, "noise": noise})
    return trainer.gradient(0, 0, 0)[0], trainer.gradient(0, 0, 0)[0]


@defence("the gradient of a row is clipped", off=replacing(Privacy, "add", unclipped))
def test_a_row_moves_a_step_by_the_clipping_norm_at_most(tmp_path: Path) -> None:
    gradient, _ = gradients(tmp_path, 1e-6)
    assert gradient.norm() <= 1.001 * CLIP


@defence("a private gradient has noise", off=replacing(Privacy, "blur", nothing))
def test_the_noise_of_a_step_is_that_of_the_job(tmp_path: Path) -> None:
    one, other = gradients(tmp_path, 2.0)
    assert float((one - other).std()) * BATCH == pytest.approx(2**0.5 * 2.0 * CLIP, rel=0.03)


@pytest.mark.parametrize(
    ("noise", "uses", "opacus"), [(1, 1, 4.7285), (1, 3, 9.0100), (0.5, 1, 10.7255), (4, 10, 3.6171)]
)
def test_epsilon_is_just_below_the_bound_of_opacus(noise: float, uses: int, opacus: float) -> None:
    """The bound is opacus 1.6's for Renyi privacy, with every row in every step."""
    assert 0.9 * opacus < epsilon(noise, uses, 1e-5) < opacus


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0)])
def test_no_row_is_used_more_often_than_stated(weights: tuple[float, ...]) -> None:
    shares = tuple(Share(50, weight, is_own=True) for weight in weights)
    sampler = BatchSampler(seed=1, shares=shares, batch_size=16, steps_per_round=10, slots=4)
    used = Counter(int(n) for r in range(13) for s in range(10) for n in sampler.batch(r, s, 2))
    assert max(used.values()) <= most_uses(sampler, 13, 0) <= max(used.values()) + 1024 // 50


def test_rounds_that_are_trained_again_count_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert [store.begin_round(round) for round in (0, 1, 1, 0, 2)] == [(1, 0), (2, 0), (2, 1), (2, 2), (3, 2)]
    assert CheckpointStore(tmp_path).begin_round(None) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "why"), [({}, "own data"), ({"method": {"name": "zo", "settings": {}}}, "gradients")]
)
def test_what_is_not_protected_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        tiny_job(tmp_path, privacy={"clip_norm": 1.0, "noise": 1.0}, **changes).check()


def test_a_worker_tells_its_epsilon_before_it_trains(tmp_path: Path) -> None:
    toml = write_job(tmp_path, "diloco", "sync_every = 2", rounds=3)
    toml = toml.replace(f'path = "{tmp_path / "data"}"', 'source = "own"')
    toml += "[privacy]\nclip_norm = 0.1\nnoise = 2.0\n"
    lab = WorkerLab(tmp_path, toml, own={"anna": tmp_path / "data"})
    run(train(lab, "anna"))
    told = [event for event in lab.events["anna"] if event["event"] == "privacy"]
    assert lab.events["anna"][0] == told[0]
    assert [event["next_round"] for event in told] == [None, 0, 1, 2]
    assert told[0]["epsilon"] == 0 < told[1]["epsilon"] <= told[-1]["epsilon"] == told[0]["epsilon_at_end"]
