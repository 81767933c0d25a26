"""The router against brute force on small swarms."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import (
    GUARD_MARGIN,
    LEAST_SPARE,
    MARGIN,
    PRECISION_S,
    REPLACED_S,
    find_chain,
)
from swarmnet_protocols.routing.chain_view import Hop, View, credible, pair_of
from swarmnet_protocols.routing.coordinates import DIMENSIONS, MAX_ERROR, MIN_HEIGHT_S, Coordinate
from swarmnet_protocols.routing.host_info import HostInfo

T = TypeVar("T")
BLOCKS = 4
PRECISIONS = st.sampled_from(["bf16", "int4"])
SECONDS = st.floats(0.0, 1.0)
COORDINATES = st.builds(
    Coordinate,
    st.tuples(*[st.floats(-1.0, 1.0)] * DIMENSIONS),
    st.floats(MIN_HEIGHT_S, 0.1),
    error=st.floats(0.0, MAX_ERROR),
)


def times(failures: st.SearchStrategy[T], most: int) -> st.SearchStrategy[dict[T, float]]:
    """At most ``most`` failures, the oldest first, each with its time."""
    ages = st.dictionaries(failures, st.floats(0.0, 9.0), max_size=most)
    return ages.map(lambda found: dict(sorted(found.items(), key=lambda each: each[1])))


@st.composite
def views(draw: st.DrawFn) -> View:
    hosts = []
    for index in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, BLOCKS))
        hosts.append(HostInfo(PeerId(f"p{index}"), start, end, draw(SECONDS), precision=draw(PRECISIONS)))
    peers = [host.peer for host in hosts]
    pairs = st.tuples(st.sampled_from(peers), st.sampled_from(peers))
    return View(
        hosts,
        delay_s=draw(st.dictionaries(st.sampled_from(peers), SECONDS)),
        queue_s=draw(st.dictionaries(st.sampled_from(peers), SECONDS)),
        banned=draw(times(st.sampled_from(peers), 3)),
        unreachable=draw(times(pairs.map(lambda pair: pair_of(*pair)), 2)),
        block_s=draw(st.dictionaries(st.sampled_from(peers), SECONDS)),
        guards=frozenset(draw(st.lists(st.sampled_from(peers), max_size=2))),
        relayed=frozenset(draw(st.lists(st.sampled_from(peers), max_size=3))),
        symmetric=frozenset(draw(st.lists(st.sampled_from(peers), max_size=2))),
        coordinates=draw(st.dictionaries(st.sampled_from(peers), COORDINATES)),
        own=draw(COORDINATES | st.none()),
        cache_free=draw(st.dictionaries(st.sampled_from(peers), SECONDS)),
        reporters=frozenset(draw(st.lists(st.sampled_from(peers), max_size=2))),
        busy=draw(st.dictionaries(st.sampled_from(peers), SECONDS)),
        explore=draw(st.booleans()),
    )


@st.composite
def open_hops(draw: st.DrawFn) -> list[Hop]:
    """Hops that are open, in order, with gaps between them: on hosts of the view, which may have
    moved, or on one that is not known."""
    peers = [PeerId(f"p{index}") for index in range(6)]
    cuts = sorted(draw(st.sets(st.integers(0, BLOCKS), min_size=2)))
    hops = [
        Hop(draw(st.sampled_from(peers)), start, end, precision=draw(PRECISIONS))
        for start, end in pairwise(cuts)
        if draw(st.booleans())
    ]
    return [hop for at, hop in enumerate(hops) if not at or hops[at - 1].peer != hop.peer]


def cost(
    view: View,
    chain: list[Hop],
    source: PeerId | None,
    sink: PeerId | None,
    precision: str | None,
    hops: list[Hop],
) -> float:
    total, last = REPLACED_S * len([hop for hop in hops if hop not in chain]), source
    for index, hop in enumerate(chain):
        total += PRECISION_S * (precision not in (None, hop.precision))
        total += 0.0 if hop in hops else view.penalty_of(hop.peer)
        precision = hop.precision
        seconds = view.delay_between(last, hop.peer) + view.queue_s.get(hop.peer, 0.0)
        spare = max(1 - view.busy.get(hop.peer, 0.0), LEAST_SPARE)
        seconds += view.block_s.get(hop.peer, 0.0) * (hop.end - hop.start) / spare
        is_end = (index == 0 and source is None) or (index == len(chain) - 1 and sink is None)
        total += seconds * (GUARD_MARGIN if is_end and view.guards and hop.peer not in view.guards else 1)
        last = hop.peer
    return total + view.delay_between(last, sink)


def every_chain(hosts: list[HostInfo], hops: list[Hop], start: int, end: int) -> Iterator[list[Hop]]:
    if start == end:
        yield []
        return
    boundaries = {end, *(each.start for each in (*hosts, *hops)), *(each.end for each in (*hosts, *hops))}
    for host in hosts:
        if host.start <= start < host.end:
            for leave in sorted(boundaries & {*range(start + 1, min(host.end, end) + 1)}):
                for rest in every_chain(hosts, hops, leave, end):
                    yield [Hop(host.peer, start, leave, precision=host.precision), *rest]
    for hop in hops:
        if hop.start == start:
            for rest in every_chain(hosts, hops, hop.end, end):
                yield [hop, *rest]


@settings(max_examples=150)
@given(views(), open_hops(), st.integers(0, 3), st.booleans(), st.booleans(), PRECISIONS | st.none())
def test_a_chain_covers_all_blocks_once_at_nearly_the_lowest_cost(
    view: View, hops: list[Hop], seed: int, from_peer: bool, to_peer: bool, precision: str | None
) -> None:
    source = view.hosts[0].peer if from_peer else None
    sink = view.hosts[-1].peer if to_peer else None

    def find() -> list[Hop]:
        rng = random.Random(seed)
        seen = replace(view, hops=hops)
        return find_chain(seen, (0, BLOCKS), rng, source=source, sink=sink, precision=precision)

    def chains_of(hosts: list[HostInfo]) -> list[list[Hop]]:
        return [
            chain
            for chain in every_chain(hosts, hops, 0, BLOCKS)
            if all(one != other for one, other in pairwise([source, *(hop.peer for hop in chain), sink]))
        ]

    def is_linked(chain: list[Hop]) -> bool:
        peers = [source, *(hop.peer for hop in chain), sink]
        return not any(
            one is not None and other is not None and pair_of(one, other) in view.unreachable
            for one, other in pairwise(peers)
        )

    allowed = [host for host in view.hosts if host.peer not in view.banned]
    banned = [host for peer in view.banned for host in view.hosts if host.peer == peer]
    stages = [chains_of(allowed)]
    while banned:
        held = {block for each in (*allowed, *hops) for block in range(each.start, each.end)}
        lacks = [host for host in banned if not held.issuperset(range(host.start, host.end))]
        if not lacks and not held.issuperset(range(BLOCKS)):
            break
        allowed.append((banned if held.issuperset(range(BLOCKS)) else lacks)[0])
        banned.remove(allowed[-1])
        stages.append(chains_of(allowed))
    stages = [chains for chains in stages if chains]
    if not stages:
        with pytest.raises(NoRoute) as caught:
            find()
        covered = {block for each in view.hosts for block in range(each.start, each.end)}
        missing = {block for start, end in caught.value.missing for block in range(start, end)}
        assert missing <= set(range(BLOCKS)) - covered or not set(range(BLOCKS)) - covered
        return
    chain = find()
    assert [hop.start for hop in chain] == [0, *(hop.end for hop in chain[:-1])]
    assert chain[-1].end == BLOCKS
    by_peer = {host.peer: host for host in view.hosts}
    for hop in chain:
        assert hop in hops or by_peer[hop.peer].start <= hop.start < hop.end <= by_peer[hop.peer].end
    assert all(one != other for one, other in pairwise([source, *(hop.peer for hop in chain), sink]))
    view = credible(view)
    for chains in stages:
        costs = [cost(view, other, source, sink, precision, hops) for other in chains]
        most = min(costs) * (1 + MARGIN) + 1e-9
        if chain in chains and cost(view, chain, source, sink, precision, hops) <= most:
            return
        # More banned hosts are allowed only where neighbours of a chain as good as the best do not
        # reach each other.
        assert any(each <= most and not is_linked(other) for each, other in zip(costs, chains, strict=True))
    raise AssertionError("the chain is not the cheapest one of any hosts that may be used")


@given(views(), open_hops(), st.integers(0, 3))
def test_where_every_block_has_a_host_there_is_a_chain(view: View, hops: list[Hop], seed: int) -> None:
    covered = {block for host in view.hosts for block in range(host.start, host.end)}
    if covered == set(range(BLOCKS)):
        found = find_chain(replace(view, hops=hops), (0, BLOCKS), random.Random(seed))
        assert found[-1].end == BLOCKS
