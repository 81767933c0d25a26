"""A worker dies at a message of a worker that joins a stage or moves to it, in virtual time."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.network.memory_network import Delivery
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, staged_job
from tests.support.training.workers import train

ROUNDS = 8
MESSAGES = (1, 2, 3, 5, 8, 12, 17, 23, 30, 40, 55, 75, 100, 140)
"""At which message of the arriving worker another one dies, or the arriving worker itself."""


def lab_of(folder: Path, *, moves: bool = False) -> StageLab:
    return StageLab(folder, staged_job(folder, rounds=ROUNDS, workers=3, least=1, stages=3), moves=moves)


def kill_at(lab: StageLab, arriving: str, message: int, victim: str, killed: list[str]) -> None:
    """Kill a worker at a message from or to ``arriving``, counted from now on."""
    seen, me = 0, lab.peer(arriving)

    def observe(delivery: Delivery) -> None:
        nonlocal seen
        ends = {delivery.source, delivery.target}
        seen += me in ends
        if seen < message or me not in ends or killed:
            return
        peer = me if victim == "itself" else (ends - {me}).pop()
        name = next(name for name in lab.events if lab.peer(name) == peer)
        part = lab.workers[name]._stages
        if part is None or not part.copies.has_copy:  # otherwise the state may be lost (0171)
            killed.append(name)
            asyncio.get_running_loop().call_soon(lab.crash, name)

    lab.network.observers.append(observe)


def check(lab: StageLab, killed: list[str]) -> None:
    """Assert that each microbatch counted once, and that all others trained to the end."""
    lab.check_books()
    for name, events in lab.events.items():
        if name not in killed:
            assert (events[-1]["event"], events[-1]["round"]) == ("done", ROUNDS)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["itself", "the other"])
@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_death_during_a_join_loses_no_microbatch(
    stage: int, message: int, victim: str, tmp_path: Path
) -> None:
    lab, newcomer, killed = lab_of(tmp_path), f"{stage}.2", list[str]()

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 1 and newcomer not in lab.events:
            lab.start(newcomer)
            kill_at(lab, newcomer, message, victim, killed)

    lab.wanted = watch
    run(train(lab, *names(dict.fromkeys(range(3), 2)), limit_s=1000.0))
    assert killed
    check(lab, killed)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["itself", "the other"])
@pytest.mark.parametrize("message", MESSAGES)
def test_a_death_during_a_move_loses_no_microbatch(message: int, victim: str, tmp_path: Path) -> None:
    """A worker of stage 1 moves to stage 2, whose only worker has died."""
    lab, killed, moving, gone = lab_of(tmp_path, moves=True), list[str](), list[str](), "2.0"

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 3 and name == gone:
            asyncio.get_running_loop().call_soon(lab.crash, name)
        if event["event"] == "moving" and not moving:
            moving.append(name)
            kill_at(lab, name, message, victim, killed)

    lab.wanted = watch
    run(train(lab, *names({0: 2, 1: 3, 2: 1}), limit_s=2000.0))
    assert killed
    check(lab, [*killed, gone])


def evaluated(folder: Path, rounds: int, replaced: int) -> dict[int, float]:
    """Train four stages of three workers. Return the validation loss after every sixth round.

    One worker after another dies, each in the next stage, and a newcomer takes its place.
    """

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] != "round" or event["round"] % 6 != 2:
            return
        number = event["round"] // 6
        if number < replaced and (victim := f"{number % 4}.{number // 4}") == name:
            asyncio.get_running_loop().call_soon(lab.crash, victim)
            lab.start(f"{number % 4}.{3 + number // 4}")

    job = staged_job(folder, rounds=rounds, workers=3, least=1, batch=8)
    lab = StageLab(folder, job.replace("every_rounds = 100", "every_rounds = 6"))
    lab.wanted = watch
    run(train(lab, *names(dict.fromkeys(range(4), 3))))
    lab.check_books()
    assert sum(bool(lab.rounds(name)) for name in lab.events if name[-1] > "2") == replaced
    losses, tokens = Counter[int](), Counter[int]()
    for events in lab.events.values():
        for event in events:
            if event["event"] == "eval":
                losses[event["round"]] += event["val_loss"] * event["tokens"]
                tokens[event["round"]] += event["tokens"]
    return {number: losses[number] / tokens[number] for number in sorted(tokens)}


@pytest.mark.thorough
def test_the_loss_bears_that_a_third_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    calm, disturbed = evaluated(tmp_path / "calm", 36, 0), evaluated(tmp_path, 36, 4)
    assert calm[35] < 0.8 * calm[5]  # it learns
    assert disturbed == pytest.approx(calm, rel=0.02)
