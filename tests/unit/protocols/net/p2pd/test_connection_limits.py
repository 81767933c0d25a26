"""The choice of p2pd connections to close when there are too many."""

import random
from collections.abc import Iterable, Sequence

import pytest

from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits import subnets
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.p2pd import connection_limits
from swarmnet_protocols.net.p2pd.config import ConnectionLimits
from swarmnet_protocols.net.p2pd.connection_limits import ListedConnection, Use
from swarmnet_protocols.net.p2pd.process import listening_at
from tests.defences import defence, replacing

PEER = Identity.from_seed(b"peer").peer_id
LIMITS = ConnectionLimits(per_host=4, per_subnet=8, total=16)


def connections(host: str, number: int, since: float = 0.0) -> list[ListedConnection]:
    return [
        ListedConnection(f"{host} {since + age}".encode(), PEER, host, subnet_of(f"/ip4/{host}"), since + age)
        for age in range(number)
    ]


def kept(there: list[ListedConnection], known: list[ListedConnection] | None = None) -> set[bytes]:
    """The peers whose connections stay. Their order is random and does not matter."""
    shuffled = random.Random(0).sample(there, len(there))

    def use(each: ListedConnection) -> Use:
        return Use.KNOWN if each in (known or []) else Use.IDLE

    closed = connection_limits.excess(shuffled, use, LIMITS)
    assert len(set(closed)) == len(closed)
    return {each.peer for each in there} - {each.peer for each in closed}


def peers(there: list[ListedConnection]) -> set[bytes]:
    return {each.peer for each in there}


def test_within_the_limits_nothing_is_closed() -> None:
    there = [*connections("198.51.100.1", 4), *connections("198.51.100.2", 4), *connections("203.0.113.1", 4)]
    assert kept(there) == peers(there)


def test_the_newest_connections_of_one_address_are_closed_first() -> None:
    there = connections("198.51.100.1", 9)
    assert kept(there) == peers(there[:4])


def all_alike(patch: pytest.MonkeyPatch) -> None:
    """Rank every connection as idle."""
    excess = connection_limits.excess

    def blind(
        there: Iterable[ListedConnection], _worth: object, limits: ConnectionLimits
    ) -> Sequence[ListedConnection]:
        return excess(there, lambda _: Use.IDLE, limits)

    patch.setattr(connection_limits, "excess", blind)


@defence("connections in use stay, even from the address of an attacker", off=all_alike)
def test_connections_in_use_stay_beside_an_attacker_at_their_address() -> None:
    attacker, honest = connections("198.51.100.1", 9), connections("198.51.100.1", 4, since=100.0)
    assert kept([*attacker, *honest], known=honest) == peers(honest)


@defence(
    "connections of one subnet are limited",
    off=replacing(connection_limits, "_subnet", lambda each: each.peer),
)
def test_a_subnet_keeps_no_more_connections_than_its_share() -> None:
    strangers = [each for host in range(9) for each in connections(f"198.51.100.{host}", 3)]
    alone = connections("203.0.113.1", 2, since=100.0)
    left = kept([*strangers, *alone])
    assert peers(alone) <= left
    assert len(left) == 8 + 2


@defence(
    "connections of the largest subnets are closed first",
    off=replacing(subnets, "_SUBNET_BITS", {"ip4": 0, "ip6": 0}),
)
def test_over_the_total_limit_the_largest_subnets_lose_connections() -> None:
    strangerss = [
        each for net in (1, 2, 3) for host in (1, 2) for each in connections(f"10.0.{net}.{host}", 4)
    ]
    alone = [each for net in range(4) for each in connections(f"203.0.{net}.1", 1, since=100.0)]
    left = kept([*strangerss, *alone])
    assert peers(alone) <= left
    assert len(left) == 16


def test_connections_of_peers_at_work_outlast_a_flood_of_strangers() -> None:
    known = [each for net in range(4) for each in connections(f"10.1.{net}.1", 4, since=100.0)]
    strangers = [each for net in range(40) for each in connections(f"203.0.{net}.1", 1)]
    assert kept([*strangers, *known], known=known) == peers(known)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/tcp/4001"),
        ("/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/0.0.0.0/udp/4002/quic-v1"),
        ("/ip4/0.0.0.0/tcp/31337", "/ip4/0.0.0.0/tcp/31337"),
        ("/ip6/::/tcp/0", "/ip6/::/tcp/0"),
    ],
)
def test_a_restarted_peer_listens_on_the_port_that_it_had_chosen(listen: str, expected: str) -> None:
    addresses = [
        "/ip4/198.51.100.1/tcp/9/p2p/RELAY/p2p-circuit",
        "/ip4/127.0.0.1/tcp/4001/p2p/ME",
        "/ip4/127.0.0.1/udp/4002/quic-v1/p2p/ME",
    ]
    assert listening_at(listen, addresses) == expected
