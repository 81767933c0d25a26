"""Announcements of routed experts, how owners name experts, and which ones a joining peer
chooses."""

import asyncio
import tracemalloc
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_node.experts.expert_choice import choose_experts
from swarmnet_protocols.directory import expert_announcements
from swarmnet_protocols.directory.expert_announcements import (
    MAX_EXPERT_BLOCKS,
    MAX_EXPERTS,
    MAX_KNOWN,
    ExpertBits,
    ExpertSample,
    experts_topic,
    format_experts,
    from_bits,
    parse_experts,
    read_expert_host,
    to_bits,
)
from swarmnet_protocols.directory.host_announcements import PROTOCOL
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, replacing

COUNTS = dict.fromkeys(range(1, 8), 32)
MANIFEST = bytes(range(32))
EXPERTS = st.dictionaries(
    st.sampled_from(sorted(COUNTS)), st.frozensets(st.integers(0, 31), min_size=1), min_size=1
)


@given(EXPERTS)
def test_experts_are_parsed_as_they_are_written(experts: dict[int, frozenset[int]]) -> None:
    assert parse_experts(format_experts(experts), COUNTS) == experts
    assert {block: from_bits(to_bits(chosen)) for block, chosen in experts.items()} == experts


def test_blocks_and_experts_are_named_alone_as_ranges_or_all() -> None:
    assert parse_experts("3:0-2,9", COUNTS) == {3: {0, 1, 2, 9}}
    assert parse_experts("1-2:5; 2:6", COUNTS) == {1: {5}, 2: {5, 6}}
    assert parse_experts("all:all", COUNTS) == {block: {*range(32)} for block in COUNTS}
    assert (
        format_experts({1: frozenset({0, 1, 5}), 2: frozenset({0, 1, 5}), 4: frozenset({2})})
        == "1-2:0-1,5;4:2"
    )


