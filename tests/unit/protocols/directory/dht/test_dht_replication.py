"""The peers that store a record: the nearest that answer, in one call to each, and looked up no
more often than needed."""

import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.catalog import CatalogModel, made_jobs, model_announcer
from swarmnet_protocols.directory.records import Publisher, dht_keys
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.job_records import JOB_LIFETIME_S
from tests.defences import Patch, defence, nothing
from tests.support.network.virtual_time import run

SWARM = bytes(32)
ALICE = Identity.from_seed(b"alice")
EPOCH = 1_800_000_000.0


class Neighbourhood:
    """A stand-in for hivemind's ``DHTNode``: peers 0, 1, 2 ..., of which 0 is this peer, and the
    peers that answer.

    Which of them are near to a key depends on the key.
    """

    def __init__(self, size: int, clock: Clock) -> None:
        from hivemind.dht.routing import DHTID
        from hivemind.utils import MSGPackSerializer

        from swarmnet_protocols.directory.dht.storage import BoundedStorage, StorageLimits

        self.stored = {number: BoundedStorage(StorageLimits(), clock) for number in range(size)}

        self.ids = {number: DHTID.generate(source=b"%d" % number) for number in range(size)}
        self.peer_id = 0
        self.protocol = self.storage = self
        self.serializer = MSGPackSerializer
        self.searches = 0
        self.silent = set[int]()
        self.full = set[int]()
        self.routing_table = SimpleNamespace(uid_to_peer_id=dict(enumerate(self.ids)))
        self.calls: list[tuple[int, tuple[Any, ...]]] = []
        """The peers that were asked to store, and the keys."""

    async def find_nearest_nodes(self, queries: list[Any]) -> dict[Any, dict[Any, int]]:
        self.searches += 1
        return {query: {self.ids[peer]: peer for peer in self.nearest(query)} for query in queries}

    def nearest(self, key: Any) -> list[int]:
        return sorted(self.ids, key=lambda peer: key.xor_distance(self.ids[peer]))

    def store(self, key: Any, value: bytes, expires_at: float, *, subkey: bytes) -> bool:
        assert subkey == ALICE.public_key
        self.calls.append((self.peer_id, (key,)))
        return self.stored[self.peer_id].store(key, value, expires_at, subkey)

    async def call_store(
        self, peer: int, keys: list[Any], values: list[bytes], expires_at: float, subkeys: list[bytes]
    ) -> list[bool] | None:
        assert len(keys) == len(values) == len(subkeys)
        assert set(subkeys) == {ALICE.public_key}
        self.calls.append((peer, tuple(keys)))
        if peer in self.silent:
            return None
        return [
            peer not in self.full and self.stored[peer].store(key, value, expires_at, subkey)
            for key, value, subkey in zip(keys, values, subkeys, strict=True)
        ]

    def kept(self) -> dict[Any, set[int]]:
        """For each key, the peers that were asked to store since the last call, and answered."""
        kept: dict[Any, set[int]] = {}
        for peer, keys in self.calls:
            for key in keys:
                kept.setdefault(key, set()).update({peer} - self.silent - self.full)
        self.calls.clear()
        return kept


class Keeping:
    """Alice's records and her neighbourhood."""

    def __init__(self, size: int) -> None:
        self.now = EPOCH
        self.near = Neighbourhood(size, lambda: self.now)
        self.start_again()

    async def publish(self, topic: str = "topic") -> None:
        await self.announce(Announcement(topic, b"", 60.0))

    async def announce(self, each: Announcement) -> None:
        sealed = self._publisher.seal(each.topic, each.body, lifetime_s=each.lifetime_s)
        await self._replicator.store(*sealed)

    def start_again(self) -> None:
        """Begin as a new process with Alice's key. The peers keep her records."""
        from swarmnet_protocols.directory.dht.replication import Replicator

        self._publisher = Publisher(ALICE, SWARM, lambda: self.now)
        self._replicator = Replicator(self.near, lambda: self.now)

    def wanted(self, replicas: int = 5) -> dict[Any, set[int]]:
        """For each key, the nearest peers that answer."""
        from hivemind.dht.routing import DHTID

        keys = [DHTID.generate(source=key) for key in dht_keys(SWARM, "topic")]
        return {
            key: set(
                [peer for peer in self.near.nearest(key) if peer not in self.near.silent | self.near.full][
                    :replicas
                ]
            )
            for key in keys
        }


def with_peers(size: int, scenario: Callable[[Keeping], Awaitable[None]]) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    run(scenario(Keeping(size)))


def test_the_nearest_five_keep_a_record_and_are_asked_once() -> None:
    async def scenario(keeping: Keeping) -> None:
        await keeping.publish()
        asked = [peer for peer, _ in keeping.near.calls if peer != keeping.near.peer_id]
        assert len(asked) == len(set(asked))
        wanted = keeping.wanted()
        assert len(set(map(frozenset, wanted.values()))) > 1, "or one place would do"
        assert keeping.near.kept() == wanted

    with_peers(30, scenario)


def test_with_fewer_peers_all_of_them_keep_a_record() -> None:
    async def scenario(keeping: Keeping) -> None:
        await keeping.publish()
        assert [len(peers) for peers in keeping.near.kept().values()] == [3, 3, 3]

    with_peers(3, scenario)


def test_a_lone_peer_keeps_its_own_records() -> None:
    async def scenario(keeping: Keeping) -> None:
        await keeping.publish()
        assert keeping.near.kept() == keeping.wanted()

    with_peers(1, scenario)


