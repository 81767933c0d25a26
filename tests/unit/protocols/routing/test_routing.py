"""The choice of hosts for a chain."""

import random
from collections import Counter

import pytest

from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import chain_view, coordinates
from swarmnet_protocols.routing.chain_search import CANDIDATES_PER_BLOCK, _shortlist, find_chain
from swarmnet_protocols.routing.chain_view import UNKNOWN_DELAY_S, Hop, View, credible, pair_of
from swarmnet_protocols.routing.coordinates import Coordinate
from swarmnet_protocols.routing.host_info import HostInfo
from tests.defences import defence, replacing

A, B, C, D = (PeerId(name) for name in "abcd")


def chain(view: View, span: tuple[int, int] = (0, 4), seed: int = 0, **ends: PeerId) -> list[Hop]:
    return find_chain(view, span, random.Random(seed), **ends)


def test_a_host_may_be_entered_and_left_in_mid_span() -> None:
    view = View([HostInfo(A, 0, 3, 0.3), HostInfo(B, 1, 4, 0.003)], delay_s={A: 0.01, B: 0.01})
    assert chain(view) == [Hop(A, 0, 1), Hop(B, 1, 4)]
    assert chain(view, (1, 3)) == [Hop(B, 1, 3)]


def test_blocks_without_a_host_are_named_in_the_error() -> None:
    hosts = [HostInfo(A, 1, 2, 0.1), HostInfo(B, 3, 4, 0.1), HostInfo(C, 0, 9, 0.1, state="leaving")]
    with pytest.raises(NoRoute) as caught:
        chain(View(hosts), (0, 6))
    assert caught.value.missing == ((0, 1), (2, 3), (4, 6))


def test_a_banned_host_is_used_only_where_no_other_host_can_serve() -> None:
    hosts = [HostInfo(A, 0, 2, 0.001), HostInfo(B, 0, 2, 9.0), HostInfo(C, 2, 4, 0.001)]
    assert [hop.peer for hop in chain(View(hosts, banned={A: 0.0}))] == [B, C]
    assert [hop.peer for hop in chain(View(hosts, banned={A: 0.0, B: 1.0}))][1] == C


def test_banned_hosts_take_turns_where_only_they_are_left() -> None:
    hosts = [
        HostInfo(A, 0, 2, 0.001),
        HostInfo(B, 0, 2, 9.0),
        HostInfo(C, 2, 4, 9.0),
        HostInfo(D, 2, 4, 0.001),
    ]
    assert [hop.peer for hop in chain(View(hosts, banned={B: 0.0, A: 1.0}))] == [B, D]
    assert [hop.peer for hop in chain(View(hosts, banned={A: 0.0, B: 1.0}))] == [A, D]
    assert [hop.peer for hop in chain(View(hosts, banned={D: 0.0, A: 1.0, B: 2.0}))] == [A, C]


def test_hosts_that_do_not_reach_each_other_are_no_neighbours() -> None:
    hosts = [HostInfo(A, 0, 2, 0.001), HostInfo(B, 2, 4, 0.001), HostInfo(C, 2, 4, 5.0)]
    view = View(hosts, unreachable={pair_of(B, A): 9.0})
    assert [hop.peer for hop in chain(view)] == [A, C]
    assert [hop.peer for hop in chain(view, (2, 4), source=A)] == [C]
    assert [hop.peer for hop in chain(View(hosts[:2], unreachable=view.unreachable))] == [A, B]


def test_the_oldest_failure_of_a_banned_host_and_pair_is_tried_first() -> None:
    hosts = [HostInfo(A, 0, 2, 0.001), HostInfo(B, 2, 4, 0.001), HostInfo(C, 2, 4, 0.001)]
    unreachable = {pair_of(A, B): 5.0}
    assert [hop.peer for hop in chain(View(hosts, banned={C: 4.0}, unreachable=unreachable))] == [A, C]
    assert [hop.peer for hop in chain(View(hosts, banned={C: 6.0}, unreachable=unreachable))] == [A, B]


