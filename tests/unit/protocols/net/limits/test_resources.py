"""The resource manager: its account of the resources that peers hold and use."""

import asyncio
import contextlib
import gc
import math
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net.limits import resources
from swarmnet_protocols.net.limits.rate_limit import RateLimit
from swarmnet_protocols.net.limits.resource_limits import Rate, Resource
from swarmnet_protocols.net.limits.resources import (
    MIN_SWEEP,
    SMALL_BYTES,
    Reservation,
    ResourceLimitReached,
    ResourceManager,
    Scope,
)
from tests.defences import defence, replacing
from tests.support.attacks.switched_off import count_only
from tests.support.network.virtual_time import run


def limited(in_all: int, each_peer: int) -> ResourceManager:
    resources = ResourceManager()
    resources.limit(Resource.SESSIONS, system=in_all, per_peer=each_peer)
    return resources


def paced(in_all: RateLimit | None, each_peer: RateLimit | None) -> ResourceManager:
    resources = ResourceManager()
    resources.limit_rate(Rate.BYTES_IN, system=in_all, per_peer=each_peer)
    return resources


def test_a_reservation_counts_in_every_scope_until_it_is_released() -> None:
    resources = limited(10, 10)
    peer = resources.peer("alice", 0.0)
    session = peer.child("session", {})
    with session.reserve(Resource.SESSIONS, 3) as hold:
        assert [scope.used[Resource.SESSIONS] for scope in (session, peer, resources.system)] == [3, 3, 3]
        hold.resize(5)
        assert peer.used[Resource.SESSIONS] == 5
    hold.release()
    assert [scope.used[Resource.SESSIONS] for scope in (session, peer, resources.system)] == [0, 0, 0]


@defence("every scope has a limit", off=count_only, where="all peers")
@pytest.mark.parametrize("where", ["session", "alice", "all peers"])
def test_a_reservation_that_one_scope_refuses_is_held_in_none(where: str) -> None:
    resources = limited(2 if where == "all peers" else 9, 2 if where == "alice" else 9)
    peer = resources.peer("alice", 0.0)
    session = peer.child("session", {Resource.SESSIONS: 2} if where == "session" else {})
    hold = session.reserve(Resource.SESSIONS, 2)
    with pytest.raises(ResourceLimitReached, match=f"2 of 2 sessions of {where}") as caught:
        hold.resize(3)
    assert caught.value.retry_after_s > 0
    assert hold.amount == 2
    assert [scope.used[Resource.SESSIONS] for scope in (session, peer, resources.system)] == [2, 2, 2]
    assert resources.system.refused[Resource.SESSIONS] == 1


def test_one_peer_at_its_limit_leaves_room_for_others() -> None:
    resources = limited(3, 2)
    alice, bob = resources.peer("alice", 0.0), resources.peer("bob", 0.0)
    alice.reserve(Resource.SESSIONS, 2)
    with pytest.raises(ResourceLimitReached):
        alice.reserve(Resource.SESSIONS)
    bob.reserve(Resource.SESSIONS)
    spare = [scope.available(Resource.SESSIONS) for scope in (alice, bob, resources.system)]
    assert spare == [0, 1, 0]
    assert bob.available(Resource.PASSES) == math.inf


def test_a_lowered_limit_leaves_what_is_held_and_refuses_more() -> None:
    resources = limited(9, 9)
    alice = resources.peer("alice", 0.0)
    hold = alice.reserve(Resource.SESSIONS, 5)
    resources.limit(Resource.SESSIONS, per_peer=2)
    with pytest.raises(ResourceLimitReached):
        hold.resize(6)
    hold.resize(1)
    assert alice.available(Resource.SESSIONS) == 1
    held = [
        (scope.used[Resource.SESSIONS], scope.limits[Resource.SESSIONS])
        for scope in (alice, resources.system)
    ]
    assert held == [(1, 2), (1, 9)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=40))
