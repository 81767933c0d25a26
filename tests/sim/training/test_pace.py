"""Workers of unequal speed train one job in virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.training.jobs import open_job
from tests.support.network.virtual_time import run
from tests.support.training.workers import WorkerLab, train, write_job

STEP_S = {"anna": 1.0, "boris": 1.0, "clara": 1.0, "dora": 4.0, "emil": 10.0}
"""Seconds of an inner step by worker: one is four times slower, one ten times."""
STEPS = 20
METHODS = ("diloco", "streaming", "sparseloco", "noloco")
UNEQUAL_ROUNDS, EQUAL_ROUNDS = 9, 6
"""Rounds with about as many tokens: workers take 3 × 40 + 10 + 4 or 5 × 40 steps in a round."""


def settings(method: str, steps: int) -> str:
    if method == "streaming":
        return f"sync_every = {2 * steps}\nfragments = 2\noverlap_steps = 1"
    return f"sync_every = {steps}"


class TimedLab(WorkerLab):
    """Workers, with the virtual time at which each ended each round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ended_s: dict[tuple[str, int], float] = {}
        self.observer = self._note

    def _note(self, name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            self.ended_s[name, event["round"]] = asyncio.get_running_loop().time()

    def tokens_per_s(self) -> float:
        """The tokens that all workers train per second, from the end of round 1 on."""
        total = 0.0
        for name in self.events:
            rounds = self.rounds(name)
            last = max(rounds)
            tokens = sum(event["own_tokens"] for number, event in rounds.items() if number > 1)
            total += tokens / (self.ended_s[name, last] - self.ended_s[name, 1])
        return total


def trained(folder: Path, method: str, rounds: int, step_s: dict[str, float]) -> TimedLab:
    folder.mkdir()
    lab = TimedLab(
        folder, write_job(folder, method, settings(method, STEPS), "min_workers = 5", rounds=rounds)
    )
    lab.step_s = step_s
    run(train(lab, *STEP_S, limit_s=30_000.0))
    return lab


def val_loss(lab: WorkerLab) -> float:
    """The last validation loss, the mean of all workers."""
    losses = [[e["val_loss"] for e in events if e["event"] == "eval"][-1] for events in lab.events.values()]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "method",  # sparseloco has the rounds of diloco
    [pytest.param(each, marks=pytest.mark.thorough if each == "sparseloco" else ()) for each in METHODS],
)
def test_workers_of_unequal_speed_arrive_together(method: str, tmp_path: Path) -> None:
    unequal = trained(tmp_path / "unequal", method, UNEQUAL_ROUNDS, STEP_S)
    equal = trained(tmp_path / "equal", method, EQUAL_ROUNDS, dict.fromkeys(STEP_S, 1.0))

    job = open_job(unequal.sealed).job
    alone = sum(job.training.batch_size * job.data.sequence_length / each for each in STEP_S.values())
    assert unequal.tokens_per_s() > 0.9 * alone
    for name in STEP_S:
        counted = [event["contributors"] for event in unequal.rounds(name).values()]
        assert len(counted) == UNEQUAL_ROUNDS
        if method != "noloco":
            assert all(len(each) == len(STEP_S) for each in counted)
    assert val_loss(unequal) < 1.02 * val_loss(equal)


@pytest.mark.parametrize("method", METHODS)
def test_a_late_contribution_counts_in_the_next_round(method: str, tmp_path: Path) -> None:
    toml = write_job(tmp_path, method, settings(method, 4), "min_workers = 3", rounds=12)
    lab = WorkerLab(tmp_path, toml)
    lab.step_s = dict.fromkeys(("anna", "boris", "dora"), 1.0)

    def slow_down_once(name: str, event: dict[str, Any]) -> None:
        if name == "dora" and event["event"] == "round":
            lab.step_s["dora"] = 8.0 if event["round"] == 1 else 1.0

    lab.observer = slow_down_once
    run(train(lab, *lab.step_s))

    (healed,) = [event for event in lab.events["dora"] if event["event"] == "healed"]
    assert healed["late_tokens"] > 0
    counted = lab.rounds("dora")
    assert lab.peer("dora") in counted[healed["round"]]["contributors"]
    assert counted[healed["round"]]["own_tokens"] == healed["late_tokens"]
    job = open_job(lab.sealed).job
    trained = lab.workers["dora"]._dependencies.given.samples * job.data.sequence_length
    assert sum(event["own_tokens"] for event in counted.values()) == trained
    if method != "noloco":
        lab.check_equal()


def test_the_worker_that_others_wait_for_is_named(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", settings("diloco", 4), "min_workers = 3"))
    lab.step_s = dict.fromkeys(("anna", "boris", "dora"), 1.0)

    def slow_down_once(name: str, event: dict[str, Any]) -> None:
        if name == "dora" and event["event"] == "round":
            lab.step_s["dora"] = 2.0 if event["round"] == 1 else 1.0

    lab.observer = slow_down_once
    run(train(lab, *lab.step_s))

    for name in lab.step_s:
        waited = lab.rounds(name)[2]["waited_for"]
        assert (waited["peer_id"], waited["why"]) == (lab.peer("dora"), "compute")
        assert waited["seconds"] == pytest.approx(4.0, abs=0.5)