def test_a_chain_has_one_precision_unless_it_is_far_slower() -> None:
    hosts = [
        HostInfo(A, 0, 2, 0.001, precision="int4"),
        HostInfo(B, 0, 2, 0.3, precision="bf16"),
        HostInfo(C, 2, 4, 0.001, precision="bf16"),
    ]
    assert [hop.peer for hop in chain(View(hosts))] == [B, C]
    assert [
        hop.peer for hop in chain(View([hosts[0], HostInfo(B, 0, 2, 9.0, precision="bf16"), hosts[2]]))
    ] == [A, C]
    twins = [HostInfo(A, 0, 4, 0.001, precision="int4"), HostInfo(B, 0, 4, 0.3, precision="bf16")]
    for precision, peer in (("int4", A), ("bf16", B)):
        found = find_chain(View(twins), (0, 4), random.Random(0), precision=precision)
        assert found == [Hop(peer, 0, 4, precision=precision)]


@defence(
    "a host that alone has its precision, and is not audited, is avoided",
    off=replacing(chain_view, "_alone_in_precision", lambda _: frozenset()),
)
def test_a_host_alone_in_its_precision_yields_to_auditable_ones() -> None:
    """A liar could announce a precision of its own, and no other host would compute its outputs
    again."""
    hosts = [
        HostInfo(A, 0, 4, 0.001, precision="q4_0"),
        HostInfo(B, 0, 4, 0.3, precision="bf16"),
        HostInfo(C, 0, 4, 0.3, precision="bf16"),
    ]
    for seed in range(10):
        [hop] = find_chain(View(hosts), (0, 4), random.Random(seed))
        assert hop.peer != A


def test_many_fast_hosts_of_one_precision_do_not_hide_another() -> None:
    hosts = [HostInfo(PeerId(f"p{index:02}"), 0, 2, 0.001, precision="int4") for index in range(20)]
    hosts += [HostInfo(B, 0, 2, 0.01, precision="bf16"), HostInfo(C, 2, 4, 0.01, precision="bf16")]
    assert {hop.precision for hop in chain(View(hosts))} == {"bf16"}


def test_a_busy_or_distant_host_is_avoided() -> None:
    hosts = [HostInfo(A, 0, 4, 0.1), HostInfo(B, 0, 4, 0.1)]
    near = {A: 0.01, B: 0.01}
    assert chain(View(hosts, delay_s=near, queue_s={A: 1.0}))[0].peer == B
    assert chain(View(hosts, delay_s={A: 0.5, B: 0.01}))[0].peer == B


def test_a_host_with_spare_time_is_preferred_though_no_step_waits() -> None:
    """A fifth of A's time is left and two fifths of B's, the median share: B is better unless it is
    twice as slow. C reports nothing."""
    delays = dict.fromkeys((A, B, C), 0.001)
    for slower, best in ((1.5, B), (3, A)):
        hosts = [HostInfo(A, 0, 4, 0.1), HostInfo(B, 0, 4, 0.1 * slower), HostInfo(C, 0, 4, 0.1)]
        measured = {host.peer: 1 / host.blocks_per_s for host in hosts}
        view = View(hosts, delays, busy={A: 0.8, B: 0.6, D: 0.6}, block_s=measured)
        for seed in range(10):
            assert chain(view, seed=seed)[0].peer == best
    assert chain(View(hosts[2:], delays, busy={A: 0.0}))[0].peer == C


def test_clients_spread_over_equal_hosts() -> None:
    hosts = [HostInfo(PeerId(f"p{index}"), 0, 4, 0.1) for index in range(4)]
    taken = Counter(chain(View(hosts), seed=seed)[0].peer for seed in range(200))
    assert len(taken) == 4
    assert min(taken.values()) > 20


def test_the_search_is_bounded_in_a_large_swarm() -> None:
    hosts = [HostInfo(PeerId(f"p{index:03}"), index % 4, index % 4 + 1, 0.1) for index in range(400)]
    equal = dict.fromkeys((host.peer for host in hosts), 1.0)
    assert len(_shortlist(credible(View(hosts)), hosts, (0, 4), equal)) <= 4 * CANDIDATES_PER_BLOCK
    firsts = {chain(View(hosts), seed=seed)[0].peer for seed in range(100)}
    assert len(firsts) > CANDIDATES_PER_BLOCK, "some peer ids are ahead of others"


def at(x_s: float, error: float = 0.2) -> Coordinate:
    return Coordinate((x_s, 0.0, 0.0), 0.001, error=error)


