"""Real training workers: processes of ``swarmnet train join`` and their events."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes.commands import LOOPBACK, Place, RunningCommand, call


class WorkerProcess(RunningCommand):
    """One ``swarmnet train join``."""

    def __init__(
        self,
        folder: Path,
        name: str,
        job: str,
        bootstrap: list[str],
        place: Place = LOOPBACK,
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.data_dir = folder / name
        arguments = ["train", "join", job, "--swarm", str(folder / "swarm.toml"), "--threads", "1", "--yes"]
        arguments += ["--data-dir", str(self.data_dir), "--cache-dir", str(folder / "cache")]
        arguments += ["--name", name, "--listen", f"/ip4/{place.ip}/tcp/0"]
        if (folder / "data").exists():
            arguments += ["--data", str(folder / "data")]
        arguments += options
        for address in bootstrap:
            arguments += ["--bootstrap", address]
        super().__init__(arguments, folder / f"{name}.log", place)

    def rounds(self, *, committed: bool = True) -> dict[int, dict[str, Any]]:
        """The committed rounds of the worker, or the discarded ones."""
        return {
            event["round"]: event
            for event in list(self.events)
            if event["event"] == "round" and event["committed"] == committed
        }

    def hashes(self) -> dict[int, str]:
        """The hash of the parameters after every committed round."""
        return {number: event["params_hash"] for number, event in self.rounds().items()}


def create_job(folder: Path, toml: str, *options: str) -> str:
    """Create a swarm and a job stored by the worker ``anna``; returns the id of the job."""
    (folder / "job.toml").write_text(toml)
    call("swarm", "create", "lab", "--open", "--out", str(folder))
    kept = ("--swarm", str(folder / "swarm.toml"), "--data-dir", str(folder / "anna"))
    job: str = call("train", "create", str(folder / "job.toml"), *kept, *options)["job"]
    return job


@contextmanager
def workers(
    folder: Path, job: str, *names: str, options: Sequence[str] = ()
) -> Iterator[dict[str, WorkerProcess]]:
    """Start workers and wait until they are ready. Those in the dictionary at the end are
    killed."""
    running: dict[str, WorkerProcess] = {}
    try:
        for name in names:
            running[name] = WorkerProcess(folder, name, job, bootstrap(running), options=options)
            if len(running) == 1:
                running[name].wait("ready")
        for worker in running.values():
            worker.wait("ready")
        yield running
    finally:
        for worker in running.values():
            worker.kill()


def bootstrap(running: dict[str, WorkerProcess]) -> list[str]:
    """An address of the first running worker."""
    first = next(iter(running.values()), None)
    return [] if first is None else [*first.wait("ready")["addresses"]][:1]
