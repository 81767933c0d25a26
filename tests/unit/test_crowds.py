"""Who has to go where there is no room for one more stream."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.resources import Rate, Resource, ResourceLimitReached, ResourceManager
from swarmnet_protocols.net.subnets import SubnetLimits, host_of
from swarmnet_protocols.timing import Timing
from tests.support.virtual_time import run

PLACES = 16
STRANGERS = 12
"""Of them: a quarter is kept for those we know."""


class Room:
    def __init__(self) -> None:
        self.resources = ResourceManager()
        self.resources.limit(Resource.INBOUND_STREAMS, system=PLACES, per_peer=4)
        self.crowds = SubnetLimits(self.resources, Timing())
        self.dropped: list[str] = []

    def open(self, peer: str, address: str = "") -> Meter:
        meter = self.crowds.admit(PeerId(peer), address)

        def drop() -> None:
            self.dropped.append(peer)
            meter.close()

        meter.drop = drop
        return meter

    def crowd(self) -> None:
        """As many identities in one place as there is room for."""
        for number in range(STRANGERS):
            self.open(f"silent {number}", f"/ip4/203.0.113.{number}/tcp/1")


def in_a_room(scenario: Callable[[Room], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario(Room())

    run(main())


def test_who_has_many_identities_in_one_place_displaces_its_own() -> None:
    async def scenario(room: Room) -> None:
        elsewhere = [room.open(f"elsewhere {number}", f"/ip4/198.51.{number}.1/tcp/1") for number in range(3)]
        for number in range(50):
            room.open(f"silent {number}", f"/ip4/203.0.113.{number}/tcp/1")
        assert room.dropped == [f"silent {number}" for number in range(50 - STRANGERS + 3)]
        honest = room.open("honest", "/ip4/192.0.2.1/tcp/1")
        assert room.dropped[-1] == f"silent {50 - STRANGERS + 3}"
        assert room.resources.system.used[Resource.INBOUND_STREAMS] == STRANGERS
        for meter in (*elsewhere, honest):
            meter.close()
        room.open("another", "/ip4/203.0.113.77/tcp/1")
        assert len(room.dropped) == 50 - STRANGERS + 4

    in_a_room(scenario)


def test_nobody_goes_whom_we_know() -> None:
    async def scenario(room: Room) -> None:
        resources = room.resources
        for number in range(PLACES):
            resources.peer(f"known {number}", 0.0).reserve(Resource.SESSIONS)
            room.open(f"known {number}", "/ip4/203.0.113.1/tcp/1")
        with pytest.raises(ResourceLimitReached):
            room.open("stranger", "/ip4/192.0.2.1/tcp/1")
        assert room.dropped == []

    in_a_room(scenario)


def test_those_we_know_displace_strangers() -> None:
    async def scenario(room: Room) -> None:
        room.crowd()
        room.resources.peer("known", 0.0).reserve(Resource.SESSIONS)
        room.resources.limit(Resource.INBOUND_STREAMS, per_peer=PLACES)
        for _ in range(PLACES - STRANGERS + 1):
            room.open("known")
        assert room.dropped == ["silent 0"]

    in_a_room(scenario)


@pytest.mark.parametrize("why", ["it has its share", "it owes too much"])
def test_who_may_not_have_one_more_displaces_nobody(why: str) -> None:
    async def scenario(room: Room) -> None:
        room.crowd()
        before = list(room.dropped)
        if why == "it has its share":
            room.resources.limit(Resource.INBOUND_STREAMS, per_peer=1)
        else:
            room.resources.peer("silent 1", 0.0).charge(Rate.FRAMES, 1e6, 0.0)
        with pytest.raises(ResourceLimitReached):
            room.open("silent 1", "/ip4/203.0.113.1/tcp/1")
        assert room.dropped == before

    in_a_room(scenario)


def test_nothing_is_kept_of_streams_that_ended() -> None:
    async def scenario(room: Room) -> None:
        for meter in [room.open(f"peer {number}", "/ip4/203.0.113.1/tcp/1") for number in range(5)]:
            meter.close()
            meter.close()
        assert not room.crowds._crowds
        await asyncio.sleep(0)

    in_a_room(scenario)


def test_a_host_of_ipv6_has_a_whole_64() -> None:
    one, another, neighbour = (
        host_of(f"/ip6/{host}/tcp/1") for host in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1")
    )
    assert one == another != neighbour
    assert host_of("/ip4/203.0.113.1/tcp/1") != host_of("/ip4/203.0.113.2/udp/1/quic-v1")
    assert host_of("/dns4/example.org/tcp/1") == ""
