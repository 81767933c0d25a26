"""Reads the model of a node, from this machine, the hub or hosts of the swarm."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from swarmnet_node.config import NodeConfig
from swarmnet_node.loading.loaded_model import LoadedModel
from swarmnet_protocols.errors import ConfigError, Unreachable

if TYPE_CHECKING:
    from swarmnet_protocols.directory.expert_announcements import BlockExperts
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models import LocalModel, Progress

T = TypeVar("T")


@dataclass(frozen=True)
class ModelReader:
    """Reads models from this machine, the hub or hosts of the swarm."""

    executor: Executor
    """The torch thread."""
    peers: "SwarmPeers"

    async def load(
        self,
        config: NodeConfig,
        progress: "Progress | None" = None,
        *,
        published: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> LoadedModel:
        """Return the model of ``config``: runs ``read_model`` on the torch thread."""
        load = partial(read_model, config, progress, self.peers, published=published, notice=notice)
        return await self._read(config, self.executor, load)

    async def open(self, config: NodeConfig) -> "LocalModel":
        """Return the model of ``config`` without loading weights.

        Its name comes from the swarm file, so it is never a path of this machine.
        """
        from swarmnet_protocols.models import resolve

        read = partial(
            resolve,
            config.model,
            cache_dir=config.cache_dir,
            published=True,
            max_disk_bytes=config.max_disk_bytes,
        )
        # not on the torch thread, which computes sessions
        return await self._read(config, None, read)

    async def _read(self, config: NodeConfig, executor: Executor | None, read: Callable[[], T]) -> T:
        """Return the result of ``read``.

        If neither this machine nor the hub has the model, hosts of the swarm provide its outline.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(executor, read)
        except (ConfigError, Unreachable):
            if not await self._fetch_outline(config):
                raise
            return await loop.run_in_executor(executor, read)

    async def _fetch_outline(self, config: NodeConfig) -> bool:
        """Fetch the outline of the model from hosts of the swarm.

        Return False without a connection, or if neither the swarm file nor hosts name the model.
        Raises ``Unreachable`` if no host has it.
        """
        from swarmnet_protocols.models.outline import fetch_outline
        from swarmnet_protocols.models.public_names import is_path

        manifest = config.network.rules.names.get(config.model)
        if manifest is None and is_path(config.model):
            return False
        wait = self.peers.wait  # it returns when the node is connected
        if not await asyncio.get_running_loop().run_in_executor(None, wait):
            return False
        manifest = manifest or await self.peers.announced(config.model)
        if manifest is None:
            return False
        await fetch_outline(self.peers, config.model, manifest, config.cache_dir)
        return True


def read_model(
    config: NodeConfig,
    progress: "Progress | None",
    peers: "SwarmPeers",
    *,
    published: bool = False,
    notice: Callable[[str], None] = lambda text: None,
) -> LoadedModel:
    """Return the model of ``config``.

    ``published``: its name comes from the swarm file, and is not a path of this machine.
    ``notice`` hears, before any weight is loaded, which formats are expanded and how much
    memory that takes.
    """
    from swarmnet_protocols.machine import lean_imports

    lean_imports.use()
    from swarmnet_node.engine.kernels.native_backend import load_backend
    from swarmnet_node.loading.fitting import fit
    from swarmnet_protocols.machine.devices import limit_memory, pick_devices, pick_dtype
    from swarmnet_protocols.models import resolve
    from swarmnet_protocols.quantization.formats import PRECISIONS

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
    loaded = LoadedModel(
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
    loaded = fit(loaded, config)
    if loaded.blocks is None and loaded.num_blocks == total:
        loaded = replace(loaded, blocks=(0, total))
    if loaded.blocks is not None and not config.limits.are_conditional:
        if progress is not None:
            progress("loading blocks", 0, None)
        loaded.preloaded.append(loaded.load(*loaded.blocks))
    return loaded


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
    from swarmnet_protocols.quantization.formats import UNQUANTIZED

    if model.precision.upper() not in {format.name for format in UNQUANTIZED}:
        raise ConfigError(
            f"the weights of {model.name} are quantised already: {model.precision}",
            hint="leave out --dtype",
        )
