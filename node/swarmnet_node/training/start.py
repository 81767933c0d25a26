"""Starting a real worker, and keeping jobs: identity, libp2p, the DHT, the job, its data and model."""

import asyncio
import json
import os
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, SwarmnetError
from swarmnet_protocols.joining.network import Network, connect
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.files import write_whole

if TYPE_CHECKING:
    from swarmnet_node.training.dependencies import Report
    from swarmnet_node.training.trainer import Trainer
    from swarmnet_node.training.worker import Worker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.training.jobs import Job, SealedJob


@dataclass(frozen=True)
class LocalFiles:
    """Where the user of this machine says that the data and the model of a job are. A job of another peer names no files itself."""

    data: Path | None = None
    model: Path | None = None

    @classmethod
    def named_in(cls, job: "Job") -> "LocalFiles":
        """Those that the file of a job names on its owner's machine."""
        from swarmnet_protocols.training.jobs import PYTHON_STDLIB, is_published

        data, model = job.data.path, job.model.checkpoint
        return cls(
            None if data in (None, PYTHON_STDLIB) else Path(data).expanduser(),
            None if model is None or is_published(model) else Path(model).expanduser(),
        )

    def given_to(self, job: "Job") -> "Job":
        """``job`` as it is trained here. Raises ``ConfigError`` where a path is missing, or of no use."""
        return job.with_files(self.data, self.model)


@dataclass(frozen=True)
class WorkerConfig:
    """What a person says of a worker. ``job`` is an id of 64 hexadecimal digits."""

    job: str
    network: Network
    data_dir: Path
    cache_dir: Path
    device: str = "auto"
    threads: int | None = None
    files: LocalFiles = LocalFiles()


@asynccontextmanager
async def start(
    config: WorkerConfig, report: "Report", progress: "Progress" = lambda *_: None
) -> "AsyncIterator[Worker]":
    """A worker that is ready to ``run``.

    Raises ``Unreachable`` when nobody knows the job, and what reading its data and building its model raise, with the id
    of the job. Leaving the context ends at once what is computed, in the middle of a round too.
    """
    left = threading.Event()

    def progress_until_left(description: str, done: int, total: int | None) -> None:
        if left.is_set():
            raise _Left
        progress(description, done, total)

    async with AsyncExitStack() as stack:
        transport, directory = await stack.enter_async_context(connect(config.network))
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torch"))
        codec_executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="codec"))
        stack.callback(left.set)
        sealed = await find_sealed(config.data_dir, directory, config.job)

        from swarmnet_node.hosting.reports import Reporter
        from swarmnet_node.training.checkpoint import CheckpointStore
        from swarmnet_node.training.dependencies import Hosted, WorkerDependencies
        from swarmnet_node.training.reporting import WorkerNumbers
        from swarmnet_node.training.worker import Worker
        from swarmnet_protocols.directory.catalog import keep_job_announced
        from swarmnet_protocols.directory.duplicate_identity import DuplicateWatch
        from swarmnet_protocols.machine.threads import compute_on
        from swarmnet_protocols.net.identity import Identity
        from swarmnet_protocols.net.protocol_ids import REPORT
        from swarmnet_protocols.timing import Timing
        from swarmnet_protocols.training.jobs import open_job

        if config.network.identity_path is None:
            raise ConfigError("a worker needs an identity that is kept")
        await compute_on(executor, codec_executor, threads=config.threads)
        loop = asyncio.get_running_loop()
        trainer = await loop.run_in_executor(executor, _open_trainer, config, sealed, progress_until_left)
        checkpoints = CheckpointStore(job_folder(config.data_dir, config.job))
        dependencies = WorkerDependencies(
            transport,
            directory,
            executor,
            codec_executor,
            random.Random(os.urandom(16)),
            Identity.load_or_create(config.network.identity_path).sign,
            progress=progress,
        )
        numbers = WorkerNumbers(open_job(sealed), version("swarmnet-p2p"), report)
        worker = Worker(dependencies, Hosted(sealed, trainer, checkpoints), numbers.take)
        await transport.serve(REPORT, Reporter(numbers.describe).handle)

        def warn(warning: str) -> None:
            numbers.take({"event": "identity", "warning": warning})

        await stack.enter_async_context(
            DuplicateWatch.keep(transport, directory, random.SystemRandom(), Timing(), warn)
        )
        listing = asyncio.create_task(keep_job_announced(directory, config.job), name="catalog")
        stack.push_async_callback(cancel, listing)
        watching = asyncio.create_task(_fail_with_p2pd(transport, worker, left), name="p2pd")
        stack.push_async_callback(cancel, watching)
        yield worker


