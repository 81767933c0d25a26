"""What a peer reads of the hosts of a model: all in a small swarm, a bounded random sample in a
large one, and the hosts of certain blocks."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import count

from swarmnet_protocols.directory import host_announcements
from swarmnet_protocols.directory.host_announcements import (
    MAX_KNOWN,
    PROTOCOL,
    REDRAW_S,
    SHARDS,
    WANTED,
    HostSample,
    hosts_topic,
)
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, replacing

MANIFEST, SWARM, EPOCH = bytes(range(32)), bytes(32), 1_800_000_000.0
BLOCKS, LENGTH = 80, 10


class Shelves:
    """A directory that counts the records that are read. Its samples are honest."""

    swarm = SWARM
    refused = 0

    def __init__(self, hosts: Collection[Record], seed: int = 0) -> None:
        self.now = EPOCH
        self.read_topics: list[str] = []
        self.read_records = 0
        self._shelves: dict[str, list[Record]] = defaultdict(list)
        self._rng = random.Random(seed)
        for each in hosts:
            self.put(each)

    def put(self, record: Record) -> None:
        kept = [each for each in self._shelves[record.topic] if each.signer != record.signer]
        self._shelves[record.topic] = [*kept, record]

    def clock(self) -> float:
        return self.now

    def warning(self) -> str:
        return ""

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        raise NotImplementedError

    async def lookup(self, topic: str) -> Sequence[Record]:
        raise NotImplementedError

    async def sample(
        self, topics: Collection[str], most: int, *, blocks: tuple[int, int] | None = None, copies: int = 1
    ) -> Sequence[Record]:
        self.read_topics += topics
        found: list[Record] = []
        for topic in topics:
            kept = [each for each in self._shelves[topic] if blocks is None or has_block(each, blocks)]
            found += self._rng.sample(kept, min(most, len(kept)))
        self.read_records += len(found)
        return found


def has_block(record: Record, blocks: tuple[int, int]) -> bool:
    body = pb.HostRecord.FromString(record.body)
    return body.start < blocks[1] and blocks[0] < body.end


def announcement(signer: Identity, start: int = 0, end: int = LENGTH, sequence: int = 1) -> Record:
    body = pb.HostRecord(
        manifest=MANIFEST, start=start, end=end, state=pb.HOST_STATE_ONLINE, protocol=PROTOCOL, step_s=0.1
    )
    topic = hosts_topic(MANIFEST, signer.peer_id)
    return Record(SWARM, topic, signer.public_key, sequence, EPOCH + 45.0, body.SerializeToString())


def hosts(number: int) -> list[Record]:
    """``number`` hosts of ten blocks each, none of which has the last ten."""
    return [
        announcement(Identity.from_seed(b"%d" % each), start, start + LENGTH)
        for each in range(number)
        for start in [each % 7 * LENGTH]
    ]


def refresh(sample: HostSample, blocks: tuple[int, int] | None = None) -> list[HostInfo]:
    return asyncio.run(sample.refresh(blocks=blocks))


def test_every_host_of_a_small_swarm_is_known() -> None:
    for number in (0, 1, 5, 60):
        found = refresh(HostSample(Shelves(hosts(number)), MANIFEST, random.Random(number)))
        assert len(found) == number


@defence(
    "a refresh reads a bounded number of announcements",
    off=replacing(host_announcements.HostSample.__init__, "__kwdefaults__", {"wanted": 1 << 20}),
)
def test_a_refresh_in_a_large_swarm_reads_few_topics_and_records() -> None:
    shelves = Shelves(hosts(3000))
    for seed in range(20):
        shelves.read_topics, shelves.read_records = [], 0
        assert len(refresh(HostSample(shelves, MANIFEST, random.Random(seed)))) >= WANTED
        assert len(shelves.read_topics) <= 3
        assert shelves.read_records <= 2 * WANTED


def test_each_host_is_read_as_often_as_others_whatever_its_peer_id() -> None:
    """3000 hosts, 200 readers of 96: each host is read by 6.4 on average, and by 24 with a chance
    of one in a million."""
    shelves = Shelves(hosts(3000))
    reads = Counter(
        each.peer
        for seed in range(200)
        for each in refresh(HostSample(shelves, MANIFEST, random.Random(seed)))
    )
    assert max(reads.values()) < 24
    assert len(reads) > 2500


def test_one_of_a_few_hosts_of_a_block_is_found_in_a_large_swarm() -> None:
    rare = Identity.from_seed(b"rare")
    shelves = Shelves([*hosts(3000), announcement(rare, 75, 80)])
    sample = HostSample(shelves, MANIFEST, random.Random(0))
    refresh(sample)
    shelves.read_records = 0
    assert rare.peer_id in {each.peer for each in refresh(sample, (78, 79))}
    assert shelves.read_records == 1


def test_a_host_is_known_by_its_newest_valid_announcement() -> None:
    signer = Identity.from_seed(b"0")
    shelves = Shelves([announcement(signer, 0, 10)])
    sample = HostSample(shelves, MANIFEST, random.Random(0))
    assert [each.start for each in refresh(sample)] == [0]
    shelves.put(announcement(signer, 20, 30, sequence=2))
    assert [each.start for each in refresh(sample)] == [20]
    shelves.put(announcement(signer, 0, 10))
    assert [each.start for each in refresh(sample)] == [20], "a replica has the older one"
    shelves.now += 46.0
    assert sample.known == []


def test_more_hosts_become_known_with_every_refresh() -> None:
    sample = HostSample(Shelves(hosts(3000)), MANIFEST, random.Random(0))
    known = [len(refresh(sample)) for _ in range(6)]
    assert known[5] > 2 * known[0]


@defence("a reader knows a bounded number of hosts", off=replacing(host_announcements, "MAX_KNOWN", 1 << 20))
def test_a_bounded_number_of_hosts_is_known() -> None:
    sample = HostSample(Shelves(hosts(3000)), MANIFEST, random.Random(0), wanted=2000)
    assert len(refresh(sample)) <= MAX_KNOWN


def test_other_shards_are_read_after_a_while() -> None:
    shelves = Shelves(hosts(3000))
    sample = HostSample(shelves, MANIFEST, random.Random(0))
    for _ in range(3):
        refresh(sample)
    assert len(set(shelves.read_topics)) <= 3, (
        "finding the peers that store a shard costs more than reading it"
    )
    for _ in range(60):
        shelves.now += REDRAW_S
        shelves.put(announcement(Identity.from_seed(b"any")))
        refresh(sample)
    assert len(set(shelves.read_topics)) == SHARDS


def test_hosts_are_spread_evenly_over_the_shards() -> None:
    sizes = Counter(hosts_topic(MANIFEST, each.peer_id) for each in hosts(3000))
    assert len(sizes) == SHARDS
    assert max(sizes.values()) < 1.5 * 3000 / SHARDS


def test_a_reader_takes_a_bounded_number_of_turns_at_silent_replicas() -> None:
    turns = count()

    class Silent(Shelves):
        async def sample(self, *_: object, **__: object) -> Sequence[Record]:
            next(turns)
            return []

    assert refresh(HostSample(Silent([]), MANIFEST, random.Random(0))) == []
    assert next(turns) <= SHARDS
