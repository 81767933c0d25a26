"""The blocks or experts that a node hosts of the model it has read, for its supervisor."""

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

import psutil

from swarmnet_node.config import NodeConfig
from swarmnet_node.engine.stage_loading import precision_of
from swarmnet_node.experts.expert_choice import MAX_ROUND_TRIP_S
from swarmnet_node.experts.trunk import ExpertOptions
from swarmnet_node.hosted_blocks import Hosting, Placed
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.loading.loaded_model import LoadedModel
from swarmnet_node.resting import Resting
from swarmnet_node.running_node import Hosted
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.devices import torch_dtype

if TYPE_CHECKING:
    from swarmnet_node.expert_node import ExpertHosting

FREE_MEMORY_SHARE = 0.5
"""Largest share of the free memory for experts, unless the owner limits the memory. More would make
the machine swap when other programs start."""


def hosting_of(
    loaded: LoadedModel, config: NodeConfig, notice: Callable[[str], None]
) -> "Hosting | ExpertHosting":
    """Return the blocks, or only the experts, that the node hosts.

    Raises ``OutOfResources`` if the experts do not fit into the memory.
    """
    blocks = loaded.model.manifest.blocks
    hosted = Hosted(
        model=loaded.model.name,
        manifest=loaded.model.manifest.hash,
        total_blocks=blocks,
        context=loaded.model.max_positions,
        size_bytes=loaded.model.sizes(*range(blocks)).stored_bytes,
        swarm_name=config.swarm_name,
        public_name=config.public_name,
        version=version("swarmnet-p2p"),
        library=loaded.model.shared(),
    )
    if not loaded.has_blocks:
        return _expert_hosting(loaded, config, hosted)
    most_blocks = config.num_blocks or loaded.model.manifest.blocks
    return Hosting(
        **vars(hosted),
        load=loaded.load,
        load_on_cpu=loaded.on_cpu().load,
        placed=None
        if loaded.blocks is None
        else Placed(loaded.blocks, "named by the owner" if config.blocks else "all of its blocks fit"),
        num_blocks=loaded.num_blocks,
        may_move=config.blocks is None and not config.stay and loaded.experts is None,
        most_blocks=loaded.num_blocks if config.max_block_bytes is not None else most_blocks,
        max_cache_bytes=config.max_cache_bytes,
        limits=ClientLimits.within(
            config.network.rules.quotas, config.client_share, max_wait_s=config.max_wait_s
        ),
        experts=None
        if loaded.experts is None
        else ExpertOptions(
            loaded.load_experts,
            config.max_expert_round_trip_s or MAX_ROUND_TRIP_S,
            notice,
            cache=loaded.cache,
        ),
    )


def resting_hosting(resting: Resting, config: NodeConfig) -> Hosting:
    """Return the description of a paused node whose model is not read yet."""

    def load(start: int, end: int) -> NoReturn:
        raise RuntimeError("the model of this node is not read yet")

    return Hosting(
        model=resting.model,
        manifest=bytes.fromhex(resting.manifest),
        total_blocks=resting.total_blocks,
        swarm_name=config.swarm_name,
        public_name=config.public_name,
        version=version("swarmnet-p2p"),
        load=load,
        placed=Placed((resting.start, resting.end), resting.reason) if resting.end else None,
        num_blocks=config.num_blocks or resting.total_blocks,
        may_move=resting.may_move,
        max_cache_bytes=config.max_cache_bytes,
    )


def memory_notices(loaded: LoadedModel, config: NodeConfig) -> Iterator[str]:
    """Yield notices for the owner: the layout of experts, and the share that memory holds."""
    if loaded.layout is not None:
        yield loaded.layout.describe(loaded.model.manifest.blocks)
    elif loaded.num_blocks < (config.num_blocks or 0):
        yield f"--max-ram holds {loaded.num_blocks} of {config.num_blocks} blocks"
    if loaded.cache is not None and config.expert_memory_bytes is None:
        total = sum(map(len, loaded.cache.own.values()))
        yield f"--max-ram holds {loaded.cache.capacity} of {total} experts: it reads the others from disk when a token needs them"


def _expert_hosting(loaded: LoadedModel, config: NodeConfig, hosted: Hosted) -> "ExpertHosting":
    """Return how a node hosts experts only."""
    from swarmnet_node.expert_node import ExpertHosting
    from swarmnet_protocols.quantization.packed_experts import expert_bytes

    counts = loaded.model.expert_counts()
    one_bytes = expert_bytes(loaded.load_experts(min(counts), [0]))
    limit_bytes = config.limits.max_ram_bytes or int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)
    room = max(
        0, limit_bytes - psutil.Process().memory_info().rss * (config.limits.max_ram_bytes is not None)
    )
    wanted = sum(map(len, loaded.experts.values())) if loaded.experts else 1
    if room < wanted * one_bytes:
        raise OutOfResources(
            f"{wanted} experts of {one_bytes >> 20} MiB do not fit into {room >> 20} MiB",
            hint="host fewer experts, or allow more memory: --max-ram",
        )
    return ExpertHosting(
        **vars(hosted),
        hidden_size=loaded.model.manifest.hidden_size,
        dtype=torch_dtype(loaded.dtype),
        precision=precision_of(loaded.model, loaded.quantized, loaded.dtype),
        load=loaded.load_experts,
        experts=loaded.experts or None,
        counts=counts,
        capacity=0 if loaded.experts else min(room // one_bytes, sum(counts.values())),
    )
