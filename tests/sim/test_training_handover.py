"""Whole workers of a job with a sparse codec, one of which leaves: what it owes goes on with another, or stays its own."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import Checkpoint, Checkpoints
from swarmnet_node.training.replica import ERROR, Replica
from swarmnet_node.training.state import unpack
from swarmnet_protocols.protocol_ids import HANDOVER, STATE
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.transport.memory import Delivery
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.support.training_workers import WorkerLab, write_job
from tests.support.virtual_time import run

NAMES = ("anna", "boris", "clara")
LEAVER = "anna"
ROUNDS = 6
DEADLINE_S = 15


class Lab(WorkerLab):
    """Workers, of which ``LEAVER`` stops after its second round; and what was handed over and inherited."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        exchange = 'min_workers = 2\ncodec = "topk"'
        super().__init__(folder, write_job(folder, "diloco", "sync_every = 2", exchange, rounds=ROUNDS))
        self.observer = self._watch
        self.handed: list[torch.Tensor] = []
        self.owed: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What an heir owed before and after it inherited."""
        self.left_s = 0.0
        pack_owed, inherit = Replica.pack_owed, Replica.inherit

        def noted_pack(replica: Replica) -> Any:
            packed = pack_owed(replica)
            self.handed.append(unpack(bytearray().join(packed))[ERROR].clone())
            return packed

        def noted_inherit(replica: Replica, error: torch.Tensor) -> None:
            before = owed(replica)
            inherit(replica, error)
            self.owed.append((before, owed(replica)))

        monkeypatch.setattr(Replica, "pack_owed", noted_pack)
        monkeypatch.setattr(Replica, "inherit", noted_inherit)

    def train(self) -> None:
        run(self._train())

    def name_of(self, peer: str) -> str:
        return next(name for name in NAMES if self.peer(name) == peer)

    def event(self, name: str, kind: str) -> dict[str, Any]:
        (event,) = [event for event in self.events[name] if event["event"] == kind]
        return event

    def saved(self, name: str) -> Checkpoint:
        checkpoint = Checkpoints(self.folder / name).load_newest(open_job(self.sealed).id)
        assert checkpoint is not None
        return checkpoint

    def check_the_others_went_on(self, *names: str) -> None:
        self.check_equal()
        for name in names:
            assert self.events[name][-1] == {"event": "done", "round": ROUNDS, "revision": ROUNDS}

    async def _train(self) -> None:
        try:
            async with asyncio.timeout(1000):
                for name in NAMES:
                    self.start(name)
                await self.finished()
        finally:
            await self.close()

    def _watch(self, name: str, event: dict[str, Any]) -> None:
        now = asyncio.get_running_loop().time()
        if name == LEAVER and event["event"] == "round" and event["round"] == 1:
            self.workers[LEAVER].stop()
            self.left_s -= now
        if name == LEAVER and event["event"] == "done":
            self.left_s += now


def owed(replica: Replica) -> torch.Tensor:
    return replica.checkpoint("", 0).outer[ERROR]


def test_who_leaves_hands_over_what_it_owes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.train()

    handed = lab.event(LEAVER, "handed_over")
    heir = lab.name_of(handed["heir"])
    assert lab.event(heir, "inherited")["peer_id"] == lab.peer(LEAVER)
    ((before, after),) = lab.owed
    assert before.any()
    assert lab.handed[0].any()
    assert torch.equal(after, before + lab.handed[0])
    left = lab.saved(LEAVER)
    assert left.round == 2
    assert not left.outer[ERROR].any(), "it would be delivered twice"
    lab.check_the_others_went_on(*(name for name in NAMES if name != LEAVER))
    assert lab.left_s < DEADLINE_S / 3
