"""Samples: read from single replicas, drawn at random, with few calls."""

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from swarmnet_protocols.directory.records import MAX_RECORD_BYTES
from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import Patch, defence
from tests.support.network.virtual_time import run
from tests.unit.protocols.directory.dht.test_dht_replication import EPOCH, SWARM, Neighbourhood

TOPICS = [f"hosts/x/{shard}" for shard in range(16)]


class Reading:
    """A reader among ``size`` peers, each of which answers every key with one record: its number
    and the key."""

    def __init__(self, size: int) -> None:
        from swarmnet_protocols.directory.dht.sampling import RecordSampler

        self.near = Neighbourhood(size, lambda: self.now)
        self.near.p2p = SimpleNamespace(call_protobuf_handler=self._answer)  # type: ignore[attr-defined]
        self.now = EPOCH
        self.calls: list[int] = []
        self.more = 1
        self.record = b""
        self.sampler = RecordSampler(self.near, SWARM, lambda: self.now)

    async def read(self, topics: list[str], copies: int = 1) -> list[bytes]:
        return await self.sampler.read(topics, 1, copies=copies)

    async def _answer(
        self, peer: int, _name: str, request: pb.SampleRequest, _type: object
    ) -> pb.SampleReply:
        self.calls.append(peer)
        if peer in self.near.silent:
            raise Unreachable("silent")
        records = [self.record or b"%d " % peer + key for key in request.keys for _ in range(self.more)]
        return pb.SampleReply(samples=[pb.Sample(records=records)])


def with_reader(size: int, scenario: Callable[[Reading], Awaitable[None]]) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    run(scenario(Reading(size)))


def keys_of(records: list[bytes]) -> set[bytes]:
    return {record.partition(b" ")[2] for record in records}


def test_every_topic_is_read_once_from_few_peers_in_a_small_swarm() -> None:
    async def scenario(reading: Reading) -> None:
        assert len(keys_of(await reading.read(TOPICS))) == len(TOPICS)
        assert len(reading.calls) == 1, "each of four other peers stores all records"
        assert len(keys_of(await reading.read(TOPICS, copies=2))) == 2 * len(TOPICS)

    with_reader(5, scenario)


def sample_all_keys(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import sampling as dht_sampling

    patch.setattr(
        dht_sampling.random.SystemRandom,
        "sample",
        lambda _, found, count: list(found)[:count],
    )


@defence("no peer hides a record from many reads: the key is drawn at random", off=sample_all_keys)
def test_the_replica_and_the_key_are_drawn_at_random() -> None:
    """So that no peer hides a record from many reads."""

    async def scenario(reading: Reading) -> None:
        found = [record for _ in range(60) for record in await reading.read(TOPICS[:1])]
        assert len(keys_of(found)) == 3
        assert len(set(reading.calls)) >= 9

    with_reader(30, scenario)


def test_a_silent_replica_is_replaced_and_not_asked_again_soon() -> None:
    from swarmnet_protocols.directory.dht.sampling import ATTEMPTS

    async def scenario(reading: Reading) -> None:
        await reading.read(TOPICS[:1], copies=3)
        places = list(reading.sampler._places.values())
        reading.near.silent = {place.left[0] for place in places[: ATTEMPTS - 1]}
        reading.calls.clear()
        for _ in range(200):
            await reading.read(TOPICS[:1])
        asked = [peer for peer in reading.calls if peer in reading.near.silent]
        assert len(asked) <= 3 * (ATTEMPTS - 1), "at each key once"
        reading.calls.clear()
        assert asked
        reading.near.silent = set()
        reading.now += 61.0
        assert await reading.read(TOPICS[:1])

    with_reader(30, scenario)


def test_the_replicas_of_a_topic_are_looked_up_once_a_minute() -> None:
    async def scenario(reading: Reading) -> None:
        for _ in range(50):
            await reading.read(TOPICS[:1])
        assert reading.near.searches <= 3, "one for each key"
        reading.now += 61.0
        await reading.read(TOPICS[:1])
        assert reading.near.searches <= 4

    with_reader(30, scenario)


def check_no_sample(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import sampling as dht_sampling

    patch.setattr(
        dht_sampling,
        "_checked",
        lambda reply, *_: [record for sample in reply.samples for record in sample.records],
    )


@defence("a sample has no more records than were asked for", off=check_no_sample)
def test_an_answer_with_more_than_was_asked_for_is_dropped() -> None:
    async def scenario(reading: Reading) -> None:
        reading.more = 2
        assert await reading.read(TOPICS) == []
        reading.more, reading.record = 1, bytes(MAX_RECORD_BYTES + 1)
        assert await reading.read(TOPICS) == []

    with_reader(5, scenario)


def test_a_lone_peer_reads_what_it_stores_itself() -> None:
    async def scenario(reading: Reading) -> None:
        drawn: list[Any] = []

        def draw(request: pb.SampleRequest) -> pb.SampleReply:
            drawn.extend(request.keys)
            return pb.SampleReply(samples=[pb.Sample(records=[b"own"])])

        reading.near.draw = draw  # type: ignore[attr-defined]
        assert await reading.read(TOPICS[:1]) == [b"own"]
        assert len(drawn) == 1

    with_reader(1, scenario)


def sampled(size_bytes: int) -> list[bytes]:
    """The answer of a peer with 300 records of this size to a caller who wants a million."""
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    from swarmnet_protocols.directory.dht.node import SwarmDirectoryV1
    from swarmnet_protocols.directory.dht.storage import BoundedStorage, StorageLimits

    protocol = SwarmDirectoryV1.__new__(SwarmDirectoryV1)
    protocol.storage = BoundedStorage(StorageLimits(), lambda: EPOCH)
    key = DHTID.generate(source=b"key")
    for number in range(300):
        value = MSGPackSerializer.dumps(bytes(size_bytes))
        assert protocol.storage.store(key, value, EPOCH + 60, subkey=b"%d" % number)
    reply = protocol.draw(pb.SampleRequest(keys=[key.to_bytes()], most=1_000_000))
    return [record for sample in reply.samples for record in sample.records]


def sample_without(limit: str) -> Callable[[Patch], None]:
    def switch_off(patch: Patch) -> None:
        from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

        prepare_hivemind()
        from swarmnet_protocols.directory.dht import node as dht_node

        patch.setattr(dht_node, limit, 1 << 30)

    return switch_off


@defence("a peer sends a bounded number of records", off=sample_without("MAX_SAMPLE"))
def test_a_peer_sends_a_bounded_number_of_records() -> None:
    assert len(sampled(10)) == 256


@defence("a peer sends records of a bounded size", off=sample_without("MAX_SAMPLE_BYTES"))
def test_a_peer_sends_records_of_a_bounded_size() -> None:
    assert sum(map(len, sampled(4000))) <= 256 << 10
