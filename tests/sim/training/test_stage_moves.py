"""Workers move to the stage that lacks throughput or a worker, in virtual time."""

import asyncio
import random
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.relocation import LOOK_S, Look, Remembered, should_relocate
from swarmnet_protocols.routing.throughput import Claim
from tests.support.network.virtual_time import run
from tests.support.training import workers
from tests.support.training.stages import StageLab, names, staged_job
from tests.support.training.workers import train

STAGES, WORKERS, HOURS = 4, 8, 3


def rates(speeds: list[float], stages: tuple[int, ...]) -> list[float]:
    return [sum(s for s, at in zip(speeds, stages, strict=True) if at == stage) for stage in range(STAGES)]


def settled(seed: int) -> float:
    """Throughput after three hours of looks, as a share of the best assignment's.

    Newcomers took their stages one after another. Their speeds span a decade.
    """
    rng = random.Random(seed)
    speeds = [10 ** rng.uniform(0, 1) for _ in range(WORKERS)]
    at: list[int] = []
    for _ in speeds:
        found = rates(speeds[: len(at)], tuple(at))
        at.append(found.index(min(found)))
    memories, moves = [Remembered()] * WORKERS, [list[float]() for _ in speeds]
    for look_s in range(0, HOURS * 3600, int(LOOK_S)):
        for me in rng.sample(range(WORKERS), WORKERS):
            claims = [Claim(str(i), at[i], at[i] + 1, speeds[i]) for i in range(WORKERS)]  # type: ignore[arg-type]
            look = Look(ServedModel(b"", "", STAGES, 0.0, claims), claims[me], 1)
            move, memories[me] = should_relocate(look, memories[me], now=float(look_s), rng=rng)
            if move is not None:
                at[me] = move.start
                moves[me].append(look_s)
    assert all(later - earlier >= 3600 for each in moves for earlier, later in pairwise(each))
    best = max(min(rates(speeds, each)) for each in product(range(STAGES), repeat=WORKERS))
    return min(rates(speeds, tuple(at))) / best


def test_moves_settle_near_the_best_assignment() -> None:
    assert mean(settled(seed) for seed in range(3)) >= 0.95


def train_moving(
    folder: Path, counts: dict[int, int], *, rounds: int, deadline_s: int = 15, victim: str = ""
) -> tuple[StageLab, list[dict[str, Any]], list[float]]:
    """Returns the lab, its moves, and when each round of stage 0 ended."""
    moves: list[dict[str, Any]] = []
    ended_s: list[float] = []

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "moving":
            moves.append(event)
        if event["event"] == "round" and name == "0.0":
            ended_s.append(asyncio.get_running_loop().time())
        if event["event"] == "round" and event["round"] == 3 and name == victim:
            asyncio.get_running_loop().call_soon(lab.crash, name)

    job = staged_job(folder, rounds=rounds, workers=3, least=1, stages=3)
    lab = StageLab(folder, job.replace("deadline_s = 15", f"deadline_s = {deadline_s}"), moves=True)
    lab.wanted = watch
    run(train(lab, *names(counts), limit_s=800.0))
    lab.check_books()
    assert sorted(lab.losses()) == list(range(rounds))
    return lab, moves, ended_s


def test_a_worker_moves_to_a_stage_that_lost_all_workers(tmp_path: Path) -> None:
    lab, moves, _ = train_moving(tmp_path, {0: 1, 1: 2, 2: 1}, rounds=6, victim="2.0")
    assert [(each["stage"], each["to"]) for each in moves] == [(1, 2)]
    assert any(each["event"] == "restored" for name in lab.moved for each in lab.events[name])


def test_a_move_raises_the_throughput(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "COMPUTE_S", 2.0)
    _, moves, ended_s = train_moving(tmp_path, {0: 2, 1: 3, 2: 1}, rounds=9, deadline_s=60)
    assert [(each["stage"], each["to"]) for each in moves] == [(1, 2)]
    assert ended_s[-1] - ended_s[-2] < 0.9 * (ended_s[1] - ended_s[0])
