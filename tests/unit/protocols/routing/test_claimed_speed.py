"""The gain of a host that claims to be fast: its share of chains, with the real router and
estimator, in virtual time."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmnet_client.hosts.entry_guards import LIFETIME_S, MOST, WANTED, EntryGuards
from swarmnet_client.hosts.exclusions import Exclusions
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import chain_search, chain_view
from swarmnet_protocols.routing.chain_search import find_chain
from swarmnet_protocols.routing.chain_view import Hop, View, credible
from swarmnet_protocols.routing.host_info import HostInfo
from swarmnet_protocols.routing.measured_speed import MEMORY_S, Speeds
from tests.defences import Patch, defence, nothing, replacing
from tests.support.attacks.switched_off import replace_both

MOST_OF_A_TRUTHFUL_HOST = 1.2
HONEST, LIARS = 12, 4
BLOCK_S, DELAY_S = 0.05 / 30, 0.005
LIES = 100.0
"""How many times its speed a liar announces."""
EXPLORE = 0.05


def swarm(span: int) -> dict[PeerId, HostInfo]:
    """Honest hosts and liars, each with ``span`` of 30 blocks."""
    hosts = {}
    for kind, count in (("honest", HONEST), ("liar", LIARS)):
        for number in range(count):
            start = span * (number % (30 // span))
            step_s = BLOCK_S * span / (1.0 if kind == "honest" else LIES)
            # The ids of liars sort before all others.
            peer = PeerId(f"{'a' if kind == 'liar' else 'h'}-{kind}{number:02}")
            hosts[peer] = HostInfo(peer, start, start + span, step_s)
    return hosts


def live(
    hosts: Mapping[PeerId, HostInfo],
    true_s: Mapping[PeerId, float],
    rng: random.Random,
    *,
    chains: int,
    queue_s: Mapping[PeerId, float] | None = None,
    busy: Mapping[PeerId, float] | None = None,
) -> list[list[Hop]]:
    """The chains of one client, one every two seconds. The client measures each, with noise."""
    speeds, used = Speeds(), []
    delay_s = dict.fromkeys(hosts, DELAY_S)
    for number in range(chains):
        now = 2.0 * number
        view = View(
            list(hosts.values()),
            delay_s,
            queue_s or {},
            block_s=speeds.at(hosts, now),
            busy=busy or {},
            explore=rng.random() < EXPLORE,
        )
        chain = find_chain(view, (0, 30), rng)
        used.append(chain)
        taken_s = 2 * DELAY_S * len(chain) + sum(true_s[hop.peer] * (hop.end - hop.start) for hop in chain)
        view = View(view.hosts, delay_s, queue_s or {}, block_s=view.block_s)
        speeds.measured(credible(view), chain, taken_s * rng.uniform(0.97, 1.05), now)
    return used


def excess(chains: list[list[Hop]]) -> float:
    """The mean number of a liar's chains, in multiples of a truthful host's."""
    uses = Counter(hop.peer for chain in chains for hop in chain)
    liars = sum(count for peer, count in uses.items() if "liar" in peer) / LIARS
    return liars / max(1.0, (sum(uses.values()) - LIARS * liars) / HONEST)


def ordered_by_id(patch: Patch) -> None:
    def shortlist(view: Any, hosts: Sequence[HostInfo], span: Any, stretch: Any) -> list[HostInfo]:
        return sorted(hosts, key=lambda host: PeerId(host.peer))[: chain_search.CANDIDATES_PER_BLOCK]

    patch.setattr(chain_search, "_shortlist", shortlist)


@defence(
    "an unmeasured host counts as the median at best",
    off=replacing(chain_view, "median_high", min),
    span=30,
    slower=1.0,
)
@defence("no peer id is preferred", off=ordered_by_id, span=30, slower=1.0)
@pytest.mark.parametrize("span", [30, 15])
@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_a_liar_has_few_more_chains_than_a_truthful_host(span: int, slower: float) -> None:
    rng = random.Random(f"{span}/{slower}")
    hosts = swarm(span)
    true_s = {peer: BLOCK_S * (slower if "liar" in peer else 1.0) for peer in hosts}
    fresh = [chain for _ in range(600) for chain in live(hosts, true_s, rng, chains=1)]
    lasting = [chain for _ in range(5) for chain in live(hosts, true_s, rng, chains=120)[30:]]
    assert excess(fresh) <= MOST_OF_A_TRUTHFUL_HOST
    assert excess(lasting) <= MOST_OF_A_TRUTHFUL_HOST


SLANDERERS, CLIENTS = 6, 2500


def chains_with_victim(*, slandered: bool) -> float:
    """The share of the clients' chains through one honest host, of ten second halves, whose
    predecessors slander it in three of ten cases."""
    rng = random.Random(7)
    hosts = {
        peer: HostInfo(peer, start, start + 15, 15 * BLOCK_S)
        for start in (0, 15)
        for number in range(20 if start == 0 else 10)
        for peer in [PeerId(f"{start}-{number:02}")]
    }
    liars, victim = {PeerId(f"0-{number:02}") for number in range(SLANDERERS)}, PeerId("15-00")
    used = 0
    for _ in range(CLIENTS):
        exclusions = Exclusions()
        first = second = None
        while True:
            view = View(
                list(hosts.values()),
                dict.fromkeys(hosts, DELAY_S),
                unreachable=exclusions.separated(0.0),
                reporters=exclusions.reporters(0.0),
            )
            if second is None:
                first, second = (hop.peer for hop in find_chain(view, (0, 30), rng))
            else:
                [hop] = find_chain(view, (0, 15), rng, sink=second)
                first = hop.peer
            if not (slandered and first in liars and second == victim):
                break
            if exclusions.separate(first, second, 0.0):
                second = None
        used += second == victim
    return used / CLIENTS


@defence("slander of a neighbour costs its sender", off=replace_both)
def test_slanderers_change_the_share_of_an_honest_host_little() -> None:
    """Three of ten hosts before it report that they do not reach it. If the reported host were
    replaced at once, it would lose 30 % of its chains."""
    assert chains_with_victim(slandered=True) == pytest.approx(chains_with_victim(slandered=False), rel=0.2)


@defence(
    "an unmeasured claim of an empty queue counts as the median",
    off=replacing(chain_view, "median_high", min),
)
def test_a_claim_of_no_queue_gains_nothing() -> None:
    rng = random.Random(3)
    hosts = swarm(30)
    queue_s = {peer: 0.0 if "liar" in peer else 0.02 for peer in hosts}
    chains = [
        chain
        for _ in range(600)
        for chain in live(hosts, dict.fromkeys(hosts, BLOCK_S), rng, chains=1, queue_s=queue_s)
    ]
    assert excess(chains) <= MOST_OF_A_TRUTHFUL_HOST


@defence("a claim of no work counts as the median", off=replacing(chain_view, "median_high", min))
def test_a_claim_of_no_work_gains_nothing() -> None:
    rng = random.Random(4)
    hosts = swarm(30)
    busy = {peer: 0.0 if "liar" in peer else 0.8 for peer in hosts}
    true_s = dict.fromkeys(hosts, BLOCK_S)
    chains = [chain for _ in range(600) for chain in live(hosts, true_s, rng, chains=1, busy=busy)]
    assert excess(chains) <= MOST_OF_A_TRUTHFUL_HOST


@defence("steps that take longer than announced show work", off=replacing(chain_view, "USUAL_EXCESS", 1e9))
def test_a_host_slower_than_announced_has_work_whatever_it_reports() -> None:
    hosts = swarm(30)
    view = View(
        list(hosts.values()), block_s=dict.fromkeys(hosts, 1.5 * BLOCK_S), busy=dict.fromkeys(hosts, 0.0)
    )
    busy = credible(view).busy
    assert all(busy[peer] > 0.98 if "liar" in peer else busy[peer] == 0.0 for peer in hosts)


def test_hosts_that_are_truly_faster_get_the_chains_once_measured() -> None:
    rng = random.Random(5)
    hosts = {
        PeerId(f"h{number}"): HostInfo(PeerId(f"h{number}"), 0, 30, 0.02 if number < 3 else 0.1)
        for number in range(10)
    }
    true_s = {peer: 1 / host.blocks_per_s for peer, host in hosts.items()}
    chains = [chain for _ in range(5) for chain in live(hosts, true_s, rng, chains=200)[100:]]
    fast = sum(chain[0].peer in {"h0", "h1", "h2"} for chain in chains) / len(chains)
    assert fast > 0.85


def test_a_measurement_is_forgotten_and_gone_hosts_with_it() -> None:
    hosts = {PeerId("a"): HostInfo(PeerId("a"), 0, 4, 0.4)}
    speeds = Speeds()
    speeds.measured(credible(View(list(hosts.values()))), [Hop(PeerId("a"), 0, 4)], 1.3, 0.0)
    assert speeds.at(hosts, MEMORY_S - 1) == pytest.approx({"a": 0.175})
    assert speeds.at({}, 1.0) == {}
    assert speeds.at(hosts, MEMORY_S) == {}


# ---- guards ------------------------------------------------------------------------------------

PEERS = [PeerId(f"p{number}") for number in range(20)]


@defence("a client keeps its first and last hops", off=replacing(EntryGuards, "used", nothing))
def test_a_client_keeps_its_first_and_last_hops(tmp_path: Path) -> None:
    hosts = [HostInfo(peer, 0, 30, 0.05) for peer in PEERS]
    delay_s, ends = dict.fromkeys(PEERS, DELAY_S), set[PeerId]()
    for seed in range(100):
        rng = random.Random(seed)
        guards = EntryGuards(tmp_path / "guards" / "x.json", rng, lambda now=1e9 + 3600.0 * seed: now)
        chain = find_chain(View(hosts, delay_s, guards=guards.peers()), (0, 30), rng)
        guards.used(chain[0].peer, chain[-1].peer, PEERS)
        ends |= {chain[0].peer, chain[-1].peer}
    assert len(ends) <= WANTED


def test_another_host_stands_in_for_guards_that_are_gone_or_slow() -> None:
    hosts = [HostInfo(peer, 0, 30, 0.05) for peer in PEERS[:3]]
    delay_s, guard = dict.fromkeys(PEERS, DELAY_S), frozenset(PEERS[:1])
    rng = random.Random(0)
    assert find_chain(View(hosts, delay_s, guards=guard), (0, 30), rng)[0].peer == PEERS[0]
    assert find_chain(View(hosts[1:], delay_s, guards=guard), (0, 30), rng)[0].peer != PEERS[0]
    assert (
        find_chain(View(hosts, delay_s, banned={PEERS[0]: 0.0}, guards=guard), (0, 30), rng)[0].peer
        != PEERS[0]
    )
    slow = {PEERS[0]: 0.5}
    assert find_chain(View(hosts, delay_s, block_s=slow, guards=guard), (0, 30), rng)[0].peer != PEERS[0]


def test_guards_end_and_are_few_and_need_no_folder(tmp_path: Path) -> None:
    clock = 1e9
    (tmp_path / "file").write_text("no folder")
    guards = EntryGuards(tmp_path / "file" / "x.json", random.Random(0), lambda: clock)
    for peer in PEERS:
        guards.used(peer, peer, [peer])
    assert len(guards.peers()) <= 2 * MOST
    clock += LIFETIME_S[1]
    assert guards.peers() == frozenset()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"first": 3}', '{"first": {"a": [1e999, 0]}, "last": {}}', "[" * 9000]
)
def test_a_damaged_file_of_guards_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    assert EntryGuards(tmp_path / "x.json", random.Random(0), lambda: 1e9).peers() == frozenset()