@pytest.mark.parametrize("text", ["", "3", "3:", ":1", "3:2-1", "3:x", "x:1", "-1:0", "3:0-", "3:1;"])
def test_other_text_names_no_experts(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_experts(text, COUNTS)


def test_experts_that_the_model_does_not_have_are_named() -> None:
    with pytest.raises(ConfigError, match="block 0 has no routed experts") as raised:
        parse_experts("0:1", COUNTS)
    assert "1-7" in raised.value.hint
    with pytest.raises(ConfigError, match="block 3 has no expert 32"):
        parse_experts("3:30-40", COUNTS)


def announcement(**changes: object) -> Record:
    body = pb.ExpertsRecord(
        manifest=MANIFEST,
        state=pb.HOST_STATE_ONLINE,
        protocol=PROTOCOL,
        blocks=[pb.BlockExperts(block=1, experts=b"\x05"), pb.BlockExperts(block=3, experts=b"\x80")],
        row_s=0.5,
        precision="q4_k",
    )
    for name, value in changes.items():
        if name == "blocks":
            del body.blocks[:]
            body.blocks.extend(value)  # type: ignore[arg-type]
        else:
            setattr(body, name, value)
    return Record(bytes(32), experts_topic(MANIFEST), bytes(32), 1, 2.0, body.SerializeToString())


def test_an_announcement_says_which_experts_a_peer_has() -> None:
    host = read_expert_host(announcement(), MANIFEST)
    assert host is not None
    assert host.experts == {1: {0, 2}, 3: {7}}
    assert (host.is_online, host.row_s, host.precision) == (True, 0.5, "q4_k")
    for unused in ({"state": pb.HOST_STATE_LEAVING}, {"protocol": 1}):
        other = read_expert_host(announcement(**unused), MANIFEST)
        assert other is not None
        assert not other.is_online


def block(number: int = 1, experts: bytes = b"\x01") -> pb.BlockExperts:
    return pb.BlockExperts(block=number, experts=experts)


@pytest.mark.parametrize(
    "changes",
    [
        {"manifest": bytes(32)},
        {"blocks": []},
        {"blocks": [block(MAX_BLOCKS)]},
        {"blocks": [block(3), block(1)]},
        {"blocks": [block(), block()]},
        {"blocks": [block(experts=b"")]},
        {"blocks": [block(experts=bytes(MAX_EXPERTS // 8 + 1))]},
        {"blocks": [block(number) for number in range(MAX_EXPERT_BLOCKS + 1)]},
        {"row_s": float("nan")},
        {"row_s": -1.0},
        {"row_s": float("inf")},
    ],
)
def test_an_implausible_announcement_is_left_out(changes: dict[str, object]) -> None:
    assert read_expert_host(announcement(**changes), MANIFEST) is None


def test_a_joining_peer_takes_the_experts_with_the_fewest_replicas() -> None:
    counts = {0: 4, 1: 4}
    first = choose_experts(counts, [], 4)
    assert first == {0: {0, 1}, 1: {0, 1}}
    second = choose_experts(counts, [first], 4)
    assert second == {0: {2, 3}, 1: {2, 3}}
    assert choose_experts(counts, [first, second], 3) == {0: {0, 1}, 1: {0}}
    assert choose_experts(counts, [second, second, first], 99) == {0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}}
    assert choose_experts(counts, [], 0) == {}


SETS = st.frozensets(st.integers(0, MAX_EXPERTS - 1), max_size=40)


@given(SETS, SETS)
def test_bits_are_a_set_of_numbers(one: frozenset[int], other: frozenset[int]) -> None:
    bits, others = ExpertBits.of(one), ExpertBits.of(other)
    assert (bits == one, hash(bits) == hash(one), len(bits), [*bits]) == (True, True, len(one), sorted(one))
    assert {*(bits & others)} == one & other
    assert {*(bits | others)} == one | other
    assert {*(bits - other)} == one - other
    assert all((number in bits) == (number in one) for number in range(-1, MAX_EXPERTS))


class Flooded:
    """A directory whose every sample holds other announcements of invented peers, each as large as
    a record may be."""

    def __init__(self) -> None:
        self.samples = 0

    def clock(self) -> float:
        return 1.0

    async def sample(self, _topics: Collection[str], most: int, **_: object) -> Sequence[Record]:
        self.samples += 1
        blocks = [block(number, b"\xff" * (MAX_EXPERTS // 8)) for number in range(118)]
        body = announcement(blocks=blocks).body
        signers = ((self.samples * most + number).to_bytes(32, "big") for number in range(most))
        return [Record(bytes(32), experts_topic(MANIFEST), signer, 1, 2.0, body) for signer in signers]


@defence(
    "announcements of experts take as much memory as their bytes",
    off=replacing(
        expert_announcements,
        "from_bits",
        lambda bits: frozenset(from_bits(bits)),
    ),
)
def test_an_announcement_takes_little_more_memory_than_its_bytes() -> None:
    directory: Any = Flooded()
    [record] = asyncio.run(directory.sample((), 1))
    tracemalloc.start()
    try:
        host = read_expert_host(record, MANIFEST)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert host is not None
    assert peak < 8 * len(record.body)


@defence(
    "announcements of experts that are kept are bounded in number",
    off=replacing(expert_announcements, "MAX_KNOWN", 1 << 30),
)
def test_a_flood_of_announcements_takes_bounded_memory() -> None:
    directory: Any = Flooded()
    sample = ExpertSample(directory, MANIFEST)
    tracemalloc.start()
    try:
        for _ in range(2 + MAX_KNOWN // expert_announcements.SAMPLE):
            known = asyncio.run(sample.refresh())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(known) == MAX_KNOWN
    assert peak < 32 << 20


def test_an_announcement_lives_until_it_expires_or_is_replaced() -> None:
    found: list[Record] = []

    class One(Flooded):
        now = 1.0

        def clock(self) -> float:
            return self.now

        async def sample(self, _topics: Collection[str], most: int, **_: object) -> Sequence[Record]:
            return found[:most]

    def record(sequence: int, experts: bytes) -> Record:
        body = announcement(blocks=[block(1, experts)]).body
        return Record(bytes(32), experts_topic(MANIFEST), bytes(32), sequence, 2.0, body)

    directory: Any = One()
    sample = ExpertSample(directory, MANIFEST)
    for each, expected in ((record(2, b"\x02"), {1}), (record(1, b"\x01"), {1}), (record(3, b"\x04"), {2})):
        found[:] = [each]
        [known] = asyncio.run(sample.refresh())
        assert known.experts == {1: expected}
    found.clear()
    assert len(asyncio.run(sample.refresh())) == 1
    directory.now = 2.0
    assert asyncio.run(sample.refresh()) == []
