"""Workers with forged weights that claim to be rounds ahead are ignored; a worker that was away
catches up."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training import known_workers
from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.known_workers import NEW_S
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import CatchUp, WorkerPosition
from swarmnet_protocols.training.jobs import open_job
from tests.defences import Patch, defence
from tests.support.network.virtual_time import run
from tests.support.training.workers import WorkerLab, train, write_job

LIMIT_S = 300.0
FORGED, CLAIMED, ENOUGH = 0.0666, 300, 9
HONEST = ("anna", "boris", "clara", "dora", "emma")


def forge(lab: WorkerLab, victim: str, name: str) -> None:
    """Give ``name`` the newest checkpoint of ``victim`` with other weights and a later round."""
    job = open_job(lab.sealed)
    saved = CheckpointStore(lab.folder / victim).load_newest(job.id)
    assert saved is not None
    machine = TrainingMachine(lab.folder / "cache", 1 << 33)
    trainer = Trainer.open(lab.files.applied_to(job.job), machine)
    weights = torch.full_like(saved.parameters, FORGED)
    forged = dataclasses.replace(saved, round=CLAIMED, revision=CLAIMED, parameters=weights)
    CheckpointStore(lab.folder / name).save(forged, trainer.write)


def attacked(
    folder: Path, honest: tuple[str, ...], attackers: tuple[str, ...], method: str = "diloco"
) -> WorkerLab:
    """A job of honest workers, which attackers join with a forged checkpoint after a few rounds."""
    exchange = f'min_workers = 2\naggregate = "centered-clip"\nmax_workers = {len(honest) + len(attackers)}'
    toml = write_job(folder, method, "sync_every = 2", exchange, rounds=CLAIMED + 1000)
    toml = toml.replace("max_workers = 8\n", "")
    lab = WorkerLab(folder, toml)

    def watch(name: str, event: dict[str, Any]) -> None:
        if event["event"] != "round" or name in attackers:
            return
        if name == honest[0] and event["round"] == 3:
            for each in attackers:
                forge(lab, name, each)
                lab.start(each)
        if event["round"] >= ENOUGH:
            lab.workers[name].stop()
            if all(max(lab.rounds(each), default=0) >= ENOUGH for each in honest):
                for each in attackers:
                    lab.workers[each].stop()

    lab.observer = watch
    run(train(lab, *honest, limit_s=LIMIT_S))
    return lab


def believe_the_latest(patch: Patch) -> None:
    def latest(_: WorkerPosition, votes: dict[PeerId, WorkerPosition], **__: bool) -> CatchUp:
        position = max(votes.values(), key=lambda each: each.round)
        return CatchUp(position, tuple(peer for peer, each in votes.items() if each == position))

    patch.setattr(known_workers, "catch_up", latest)


@defence(
    "a claim of a later round replaces no worker's weights",
    off=believe_the_latest,
    honest=3,
    attackers=1,
    new_s=0.0,
)
@pytest.mark.parametrize(
    ("honest", "attackers", "new_s"), [(3, 1, 0.0), (5, 3, NEW_S)], ids=["1 of 4", "3 of 8, all new"]
)
def test_claims_of_a_later_round_by_newcomers_are_ignored(
    honest: int, attackers: int, new_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_workers, "NEW_S", new_s)
    liars = tuple(f"mallory-{number}" for number in range(attackers))
    lab = attacked(tmp_path, HONEST[:honest], liars)
    for name in HONEST[:honest]:
        healed = [event for event in lab.events[name] if event["event"] == "healed"]
        assert not [event for event in healed if event["round"] >= CLAIMED]
        assert max(lab.rounds(name)) < CLAIMED
        saved = CheckpointStore(lab.folder / name).load_newest(open_job(lab.sealed).id)
        assert saved is not None
        assert abs(float(saved.parameters.mean()) - FORGED) > FORGED / 2


def test_a_worker_catches_up_after_absence_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    lab = WorkerLab(tmp_path, write_job(tmp_path, "diloco", "sync_every = 2", "min_workers = 2", rounds=14))

    def watch(name: str, event: dict[str, Any]) -> None:
        if name == "anna" and event["event"] == "round":
            if event["round"] == 4:
                lab.crash("clara")
            elif event["round"] == 9:
                lab.start("clara")

    lab.observer = watch
    run(train(lab, *HONEST[:3]))
    lab.check_equal()
    assert max(lab.rounds("clara")) == 13
    aside = [path.name for path in (tmp_path / "clara").glob("before-catch-up-*")]
    assert len(aside) == 1
