"""What happened between two reports of a node, and sums of it. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from swarmnet_protocols.directory.node_reports import BOUNDS_S
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import report_pb2

BUCKETS = len(BOUNDS_S) + 1
NO_TIMES = (0,) * BUCKETS
MAX_PER_SECOND = 1_000_000
"""Largest rate that is believed of any count of a node: a larger one would dwarf all others."""


@dataclass(frozen=True)
class Counts:
    """How often what happened. ``first_tokens`` and ``token_times`` count by bucket, each bucket by itself."""

    positions: int = 0
    answered: int = 0
    failures: int = 0
    recoveries: int = 0
    first_tokens: tuple[int, ...] = NO_TIMES
    token_times: tuple[int, ...] = NO_TIMES

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.positions + other.positions,
            self.answered + other.answered,
            self.failures + other.failures,
            self.recoveries + other.recoveries,
            _sum(self.first_tokens, other.first_tokens),
            _sum(self.token_times, other.token_times),
        )

    def since(self, earlier: "Counts") -> "Counts":
        """What was added to ``earlier`` to give these."""
        return Counts(
            self.positions - earlier.positions,
            self.answered - earlier.answered,
            self.failures - earlier.failures,
            self.recoveries - earlier.recoveries,
            tuple(map(int.__sub__, self.first_tokens, earlier.first_tokens)),
            tuple(map(int.__sub__, self.token_times, earlier.token_times)),
        )


def counts_of(host: report_pb2.HostReport) -> Counts:
    """All that happened since the start of a host."""
    return Counts(
        host.positions,
        host.answered,
        host.links_lost,
        host.rebuilt,
        _buckets(host.first_tokens),
        _buckets(host.token_times),
    )


def between(before: report_pb2.NodeReport, after: report_pb2.NodeReport, elapsed_s: float) -> Counts:
    """What happened from one report of a host to a later one.

    A host that was started again meanwhile began anew. Counters that go back, or ahead at an impossible rate, count as far as
    they can be true.
    """
    old = counts_of(before.host) if is_same_run(before, after) else Counts()
    new = counts_of(after.host)
    most = int(MAX_PER_SECOND * max(elapsed_s, 1.0))

    def step(now: int, then: int) -> int:
        return min(max(now - then, 0), most)

    return Counts(
        step(new.positions, old.positions),
        step(new.answered, old.answered),
        step(new.failures, old.failures),
        step(new.recoveries, old.recoveries),
        tuple(map(step, new.first_tokens, old.first_tokens)),
        tuple(map(step, new.token_times, old.token_times)),
    )


def is_same_run(before: report_pb2.NodeReport, after: report_pb2.NodeReport) -> bool:
    """Whether a node was not started again between two reports."""
    return after.uptime_s >= before.uptime_s and after.host.manifest == before.host.manifest


def quantile(times: tuple[int, ...], share: float) -> float | None:
    """The time that ``share`` of ``times`` did not exceed, interpolated within its bucket; None of no times.

    Of times beyond the last bound only that is known, and it is returned.
    """
    total = sum(times)
    if not total:
        return None
    below = 0
    for index, count in enumerate(times[:-1]):
        if count and below + count >= share * total:
            low = BOUNDS_S[index - 1] if index else 0.0
            return low + (BOUNDS_S[index] - low) * (share * total - below) / count
        below += count
    return BOUNDS_S[-1]


def _buckets(times: report_pb2.Times) -> tuple[int, ...]:
    if not times.counts:
        return NO_TIMES
    return tuple(later - earlier for earlier, later in pairwise((0, *times.counts)))


def _sum(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int.__add__, one, other))


class Tallies:
    """Sums of what happened since the observer began, at each model and by each peer. They only grow."""

    def __init__(self) -> None:
        self.models: dict[bytes, Counts] = {}
        self.peers: dict[PeerId, int] = {}
        """Positions computed."""

    def add(
        self, peer: PeerId, before: report_pb2.NodeReport, after: report_pb2.NodeReport, elapsed_s: float
    ) -> None:
        """Count what ``peer`` did between two of its reports. What it did before the first is not known to be true."""
        manifest = after.host.manifest
        counts = between(before, after, elapsed_s)
        self.models[manifest] = self.models.get(manifest, Counts()) + counts
        self.peers[peer] = self.peers.get(peer, 0) + counts.positions

    def lost(self, manifest: bytes) -> None:
        """Count a host that we saw die."""
        self.models[manifest] = self.models.get(manifest, Counts()) + Counts(failures=1)

    def keep_only(self, peers: Collection[PeerId]) -> None:
        """Forget all other peers."""
        self.peers = {peer: positions for peer, positions in self.peers.items() if peer in peers}
