"""Real training workers: processes of ``swarmnet train join`` on this machine, with what they print."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import LOOPBACK, Place

SWARMNET = (sys.executable, "-m", "swarmnet")
PATIENCE_S = 120.0
"""For an event of a worker: a machine may be busy."""


def call(*arguments: str) -> Any:
    """What a command prints with --json."""
    done = subprocess.run([*SWARMNET, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class WorkerProcess:
    """One ``swarmnet train join``."""

    def __init__(
        self, folder: Path, name: str, job: str, bootstrap: list[str], place: Place = LOOPBACK
    ) -> None:
        self.name = name
        self.data_dir = folder / name
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        command = [
            *place.prefix,
            *SWARMNET,
            "train",
            "join",
            job,
            "--swarm",
            str(folder / "swarm.toml"),
            "--json",
        ]
        command += ["--data-dir", str(self.data_dir), "--cache-dir", str(folder / "cache"), "--threads", "1"]
        command += ["--listen", f"/ip4/{place.ip}/tcp/0"]
        for address in bootstrap:
            command += ["--bootstrap", address]
        self._log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self, kind: str, *, timeout_s: float = PATIENCE_S, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields."""

        def find() -> dict[str, Any] | None:
            wanted = {"event": kind, **fields}.items()
            return next((event for event in self.events if wanted <= event.items()), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or not self._reader.is_alive(), timeout_s)
        event = find()
        assert event is not None, (self.events[-3:], Path(self._log.name).read_text()[-2000:])
        return event

    def wait_for_more(self, *, timeout_s: float) -> None:
        """Return at its next event, at its end, or after ``timeout_s``."""
        with self._changed:
            if self._reader.is_alive():
                self._changed.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and its p2pd, as when the machine sleeps (SIGSTOP) or fails (SIGKILL)."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it and its p2pd at once."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self._log.close()

    def rounds(self, *, committed: bool = True) -> dict[int, dict[str, Any]]:
        """Its rounds that were committed, or else those that were discarded."""
        return {
            event["round"]: event
            for event in list(self.events)
            if event["event"] == "round" and event["committed"] == committed
        }

    def hashes(self) -> dict[int, str]:
        """Of the parameters after every committed round."""
        return {number: event["params_hash"] for number, event in self.rounds().items()}

    def _read(self) -> None:
        with self.process.stdout as lines:  # type: ignore[union-attr]
            for line in lines:
                with self._changed:
                    self.events.append(_hashable(json.loads(line)))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def _hashable(event: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in event.items()}


def create_job(folder: Path, toml: str) -> str:
    """A swarm and a job, which the worker ``anna`` keeps; the id of the job."""
    (folder / "job.toml").write_text(toml)
    call("swarm", "create", "lab", "--open", "--out", str(folder))
    kept = ("--swarm", str(folder / "swarm.toml"), "--data-dir", str(folder / "anna"))
    job: str = call("train", "create", str(folder / "job.toml"), *kept)["job"]
    return job


@contextmanager
def workers(folder: Path, job: str, *names: str) -> Iterator[dict[str, WorkerProcess]]:
    """Workers that are all ready; whatever is in the dictionary at the end is stopped."""
    running: dict[str, WorkerProcess] = {}
    try:
        for name in names:
            running[name] = WorkerProcess(folder, name, job, bootstrap(running))
            if len(running) == 1:
                running[name].wait("ready")
        for worker in running.values():
            worker.wait("ready")
        yield running
    finally:
        for worker in running.values():
            worker.kill()


def bootstrap(running: dict[str, WorkerProcess]) -> list[str]:
    """Where a newcomer finds the first of those that run."""
    first = next(iter(running.values()), None)
    return [] if first is None else [*first.wait("ready")["addresses"]][:1]
