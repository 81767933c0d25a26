"""Workers that start at about the same time, in any order, train in one group."""

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.network.virtual_time import run
from tests.support.training import workers as training_workers
from tests.support.training.workers import WorkerLab, train, write_job

ROUNDS = 8
DEADLINE_S = 60.0
LONGEST_WAIT_S = 10.0
"""Seconds that a round may take for workers that are at another round; its deadline is far
later."""


def start(seed: str, folder: Path, patch: pytest.MonkeyPatch) -> WorkerLab:
    """Two to eight workers that start within ten seconds, and see each other's records at once or
    seconds later."""
    rng = random.Random(seed)
    names = [f"worker-{number}" for number in range(rng.randint(2, 8))]
    patch.setattr(training_workers, "COMPUTE_S", rng.choice([0.2, 0.5, 1.0, 2.0]))
    method, settings = rng.choice(
        [("diloco", "sync_every = 1"), ("streaming", "sync_every = 8\noverlap_steps = 1")]
    )
    lab = WorkerLab(folder, write_job(folder, method, settings, rounds=ROUNDS).replace("= 15", "= 60"))
    lab.board.delay_s = rng.choice([0.0, 1.0, 4.0])
    late_s = {name: rng.uniform(0.0, rng.choice([0.5, 10.0])) for name in names}

    async def scenario() -> None:
        async with asyncio.timeout(10 * DEADLINE_S):
            first, *others = sorted(names, key=late_s.__getitem__)
            for name in others:
                asyncio.get_running_loop().call_later(late_s[name] - late_s[first], lab.start, name)
            await train(lab, first)

    run(scenario())
    return lab


def check_one_group(lab: WorkerLab) -> None:
    """Assert that from the second round on all workers have the same parameters, and that no round
    has waited for others."""
    hashes: dict[int, set[str]] = {}
    for name in lab.events:
        for number, event in lab.rounds(name).items():
            hashes.setdefault(number, set()).add(event["params_hash"])
    assert [number for number, found in hashes.items() if len(found) > 1 and number > 0] == []
    rounds = [event for events in lab.events.values() for event in events if event["event"] == "round"]
    assert max(event["wait_s"] for event in rounds) <= LONGEST_WAIT_S
    assert {event["params_hash"] for event in rounds if event["round"] == ROUNDS - 1} == hashes[ROUNDS - 1]
    assert all(ROUNDS - 1 in lab.rounds(name) for name in lab.events)


@pytest.mark.parametrize("start_seed", ["2", "6", "26/start"])
def test_workers_that_start_together_are_one_group_by_round_two(
    start_seed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one_group(start(start_seed, tmp_path, monkeypatch))


@pytest.mark.thorough
def test_any_start_ends_in_one_group(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_group(start(f"{seed}/start", tmp_path, monkeypatch))
