"""Defences of routing against hosts that announce what is false."""

import random
from collections.abc import Sequence
from typing import Any

from swarmnet_client.swarm.entry_guards import EntryGuards
from swarmnet_client.swarm.swarm import Exclusions
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import chain_search, coordinates, placement, relocation, throughput
from swarmnet_protocols.routing.chain_search import View
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.throughput import Claim
from tests.defences import Defence, Patch, nothing, replacing
from tests.properties import test_coordinates
from tests.sim.scale import test_scale
from tests.unit.client import test_client_swarm
from tests.unit.routing import test_claimed_speed as test
from tests.unit.routing import test_placement, test_relocation, test_routing

THIRTY = 30


def ordered_by_id(patch: Patch) -> None:
    def shortlist(view: Any, hosts: Sequence[HostInfo], span: Any, stretch: Any) -> list[HostInfo]:
        return sorted(hosts, key=lambda host: PeerId(host.peer))[: chain_search.CANDIDATES_PER_BLOCK]

    patch.setattr(chain_search, "_shortlist", shortlist)


def ping_by_id(patch: Patch) -> None:
    patch.setattr(random.Random, "shuffle", lambda _, hosts: hosts.sort(key=lambda host: host.peer))


def believe_coordinates(view: View, one: PeerId, other: PeerId) -> float:
    return coordinates.distance(view.coordinates[one], view.coordinates[other])


def ping_the_best(patch: Patch) -> None:
    """Ping the hosts that are expected to be best, instead of the better host of random pairs."""
    patch.setattr(
        test_client_swarm,
        "drawn",
        lambda hosts, _pinged, _rng, expected_s: sorted(hosts, key=expected_s)[:32],
    )


def replace_both(patch: Patch) -> None:
    separate = Exclusions.separate

    def separated(exclusions: Exclusions, one: PeerId, other: PeerId, now: float) -> bool:
        separate(exclusions, one, other, now)
        return True

    patch.setattr(Exclusions, "separate", separated)


def fill_gaps_alone(patch: Patch) -> None:
    """Each host fills gaps at once, without the plan of all and without regard to announced moves."""
    look = Outlook.__init__

    def at_present(outlook: Outlook, claims: Sequence[Claim], *, blocks: int) -> None:
        look(outlook, [claim for claim in claims if claim.settled], blocks=blocks)

    patch.setattr(Outlook, "__init__", at_present)
    patch.setattr(Outlook, "repairs", {})
    patch.setattr(relocation, "GAP_WAIT_S", 0.0)
    patch.setattr(relocation, "GAP_PAUSE_S", 0.0)


