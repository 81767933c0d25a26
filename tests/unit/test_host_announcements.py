"""Announcements of hosts are read, not believed."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from swarmnet_protocols.directory.host_announcements import (
    MAX_ADDRESSES,
    PROTOCOL,
    hosts_topic,
    read_hosts,
    read_records,
)
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.wire import records_pb2 as pb

SWARM, MANIFEST = bytes(32), bytes(range(32))
SIGNER = Identity.from_seed(b"host")


class Shelf:
    """A directory with these bodies under one topic, all by one signer."""

    swarm = SWARM

    def __init__(self, *bodies: bytes) -> None:
        self._bodies = bodies

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        raise NotImplementedError

    async def lookup(self, topic: str) -> Sequence[Record]:
        assert topic == hosts_topic(MANIFEST)
        return [Record(SWARM, topic, SIGNER.public_key, 1, 2e9, body) for body in self._bodies]


def announcement(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "manifest": MANIFEST,
        "start": 3,
        "end": 12,
        "state": pb.HOST_STATE_ONLINE,
        "protocol": PROTOCOL,
        "step_s": 0.01,
        "addresses": ["/ip4/203.0.113.5/tcp/4001"],
    }
    return pb.HostRecord(**fields | changes).SerializeToString()


def read(*bodies: bytes) -> Sequence[HostInfo]:
    return asyncio.run(read_hosts(Shelf(*bodies), MANIFEST))


def test_a_host_has_the_announced_blocks_and_the_peer_id_of_its_signer() -> None:
    assert read(announcement()) == [HostInfo(SIGNER.peer_id, 3, 12, 0.01, ("/ip4/203.0.113.5/tcp/4001",))]


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        announcement(manifest=bytes(32)),
        announcement(protocol=PROTOCOL + 1),
        announcement(start=12),
        announcement(end=MAX_BLOCKS + 1),
        announcement(step_s=-1.0),
        announcement(step_s=math.nan),
        announcement(step_s=math.inf),
        announcement(step_s=1e9),
    ],
)
def test_an_invalid_announcement_is_left_out_and_hides_no_other(body: bytes) -> None:
    assert read(body, announcement()) == read(announcement())


@pytest.mark.parametrize(
    ("announced", "read_as"), [("q4_1", "q4_1"), ("bf16/bf16", "bf16/bf16"), ("\x1b[2J", ""), ("f" * 99, "")]
)
def test_only_the_name_of_a_precision_is_read_as_one(announced: str, read_as: str) -> None:
    (host,) = read(announcement(precision=announced))
    assert host.precision == read_as


def test_a_host_with_many_addresses_is_found_by_the_first() -> None:
    many = [f"/ip4/203.0.113.{number}/tcp/4001" for number in range(100)]
    (host,) = read(announcement(addresses=many))
    assert host.addresses == tuple(many[:MAX_ADDRESSES])


@pytest.mark.parametrize("state", [pb.HOST_STATE_JOINING, pb.HOST_STATE_LEAVING, pb.HOST_STATE_CHOOSING])
def test_only_hosts_that_serve_are_hosts(state: pb.HostState) -> None:
    body = announcement(state=state)
    assert read(body) == []
    assert len(asyncio.run(read_records(Shelf(body), MANIFEST))) == 1
