"""A model on a swarm, opened for many callers in one loop: its tokenizer, its head, its chains."""

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swarmnet_client.batching import Batcher, Limits
from swarmnet_client.chain import Chain
from swarmnet_client.edges import Edges, Head
from swarmnet_client.hops import ChainSpec
from swarmnet_client.swarm import Swarm
from swarmnet_protocols.devices import pick_device, pick_dtype
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.network import Network, connect
from swarmnet_protocols.routing import uncovered
from swarmnet_protocols.threads import compute_on
from swarmnet_protocols.timing import Timing


@dataclass(frozen=True)
class Engine:
    """One model for many callers. ``end_ids`` end an answer; ``max_length`` positions are all that a prompt and its answer have."""

    local: LocalModel
    tokenizer: Any
    batcher: Batcher
    swarm: Swarm
    max_length: int
    end_ids: frozenset[int]

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Blocks that nobody is known to host now."""
        online = [host for host in self.swarm.hosts if host.online]
        return uncovered(online, (0, self.local.manifest.blocks))


@asynccontextmanager
async def open_engine(
    local: LocalModel,
    network: Network,
    *,
    dtype: str = "auto",
    device: str = "auto",
    limits: Limits,
    cache_dir: Path | None = None,
) -> AsyncIterator[Engine]:
    """``local``'s model on the swarm that ``network`` leads to, while the context is open.

    ``cache_dir`` is as in ``load_edges``. Raises ``ConfigError`` for a device or a precision there is not, and what ``connect`` raises.
    """
    network.rules.check_model(local.name, local.manifest.hash)
    async with (
        connect(network, client_mode=True) as (transport, directory),
        Swarm.watch(
            transport, directory, local.manifest.hash, rng=random.SystemRandom(), timing=Timing()
        ) as swarm,
        engine_of(local, swarm, dtype=dtype, device=device, limits=limits, cache_dir=cache_dir) as engine,
    ):
        yield engine


@asynccontextmanager
async def engine_of(
    local: LocalModel,
    swarm: Swarm,
    *,
    dtype: str = "auto",
    device: str = "auto",
    limits: Limits,
    cache_dir: Path | None = None,
) -> AsyncIterator[Engine]:
    """The same for somebody who is connected already."""
    place = pick_device(device)
    precision = pick_dtype(dtype, place)
    computing = ThreadPoolExecutor(1, thread_name_prefix="head")
    try:
        await compute_on(computing, threads=None)
        loop = asyncio.get_running_loop()
        make = partial(Edges, local, dtype=precision, device=place, cache_dir=cache_dir)
        edges = await loop.run_in_executor(computing, make)
        spec = ChainSpec(local.manifest.blocks, local.manifest.hidden_size, local.max_positions, precision)
        tokenizer = local.tokenizer()
        await swarm.refresh()
        async with Batcher.run(
            Head(edges, computing), lambda: Chain.open(swarm, spec, edges.embed), limits
        ) as batcher:
            ends = _end_ids(edges.generation_config, tokenizer)
            yield Engine(local, tokenizer, batcher, swarm, local.max_positions, ends)
    finally:
        computing.shutdown(wait=False)


def _end_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, as the checkpoint or else its tokenizer has them."""
    named = generation_config.eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    return frozenset([] if named is None else named if isinstance(named, list) else [named])
