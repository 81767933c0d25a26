"""Announcements of hosts are read, not believed."""

import math
import re
from typing import Any

import pytest

from swarmnet_protocols.directory import host_announcements
from swarmnet_protocols.directory.host_announcements import (
    MAX_ADDRESSES,
    PROTOCOL,
    SHARDS,
    hosts_topic,
    read_announcement,
)
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.routing.coordinates import Coordinate
from swarmnet_protocols.routing.host_info import INCOMPATIBLE, HostInfo
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import Patch, defence, replacing

SWARM, MANIFEST = bytes(32), bytes(range(32))
SIGNER = Identity.from_seed(b"host")


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


def read(body: bytes) -> HostInfo | None:
    topic = hosts_topic(MANIFEST, SIGNER.peer_id)
    return read_announcement(Record(SWARM, topic, SIGNER.public_key, 1, 2e9, body), MANIFEST)


def test_a_host_has_the_announced_blocks_and_its_signers_peer_id() -> None:
    assert read(announcement()) == HostInfo(SIGNER.peer_id, 3, 12, 0.01, ("/ip4/203.0.113.5/tcp/4001",))


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        announcement(manifest=bytes(32)),
        announcement(start=12),
        announcement(end=MAX_BLOCKS + 1),
        announcement(step_s=-1.0),
        announcement(step_s=math.nan),
        announcement(step_s=math.inf),
        announcement(step_s=1e9),
    ],
)
def test_an_invalid_announcement_is_left_out(body: bytes) -> None:
    assert read(body) is None


class _Any(str):
    __slots__ = ()

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = str.__hash__


ANY = _Any()


def any_topic(patch: Patch) -> None:
    patch.setattr(host_announcements, "hosts_topic", lambda *_: ANY)


@defence("a host announces itself in one shard only", off=any_topic)
def test_an_announcement_under_the_topic_of_another_shard_is_left_out() -> None:
    """A peer that announced itself in every shard would be read by all."""
    own = hosts_topic(MANIFEST, SIGNER.peer_id)
    for shard in range(SHARDS):
        topic = f"hosts/{MANIFEST.hex()}/{shard:x}"
        record = Record(SWARM, topic, SIGNER.public_key, 1, 2e9, announcement())
        assert (read_announcement(record, MANIFEST) is not None) == (topic == own)


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_a_host_of_another_protocol_version_is_listed_and_not_used(protocol: int) -> None:
    found = read(announcement(protocol=protocol))
    assert found is not None
    assert found.state == INCOMPATIBLE
    assert not found.online


def test_a_coordinate_is_read_if_it_is_plausible() -> None:
    coordinate = Coordinate((0.5, -0.25, 0.125), 0.0078125, 0.0, 0.25)
    host = read(announcement(coordinate=coordinate.numbers()))
    assert host is not None
    assert host.coordinate == coordinate
    far = read(announcement(coordinate=[1e30] * 6))
    assert far is not None
    assert far.coordinate is None


@pytest.mark.parametrize(
    ("announced", "read_as"), [("q4_1", "q4_1"), ("bf16/bf16", "bf16/bf16"), ("\x1b[2J", ""), ("f" * 99, "")]
)
def test_an_announced_precision_that_is_no_name_is_ignored(announced: str, read_as: str) -> None:
    host = read(announcement(precision=announced))
    assert host is not None
    assert host.precision == read_as


@defence(
    "a host's arithmetic is a short name",
    off=replacing(host_announcements, "ARITHMETIC", re.compile(".*", re.DOTALL)),
    announced="\x1b[2J",
)
@pytest.mark.parametrize(
    ("announced", "read_as"), [("exact-1", "exact-1"), ("torch", "torch"), ("\x1b[2J", ""), ("a" * 17, "")]
)
def test_an_announced_arithmetic_that_is_no_name_is_ignored(announced: str, read_as: str) -> None:
    host = read(announcement(arithmetic=announced))
    assert host is not None
    assert host.arithmetic == read_as


@defence(
    "experts that a host names in a command of clients are numbers only",
    off=replacing(host_announcements, "MISSING_EXPERTS", re.compile(".*")),
    announced="0:1'; reboot",
    read_as="",
)
@pytest.mark.parametrize(
    ("announced", "read_as"),
    [
        ("0-3:4-7;5:1,2", "0-3:4-7;5:1,2"),
        ("0:1…", "0:1…"),
        ("", ""),
        ("0:1'; reboot", ""),
        ("0:" + "1," * 64, ""),
        ("\u202e0:1", ""),
    ],
)
def test_missing_experts_that_are_no_list_are_ignored(announced: str, read_as: str) -> None:
    """Clients print them, within a command."""
    found = read(announcement(missing_experts=announced))
    assert found is not None
    assert found.missing_experts == read_as


def test_a_host_with_many_addresses_is_found_by_the_first() -> None:
    many = [f"/ip4/203.0.113.{number}/tcp/4001" for number in range(100)]
    host = read(announcement(addresses=many))
    assert host is not None
    assert host.addresses == tuple(many[:MAX_ADDRESSES])


@pytest.mark.parametrize("state", [pb.HOST_STATE_JOINING, pb.HOST_STATE_LEAVING, pb.HOST_STATE_CHOOSING])
def test_only_hosts_that_serve_are_hosts(state: pb.HostState) -> None:
    host = read(announcement(state=state))
    assert host is not None
    assert not host.online
