"""What happened between two states, in words. Pure."""

from collections.abc import Mapping
from typing import Any

from swarmnet.dashboard.observing.sightings import Look
from swarmnet.dashboard.state.peers import name_of

MAX_EVENTS = 100
_PRESENT = {"joining", "online", "leaving", "paused"}
_WENT_ON_PURPOSE = {"leaving", "paused"}

Entries = Mapping[str, Mapping[str, Any]]


def peer_events(before: Entries, after: Entries, look: Look) -> list[dict[str, Any]]:
    """Peers that came, left, were lost and came back. Peers that were there before the observer did not come."""
    said_goodbye = {
        seen.peer for seen in look.peers if seen.announced is not None and seen.announced.state == "leaving"
    }
    found = []
    for peer, entry in after.items():
        kind = _kind(before.get(peer), entry, look.observed_since_s)
        if kind == "lost" and peer in said_goodbye:
            kind = "left"
        if kind is not None:
            text = f"{name_of(entry, peer)} {_WORDS[kind]}{_doing(entry)}"
            found.append(_event(look.now_s, kind, text, peer=peer, model=entry["model"]))
    return found


def model_events(before: Entries, after: Entries, now_s: float) -> list[dict[str, Any]]:
    """Which models became weak, or strong again: down to one peer for some block or to none, and back."""
    found = []
    for manifest, entry in after.items():
        old = before.get(manifest)
        if old is None or old["blocks"] != entry["blocks"]:
            continue
        was, now = old["weakest"]["replicas"], entry["weakest"]["replicas"]
        block = entry["weakest"]["block"]
        if now < was and now <= 1:
            hosts = "no peer hosts" if now == 0 else "only one peer hosts"
            found.append(_event(now_s, "weak", f"{hosts} block {block} of {entry['name']}", model=manifest))
        elif was == 0 < now:
            found.append(
                _event(now_s, "healed", f"every block of {entry['name']} is hosted again", model=manifest)
            )
        elif was == 1 < now:
            text = f"every block of {entry['name']} has {now} or more peers"
            found.append(_event(now_s, "healed", text, model=manifest))
    return found


_WORDS = {"joined": "joined", "left": "left", "lost": "was lost", "recovered": "is back"}


def _kind(old: Mapping[str, Any] | None, new: Mapping[str, Any], observed_since_s: float) -> str | None:
    is_here = new["state"] in _PRESENT
    if old is None:
        began_s = new["started_s"]
        return "joined" if is_here and began_s is not None and began_s > observed_since_s else None
    if old["state"] == "gone":
        return "recovered" if is_here else None
    if not is_here:
        return "left" if old["state"] in _WENT_ON_PURPOSE else "lost"
    if old["started_s"] is None and new["started_s"] is not None and new["started_s"] > observed_since_s:
        return "joined"
    return None


def _doing(entry: Mapping[str, Any]) -> str:
    if entry["blocks"] is None:
        return ""
    start, end = entry["blocks"]
    return f", blocks {start}:{end}"


def _event(
    at_s: float, kind: str, text: str, *, peer: str | None = None, model: str | None = None
) -> dict[str, Any]:
    return {"at_s": round(at_s, 1), "kind": kind, "peer_id": peer, "model": model, "text": text}
