"""Opens a worker of a job within its owner's limits.

1. Choose the stage, in a job with stages.
2. State the memory that the worker takes. Load its data and its model.
3. Connect its parts: ``Worker``.
"""

import asyncio
import math
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.owner.watched_peer import GuestPeer
from swarmnet_node.training.job_store import LocalFiles, job_folder, last_stage, moved_stage
from swarmnet_node.training.steps.memory_options import AUTOMATIC, MemoryOptions
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.machine.aio import in_background, loop_time
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.training.jobs import open_job

if TYPE_CHECKING:
    from swarmnet_node.owner.given import Given
    from swarmnet_node.training.checkpoint import CheckpointStore, Kept
    from swarmnet_node.training.events import WorkerReporter
    from swarmnet_node.training.pipeline.stage_choice import StageMover
    from swarmnet_node.training.steps.stage_trainer import StageTrainer
    from swarmnet_node.training.steps.trainer import Trainer
    from swarmnet_node.training.worker import Worker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.training.memory_needs import MemoryNeeds

_CHECKPOINT_BYTES = 4 * 4
"""Most bytes of a checkpoint per trained parameter, without the method's outer state: the
parameter, AdamW's two moments and the residual of a codec, each in float32."""
_COPIES = 4
"""Most encoded vectors that a round sends and receives: contributions and results, each way."""
STAY_S = 600.0
"""Seconds that a worker of a stage stays after its job's last round. With less, `train export`
finds no worker. With more, a volunteer's machine is kept busy for nothing. A worker that starts
again after the last round stays just as long."""


@dataclass(frozen=True)
class WorkerConfig:
    """The user's settings of a worker. ``job``: an id of 64 hexadecimal digits."""

    job: str
    network: Network
    data_dir: Path
    cache_dir: Path
    device: str = "auto"
    memory: MemoryOptions = AUTOMATIC
    max_disk_bytes: int | None = None
    """Most bytes of downloaded model files, checkpoints and copies of states. None for no limit."""
    files: LocalFiles = field(default_factory=LocalFiles)
    stage: int | None = None
    """The stage to train, in a job that has stages. None for the stage of the last time, or else
    the stage that needs workers most."""
    begin_from: Sequence[Path] = ()
    """Folders with checkpoints of another job, with which a worker without a checkpoint begins."""
    public_name: str = ""
    """Name of this worker that everybody sees. Empty: none."""
    swarm_name: str = ""
    limits: OwnerLimits = field(default_factory=OwnerLimits)
    round_bytes: int = 0
    """Most bytes that a round of this job has sent and received here. 0 if unknown."""
    volunteers: str = ""
    """The reason why a volunteer trains this job. Empty for other workers."""


@dataclass(frozen=True)
class Threads:
    """The threads of a worker: torch computation, encoding, and writing checkpoints."""

    computing: Executor
    codec: Executor
    writer: Executor


class OpeningStopped(Exception):
    """Raised on the computing thread to end the computation of a stopped worker."""