def test_no_sequence_of_reservations_exceeds_a_limit_or_miscounts(steps: list[tuple[int, int, bool]]) -> None:
    resources = limited(8, 5)
    peers = [resources.peer(name, 0.0) for name in ("alice", "bob", "carol")]
    held: list[list[Reservation]] = [[] for _ in peers]
    for number, amount, take in steps:
        if not take and held[number]:
            held[number].pop().release()
            continue
        try:
            held[number].append(peers[number].reserve(Resource.SESSIONS, amount))
        except ResourceLimitReached:
            assert (
                min(scope.available(Resource.SESSIONS) for scope in (peers[number], resources.system))
                < amount
            )
        sums = [sum(hold.amount for hold in each) for each in held]
        assert [peer.used[Resource.SESSIONS] for peer in peers] == sums
        assert resources.system.used[Resource.SESSIONS] == sum(sums) <= 8
        assert max(sums) <= 5


def test_use_within_the_burst_is_free_and_use_beyond_it_waits() -> None:
    alice = paced(None, RateLimit(per_s=10.0, burst=20.0)).peer("alice", 0.0)
    assert alice.charge(Rate.BYTES_IN, 20, 0.0) == 0.0
    assert alice.charge(Rate.BYTES_IN, 5, 0.0) == pytest.approx(0.5)
    assert alice.charge(Rate.BYTES_IN, 5, 0.5) == pytest.approx(0.5)
    assert alice.charge(Rate.BYTES_IN, 0, 9.0) == 0.0
    assert alice.charge(Rate.BYTES_IN, 20, 100.0) == 0.0
    alice.check_rate(Rate.BYTES_IN, 1.0, 100.0)
    alice.charge(Rate.BYTES_IN, 11, 100.0)
    with pytest.raises(ResourceLimitReached, match="bytes in of alice") as caught:
        alice.check_rate(Rate.BYTES_IN, 1.0, 100.0)
    assert caught.value.retry_after_s == pytest.approx(1.1)


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 300)), min_size=1, max_size=50))
def test_clients_that_wait_as_told_never_exceed_the_rate(uses: list[tuple[float, int]]) -> None:
    rate = RateLimit(per_s=100.0, burst=50.0)
    alice, now, used = paced(None, rate).peer("alice", 0.0), 0.0, 0.0
    for pause_s, amount in uses:
        now += pause_s
        assert used <= rate.burst + rate.per_s * now + 300 + 1e-6
        now += alice.charge(Rate.BYTES_IN, amount, now)
        used += amount
    assert used <= rate.burst + rate.per_s * now + 1e-6


def test_modest_peers_do_not_wait_for_greedy_ones() -> None:
    resources = paced(RateLimit(100.0, 100.0), RateLimit(100.0, 100.0))
    greedy, modest = resources.peer("greedy", 0.0), resources.peer("modest", 0.0)
    assert greedy.charge(Rate.BYTES_IN, 200, 0.0) == pytest.approx(1.0)
    assert modest.charge(Rate.BYTES_IN, 10, 0.0) == 0.0
    assert modest.charge(Rate.BYTES_IN, 50, 0.0) == pytest.approx(1.6)


def test_without_limits_of_their_own_peers_wait_for_the_common_rate() -> None:
    resources = paced(RateLimit(100.0, 100.0), None)
    assert resources.peer("alice", 0.0).charge(Rate.BYTES_IN, 150, 0.0) == pytest.approx(0.5)
    assert resources.peer("bob", 0.0).charge(Rate.BYTES_IN, 0, 0.0) == pytest.approx(0.5)
    assert resources.system.spent[Rate.BYTES_IN] == 150


def test_peers_without_anything_are_forgotten_and_others_are_not() -> None:
    resources = paced(None, RateLimit(1.0, 10.0))
    holder, debtor = resources.peer("holder", 0.0), resources.peer("debtor", 0.0)
    holder.reserve(Resource.SESSIONS)
    debtor.charge(Rate.BYTES_IN, 10_000, 0.0)
    idle: weakref.ref[Scope] = weakref.ref(resources.peer("idle", 0.0))
    for number in range(20 * MIN_SWEEP):
        resources.peer(f"passer-by {number}", 100.0)
    gc.collect()
    assert resources.peer("holder", 100.0) is holder
    assert resources.peer("debtor", 100.0) is debtor
    assert idle() is None
    assert resources.peer_count <= 2 * MIN_SWEEP


