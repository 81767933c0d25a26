"""Starts a real node.

1. Connect to the swarm and read the model at the same time. After a restart for a pause, the model
   is read when the pause ends.
2. Run the supervisor.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swarmnet_node.config import NodeConfig
from swarmnet_node.loading.other_models import other_models
from swarmnet_node.loading.reading import ModelReader
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.errors import NetworkStopped, NotAuthorised
from swarmnet_protocols.joining.network import connect
from swarmnet_protocols.machine.aio import in_background, persist

if TYPE_CHECKING:
    import torch

    from swarmnet_node.expert_node import ExpertHosting
    from swarmnet_node.hosted_blocks import Hosting
    from swarmnet_node.loading.loaded_model import LoadedModel
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.models import Progress
    from swarmnet_protocols.net import Transport


@asynccontextmanager
async def start(
    config: NodeConfig,
    *,
    progress: "Progress | None" = None,
    notice: Callable[[str], None] = lambda text: None,
) -> AsyncIterator["Supervisor"]:
    """Yield a node that serves while the context is open, whenever its limits allow it.

    On entry the model has been read; ``started`` waits until the node serves. ``notice`` hears
    sentences for the owner: formats of weights that take more memory than the file, the blocks on
    an accelerator, the number of experts in memory, and experts that the node waits for.

    Raises:

    - ``ConfigError`` for an unusable model, span, device or address.
    - ``IntegrityError`` for a damaged model.
    - ``Unreachable`` when bootstraps are named and none answers.
    - ``OutOfResources`` for blocks that do not fit into the limits.
    """
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torch"))
        link = config.network.peer.link
        config.limits.limit_link(link)
        pauses: list[Callable[[str], AbstractAsyncContextManager[None]]] = []

        @asynccontextmanager
        async def step_aside() -> AsyncIterator[None]:
            async with AsyncExitStack() as paused:
                for pause in pauses:
                    await paused.enter_async_context(pause("p2pd is restarted"))
                yield

        from swarmnet_protocols.directory.catalog import announced_model
        from swarmnet_protocols.directory.host_announcements import read_hosts
        from swarmnet_protocols.fetching.peers import SwarmPeers
        from swarmnet_protocols.timing import Timing

        # Reading the model and connecting to the swarm take a second each, so run both at once.
        peers = SwarmPeers(config.network.rules.pieces_hashes, Timing(), config.network.rules.models)
        reader = ModelReader(executor, peers)
        loading: asyncio.Task[LoadedModel] | None = None
        if config.resting is None:
            loading = asyncio.create_task(reader.load(config, progress, notice=notice), name="read the model")
        try:
            peer = replace(config.network.peer, step_aside=step_aside)
            transport, directory = await stack.enter_async_context(
                connect(replace(config.network, peer=peer))
            )
            peers.attach(transport, partial(read_hosts, directory), partial(announced_model, directory))
            stack.callback(peers.detach)
        except BaseException:
            peers.detach()
            raise
        finally:
            if loading is not None:
                await loading
        from swarmnet_node.hosted_blocks import Hosting
        from swarmnet_node.loading.hosted import hosting_of, memory_notices, resting_hosting
        from swarmnet_node.owner.given import GivenKeeper
        from swarmnet_node.owner.machine import OwnersMachine
        from swarmnet_node.running_node import Dependencies
        from swarmnet_node.supervisor import Supervisor
        from swarmnet_protocols.directory.duplicate_identity import DuplicateWatch
        from swarmnet_protocols.machine.clock import wall_clock
        from swarmnet_protocols.machine.devices import limit_memory
        from swarmnet_protocols.machine.threads import compute_on, use_cores

        every_core = await compute_on(executor, threads=config.limits.cores)
        watch = await stack.enter_async_context(
            DuplicateWatch(transport, directory, random.SystemRandom(), Timing()).running()
        )
        keeper = GivenKeeper(config.folder, link)
        stack.callback(keeper.close)
        dependencies = Dependencies(
            transport,
            directory,
            executor,
            random.Random(),
            warning=lambda: watch.warning() or directory.warning(),
            given=keeper.given,
        )

        devices: list[torch.device] = []

        def limit_computing(limits: OwnerLimits) -> None:
            use_cores(executor, limits.cores or every_core)
            for device in devices:
                limit_memory(device, limits.max_gpu_mem)

        async def read() -> "Hosting | ExpertHosting":
            loaded = await (loading or reader.load(config, notice=notice))
            for text in memory_notices(loaded, config):
                notice(text)
            devices.extend(loaded.devices)
            hosting = hosting_of(loaded, config, notice)
            if isinstance(hosting, Hosting):
                hosting = replace(hosting, others=other_models(config, reader, notice, loaded))
            return hosting

        machine = OwnersMachine(config.folder, link, wall_clock, limit_computing)
        stack.callback(machine.close)
        hosting = await read() if config.resting is None else resting_hosting(config.resting, config)
        node = await stack.enter_async_context(
            Supervisor(
                dependencies, hosting, machine, config.limits, read if config.resting is not None else None
            ).running()
        )
        pauses.append(node.step_aside)
        keeper.is_active = lambda: node.is_online
        counting = persist("the totals", partial(keeper.run, notice))
        await stack.enter_async_context(in_background(counting, _fail_with_transport(transport, node)))
        yield node


async def _fail_with_transport(transport: "Transport", node: "Supervisor") -> None:
    try:
        await transport.died()
    except NotAuthorised as error:
        node.fail(error)
        return
    node.fail(NetworkStopped(hint="start the node again: swarmnet join"))
