"""A client excludes a host, or a pair of neighbours, for a time, and forgets hosts that left."""

import asyncio
import random
import sys
from collections import Counter

from swarmnet_client.hosts.exclusions import (
    CONVICTED_S,
    MIN_OVERLOADED_S,
    SEPARATED_S,
    Exclusions,
    shortest_wait_s,
)
from swarmnet_client.hosts.pings import MAX_PINGED_HOSTS, PINGED_HOSTS, PINGED_PER_BLOCK, PingMonitor, drawn
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_view import pair_of
from swarmnet_protocols.routing.coordinates import Coordinate
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.timing import Timing
from tests.defences import Patch, defence
from tests.support.network.memory_network import LinkProfile, MemoryNetwork

ONE, OTHER = PeerId("one"), PeerId("other")


def test_a_pair_is_kept_apart_for_a_while_in_either_order() -> None:
    exclusions = Exclusions()
    exclusions.separate(OTHER, ONE, now=5.0)
    assert exclusions.separated(5.0 + SEPARATED_S - 1) == {pair_of(ONE, OTHER): 5.0}
    assert exclusions.reporters(5.0 + SEPARATED_S - 1) == {OTHER}
    assert not exclusions.separate(OTHER, ONE, now=6.0), "the same host again"
    assert not exclusions.separate(ONE, PeerId("third"), now=6.0), "the reported one reports"
    assert exclusions.separate(PeerId("fourth"), ONE, now=6.0)
    exclusions = Exclusions()
    exclusions.separate(OTHER, ONE, now=5.0)
    assert not exclusions.reporters(5.0 + SEPARATED_S)
    assert not exclusions.separated(5.0 + SEPARATED_S)


def test_a_conviction_ends() -> None:
    exclusions = Exclusions()
    assert not exclusions.is_convicted(ONE, now=0.0)
    exclusions.convict(ONE, now=0.0)
    assert exclusions.is_convicted(ONE, now=CONVICTED_S - 1)
    assert not exclusions.is_convicted(OTHER, now=CONVICTED_S - 1)
    assert not exclusions.is_convicted(ONE, now=CONVICTED_S)


def test_a_conviction_outlasts_an_answer() -> None:
    exclusions = Exclusions()
    exclusions.bans.failed(ONE, 0.0)
    exclusions.convict(ONE, now=0.0)
    exclusions.bans.served(ONE)
    assert not exclusions.bans.at(0.0)
    assert exclusions.is_convicted(ONE, now=0.0)


def test_an_overloaded_host_is_left_alone_for_the_wait_it_expects() -> None:
    exclusions = Exclusions()
    exclusions.refused(ONE, 12.0, now=5.0)
    exclusions.refused(OTHER, 0.0, now=5.0)
    assert exclusions.overloaded(5.0) == {ONE: 12.0, OTHER: MIN_OVERLOADED_S}
    assert exclusions.overloaded(5.0 + MIN_OVERLOADED_S) == {ONE: 12.0 - MIN_OVERLOADED_S}
    assert not exclusions.overloaded(17.0)


def test_a_host_that_refused_new_work_may_continue_an_answer() -> None:
    exclusions = Exclusions()
    exclusions.refused(ONE, 12.0, now=0.0)
    exclusions.refused(OTHER, 12.0, now=0.0, continues=True)
    assert exclusions.overloaded(0.0, continues=True) == {OTHER: 12.0}
    assert exclusions.overloaded(0.0) == {ONE: 12.0, OTHER: 12.0}
    exclusions.refused(OTHER, 20.0, now=5.0)
    assert exclusions.overloaded(5.0, continues=True) == {OTHER: 7.0}, "what it said of new work"
    assert exclusions.overloaded(5.0) == {ONE: 7.0, OTHER: 20.0}
    assert exclusions.overloaded(13.0) == {OTHER: 12.0}
    assert not exclusions.overloaded(13.0, continues=True)


def test_the_shortest_wait_is_that_until_every_block_has_a_host() -> None:
    hosts = [
        HostInfo(ONE, 0, 4, 0.1),
        HostInfo(OTHER, 0, 6, 0.1),
        HostInfo(PeerId("third"), 4, 8, 0.1),
    ]
    waits_s = {ONE: 3.0, OTHER: 9.0, PeerId("third"): 5.0}
    assert shortest_wait_s([(0, 4)], hosts, waits_s) == 3.0
    assert shortest_wait_s([(0, 8)], hosts, waits_s) == 5.0
    assert shortest_wait_s([(0, 9)], hosts, waits_s) is None, "block 8 has no host"
    assert shortest_wait_s([(0, 4)], hosts, {}) is None, "none is busy"


