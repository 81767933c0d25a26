"""Starts a training worker.

1. Connect to the swarm, and get the job.
2. Rest as long as the owner's limits forbid to train. Nothing is loaded meanwhile.
3. Get its data and its model, and assemble a ``Worker``.
4. Train until the job is done, the owner stops the worker, or its limits require a pause. For a
   pause the caller frees the memory (``swarmnet/restart.py``) and begins at 1 again.
"""

import asyncio
import math
import os
import random
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_node.owner.limits import PAUSED_BY_OWNER, OwnerLimits
from swarmnet_node.owner.watched_peer import GuestPeer, Purpose
from swarmnet_node.training.job_store import (
    LocalFiles,
    fetch_job,
    job_folder,
    last_stage,
    moved_stage,
    own_jobs,
    store_move,
)
from swarmnet_node.training.steps.memory_options import AUTOMATIC, MemoryOptions
from swarmnet_protocols.errors import ConfigError, NetworkStopped, NotAuthorised, SwarmnetError
from swarmnet_protocols.joining.network import Network, connect
from swarmnet_protocols.machine.aio import cancel, in_background, persist
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.training.jobs import open_job

if TYPE_CHECKING:
    from swarmnet_node.owner.given import Given
    from swarmnet_node.training.checkpoint import CheckpointStore, Kept
    from swarmnet_node.training.events import EventHandler, WorkerReporter
    from swarmnet_node.training.pipeline.stage_choice import StageMover
    from swarmnet_node.training.steps.stage_trainer import StageTrainer
    from swarmnet_node.training.steps.trainer import Trainer
    from swarmnet_node.training.worker import Worker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.training.memory_needs import MemoryNeeds
    from swarmnet_protocols.wire.control_pb2 import NodeStatus

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


@asynccontextmanager
async def start(
    config: WorkerConfig, handler: "EventHandler", progress: "Progress" = lambda *_: None
) -> AsyncIterator["Training"]:
    """Yield the training of a job, ready to ``run``.

    ``handler`` receives the worker's events. Leaving the context stops a computation at its next
    inner step. Raises ``Unreachable`` if no peer has the job.
    """
    async with AsyncExitStack() as stack:
        link = config.network.peer.link
        config.limits.limit_link(link)
        transport, directory = await stack.enter_async_context(connect(config.network))
        threads = Threads(
            *(
                stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=name))
                for name in ("torch", "codec", "checkpoint")
            )
        )
        sealed = await fetch_job(config.data_dir, directory, config.job)

        from swarmnet_node.hosting.reports import Reporter
        from swarmnet_node.owner.given import GivenKeeper
        from swarmnet_node.training.events import WorkerReporter
        from swarmnet_protocols.directory.catalog import job_announcer
        from swarmnet_protocols.directory.duplicate_identity import DuplicateWatch
        from swarmnet_protocols.net.identity import Identity
        from swarmnet_protocols.net.protocol_ids import REPORT
        from swarmnet_protocols.timing import Timing

        identity = Identity.load_or_create(config.network.peer.identity_path)
        keeper = GivenKeeper(config.data_dir, link)
        stack.callback(keeper.close)
        reporter = WorkerReporter(
            open_job(sealed),
            version("swarmnet-p2p"),
            handler,
            transport.reach,
            keeper.given,
            public_name=config.public_name,
        )
        await REPORT.serve(transport, Reporter(reporter.report).handle)

        def warn(warning: str) -> None:
            reporter.handle({"event": "identity", "warning": warning})

        def notice(text: str) -> None:
            reporter.handle({"event": "notice", "text": text})

        watch = await stack.enter_async_context(
            DuplicateWatch(transport, directory, random.SystemRandom(), Timing(), warn).running()
        )

        def add_worker(status: "NodeStatus") -> None:
            status.worker.CopyFrom(reporter.report().worker)
            status.given.CopyFrom(keeper.given.message())
            status.warning = watch.warning() or status.warning
            status.volunteers = config.volunteers

        def limit_cores(limits: OwnerLimits) -> None:
            training.limit_cores(limits)

        purpose = Purpose(
            "train join",
            config.swarm_name,
            config.data_dir,
            link,
            add_worker,
            config.limits,
            limit_cores,
        )
        peer = await stack.enter_async_context(GuestPeer(purpose, transport, directory).running())
        keeper.is_active = lambda: peer.is_working
        training = Training(
            config, sealed, peer, transport, directory, threads, keeper.given, reporter, progress
        )
        stack.callback(training.stop_computing)
        listing = job_announcer(
            directory, training.rng, config.job, own_jobs(config.data_dir, identity.public_key)
        )
        await stack.enter_async_context(
            in_background(
                persist("the catalog", listing.run),
                persist("the totals", partial(keeper.run, notice)),
                _fail_with_transport(training),
            )
        )
        yield training