@dataclass
class Opening:
    """The opening of a worker by this process."""

    config: WorkerConfig
    sealed: bytes
    peer: GuestPeer
    transport: "Transport"
    directory: "Directory"
    threads: Threads
    given: "Given"
    reporter: "WorkerReporter"
    progress: "Progress"
    rng: random.Random
    _stopped: threading.Event = field(default_factory=threading.Event)
    _every_core: int = 0
    """The cores of this machine. 0 until the model is loaded."""
    _needs_bytes: int = 0
    """The memory that the worker takes. 0 until it is stated."""
    _kept: "Kept | None" = None
    """The checkpoints that the disk may hold. None until their size is known."""

    def stop(self) -> None:
        """End a computation of ``open`` or of the worker at its next inner step."""
        self._stopped.set()

    def limit_cores(self, limits: OwnerLimits) -> None:
        """Compute with as many cores as the owner allows, from the next operation on."""
        from swarmnet_protocols.machine.threads import use_cores

        if self._every_core:
            use_cores(self.threads.computing, limits.cores or self._every_core)

    async def open(self) -> "Worker":
        """Return a worker that is ready to run.

        Raises the errors of reading the job's data and of building its model, and
        ``OpeningStopped`` after ``stop``.
        """
        from swarmnet_node.training.checkpoint import CheckpointStore, Kept
        from swarmnet_node.training.pipeline.stage_choice import keep_choice
        from swarmnet_node.training.worker import Worker, WorkerDependencies
        from swarmnet_protocols.directory.host_announcements import read_hosts
        from swarmnet_protocols.fetching.peers import SwarmPeers, WeightHost
        from swarmnet_protocols.fetching.server import WeightServer
        from swarmnet_protocols.machine.threads import compute_on
        from swarmnet_protocols.net.identity import Identity
        from swarmnet_protocols.net.protocol_ids import WEIGHTS
        from swarmnet_protocols.timing import Timing
        from swarmnet_protocols.training.job_records import find_workers
        from swarmnet_protocols.training.job_settings import is_published
        from swarmnet_protocols.training.pipeline.stages import groups

        config, directory = self.config, self.directory

        async def holders(model: bytes) -> Sequence[WeightHost]:
            """Return peers that may have the weights: hosts, and workers of the job."""
            members = groups(config.job, open_job(self.sealed).job.stage_count)
            workers = [each for group in members for each in await find_workers(directory, group)]
            return [*await read_hosts(directory, model), *workers]

        stage = await self._stage()
        rules = config.network.rules
        peers = SwarmPeers(rules.pieces_hashes, Timing(), rules.models)
        peers.attach(self.transport, holders)
        try:
            loop, threads = asyncio.get_running_loop(), self.threads
            await loop.run_in_executor(threads.computing, import_transformers)  # torch has threads of its own
            cores = self.peer.limits().cores
            self._every_core = await compute_on(threads.computing, threads.codec, threads=cores)
            opening = loop.run_in_executor(threads.computing, self._open_trainer, stage, peers, loop)
            if stage is None:
                trainer = await opening
            else:
                keeping = keep_choice(directory, config.job, stage, self.transport.addresses)
                async with in_background(keeping):
                    trainer = await opening
        finally:
            peers.detach()
        if trainer.local is not None and is_published(trainer.local.name):
            server = WeightServer(trainer.local.shared(), lambda: False)
            await WEIGHTS.serve(self.transport, server.handle, Timing())
        dependencies = WorkerDependencies(
            self.transport,
            directory,
            self.threads.computing,
            self.threads.codec,
            self.threads.writer,
            self.rng,
            Identity.load_or_create(config.network.peer.identity_path).sign,
            progress=self.progress,
            stay_s=STAY_S,
            mover=None if stage is None or config.stage is not None else self._mover(),
            available_bytes=lambda: _available_bytes(self.peer.limits()),
            given=self.given,
        )
        checkpoints = CheckpointStore(job_folder(config.data_dir, config.job, stage), self._kept or Kept())
        if config.begin_from:
            await loop.run_in_executor(self.threads.writer, self._begin_from, checkpoints, trainer)
        return Worker(dependencies, self.sealed, trainer, checkpoints, self._handle)

    def _handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            took = event["bytes_sent"] + event["bytes_received"]
            event["round_bytes"] = round_bytes = max(took, self.config.round_bytes)
            self.peer.guard.reserve(round_bytes)
        self.reporter.handle(event)

    def _begin_from(self, checkpoints: "CheckpointStore", trainer: "Trainer | StageTrainer") -> None:
        """Write a first checkpoint that has the progress of another job."""
        from swarmnet_node.training.pipeline.recut import recut

        if checkpoints.newest_valid() is None:
            saved = recut(self.config.begin_from, trainer.shapes, self.config.job)
            checkpoints.save(saved, trainer.write)

    def _mover(self) -> "StageMover":
        from swarmnet_node.training.pipeline.stage_choice import StageMover
        from swarmnet_protocols.machine.clock import wall_clock

        config = self.config
        moved = moved_stage(config.data_dir, config.job)
        now = loop_time()
        return StageMover(
            self.directory,
            config.job,
            self.transport.addresses,
            self.rng,
            lambda stage: asyncio.to_thread(self._may_take, stage),
            -math.inf if moved is None else now + moved[1] - wall_clock(),
        )

    def _may_take(self, stage: int) -> bool:
        """Return whether this machine has the data and the memory for another stage."""
        from swarmnet_node.training.model.checks import check_model
        from swarmnet_node.training.steps.training_machine import TrainingMachine

        config = self.config
        free = _available_bytes(self.peer.limits()) + self._needs_bytes
        machine = TrainingMachine(config.cache_dir, free, memory=config.memory)
        try:
            job = config.files.applied_to(open_job(self.sealed).job, stage)
            check_model(job, machine, vocab_size=0, stage=stage)
        except SwarmnetError:
            return False
        return True

    async def _stage(self) -> int | None:
        """Return the stage that this worker trains; None in a job without stages.

        Raises ``ConfigError`` for a stage that the job does not have.
        """
        from swarmnet_node.training.pipeline.stage_choice import choose_stage

        config, sealed, transport = self.config, open_job(self.sealed), self.transport
        stages = sealed.job.stages
        if config.stage is not None and (stages is None or config.stage >= stages.count):
            has = "no stages" if stages is None else f"the stages 0 to {stages.count - 1}"
            raise ConfigError(f"this job has {has}", hint="leave out --stage")
        if stages is None or config.stage is not None:
            return config.stage
        before = last_stage(config.data_dir, sealed.id)
        if before is not None:
            return before
        peer = transport.peer_id
        return await choose_stage(self.directory, sealed.id, stages.count, peer, transport.addresses)

    def _open_trainer(
        self, stage: int | None, peers: "SwarmPeers", loop: asyncio.AbstractEventLoop
    ) -> "Trainer | StageTrainer":
        from swarmnet_node.training.checkpoint import Kept
        from swarmnet_node.training.steps.stage_trainer import StageTrainer
        from swarmnet_node.training.steps.trainer import Trainer
        from swarmnet_node.training.steps.training_machine import TrainingMachine
        from swarmnet_protocols.machine.devices import limit_memory, pick_device

        config, opened = self.config, open_job(self.sealed)

        def progress(description: str, done: int, total: int | None) -> None:
            if self._stopped.is_set():
                raise OpeningStopped
            self.progress(description, done, total)

        def tell(needs: "MemoryNeeds") -> int | None:
            loop.call_soon_threadsafe(self._tell_needs, needs)
            if config.max_disk_bytes is None:
                return None
            names = getattr(opened.job.make_method(), "state_names", ())
            one_bytes = (_CHECKPOINT_BYTES + 4 * len(names)) * needs.trained
            self._kept = Kept.within(config.max_disk_bytes, one_bytes)
            return config.max_disk_bytes - self._kept.most * one_bytes

        with opened.naming_job():
            config.files.load_method(opened.job)
            device = pick_device(config.device)
            limits = self.peer.limits()
            limit_memory(device, limits.max_gpu_mem)
            job = config.files.applied_to(opened.job, stage)
            machine = TrainingMachine(
                config.cache_dir, _available_bytes(limits), device, config.memory, progress, peers, tell
            )
            if stage is not None:
                return StageTrainer.open(job, stage, machine)
            trainer = Trainer.open(job, machine)
            if opened.job.make_method().kind == "parameters":
                trainer.time_step()
            return trainer

    def _tell_needs(self, needs: "MemoryNeeds") -> None:
        """Report the worker's memory, and an estimate of a round's bytes if none is known."""
        from swarmnet_protocols.training.codecs import get_codec

        self._needs_bytes = needs.total_bytes
        event = {"event": "memory", **asdict(needs), "bytes": needs.total_bytes}
        job = open_job(self.sealed).job
        method = job.make_method()
        if not self.config.round_bytes and method.kind != "scalars":
            codec = get_codec(job.exchange.codec or method.codec)
            event["round_bytes"] = _COPIES * codec.max_bytes(needs.trained)
            self.peer.guard.reserve(event["round_bytes"])
        self.reporter.handle(event)


def _available_bytes(limits: OwnerLimits) -> int:
    """Return the memory that this process may still take, without swapping and within its owner's
    limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if limits.max_ram_bytes is None:
        return free
    return min(free, limits.max_ram_bytes - int(psutil.Process().memory_info().rss))
