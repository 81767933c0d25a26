"""What the observer knows of a swarm at one moment: facts, from which ``state`` draws its conclusions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.dashboard.observing.tally import Counts
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import report_pb2


@dataclass(frozen=True)
class SwarmAbout:
    name: str
    id: str
    admission: str
    observer: PeerId
    join: tuple[str, ...] = ("swarm.toml",)
    """What a newcomer gives `swarmnet join` to come into it."""


@dataclass(frozen=True)
class Announced:
    """What a host's record in the directory says."""

    manifest: bytes
    start: int
    end: int
    state: str
    version: str
    public_name: str
    step_s: float
    sessions: int
    cache_bytes_free: int
    is_relayed: bool | None
    """None where its addresses do not tell."""


@dataclass(frozen=True)
class Reported:
    """A report, and when it came (Unix time)."""

    report: report_pb2.NodeReport
    at_s: float


@dataclass(frozen=True)
class Sighting:
    """One peer, as it is known now. Times are Unix times."""

    peer: PeerId
    first_seen_s: float
    announced: Announced | None = None
    announced_at_s: float = 0.0
    """When its newest record was published."""
    newest: Reported | None = None
    before: Reported | None = None
    """The report before the newest one, of the same run of the node."""
    delay_s: float | None = None
    failed_at_s: float | None = None
    """Since when it does not answer; None while it does, or was never asked."""


@dataclass(frozen=True)
class JobSighting:
    """A job of the catalog: what its owner signed, and who says to train it."""

    id: str
    name: str
    method: str
    rounds: int
    workers: Sequence[PeerId] = ()
    round: int = 0
    """The farthest that a worker says to be at."""


@dataclass(frozen=True)
class Look:
    """Everything at ``now_s``."""

    now_s: float
    observed_since_s: float
    swarm: SwarmAbout
    models: Sequence[CatalogModel] = ()
    peers: Sequence[Sighting] = ()
    jobs: Sequence[JobSighting] = ()
    totals: Mapping[bytes, Counts] = field(default_factory=dict)
    """What happened at each model since ``observed_since_s``."""
    peer_positions: Mapping[PeerId, int] = field(default_factory=dict)
    """What each peer computed since then."""
    recent: Mapping[bytes, Counts] = field(default_factory=dict)
    """What happened at each model over the last minutes."""
    peak_sessions: Mapping[bytes, int] = field(default_factory=dict)
    """Most open sessions in the last 24 hours, by model."""
