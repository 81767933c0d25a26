"""When to remember what: turns looks into samples of the history."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from swarmnet.dashboard.history import MODELS, PEERS, JobPoint, ModelSample, PeerSample
from swarmnet.dashboard.observing.sightings import Look
from swarmnet.dashboard.observing.tally import Counts
from swarmnet_protocols.net import PeerId

RECENT_S = 300.0
"""The times that answers took are shown over so long."""
EVERY_MODEL = ""


class Sampler:
    """Is shown every look with its state, in order; says what is due to be remembered."""

    def __init__(self) -> None:
        self._models_at_s: float | None = None
        self._peers_at_s: float | None = None
        self._looked_at_s: float | None = None
        self._totals: dict[bytes, Counts] = {}
        self._positions: dict[PeerId, int] = {}
        self._online_s: dict[str, float] = {}
        self._rounds: dict[str, int] = {}
        self._recent: deque[tuple[float, dict[bytes, Counts]]] = deque()

    def recent(self, look: Look) -> dict[bytes, Counts]:
        """What happened at each model within ``RECENT_S`` before a look."""
        while len(self._recent) > 1 and self._recent[1][0] <= look.now_s - RECENT_S:
            self._recent.popleft()
        earlier = self._recent[0][1] if self._recent else {}
        return {
            manifest: total.since(earlier.get(manifest, Counts())) for manifest, total in look.totals.items()
        }

    def models(self, look: Look, body: Mapping[str, Any]) -> list[ModelSample]:
        """Samples of all models, and of them together, when they are due."""
        if self._models_at_s is None:
            self._begin_models(look)
        seconds = look.now_s - (self._models_at_s or 0.0)
        if seconds < MODELS.fine_s:
            return []
        samples = []
        for model in look.models:
            entry = body["models"][model.manifest.hex()]
            counts = look.totals.get(model.manifest, Counts()).since(
                self._totals.get(model.manifest, Counts())
            )
            samples.append(
                ModelSample(
                    model.manifest.hex(),
                    look.now_s,
                    seconds,
                    counts,
                    entry["peers"],
                    entry["weakest"]["replicas"],
                    entry["sessions"],
                )
            )
        self._begin_models(look)
        return [*samples, _together(samples, look, seconds, body)]

    def peers(self, look: Look, body: Mapping[str, Any]) -> list[PeerSample]:
        """Samples of all peers, when they are due."""
        if self._looked_at_s is not None:
            for peer, entry in body["peers"].items():
                if entry["state"] == "online":
                    passed_s = look.now_s - self._looked_at_s
                    self._online_s[peer] = self._online_s.get(peer, 0.0) + passed_s
        self._looked_at_s = look.now_s
        if self._peers_at_s is None:
            self._begin_peers(look)
        seconds = look.now_s - (self._peers_at_s or 0.0)
        if seconds < PEERS.fine_s:
            return []
        samples = [
            PeerSample(
                PeerId(peer),
                entry["name"],
                look.now_s,
                seconds,
                look.peer_positions.get(PeerId(peer), 0) - self._positions.get(PeerId(peer), 0),
                entry["delay_s"],
                min(seconds, self._online_s.get(peer, 0.0)),
            )
            for peer, entry in body["peers"].items()
        ]
        self._begin_peers(look)
        return samples

    def jobs(self, look: Look, body: Mapping[str, Any]) -> list[JobPoint]:
        """A point of every job that has come to another round with a loss to show."""
        points = []
        for job, entry in body["jobs"].items():
            if entry["round"] != self._rounds.get(job) and (entry["loss"] or entry["val_loss"]) is not None:
                self._rounds[job] = entry["round"]
                points.append(
                    JobPoint(
                        job,
                        look.now_s,
                        entry["round"],
                        entry["tokens"],
                        entry["bytes_sent"],
                        entry["loss"],
                        entry["val_loss"],
                        entry["workers"],
                    )
                )
        return points

    def _begin_models(self, look: Look) -> None:
        self._models_at_s = look.now_s
        self._totals = dict(look.totals)
        self._recent.append((look.now_s, dict(look.totals)))

    def _begin_peers(self, look: Look) -> None:
        self._peers_at_s = look.now_s
        self._positions = dict(look.peer_positions)
        self._online_s = {}


def _together(samples: list[ModelSample], look: Look, seconds: float, body: Mapping[str, Any]) -> ModelSample:
    counts = Counts()
    for sample in samples:
        counts += sample.counts
    return ModelSample(
        EVERY_MODEL,
        look.now_s,
        seconds,
        counts,
        sum(entry["state"] != "gone" for entry in body["peers"].values()),
        min((sample.weakest for sample in samples), default=0),
        sum(sample.sessions for sample in samples),
    )