def test_measurements_of_a_host_that_left_are_dropped() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile())
        monitor = PingMonitor(network.transport(PeerId("client")), Timing(), random.Random(0), lambda _: None)
        monitor.delay_s |= {ONE: 0.1, OTHER: 0.1}
        monitor.queue_s |= {ONE: 0.0, OTHER: 0.0}
        monitor.busy |= {ONE: 0.5, OTHER: 0.5}
        monitor.cache_free |= {ONE: 0.5, OTHER: 0.5}
        monitor.coordinates |= {ONE: Coordinate(), OTHER: Coordinate()}
        monitor.follow({ONE: HostInfo(ONE, 0, 4, 0.1)})
        assert monitor.delay_s.keys() == monitor.queue_s.keys() == monitor.busy.keys() == {ONE}
        assert monitor.cache_free.keys() == monitor.coordinates.keys() == {ONE}
        await monitor.close()

    asyncio.run(scenario())


def spread_hosts(count: int, blocks: int = 80, length: int = 10) -> list[HostInfo]:
    """``count`` hosts of ``length`` blocks each, the windows one after another, in the order of
    their peer ids."""
    starts = range(0, blocks - length + 1, length)
    windows = [starts[number % len(starts)] for number in range(count)]
    return [
        HostInfo(PeerId(f"p{number:05d}"), start, start + length, 0.1) for number, start in enumerate(windows)
    ]


def ping_by_id(patch: Patch) -> None:
    patch.setattr(random.Random, "shuffle", lambda _, hosts: hosts.sort(key=lambda host: host.peer))


@defence("no peer id attracts the pings of clients", off=ping_by_id)
def test_a_mined_peer_id_is_pinged_by_no_more_clients_than_others() -> None:
    """800 hosts, of which a client pings 32: each is pinged by 8 of 200 clients on average, by 20
    with a chance of 1 in 10,000."""
    hosts, clients = spread_hosts(800), 200
    pings = Counter(
        host.peer for seed in range(clients) for host in drawn(hosts, frozenset(), random.Random(seed))
    )
    assert len(pings) == len(hosts)
    assert max(pings[host.peer] for host in hosts[:24]) < 20


def ping_the_best(patch: Patch) -> None:
    """Ping the hosts that are expected to be best, instead of the better host of random pairs."""
    patch.setattr(
        sys.modules[__name__],
        "drawn",
        lambda hosts, _pinged, _rng, expected_s: sorted(hosts, key=expected_s)[:32],
    )


@defence("announcements at most double the pings to a host", off=ping_the_best)
def test_better_hosts_get_at_most_twice_the_pings_of_others() -> None:
    """What a host announces decides which hosts count as better. Each is pinged by 8 of 200 clients
    on average, by 30 with a chance of 1 in 1,000."""
    hosts, clients = spread_hosts(800), 200
    claims = {host.peer: 0.0 if index < 40 else 1.0 for index, host in enumerate(hosts)}
    pings = Counter(
        host.peer
        for seed in range(clients)
        for host in drawn(hosts, frozenset(), random.Random(seed), lambda host: claims[host.peer])
    )
    usual = sum(pings.values()) / len(hosts)
    claimed = sum(pings[host.peer] for host in hosts[:40]) / 40
    assert 1.5 * usual < claimed < 2.2 * usual
    assert max(pings.values()) < 30


def test_every_block_has_enough_pinged_hosts() -> None:
    hosts = spread_hosts(1_000)
    chosen = drawn(hosts, frozenset(), random.Random(0))
    held = Counter(block for host in chosen for block in range(host.start, host.end))
    assert set(held) == set(range(80))
    assert min(held.values()) >= PINGED_PER_BLOCK
    assert drawn(hosts, {host.peer for host in chosen}, random.Random(0)) == []
    gone = {chosen[0].peer, chosen[5].peer}
    again = drawn(hosts, {host.peer for host in chosen} - gone, random.Random(1))
    assert {host.start for host in again} == {chosen[0].start, chosen[5].start}


def test_a_bounded_number_of_hosts_is_pinged() -> None:
    narrow = [HostInfo(PeerId(f"p{number}"), number % 80, number % 80 + 1, 0.1) for number in range(800)]
    assert len(drawn(narrow, frozenset(), random.Random(0))) == MAX_PINGED_HOSTS
    whole = [HostInfo(PeerId(f"p{number}"), 0, 80, 0.1) for number in range(800)]
    assert len(drawn(whole, frozenset(), random.Random(0))) == PINGED_HOSTS
    assert len(drawn(whole[:5], frozenset(), random.Random(0))) == 5
