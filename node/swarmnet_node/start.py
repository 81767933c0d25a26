"""Starting a real node: identity, libp2p, the DHT and the model, brought up side by side."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.aio import cancel
from swarmnet_protocols.errors import ConfigError, NotAuthorised, SwarmnetError
from swarmnet_protocols.network import Network, connect

if TYPE_CHECKING:
    import torch

    from swarmnet_node.host import HostLimits
    from swarmnet_node.native.decode import Native
    from swarmnet_node.node import Hosting, Node
    from swarmnet_node.stage import Stage
    from swarmnet_protocols.membership.quotas import Quotas
    from swarmnet_protocols.models import LocalModel, Progress
    from swarmnet_protocols.transport import Transport


@dataclass(frozen=True)
class NodeConfig:
    """What a person says of a node. ``blocks`` [start, end), or ``num_blocks`` to be placed; neither: the whole model."""

    model: str
    network: Network
    swarm_name: str
    cache_dir: Path
    blocks: tuple[int, int] | None = None
    num_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    max_cache_bytes: int = 1 << 30
    public_name: str = ""


@asynccontextmanager
async def start(config: NodeConfig, *, progress: "Progress | None" = None) -> AsyncIterator["Node"]:
    """A node that serves while the context is open.

    Raises ``ConfigError`` for a model, span, device or address that will not do, ``IntegrityError`` for a damaged model,
    ``Unreachable`` when bootstraps are named and none answers.
    """
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="torch"))
        # Reading the model and dialling the swarm both take a second: neither waits for the other.
        loading = loop.run_in_executor(executor, _Loaded.of, config, progress)
        try:
            transport, directory = await stack.enter_async_context(connect(config.network))
        finally:
            loaded = await loading
        from swarmnet_node.node import Node, World
        from swarmnet_node.turns import Turns, default_folder
        from swarmnet_protocols.threads import compute_on

        await compute_on(executor, threads=config.threads)
        world = World(transport, directory, executor, random.Random())
        if loaded.device.type == "cpu":
            turns = stack.enter_context(Turns.open(default_folder()))
            world = replace(world, turn=turns.turn)
        node = await stack.enter_async_context(Node.run(world, loaded.hosting(config)))
        watching = asyncio.create_task(_fail_with_p2pd(transport, node), name="p2pd")
        stack.push_async_callback(cancel, watching)
        yield node


async def _fail_with_p2pd(transport: "Transport", node: "Node") -> None:
    try:
        await transport.died()
    except NotAuthorised as error:
        node.fail(error)
        return
    node.fail(
        SwarmnetError("p2pd died: nobody can reach this node", hint="start the node again: swarmnet join")
    )


@dataclass(frozen=True)
class _Loaded:
    """The model, and the stage already if the blocks were named."""

    model: "LocalModel"
    dtype: "torch.dtype"
    device: "torch.device"
    native: "Native | None"
    stage: "Stage | None"

    @classmethod
    def of(cls, config: NodeConfig, progress: "Progress | None") -> "_Loaded":
        from swarmnet_node.footprint import import_transformers

        import_transformers()
        from swarmnet_node.native.decode import Native
        from swarmnet_node.stage import Stage
        from swarmnet_protocols.devices import pick_device, pick_dtype
        from swarmnet_protocols.models import resolve

        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        model = resolve(config.model, cache_dir=config.cache_dir, progress=progress)
        config.network.rules.check_model(model.name, model.manifest.hash)
        total = model.manifest.blocks
        if config.num_blocks is not None and not 0 < config.num_blocks <= total:
            raise ConfigError(
                f"{model.name} has {total} blocks, not {config.num_blocks}",
                hint=f"use --num-blocks 1 to {total}",
            )
        blocks = config.blocks or ((0, total) if config.num_blocks is None else None)
        if progress is not None:
            progress("loading blocks", 0, None)
        native = Native.load(config.cache_dir)
        stage = Stage.load(model, *blocks, dtype=dtype, device=device, native=native) if blocks else None
        return cls(model, dtype, device, native, stage)

    def hosting(self, config: NodeConfig) -> "Hosting":
        from importlib.metadata import version

        from swarmnet_node.node import Hosting

        total = self.model.manifest.blocks
        return Hosting(
            model=self.model.name,
            manifest=self.model.manifest.hash,
            total_blocks=total,
            load=self._load,
            blocks=config.blocks or ((0, total) if config.num_blocks is None else None),
            num_blocks=config.num_blocks or 0,
            max_cache_bytes=config.max_cache_bytes,
            swarm_name=config.swarm_name,
            public_name=config.public_name,
            version=version("swarmnet-p2p"),
            limits=_limits(config.network.rules.quotas),
        )

    def _load(self, start: int, end: int) -> "Stage":
        from swarmnet_node.stage import Stage

        return self.stage or Stage.load(
            self.model, start, end, dtype=self.dtype, device=self.device, native=self.native
        )


def _limits(quotas: "Quotas") -> "HostLimits":
    """What strangers may take of this host, less what the swarm allows each of them."""
    from swarmnet_node.host import HostLimits

    limits = HostLimits()
    return replace(
        limits,
        sessions_per_client=min(limits.sessions, quotas.sessions or limits.sessions_per_client),
        passes_per_client=min(limits.passes, quotas.passes or limits.passes_per_client),
    )