ROUTING = (
    Defence(
        "a gap is filled by few hosts",
        fill_gaps_alone,
        lambda _: test_scale.test_few_hosts_of_short_lifetimes_serve_nearly_always(seed=2),
    ),
    Defence(
        "no peer id attracts the pings of clients",
        ping_by_id,
        lambda _: test_client_swarm.test_a_mined_peer_id_is_pinged_by_no_more_clients_than_others(),
    ),
    Defence(
        "an unmeasured host counts as the median at best",
        replacing(chain_search, "median_high", min),
        lambda _: test.test_a_liar_has_few_more_chains_than_a_truthful_host(THIRTY, 1.0),
    ),
    Defence(
        "an unmeasured claim of an empty queue counts as the median",
        replacing(chain_search, "median_high", min),
        lambda _: test.test_a_claim_of_no_queue_gains_nothing(),
    ),
    Defence(
        "a claim of no work counts as the median",
        replacing(chain_search, "median_high", min),
        lambda _: test.test_a_claim_of_no_work_gains_nothing(),
    ),
    Defence(
        "steps that take longer than announced show work",
        replacing(chain_search, "USUAL_EXCESS", 1e9),
        lambda _: test.test_a_host_whose_steps_take_longer_than_announced_has_work_whatever_it_reports(),
    ),
    Defence(
        "a host that announces a hundred times its speed has hardly more work than others",
        replacing(chain_search, "USUAL_EXCESS", 1e9),
        lambda _: (
            test_scale.test_a_host_that_announces_a_hundred_times_its_speed_has_hardly_more_work_than_others()
        ),
    ),
    Defence(
        "clients use hosts with time to spare",
        replacing(chain_search, "LEAST_SPARE", 1.0),
        lambda _: test_scale.test_clients_use_the_hosts_that_have_time_to_spare(),
    ),
    Defence(
        "a host that alone has its precision, and is not audited, is avoided",
        replacing(chain_search, "_alone_in_precision", lambda _: frozenset()),
        lambda _: (
            test_routing.test_a_host_that_alone_has_its_precision_is_avoided_where_others_could_audit_each_other()
        ),
    ),
    Defence(
        "no peer id is preferred",
        ordered_by_id,
        lambda _: test.test_a_liar_has_few_more_chains_than_a_truthful_host(THIRTY, 1.0),
    ),
    Defence(
        "a client keeps its first and last hops",
        replacing(EntryGuards, "used", nothing),
        test.test_a_client_keeps_its_first_and_last_hops,
    ),
    Defence(
        "an announced speed keeps few joining hosts away",
        replacing(throughput, "FASTEST", 0.0),
        lambda _: test_placement.test_a_false_speed_keeps_no_hosts_away(),
    ),
    Defence(
        "an announced speed moves few hosts",
        replacing(throughput, "MAX_SPEED", 1e9),
        lambda _: test_relocation.test_an_announced_speed_counts_as_ten_medians_at_most(1e9),
    ),
    Defence(
        "the fastest claims count as fast as the others",
        replacing(throughput, "FASTEST", 0.0),
        lambda _: test_relocation.test_the_fastest_tenth_of_the_claims_counts_as_fast_as_the_others(2),
    ),
    Defence(
        "intents of others cost a joining host a bounded time",
        replacing(placement, "MAX_RIVALS", 1 << 20),
        lambda _: test_placement.test_the_choices_that_a_host_computes_for_others_are_bounded(),
    ),
    Defence(
        "only plausible coordinates are read",
        replacing(
            coordinates,
            "read_coordinate",
            lambda numbers: coordinates.Coordinate(tuple(numbers[:3]), *numbers[3:6]),
        ),
        lambda _: test_coordinates.test_a_coordinate_out_of_range_is_none(),
    ),
    Defence(
        "one measurement moves a peer a short way",
        replacing(coordinates, "MAX_STEP_S", 1e9),
        lambda _: test_coordinates.test_a_third_of_liars_moves_the_estimates_of_honest_peers_little(),
    ),
    Defence(
        "no peer claims to be certain of its coordinate",
        replacing(coordinates, "MIN_ERROR", 1e-9),
        lambda _: test_coordinates.test_a_coordinate_claims_no_more_certainty_than_it_may(),
    ),
    Defence(
        "the delays of few peers are remembered",
        replacing(coordinates, "MAX_FILTERED_PEERS", 1 << 20),
        lambda _: test_coordinates.test_the_delays_of_few_peers_are_remembered(),
    ),
    Defence(
        "a false coordinate brings a host no nearer than measured delays allow",
        replacing(View, "delay_between", believe_coordinates),
        lambda _: test_routing.test_a_false_coordinate_brings_a_host_no_nearer_than_measured_delays_allow(),
    ),
    Defence(
        "an unmeasured host is no nearer than the median of the measured ones",
        replacing(chain_search, "median_high", min),
        lambda _: test_routing.test_an_unmeasured_host_is_no_nearer_than_the_median_of_the_measured_ones(),
    ),
    Defence(
        "announcements at most double the pings to a host",
        ping_the_best,
        lambda _: (
            test_client_swarm.test_better_hosts_are_pinged_more_often_but_at_most_twice_as_often_as_others()
        ),
    ),
    Defence(
        "slander of a neighbour costs its sender",
        replace_both,
        lambda _: test.test_slanderers_change_the_share_of_an_honest_host_little(),
    ),
    Defence(
        "slander of a neighbour costs its sender, also where few hosts have its blocks",
        replace_both,
        lambda _: test_scale.test_slanderers_change_the_work_of_an_honest_host_little(),
    ),
)
