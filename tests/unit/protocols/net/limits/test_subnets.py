"""The choice of the inbound stream to evict when the system limit is reached."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmnet_protocols.net import Message, PeerId
from swarmnet_protocols.net.limits import subnets
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.limits.subnets import (
    MAX_SILENT,
    MAX_SILENT_PER_SUBNET,
    SubnetLimits,
    host_of,
)
from swarmnet_protocols.timing import Timing
from tests.defences import defence, replacing
from tests.support.network.virtual_time import run

LIMIT = 16
UNKNOWN_LIMIT = 12
"""A quarter is kept for known peers."""


class Host:
    def __init__(self) -> None:
        self.resources = ResourceManager()
        self.resources.limit(Resource.INBOUND_STREAMS, system=LIMIT, per_peer=4)
        self.subnet_limits = SubnetLimits(self.resources, Timing())
        self.evicted: list[str] = []

    def open(self, peer: str, address: str = "") -> StreamScope:
        scope = self.subnet_limits.accept(PeerId(peer), address)

        def evict() -> None:
            self.evicted.append(peer)
            scope.close()

        scope.evict = evict
        return scope

    def fill(self) -> None:
        """Open as many streams of unknown peers as the limit allows, from one subnet."""
        for number in range(UNKNOWN_LIMIT):
            self.open(f"silent {number}", f"/ip4/203.0.113.{number}/tcp/1")


def on_a_host(scenario: Callable[[Host], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Host())

    run(main())


def test_many_identities_of_one_subnet_evict_each_other() -> None:
    async def scenario(host: Host) -> None:
        elsewhere = [host.open(f"elsewhere {number}", f"/ip4/198.51.{number}.1/tcp/1") for number in range(3)]
        for number in range(50):
            host.open(f"silent {number}", f"/ip4/203.0.113.{number}/tcp/1")
        assert host.evicted == [f"silent {number}" for number in range(50 - UNKNOWN_LIMIT + 3)]
        honest = host.open("honest", "/ip4/192.0.2.1/tcp/1")
        assert host.evicted[-1] == f"silent {50 - UNKNOWN_LIMIT + 3}"
        assert host.resources.system.used[Resource.INBOUND_STREAMS] == UNKNOWN_LIMIT
        for scope in (*elsewhere, honest):
            scope.close()
        host.open("another", "/ip4/203.0.113.77/tcp/1")
        assert len(host.evicted) == 50 - UNKNOWN_LIMIT + 4

    on_a_host(scenario)


def test_known_peers_are_never_evicted() -> None:
    async def scenario(host: Host) -> None:
        resources = host.resources
        for number in range(LIMIT):
            resources.peer(f"known {number}", 0.0).reserve(Resource.SESSIONS)
            host.open(f"known {number}", "/ip4/203.0.113.1/tcp/1")
        with pytest.raises(ResourceLimitReached):
            host.open("unknown", "/ip4/192.0.2.1/tcp/1")
        assert host.evicted == []

    on_a_host(scenario)


def test_known_peers_evict_unknown_ones() -> None:
    async def scenario(host: Host) -> None:
        host.fill()
        host.resources.peer("known", 0.0).reserve(Resource.SESSIONS)
        host.resources.limit(Resource.INBOUND_STREAMS, per_peer=LIMIT)
        for _ in range(LIMIT - UNKNOWN_LIMIT + 1):
            host.open("known")
        assert host.evicted == ["silent 0"]

    on_a_host(scenario)


@pytest.mark.parametrize("why", ["its own limit is reached", "its rate is overdrawn"])
def test_a_refused_peer_evicts_no_other(why: str) -> None:
    async def scenario(host: Host) -> None:
        host.fill()
        before = list(host.evicted)
        if why == "its own limit is reached":
            host.resources.limit(Resource.INBOUND_STREAMS, per_peer=1)
        else:
            host.resources.peer("silent 1", 0.0).charge(Rate.FRAMES, 1e6, 0.0)
        with pytest.raises(ResourceLimitReached):
            host.open("silent 1", "/ip4/203.0.113.1/tcp/1")
        assert host.evicted == before

    on_a_host(scenario)


@defence("streams without a message give way", off=replacing(subnets, "MAX_SILENT", 1 << 30))
def test_streams_without_a_message_give_way_to_each_other() -> None:
    async def scenario(host: Host) -> None:
        host.resources.limit(Resource.INBOUND_STREAMS, system=4096, per_peer=384)
        active = [host.open(f"active {number}", "/ip4/203.0.113.1/tcp/1") for number in range(10)]
        for scope in active:
            await scope.receive(lambda: asyncio.sleep(0, Message(b"first")))
        distant = host.open("distant", "/ip4/198.51.100.1/tcp/1")
        for number in range(2 * MAX_SILENT):
            host.open(f"silent {number}", f"/ip4/203.0.{number % 8}.2/tcp/1")
        assert host.resources.system.used[Resource.INBOUND_STREAMS] == MAX_SILENT + len(active)
        assert all(name.startswith("silent") for name in host.evicted)
        await distant.receive(lambda: asyncio.sleep(0, Message(b"first")))

    on_a_host(scenario)


@defence(
    "one subnet holds few streams without a message", off=replacing(subnets, "MAX_SILENT_PER_SUBNET", 1 << 30)
)
def test_silent_streams_of_one_subnet_are_few() -> None:
    async def scenario(host: Host) -> None:
        host.resources.limit(Resource.INBOUND_STREAMS, system=4096, per_peer=384)
        for number in range(MAX_SILENT_PER_SUBNET):
            host.open(f"elsewhere {number}", "/ip4/198.51.100.1/tcp/1")
        for number in range(2 * MAX_SILENT_PER_SUBNET):
            host.open(f"silent {number}", "/ip4/203.0.113.2/tcp/1")
        assert host.evicted == [f"silent {number}" for number in range(MAX_SILENT_PER_SUBNET)]

    on_a_host(scenario)


def test_closed_streams_are_forgotten() -> None:
    async def scenario(host: Host) -> None:
        for scope in [host.open(f"peer {number}", "/ip4/203.0.113.1/tcp/1") for number in range(5)]:
            scope.close()
            scope.close()
        assert not host.subnet_limits._streams._subnets
        await asyncio.sleep(0)

    on_a_host(scenario)


@defence("a /64 of IPv6 counts as one host", off=replacing(subnets, "_HOST_BITS", {"ip4": 32, "ip6": 128}))
def test_an_ipv6_host_is_a_64() -> None:
    one, another, neighbour = (
        host_of(f"/ip6/{host}/tcp/1") for host in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
    )
    assert one == another != neighbour
    assert host_of("/ip4/203.0.113.1/tcp/1") != host_of("/ip4/203.0.113.2/udp/1/quic-v1")
    assert host_of("/dns4/example.org/tcp/1") == ""
