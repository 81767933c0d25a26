"""Decide which announced hosts count, from their claims and from what this peer has seen itself.

A signed record is only a claim. Any peer can sign records of hosts that do not exist, at no cost,
and renew them for ever. So a peer calls a few of the announced hosts, and its decisions rest on who
answers:

1. **Whom to call** (``Sightings.to_call``). Each block should have ``LEAST_SEEN`` hosts that this
   peer has seen. Each look calls one more host, drawn at random. The number of calls does not grow
   with the number of records.
2. **Who counts** (``Sightings.counted``). A host that does not answer does not count. A host that
   was not called counts, unless most called hosts of one of its blocks do not answer.
3. **Places.** Identities are free, networks are not. Hosts in one subnet count as one host when the
   question is who else has a block (``throughput.holders``). Together they have the speed of one
   host (``sharing``).
4. **Whom to ask to compute** (``Sightings.block_to_try``). A machine without any block can answer
   calls. So this peer asks the hosts of a block to compute it, if this peer could host the block
   itself. A block that none of them computes counts as a block without hosts
   (``Sightings.stands``).
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest

from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.spans import clipped
from swarmnet_protocols.routing.throughput import Claim, holders

SEEN_S = 300.0
"""Seconds that an answer counts. A machine that answers once and then leaves still counts for that
time, if somebody renews its record. With a smaller value, peers call each other more often."""
LEAST_SEEN = 2
"""Hosts of each block that a peer wants to have seen. With one, the end of that host would look
like a block without hosts."""
MAX_CALLS = 8
"""Most calls at one look. With more, a live host among invented ones is found sooner. But a liar
may choose where each call goes."""
DOUBTS = 3
"""Most hosts by which the failed hosts of a block may outnumber the hosts that answered, within
``SEEN_S``. With more, hosts of the block that were not called do not count. After an outage, honest
hosts leave about that many stale records."""
FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0
"""Seconds until a silent host is called again: the first pause, doubled each time, and the
longest."""
REFUTED_S = 3600.0
"""Seconds that a host with wrong outputs does not count, even if it answers."""
PROVEN_S = 3600.0
"""Seconds that right outputs count. A host that stops computing keeps its blocks that long. With a
smaller value, hosts load blocks of others more often to check them."""
PATIENCE_S = 900.0
"""Seconds until a block that nobody computes counts as a block without hosts. Its hosts may still
load it, or may be overloaded. With a smaller value, other hosts take blocks that are about to be
served. With a larger one, a liar keeps blocks longer."""
LEAST_ASKS = 3
"""Least times that the hosts of a block are asked before it counts as a block without hosts. One
answer may get lost."""
RARER = 64
"""With each further place of its hosts, a block is tried this many times less often. Liars in two
places are found in half an hour. With a smaller value, each host of a large swarm loads a block an
hour to try it."""
MAX_KNOWN = 4096
"""A peer remembers at most this many hosts. It forgets the one it called longest ago."""


@dataclass(frozen=True)
class Sighting:
    """One host, as this peer has seen it. Times are in seconds of the clock that gives ``now``."""

    answered_at: float = -math.inf
    manifest: bytes = b""
    """The model that the host named when it last answered."""
    span: tuple[int, int] = (0, 0)
    """The blocks [start, end) that it named."""
    place: str = ""
    """Subnet where the host was reached; empty if unknown, or for this peer's own network."""
    failed_at: float = -math.inf
    failures: int = 0
    """Consecutive calls that the host did not answer."""
    refuted_at: float = -math.inf
    """Time when the host last computed wrong outputs."""
    computed: tuple[bytes, int] = (b"", -1)
    """The model and the block that it last computed for this peer, with right outputs."""
    computed_at: float = -math.inf
    """Time when the host computed these outputs."""

    @property
    def is_known(self) -> bool:
        """True if the host has ever answered."""
        return self.answered_at > -math.inf

    def has_failed(self, now: float) -> bool:
        """Tell whether the host must not count. One lost call does not suffice if it has answered
        before.
        """
        return self.failures > self.is_known or now < self.refuted_at + REFUTED_S

    def may_call(self, now: float) -> bool:
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 16), MAX_PAUSE_S)
        return now >= max(self.failed_at + pause_s * self.has_failed(now), self.refuted_at + REFUTED_S)

    def shows(self, claim: Claim, manifest: bytes, now: float, *, for_s: float = SEEN_S) -> bool:
        """Tell whether the host answered within ``for_s`` that it has the blocks of ``claim``.

        For an intent, any answer is enough.
        """
        if self.has_failed(now) or now >= self.answered_at + for_s:
            return False
        has_blocks = self.span[0] <= claim.start < claim.end <= self.span[1]
        return not claim.settled or (has_blocks and self.manifest == manifest)

    def proves(self, claim: Claim, manifest: bytes, now: float) -> bool:
        """Tell whether the host has lately computed a block of ``claim``."""
        model, block = self.computed
        is_recent = now < self.computed_at + PROVEN_S
        return is_recent and model == manifest and claim.start <= block < claim.end


