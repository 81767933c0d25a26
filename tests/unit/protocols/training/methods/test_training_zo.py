"""Zeroth-order training: the equations, a history that gives the same bits, and one byte a
slope."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.replica import Replica
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs.log8 import Log8Codec
from swarmnet_protocols.training.methods import Average, ZeroOrder, get_method, zo
from swarmnet_protocols.training.shared_randomness import round_to_bfloat16
from tests.support.training import reference
from tests.support.training.task import NAMES, ROUNDS, WORKERS, Task, assert_agree
from tests.support.training.tiny_job import tiny_job, tiny_trainer

H = 2
EPSILON = 1e-2
LEARNING_RATE = 1e-3
SEED = 1 << 40
JOB: dict[str, dict[str, Any]] = {
    "method": {
        "name": "zo",
        "settings": {"sync_every": 3, "learning_rate": 1e-3, "seed": SEED, "weights": "float32"},
    }
}


def zeroth_order() -> ZeroOrder:
    method = get_method(
        "zo", {"sync_every": H, "epsilon": EPSILON, "learning_rate": LEARNING_RATE, "seed": SEED}
    )
    assert isinstance(method, ZeroOrder)
    method.begin(torch.from_numpy(Task().start).float())
    return method


def slopes(method: ZeroOrder, t: int, worker: int, of: int | None = None) -> torch.Tensor:
    """The contribution of a worker to a round, on its own data or ``of`` another."""
    task, theta = Task(), method.agreed().clone()
    measured = torch.zeros(method.range(t)[1])
    for step in range(H):
        place = method.place(step, worker)
        plus, minus = (
            task.loss(worker if of is None else of, method.shift(theta, 0, t, place, sign).double().numpy())
            for sign in (1, -1)
        )
        measured[place] = method.slope(plus, minus)
    return method.contribution(t, measured)


def test_zeroth_order_follows_the_equations_and_replays_bit_for_bit() -> None:
    method = zeroth_order()
    theta, trace, log = torch.from_numpy(Task().start).float(), [], []
    for t in range(ROUNDS):
        mean = torch.stack([slopes(method, t, i) for i in range(WORKERS)]).mean(dim=0)
        theta = method.apply(t, theta, Average(mean, NAMES)).clone()
        log.append((t, mean * WORKERS))
        trace.append(torch.stack([theta] * WORKERS).numpy())
    run = Task().run()
    assert_agree(trace, reference.zeroth_order(run, Task().loss, SEED, H, EPSILON, LEARNING_RATE))

    joined = torch.from_numpy(trace[3][0])
    zeroth_order().replay(joined, log[4:])
    assert torch.equal(joined, theta)
    assert torch.equal(method.agreed(), theta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_moved_in_parts_equals_the_vector_moved_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, slopes = zeroth_order(), torch.zeros(2, 64 * H)
    slopes[0, 3], slopes[1, 70] = -2.0, 0.5
    log, start = list(zip((3, 4), slopes, strict=True)), method.agreed().to(dtype)
    whole, parts = start.clone(), start.clone()
    method.replay(whole, log)
    monkeypatch.setattr(zo, "_CHUNK", 56)
    method.replay(parts, log)
    assert torch.equal(parts, whole)
    assert not torch.equal(whole, start)
    shifted = method.shift(start, 0, 0, 5, 1)
    monkeypatch.undo()
    assert torch.equal(method.shift(start, 0, 0, 5, 1), shifted)


def test_bfloat16_weights_keep_moves_below_their_precision() -> None:
    values = torch.full((80_000,), 1 + 2.0**-10)  # an eighth of the way to the next bfloat16
    rounded = round_to_bfloat16(values, SEED, (1, 2)).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2.0**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2.0**-10, abs=5e-5)
    assert torch.equal(round_to_bfloat16(-values, SEED, (1, 2)).float(), -rounded)
    assert torch.equal(round_to_bfloat16(values[16:], SEED, (1, 2), 16).float(), rounded[16:])
    with pytest.raises(ValueError, match="multiple of 8"):
        round_to_bfloat16(values, SEED, (1, 2), 4)


def test_eight_workers_need_a_third_of_the_steps_of_one() -> None:
    start = Task().loss(0, zeroth_order().agreed().double().numpy())

    def steps(workers: int) -> int:
        method, task, codec, t = zeroth_order(), Task(), Log8Codec(), 0
        while task.loss(0, method.agreed().double().numpy()) > 0.7 * start:
            rows = [codec.decode(codec.encode(slopes(method, t, i, of=0)), 64 * H) for i in range(workers)]
            method.apply(t, method.agreed(), Average(torch.stack(rows).mean(dim=0), ("",) * workers))
            t += 1
        return t * H

    assert steps(8) <= 0.3 * steps(1)


def test_slopes_of_one_byte_lower_the_loss() -> None:
    method, task, codec = zeroth_order(), Task(), Log8Codec()
    theta = method.agreed().clone()
    losses = []
    for t in range(60):
        losses.append(sum(task.loss(i, theta.double().numpy()) for i in range(WORKERS)))
        payloads = [codec.encode(slopes(method, t, i)) for i in range(WORKERS)]
        mean = torch.stack([codec.decode(payload, 64 * H) for payload in payloads]).mean(dim=0)
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
        z = torch.from_numpy(reference.direction(SEED, 0, 2, len(gradient))).float()
        before = worker.method.agreed().clone()
        slopes, measured = worker.contribution(0, 2)
        assert torch.equal(worker.method.agreed(), before)
        assert slopes.nonzero().flatten().tolist() == [2, 66, 130]
        # A slope is a difference over a step, and curved losses differ from their tangents.
        assert float(slopes[2]) == pytest.approx(float(gradient @ z), rel=0.02)
        assert measured.loss == pytest.approx(report.loss, rel=0.02)
        worker.apply(0, Average(slopes / 2, NAMES))
        assert torch.equal(trainer.parameters(), worker.method.agreed())
        assert not torch.equal(trainer.parameters(), before)
        worker.contribution(1, 2)
        after = trainer.parameters()
        worker.apply(1, None)
        assert torch.equal(trainer.parameters(), after)

    def test_bfloat16_weights_come_back_from_a_checkpoint_and_a_peer(self, tmp_path: Path) -> None:
        job: dict[str, dict[str, Any]] = {"method": {"name": "zo", "settings": {"sync_every": 2}}}
        one, two, three = (Replica(tiny_job(tmp_path, **job), tiny_trainer(tmp_path, **job)) for _ in "123")
        one.apply(0, Average(one.contribution(0, 0)[0] * 1e3, NAMES))
        store = CheckpointStore(tmp_path / "checkpoints")
        store.save(one.checkpoint("a job", 1), one.trainer.write)
        saved = store.load_newest("a job")
        assert saved is not None
        two.restore(saved)
        assert two.params_hash() == one.params_hash() != three.params_hash()
        three.load_shared(bytearray(b"".join(map(bytes, one.pack_shared()))))
        assert three.trainer.view().dtype == torch.bfloat16
        assert three.params_hash() == one.params_hash()

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
