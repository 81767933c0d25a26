"""The record of a worker's training: its status now, and the history of its loss."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.machine.files import write_whole

STATUS_FILE = "training-status.json"
HISTORY_FILE = "training-history.jsonl"
MAX_STATUS_BYTES = 1 << 20
MAX_LINE_BYTES = 1024
MAX_POINTS = 20_000
"""Most points of a history; beyond that, every second one is removed."""
MAX_PEERS = 256
"""Most peers in the status. The latest contributors stay."""

_TOTALS = ("tokens", "bytes_sent", "bytes_received", "wait_s")
_NOT_IN_STATUS = {
    "event",
    "contributors",
    "excluded",
    "bytes",
    "seconds",
    "dropped",
    "from",
    "to",
    "text",
    "forward_bytes",
    "backward_bytes",
    "stays_s",
    *_TOTALS,
}


class TrainingRecord:
    """Derives a worker's ``status`` from its events, and stores it and a history in ``folder``.

    Totals (tokens, bytes, seconds) continue where the last worker in ``folder`` stopped.
    """

    def __init__(self, folder: Path, job: str, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        before: dict[str, Any] = dict.fromkeys((*_TOTALS, "elapsed_s"), 0)
        with suppress(ConfigError, IntegrityError):
            before = read_status(folder)
        self.status: dict[str, Any] = {"peers": {}, "excluded": {}, "round": 0, **before}
        self.status |= {"job": job, "pid": os.getpid(), "state": "starting", "warning": ""}
        self._last: float | None = None
        self._history = folder / HISTORY_FILE
        self._points = 0
        with suppress(OSError):
            self._points = _end_last_line(self._history)

    def take(self, event: Mapping[str, Any]) -> None:
        """Record one event of the worker."""
        now = self._clock()
        status = self.status
        status["elapsed_s"] = round(status["elapsed_s"] + max(0.0, now - (self._last or now)), 3)
        status["time"] = self._last = now
        status |= {name: value for name, value in event.items() if name not in _NOT_IN_STATUS}
        kind = event["event"]
        if kind in {"round", "merge"}:
            self._add(event)
        if kind in {"round", "eval"}:
            status["round"] = event["round"] + 1
            self._append(kind)
        status["state"] = _state(kind, status)
        if status["elapsed_s"]:
            status["wait_share"] = round(min(1.0, status["wait_s"] / status["elapsed_s"]), 4)
        # Training continues if the disk is full; the next event writes the status again.
        with suppress(OSError):
            write_whole(self._folder / STATUS_FILE, json.dumps(status).encode(), durable=False)

    def _add(self, event: Mapping[str, Any]) -> None:
        status = self.status
        for name in _TOTALS:
            status[name] = round(status[name] + event.get(name, 0), 3)
        for peer in event.get("contributors", ()) if event["committed"] else ():
            status["peers"][peer] = {
                "rounds": status["peers"].pop(peer, {"rounds": 0})["rounds"] + 1,
                "last_round": event["round"],
            }
        for refused in event.get("excluded", ()):
            peer = refused["peer_id"]
            times = status["excluded"].pop(peer, {"times": 0})["times"] + 1
            status["excluded"][peer] = {
                "times": times,
                "round": event["round"],
                "reason": refused["reason"][:500],
            }
        for peers in (status["peers"], status["excluded"]):
            while len(peers) > MAX_PEERS:
                del peers[next(iter(peers))]

    def _append(self, kind: str) -> None:
        loss = "loss" if kind == "round" else "val_loss"
        if self.status[loss] is None:
            return
        names = ("time", "round", loss, *_TOTALS, "elapsed_s")
        with suppress(OSError):
            with self._history.open("a") as file:
                file.write(json.dumps({name: self.status[name] for name in names}) + "\n")
            self._points += 1
            if self._points > MAX_POINTS:
                points = _thinned(list(read_history(self._folder)))
                text = "".join(json.dumps(point) + "\n" for point in points)
                write_whole(self._history, text.encode(), durable=False)
                self._points = len(points)


def read_status(folder: Path) -> dict[str, Any]:
    """Return the status in ``folder``. Raises ``ConfigError`` if there is none, ``IntegrityError``
    if it is incomplete."""
    path = folder / STATUS_FILE
    try:
        with path.open("rb") as file:
            status = json.loads(file.read(MAX_STATUS_BYTES))
    except FileNotFoundError:
        raise ConfigError(
            f"no worker of this job has run in {folder}",
            hint="name the data directory of `train join` with --data-dir",
        ) from None
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{path} is not a status", hint="remove it; the worker writes a new one"
        ) from error
    if not isinstance(status, dict):
        raise IntegrityError(f"{path} is not a status", hint="remove it; the worker writes a new one")
    return status


def read_history(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the points of a history, oldest first: totals, and either ``loss`` or ``val_loss``.
    Incomplete lines are skipped."""
    path = folder / HISTORY_FILE
    if not path.exists():
        return
    with path.open("rb") as file:
        for _ in range(2 * MAX_POINTS):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                return
            with suppress(ValueError, RecursionError):
                point = json.loads(line)
                if isinstance(point, dict) and all(type(value) in {int, float} for value in point.values()):
                    yield point


def newest_job(data_dir: Path) -> str:
    """Return the job that was trained last with this data directory. Raises ``ConfigError`` if
    there is none."""
    found = list((data_dir / "training").glob(f"*/{STATUS_FILE}"))
    if not found:
        raise ConfigError(
            f"no worker has run with the data directory {data_dir}",
            hint="give the --data-dir of `train join`",
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent.name


def _state(kind: str, status: Mapping[str, Any]) -> str:
    if kind == "done":
        return "done" if status["round"] >= status["rounds"] else "left"
    if kind in {"waiting", "spare", "paused", "leaving", "finished"}:
        return kind
    if kind in {"stage_missing", "stage_lost"}:
        return "waiting"
    if kind in {"copy", "identity", "notice"}:
        return str(status["state"])
    return "leaving" if status["state"] == "leaving" else "training"


def _thinned(points: list[dict[str, float]]) -> list[dict[str, float]]:
    kept = [point for name in ("loss", "val_loss") for point in [p for p in points if name in p][::2]]
    return sorted(kept, key=lambda point: point["time"])


def _end_last_line(path: Path) -> int:
    """End the last line, which a crash may have left incomplete; return the number of lines."""
    lines, last = 0, b"\n"
    if path.exists():
        with path.open("rb") as file:
            while last_part := file.read(1 << 16):
                lines += last_part.count(b"\n")
                last = last_part[-1:]
        if last != b"\n":
            with path.open("ab") as file:
                file.write(b"\n")
    return lines
