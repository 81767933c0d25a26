"""The numbers of blocks and experts of a model that fit into the memory a node may use.

1. Experts beyond ``--expert-memory`` stay on disk.
2. After a switch of models, blocks take no more bytes than the former model's blocks.
3. On accelerators they fit into the free memory of the cards.
4. On a CPU, blocks or experts fit into the owner's memory limit.
"""

from dataclasses import replace
from functools import partial

import psutil

from swarmnet_node.config import NodeConfig
from swarmnet_node.engine.device_memory import BlockNeeds, fit_on_cards
from swarmnet_node.engine.memory_account import Footprint
from swarmnet_node.experts.trunk import CacheOptions
from swarmnet_node.loading.loaded_model import LoadedModel
from swarmnet_node.owner.machine import release_memory
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.machine.devices import cards_of

EXPERTS_MEMORY_SHARE = 0.75
"""Share for routed experts of the memory that blocks and a first client leave of ``--max-ram``. The
rest is for further clients, and for gaps between experts that come and go."""


def fit(loaded: LoadedModel, config: NodeConfig) -> LoadedModel:
    """Return this model with as many blocks and experts as fit.

    Raises ``OutOfResources`` if the requested ones do not.
    """
    if config.expert_memory_bytes is not None:
        loaded = _with_cache(loaded, config.expert_memory_bytes)
    if config.max_block_bytes is not None:
        loaded = _within_bytes(loaded, config.max_block_bytes)
    loaded = _fitted_on_cards(loaded, config)
    if config.limits.max_ram_bytes is None:
        return loaded
    return _within(
        loaded,
        config.limits.max_ram_bytes - (config.expert_memory_bytes or 0),
        is_free=not config.num_blocks,
        may_cache=config.expert_memory_bytes is None,
    )