def test_the_next_nearest_peers_replace_silent_ones() -> None:
    async def scenario(keeping: Keeping) -> None:
        [first, *_] = keeping.wanted()
        keeping.near.silent = set(keeping.near.nearest(first)[:12]) - {keeping.near.peer_id}
        await keeping.publish()
        asked = [peer for peer, _ in keeping.near.calls]
        assert all(asked.count(peer) == 1 for peer in keeping.near.silent), "each costs a timeout"
        assert keeping.near.kept() == keeping.wanted()

    with_peers(30, scenario)


def test_replicas_are_looked_up_once_a_minute_while_all_answer() -> None:
    from swarmnet_protocols.directory.dht.replication import FOUND_S

    async def scenario(keeping: Keeping) -> None:
        kept, searches = [], []
        for _ in range(2 * round(FOUND_S / 15)):
            await keeping.publish()
            kept.append(keeping.near.kept())
            searches.append(keeping.near.searches)
            keeping.now += 15.0
        assert searches == [1, 1, 1, 1, 2, 2, 2, 2]
        assert all(one == other for one, other in pairwise(kept))

    with_peers(30, scenario)


def test_a_silent_replica_is_replaced_at_the_next_publication(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(keeping: Keeping) -> None:
        await keeping.publish()
        keeping.near.calls.clear()
        gone = next(iter(next(iter(keeping.wanted().values())) - {keeping.near.peer_id}))
        keeping.near.silent = {gone}
        await keeping.publish()
        assert keeping.near.searches == 2
        assert keeping.near.kept() == keeping.wanted()
        assert not caplog.records, "the replicas that are left keep the record"

    with_peers(30, scenario)


def test_a_silent_peer_is_asked_again_at_the_next_publication() -> None:
    """While the link was down, lookups found only this peer."""

    async def scenario(keeping: Keeping) -> None:
        await keeping.publish()
        keeping.near.silent = {1, 2}
        await keeping.publish()
        keeping.near.silent = set()
        keeping.near.calls.clear()
        await keeping.publish()
        assert keeping.near.kept() == keeping.wanted()

    with_peers(3, scenario)


def test_a_peer_that_was_alone_looks_for_others_at_its_next_record() -> None:
    async def scenario(keeping: Keeping) -> None:
        others = {peer: keeping.near.ids.pop(peer) for peer in (1, 2)}
        await keeping.publish()
        assert keeping.near.kept() == keeping.wanted()
        keeping.near.ids |= others
        await keeping.publish()
        assert keeping.near.kept() == keeping.wanted()

    with_peers(3, scenario)


def test_topics_of_long_ago_are_forgotten() -> None:
    async def scenario(keeping: Keeping) -> None:
        for number in range(100):
            await keeping.publish(f"round {number}")
            keeping.now += 15.0
        assert len(keeping._replicator._found) <= 5

    with_peers(3, scenario)


def count_all_as_stored(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht.replication import Replicator

    call = Replicator._call

    async def kept(self: Replicator, peer: object, keys: list[object], *rest: object) -> list[bool]:
        await call(self, peer, keys, *rest)  # type: ignore[arg-type]
        return [True] * len(keys)

    patch.setattr(Replicator, "_call", kept)


@defence("another peer stores what a full one refused", off=count_all_as_stored)
def test_a_full_peer_is_replaced_by_the_next_nearest() -> None:
    async def scenario(keeping: Keeping) -> None:
        keeping.near.full = set(range(0, 30, 2)) - {keeping.near.peer_id}
        await keeping.publish()
        assert keeping.near.kept() == keeping.wanted()

    with_peers(30, scenario)


def test_a_publisher_whose_records_are_not_stored_learns_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(keeping: Keeping) -> None:
        keeping.near.full = set(range(1, 30))
        for _ in range(3):
            await keeping.publish()
        assert [record.message.partition(":")[0] for record in caplog.records] == [
            "no other peer stores the record of topic",
            "peers have no room for the record of topic",
        ]
        keeping.near.full = set()
        await keeping.publish()
        assert "again" in caplog.records[-1].message

    with_peers(30, scenario)


def count_no_refusals(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht.replication import Replicator

    patch.setattr(Replicator, "_log_shortage", nothing)


@defence("a peer learns that its records are refused", off=count_no_refusals)
def test_a_publisher_whom_few_peers_store_counts_and_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(keeping: Keeping) -> None:
        keeping.near.full = set(range(3, 30))
        await keeping.publish()
        assert keeping._replicator.refused == 3 * 27, "three keys"
        assert keeping._replicator.is_short
        await keeping.publish()
        assert [record.message.partition(":")[0] for record in caplog.records] == [
            "peers have no room for the record of topic"
        ]
        keeping.near.full = set()
        keeping.near.calls.clear()
        refused = keeping._replicator.refused
        await keeping.publish()
        assert keeping.near.kept() == keeping.wanted()
        assert keeping._replicator.refused == refused
        assert not keeping._replicator.is_short
        assert "again" in caplog.records[-1].message

    with_peers(30, scenario)


def test_a_machine_that_made_a_job_can_list_the_model_it_hosts() -> None:
    """A young swarm of three: every peer stores both records of the machine."""

    async def scenario(keeping: Keeping) -> None:
        await keeping.announce(made_jobs(["05" * 32], JOB_LIFETIME_S))
        keeping.start_again()
        keeping.now += 2.0
        directory: Any = SimpleNamespace()  # composing an entry does not read it
        model = CatalogModel(bytes(32), "org/model", 8)
        for entry in model_announcer(directory, random.Random(0), model).compose():
            await keeping.announce(entry)
        assert keeping._replicator.refused == 0
        assert not keeping._replicator.is_short

    with_peers(3, scenario)