@defence(
    "strangers leave a share of the resources to known peers",
    off=replacing(resources, "KNOWN_PEER_SHARE", {}),
)
def test_unknown_peers_together_leave_room_for_known_peers() -> None:
    resources = ResourceManager()
    resources.limit(Resource.MEMORY, system=100, per_peer=20)
    known, link = resources.peer("known", 0.0), resources.peer("link", 0.0)
    known.reserve(Resource.SESSIONS)
    link.reserve(Resource.LINKS)
    for number in range(7):
        resources.peer(f"stranger {number}", 0.0).reserve(Resource.MEMORY, 10)
    with pytest.raises(ResourceLimitReached, match="70 of 75 memory bytes of all peers"):
        resources.peer("another", 0.0).reserve(Resource.MEMORY, 10)
    assert not resources.peer("another", 0.0).can_ever_reserve(Resource.MEMORY, 76)
    known.child("its session", {}).reserve(Resource.MEMORY, 20)
    link.reserve(Resource.MEMORY, 10)
    with pytest.raises(ResourceLimitReached, match="100 of 100"):
        link.reserve(Resource.MEMORY, 1)


@pytest.mark.parametrize("whose", ["in all", "its own"])
def test_waiting_reservations_continue_when_the_limit_is_raised(whose: str) -> None:
    async def main() -> None:
        resources = ResourceManager()
        resources.limit(Resource.MEMORY, system=40, per_peer=40)
        alice, bob = resources.peer("alice", 0.0), resources.peer("bob", 0.0)
        bob.reserve(Resource.MEMORY, 20)
        alice.reserve(Resource.MEMORY, 10)
        if whose == "its own":
            resources.limit(Resource.MEMORY, system=100, per_peer=20)
        growing = asyncio.create_task(alice.reserve(Resource.MEMORY, 0).grow(20))
        await asyncio.sleep(0)
        resources.limit(Resource.SESSIONS, system=100, per_peer=100)
        await asyncio.sleep(0)
        assert not growing.done()
        resources.limit(Resource.MEMORY, system=100, per_peer=40)
        await growing

    run(main())


def test_only_reservations_that_fit_are_woken() -> None:
    """A peer with thousands of waiting reservations must not have them all checked at each message
    of others."""

    async def main() -> None:
        resources = ResourceManager()
        resources.limit(Resource.MEMORY, system=100, per_peer=50)
        greedy, modest = resources.peer("greedy", 0.0), resources.peer("modest", 0.0)
        for peer in (greedy, modest):
            peer.reserve(Resource.SESSIONS)
        own = greedy.reserve(Resource.MEMORY, 50)
        waiting = [greedy.reserve(Resource.MEMORY, 0) for _ in range(10)]
        growing = [asyncio.create_task(hold.grow(40)) for hold in waiting]
        await asyncio.sleep(0)
        refused = resources.system.refused[Resource.MEMORY]
        for _ in range(100):
            modest.reserve(Resource.MEMORY, 50).release()
            greedy.reserve(Resource.CALLS).release()
            own.resize(45)
            own.resize(50)
            await asyncio.sleep(0)
        assert resources.system.refused[Resource.MEMORY] == refused == len(waiting)
        own.release()
        while growing:
            done, _pending = await asyncio.wait(growing, return_when=asyncio.FIRST_COMPLETED)
            (first,) = done
            waiting[growing.index(first)].release()
            waiting.pop(growing.index(first))
            growing.remove(first)
        assert not resources.system.used[Resource.MEMORY]

    asyncio.run(main())


def take_all(resources: ResourceManager, name: str, subnet: str) -> int:
    """Reserve as much memory for a peer as the limits allow. Returns the amount."""
    hold = resources.peer(name, 0.0, subnet).reserve(Resource.MEMORY, 0)
    step = 1 << 20
    while step > SMALL_BYTES:
        try:
            hold.resize(hold.amount + step)
        except ResourceLimitReached:
            step //= 2
    return hold.amount


