"""Complete training workers over simulated links in virtual time, and their tiny job."""

import asyncio
import random
import shutil
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swarmnet_node.training.checkpoint import CheckpointStore
from swarmnet_node.training.job_store import LocalFiles, check_job
from swarmnet_node.training.pipeline.stage_choice import StageMover
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_node.training.worker import Worker, WorkerDependencies
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.jobs import open_job, parse_job, seal_job
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import TimedExecutor

SWARM = bytes(32)
EPOCH = 1_800_000_000.0
ROUNDS = 5
COMPUTE_S = 0.2
"""Virtual seconds of each call to the computing thread."""
SOURCES = 60

_JOB = """
[job]
name = "tiny"
rounds = {rounds}
[model.config]
model_type = "llama"
vocab_size = 256
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true
[data]
path = "{data}"
sequence_length = 16
validation = 0.2
[training]
batch_size = 2
learning_rate = 3e-3
[method]
name = "{method}"
{settings}
[exchange]
deadline_s = 15
max_workers = 8
{exchange}
[eval]
every_rounds = 2
batches = 2
"""


def copy_sources(folder: Path) -> None:
    """Write data for ``write_job`` that is harder to learn: source code of the standard library."""
    (folder / "data").mkdir(parents=True)
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:SOURCES]:
        shutil.copy(source, (folder / "data" / source.name).with_suffix(".txt"))


def write_job(folder: Path, method: str, settings: str = "", exchange: str = "", rounds: int = ROUNDS) -> str:
    """The TOML of a job that trains in a second. Its data in ``folder`` are random words unless
    they exist."""
    data = folder / "data"
    if not data.exists():
        data.mkdir()
        rng = random.Random(0)
        words = [bytes(rng.choices(b"abcdefgh", k=rng.randint(2, 6))).decode() for _ in range(50)]
        for number in range(30):
            (data / f"{number}.txt").write_text(" ".join(rng.choices(words, k=200)))
    return _JOB.format(rounds=rounds, data=data, method=method, settings=settings, exchange=exchange)


class _TimedTrainer(Trainer):
    """A trainer whose gradients take virtual time."""

    def takes(self, step_s: Callable[[], float], executor: TimedExecutor) -> None:
        self.step_s, self._step_s, self._executor = step_s(), step_s, executor

    def _backward(self, round: int, step: int, slot: int) -> tuple[torch.Tensor, int]:
        self._executor.owed_s += self._step_s()
        return super()._backward(round, step, slot)


@dataclass
class WorkerLab:
    """Workers of one job by name, each with a folder that survives crashes."""

    folder: Path
    toml: str
    network: MemoryNetwork = field(
        default_factory=lambda: MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02, bytes_per_s=1e6))
    )
    observer: Callable[[str, dict[str, Any]], None] = lambda name, event: None
    write_s: float = 0.3
    """Virtual seconds of writing a checkpoint."""
    own: Mapping[str, Path] = field(default_factory=dict)
    """The data of each worker, in a job that trains every worker on its own."""
    step_s: dict[str, float] = field(default_factory=dict)
    """Virtual seconds of an inner step by worker, or of a block in stages; 0 for others."""

    def __post_init__(self) -> None:
        written = parse_job(self.toml.encode()).job
        checked = check_job(written, self.folder / "cache", lambda *_: None)
        self.files = LocalFiles.named_in(written)
        self.sealed = seal_job(checked, Identity.from_seed(b"owner"))
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.board = MemoryBoard(self.network, lambda: EPOCH + asyncio.get_running_loop().time())
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.workers: dict[str, Worker] = {}
        self.moved: dict[str, tuple[int, float]] = {}
        """The stage to which a worker moved last, and when."""

    def peer(self, name: str) -> PeerId:
        return Identity.from_seed(name.encode()).peer_id

    def start(self, name: str) -> None:
        self.events.setdefault(name, [])
        self.tasks[name] = asyncio.create_task(self._live(name), name=name)

    def crash(self, name: str) -> None:
        """Crash a worker; its streams are closed."""
        self.network.crash(self.peer(name))
        self.tasks[name].cancel()

    async def finished(self) -> None:
        """Wait until every worker that has not crashed is done, including those that start
        meanwhile."""
        while waiting := [task for task in self.tasks.values() if not task.done()]:
            await asyncio.wait(waiting)
        for task in self.tasks.values():
            if not task.cancelled():
                task.result()

    def rounds(self, name: str) -> dict[int, dict[str, Any]]:
        """The committed rounds of a worker."""
        return {
            event["round"]: event
            for event in self.events[name]
            if event["event"] == "round" and event["committed"]
        }

    def check_equal(self) -> None:
        """Assert that all workers that committed a round have the same parameters after it."""
        hashes: dict[int, set[str]] = {}
        for name in self.events:
            for number, event in self.rounds(name).items():
                hashes.setdefault(number, set()).add(event["params_hash"])
        assert hashes
        assert {number: len(values) for number, values in hashes.items()} == dict.fromkeys(hashes, 1)

    async def close(self) -> None:
        await cancel(*self.tasks.values())

    def trainer(self, name: str, job: Job, compute: TimedExecutor) -> Trainer | StageTrainer:
        """Make the trainer of a worker."""
        trainer = _TimedTrainer.open(job, TrainingMachine(self.folder / "cache", 1 << 33))
        trainer.takes(lambda: self.step_s.get(name, 0.0), compute)
        return trainer

    def mover(
        self, name: str, directory: MemoryDirectory, addresses: Callable[[], Sequence[str]]
    ) -> StageMover | None:
        """Make what decides when a worker moves to another stage."""
        return None

    def place(self, name: str) -> str:
        """Return the folder of a worker."""
        return name

    async def _live(self, name: str) -> None:
        identity = Identity.from_seed(name.encode())
        files = replace(self.files, data=(self.own[name],)) if name in self.own else self.files
        job = files.applied_to(open_job(self.sealed).job)
        async with self.network.transport(identity.peer_id) as transport:
            directory = MemoryDirectory(self.board, identity, SWARM)
            compute, codec = TimedExecutor(COMPUTE_S), TimedExecutor(0.0)
            trainer = self.trainer(name, job, compute)
            writer = TimedExecutor(self.write_s)
            dependencies = WorkerDependencies(
                transport,
                directory,
                compute,
                codec,
                writer,
                random.Random(name),
                identity.sign,
                mover=self.mover(name, directory, transport.addresses),
            )
            checkpoints = CheckpointStore(self.folder / self.place(name))

            def report(event: dict[str, Any]) -> None:
                self.events[name].append(event)
                self.observer(name, event)

            self.workers[name] = Worker(dependencies, self.sealed, trainer, checkpoints, report)
            await self.workers[name].run()
        if (stage := self.workers[name].next_stage) is not None:
            self.moved[name] = stage, asyncio.get_running_loop().time()
            await self._live(name)


async def train(lab: WorkerLab, *names: str, limit_s: float = 3000.0) -> None:
    """Run these workers until all have ended. Raises ``TimeoutError`` after ``limit_s`` of virtual
    time."""
    try:
        async with asyncio.timeout(limit_s):
            for name in names:
                lab.start(name)
            await lab.finished()
    finally:
        await lab.close()