async def _fail_with_p2pd(transport: "Transport", worker: "Worker", left: threading.Event) -> None:
    """What is computed ends with p2pd: nobody hears of it any more."""
    try:
        await transport.died()
    except NotAuthorised as error:
        left.set()
        worker.fail(error)
        return
    left.set()
    worker.fail(
        SwarmnetError(
            "p2pd died: this worker reaches nobody",
            hint="start it again, it goes on from its checkpoint: swarmnet train join",
        )
    )


class _Left(Exception):
    """Raised where something is still computed for a worker that is gone; nobody waits for it."""


def _open_trainer(config: WorkerConfig, sealed: bytes, progress: "Progress") -> "Trainer":
    import psutil

    from swarmnet_node.training.trainer import Trainer
    from swarmnet_protocols.machine.devices import pick_device
    from swarmnet_protocols.training.jobs import open_job

    opened = open_job(sealed)
    with opened.naming_job():
        return Trainer.open(
            config.files.given_to(opened.job),
            cache_dir=config.cache_dir,
            available_bytes=psutil.virtual_memory().available,
            device=pick_device(config.device),
            progress=progress,
        )


def check_job(job: "Job", cache_dir: Path, progress: "Progress") -> "Job":
    """The job as it travels: with the hashes of its data and checkpoint, which are read for that, and without paths of this machine.

    Raises ``JobError`` for data or a model that this machine could not train with, or that others could not have.
    """
    import psutil

    from swarmnet_node.training.data import open_corpus
    from swarmnet_node.training.model import check_model, checkpoint_of

    corpus = open_corpus(job.data, cache_dir, progress)
    check_model(
        job,
        vocab_size=corpus.vocab_size,
        available_bytes=psutil.virtual_memory().total,
        cache_dir=cache_dir,
    )
    manifest = checkpoint_of(job.model, cache_dir).manifest.hash if job.model.is_checkpoint else None
    return job.about(corpus.digest, corpus.size_bytes, manifest)


def job_folder(data_dir: Path, job_id: str) -> Path:
    """Where a worker keeps what it has of a job: checkpoints, status, history."""
    return data_dir / "training" / job_id


def has_job(data_dir: Path, job_id: str) -> bool:
    """Whether a job is kept in the data directory."""
    return _job_path(data_dir, job_id).exists()


def keep_job(data_dir: Path, job: "SealedJob", sealed: bytes) -> None:
    """Keep a sealed job in the data directory, for workers that start here."""
    write_whole(_job_path(data_dir, job.id), sealed)


def keep_files(data_dir: Path, job_id: str, files: LocalFiles) -> None:
    """Remember where the files of a job are on this machine."""
    paths = {"data": files.data, "model": files.model}
    said = {name: str(path.absolute()) for name, path in paths.items() if path is not None}
    write_whole(_files_path(data_dir, job_id), json.dumps(said).encode())


def kept_files(data_dir: Path, job_id: str) -> LocalFiles:
    """Where they are, as far as that was said before. Raises ``ConfigError`` for a damaged note of it."""
    path = _files_path(data_dir, job_id)
    try:
        said = json.loads(path.read_bytes())
        return LocalFiles(**{name: Path(said[name]) for name in ("data", "model") if name in said})
    except FileNotFoundError:
        return LocalFiles()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged", hint="remove it, and give --data and --model again"
        ) from error


def _files_path(data_dir: Path, job_id: str) -> Path:
    return data_dir / "jobs" / f"{job_id}.files"


async def find_sealed(data_dir: Path, directory: "Directory", job_id: str) -> bytes:
    """A sealed job by its id: from the data directory, else from the swarm, and then kept.

    Raises ``Unreachable`` if nobody has it.
    """
    from swarmnet_protocols.training.job_records import find_job

    if has_job(data_dir, job_id):
        return kept_job(data_dir, job_id)[1]
    job, sealed = await find_job(directory, job_id)
    keep_job(data_dir, job, sealed)
    return sealed


def kept_job(data_dir: Path, job_id: str) -> "tuple[SealedJob, bytes]":
    """A job that was kept here, and its sealed form. Raises ``ConfigError`` if it was not, or is another one now."""
    from swarmnet_protocols.training.jobs import MAX_JOB_BYTES, open_job

    path = _job_path(data_dir, job_id)
    try:
        with path.open("rb") as file:
            sealed = file.read(MAX_JOB_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"no job {job_id[:16]}… is kept in {data_dir}",
            hint="name the data directory of its worker with --data-dir",
        ) from None
    try:
        job = open_job(sealed)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}", hint="remove the file and get the job again") from error
    if job.id != job_id:
        raise IntegrityError(
            f"{path} holds another job, {job.id[:16]}…, or one of another owner", hint="remove the file"
        )
    return job, sealed


def _job_path(data_dir: Path, job_id: str) -> Path:
    return data_dir / "jobs" / f"{job_id}.job"
