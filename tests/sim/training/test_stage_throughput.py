"""Workers whose speeds span a decade train twelve layers in four stages, in virtual time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swarmnet_protocols.net.protocol_ids import MICROBATCH
from tests.support.network.memory_network import Delivery
from tests.support.network.virtual_time import run
from tests.support.training import workers
from tests.support.training.stages import StageLab, staged_job
from tests.support.training.workers import train

SPEEDS = {"0.0": 10.0, "0.1": 1.0, "1.0": 7.0, "1.1": 4.0, "2.0": 9.0, "2.1": 2.0, "3.0": 6.0, "3.1": 5.0}
"""Blocks per second, forwards. All stages have the same sum, so none has time to spare."""
MAXIMAL_FLOW = 11.0 / (3 * 3)
"""Microbatches per second: three blocks in a stage, forwards and, in twice the time, backwards."""


def share(folder: Path, batch: int, rounds: int) -> float:
    """Return the throughput from the first microbatch to the last exchange, as a share of the
    maximal flow.

    ``batch``: microbatches of a round, for each of two origins.
    """
    began_s: list[float] = []
    ended_s = 0.0

    def begin(delivery: Delivery) -> None:
        if not began_s and delivery.protocol.id == MICROBATCH.id:
            began_s.append(delivery.time_s - 3 / SPEEDS["0.0"])

    def watch(name: str, event: dict[str, Any]) -> None:
        nonlocal ended_s
        if event["event"] == "round":
            ended_s = asyncio.get_running_loop().time()

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
    lab.network.observers.append(begin)
    run(train(lab, *SPEEDS, limit_s=10_000.0))
    lab.check_books()
    return 2 * batch * rounds / (ended_s - began_s[0]) / MAXIMAL_FLOW


@pytest.mark.parametrize(
    ("batch", "rounds", "least"), [(64, 1, 0.9), pytest.param(128, 2, 0.95, marks=pytest.mark.thorough)]
)
def test_unequal_workers_reach_the_maximal_flow(
    batch: int, rounds: int, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 1 M tokens has 2 x 64 microbatches of four sequences of 2,048."""
    monkeypatch.setattr(workers, "COMPUTE_S", 0.0)
    assert share(tmp_path, batch, rounds) >= least