_NEVER = Sighting()


@dataclass(frozen=True)
class ModelClaims:
    """Claims to the ``blocks`` blocks of the model ``manifest``."""

    manifest: bytes
    blocks: int
    claims: Sequence[Claim]
    subnets: Mapping[PeerId, str] = field(default_factory=dict)
    """Subnets that hosts announce."""


@dataclass(frozen=True)
class Silence:
    """A block that none of its hosts has computed for this peer."""

    since: float
    """The time when this peer first asked."""
    asks: int
    """Times that it asked."""

    def has_no_host(self, now: float) -> bool:
        return self.asks >= LEAST_ASKS and now >= self.since + PATIENCE_S


class Sightings:
    """The hosts of a swarm, as one peer has seen them."""

    def __init__(self) -> None:
        self._known: Latest[PeerId, Sighting] = Latest(MAX_KNOWN)
        self._silent: dict[tuple[bytes, int], Silence] = {}
        """Models and blocks that nobody computes. Identities are free, so silence counts by block,
        not by host."""

    def of(self, peer: PeerId) -> Sighting:
        return self._known.get(peer, _NEVER)

    def answered(
        self, peer: PeerId, manifest: bytes, span: tuple[int, int], place: str, *, now: float
    ) -> None:
        """Note that a host answered from ``place``, and which model and blocks it named."""
        before = replace(self.of(peer), failed_at=-math.inf, failures=0)
        self._remember(peer, replace(before, answered_at=now, manifest=manifest, span=span, place=place))

    def failed(self, peer: PeerId, *, now: float) -> None:
        """Note that a host did not answer."""
        before = self.of(peer)
        self._remember(peer, replace(before, failed_at=now, failures=before.failures + 1))

    def refuted(self, peer: PeerId, *, now: float) -> None:
        """Note that a host computed wrong outputs for blocks that it claims."""
        self._remember(peer, replace(self.of(peer), refuted_at=now))

    def asked(self, manifest: bytes, block: int, right: Collection[PeerId], *, now: float) -> None:
        """Note that hosts were asked to compute ``block``, and that the hosts in ``right`` computed
        it correctly."""
        for peer in right:
            self._remember(peer, replace(self.of(peer), computed=(manifest, block), computed_at=now))
        before = self._silent.pop((manifest, block), Silence(now, 0))
        if not right:
            self._silent[manifest, block] = Silence(before.since, before.asks + 1)

    def _remember(self, peer: PeerId, sighting: Sighting) -> None:
        self._known[peer] = sighting

    def counted(self, model: ModelClaims, *, now: float) -> list[Claim]:
        """Return the claims that count, with ``seen`` and ``place`` filled in."""
        seen, unknown, failed = list[Claim](), list[Claim](), list[Claim]()
        for claim in model.claims:
            sighting = self.of(claim.peer)
            if sighting.has_failed(now):
                # An older failure counts only against its own host.
                failed += [claim] if now < sighting.failed_at + SEEN_S else []
            elif sighting.shows(claim, model.manifest, now):
                proven = sighting.proves(claim, model.manifest, now)
                seen.append(replace(claim, seen=True, place=sighting.place, proven=proven))
            else:
                unknown.append(replace(claim, seen=False))
        if not failed:
            return [*seen, *unknown]
        pairs = zip(holders(failed, model.blocks), holders(seen, model.blocks), strict=True)
        doubtful = list(accumulate((missing > there + DOUBTS for missing, there in pairs), initial=0))

        def is_doubtful(claim: Claim) -> bool:
            start, end = (min(max(bound, 0), model.blocks) for bound in (claim.start, claim.end))
            return doubtful[end] > doubtful[start]

        return [*seen, *(claim for claim in unknown if not is_doubtful(claim))]

    def stands(self, claim: Claim, manifest: bytes, *, now: float) -> bool:
        """Tell whether a counted ``claim`` still counts, after hosts were asked to compute."""
        return self.of(claim.peer).proves(claim, manifest, now) or not any(
            model == manifest and claim.start <= block < claim.end and silence.has_no_host(now)
            for (model, block), silence in self._silent.items()
        )

    def block_to_try(self, outlook: Outlook, mine: Claim, manifest: bytes, rng: random.Random) -> int | None:
        """Return a block that the host of ``mine`` should ask others to compute, or None. No host
        has shown that it computes the block, and the host of ``mine`` could host it. By a draw,
        about one of all hosts that could host it asks between two looks. ``outlook`` includes
        ``mine``.
        """
        places = holders((claim for claim in outlook.placed if claim.seen), outlook.blocks)
        proven = holders((claim for claim in outlook.claims if claim.proven or claim == mine), outlook.blocks)
        claimed = holders(outlook.placed, outlook.blocks)
        unproven = [block for block in range(outlook.blocks) if claimed[block] and not proven[block]]
        fewest = min((places[block] for block in unproven), default=0)
        lot = rng.random() * RARER ** max(fewest - 1, 0)
        if lot >= 1:
            return None
        never = Silence(0.0, 0)
        tries = [block for block in unproven if places[block] == fewest]
        rng.shuffle(tries)
        tries.sort(key=lambda block: -self._silent.get((manifest, block), never).asks)
        return next((block for block in tries[:MAX_CALLS] if _may_fill(outlook, mine, block, lot)), None)

    def to_call(
        self, model: ModelClaims, *, now: float, rng: random.Random, most: int = MAX_CALLS, extra: int = 1
    ) -> list[PeerId]:
        """Return hosts to call, at most ``most``.

        With them, each block has ``LEAST_SEEN`` hosts that this peer has seen. ``extra`` more are
        called in addition.

        Hosts that have answered before come first, then one host of each announced subnet in turn.
        """
        fresh, stale = list[Claim](), list[Claim]()
        for claim in model.claims:
            sighting = self.of(claim.peer)
            if not sighting.failures and sighting.shows(claim, model.manifest, now, for_s=SEEN_S / 2):
                fresh.append(replace(claim, place=sighting.place))
            elif sighting.may_call(now):
                stale.append(claim)
        known = [claim for claim in stale if self.of(claim.peer).is_known]
        others = in_turn([claim for claim in stale if not self.of(claim.peer).is_known], model.subnets, rng)
        others.sort(key=lambda claim: self.of(claim.peer).failures)
        rng.shuffle(known)
        chosen = covering([*known, *others], holders(fresh, model.blocks), least=LEAST_SEEN, most=most)
        left = [claim.peer for claim in [*others, *known] if claim.peer not in chosen]
        return [*chosen, *dict.fromkeys(left[:extra])][:most]


