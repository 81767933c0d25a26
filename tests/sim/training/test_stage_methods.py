"""Workers of stages train with methods that average parameters."""

import asyncio
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from swarmnet_node.training.data.sampler import target_count
from swarmnet_node.training.pipeline.origin import NO_NUMBERS, MicrobatchOrigin, _Step
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import MICROBATCH
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.training.methods import Average
from swarmnet_protocols.training.pipeline.ledger import Accounts, StepEnd, steps_are_over
from tests.support.network.memory_network import Delivery
from tests.support.network.virtual_time import run
from tests.support.training.stages import StageLab, names, staged_job
from tests.support.training.workers import WorkerLab, train

SETTINGS = {
    "diloco": "sync_every = 4",
    "streaming": "sync_every = 8\nfragments = 2\noverlap_steps = 2",
    "sparseloco": "sync_every = 4",
    "noloco": "sync_every = 4",
}


def one_process(job: Job, folder: Path, rounds: int) -> tuple[list[float], tuple[float, int]]:
    """The losses of one worker with the whole model, and its evaluation at the end."""
    trainer = Trainer.open(job, TrainingMachine(folder / "cache", 1 << 33))
    replica = Replica(job, trainer)
    losses = []
    for number in range(rounds):
        losses.append(replica.steps(number, 0, 0, replica.method.steps_per_round).loss)
        difference = replica.method.contribution(number, trainer.view())
        replica.apply(number, Average(difference.clone(), ("me",)))
    return losses, replica.evaluate()


def test_diloco_in_stages_trains_like_one_process(tmp_path: Path) -> None:
    toml = staged_job(tmp_path, method="diloco", settings="sync_every = 3", rounds=3)
    lab = StageLab(tmp_path, toml.replace("every_rounds = 100", "every_rounds = 3"))
    run(train(lab, *names(dict.fromkeys(range(4), 1))))

    losses, (val_loss, tokens) = one_process(lab.files.applied_to(open_job(lab.sealed).job), tmp_path, 3)
    assert list(lab.losses().values()) == pytest.approx(losses, rel=1e-5)
    evaluations = [event for events in lab.events.values() for event in events if event["event"] == "eval"]
    assert [event["tokens"] for event in evaluations] == [tokens]
    assert evaluations[0]["val_loss"] == pytest.approx(val_loss, rel=1e-5)


def test_an_evaluation_sends_few_microbatches_at_once() -> None:
    """Each has a deadline, which it would miss behind all others."""
    workers = Mock(of=lambda stage: ["1.0"] if stage else [])
    origin = MicrobatchOrigin(Mock(stages=2, workers=workers), Mock(), Mock(), Mock(), batch=2)
    step, under_way, most = _Step(1, NO_NUMBERS, is_evaluation=True), set[int](), list[int]()
    step.begin(dict.fromkeys(range(32), torch.zeros(1)))

    async def bring(number: int) -> None:
        under_way.add(number)
        most.append(len(under_way))
        await asyncio.sleep(1.0)
        under_way.discard(number)

    run(origin._all_of(step, bring))
    assert max(most) == 8  # two for each of two workers, and four


def test_a_worker_tells_when_an_evaluation_had_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    travel = MicrobatchOrigin._travel

    async def lost(origin: MicrobatchOrigin, step: Any, *rest: Any) -> Any:
        if step.is_evaluation:
            await asyncio.sleep(1e6)
        return await travel(origin, step, *rest)

    monkeypatch.setattr(MicrobatchOrigin, "_travel", lost)
    toml = staged_job(tmp_path, rounds=1, stages=2)
    lab = StageLab(tmp_path, toml.replace("every_rounds = 100", "every_rounds = 1"))
    run(train(lab, "0.0", "1.0"))

    told = [event["text"] for event in lab.events["0.0"] if event["event"] == "notice"]
    assert len(told) == 1
    assert "round 0 has no validation loss" in told[0]
    assert all(events[-1]["event"] == "done" for events in lab.events.values())


def test_origins_divide_the_held_out_data(tmp_path: Path) -> None:
    job = StageLab(tmp_path, staged_job(tmp_path, stages=2))
    machine = TrainingMachine(tmp_path / "cache", 1 << 33)
    trainer = StageTrainer.open(job.files.applied_to(open_job(job.sealed).job), 0, machine)
    parts = [trainer.held_out(place, 3) for place in range(3)]
    everything = trainer.held_out(0, 1)

    assert sum(map(len, parts)) == len(everything)
    assert sum(target_count(batch) for each in parts for _, batch in each) == sum(
        target_count(batch) for _, batch in everything
    )
    assert {batch.shape for _, batch in everything} == {(2, 17)}


@pytest.mark.matrix
@pytest.mark.parametrize("method", SETTINGS)
def test_a_method_loses_nothing_in_stages(method: str, tmp_path: Path) -> None:
    """The loss of two stages with two workers each is near that of two workers of whole models."""
    job = staged_job(tmp_path, method=method, settings=SETTINGS[method], rounds=4, stages=2, workers=2)
    lab = StageLab(tmp_path, job)
    run(train(lab, *names({0: 2, 1: 2})))
    whole = WorkerLab(tmp_path, re.sub(r"\[stages\]\n.*\n.*\n", "", job))
    run(train(whole, "one", "two"))

    last = [whole.rounds(name)[3]["loss"] for name in ("one", "two")]
    assert lab.losses()[3] == pytest.approx(sum(last) / 2, rel=0.03)
    if method != "noloco":
        for stage in range(2):
            assert len({lab.rounds(f"{stage}.{n}")[3]["params_hash"] for n in range(2)}) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["0.0", "1.0"])
def test_a_stage_goes_on_without_a_dead_worker(victim: str, tmp_path: Path) -> None:
    job = staged_job(
        tmp_path, method="diloco", settings="sync_every = 4", rounds=4, stages=3, workers=2, least=1
    )
    lab = StageLab(tmp_path, job)
    everybody = names(dict.fromkeys(range(3), 2))

    def kill(delivery: Delivery) -> None:
        is_its = lab.peer(victim) in (delivery.source, delivery.target)
        is_now = delivery.protocol.id == MICROBATCH.id and bool(lab.rounds("2.0"))
        if is_its and is_now and not lab.tasks[victim].cancelling():
            lab.crash(victim)

    lab.network.observers.append(kill)
    run(train(lab, *everybody))

    assert lab.tasks[victim].cancelled()
    for name in set(everybody) - {victim}:
        assert lab.events[name][-1]["event"] == "done"
        assert lab.events[name][-1]["round"] == 4
    losses = lab.losses()
    assert losses[3] < losses[0]


def test_a_round_ends_when_its_origins_say_so() -> None:
    one, two = PeerId("one"), PeerId("two")
    here, end = Accounts({one: {}, two: {}}), StepEnd((one,), 9)
    told = {3: here}
    here.ends[one] = end
    assert not steps_are_over(told, 3)
    here.lost.add(two)  # its conversation broke
    assert steps_are_over(told, 3)
    here.lost.add(one)  # it has ended the round before
    assert steps_are_over(told, 3)
    assert not steps_are_over(told, 4)
    told[5] = Accounts({two: {}}, {two: end})
    assert steps_are_over(told, 4)
