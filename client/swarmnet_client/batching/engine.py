"""A model for many callers in one event loop: tokenizer, lm_head and the batcher over its chains."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from swarmnet_client.batching.continuous_batching import Batcher, Limits
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.model.local_layers import LmHead, LoadOptions, LocalLayers
from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.machine.threads import compute_on
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.routing.chain_search import uncovered


@dataclass(frozen=True)
class BatchingEngine:
    """One model. ``end_ids`` end an answer; a prompt and its answer have at most ``max_length`` positions together."""

    local: LocalModel
    tokenizer: Any
    batcher: Batcher
    swarm: Swarm
    max_length: int
    end_ids: frozenset[int]

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Ranges of blocks without a known host."""
        online = [host for host in self.swarm.hosts if host.online]
        return uncovered(online, (0, self.local.manifest.blocks))


@asynccontextmanager
async def open_engine(
    local: LocalModel, swarm: Swarm, options: LoadOptions, limits: Limits
) -> AsyncIterator[BatchingEngine]:
    """The CausalLM of ``local`` over ``swarm``, while the context is open."""
    computing = ThreadPoolExecutor(1, thread_name_prefix="head")
    try:
        await compute_on(computing, threads=None)
        loop = asyncio.get_running_loop()
        local_layers = await loop.run_in_executor(computing, LocalLayers, local, options)
        spec = ChainSpec(
            local.manifest.blocks, local.manifest.hidden_size, local.max_positions, options.dtype
        )
        tokenizer = local.tokenizer()
        await swarm.refresh()
        async with Batcher.run(
            LmHead(local_layers, computing), lambda: Chain.open(swarm, spec, local_layers.embed), limits
        ) as batcher:
            ends = _end_ids(local_layers.generation_config, tokenizer)
            yield BatchingEngine(local, tokenizer, batcher, swarm, local.max_positions, ends)
    finally:
        computing.shutdown(wait=False)


def _end_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: as the checkpoint says, or else its tokenizer."""
    named = generation_config.eos_token_id
    if named is None:
        named = tokenizer.eos_token_id
    return frozenset([] if named is None else named if isinstance(named, list) else [named])
