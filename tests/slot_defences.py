"""Defences against slots that are held without work."""

from dataclasses import replace

from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_node.hosting import slots
from swarmnet_node.hosting.host import Host
from swarmnet_node.hosting.host_limits import HostLimits
from swarmnet_node.hosting.session import HostedSession
from swarmnet_node.hosting.slots import Slot
from swarmnet_protocols.net.limits import subnets
from tests.audit_defences import of_a_swarm
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.limit_defences import of_a_host
from tests.sim import test_handover, test_slots
from tests.unit.hosting import test_slots as test_slot_to_evict


async def evict_none(*_: object) -> None:
    """Evict no session."""


def end_no_session(patch: Patch) -> None:
    """Let a session wait for its first step for ever."""
    patch.setattr(HostedSession, "_first_step", HostedSession._failure)


def open_again_at_once(patch: Patch) -> None:
    class Restless:
        def __get__(self, *_: object) -> bool:
            return False

        def __set__(self, *_: object) -> None:
            pass

    patch.setattr(ChainSupervisor, "_is_resting", Restless(), raising=False)


def count_subnets_only(patch: Patch) -> None:
    """Rank a peer with one slot in a subnet like a peer with many there."""
    patch.setattr(slots, "Place", lambda origin, _peer, *others: subnets.Place(origin, origin, *others))


def count_standbys_as_used(patch: Patch) -> None:
    is_idle = Slot.is_idle

    def unless_worked(self: Slot, now: float) -> bool:
        return is_idle(replace(self, stands_by=False), now)

    patch.setattr(Slot, "is_idle", unless_worked)


EVICTIONS = (
    Defence(
        "a standby holds no slot that another client needs",
        count_standbys_as_used,
        lambda _: test_slot_to_evict.test_a_standby_may_be_evicted_at_any_time(),
    ),
    Defence(
        "other work ends a spare standby",
        replacing(Host, "_end_spares", nothing),
        of_a_swarm(test_handover.test_a_spare_standby_gives_way_to_other_work),
    ),
    Defence(
        "a host with work takes no spare standby",
        replacing(Host, "_is_used", nothing),
        of_a_swarm(test_handover.test_a_spare_standby_gives_way_to_other_work),
    ),
    Defence(
        "a client that does not answer does not keep a host from leaving",
        replacing(HostedSession, "end_leaving", nothing),
        of_a_swarm(test_handover.test_a_host_that_leaves_ends_the_sessions_of_a_client_that_does_not_answer),
    ),
    Defence(
        "a session without steps is evicted from a full host",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_sessions_without_steps_are_evicted_for_a_client_with_work),
    ),
    Defence(
        "an idle session is evicted from a full host",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_idle_sessions_that_once_had_steps_are_evicted),
    ),
    Defence(
        "a pass without tensors is evicted from a full host",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_passes_without_tensors_are_evicted),
    ),
    Defence(
        "a link without a session is evicted from a full host",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_links_without_a_session_are_evicted),
    ),
    Defence(
        "caches of idle sessions are evicted for steps",
        replacing(Host, "make_room", evict_none),
        of_a_host(test_slots.test_caches_of_idle_sessions_are_evicted),
    ),
    Defence(
        "a client holds at most a quarter of the caches",
        replacing(HostLimits, "client_cache_bytes", lambda _, max_cache_bytes: max_cache_bytes),
        of_a_host(test_slots.test_one_client_has_a_quarter_of_the_caches),
    ),
    Defence(
        "a session without a first step is ended",
        end_no_session,
        of_a_host(test_slots.test_a_session_without_a_first_step_ends_where_there_is_room),
    ),
    Defence(
        "a client without work does not reopen an evicted session",
        open_again_at_once,
        of_a_host(test_slots.test_a_client_may_wait_before_its_first_step),
    ),
    Defence(
        "a slot with work is not evicted",
        replacing(Slot, "is_idle", yes),
        lambda _: test_slot_to_evict.test_a_slot_that_is_new_or_in_use_or_waits_for_the_host_is_not_evicted(),
    ),
    Defence(
        "a slot with a few bytes a second is idle",
        replacing(slots, "SLOW_BYTES_PER_S", 1.0),
        lambda _: test_slot_to_evict.test_a_slot_whose_bytes_arrive_too_slowly_is_idle(),
    ),
    Defence(
        "a peer with many slots loses one before a peer with one",
        count_subnets_only,
        lambda _: (
            test_slot_to_evict.test_a_peer_with_one_slot_is_not_evicted_by_one_with_many_in_its_subnet()
        ),
    ),
)
