"""Starts a training worker.

1. Connect to the swarm.
2. Get the job, its data and its model.
3. Assemble a ``Worker``.
"""

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_node.owner.watched_peer import Purpose, WatchedPeer
from swarmnet_node.training.job_store import LocalFiles, fetch_job, job_folder, last_stage, own_jobs
from swarmnet_node.training.steps.memory_options import AUTOMATIC, MemoryOptions
from swarmnet_protocols.errors import ConfigError, NetworkStopped, NotAuthorised
from swarmnet_protocols.joining.network import Network, connect
from swarmnet_protocols.machine.aio import in_background, persist

if TYPE_CHECKING:
    from swarmnet_node.training.events import EventHandler
    from swarmnet_node.training.steps.stage_trainer import StageTrainer
    from swarmnet_node.training.steps.trainer import Trainer
    from swarmnet_node.training.worker import Worker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.training.jobs import SealedJob
    from swarmnet_protocols.training.memory_needs import MemoryNeeds
    from swarmnet_protocols.wire.control_pb2 import NodeStatus


@dataclass(frozen=True)
class WorkerConfig:
    """The user's settings of a worker. ``job``: an id of 64 hexadecimal digits."""

    job: str
    network: Network
    data_dir: Path
    cache_dir: Path
    device: str = "auto"
    memory: MemoryOptions = AUTOMATIC
    threads: int | None = None
    files: LocalFiles = field(default_factory=LocalFiles)
    stage: int | None = None
    """The stage to train, in a job that has stages. None for the stage of the last time, or the one
    that needs workers most."""
    public_name: str = ""
    """Name of this worker that everybody sees. Empty: none."""
    swarm_name: str = ""
    limits: OwnerLimits = field(default_factory=OwnerLimits)
    """The limits on the link and on memory apply. The others are for a node."""


@asynccontextmanager
async def start(
    config: WorkerConfig, handler: "EventHandler", progress: "Progress" = lambda *_: None
) -> "AsyncIterator[tuple[Worker, WatchedPeer]]":
    """Yield a worker that is ready to ``run``, and its peer for the owner's commands.

    ``handler`` receives the worker's events. Leaving the context stops a computation at its next
    inner step. Raises ``Unreachable`` if no peer has the job, and the errors of reading its data
    and building its model.
    """
    stopped = threading.Event()

    def progress_unless_stopped(description: str, done: int, total: int | None) -> None:
        if stopped.is_set():
            raise _Stopped
        progress(description, done, total)

    async with AsyncExitStack() as stack:
        config.limits.limit_link(config.network.peer.link)
        transport, directory = await stack.enter_async_context(connect(config.network))
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torch"))
        codec_executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="codec"))
        writer = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="checkpoint"))
        stack.callback(stopped.set)
        sealed = await fetch_job(config.data_dir, directory, config.job)

        from swarmnet_node.hosting.reports import Reporter
        from swarmnet_node.owner.given import GivenKeeper
        from swarmnet_node.training.checkpoint import CheckpointStore
        from swarmnet_node.training.events import WorkerReporter
        from swarmnet_node.training.worker import Worker, WorkerDependencies
        from swarmnet_protocols.directory.catalog import job_announcer
        from swarmnet_protocols.directory.duplicate_identity import DuplicateWatch
        from swarmnet_protocols.directory.host_announcements import read_hosts
        from swarmnet_protocols.fetching.peers import SwarmPeers, WeightHost
        from swarmnet_protocols.fetching.server import WeightServer
        from swarmnet_protocols.machine.threads import compute_on
        from swarmnet_protocols.net.identity import Identity
        from swarmnet_protocols.net.protocol_ids import REPORT, WEIGHTS
        from swarmnet_protocols.timing import Timing
        from swarmnet_protocols.training.job_records import find_workers
        from swarmnet_protocols.training.job_settings import is_published
        from swarmnet_protocols.training.jobs import open_job
        from swarmnet_protocols.training.pipeline.stages import groups

        await compute_on(executor, codec_executor, threads=config.threads)
        loop = asyncio.get_running_loop()
        identity = Identity.load_or_create(config.network.peer.identity_path)
        peers = SwarmPeers(config.network.rules.pieces_hashes, Timing(), config.network.rules.models)

        async def holders(model: bytes) -> Sequence[WeightHost]:
            """Return peers that may have the weights: hosts, and workers of the job."""
            members = groups(config.job, open_job(sealed).job.stage_count)
            workers = [each for group in members for each in await find_workers(directory, group)]
            return [*await read_hosts(directory, model), *workers]

        def tell(needs: "MemoryNeeds") -> None:
            loop.call_soon_threadsafe(
                handler, {"event": "memory", **asdict(needs), "bytes": needs.total_bytes}
            )

        peers.attach(transport, holders)
        stack.callback(peers.detach)
        stage = await _stage(config, open_job(sealed), transport, directory)
        opening = partial(_open_trainer, config, sealed, stage, progress_unless_stopped, peers, tell)
        trainer = await loop.run_in_executor(executor, opening)
        keeper = GivenKeeper(config.data_dir, config.network.peer.link)
        stack.callback(keeper.close)
        dependencies = WorkerDependencies(
            transport,
            directory,
            executor,
            codec_executor,
            writer,
            random.Random(os.urandom(16)),
            identity.sign,
            progress=progress,
            given=keeper.given,
        )
        reporter = WorkerReporter(
            open_job(sealed),
            version("swarmnet-p2p"),
            handler,
            transport.reach,
            keeper.given,
            public_name=config.public_name,
        )
        checkpoints = CheckpointStore(job_folder(config.data_dir, config.job, stage))
        worker = Worker(dependencies, sealed, trainer, checkpoints, reporter.handle)  # type: ignore[arg-type]
        await REPORT.serve(transport, Reporter(reporter.report).handle)
        if trainer.local is not None and is_published(trainer.local.name):
            server = WeightServer(trainer.local.shared(), lambda: False)
            await WEIGHTS.serve(transport, server.handle, Timing())

        def warn(warning: str) -> None:
            reporter.handle({"event": "identity", "warning": warning})

        def notice(text: str) -> None:
            reporter.handle({"event": "notice", "text": text})

        watch = await stack.enter_async_context(
            DuplicateWatch.run(transport, directory, random.SystemRandom(), Timing(), warn)
        )

        def add_worker(status: "NodeStatus") -> None:
            status.worker.CopyFrom(reporter.report().worker)
            status.given.CopyFrom(keeper.given.message())
            status.warning = watch.warning() or status.warning

        purpose = Purpose(
            "train join", config.swarm_name, config.data_dir, config.network.peer.link, add_worker
        )
        peer = await stack.enter_async_context(WatchedPeer.run(purpose, transport, directory))
        made = own_jobs(config.data_dir, identity.public_key)
        listing = job_announcer(directory, dependencies.rng, config.job, made)
        await stack.enter_async_context(
            in_background(
                persist("the catalog", listing.run),
                persist("the totals", partial(keeper.run, notice)),
                _fail_with_transport(transport, worker, stopped),
            )
        )
        yield worker, peer


