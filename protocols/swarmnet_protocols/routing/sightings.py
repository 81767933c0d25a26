"""Which announced hosts count: a pure function of their claims and of what this peer has seen of
them itself.

A signed record is a claim. Any peer can sign records of hosts that do not exist, at no cost, and
renew them for ever. So a peer calls a few of the hosts that it reads about, and its decisions rest
on who answers:

1. **Whom to call** (``Sightings.to_call``). Each block should have ``LEAST_SEEN`` hosts that this
   peer has seen, and one more host is drawn at each look. The number of calls does not grow with
   the number of records.
2. **Who counts** (``Sightings.counted``). A host that does not answer does not count. A host that
   was not called counts, unless most hosts that were called for one of its blocks do not answer.
3. **Places.** Identities are free and networks are not. Hosts that were reached in one subnet count
   as one host where the question is whether others have a block (``throughput.holders``), and have
   the speed of one host (``sharing``).
"""

import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.throughput import Claim, holders

SEEN_S = 300.0
"""Seconds for which an answer counts. A machine that answers once, leaves, and has its record
renewed elsewhere counts that long. With a smaller value, peers call each other more often."""
LEAST_SEEN = 2
"""Hosts of each block that a peer wants to have seen. With one, the end of that host would look
like a block without hosts."""
MAX_CALLS = 8
"""Most calls at one look. More find a live host among invented ones sooner; each goes to an address
that a liar may choose."""
DOUBTS = 3
"""Hosts of a block that may fail to answer within ``SEEN_S``, beyond those that answer, before
hosts that were not called do not count there. After an outage, honest hosts leave that many stale
records."""
FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0
"""Seconds until a host that does not answer is called again: after the first time, doubled each
time, and at most."""
REFUTED_S = 3600.0
"""Seconds for which a host that computed wrong outputs does not count, even if it answers."""
MAX_KNOWN = 4096
"""Most hosts that a peer remembers, those called last."""


@dataclass(frozen=True)
class Sighting:
    """What this peer has seen of one host. Times are in seconds of the clock that gives ``now``."""

    answered_at: float = -math.inf
    manifest: bytes = b""
    """The model that the host named when it last answered."""
    span: tuple[int, int] = (0, 0)
    """The blocks [start, end) that it named."""
    place: str = ""
    """The subnet where it was reached; empty for an own network of this peer, or if unknown."""
    failed_at: float = -math.inf
    failures: int = 0
    """Calls in a row that it did not answer."""
    refuted_at: float = -math.inf
    """When it computed wrong outputs."""

    @property
    def is_known(self) -> bool:
        """Whether the host has ever answered."""
        return self.answered_at > -math.inf

    def has_failed(self, now: float) -> bool:
        """Whether the host must not count. One lost call does not show that of a host that has
        answered before."""
        return self.failures > self.is_known or now < self.refuted_at + REFUTED_S

    def may_call(self, now: float) -> bool:
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 16), MAX_PAUSE_S)
        return now >= max(self.failed_at + pause_s * self.has_failed(now), self.refuted_at + REFUTED_S)

    def shows(self, claim: Claim, manifest: bytes, now: float, *, for_s: float = SEEN_S) -> bool:
        """Whether the host answered within ``for_s`` that it has the blocks of ``claim``, or at all
        if the claim is an intent."""
        if self.has_failed(now) or now >= self.answered_at + for_s:
            return False
        has_blocks = self.span[0] <= claim.start < claim.end <= self.span[1]
        return not claim.settled or (has_blocks and self.manifest == manifest)


_NEVER = Sighting()


@dataclass(frozen=True)
class ModelClaims:
    """Claims to the ``blocks`` blocks of the model ``manifest``."""

    manifest: bytes
    blocks: int
    claims: Sequence[Claim]
    subnets: Mapping[PeerId, str] = field(default_factory=dict)
    """The subnet that each host announces, where it announces one."""


class Sightings:
    """What one peer has seen of the hosts of its swarm."""

    def __init__(self) -> None:
        self._known: OrderedDict[PeerId, Sighting] = OrderedDict()

    def of(self, peer: PeerId) -> Sighting:
        return self._known.get(peer, _NEVER)

    def answered(
        self, peer: PeerId, manifest: bytes, span: tuple[int, int], place: str, *, now: float
    ) -> None:
        """Note that a host answered, with the model and the blocks that it named, from ``place``."""
        refuted_at = self.of(peer).refuted_at
        self._note(peer, Sighting(now, manifest, span, place, refuted_at=refuted_at))

    def failed(self, peer: PeerId, *, now: float) -> None:
        """Note that a host did not answer."""
        before = self.of(peer)
        self._note(peer, replace(before, failed_at=now, failures=before.failures + 1))

    def refuted(self, peer: PeerId, *, now: float) -> None:
        """Note that a host computed wrong outputs, or none, of blocks that it claims."""
        self._note(peer, replace(self.of(peer), refuted_at=now))

    def _note(self, peer: PeerId, sighting: Sighting) -> None:
        self._known[peer] = sighting
        self._known.move_to_end(peer)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def counted(self, model: ModelClaims, *, now: float) -> list[Claim]:
        """The claims that count, each with ``seen`` and ``place``."""
        seen, unknown, failed = list[Claim](), list[Claim](), list[Claim]()
        for claim in model.claims:
            sighting = self.of(claim.peer)
            if sighting.has_failed(now):
                # Those found out before are known one by one, and say nothing about the hosts that are left.
                failed += [claim] if now < sighting.failed_at + SEEN_S else []
            elif sighting.shows(claim, model.manifest, now):
                seen.append(replace(claim, seen=True, place=sighting.place))
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

    def to_call(
        self, model: ModelClaims, *, now: float, rng: random.Random, most: int = MAX_CALLS, extra: int = 1
    ) -> list[PeerId]:
        """Up to ``most`` hosts to call: those that give each block ``LEAST_SEEN`` hosts, and
        ``extra`` others.

        Hosts that have answered before come first, then one of each announced subnet in turn.
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


def sharing(claims: Sequence[Claim]) -> list[Claim]:
    """``claims`` with the speeds that count: the hosts of one place have the mean speed of one host
    together."""
    hosts = defaultdict[str, set[PeerId]](set)
    for claim in claims:
        if claim.place:
            hosts[claim.place].add(claim.peer)
    return [
        replace(claim, blocks_per_s=claim.blocks_per_s / len(hosts[claim.place])) if claim.place else claim
        for claim in claims
    ]


def covering(claims: Iterable[Claim], counts: Sequence[int], *, least: int, most: int) -> list[PeerId]:
    """The first hosts of ``claims``, at most ``most``, that give each block ``least`` hosts beyond
    what ``counts`` says it has."""
    found, counts = dict[PeerId, None](), list(counts)
    for claim in claims:
        if len(found) == most:
            break
        span = range(max(claim.start, 0), min(claim.end, len(counts)))
        if claim.peer not in found and any(counts[block] < least for block in span):
            found[claim.peer] = None
            for block in span:
                counts[block] += 1
    return list(found)


def in_turn(claims: Collection[Claim], subnets: Mapping[PeerId, str], rng: random.Random) -> list[Claim]:
    """``claims`` in a random order, one of each subnet, then another one of each, and so on."""
    by_subnet = defaultdict[str, list[Claim]](list)
    for claim in rng.sample(list(claims), len(claims)):
        by_subnet[subnets.get(claim.peer, "") or claim.peer].append(claim)
    turns = list(by_subnet.values())
    rng.shuffle(turns)
    return [claim for claim in chain.from_iterable(zip_longest(*turns)) if claim is not None]
