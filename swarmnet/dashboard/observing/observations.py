"""The observer's knowledge: a ``Snapshot`` of the swarm at one moment, and the ``PeerTracker`` that
keeps one peer's part of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmnet.dashboard.observing.counts import Counts, Totals, Work, hosts_blocks, is_same_run
from swarmnet_protocols.averages import averaged
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertHost
from swarmnet_protocols.directory.host_announcements import MAX_NAME_CHARS, MAX_NUMBER, clean
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.host_info import INCOMPATIBLE, HostInfo
from swarmnet_protocols.wire import report_pb2

GONE_SHOWN_S = 600.0
"""Seconds that a peer stays on the page after it left."""
DELAY_SMOOTHING = 0.3
"""Weight of the newest measurement in the moving average of a delay."""


@dataclass(frozen=True)
class SwarmInfo:
    """The observed swarm, as its swarm file describes it."""

    name: str
    id: str
    admission: str
    observer: PeerId
    join: tuple[str, ...] = ("swarm.toml",)
    """Arguments of the `swarmnet join` command that the page shows to newcomers. Empty in a
    household."""


@dataclass(frozen=True)
class TimedReport:
    """A node's report, and the Unix time at which it arrived."""

    report: report_pb2.NodeReport
    at_s: float


@dataclass(frozen=True)
class PeerObservation:
    """The facts about one peer. Times are Unix times."""

    peer: PeerId
    first_seen_s: float
    announced: HostInfo | None = None
    """Its newest record in the directory. For a peer that hosts only experts, the blocks are
    [0, 0)."""
    announced_at_s: float = 0.0
    """Time when the newest record was received."""
    newest: TimedReport | None = None
    before: TimedReport | None = None
    """The report before ``newest``; None if the node was restarted between the two."""
    delay_s: float | None = None
    failed_at_s: float | None = None
    """Time of the first failed poll since the last success. None while the peer answers, and until
    its first poll."""
    experts: BlockExperts = field(default_factory=dict)
    """The experts that the peer computes for other hosts, as it announces."""

    @property
    def is_unasked(self) -> bool:
        """Return True until a poll of the peer has ended, with or without an answer."""
        return self.newest is None and self.failed_at_s is None

    @property
    def answers(self) -> bool:
        return self.newest is not None and self.failed_at_s is None


@dataclass(frozen=True)
class JobObservation:
    """A training job of the catalog: what its owner signed, and which workers announce it."""

    id: str
    name: str
    method: str
    rounds: int
    workers: Sequence[PeerId] = ()
    round: int = 0
    """The highest round that a worker announces."""
    left: Mapping[PeerId, int] = field(default_factory=dict)
    """The last round of each worker that announces its leave."""
    stages: int | None = None
    """The number of stages of its model; None if each worker holds the whole model."""
    evaluation_tokens: int = MAX_NUMBER
    """Most tokens of one evaluation of a worker."""


@dataclass(frozen=True)
class Snapshot:
    """Everything known of a swarm at the Unix time ``now_s``."""

    now_s: float
    observed_since_s: float
    swarm: SwarmInfo
    models: Sequence[CatalogModel] = ()
    peers: Sequence[PeerObservation] = ()
    jobs: Sequence[JobObservation] = ()
    totals: Mapping[bytes, Counts] = field(default_factory=dict)
    """Counts of each model since ``observed_since_s``, by manifest hash."""
    work: Mapping[PeerId, Work] = field(default_factory=dict)
    """The work of each peer since ``observed_since_s``."""
    recent: Mapping[bytes, Counts] = field(default_factory=dict)
    """Counts of each model over the last minutes."""
    peak_sessions: Mapping[bytes, int] = field(default_factory=dict)
    """The most open sessions of each model in the last 24 hours."""


class PeerTracker:
    """Updates the observation of one peer with each record, report and failed poll."""

    def __init__(self, peer: PeerId, now_s: float) -> None:
        self.observation = PeerObservation(peer, now_s)
        self.addresses: tuple[str, ...] = ()
        self._sequence = -1

    @property
    def peer(self) -> PeerId:
        return self.observation.peer

    @property
    def manifest(self) -> bytes:
        """Manifest hash of the hosted model; empty if the peer hosts none."""
        seen = self.observation
        if seen.announced is not None:
            return seen.announced.manifest
        report = seen.newest.report if seen.newest is not None else report_pb2.NodeReport()
        return report.host.record.manifest

    @property
    def hosts_blocks(self) -> bool:
        """True if the newest record of the peer announces blocks."""
        announced = self.observation.announced
        return announced is not None and announced.end > 0

    def on_record(self, host: HostInfo, now_s: float) -> None:
        """Take the peer's record from the directory, unless a newer one is known."""
        if self.hosts_blocks and host.sequence <= self._sequence:
            return
        self._sequence = host.sequence
        self._update(announced=host, announced_at_s=now_s)

    def on_experts(self, host: ExpertHost, manifest: bytes, now_s: float) -> None:
        """Add the peer's record of experts from the directory. A peer may have a record of blocks
        too."""
        if self.hosts_blocks:
            self._update(experts=host.experts if host.is_online else {})
            return
        if self.observation.announced is not None and host.sequence <= self._sequence:
            return
        self._sequence = host.sequence
        announced = HostInfo(
            host.peer,
            0,
            0,
            step_s=0.0,
            addresses=host.addresses,
            state="online" if host.is_online else "leaving" if host.is_compatible else INCOMPATIBLE,
            manifest=manifest,
            public_name=clean(host.public_name)[:MAX_NAME_CHARS],
        )
        self._update(announced=announced, announced_at_s=now_s, experts=host.experts)

    def on_experts_absent(self) -> None:
        """Note that the directory has no record of the peer's experts."""
        self._update(announced=self.observation.announced if self.hosts_blocks else None, experts={})

    def on_record_absent(self) -> None:
        """Note that the directory has no record of the peer."""
        self._update(announced=None, experts={})

    def on_report(self, report: report_pb2.NodeReport, now_s: float, totals: Totals) -> None:
        """Take a report, and add the increase since the report before to ``totals``."""
        before = self.observation.newest
        if before is not None:
            totals.add(self.peer, before.report, report, now_s - before.at_s)
            if not is_same_run(before.report, report):
                before = None
        self._update(newest=TimedReport(report, now_s), before=before, failed_at_s=None)

    def on_delay(self, measured_s: float) -> None:
        """Take a measurement of half a round trip into the moving average."""
        before_s = self.observation.delay_s or 0.0
        self._update(delay_s=averaged(before_s, measured_s, DELAY_SMOOTHING))

    def on_failed_poll(self, now_s: float, totals: Totals) -> None:
        """Note that the peer did not answer. The first time, this counts as a failure of its model,
        unless the host had announced that it leaves."""
        seen = self.observation
        if seen.failed_at_s is not None:
            return
        self._update(failed_at_s=now_s)
        left = seen.announced is not None and seen.announced.state in {"leaving", "paused"}
        if seen.newest is not None and hosts_blocks(seen.newest.report) and not left:
            totals.add_failure(seen.newest.report.host.record.manifest)

    def is_expired(self, now_s: float) -> bool:
        """Return whether the peer has been gone for longer than the page shows it."""
        seen = self.observation
        if seen.announced is not None or seen.answers:
            return False
        return now_s - max(seen.first_seen_s, seen.failed_at_s or 0.0) > GONE_SHOWN_S

    def _update(self, **fields: object) -> None:
        self.observation = replace(self.observation, **fields)  # type: ignore[arg-type]
