"""Starting a real worker, and keeping jobs: identity, libp2p, the DHT, the job, its data and model."""

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ConfigError

if TYPE_CHECKING:
    from swarmnet_node.training.trainer import Trainer
    from swarmnet_node.training.worker import Report, Worker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.training.jobs import SealedJob
    from swarmnet_protocols.transport.p2pd import P2pdTransport


@dataclass(frozen=True)
class Network:
    """Which swarm, and how to reach it."""

    swarm: bytes
    data_dir: Path
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
    announce: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerConfig:
    """What a person says of a worker. ``job`` is an id of 64 hexadecimal digits."""

    job: str
    network: Network
    cache_dir: Path
    device: str = "auto"
    threads: int | None = None


@asynccontextmanager
async def connect(
    network: Network, *, client_mode: bool = False
) -> "AsyncIterator[tuple[P2pdTransport, Directory]]":
    """The swarm, while the context is open. Raises ``Unreachable`` when bootstraps are named and none answers."""
    from swarmnet_protocols.dht import DhtDirectory
    from swarmnet_protocols.identity import Identity
    from swarmnet_protocols.transport.p2pd import P2pdConfig, P2pdTransport

    path = network.data_dir / "identity.key"
    identity = Identity.load_or_create(path)
    config = P2pdConfig(
        path,
        listen=network.listen,
        announce=network.announce,
        bootstrap=network.bootstrap,
        require_bootstrap=bool(network.bootstrap),
    )
    async with (
        P2pdTransport.create(config) as transport,
        DhtDirectory.create(
            transport,
            identity,
            swarm=network.swarm,
            bootstrap=network.bootstrap,
            client_mode=client_mode,
        ) as directory,
    ):
        yield transport, directory


@asynccontextmanager
async def start(config: WorkerConfig, report: "Report") -> "AsyncIterator[Worker]":
    """A worker that is ready to ``run``.

    Raises ``Unreachable`` when nobody knows the job, and what reading its data and building its model raise.
    """
    async with AsyncExitStack() as stack:
        transport, directory = await stack.enter_async_context(connect(config.network))
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torch"))
        codec_executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="codec"))
        sealed = await find_sealed(config.network.data_dir, directory, config.job)

        import torch

        from swarmnet_node.training.checkpoint import Checkpoints
        from swarmnet_node.training.worker import Hosted, Worker, WorkerWorld
        from swarmnet_protocols.threads import stay_serial

        loop = asyncio.get_running_loop()
        every_core = stay_serial()
        await loop.run_in_executor(codec_executor, stay_serial)
        await loop.run_in_executor(executor, torch.set_num_threads, config.threads or every_core)
        trainer = await loop.run_in_executor(executor, _open_trainer, config, sealed)
        checkpoints = Checkpoints(config.network.data_dir / "training" / config.job)
        world = WorkerWorld(transport, directory, executor, codec_executor, random.Random(os.urandom(16)))
        yield Worker(world, Hosted(sealed, trainer, checkpoints), report)


def _open_trainer(config: WorkerConfig, sealed: bytes) -> "Trainer":
    import psutil

    from swarmnet_node.training.trainer import Trainer
    from swarmnet_protocols.devices import pick_device
    from swarmnet_protocols.training.jobs import open_job

    return Trainer.open(
        open_job(sealed).job,
        cache_dir=config.cache_dir,
        available_bytes=psutil.virtual_memory().available,
        device=pick_device(config.device),
    )


def keep_job(data_dir: Path, job: "SealedJob", sealed: bytes) -> None:
    """Keep a sealed job in the data directory, for workers that start here."""
    path = _job_path(data_dir, job.id)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(sealed)
    os.replace(temporary, path)


async def find_sealed(data_dir: Path, directory: "Directory", job_id: str) -> bytes:
    """A sealed job by its id: from the data directory, else from the swarm. Raises ``Unreachable`` if nobody has it."""
    from swarmnet_protocols.training.board import find_job
    from swarmnet_protocols.training.jobs import MAX_JOB_BYTES, open_job

    path = _job_path(data_dir, job_id)
    if path.exists():
        with path.open("rb") as file:
            sealed = file.read(MAX_JOB_BYTES + 1)
        if open_job(sealed).id != job_id:
            raise ConfigError(f"{path} holds another job", hint="remove it")
        return sealed
    _, sealed = await find_job(directory, job_id)
    return sealed


def _job_path(data_dir: Path, job_id: str) -> Path:
    return data_dir / "jobs" / f"{job_id}.job"