def _may_fill(outlook: Outlook, mine: Claim, block: int, lot: float) -> bool:
    """Tell whether the host of ``mine`` could host ``block`` if the unproven claims to it did not
    count.

    ``lot``, drawn from [0, 1), chooses one of the hosts that the plan of repairs does not name.
    """
    left = [
        claim
        for claim in outlook.claims
        if claim.proven or claim == mine or not claim.start <= block < claim.end
    ]
    without = Outlook(left, blocks=outlook.blocks)
    if mine.peer in without.repairs:
        return True
    spare = {
        claim.place or claim.peer
        for claim in without.staying
        if claim.seen and claim.may_move and without.may_leave(claim)
    }
    return mine.peer in spare and lot * len(spare) < 1


def sharing(claims: Sequence[Claim]) -> list[Claim]:
    """Return ``claims`` with the speeds that count: the speed of each host, divided by the number
    of hosts at its place."""
    hosts = defaultdict[str, set[PeerId]](set)
    for claim in claims:
        if claim.place:
            hosts[claim.place].add(claim.peer)
    return [
        replace(claim, blocks_per_s=claim.blocks_per_s / len(hosts[claim.place])) if claim.place else claim
        for claim in claims
    ]


def covering(claims: Iterable[Claim], counts: Sequence[int], *, least: int, most: int) -> list[PeerId]:
    """Return hosts in the order of ``claims``, until each block has ``least`` hosts or ``most``
    hosts are found.

    ``counts`` is the number of hosts that each block already has.
    """
    found, counts = dict[PeerId, None](), list(counts)
    for claim in claims:
        if len(found) == most:
            break
        span = range(*clipped(claim, len(counts)))
        if claim.peer not in found and any(counts[block] < least for block in span):
            found[claim.peer] = None
            for block in span:
                counts[block] += 1
    return list(found)


def in_turn(claims: Collection[Claim], subnets: Mapping[PeerId, str], rng: random.Random) -> list[Claim]:
    """Return ``claims`` in random order: one of each subnet, then another of each, and so on."""
    by_subnet = defaultdict[str, list[Claim]](list)
    for claim in rng.sample(list(claims), len(claims)):
        by_subnet[subnets.get(claim.peer, "") or claim.peer].append(claim)
    turns = list(by_subnet.values())
    rng.shuffle(turns)
    return [claim for claim in chain.from_iterable(zip_longest(*turns)) if claim is not None]
