"""Events of the page: what changed for peers and models from one state to the next. Pure
functions."""

from collections.abc import Mapping
from typing import Any

from swarmnet.dashboard.observing.observations import Snapshot
from swarmnet.dashboard.peers import name_of
from swarmnet.units import counted

MAX_EVENTS = 100
_PRESENT = {"joining", "online", "leaving", "paused", "finished"}

Entries = Mapping[str, Mapping[str, Any]]


def peer_events(before: Entries, after: Entries, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return events "joined", "left", "lost" and "recovered". A peer that started before the
    observer gives no "joined"."""
    found = []
    for peer, entry in after.items():
        kind = _kind(before.get(peer), entry, snapshot.observed_since_s)
        if kind is not None:
            words = _WORDS[entry["ending"] or kind]
            text = f"{name_of(entry, peer)} {words}{_blocks_text(entry)}"
            found.append(_event(snapshot.now_s, kind, text, peer=peer, model=entry["model"]))
    return found


def model_events(before: Entries, after: Entries, now_s: float) -> list[dict[str, Any]]:
    """Return the events "weak" and "healed" of models.

    A model is weak if some block has only one host or none left, or if experts are missing. It has
    healed once it has more hosts again.
    """
    found = []
    for manifest, entry in after.items():
        old = before.get(manifest)
        if old is None or old["blocks"] != entry["blocks"]:
            continue
        if (event := _experts_event(old, entry)) is not None:
            found.append(_event(now_s, *event, model=manifest))
        if _missing(old) or _missing(entry):
            # hosts that wait for experts do not count as replicas: the event above says why
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


def _missing(entry: Mapping[str, Any]) -> int:
    """Return the number of experts that hosts wait for."""
    return entry["experts"]["missing"] if entry["experts"] else 0


def _experts_event(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return kind and text of the event that experts have become missing, or have peers again."""
    if _missing(new) and not _missing(old):
        return "weak", f"no peer has experts {new['experts']['missing_text']} of {new['name']}"
    if _missing(old) and not _missing(new):
        return "healed", f"every expert of {new['name']} has a peer again"
    return None


_WORDS = {
    "joined": "joined",
    "left": "left in good order",
    "finished": "finished its training job",
    "lost": "was lost",
    "recovered": "is back",
}


def _kind(old: Mapping[str, Any] | None, new: Mapping[str, Any], observed_since_s: float) -> str | None:
    is_here = new["state"] in _PRESENT
    if old is None:
        began_s = new["started_s"]
        return "joined" if is_here and began_s is not None and began_s > observed_since_s else None
    if old["state"] == "gone":
        return "recovered" if is_here else None
    if not is_here:
        return "lost" if new["ending"] == "lost" else "left"
    if old["started_s"] is None and new["started_s"] is not None and new["started_s"] > observed_since_s:
        return "joined"
    return None


def _blocks_text(entry: Mapping[str, Any]) -> str:
    if entry["blocks"] is not None:
        start, end = entry["blocks"]
        return f", blocks {start}:{end}"
    return f", {counted(entry['experts']['count'], 'expert')}" if entry["experts"] else ""


def _event(
    at_s: float, kind: str, text: str, *, peer: str | None = None, model: str | None = None
) -> dict[str, Any]:
    return {"at_s": round(at_s, 1), "kind": kind, "peer_id": peer, "model": model, "text": text}