@dataclass(frozen=True)
class Threads:
    """The threads of a worker: torch computation, encoding, and writing checkpoints."""

    computing: Executor
    codec: Executor
    writer: Executor


@dataclass
class Training:
    """The training of a job by this process, until it is done or must pause. Made by ``start``."""

    config: WorkerConfig
    sealed: bytes
    peer: GuestPeer
    """The worker's peer, for the owner's commands."""
    transport: "Transport"
    directory: "Directory"
    threads: Threads
    given: "Given"
    reporter: "WorkerReporter"
    progress: "Progress"
    rng: random.Random = field(default_factory=lambda: random.Random(os.urandom(16)))
    _worker: "Worker | None" = None
    """None until the model is loaded."""
    _stopped: threading.Event = field(default_factory=threading.Event)
    _error: SwarmnetError | None = None
    """The error that ends the training from outside."""
    _has_left: bool = False
    _every_core: int = 0
    """The cores of this machine. 0 until the model is loaded."""
    _needs_bytes: int = 0
    """The memory that the worker takes, as it was stated. 0 until then."""
    _kept: "Kept | None" = None
    """The checkpoints that the disk may hold. None until their size is known."""

    async def run(self) -> bool:
        """Train. Return whether the worker ended for a pause, or to move to another stage.

        While the owner's limits forbid to train, nothing is loaded. Called once. Raises the errors
        of reading the job's data, of building its model and of training.
        """
        peer, paused = self.peer, False
        peer.guard.reserve(self.config.round_bytes)
        if await peer.may_work(self._tell_pause):
            peer.is_working = True
            keeping = asyncio.create_task(self._keep_terms(), name="the owner's terms")
            try:
                self._worker = await self._open()
                await self._worker.run()
                if self._worker.next_stage is not None:
                    store_move(self.config.data_dir, self.config.job, self._worker.next_stage)
            except _Stopped:  # while the model was loading
                pass
            finally:
                peer.is_working = False
                moves = self._worker is not None and self._worker.next_stage is not None
                paused = (self._has_left or moves) and not peer.stopping.is_set()
                await cancel(keeping)
        if self._error is not None:
            raise self._error
        return paused

    def fail(self, error: SwarmnetError) -> None:
        """Make ``run`` save a checkpoint and raise ``error``."""
        self._error = error
        self.stop_computing()
        if self._worker is not None:
            self._worker.fail(error)
        self.peer.finish(0.0)

    def leave(self) -> None:
        """Leave the group at once, as for a pause. ``run`` then returns True."""
        self._has_left, self.peer.is_working = True, False
        self.stop_computing()
        if self._worker is not None:
            self._worker.pause()

    def limit_cores(self, limits: OwnerLimits) -> None:
        """Compute with as many cores as the owner allows, from the next operation on."""
        from swarmnet_protocols.machine.threads import use_cores

        if self._every_core:
            use_cores(self.threads.computing, limits.cores or self._every_core)

    def stop_computing(self) -> None:
        """End a computation at its next inner step."""
        self._stopped.set()

    async def _keep_terms(self) -> None:
        """Stop the worker when its owner says so: at the end of its round, or at once for a
        pause."""
        if await self.peer.must_rest():
            self.leave()
        elif self._worker is None:
            self.stop_computing()
        elif self._error is None:
            self._worker.stop()
            self.reporter.handle({"event": "leaving"})

    def _tell_pause(self, reason: str) -> None:
        until = self.peer.guard.machine.paused_until
        ends = until if reason == PAUSED_BY_OWNER and math.isfinite(until) else None
        self.reporter.handle({"event": "paused", "reason": reason, "until": ends})

    def _handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            took = event["bytes_sent"] + event["bytes_received"]
            event["round_bytes"] = round_bytes = max(took, self.config.round_bytes)
            self.peer.guard.reserve(round_bytes)
        self.reporter.handle(event)

    async def _open(self) -> "Worker":
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
        now = asyncio.get_running_loop().time()
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
                raise _Stopped
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
        """Report what a worker takes: memory, and if no round has shown it, bytes of a round."""
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


async def _fail_with_transport(training: Training) -> None:
    """Stop the worker when its transport ends, because it can then reach no other worker."""
    try:
        await training.transport.died()
    except NotAuthorised as error:
        training.fail(error)
        return
    training.fail(
        NetworkStopped(hint="start it again with 'swarmnet train join'; it resumes from its checkpoint")
    )


class _Stopped(Exception):
    """Raised on the computing thread to end the computation of a stopped worker."""


def _available_bytes(limits: OwnerLimits) -> int:
    """Return the memory that this process may still take, without swapping and within its owner's
    limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if limits.max_ram_bytes is None:
        return free
    return min(free, limits.max_ram_bytes - int(psutil.Process().memory_info().rss))