async def _stage(
    config: WorkerConfig,
    sealed: "SealedJob",
    transport: "Transport",
    directory: "Directory",
) -> int | None:
    """Return the stage that this worker trains; None in a job without stages.

    Raises ``ConfigError`` for a stage that the job does not have.
    """
    from swarmnet_node.training.stage_choice import choose_stage

    stages = sealed.job.stages
    if config.stage is not None and (stages is None or config.stage >= stages.count):
        has = "no stages" if stages is None else f"the stages 0 to {stages.count - 1}"
        raise ConfigError(f"this job has {has}", hint="leave out --stage")
    if stages is None or config.stage is not None:
        return config.stage
    before = last_stage(config.data_dir, sealed.id)
    if before is not None:
        return before
    return await choose_stage(directory, sealed.id, stages.count, transport.peer_id, transport.addresses)


async def _fail_with_transport(transport: "Transport", worker: "Worker", stopped: threading.Event) -> None:
    """Stop the worker when its transport ends, because it can then reach no other worker."""
    try:
        await transport.died()
    except NotAuthorised as error:
        stopped.set()
        worker.fail(error)
        return
    stopped.set()
    worker.fail(
        NetworkStopped(hint="start it again with 'swarmnet train join'; it resumes from its checkpoint")
    )


class _Stopped(Exception):
    """Raised on the computing thread to end the computation of a stopped worker."""


def _open_trainer(
    config: WorkerConfig,
    sealed: bytes,
    stage: int | None,
    progress: "Progress",
    peers: "SwarmPeers",
    tell: "Callable[[MemoryNeeds], None]",
) -> "Trainer | StageTrainer":
    from swarmnet_node.training.steps.stage_trainer import StageTrainer
    from swarmnet_node.training.steps.trainer import Trainer
    from swarmnet_protocols.machine.devices import pick_device
    from swarmnet_protocols.training.jobs import open_job

    opened = open_job(sealed)
    with opened.naming_job():
        config.files.load_method(opened.job)
        job = config.files.applied_to(opened.job, stage)
        options: dict[str, Any] = {
            "cache_dir": config.cache_dir,
            "available_bytes": _available_bytes(config.limits),
            "device": pick_device(config.device),
            "memory": config.memory,
            "progress": progress,
            "peers": peers,
            "tell": tell,
        }
        if stage is not None:
            return StageTrainer.open(job, stage, **options)
        trainer = Trainer.open(job, **options)
        if opened.job.make_method().kind == "parameters":
            trainer.time_step()
        return trainer


def _available_bytes(limits: OwnerLimits) -> int:
    """Return the memory that this process may still take, without swapping and within its owner's
    limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    if limits.max_ram_bytes is None:
        return free
    return min(free, limits.max_ram_bytes - int(psutil.Process().memory_info().rss))
