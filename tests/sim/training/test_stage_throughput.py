"""Workers whose speeds span a decade train twelve layers in four stages, in virtual time."""

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.network.virtual_time import run
from tests.support.training import workers
from tests.support.training.stages import StageLab, staged_job
from tests.support.training.workers import train

SPEEDS = {"0.0": 10.0, "0.1": 1.0, "1.0": 7.0, "1.1": 4.0, "2.0": 9.0, "2.1": 2.0, "3.0": 6.0, "3.1": 5.0}
"""Blocks per second, forwards. All stages have the same sum, so none has time to spare."""
PASSES, BLOCKS = 3, 3
"""A backward pass takes as long as two forward passes. A stage has three blocks."""
MAXIMAL_FLOW = 11.0 / (PASSES * BLOCKS)
"""Microbatches per second."""
BATCH = 64
"""Microbatches in a round, for each of two origins. A step of 1 M tokens has so many, if a
microbatch has four sequences of 2,048."""


def shares(folder: Path, batch: int, rounds: int) -> list[float]:
    """The throughput of each round after the first, as a share of the maximal flow."""
    ended: list[tuple[float, float]] = []

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round" and name == "0.0":
            ended.append((asyncio.get_running_loop().time(), event["tokens"] / 8))

    job = staged_job(folder, rounds=rounds, workers=2, stages=4, batch=batch)
    for old, new in {
        "num_hidden_layers = 4": "num_hidden_layers = 12",
        "cuts = [1, 2, 3]": "cuts = [3, 6, 9]",
        "microbatch = 2": "microbatch = 1",
        "sequence_length = 16": "sequence_length = 8",
        "deadline_s = 15": "deadline_s = 600",
    }.items():
        job = job.replace(old, new)
    lab = StageLab(folder, job)
    lab.step_s = {name: 1.0 / speed for name, speed in SPEEDS.items()}
    lab.wanted = watch
    run(train(lab, *SPEEDS, limit_s=30_000.0))
    lab.check_books()
    return [
        microbatches / (now_s - before_s) / MAXIMAL_FLOW
        for (before_s, _), (now_s, microbatches) in pairwise([(0.0, 0.0), *ended])
    ]


def test_unequal_workers_reach_the_maximal_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "COMPUTE_S", 0.0)
    found = shares(tmp_path, BATCH, 2)
    print(found)
    assert min(found) >= 0.9