@defence(
    "a subnet leaves some of each shared resource to others",
    off=replacing(resources, "SHARED", frozenset()),
    identities=100,
)
@pytest.mark.parametrize("identities", [1, 7, 100])
def test_however_many_identities_a_subnet_has_others_find_room(identities: int) -> None:
    resources = ResourceManager()
    resources.limit(Resource.MEMORY, system=96 << 20, per_peer=16 << 20)
    for number in range(identities):
        take_all(resources, f"greedy {number}", "203.0.113.0/24")
    for number in range(2):
        assert take_all(resources, f"distant {number}", f"198.51.{number}.0/24") >= 2 << 20
    neighbour = resources.peer("neighbour", 0.0, "203.0.113.0/24")
    neighbour.reserve(Resource.MEMORY, SMALL_BYTES)


@defence("large messages leave memory to small ones", off=replacing(resources, "SMALL_SHARE", 0.0))
def test_however_many_identities_there_are_small_messages_find_room() -> None:
    """Also from as many subnets."""
    resources = ResourceManager()
    resources.limit(Resource.MEMORY, system=96 << 20, per_peer=16 << 20)
    for number in range(30):
        take_all(resources, f"greedy {number}", f"198.51.{number}.0/24")
    for number in range(100):
        resources.peer(f"client {number}", 0.0, "203.0.113.0/24").reserve(Resource.MEMORY, SMALL_BYTES)


@defence(
    "a subnet leaves places to others",
    off=replacing(resources, "SHARED", frozenset()),
    resource=Resource.TRANSFERS,
)
@pytest.mark.parametrize("resource", [Resource.CALLS, Resource.TRANSFERS, Resource.REPORTS, Resource.PROBES])
def test_a_subnet_leaves_places_to_others(resource: Resource) -> None:
    resources = ResourceManager()
    for number in range(1000):
        with contextlib.suppress(ResourceLimitReached):
            resources.peer(f"greedy {number}", 0.0, "203.0.113.0/24").reserve(resource)
    resources.peer("distant", 0.0, "198.51.100.0/24").reserve(resource)


def test_a_subnet_alone_uses_most_of_the_memory() -> None:
    resources = ResourceManager()
    resources.limit(Resource.MEMORY, system=96 << 20, per_peer=16 << 20)
    for number in range(6):
        resources.peer(f"client {number}", 0.0, "192.168.7.0/24").reserve(Resource.SESSIONS)
        take_all(resources, f"client {number}", "192.168.7.0/24")
    assert resources.system.used[Resource.MEMORY] > 50 << 20


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 40)), max_size=40))
def test_peers_that_change_their_subnet_are_counted_where_they_are(
    steps: list[tuple[int, int, int]],
) -> None:
    resources = ResourceManager()
    resources.limit(Resource.TRANSFERS, system=100, per_peer=60)
    subnet_of, held = dict[int, int](), dict[int, Reservation]()
    for number, subnet, amount in steps:
        scope = resources.peer(f"peer {number}", 0.0, f"subnet {subnet}")
        child = scope.child("its session", {})
        subnet_of[number] = subnet
        hold = held.setdefault(number, child.reserve(Resource.TRANSFERS, 0))
        with contextlib.suppress(ResourceLimitReached):
            hold.resize(amount)
        for each, scope in resources._subnets.items():
            there = [held[other].amount for other, place in subnet_of.items() if f"subnet {place}" == each]
            assert scope.used[Resource.TRANSFERS] == sum(there)
    for hold in held.values():
        hold.release()
    assert not any(any(scope.used.values()) for scope in (resources.system, *resources._subnets.values()))


def test_a_reservation_that_waits_goes_on_when_others_release_theirs() -> None:
    async def main() -> None:
        resources = ResourceManager()
        resources.limit(Resource.CALLS, system=100, per_peer=40)
        greedy = resources.peer("greedy", 0.0, "here").reserve(Resource.CALLS, 30)
        distant = resources.peer("distant", 0.0, "there").reserve(Resource.CALLS, 10)
        growing = asyncio.create_task(
            resources.peer("alice", 0.0, "here").reserve(Resource.CALLS, 0).grow(20)
        )
        await asyncio.sleep(0)
        assert not growing.done()
        assert resources.system.is_awaited(Resource.CALLS)
        greedy.resize(29)
        await asyncio.sleep(0)
        assert not growing.done()
        distant.release()
        await growing
        assert not resources.system.is_awaited(Resource.CALLS)

    run(main())
