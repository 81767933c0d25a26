"""The choice of the slot to evict when all slots of a host are taken."""

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_node.hosting import slots as slots_module
from swarmnet_node.hosting.slots import IDLE_S, NEW_S, SLOW_BYTES_PER_S, Slot, slot_to_evict
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits import subnets
from tests.defences import Patch, defence, replacing, yes
from tests.support.network.virtual_time import run

NOW = 1000.0


def slot(peer: str = "a", subnet: str = "", since: float = 0.0, **fields: bool) -> Slot:
    return Slot(PeerId(peer), subnet or peer, since, **fields)


def leaving(*slots: Slot) -> Slot | None:
    return slot_to_evict(slots, NOW, lambda _: 1)


slots = st.lists(
    st.builds(
        slot,
        st.sampled_from("abcd"),
        st.sampled_from(["10.0.0.0/24", "10.0.1.0/24"]),
        st.floats(NOW - 20, NOW),
        has_worked=st.booleans(),
        at_work=st.booleans(),
    ),
    max_size=12,
)


@given(slots)
def test_only_an_idle_slot_is_evicted(given: list[Slot]) -> None:
    found = leaving(*given)
    idle = [each for each in given if each.is_idle(NOW)]
    assert (found in idle) if idle else (found is None)


@given(slots)
def test_the_evicted_slot_is_of_the_largest_peer_and_subnet(given: list[Slot]) -> None:
    found = leaving(*given)
    if found is not None:
        idle = [each for each in given if each.is_idle(NOW)]
        most = max(sum(other.subnet == each.subnet for other in given) for each in idle)
        assert sum(each.subnet == found.subnet for each in given) == most
        there = [each for each in idle if sum(other.subnet == each.subnet for other in given) == most]
        assert sum(each.peer == found.peer for each in given) == max(
            sum(other.peer == each.peer for other in given) for each in there
        )


def test_a_slot_that_never_had_work_is_evicted_first() -> None:
    used, empty = slot("a", "n", NOW - 100, has_worked=True), slot("b", "n", NOW - NEW_S)
    assert leaving(used, empty) is empty


def test_the_longest_idle_slot_is_evicted_first() -> None:
    early, late = slot("a", "n", NOW - 9, has_worked=True), slot("b", "n", NOW - 8, has_worked=True)
    assert leaving(late, early) is early


def count_subnets_only(patch: Patch) -> None:
    """Rank a peer with one slot in a subnet like a peer with many there."""
    patch.setattr(
        slots_module, "Place", lambda origin, _peer, *others: subnets.Place(origin, origin, *others)
    )


@defence("a peer with many slots loses one before a peer with one", off=count_subnets_only)
def test_a_peer_with_one_slot_is_not_evicted_by_one_with_many() -> None:
    honest = slot("honest", "n", NOW - 50)
    others = [slot("greedy", "n", NOW - number) for number in range(4, 8)]
    found = leaving(honest, *others)
    assert found is others[-1]


@defence("a slot with work is not evicted", off=replacing(Slot, "is_idle", yes))
def test_a_slot_that_is_new_in_use_or_waiting_is_not_evicted() -> None:
    assert leaving(slot(since=NOW - NEW_S / 2)) is None
    assert leaving(slot(since=NOW - IDLE_S / 2, has_worked=True)) is None
    assert leaving(slot(at_work=True)) is None


def test_a_slot_without_the_needed_resource_is_not_evicted() -> None:
    empty, full = slot("a"), slot("b", since=NOW - 6)
    assert slot_to_evict([empty, full], NOW, {empty: 0, full: 9}.__getitem__) is full


@defence("a slot with a few bytes a second is idle", off=replacing(slots_module, "SLOW_BYTES_PER_S", 1.0))
def test_a_slot_whose_bytes_arrive_too_slowly_is_idle() -> None:
    async def scenario() -> None:
        await asyncio.sleep(100.0)
        dripping, flowing = slot(since=90.0), slot(since=90.0)
        dripping.moved(100)
        flowing.moved(int(20 * SLOW_BYTES_PER_S))
        assert (dripping.is_idle(100.0), flowing.is_idle(100.0)) == (True, False)
        # a fast transfer keeps the slot no longer than one that ends now
        assert flowing.since == 100.0

    run(scenario())


def count_standbys_as_used(patch: Patch) -> None:
    is_idle = Slot.is_idle

    def unless_worked(self: Slot, now: float) -> bool:
        return is_idle(replace(self, stands_by=False), now)

    patch.setattr(Slot, "is_idle", unless_worked)


@defence("a standby holds no slot that another client needs", off=count_standbys_as_used)
def test_a_standby_may_be_evicted_at_any_time() -> None:
    standby = slot(since=NOW, has_worked=True, stands_by=True)
    assert leaving(slot("a", since=NOW, has_worked=True), standby) is standby
