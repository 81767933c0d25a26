"""Peers as the page shows them, from what was seen of them. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from swarmnet.dashboard.observing.sightings import Reported, Sighting
from swarmnet.dashboard.observing.tally import MAX_PER_SECOND
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import report_pb2

STALE_S = 20.0
"""A report older than this says nothing of what a peer does now."""
STEADY_S = 5.0
"""Starts that are measured within this of each other are one: what does not change need not be sent."""
GONE_SHOWN_S = 600.0
"""How long a peer that is gone stays in view."""
ALIVE_AGAIN_S = 2.0
"""An announcement this long after we lost a peer says that it lives, though we do not reach it."""

_STATES = {"choosing": "joining"}


def peer_entry(seen: Sighting, now_s: float, previous: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON of one peer. ``previous`` is what it was before, if it was there."""
    state, silent = state_of(seen)
    report = seen.newest.report if seen.newest else None
    entry: dict[str, Any] = {
        "name": None,
        "version": report.version if report else "",
        "role": "trainer" if report is not None and report.HasField("worker") else "host",
        "state": state,
        "model": None,
        "blocks": None,
        "job": None,
        "dtype": None,
        "tokens_per_s": 0.0,
        "step_s": None,
        "delay_s": None if seen.delay_s is None else round(seen.delay_s, 3),
        "connection": "unknown",
        "queue_s": 0.0,
        "cache_bytes_free": 0,
        "cache_bytes_limit": 0,
        "started_s": None,
        "sessions": 0,
        "tokens": 0,
        "last_seen_s": round(_last_seen_s(seen), 1) if silent or state == "gone" else None,
        "silent": silent,
    }
    if seen.announced is not None:
        entry |= _announced(seen)
    if seen.newest is not None:
        entry |= _reported(seen.newest)
        known_s = previous["started_s"] if previous else None
        if known_s is not None and abs(entry["started_s"] - known_s) < STEADY_S:
            entry["started_s"] = known_s
    if state == "gone":
        entry |= {"sessions": 0, "queue_s": 0.0}
    else:
        entry["tokens_per_s"] = round(rate_of(seen, now_s, _computed), 1)
    return entry


def state_of(seen: Sighting) -> tuple[str, bool]:
    """What a peer does, and whether we have that from its announcement only, for it does not answer us."""
    answers = seen.newest is not None and seen.failed_at_s is None
    if answers and seen.newest is not None:
        report = seen.newest.report
        if report.HasField("worker"):
            return ("leaving" if report.worker.state == "leaving" else "online"), False
        return _STATES.get(report.host.state, report.host.state), False
    announced = seen.announced
    if announced is None or announced.state == "leaving":
        return "gone", False
    if announced.state == "paused":
        return "paused", True
    if seen.newest is not None and seen.announced_at_s < (seen.failed_at_s or 0.0) + ALIVE_AGAIN_S:
        return "gone", False
    return _STATES.get(announced.state, announced.state), True


def is_shown(seen: Sighting, now_s: float) -> bool:
    """Whether a peer is, or was lately, a part of the swarm."""
    return state_of(seen)[0] != "gone" or now_s - _last_seen_s(seen) < GONE_SHOWN_S


def rate_of(seen: Sighting, now_s: float, count: Callable[[report_pb2.NodeReport], int]) -> float:
    """How much was added to ``count`` a second between the last two reports; 0 where that is long ago."""
    newest, before = seen.newest, seen.before
    if newest is None or before is None or seen.failed_at_s is not None or now_s - newest.at_s > STALE_S:
        return 0.0
    if newest.at_s <= before.at_s:
        return 0.0
    added = max(0, count(newest.report) - count(before.report))
    return min(added / (newest.at_s - before.at_s), float(MAX_PER_SECOND))


def _computed(report: report_pb2.NodeReport) -> int:
    return report.host.positions


def name_of(entry: Mapping[str, Any], peer: PeerId | str) -> str:
    """A peer in words: its own name for itself, or the end of its id, which is the part that differs."""
    return entry["name"] or f"…{peer[-6:]}"


def _last_seen_s(seen: Sighting) -> float:
    return max(seen.first_seen_s, seen.announced_at_s, seen.newest.at_s if seen.newest else 0.0)


def _announced(seen: Sighting) -> dict[str, Any]:
    announced = seen.announced
    if announced is None:
        return {}
    relayed = {None: "unknown", True: "relayed", False: "direct"}
    return {
        "name": announced.public_name or None,
        "version": announced.version,
        "model": announced.manifest.hex(),
        "blocks": [announced.start, announced.end],
        "step_s": announced.step_s or None,
        "connection": relayed[announced.is_relayed],
        "cache_bytes_free": announced.cache_bytes_free,
        "sessions": announced.sessions,
    }


def _reported(reported: Reported) -> dict[str, Any]:
    report = reported.report
    about = {
        "name": report.public_name or None,
        "version": report.version,
        "started_s": round(reported.at_s - report.uptime_s),
    }
    if report.HasField("worker"):
        return about | {"job": report.worker.job.hex()}
    host = report.host
    return about | {
        "model": host.manifest.hex(),
        "blocks": [host.start, host.end],
        "dtype": host.dtype,
        "step_s": float(f"{host.step_s:.3g}") or None,
        "queue_s": float(f"{host.queue_s:.2g}"),
        "cache_bytes_free": max(0, host.cache_bytes_limit - host.cache_bytes),
        "cache_bytes_limit": host.cache_bytes_limit,
        "sessions": host.sessions,
        "tokens": host.positions,
    }
