"""Zeroth-order training: the equations, a history that gives the same bits, and one byte a
slope."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.replica import Replica
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs.log8 import Log8Codec
from swarmnet_protocols.training.methods import Average, ZeroOrder, get_method, zo
from tests.support.models.rounding import assert_sum
from tests.support.training import reference
from tests.support.training.task import NAMES, ROUNDS, SIZE, WORKERS, Task, assert_agree
from tests.support.training.tiny_job import tiny_job, tiny_trainer

H = 2
EPSILON = 1e-2
LEARNING_RATE = 1e-3
SEED = 1 << 40
JOB: dict[str, dict[str, Any]] = {
    "method": {"name": "zo", "settings": {"sync_every": 3, "learning_rate": 1e-3, "seed": SEED}}
}


def zeroth_order() -> ZeroOrder:
    method = get_method(
        "zo", {"sync_every": H, "epsilon": EPSILON, "learning_rate": LEARNING_RATE, "seed": SEED}
    )
    assert isinstance(method, ZeroOrder)
    method.begin(torch.from_numpy(Task().start).float())
    return method


def slopes(method: ZeroOrder, t: int, worker: int) -> torch.Tensor:
    """The contribution of a worker to a round after its steps."""
    task, theta = Task(), method.agreed().clone()
    measured = [
        method.step(theta, t, j, lambda: task.loss(worker, theta.double().numpy()))[0] for j in range(H)
    ]
    return method.contribution(t, torch.tensor(measured))


def test_zeroth_order_follows_the_equations_and_replays_bit_for_bit() -> None:
    method = zeroth_order()
    theta, trace, log = torch.from_numpy(Task().start).float(), [], []
    for t in range(ROUNDS):
        mean = torch.stack([slopes(method, t, i) for i in range(WORKERS)]).mean(dim=0)
        theta = method.apply(t, theta, Average(mean, NAMES))
        log.append((t, mean))
        trace.append(torch.stack([theta] * WORKERS).numpy())
    run = Task().run()
    assert_agree(trace, reference.zeroth_order(run, Task().loss, SEED, H, EPSILON, LEARNING_RATE))

    joiner = zeroth_order()
    assert torch.equal(joiner.replay(torch.from_numpy(trace[3][0]), log[4:]), theta)
    assert torch.equal(method.agreed(), theta)


def test_a_step_takes_the_loss_at_both_probes_and_ends_down_the_slope() -> None:
    method, z = zeroth_order(), torch.from_numpy(reference.direction(SEED, 3, 1, SIZE))
    start = method.agreed().double()
    theta, visited = method.agreed().clone(), []

    def loss() -> float:
        visited.append(theta.double())
        return 5.0 if len(visited) == 1 else 2.0

    slope, mean = method.step(theta, 3, 1, loss)
    assert (slope, mean) == (3.0 / (2 * EPSILON), 3.5)
    places = [*visited, theta.double()]
    for place, by in zip(places, (EPSILON, -EPSILON, -LEARNING_RATE * slope), strict=True):
        assert_sum(place, torch.stack([start, by * z]), 6)


def test_a_vector_moved_in_parts_equals_the_vector_moved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    method, log = zeroth_order(), [(3, torch.tensor([0.5, -2.0])), (4, torch.tensor([1.0, 0.0]))]
    whole = method.replay(method.agreed(), log)
    monkeypatch.setattr(zo, "_CHUNK", 50)
    assert torch.equal(method.replay(method.agreed(), log), whole)


def test_slopes_of_one_byte_lower_the_loss() -> None:
    method, task, codec = zeroth_order(), Task(), Log8Codec()
    theta = method.agreed().clone()
    losses = []
    for t in range(60):
        losses.append(sum(task.loss(i, theta.double().numpy()) for i in range(WORKERS)))
        payloads = [codec.encode(slopes(method, t, i)) for i in range(WORKERS)]
        mean = torch.stack([codec.decode(payload, H) for payload in payloads]).mean(dim=0)
        theta = method.apply(t, theta, Average(mean, NAMES))
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("entry", [torch.tensor([1.0]), torch.tensor([1.0, math.nan]), torch.ones(2, 2)])
def test_a_log_with_anything_but_finite_slopes_is_refused(entry: torch.Tensor) -> None:
    method = zeroth_order()
    with pytest.raises(ProtocolViolation, match="round 7"):
        method.replay(method.agreed(), [(7, entry)])


class TestWorker:
    def test_a_worker_contributes_slopes_and_takes_the_agreed_parameters(self, tmp_path: Path) -> None:
        trainer = tiny_trainer(tmp_path, **JOB)
        worker = Replica(tiny_job(tmp_path, **JOB), trainer)
        gradient, report = trainer.gradient(0, 0, 2)
        z = torch.from_numpy(reference.direction(SEED, 0, 0, len(gradient))).float()
        slopes, measured = worker.contribution(0, 2)
        # Both are differences over a step, and curved losses differ from their tangents.
        assert float(slopes[0]) == pytest.approx(float(gradient @ z), rel=0.02)
        assert measured.loss == pytest.approx(report.loss, rel=0.02)
        before = worker.method.agreed()
        worker.apply(0, Average(slopes / 2, NAMES))
        assert torch.equal(trainer.parameters(), worker.method.agreed())
        assert not torch.equal(trainer.parameters(), before)
        worker.contribution(1, 2)
        worker.apply(1, None)
        assert torch.equal(trainer.parameters(), worker.method.agreed())

    def test_every_step_of_a_round_is_reported_and_its_end(self, tmp_path: Path) -> None:
        heard: list[int] = []
        one_round(tmp_path, heard.append)
        assert list(dict.fromkeys(heard)) == [0, 1, 2, 3]

    def test_a_worker_may_leave_in_the_middle_of_a_round(self, tmp_path: Path) -> None:
        class Left(Exception):
            pass

        heard: list[int] = []

        def leave_after_one(step: int) -> None:
            heard.append(step)
            if step == 1:
                raise Left

        with pytest.raises(Left):
            one_round(tmp_path, leave_after_one)
        assert heard == [0, 0, 1]


def one_round(folder: Path, reached: Callable[[int], None]) -> None:
    """A worker's own part of a round; ``reached`` hears how many of its three inner steps are
    done."""

    def progress(description: str, done: int, total: int | None) -> None:
        if description == "inner steps":
            assert total == 3
            reached(done)

    trainer = tiny_trainer(folder, progress, **JOB)
    Replica(tiny_job(folder, **JOB), trainer).contribution(0, 0)
