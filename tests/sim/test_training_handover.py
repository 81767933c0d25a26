"""Whole workers of a job with a sparse codec, one of which leaves: what it owes goes on with another, or stays its own."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_node.training.checkpoint import CheckpointStore, WorkerCheckpoint
from swarmnet_node.training.replica import ERROR, Replica
from swarmnet_node.training.state import unpack
from swarmnet_protocols.net.memory import Delivery
from swarmnet_protocols.net.protocol_ids import EXCHANGE, HANDOVER, STATE
from swarmnet_protocols.training.jobs import open_job
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.support.deliveries import once
from tests.support.training_workers import WorkerLab, write_job
from tests.support.virtual_time import run

NAMES = ("anna", "boris", "clara", "dora")
LEAVER = "anna"
ROUNDS = 4
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
        self.at_leaving: Callable[[], None] = self._stop
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

    def heir(self) -> str:
        """Who is asked first: whoever comes next."""
        order = sorted(NAMES, key=self.peer)
        return order[(order.index(LEAVER) + 1) % len(order)]

    def at_chunk(self, strike: Callable[[], None]) -> None:
        """``strike`` when the first part of what is handed over arrives at the heir."""

        def is_chunk(delivery: Delivery) -> bool:
            at_heir = delivery.target == self.peer(self.heir()) and bool(self.handed)
            return at_heir and delivery.protocol == STATE and bool(delivery.message.payload)

        once(self.network, is_chunk, lambda _: strike())

    def at_word(self, kind: str, strike: Callable[[], None]) -> None:
        """``strike`` when this word of a leaver, or of an heir to it, arrives."""

        def is_word(delivery: Delivery) -> bool:
            if delivery.protocol != HANDOVER:
                return False
            said = pb.HandOverReply if delivery.target == self.peer(LEAVER) else pb.HandOverRequest
            return said.FromString(delivery.message.header).WhichOneof("kind") == kind

        once(self.network, is_word, lambda _: strike())

    def others(self, *but: str) -> list[str]:
        return [name for name in NAMES if name not in {LEAVER, *but}]

    def event(self, name: str, kind: str) -> dict[str, Any]:
        (event,) = [event for event in self.events[name] if event["event"] == kind]
        return event

    def saved(self, name: str) -> WorkerCheckpoint:
        checkpoint = CheckpointStore(self.folder / name).load_newest(open_job(self.sealed).id)
        assert checkpoint is not None
        return checkpoint

    def check_the_others_went_on(self, *but: str) -> None:
        self.check_equal()
        for name in self.others(*but):
            assert self.events[name][-1] == {
                "event": "done",
                "round": ROUNDS,
                "rounds": ROUNDS,
                "revision": ROUNDS,
            }

    def _stop(self) -> None:
        self.workers[LEAVER].stop()

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
            self.left_s -= now
            self.at_leaving()
        if name == LEAVER and event["event"] == "done":
            self.left_s += now


def owed(replica: Replica) -> torch.Tensor:
    return replica.checkpoint("", 0).outer[ERROR]


def test_who_leaves_hands_over_what_it_owes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.train()

    assert lab.event(LEAVER, "handed_over")["to"] == lab.peer(lab.heir())
    assert lab.event(lab.heir(), "inherited")["from"] == lab.peer(LEAVER)
    ((before, after),) = lab.owed
    assert before.any()
    assert lab.handed[0].any()
    assert torch.equal(after, before + lab.handed[0])
    left = lab.saved(LEAVER)
    assert left.round == 2
    assert not left.outer[ERROR].any(), "it would be delivered twice"
    lab.check_the_others_went_on()
    assert lab.left_s < DEADLINE_S / 3


def test_who_is_killed_hands_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.at_leaving = lambda: lab.crash(LEAVER)
    lab.train()

    assert not lab.handed
    assert not lab.owed
    lab.check_the_others_went_on()


def test_the_next_one_inherits_when_an_heir_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.at_chunk(lambda: lab.crash(lab.heir()))
    lab.train()

    ((before, after),) = lab.owed
    assert torch.equal(after, before + lab.handed[0])
    assert lab.event(LEAVER, "handed_over")["to"] != lab.peer(lab.heir())
    lab.check_the_others_went_on(lab.heir())


def test_an_heir_that_hangs_costs_the_leaver_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch)

    def hang() -> None:
        lab.network.hang(lab.peer(lab.heir()))
        lab.tasks[lab.heir()].cancel()  # it will not end by itself

    lab.at_chunk(hang)
    lab.train()

    assert str(DEADLINE_S) in lab.event(LEAVER, "not_handed_over")["reason"]
    assert not lab.owed
    assert torch.equal(lab.saved(LEAVER).outer[ERROR], lab.handed[0]), "it is still the leaver's"
    assert DEADLINE_S <= lab.left_s < DEADLINE_S + 3
    lab.check_the_others_went_on(lab.heir())


def test_what_an_heir_may_have_got_is_not_delivered_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.at_word("yours", lambda: lab.crash(lab.heir()))
    lab.train()

    assert "may not have taken it" in lab.event(LEAVER, "not_handed_over")["reason"]
    assert not lab.saved(LEAVER).outer[ERROR].any()
    lab.check_the_others_went_on(lab.heir())


def test_who_dies_before_it_forgot_still_owes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)
    lab.at_word("ready", lambda: lab.crash(LEAVER))
    lab.train()

    assert not lab.owed, "the heir was ready and was not told"
    assert torch.equal(lab.saved(LEAVER).outer[ERROR], lab.handed[0])
    lab.check_the_others_went_on()


def test_who_ends_behind_hands_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have got its last contribution, and it cannot know."""
    lab = Lab(tmp_path, monkeypatch)
    watch = lab.observer

    def cut(_: Delivery) -> None:
        lab.network.isolate(lab.peer(LEAVER))
        lab.workers[LEAVER].stop()

    def come_back(name: str, event: dict[str, Any]) -> None:
        watch(name, event)
        if name == LEAVER and event["event"] == "behind":
            lab.network.rejoin(lab.peer(LEAVER))

    def is_second_round(delivery: Delivery) -> bool:
        sends = delivery.source == lab.peer(LEAVER) and bool(delivery.message.payload)
        return sends and delivery.protocol == EXCHANGE and 0 in lab.rounds(LEAVER)

    once(lab.network, is_second_round, cut)
    lab.observer = come_back
    lab.train()

    assert lab.event(LEAVER, "behind")["round"] == 1
    assert not lab.handed
    assert lab.saved(LEAVER).outer[ERROR].any()
    lab.check_the_others_went_on()


def test_workers_that_all_leave_keep_what_they_owe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(tmp_path, monkeypatch)

    def stop_all() -> None:
        for worker in lab.workers.values():
            worker.stop()

    lab.at_leaving = stop_all
    lab.train()

    inherited = sum((after - before for before, after in lab.owed), start=torch.zeros(()))
    kept = torch.stack([lab.saved(name).outer[ERROR] for name in NAMES]).sum(0)
    assert kept.any()
    torch.testing.assert_close(kept, torch.stack(lab.handed).sum(0) - inherited)
    assert lab.left_s < DEADLINE_S
