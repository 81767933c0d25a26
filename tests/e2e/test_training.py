"""Real training workers: processes, sockets, the DHT; one is killed in mid-run and one joins."""

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

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet.cli import execute
from swarmnet_protocols.protocol_ids import TRAINING
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.transport.p2pd import P2pdTransport
from tests.support.strangers import GROWTH_BYTES, run_stranger, send_garbage, send_oversized
from tests.support.training_workers import write_job

ROUNDS = 100_000
SWARMNET = (sys.executable, "-m", "swarmnet")


def call(*arguments: str) -> Any:
    """What a command prints with --json."""
    done = subprocess.run([*SWARMNET, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class WorkerProcess:
    """One ``swarmnet train join``."""

    def __init__(self, folder: Path, name: str, job: str, bootstrap: list[str]) -> None:
        self.data_dir = folder / name
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        command = [*SWARMNET, "train", "join", job, "--swarm", str(folder / "swarm.toml"), "--json"]
        command += ["--data-dir", str(self.data_dir), "--cache-dir", str(folder / "cache"), "--threads", "1"]
        command += ["--listen", "/ip4/127.0.0.1/tcp/0"]
        for address in bootstrap:
            command += ["--bootstrap", address]
        self._log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self, kind: str, **fields: object) -> dict[str, Any]:
        """The first event of this kind with these fields."""

        def find() -> dict[str, Any] | None:
            wanted = {"event": kind, **fields}.items()
            return next((event for event in self.events if wanted <= event.items()), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or not self._reader.is_alive(), 120)
        event = find()
        assert event is not None, (self.events[-3:], Path(self._log.name).read_text()[-2000:])
        return event

    def kill(self) -> None:
        """End it and its p2pd at once, as when the machine fails."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        self._log.close()

    def hashes(self) -> dict[int, str]:
        rounds = [event for event in self.events if event["event"] == "round" and event["committed"]]
        return {event["round"]: event["params_hash"] for event in rounds}

    def _read(self) -> None:
        with self.process.stdout as lines:  # type: ignore[union-attr]
            for line in lines:
                with self._changed:
                    self.events.append(unhashable_free(json.loads(line)))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def unhashable_free(event: dict[str, Any]) -> dict[str, Any]:
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
    return [address for worker in running.values() for address in worker.wait("ready")["addresses"]][:1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_train_while_one_is_killed_and_another_joins(tmp_path: Path) -> None:
    job = create_job(
        tmp_path, write_job(tmp_path, "diloco", "sync_every = 20", "min_workers = 2", rounds=ROUNDS)
    )
    first = str(tmp_path / "anna")

    with workers(tmp_path, job, "anna", "boris", "clara") as running:
        running["anna"].wait("round", round=1)
        victim = running.pop("boris")
        victim.kill()
        running["dora"] = WorkerProcess(tmp_path, "dora", job, bootstrap(running))
        joined = running["dora"].wait("round")["round"]
        me = running["dora"].wait("ready")["peer_id"]
        later = running["anna"].wait("round", round=joined + 1)
        assert me in later["contributors"]
        for worker in running.values():
            worker.process.send_signal(signal.SIGTERM)
        for worker in running.values():
            worker.wait("done")
            assert worker.process.wait(30) == 0
        everyone = [victim, *running.values()]

    hashes: dict[int, set[str]] = {}
    for worker in everyone:
        for number, value in worker.hashes().items():
            hashes.setdefault(number, set()).add(value)
    assert {len(values) for values in hashes.values()} == {1}
    assert set(running["anna"].hashes()) >= set(range(joined + 2)), "every round was committed"
    evaluations = [event["val_loss"] for event in running["anna"].events if event["event"] == "eval"]
    assert evaluations[-1] < evaluations[0]
    status = call("train", "status", "--data-dir", first)
    assert (status["state"], status["running"]) == ("done", False)
    assert status["round"] >= joined + 2

    exported = tmp_path / "exported"
    call("train", "export", "--data-dir", first, "--out", str(exported))
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.isfinite(model(torch.tensor([[104, 105]])).logits).all()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_strangers_end_their_own_streams_and_nothing_else(tmp_path: Path) -> None:
    job = create_job(tmp_path, write_job(tmp_path, "diloco", "sync_every = 20", rounds=ROUNDS))
    with workers(tmp_path, job, "anna") as running:
        worker = running["anna"]
        before = worker.wait("round", round=1)

        async def scenario(transport: P2pdTransport) -> None:
            peer = PeerId(worker.wait("ready")["peer_id"])
            for protocol in TRAINING:
                await send_garbage(transport, peer, protocol)
                for sizes in ((1 << 31, 0), (0, 1 << 31)):
                    await send_oversized(transport, peer, protocol, sizes)

        size = psutil.Process(worker.process.pid).memory_info().rss
        run_stranger(bootstrap(running), scenario, tmp_path)
        assert psutil.Process(worker.process.pid).memory_info().rss - size < GROWTH_BYTES
        now = max(worker.hashes())
        assert now > before["round"]
        assert worker.wait("round", round=now + 2)["committed"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("sync_every = 2", "sync_evry = 2"), "sync_evry"),
        (("sync_every = 2", "sync_every = 0"), "sync_every"),
        (("rounds = 5", "rounds = 0"), "rounds"),
        (("/data", "/nothing"), "path"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_its_line(
    change: tuple[str, str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = write_job(tmp_path, "diloco", "sync_every = 2").replace(*change)
    file = tmp_path / "job.toml"
    file.write_text(toml)
    assert execute(["swarm", "create", "lab", "--open", "--out", str(tmp_path)]) == 0
    capsys.readouterr()

    command = ["train", "create", str(file), "--swarm", str(tmp_path / "swarm.toml")]
    assert execute([*command, "--data-dir", str(tmp_path / "d"), "--json"]) == 3
    number = next(n for n, text in enumerate(toml.splitlines(), 1) if text.startswith(line))
    assert f"{file}:{number}:" in "".join(capsys.readouterr())
    assert not (tmp_path / "d" / "jobs").exists()
