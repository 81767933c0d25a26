"""Defences against more work than hosts can do, and against hosts that only say that they have it."""

import math
from collections.abc import Hashable, Mapping
from functools import partial

from swarmnet_client.chain import failures
from swarmnet_client.chain.failures import WaitBudget
from swarmnet_client.swarm import swarm
from swarmnet_client.swarm.swarm import Swarm
from swarmnet_node.hosting import host, host_limits
from swarmnet_node.hosting.host import Host
from swarmnet_node.hosting.session import HostedSession
from swarmnet_protocols.net import PeerId
from tests.defences import Defence, Patch, replacing, yes
from tests.limit_defences import of_a_host
from tests.sim import test_overload, test_room
from tests.support.swarm_lab import Reference


def wait_for_all_that_is_queued(queued: Mapping[Hashable, int], _: Hashable, position_s: float) -> float:
    return position_s * sum(queued.values())


def only_at_the_opening(patch: Patch) -> None:
    check = Host._check_wait

    def check_new(
        self: Host, client: PeerId, own: HostedSession | None = None, *, continues: bool = False
    ) -> None:
        if own is None:
            check(self, client, continues=continues)

    patch.setattr(Host, "_check_wait", check_new)


def a_claim_to_continue(reference: Reference) -> None:
    with Patch.context() as patch:
        test_overload.test_a_session_that_only_claims_to_continue_an_answer_is_refused_at_its_first_step(
            reference, patch
        )


OVERLOAD = (
    Defence(
        "a host with too much work refuses more of it at once",
        replacing(host, "expected_wait_s", lambda *_: 0.0),
        of_a_host(test_overload.test_a_client_is_told_at_once_that_all_hosts_are_busy_and_for_how_long),
    ),
    Defence(
        "it does so also when the first step comes long after the session was opened",
        only_at_the_opening,
        of_a_host(
            test_overload.test_a_session_that_was_opened_before_the_load_came_is_refused_at_its_first_step
        ),
    ),
    Defence(
        "a session that only claims to continue an answer is refused like a new one",
        only_at_the_opening,
        of_a_host(a_claim_to_continue),
    ),
    Defence(
        "an answer under way goes before new work",
        replacing(host_limits, "CONTINUED_WAITS", 1.0),
        of_a_host(test_overload.test_an_answer_under_way_continues_on_a_host_that_refuses_new_ones),
    ),
    Defence(
        "it does not go to a host that would take too long",
        replacing(host_limits, "CONTINUED_WAITS", 100.0),
        of_a_host(test_overload.test_a_host_that_is_far_too_busy_refuses_answers_under_way_too),
    ),
    Defence(
        "a flood of one client does not have others refused",
        replacing(host, "expected_wait_s", wait_for_all_that_is_queued),
        of_a_host(test_overload.test_a_flood_of_one_client_does_not_have_others_refused),
    ),
    Defence(
        "hosts that always say that they are busy do not prolong the wait of a client",
        replacing(WaitBudget, "may_wait", yes),
        of_a_host(test_overload.test_hosts_that_always_say_that_they_are_busy_do_not_prolong_the_wait),
    ),
    Defence(
        "a client does not flood a busy host with requests",
        replacing(swarm, "MIN_OVERLOADED_S", 0.0),
        of_a_host(test_overload.test_a_busy_host_is_asked_at_most_once_a_second),
    ),
    Defence(
        "no host computes a prompt that never fits",
        replacing(Swarm, "room", lambda *_: math.inf),
        of_a_host(
            partial(
                test_room.test_a_prompt_that_never_fits_is_refused_before_anything_is_computed, knows=True
            )
        ),
    ),
    Defence(
        "a host without room is not asked to compute a prompt again and again",
        replacing(failures, "FULL_ATTEMPTS", failures.ATTEMPTS),
        of_a_host(test_room.test_a_host_that_is_full_is_asked_again_after_a_growing_pause),
    ),
)
