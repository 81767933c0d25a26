"""What the observer knows of one peer, as it learns it."""

from dataclasses import dataclass

from swarmnet.dashboard.observing.sightings import Announced, Reported, Sighting
from swarmnet.dashboard.observing.tally import Tallies, is_same_run
from swarmnet.dashboard.state.peers import GONE_SHOWN_S
from swarmnet_protocols.directory.host_announcements import MAX_STEP_S
from swarmnet_protocols.directory.node_reports import MAX_NAME_CHARS, MAX_NUMBER, clean
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.wire import records_pb2, report_pb2

SMOOTHING = 0.3
"""Weight of the newest measurement in the running mean of a delay."""


@dataclass
class Contact:
    """One peer. Times are Unix times."""

    peer: PeerId
    first_seen_s: float
    addresses: tuple[str, ...] = ()
    _sequence: int = -1
    _announced: Announced | None = None
    _announced_at_s: float = 0.0
    newest: Reported | None = None
    _before: Reported | None = None
    _delay_s: float | None = None
    _failed_at_s: float | None = None

    @property
    def answers(self) -> bool:
        return self.newest is not None and self._failed_at_s is None

    @property
    def manifest(self) -> bytes:
        """Hash of the manifest of the hosted model; empty if there is none."""
        if self._announced is not None:
            return self._announced.manifest
        return self.newest.report.host.manifest if self.newest is not None else b""

    def sighting(self) -> Sighting:
        return Sighting(
            self.peer,
            self.first_seen_s,
            self._announced,
            self._announced_at_s,
            self.newest,
            self._before,
            self._delay_s,
            self._failed_at_s,
        )

    def announced(self, info: HostInfo, body: records_pb2.HostRecord, sequence: int, now_s: float) -> None:
        """Take note of its record in the directory."""
        if self._announced is not None and sequence <= self._sequence:
            return
        self._sequence, self._announced_at_s = sequence, now_s
        self._announced = Announced(
            manifest=body.manifest,
            start=info.start,
            end=info.end,
            state=records_pb2.HostState.Name(body.state).removeprefix("HOST_STATE_").lower()
            if body.state in records_pb2.HostState.values()
            else "joining",
            version=clean(body.version)[:MAX_NAME_CHARS],
            public_name=clean(body.public_name)[:MAX_NAME_CHARS],
            step_s=min(info.step_s, MAX_STEP_S),
            sessions=body.sessions,
            cache_bytes_free=min(body.cache_bytes_free, MAX_NUMBER),
            is_relayed=_is_relayed(info.addresses),
        )

    def withdrawn(self) -> None:
        """Take note that it has no record any more."""
        self._announced = None

    def reported(self, report: report_pb2.NodeReport, now_s: float, tallies: Tallies) -> None:
        """Take note of what it says, and count what happened since it last did."""
        newest = Reported(report, now_s)
        before, self._failed_at_s = self.newest, None
        if before is not None:
            tallies.add(self.peer, before.report, report, now_s - before.at_s)
        is_same = before is not None and is_same_run(before.report, report)
        self._before, self.newest = before if is_same else None, newest

    def delayed(self, measured_s: float) -> None:
        """Take note of half a round trip."""
        known_s = measured_s if self._delay_s is None else self._delay_s
        self._delay_s = known_s + SMOOTHING * (measured_s - known_s)

    def failed(self, now_s: float, tallies: Tallies) -> None:
        """Take note that it does not answer."""
        if self._failed_at_s is not None:
            return
        self._failed_at_s = now_s
        left = self._announced is not None and self._announced.state in {"leaving", "paused"}
        if self.newest is not None and self.newest.report.HasField("host") and not left:
            tallies.lost(self.newest.report.host.manifest)

    def is_over(self, now_s: float) -> bool:
        """Whether there is nothing left to show of it."""
        if self._announced is not None or self.answers:
            return False
        return now_s - max(self.first_seen_s, self._failed_at_s or 0.0) > GONE_SHOWN_S


def _is_relayed(addresses: tuple[str, ...]) -> bool | None:
    """Whether a peer is reached through another one only."""
    return all("/p2p-circuit" in address for address in addresses) if addresses else None
