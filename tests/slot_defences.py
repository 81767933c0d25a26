"""The defences against places that are held without work, as in ``defences.py``."""

from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_node.hosting import slots
from swarmnet_node.hosting.host import Host, HostLimits
from swarmnet_node.hosting.session import HostedSession
from swarmnet_node.hosting.slots import Slot
from swarmnet_protocols.net import subnets as crowds
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.limit_defences import of_a_host
from tests.sim import test_slots
from tests.unit import test_slots as test_slot_to_evict


async def for_ever(*_: object) -> None:
    """No room is made."""


def end_no_session(patch: Patch) -> None:
    """However long its first step takes."""
    patch.setattr(HostedSession, "_first_step", HostedSession._failure)


def open_again_at_once(patch: Patch) -> None:
    class Restless:
        def __get__(self, *_: object) -> bool:
            return False

        def __set__(self, *_: object) -> None:
            pass

    patch.setattr(ChainSupervisor, "_is_resting", Restless(), raising=False)


def count_networks_only(patch: Patch) -> None:
    """Whoever has one place there is as likely to lose it as who has many."""
    patch.setattr(slots, "Place", lambda origin, _peer, *others: crowds.Place(origin, origin, *others))


EVICTIONS = (
    Defence(
        "an empty session makes way where there is no room",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_sessions_without_steps_are_evicted_for_a_client_with_work),
    ),
    Defence(
        "so does one that brings work no more",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_idle_sessions_that_once_had_steps_are_evicted),
    ),
    Defence(
        "and a pass whose tensors do not come",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_passes_without_tensors_are_evicted),
    ),
    Defence(
        "and a link whose session does not come",
        replacing(slots, "slot_to_evict", nothing),
        of_a_host(test_slots.test_links_without_a_session_are_evicted),
    ),
    Defence(
        "caches of idle sessions make way for steps",
        replacing(Host, "make_room", for_ever),
        of_a_host(test_slots.test_caches_of_idle_sessions_are_evicted),
    ),
    Defence(
        "a client has a quarter of the caches",
        replacing(HostLimits, "client_cache_bytes", lambda _, max_cache_bytes: max_cache_bytes),
        of_a_host(test_slots.test_one_client_has_a_quarter_of_the_caches),
    ),
    Defence(
        "a session begins with a step, soon",
        end_no_session,
        of_a_host(test_slots.test_a_session_without_a_first_step_ends_where_there_is_room),
    ),
    Defence(
        "who has nothing to send opens no session again",
        open_again_at_once,
        of_a_host(test_slots.test_a_client_may_wait_before_its_first_step),
    ),
    Defence(
        "who brings work keeps its place",
        replacing(Slot, "is_idle", yes),
        lambda _: test_slot_to_evict.test_a_slot_that_is_new_or_in_use_or_waits_for_the_host_is_not_evicted(),
    ),
    Defence(
        "a drip is no work",
        replacing(slots, "SLOW_BYTES_PER_S", 1.0),
        lambda _: test_slot_to_evict.test_a_slot_whose_bytes_arrive_too_slowly_is_idle(),
    ),
    Defence(
        "who has many places loses them before who has one",
        count_networks_only,
        lambda _: (
            test_slot_to_evict.test_a_peer_with_one_slot_is_not_evicted_by_one_with_many_in_its_subnet()
        ),
    ),
)
