"""A stage loses its last worker, and another machine takes it up, in virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from swarmnet_node.training.pipeline import stage_copies
from swarmnet_node.training.pipeline.stage_copies import NO_COPY, StageCopies
from swarmnet_node.training.pipeline.stage_workers import StageWorkers
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.job_records import StageRecord
from swarmnet_protocols.training.rounds.terms import RoundMember
from tests.defences import defence, replacing
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, stage_of, staged_job
from tests.support.training.workers import train

LAST = 3
"""The last round of the only worker of a stage."""
ROUNDS = 6


def lose(
    folder: Path,
    victim: str,
    told: list[dict[str, Any]],
    *,
    leaves: bool = False,
    limit_s: float = 600.0,
) -> StageLab:
    """A stage loses its only worker, and a newcomer without a checkpoint starts in its place.

    ``told`` gets the events about it.
    """
    newcomer = f"{stage_of(victim)}.9"

    def watch(name: str, event: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        if name == victim and event["event"] == "round" and event["round"] == LAST:
            loop.call_soon(*([lab.workers[name].stop] if leaves else [lab.crash, name]))
            loop.call_later(15.0, lab.start, newcomer)
        if event["event"] in {"restored", "stage_lost", "notice"}:
            told.append(event)

    lab = StageLab(folder, staged_job(folder, rounds=ROUNDS, workers=2, least=1, stages=3))
    lab.wanted = watch
    everybody = names({stage: 1 if victim == f"{stage}.0" else 2 for stage in range(3)})
    run(train(lab, *everybody, limit_s=limit_s))
    lab.check_books()
    return lab


def test_the_last_worker_of_a_stage_hands_its_state_over(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    lab = lose(tmp_path, "1.0", told, leaves=True)
    assert "only worker" in told[0]["text"]
    assert told[1]["source"] == f"a copy of round {LAST + 1}"
    assert lab.events["1.9"][-1]["revision"] == ROUNDS  # no round is lost


def test_a_copy_outlives_the_last_worker_of_a_stage(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    lab = lose(tmp_path, "1.0", told)
    assert told[0]["source"] == "a copy of round 2"
    assert lab.events["1.9"][-1]["revision"] == ROUNDS - 2
    assert sorted(lab.losses()) == list(range(ROUNDS))


def copied_in_an_hour(took_s: float, available_bytes: int = 1 << 20) -> list[float]:
    """Return when the copies of an hour began: of a stage whose state always changes, each taking
    ``took_s``."""
    begun_s: list[float] = []

    async def refresh() -> None:
        pass

    async def spill(pieces: Sequence[Buffer]) -> memoryview:
        return memoryview(b"state")

    async def positions(stage: int, workers: Sequence[RoundMember]) -> dict[PeerId, WorkerPosition]:
        return {workers[0].peer: WorkerPosition(len(begun_s) + 1, bytes(32))}

    async def fetch(*_: Any, **__: Any) -> tuple[bytearray, dict[PeerId, str]]:
        begun_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(took_s)
        return bytearray(b"state"), {}

    def record(peer: str) -> StageRecord:
        worker = RoundMember(PeerId(peer), ("/ip4/1.2.3.4/tcp/1",))
        return StageRecord(worker, NO_COPY, False, False, False, False)

    workers = StageWorkers(Mock(), bytes(32), 2, PeerId("0"))
    workers.records = [[record("0")], [record("1")]]
    workers.refresh = refresh  # type: ignore[assignment, method-assign]
    job = Mock(stages=2, workers=workers, positions=positions)
    job.transport.addresses.return_value = ()
    trainer = Mock(stage=0)
    trainer.size_of.return_value = 1 << 10
    keeper = Mock(spill=spill)
    keeper.server.fetch = fetch
    copies = StageCopies(job, trainer, AsyncMock(), keeper, lambda: available_bytes)

    async def an_hour() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(3600.0):
                await copies.keep()

    run(an_hour())
    return begun_s


@defence("copies take offered memory only", off=replacing(stage_copies, "max_state_bytes", lambda _: 0))
def test_a_copy_takes_no_memory_that_is_not_offered() -> None:
    assert copied_in_an_hour(0.1, available_bytes=1 << 10) == []


@defence(
    "copies of a stage are a minute apart",
    off=replacing(stage_copies, "COPY_S", 0.0),
    took_s=0.1,
    least_s=60.0,
)
@defence(
    "copies take a tenth of the time",
    off=replacing(stage_copies, "LINK_SHARE", 1.0),
    took_s=30.0,
    least_s=300.0,
)
@pytest.mark.parametrize(("took_s", "least_s"), [(0.1, 60.0), (30.0, 300.0)])
def test_copies_of_a_stage_leave_its_link_free(took_s: float, least_s: float) -> None:
    begun_s = copied_in_an_hour(took_s)
    assert len(begun_s) > 5
    assert all(later - earlier >= least_s for earlier, later in pairwise(begun_s))


def test_a_stage_without_a_copy_says_that_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_copies, "LOOK_S", 1e6)
    told: list[dict[str, Any]] = []
    with pytest.raises(TimeoutError):
        lose(tmp_path, "2.0", told, limit_s=150.0)
    [lost] = told  # once, however often it looks
    assert lost["event"] == "stage_lost"
    assert "nobody has the state of stage 2; start a machine" in lost["reason"]


@pytest.mark.thorough
def test_a_third_of_the_workers_may_be_replaced(tmp_path: Path) -> None:
    """The loss stays within 2 % of the job without changes."""
    changes = {2: ("1.1", "1.7"), 4: ("0.2", "0.7"), 6: ("2.0", "2.7")}

    def train_job(folder: Path, *, is_changing: bool) -> dict[int, float]:
        def watch(name: str, event: dict[str, Any]) -> None:
            is_end = is_changing and name == "0.0" and event["event"] == "round"
            if is_end and event["round"] in changes:
                left, new = changes[event["round"]]
                leave = lab.workers[left].stop if left == "2.0" else partial(lab.crash, left)
                asyncio.get_running_loop().call_soon(leave)
                lab.start(new)

        folder.mkdir()
        lab = StageLab(folder, staged_job(folder, rounds=12, workers=3, least=1, stages=3), moves=True)
        lab.wanted = watch
        run(train(lab, *names(dict.fromkeys(range(3), 3))))
        lab.check_books()
        return lab.losses()

    calm = train_job(tmp_path / "calm", is_changing=False)
    assert train_job(tmp_path / "changing", is_changing=True) == pytest.approx(calm, rel=0.02)
