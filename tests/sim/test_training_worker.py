"""Whole workers, unmodified, train a tiny job together in virtual time while some of them fail."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_workers import ROUNDS, WorkerLab, write_job
from tests.support.virtual_time import run

NAMES = ("anna", "boris", "clara", "dora")
SETTINGS = {
    "allreduce": "",
    "diloco": "sync_every = 2",
    "streaming": "sync_every = 4\nfragments = 2\noverlap_steps = 1",
    "eager": "sync_every = 2",
    "noloco": "sync_every = 2",
    "sparseloco": "sync_every = 2",
    "co2": "sync_every = 2",
    "zo": "directions = 2\nlearning_rate = 1e-3",
}

MIN = "min_workers = %d"


async def train(lab: WorkerLab, *names: str) -> None:
    try:
        async with asyncio.timeout(3000):
            for name in names:
                lab.start(name)
            await lab.finished()
    finally:
        await lab.close()


@pytest.mark.parametrize("method", SETTINGS)
def test_every_method_trains_to_the_end(method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method], MIN % 3))
    run(train(lab, *NAMES[:3]))

    for name in NAMES[:3]:
        assert list(lab.rounds(name)) == list(range(ROUNDS))
        assert lab.events[name][-1]["event"] == "done"
        assert all(event["loss"] > 0 for event in lab.rounds(name).values())
    if method != "noloco":  # whose replicas are near each other and never equal
        lab.check_equal()
        assert all(len(event["contributors"]) == 3 for event in lab.rounds("anna").values())


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int4", "fp4"])
def test_workers_stay_equal_under_every_codec(codec: str, tmp_path: Path) -> None:
    lab = WorkerLab(
        tmp_path, write_job(tmp_path, "diloco", "sync_every = 1", f'{MIN % 3}\ncodec = "{codec}"', rounds=3)
    )
    run(train(lab, *NAMES[:3]))

    lab.check_equal()
    assert all(len(lab.rounds(name)) == 3 for name in NAMES[:3])


@pytest.mark.parametrize("fault", ["crash", "hang", "isolate"])
@pytest.mark.parametrize("method", ["diloco", "streaming", "eager"])
def test_a_worker_that_fails_costs_its_own_contribution(fault: str, method: str, tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, method, SETTINGS[method], MIN % 3))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round" and event["round"] == 1:
            if fault == "crash":
                lab.crash("boris")
            else:
                getattr(lab.network, fault)(lab.peer("boris"))
                lab.tasks["boris"].cancel()  # it will not end by itself

    lab.observer = watch
    run(train(lab, *NAMES))

    lab.check_equal()
    for name in ("anna", "clara", "dora"):
        assert lab.events[name][-1]["event"] == "done"
        assert max(lab.rounds(name)) == ROUNDS - 1
        assert lab.peer("boris") not in lab.rounds(name)[ROUNDS - 1]["contributors"]


def test_a_newcomer_fetches_the_state_and_contributes_from_its_second_round(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", MIN % 2, rounds=8))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round" and event["round"] == 1:
            lab.start("dora")

    lab.observer = watch
    run(train(lab, *NAMES[:2]))

    lab.check_equal()
    healed = next(event for event in lab.events["dora"] if event["event"] == "healed")
    first, *later = sorted(lab.rounds("dora"))
    assert healed["round"] <= first
    assert later[-1] == 7
    contributors = [lab.rounds("anna")[number]["contributors"] for number in (first, *later)]
    assert lab.peer("dora") not in contributors[0]
    assert all(lab.peer("dora") in each for each in contributors[1:])


def test_the_last_worker_goes_on_alone_and_others_come_back_to_it(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", rounds=6))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round":
            if event["round"] == 1:
                lab.crash("boris")
            elif event["round"] == 3:
                lab.start("clara")

    lab.observer = watch
    run(train(lab, *NAMES[:2]))

    lab.check_equal()
    assert max(lab.rounds("anna")) == max(lab.rounds("clara")) == 5
    assert [event["event"] for event in lab.events["clara"]].count("healed") == 1, "the round waits for it"


def test_a_job_goes_on_from_the_checkpoint_of_any_worker(tmp_path: Path) -> None:
    toml = write_job(tmp_path, "diloco", "sync_every = 2", rounds=6)
    lab = WorkerLab(tmp_path, toml)

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 4:
            for each in NAMES[:3]:
                lab.crash(each)

    lab.observer = watch
    run(train(lab, *NAMES[:3]))
    before = lab.rounds("anna")[3]["params_hash"]

    again = WorkerLab(tmp_path, toml)
    run(train(again, "anna"))
    assert min(again.rounds("anna")) == 4, "the checkpoint was written after round 3"
    assert before != again.rounds("anna")[4]["params_hash"]
    assert again.events["anna"][-1] == {"event": "done", "round": 6, "revision": 6}
