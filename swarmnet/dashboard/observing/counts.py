"""Counts of events at hosts: between two reports of a node, and their totals since the observer
began."""

from collections.abc import Collection
from dataclasses import astuple, dataclass, replace
from itertools import pairwise

from swarmnet_protocols.directory.node_reports import BOUNDS_S
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import report_pb2

BUCKETS = len(BOUNDS_S) + 1
NO_TIMES = (0,) * BUCKETS
MAX_PER_SECOND = 1_000_000
"""Highest rate at which a count of a node may grow. Without it, one false report would hide all
others in a sum."""


@dataclass(frozen=True)
class Counts:
    """Numbers of events. ``first_tokens`` and ``token_times`` are histograms with the bounds
    ``BOUNDS_S``, not cumulative."""

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
        """Return the difference between these counts and ``earlier`` ones."""
        return Counts(
            self.positions - earlier.positions,
            self.answered - earlier.answered,
            self.failures - earlier.failures,
            self.recoveries - earlier.recoveries,
            tuple(map(int.__sub__, self.first_tokens, earlier.first_tokens)),
            tuple(map(int.__sub__, self.token_times, earlier.token_times)),
        )


@dataclass(frozen=True)
class Work:
    """Work of one peer for others."""

    positions: int = 0
    """Positions of prompts, answers and drafts that the peer computed."""
    block_positions: int = 0
    """Positions times the blocks that they passed, training included."""
    rows: int = 0
    """Rows that the peer's experts computed for other hosts."""
    samples: int = 0
    """Sequences that the peer trained on."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(int.__add__, astuple(self), astuple(other)))

    def since(self, earlier: "Work") -> "Work":
        """Return the difference between this work and ``earlier`` one."""
        return Work(*map(int.__sub__, astuple(self), astuple(earlier)))


def hosts_blocks(report: report_pb2.NodeReport) -> bool:
    """Return whether a node hosts blocks of a model, and not experts only."""
    return report.host.record.end > 0


def counts_of(host: report_pb2.HostReport) -> Counts:
    """Return the counts of a host since its start."""
    return Counts(
        host.positions,
        host.answered,
        host.links_lost,
        host.rebuilt,
        _buckets(host.first_tokens),
        _buckets(host.token_times),
    )


def counts_between(before: report_pb2.NodeReport, after: report_pb2.NodeReport, elapsed_s: float) -> Counts:
    """Return the counts of a host from one report to a later one.

    After a restart of the host, its counts begin at 0. A counter that decreased counts as
    unchanged, and none grows faster than ``MAX_PER_SECOND``.
    """
    old = counts_of(before.host) if is_same_run(before, after) else Counts()
    new = counts_of(after.host)
    most = int(MAX_PER_SECOND * max(elapsed_s, 1.0))

    def increase(now: int, then: int) -> int:
        return min(max(now - then, 0), most)

    return Counts(
        increase(new.positions, old.positions),
        increase(new.answered, old.answered),
        increase(new.failures, old.failures),
        increase(new.recoveries, old.recoveries),
        tuple(map(increase, new.first_tokens, old.first_tokens)),
        tuple(map(increase, new.token_times, old.token_times)),
    )


def work_between(before: report_pb2.NodeReport, after: report_pb2.NodeReport, elapsed_s: float) -> Work:
    """Return a node's work between two of its reports, limited as counts are.

    Positions and rows begin at 0 after a restart. The count of what the node has given goes on.
    """
    old = work_of(before)
    if not is_same_run(before, after):
        old = replace(old, positions=0, rows=0)
    new = work_of(after)
    most = int(MAX_PER_SECOND * max(elapsed_s, 1.0))
    return Work(
        *(
            min(max(now - then, 0), limit)
            for now, then, limit in zip(
                astuple(new), astuple(old), (most, most * MAX_BLOCKS, most, most), strict=True
            )
        )
    )


def work_of(report: report_pb2.NodeReport) -> Work:
    """Return the work that a node reports."""
    given = report.given
    return Work(report.host.positions, given.block_positions, rows_computed(report), given.samples)


def rows_computed(report: report_pb2.NodeReport) -> int:
    """Return how many rows the experts of a node have computed for other hosts since its start."""
    return sum(rows for each in report.host.experts for rows in each.rows)


def is_same_run(before: report_pb2.NodeReport, after: report_pb2.NodeReport) -> bool:
    """Return whether a node was not restarted between two of its reports, and hosts the same
    model."""
    return after.uptime_s >= before.uptime_s and after.host.record.manifest == before.host.record.manifest


def quantile(times: tuple[int, ...], share: float) -> float | None:
    """Return the quantile ``share`` (0 to 1) of a histogram in seconds, interpolated within its
    bucket; None for an empty histogram.

    For a quantile beyond the last bound, the last bound is returned.
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


class Totals:
    """Counts of each model, and the work of each peer, since the observer started."""

    def __init__(self) -> None:
        self.models: dict[bytes, Counts] = {}
        self.peers: dict[PeerId, Work] = {}

    def add(
        self, peer: PeerId, before: report_pb2.NodeReport, after: report_pb2.NodeReport, elapsed_s: float
    ) -> None:
        """Add the increase between two reports of ``peer``. So the counts of its first report,
        which no limit bounds, are not added."""
        manifest = after.host.record.manifest
        counts = counts_between(before, after, elapsed_s)
        self.models[manifest] = self.models.get(manifest, Counts()) + counts
        self.peers[peer] = self.peers.get(peer, Work()) + work_between(before, after, elapsed_s)

    def add_failure(self, manifest: bytes) -> None:
        """Add the failure of a host of the model."""
        self.models[manifest] = self.models.get(manifest, Counts()) + Counts(failures=1)

    def keep_only(self, peers: Collection[PeerId]) -> None:
        """Drop the totals of all other peers."""
        self.peers = {peer: work for peer, work in self.peers.items() if peer in peers}