def test_neighbours_are_chosen_by_the_distance_of_their_coordinates() -> None:
    """B and C are equally far from the client, and B is near A."""
    hosts = [HostInfo(A, 0, 2, 0.01), HostInfo(B, 2, 4, 0.01), HostInfo(C, 2, 4, 0.01)]
    delays = dict.fromkeys((A, B, C), 0.1)
    view = View(hosts, delays, coordinates={A: at(0.1), B: at(0.11), C: at(-0.1)})
    assert view.delay_between(A, B) == pytest.approx(0.012)
    for seed in range(20):
        assert [hop.peer for hop in chain(view, seed=seed)] == [A, B]


def believe_coordinates(view: View, one: PeerId, other: PeerId) -> float:
    return coordinates.distance(view.coordinates[one], view.coordinates[other])


@defence(
    "a false coordinate brings a host no nearer than measured delays allow",
    off=replacing(View, "delay_between", believe_coordinates),
)
def test_a_false_coordinate_beats_no_measured_delay() -> None:
    view = View([], {A: 0.01, B: 0.2}, coordinates={A: at(0.0), B: at(0.0)})
    assert view.delay_between(A, B) == pytest.approx(0.19)
    far = View([], {A: 0.01, B: 0.02}, coordinates={A: at(0.0), B: at(3.0)})
    assert far.delay_between(A, B) == pytest.approx(0.03), "the way through the client"


@defence(
    "an unmeasured host is no nearer than the median of the measured ones",
    off=replacing(chain_view, "median_high", min),
)
def test_an_unmeasured_host_is_no_nearer_than_the_measured_median() -> None:
    measured = {A: 0.02, B: 0.03, C: 0.04}
    view = View([], measured, coordinates={D: at(0.0)}, own=at(0.0))
    assert view.delay_to(D) == 0.03
    assert View([], measured, coordinates={D: at(0.1)}, own=at(0.0)).delay_to(D) == pytest.approx(0.102)
    assert View([], measured, coordinates={D: at(0.1)}, own=at(0.0, error=1.0)).delay_to(D) == UNKNOWN_DELAY_S
    assert View([], {A: 0.02}, coordinates={D: at(0.0)}, own=at(0.0)).delay_to(D) == UNKNOWN_DELAY_S


def test_a_host_without_room_for_caches_is_avoided() -> None:
    hosts = [HostInfo(A, 0, 4, 0.1), HostInfo(B, 0, 4, 0.3)]
    measured = {A: 0.025, B: 0.075}
    assert chain(View(hosts, block_s=measured, cache_free={A: 0.01, B: 0.5}))[0].peer == B
    assert chain(View(hosts, block_s=measured, cache_free={A: 0.2, B: 0.5}))[0].peer == A
    assert chain(View(hosts[:1], cache_free={A: 0.0}))[0].peer == A


def test_a_host_that_does_not_reach_others_is_avoided_in_all_chains() -> None:
    hosts = [
        HostInfo(A, 0, 2, 0.01),
        HostInfo(B, 0, 2, 0.02),
        HostInfo(C, 2, 4, 0.01),
        HostInfo(D, 2, 4, 0.01),
    ]
    view = View(hosts, unreachable={pair_of(A, C): 9.0}, reporters=frozenset({A}))
    for seed in range(20):
        assert chain(view, seed=seed)[0].peer == B


def test_clients_spread_over_the_best_host_and_nearly_equal_ones() -> None:
    hosts = [HostInfo(PeerId(f"p{index}"), 0, 4, 0.1 if index else 0.09) for index in range(4)]
    view = View(
        hosts,
        dict.fromkeys((host.peer for host in hosts), 0.01),
        block_s={host.peer: 1 / host.blocks_per_s for host in hosts},
    )
    taken = Counter(chain(view, seed=seed)[0].peer for seed in range(300))
    assert len(taken) == 4
    assert taken[PeerId("p0")] < 240


def test_two_hosts_that_need_a_relay_are_avoided_as_neighbours() -> None:
    hosts = [HostInfo(A, 0, 2, 0.01), HostInfo(B, 2, 4, 0.01), HostInfo(C, 2, 4, 0.01)]
    delays = {A: 0.01, B: 0.01, C: 0.01}
    view = View(hosts, delays, relayed=frozenset({A, B}), symmetric=frozenset({B}))
    for seed in range(20):
        assert [hop.peer for hop in chain(view, seed=seed)] == [A, C]
    # A hole is punched between two cone routers.
    cones = View(hosts, delays, relayed=frozenset(delays))
    assert cones.delay_between(A, B) == cones.delay_between(A, C) == 0.02
