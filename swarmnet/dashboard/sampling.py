"""Takes the samples that the history stores: of models and peers at its fine resolution, of jobs at
each round."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmnet.dashboard.observing.counts import Counts, Work
from swarmnet.dashboard.observing.observations import Snapshot
from swarmnet_protocols.net import PeerId

RECENT_S = 300.0
"""Seconds over which the response times on the page are taken."""
ALL_MODELS = ""
"""Name under which the sums over all models are stored."""


@dataclass(frozen=True)
class Resolution:
    """Seconds between samples. Fine ones are kept for a day, coarse ones, downsampled from them,
    for a month."""

    fine_s: int
    coarse_s: int


MODELS = Resolution(30, 1800)
PEERS = Resolution(300, 7200)


@dataclass(frozen=True)
class ModelSample:
    """One model, or with ``model`` "" all together, over the ``seconds`` before ``at_s`` (Unix
    time). ``sessions``: the most that were open at once."""

    model: str
    at_s: float
    seconds: float
    counts: Counts
    peers: float
    weakest: int
    sessions: int


@dataclass(frozen=True)
class PeerSample:
    """One peer over the ``seconds`` before ``at_s`` (Unix time); it was online for ``online_s`` of
    them."""

    peer: PeerId
    name: str | None
    at_s: float
    seconds: float
    work: Work
    delay_s: float | None
    online_s: float


@dataclass(frozen=True)
class JobPoint:
    """One training job at one round."""

    job: str
    at_s: float
    round: int
    tokens: int
    bytes_sent: int
    loss: float | None
    val_loss: float | None
    workers: int


class HistorySampler:
    """Returns the samples that are due. Call each method with every snapshot, in order; ``body`` is
    the JSON of its state."""

    def __init__(self) -> None:
        self._models_at_s: float | None = None
        self._peers_at_s: float | None = None
        self._seen_at_s: float | None = None
        self._totals: dict[bytes, Counts] = {}
        self._sessions: dict[str, int] = {}
        """The most open sessions of each model since the last sample."""
        self._work: dict[PeerId, Work] = {}
        self._online_s: dict[str, float] = {}
        self._rounds: dict[str, int] = {}
        self._recent: deque[tuple[float, dict[bytes, Counts]]] = deque()

    def recent(self, snapshot: Snapshot) -> dict[bytes, Counts]:
        """Return counts of each model over the ``RECENT_S`` before the snapshot."""
        while len(self._recent) > 1 and self._recent[1][0] <= snapshot.now_s - RECENT_S:
            self._recent.popleft()
        earlier = self._recent[0][1] if self._recent else {}
        return {
            manifest: total.since(earlier.get(manifest, Counts()))
            for manifest, total in snapshot.totals.items()
        }

    def models(self, snapshot: Snapshot, body: Mapping[str, Any]) -> list[ModelSample]:
        """Return one sample of each model and one of all together, every ``MODELS.fine_s``;
        otherwise none."""
        if self._models_at_s is None:
            self._restart_models(snapshot)
        for model, entry in body["models"].items():
            self._sessions[model] = max(self._sessions.get(model, 0), entry["sessions"])
        if snapshot.now_s - (self._models_at_s or 0.0) < MODELS.fine_s:
            return []
        samples = self.begun_models(snapshot, body)
        self._restart_models(snapshot)
        return samples

    def begun_models(self, snapshot: Snapshot, body: Mapping[str, Any]) -> list[ModelSample]:
        """Return the samples of models since the last complete ones; none if no time has passed."""
        seconds = snapshot.now_s - (snapshot.now_s if self._models_at_s is None else self._models_at_s)
        if not seconds:
            return []
        samples = []
        for model in snapshot.models:
            entry = body["models"][model.manifest.hex()]
            counts = snapshot.totals.get(model.manifest, Counts()).since(
                self._totals.get(model.manifest, Counts())
            )
            samples.append(
                ModelSample(
                    model.manifest.hex(),
                    snapshot.now_s,
                    seconds,
                    counts,
                    entry["peers"],
                    entry["weakest"]["replicas"],
                    self._sessions.get(model.manifest.hex(), 0),
                )
            )
        return [*samples, _sum_of(samples, snapshot, seconds, body)]

    def peers(self, snapshot: Snapshot, body: Mapping[str, Any]) -> list[PeerSample]:
        """Return one sample of each peer, every ``PEERS.fine_s``; otherwise none."""
        if self._seen_at_s is not None:
            for peer, entry in body["peers"].items():
                if entry["state"] == "online":
                    passed_s = snapshot.now_s - self._seen_at_s
                    self._online_s[peer] = self._online_s.get(peer, 0.0) + passed_s
        self._seen_at_s = snapshot.now_s
        if self._peers_at_s is None:
            self._restart_peers(snapshot)
        if snapshot.now_s - (self._peers_at_s or 0.0) < PEERS.fine_s:
            return []
        samples = self.begun_peers(snapshot, body)
        self._restart_peers(snapshot)
        return samples

    def begun_peers(self, snapshot: Snapshot, body: Mapping[str, Any]) -> list[PeerSample]:
        """Return the samples of peers since the last complete ones; none if no time has passed."""
        seconds = snapshot.now_s - (snapshot.now_s if self._peers_at_s is None else self._peers_at_s)
        if not seconds:
            return []
        return [
            PeerSample(
                PeerId(peer),
                entry["name"],
                snapshot.now_s,
                seconds,
                snapshot.work.get(PeerId(peer), Work()).since(self._work.get(PeerId(peer), Work())),
                entry["delay_s"],
                min(seconds, self._online_s.get(peer, 0.0)),
            )
            for peer, entry in body["peers"].items()
        ]

    def jobs(self, snapshot: Snapshot, body: Mapping[str, Any]) -> list[JobPoint]:
        """Return one point of each job whose round changed, if a loss was reported."""
        points = []
        for job, entry in body["jobs"].items():
            if entry["round"] != self._rounds.get(job) and (entry["loss"] or entry["val_loss"]) is not None:
                self._rounds[job] = entry["round"]
                points.append(
                    JobPoint(
                        job,
                        snapshot.now_s,
                        entry["round"],
                        entry["tokens"],
                        entry["bytes_sent"],
                        entry["loss"],
                        entry["val_loss"],
                        entry["workers"],
                    )
                )
        return points

    def _restart_models(self, snapshot: Snapshot) -> None:
        self._models_at_s = snapshot.now_s
        self._totals = dict(snapshot.totals)
        self._sessions = {}
        self._recent.append((snapshot.now_s, dict(snapshot.totals)))

    def _restart_peers(self, snapshot: Snapshot) -> None:
        self._peers_at_s = snapshot.now_s
        self._work = dict(snapshot.work)
        self._online_s = {}


def _sum_of(
    samples: list[ModelSample], snapshot: Snapshot, seconds: float, body: Mapping[str, Any]
) -> ModelSample:
    counts = Counts()
    for sample in samples:
        counts += sample.counts
    return ModelSample(
        ALL_MODELS,
        snapshot.now_s,
        seconds,
        counts,
        sum(entry["state"] != "gone" for entry in body["peers"].values()),
        min((sample.weakest for sample in samples), default=0),
        sum(sample.sessions for sample in samples),
    )
