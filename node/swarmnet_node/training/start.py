"""Starts a training worker.

1. Connect to the swarm, and get the job.
2. Rest as long as the owner's limits forbid to train. Nothing is loaded meanwhile.
3. Open a worker: ``opening.py``.
4. Train until the job is done, the owner stops the worker, or its limits require a pause. For a
   pause the caller frees the memory (``swarmnet/restart.py``) and begins at 1 again.
"""

import asyncio
import math
import os
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from swarmnet_node.owner.limits import PAUSED_BY_OWNER, OwnerLimits
from swarmnet_node.owner.watched_peer import GuestPeer, Purpose
from swarmnet_node.training.job_store import fetch_job, own_jobs, store_move
from swarmnet_node.training.opening import Opening, OpeningStopped, Threads, WorkerConfig
from swarmnet_protocols.errors import NetworkStopped, NotAuthorised, SwarmnetError
from swarmnet_protocols.joining.network import connect
from swarmnet_protocols.machine.aio import cancel, in_background, persist
from swarmnet_protocols.training.jobs import open_job

if TYPE_CHECKING:
    from swarmnet_node.training.events import EventHandler
    from swarmnet_node.training.worker import Worker
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.wire.control_pb2 import NodeStatus


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
            opening.limit_cores(limits)

        purpose = Purpose(
            "train join", config.swarm_name, config.data_dir, link, add_worker, config.limits, limit_cores
        )
        peer = await stack.enter_async_context(GuestPeer(purpose, transport, directory).running())
        keeper.is_active = lambda: peer.is_working
        rng = random.Random(os.urandom(16))
        opening = Opening(
            config, sealed, peer, transport, directory, threads, keeper.given, reporter, progress, rng
        )
        stack.callback(opening.stop)
        training = Training(opening, peer, transport, directory)
        listing = job_announcer(directory, rng, config.job, own_jobs(config.data_dir, identity.public_key))
        await stack.enter_async_context(
            in_background(
                persist("the catalog", listing.run),
                persist("the totals", partial(keeper.run, notice)),
                _fail_with_transport(training),
            )
        )
        yield training


@dataclass
class Training:
    """The training of a job by this process, until it is done or must pause. Made by ``start``."""

    opening: Opening
    peer: GuestPeer
    """The worker's peer, for the owner's commands."""
    transport: "Transport"
    directory: "Directory"
    _worker: "Worker | None" = None
    """None until the model is loaded."""
    _error: SwarmnetError | None = None
    """The error that ends the training from outside."""
    _has_left: bool = False

    async def run(self) -> bool:
        """Train. Return whether the worker ended for a pause, or to move to another stage.

        While the owner's limits forbid to train, nothing is loaded. Called once. Raises the errors
        of reading the job's data, of building its model and of training.
        """
        config, peer, paused = self.opening.config, self.peer, False
        peer.guard.reserve(config.round_bytes)
        if await peer.may_work(self._tell_pause):
            peer.is_working = True
            keeping = asyncio.create_task(self._keep_terms(), name="the owner's terms")
            try:
                self._worker = await self.opening.open()
                await self._worker.run()
                if self._worker.next_stage is not None:
                    store_move(config.data_dir, config.job, self._worker.next_stage)
            except OpeningStopped:  # while the model was loading
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
        self.opening.stop()
        if self._worker is not None:
            self._worker.fail(error)
        self.peer.finish(0.0)

    def leave(self) -> None:
        """Leave the group at once, as for a pause. ``run`` then returns True."""
        self._has_left, self.peer.is_working = True, False
        self.opening.stop()
        if self._worker is not None:
            self._worker.pause()

    async def _keep_terms(self) -> None:
        """Stop the worker when its owner says so: at the end of its round, or at once for a
        pause."""
        if await self.peer.must_rest():
            self.leave()
        elif self._worker is None:
            self.opening.stop()
        elif self._error is None:
            self._worker.stop()
            self.opening.reporter.handle({"event": "leaving"})

    def _tell_pause(self, reason: str) -> None:
        until = self.peer.guard.machine.paused_until
        ends = until if reason == PAUSED_BY_OWNER and math.isfinite(until) else None
        self.opening.reporter.handle({"event": "paused", "reason": reason, "until": ends})


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
