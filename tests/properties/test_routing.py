"""The router against brute force on small swarms."""

import random
from collections.abc import Iterator
from itertools import pairwise

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
    Hop,
    HostInfo,
    View,
    credible,
    find_chain,
    pair_of,
)
from swarmnet_protocols.routing.coordinates import DIMENSIONS, MAX_ERROR, MIN_HEIGHT_S, Coordinate

BLOCKS = 4
PRECISIONS = st.sampled_from(["bf16", "int4"])
SECONDS = st.floats(0.0, 1.0)
COORDINATES = st.builds(
    Coordinate,
    st.tuples(*[st.floats(-1.0, 1.0)] * DIMENSIONS),
    st.floats(MIN_HEIGHT_S, 0.1),
    error=st.floats(0.0, MAX_ERROR),
)


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
        banned=draw(st.lists(st.sampled_from(peers), max_size=3, unique=True)),
        unreachable=frozenset(pair_of(*pair) for pair in draw(st.lists(pairs, max_size=2))),
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


def cost(
    view: View, chain: list[Hop], source: PeerId | None, sink: PeerId | None, precision: str | None
) -> float:
    total, last = 0.0, source
    for index, hop in enumerate(chain):
        total += PRECISION_S * (precision not in (None, hop.precision)) + view.penalty_of(hop.peer)
        precision = hop.precision
        seconds = view.delay_between(last, hop.peer) + view.queue_s.get(hop.peer, 0.0)
        spare = max(1 - view.busy.get(hop.peer, 0.0), LEAST_SPARE)
        seconds += view.block_s[hop.peer] * (hop.end - hop.start) / spare
        is_end = (index == 0 and source is None) or (index == len(chain) - 1 and sink is None)
        total += seconds * (GUARD_MARGIN if is_end and view.guards and hop.peer not in view.guards else 1)
        last = hop.peer
    return total + view.delay_between(last, sink)


def every_chain(hosts: list[HostInfo], start: int, end: int) -> Iterator[list[Hop]]:
    if start == end:
        yield []
        return
    boundaries = {end, *(host.start for host in hosts), *(host.end for host in hosts)}
    for host in hosts:
        if host.start <= start < host.end:
            for leave in sorted(boundaries & {*range(start + 1, min(host.end, end) + 1)}):
                for rest in every_chain(hosts, leave, end):
                    yield [Hop(host.peer, start, leave, precision=host.precision), *rest]


@settings(max_examples=150)
@given(views(), st.integers(0, 3), st.booleans(), st.booleans(), PRECISIONS | st.none())
def test_a_chain_covers_all_blocks_once_at_nearly_the_lowest_cost(
    view: View, seed: int, from_peer: bool, to_peer: bool, precision: str | None
) -> None:
    source = view.hosts[0].peer if from_peer else None
    sink = view.hosts[-1].peer if to_peer else None
    allowed = [host for host in view.hosts if host.peer not in view.banned]
    for peer in view.banned:
        held = {block for host in allowed for block in range(host.start, host.end)}
        allowed += [
            host
            for host in view.hosts
            if host.peer == peer and not held.issuperset(range(host.start, host.end))
        ]
    chains = [
        chain
        for chain in every_chain(allowed, 0, BLOCKS)
        if all(one.peer != other.peer for one, other in pairwise(chain))
    ]
    covered = {block for host in view.hosts for block in range(host.start, host.end)}
    if not chains:
        with pytest.raises(NoRoute) as caught:
            find_chain(view, (0, BLOCKS), random.Random(seed), source=source, sink=sink)
        missing = {block for start, end in caught.value.missing for block in range(start, end)}
        assert missing == set(range(BLOCKS)) - covered
        return
    chain = find_chain(view, (0, BLOCKS), random.Random(seed), source=source, sink=sink, precision=precision)
    assert [hop.start for hop in chain] == [0, *(hop.end for hop in chain[:-1])]
    assert chain[-1].end == BLOCKS
    by_peer = {host.peer: host for host in view.hosts}
    assert all(by_peer[hop.peer].start <= hop.start < hop.end <= by_peer[hop.peer].end for hop in chain)
    assert all(one.peer != other.peer for one, other in pairwise(chain))
    view = credible(view)
    best = min(cost(view, other, source, sink, precision) for other in chains)
    assert cost(view, chain, source, sink, precision) <= best * (1 + MARGIN) + 1e-9