def _with_cache(loaded: LoadedModel, memory_bytes: int) -> LoadedModel:
    """Return this model with its experts on disk until they are needed.

    These are the experts that the options name, or all. Raises ``ConfigError`` for blocks
    without routed experts, and ``OutOfResources`` if the memory does not hold ``MIN_CAPACITY``
    of them.
    """
    routed = _first_routed(loaded)
    if routed is None:
        where = "" if loaded.blocks is None else f"blocks {loaded.blocks[0]}:{loaded.blocks[1]} of "
        raise ConfigError(
            f"no routed experts in {where}{loaded.model.name}", hint="leave out --expert-memory"
        )
    from swarmnet_node.experts.expert_cache import MIN_CAPACITY
    from swarmnet_protocols.quantization.packed_experts import expert_bytes

    counts, own = loaded.model.expert_counts(), loaded.experts
    if own is None:
        own = {block: frozenset(range(count)) for block, count in counts.items()}
    one_bytes = expert_bytes(loaded.load_experts(routed, [0]))
    capacity = min(memory_bytes // one_bytes, sum(map(len, own.values())))
    if capacity < MIN_CAPACITY:
        raise OutOfResources(
            f"an expert of {loaded.model.name} has {one_bytes / 2**20:.1f} MiB, and {memory_bytes / 2**20:.1f} MiB are left for experts",
            hint="allow more memory: --expert-memory, --max-ram",
        )
    reader = partial(loaded.model.expert_reader, device=loaded.devices[0], quantized=loaded.quantized)
    cache = CacheOptions(own, reader, capacity, capacity * one_bytes)
    return replace(loaded, experts={block: frozenset() for block in counts}, cache=cache)


def _within_bytes(loaded: LoadedModel, max_block_bytes: int) -> LoadedModel:
    """Return this model with as many blocks as these bytes hold. Raises ``OutOfResources`` for
    none."""
    block_bytes, _ = _block_bytes(loaded)
    if block_bytes > max_block_bytes:
        raise OutOfResources(
            f"a block of {loaded.model.name} has {block_bytes >> 20} MiB, the blocks of this node's own model have {max_block_bytes >> 20} MiB",
            hint="say how much memory the node may use: --max-ram",
        )
    return replace(loaded, num_blocks=min(loaded.num_blocks, max_block_bytes // block_bytes))


def _fitted_on_cards(loaded: LoadedModel, config: NodeConfig) -> LoadedModel:
    """Return this model with blocks that fit the free memory of accelerators.

    Raises ``OutOfResources`` if the requested blocks do not fit.
    """
    cards = cards_of(loaded.devices)
    if not cards:
        return loaded
    wanted = loaded.num_blocks if loaded.blocks is None else loaded.blocks[1] - loaded.blocks[0]
    layout = fit_on_cards(
        cards,
        block_needs(loaded),
        wanted=wanted,
        is_fixed=config.num_blocks is not None or loaded.blocks is not None,
        cache_bytes=config.max_cache_bytes,
        most=config.limits.max_gpu_mem,
        # Weights quantised at load are packed; expanded, they would be the original ones.
        forms=(True,) if loaded.quantized is not None else (False, True) if loaded.is_packed else (False,),
    )
    return replace(loaded, layout=layout, num_blocks=layout.total, is_packed=layout.packed)


def _within(loaded: LoadedModel, max_ram_bytes: int, *, is_free: bool, may_cache: bool) -> LoadedModel:
    """Return this model with blocks that fit into a memory limit.

    - ``is_free``: host fewer blocks if not all fit.
    - ``may_cache``: otherwise keep as many routed experts in memory as fit, and the others on
      disk.
    - Blocks without experts that the node chooses itself may also become fewer: it may have
      dropped some before.
    - On an accelerator, blocks take no memory of the machine. Only the rest of the node must
      fit.

    Raises ``OutOfResources`` if the blocks do not fit.
    """
    footprint, bare = footprints(loaded)
    if loaded.blocks is not None:
        num_blocks = loaded.blocks[1] - loaded.blocks[0] if footprint.block_bytes else 0
    else:
        fitting = footprint.blocks_within(max_ram_bytes) if footprint.block_bytes else loaded.num_blocks
        num_blocks = min(loaded.num_blocks, max(fitting, 1)) if is_free else loaded.num_blocks
    fitted = loaded if loaded.blocks is not None else replace(loaded, num_blocks=num_blocks)
    try:
        footprint.check(max_ram_bytes, num_blocks)
    except OutOfResources:
        if not may_cache or footprint.block_bytes == 0 or not loaded.model.expert_counts():
            fitting = footprint.blocks_within(max_ram_bytes) if footprint.block_bytes else 0
            if loaded.blocks is None and fitting > 0:
                return replace(loaded, num_blocks=fitting)
            raise
        bare.check(max_ram_bytes, num_blocks)
        left_bytes = max_ram_bytes - bare.min_ram_bytes(num_blocks)
        return _with_cache(fitted, int(left_bytes * EXPERTS_MEMORY_SHARE))
    return fitted


def footprints(loaded: LoadedModel) -> tuple[Footprint, Footprint]:
    """Return the memory needs of the blocks of ``loaded``: with the experts in memory, and without
    routed experts."""
    whole_bytes, bare_bytes = _block_bytes(loaded) if loaded.devices[0].type == "cpu" else (0, 0)
    release_memory()
    whole = Footprint(
        psutil.Process().memory_info().rss,
        whole_bytes,
        loaded.model.widths,
        loaded.dtype.itemsize,
    )
    return whole, replace(whole, block_bytes=bare_bytes)


def _block_bytes(loaded: LoadedModel) -> tuple[int, int]:
    """Return the bytes of one block: with the experts in memory, and without routed experts.

    Measures the first block that has routed experts, and loads one of them. Without routed
    experts, it measures the largest block.
    """
    routed = _first_routed(loaded)
    if routed is None:
        largest = loaded.model.largest_block(*(loaded.blocks or (0, loaded.model.manifest.blocks)))
        dense_bytes = loaded.load(largest, largest + 1).weight_bytes
        return dense_bytes, dense_bytes
    from swarmnet_protocols.models.partial_model import build_span
    from swarmnet_protocols.quantization.packed_experts import expert_bytes

    counts = loaded.model.expert_counts()
    bare = replace(loaded, experts={block: frozenset() for block in counts})
    bare_bytes = bare.load(routed, routed + 1).weight_bytes
    if loaded.experts is None and not loaded.is_packed:
        return build_span(loaded.model.config, routed, routed + 1).weight_bytes(loaded.dtype), bare_bytes
    held = counts[routed] if loaded.experts is None else len(loaded.experts.get(routed, ()))
    return bare_bytes + held * expert_bytes(loaded.load_experts(routed, [0])), bare_bytes


def block_needs(loaded: LoadedModel) -> BlockNeeds:
    """Return the memory needs of a block: the largest of the first, the last and a middle one.

    If weights may stay packed, the largest block counts, and is read.
    """
    import torch

    from swarmnet_protocols.models.partial_model import build_span, weight_bytes

    config = loaded.model.config
    start, end = loaded.blocks or (0, loaded.model.manifest.blocks)
    some = {start, (start + end) // 2, end - 1}
    expanded = max(build_span(config, at, at + 1).weight_bytes(loaded.dtype) for at in some)
    packed = expanded
    if loaded.is_packed:
        largest = loaded.model.largest_block(start, end)
        packed = weight_bytes(
            loaded.model.load_span(
                largest,
                largest + 1,
                dtype=loaded.dtype,
                device=torch.device("meta"),
                packed=True,
                quantized=loaded.quantized,
            )
        )
    return BlockNeeds(packed, expanded, loaded.model.widths, loaded.dtype.itemsize)


def _first_routed(loaded: LoadedModel) -> int | None:
    """Return the first hosted block with routed experts. Searches all blocks if none are chosen
    yet."""
    first, end = loaded.blocks or (0, loaded.model.manifest.blocks)
    return min(loaded.model.expert_counts().keys() & range(first, end), default=None)
