"""Reads the model of a node, and decides which blocks and experts the node hosts.

Both fit the memory that the node may use.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_node.owner.limits import ONE_CLIENT, OwnerLimits
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.joining.network import Network

if TYPE_CHECKING:
    import torch

    from swarmnet_node.engine.device_memory import BlockNeeds, DeviceLayout
    from swarmnet_node.engine.kernels.backend import Backend
    from swarmnet_node.engine.memory_account import Footprint
    from swarmnet_node.engine.stage import Stage
    from swarmnet_node.expert_node import ExpertHosting
    from swarmnet_node.experts.trunk import CacheOptions
    from swarmnet_node.hosting.client_limits import ClientLimits
    from swarmnet_node.node import Hosting
    from swarmnet_protocols.directory.expert_announcements import BlockExperts
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.membership.rules import Quotas
    from swarmnet_protocols.models import LocalModel, Progress
    from swarmnet_protocols.quantization.packed_experts import ExpertsModule
    from swarmnet_protocols.quantization.quantize import Precision


FREE_MEMORY_SHARE = 0.5
"""Largest share of the free memory for experts, unless the owner limits the memory. More would make
the machine swap when other programs start."""

EXPERTS_MEMORY_SHARE = 0.75
"""Share for routed experts of the memory that blocks and a first client leave of ``--max-ram``. The
rest is for further clients, and for gaps between experts that come and go."""


@dataclass(frozen=True)
class NodeConfig:
    """The options of a node.

    Names ``blocks`` [start, end), or ``num_blocks`` to be placed. With neither, the node hosts the
    whole model.
    """

    model: str
    network: Network
    swarm_name: str
    cache_dir: Path
    folder: Path
    """Folder of the files with the limits and the usage of this month."""
    max_disk_bytes: int | None = None
    """Most bytes for parts of models on disk. None for no limit."""
    blocks: tuple[int, int] | None = None
    num_blocks: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    """``auto``, a name in ``devices.DTYPES``, or one in ``quantize.PRECISIONS``."""
    max_cache_bytes: int = 1 << 30
    max_block_bytes: int | None = None
    """Most bytes of the weights of all blocks, set by a switch to another model. None for no such
    limit."""
    stay: bool = False
    """Whether the node keeps the blocks that it chose when it joined."""
    keep_model: bool = False
    """Whether the node never switches to another model of the swarm."""
    client_share: float = ONE_CLIENT
    """One client's share of sessions, passes, adapters, logs and KV caches, unless the swarm sets
    it."""
    max_wait_s: float = 20.0
    """Longest expected wait in seconds for a new session. Beyond it, the node refuses."""
    experts: str | None = None
    """Routed experts that the node hosts: text for ``parse_experts``, ``auto`` or ``none``. Without
    ``blocks`` and ``num_blocks`` the node hosts only experts. With them, peers compute the missing
    experts of its blocks. None for all experts of its blocks."""
    expert_memory_bytes: int | None = None
    """Bytes of memory for the routed experts of its blocks. The others stay on disk until they are
    needed. None: all experts, or as many as the memory limit holds."""
    max_expert_round_trip_s: float | None = None
    """Longest round trip in seconds to peers that compute experts. None: ``MAX_ROUND_TRIP_S``."""
    public_name: str = ""
    limits: OwnerLimits = field(default_factory=OwnerLimits)

    @property
    def may_switch(self) -> bool:
        """Whether the owner lets the node switch to another model of the swarm."""
        names_parts = self.blocks is not None or self.experts is not None
        return not (self.keep_model or self.stay or names_parts or self.expert_memory_bytes is not None)


@dataclass(frozen=True)
class LoadedModel:
    """The model, and the blocks to host: named in the options, or as many as fit into the
    limits."""

    model: "LocalModel"
    dtype: "torch.dtype"
    devices: "tuple[torch.device, ...]"
    """One device, or several GPUs that share the blocks."""
    backend: "Backend"
    blocks: tuple[int, int] | None
    num_blocks: int
    layout: "DeviceLayout | None"
    """How blocks were fitted to the memory of accelerators. None on a CPU."""
    is_packed: bool
    """Whether quantised weights stay as the checkpoint stores them."""
    quantized: "Precision | None"
    """The precision that weights of 16 and 32 bits are rounded to. None keeps them."""
    preloaded: "list[Stage]"
    """The stage, if it was loaded while the node connected. Used once: a pause loads blocks
    again."""
    experts: "BlockExperts | None"
    """The routed experts that the options name. Empty if still to be chosen. None for all of its
    blocks."""
    has_blocks: bool
    """Whether the node hosts blocks, not only experts."""
    cache: "CacheOptions | None" = None
    """The experts of its blocks that stay on disk until needed. None if all are in memory."""

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        progress: "Progress | None",
        peers: "SwarmPeers",
        *,
        published: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> "LoadedModel":
        """Return the model of ``config``.

        ``published``: its name comes from the swarm file, and is not a path of this machine.
        ``notice`` hears, before any weight is loaded, which formats are expanded and how much
        memory that takes.
        """
        from swarmnet_protocols.machine.lean_imports import import_transformers

        import_transformers()
        from swarmnet_node.engine.kernels.native_backend import load_backend
        from swarmnet_protocols.machine.devices import limit_memory, pick_devices, pick_dtype
        from swarmnet_protocols.models import resolve
        from swarmnet_protocols.quantization.quantize import PRECISIONS

        devices = pick_devices(config.device)
        quantized = PRECISIONS.get(config.dtype)
        dtype = pick_dtype("auto" if quantized is not None else config.dtype, devices[0])
        for device in devices:
            limit_memory(device, config.limits.max_gpu_mem)
        model = resolve(
            config.model,
            cache_dir=config.cache_dir,
            progress=progress,
            published=published,
            max_disk_bytes=config.max_disk_bytes,
        )
        model.parts.peers = peers
        config.network.rules.check_model(model.name, model.manifest.hash)
        if quantized is not None:
            check_quantizable(model)
        total = model.manifest.blocks
        has_blocks = config.experts is None or config.blocks is not None or config.num_blocks is not None
        experts = None
        if config.experts is not None:
            counts = model.expert_counts()
            experts = chosen_experts(config.experts, counts, model.name, has_blocks=has_blocks)
        if config.num_blocks is not None and not 0 < config.num_blocks <= total:
            raise ConfigError(
                f"{model.name} has {total} blocks, not {config.num_blocks}",
                hint=f"use --num-blocks 1 to {total}",
            )
        backend = load_backend(config.cache_dir)
        loaded = cls(
            model,
            dtype,
            tuple(devices),
            backend,
            config.blocks,
            config.num_blocks or total,
            layout=None,
            is_packed=quantized is not None or config.dtype == "auto",
            quantized=quantized,
            preloaded=[],
            experts=experts,
            has_blocks=has_blocks,
        )
        hosted = range(*(config.blocks or (0, total)))
        if loaded.is_packed and (
            text := model.sizes(*hosted).notice(f"blocks {hosted.start}:{hosted.stop}", dtype)
        ):
            notice(text)
        if not loaded.has_blocks:
            return loaded
        if config.expert_memory_bytes is not None:
            loaded = loaded._with_cache(config.expert_memory_bytes)
        if config.max_block_bytes is not None:
            loaded = loaded._within_bytes(config.max_block_bytes)
        loaded = loaded._fitted_on_cards(config)
        if config.limits.max_ram_bytes is not None:
            blocks_bytes = config.limits.max_ram_bytes - (config.expert_memory_bytes or 0)
            loaded = loaded._within(
                blocks_bytes, is_free=not config.num_blocks, may_cache=config.expert_memory_bytes is None
            )
        if loaded.blocks is None and loaded.num_blocks == total:
            loaded = replace(loaded, blocks=(0, total))
        if loaded.blocks is not None and not config.limits.are_conditional:
            if progress is not None:
                progress("loading blocks", 0, None)
            loaded.preloaded.append(loaded._load(*loaded.blocks))
        return loaded

    def _within_bytes(self, max_block_bytes: int) -> "LoadedModel":
        """Return this model with as many blocks as these bytes hold. Raises ``OutOfResources`` for
        none."""
        block_bytes, _ = self._block_bytes()
        if block_bytes > max_block_bytes:
            raise OutOfResources(
                f"a block of {self.model.name} has {block_bytes >> 20} MiB, the blocks of this node's own model have {max_block_bytes >> 20} MiB",
                hint="say how much memory the node may use: --max-ram",
            )
        return replace(self, num_blocks=min(self.num_blocks, max_block_bytes // block_bytes))

    def _with_cache(self, memory_bytes: int) -> "LoadedModel":
        """Return this model with its experts on disk until they are needed.

        These are the experts that the options name, or all. Raises ``ConfigError`` for blocks
        without routed experts, and ``OutOfResources`` if the memory does not hold ``MIN_CAPACITY``
        of them.
        """
        from swarmnet_node.experts.expert_cache import MIN_CAPACITY
        from swarmnet_node.experts.trunk import CacheOptions
        from swarmnet_protocols.quantization.packed_experts import expert_bytes

        routed = self._first_routed()
        if routed is None:
            where = "" if self.blocks is None else f"blocks {self.blocks[0]}:{self.blocks[1]} of "
            raise ConfigError(
                f"no routed experts in {where}{self.model.name}", hint="leave out --expert-memory"
            )
        counts, own = self.model.expert_counts(), self.experts
        if own is None:
            own = {block: frozenset(range(count)) for block, count in counts.items()}
        one_bytes = expert_bytes(self._load_experts(routed, [0]))
        capacity = min(memory_bytes // one_bytes, sum(map(len, own.values())))
        if capacity < MIN_CAPACITY:
            raise OutOfResources(
                f"an expert of {self.model.name} has {one_bytes / 2**20:.1f} MiB, and {memory_bytes / 2**20:.1f} MiB are left for experts",
                hint="allow more memory: --expert-memory, --max-ram",
            )
        reader = partial(self.model.expert_reader, device=self.devices[0], quantized=self.quantized)
        cache = CacheOptions(own, reader, capacity, capacity * one_bytes)
        return replace(self, experts={block: frozenset() for block in counts}, cache=cache)

    def _fitted_on_cards(self, config: NodeConfig) -> "LoadedModel":
        """Return this model with blocks that fit the free memory of accelerators.

        Raises ``OutOfResources`` if the requested blocks do not fit.
        """
        from swarmnet_node.engine.device_memory import fit_on_cards
        from swarmnet_protocols.machine.devices import cards_of

        cards = cards_of(self.devices)
        if not cards:
            return self
        wanted = self.num_blocks if self.blocks is None else self.blocks[1] - self.blocks[0]
        layout = fit_on_cards(
            cards,
            self._block_needs(),
            wanted=wanted,
            is_fixed=config.num_blocks is not None or self.blocks is not None,
            cache_bytes=config.max_cache_bytes,
            most=config.limits.max_gpu_mem,
            # Weights quantised at load are packed; expanded, they would be the original ones.
            forms=(True,) if self.quantized is not None else (False, True) if self.is_packed else (False,),
        )
        return replace(self, layout=layout, num_blocks=layout.total, is_packed=layout.packed)

    def _block_needs(self) -> "BlockNeeds":
        """Return the memory needs of a block: the largest of the first, the last and a middle one.

        If weights stay packed, the largest block counts. Only packed weights are read.
        """
        import torch

        from swarmnet_node.engine.device_memory import BlockNeeds
        from swarmnet_protocols.models.partial_model import LayerWidths, build_span, weight_bytes

        config = self.model.config
        start, end = self.blocks or (0, self.model.manifest.blocks)
        some = {start, (start + end) // 2, end - 1}
        expanded = max(build_span(config, at, at + 1).weight_bytes(self.dtype) for at in some)
        packed = expanded
        if self.is_packed:
            largest = self.model.largest_block(start, end)
            packed = weight_bytes(
                self.model.load_span(
                    largest,
                    largest + 1,
                    dtype=self.dtype,
                    device=torch.device("meta"),
                    packed=True,
                    quantized=self.quantized,
                )
            )
        return BlockNeeds(packed, expanded, LayerWidths.of(config), self.dtype.itemsize)

    def _within(self, max_ram_bytes: int, *, is_free: bool, may_cache: bool) -> "LoadedModel":
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
        footprint, bare = self._footprints()
        if self.blocks is not None:
            num_blocks = self.blocks[1] - self.blocks[0] if footprint.block_bytes else 0
        else:
            fitting = footprint.blocks_within(max_ram_bytes) if footprint.block_bytes else self.num_blocks
            num_blocks = min(self.num_blocks, max(fitting, 1)) if is_free else self.num_blocks
        fitted = self if self.blocks is not None else replace(self, num_blocks=num_blocks)
        try:
            footprint.check(max_ram_bytes, num_blocks)
        except OutOfResources:
            if not may_cache or footprint.block_bytes == 0 or not self.model.expert_counts():
                fitting = footprint.blocks_within(max_ram_bytes) if footprint.block_bytes else 0
                if self.blocks is None and fitting > 0:
                    return replace(self, num_blocks=fitting)
                raise
            bare.check(max_ram_bytes, num_blocks)
            left_bytes = max_ram_bytes - bare.min_ram_bytes(num_blocks)
            return fitted._with_cache(int(left_bytes * EXPERTS_MEMORY_SHARE))
        return fitted

    def _footprints(self) -> "tuple[Footprint, Footprint]":
        """Return the memory needs of its blocks: with the experts in memory, and without routed
        experts."""
        import psutil

        from swarmnet_node.engine.memory_account import Footprint
        from swarmnet_node.owner.machine import release_memory
        from swarmnet_protocols.models.partial_model import LayerWidths

        whole_bytes, bare_bytes = self._block_bytes() if self.devices[0].type == "cpu" else (0, 0)
        release_memory()
        whole = Footprint(
            psutil.Process().memory_info().rss,
            whole_bytes,
            LayerWidths.of(self.model.config),
            self.dtype.itemsize,
        )
        return whole, replace(whole, block_bytes=bare_bytes)

    def _block_bytes(self) -> tuple[int, int]:
        """Return the bytes of one block: with the experts in memory, and without routed experts.

        Measures the first block that has routed experts, and loads one of them. Without routed
        experts, it measures the largest block.
        """
        from swarmnet_protocols.models.partial_model import build_span
        from swarmnet_protocols.quantization.packed_experts import expert_bytes

        routed = self._first_routed()
        if routed is None:
            largest = self.model.largest_block(*(self.blocks or (0, self.model.manifest.blocks)))
            dense_bytes = self._load(largest, largest + 1).weight_bytes
            return dense_bytes, dense_bytes
        counts = self.model.expert_counts()
        bare = replace(self, experts={block: frozenset() for block in counts})
        bare_bytes = bare._load(routed, routed + 1).weight_bytes
        if self.experts is None and not self.is_packed:
            return build_span(self.model.config, routed, routed + 1).weight_bytes(self.dtype), bare_bytes
        held = counts[routed] if self.experts is None else len(self.experts.get(routed, ()))
        return bare_bytes + held * expert_bytes(self._load_experts(routed, [0])), bare_bytes

    def _first_routed(self) -> int | None:
        """Return the first hosted block with routed experts. Searches all blocks if none are chosen
        yet."""
        first, end = self.blocks or (0, self.model.manifest.blocks)
        return min(self.model.expert_counts().keys() & range(first, end), default=None)

    def hosting(self, config: NodeConfig, notice: Callable[[str], None]) -> "Hosting | ExpertHosting":
        from importlib.metadata import version

        hosted: dict[str, Any] = {
            "model": self.model.name,
            "manifest": self.model.manifest.hash,
            "total_blocks": self.model.manifest.blocks,
            "swarm_name": config.swarm_name,
            "public_name": config.public_name,
            "version": version("swarmnet-p2p"),
            "library": self.model.shared(),
        }
        if not self.has_blocks:
            return self._expert_hosting(config, hosted)
        from swarmnet_node.experts.expert_links import MAX_ROUND_TRIP_S
        from swarmnet_node.experts.trunk import ExpertOptions
        from swarmnet_node.node import Hosting
        from swarmnet_node.relocating import Placed

        most_blocks = config.num_blocks or self.model.manifest.blocks
        return Hosting(
            **hosted,
            load=self._load,
            placed=None
            if self.blocks is None
            else Placed(self.blocks, "named by the owner" if config.blocks else "all of its blocks fit"),
            num_blocks=self.num_blocks,
            may_move=config.blocks is None and not config.stay and self.experts is None,
            most_blocks=self.num_blocks if config.max_block_bytes is not None else most_blocks,
            max_cache_bytes=config.max_cache_bytes,
            limits=replace(
                _limits(config.network.rules.quotas, config.client_share), max_wait_s=config.max_wait_s
            ),
            experts=None
            if self.experts is None
            else ExpertOptions(
                self._load_experts,
                config.max_expert_round_trip_s or MAX_ROUND_TRIP_S,
                notice,
                cache=self.cache,
            ),
        )

    def _expert_hosting(self, config: NodeConfig, hosted: dict[str, Any]) -> "ExpertHosting":
        """``hosted``: the fields of ``Hosted``. Raises ``OutOfResources`` if the experts do not fit
        into the memory."""
        import psutil

        from swarmnet_node.engine.stage import precision_of
        from swarmnet_node.expert_node import ExpertHosting
        from swarmnet_protocols.quantization.packed_experts import expert_bytes

        counts = self.model.expert_counts()
        one_bytes = expert_bytes(self._load_experts(min(counts), [0]))
        limit_bytes = config.limits.max_ram_bytes or int(
            psutil.virtual_memory().available * FREE_MEMORY_SHARE
        )
        room = max(
            0, limit_bytes - psutil.Process().memory_info().rss * (config.limits.max_ram_bytes is not None)
        )
        wanted = sum(map(len, self.experts.values())) if self.experts else 1
        if room < wanted * one_bytes:
            raise OutOfResources(
                f"{wanted} experts of {one_bytes >> 20} MiB do not fit into {room >> 20} MiB",
                hint="host fewer experts, or allow more memory: --max-ram",
            )
        return ExpertHosting(
            **hosted,
            hidden_size=self.model.manifest.hidden_size,
            dtype=self.dtype,
            precision=precision_of(self.model, self.quantized, self.dtype),
            load=self._load_experts,
            experts=self.experts or None,
            counts=counts,
            capacity=0 if self.experts else min(room // one_bytes, sum(counts.values())),
        )

    def _load_experts(self, block: int, experts: "Collection[int]") -> "ExpertsModule":
        module: Any = self.model.load_experts(
            block, experts, dtype=self.dtype, device=self.devices[0], quantized=self.quantized
        )
        loaded: ExpertsModule = module
        return loaded

    def _load(self, start: int, end: int) -> "Stage":
        import torch

        from swarmnet_node.engine.stage import Stage

        if self.preloaded:
            return self.preloaded.pop()
        try:
            stage = Stage.load(
                self.model,
                start,
                end,
                dtype=self.dtype,
                device=self.devices[0],
                backend=self.backend,
                packed=self.is_packed,
                devices=() if self.layout is None else self.layout.devices(end - start),
                quantized=self.quantized,
                experts=self.experts
                and {block: self.experts[block] for block in range(start, end) if block in self.experts},
            )
            if self.layout is not None:
                stage.preallocate(self.layout.cache_bytes)
        except torch.OutOfMemoryError as error:
            raise OutOfResources(
                f"blocks {start}:{end} do not fit into the memory of {', '.join(map(str, self.devices))}",
                hint="host fewer blocks: --num-blocks, or allow more: --max-gpu-mem",
            ) from error
        return stage


def chosen_experts(text: str, counts: "Mapping[int, int]", model: str, *, has_blocks: bool) -> "BlockExperts":
    """Return the experts that an option names. Empty for ``auto``.

    - ``counts``: number of experts of each block that has any.
    - ``has_blocks``: whether the node hosts blocks too. The result then lists each block that has
      experts, even if the node hosts none of them.

    Raises ``ConfigError`` for a model without routed experts, for experts that it does not have, or
    for a node that would host nothing.
    """
    from swarmnet_protocols.directory.expert_announcements import parse_experts

    if not counts:
        raise ConfigError(f"{model} has no routed experts", hint="leave out --experts")
    if text == "auto" and has_blocks:
        raise ConfigError(
            "a node with blocks cannot choose experts by itself", hint="name them: --experts all:0-7, or none"
        )
    if text == "none" and not has_blocks:
        raise ConfigError(
            "a node without blocks or experts hosts nothing", hint="name some: --experts all:0-7"
        )
    named = {} if text in ("auto", "none") else parse_experts(text, counts)
    return {block: named.get(block, frozenset()) for block in counts} if has_blocks else named


def check_quantizable(model: "LocalModel") -> None:
    """Raise ``ConfigError`` unless the weights of ``model`` can be quantised."""
    from swarmnet_protocols.quantization.quantize import UNQUANTIZED

    if model.precision.upper() not in {format.name for format in UNQUANTIZED}:
        raise ConfigError(
            f"the weights of {model.name} are quantised already: {model.precision}",
            hint="leave out --dtype",
        )


def _limits(quotas: "Quotas", share: float) -> "ClientLimits":
    """Return limits for clients of this host, no larger than the swarm's quotas."""
    from swarmnet_node.hosting.client_limits import ClientLimits

    limits = ClientLimits()
    return replace(
        limits,
        sessions_per_client=min(limits.sessions, quotas.sessions or math.ceil(limits.sessions * share)),
        passes_per_client=min(limits.passes, quotas.passes or math.ceil(limits.passes * share)),
        pending_links_per_client=math.ceil(limits.pending_links * share),
        adapter_bytes_per_client=min(
            limits.adapter_bytes, quotas.adapter_bytes or int(limits.adapter_bytes * share)
        ),
        log_bytes_per_client=int(limits.total_log_bytes * share),
        cache_share_per_client=share,
        cache_bytes_per_client=quotas.cache_bytes,
        positions_per_s=quotas.positions_per_s,
        bytes_per_s=quotas.bytes_per_s,
    )
