"""The models in the swarm file that a node may switch to.

Reads their outlines, and says what the node would host of them.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from swarmnet_node.loading import LoadedModel, NodeConfig
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.errors import ConfigError, NotAuthorised, Unreachable
from swarmnet_protocols.membership.rules import Rules

if TYPE_CHECKING:
    from swarmnet_node.node import Hosting
    from swarmnet_protocols.fetching.peers import SwarmPeers
    from swarmnet_protocols.models import LocalModel, Progress
    from swarmnet_protocols.routing.model_needs import ServedModel

T = TypeVar("T")

RAM_SHARE = 0.5
"""Share of ``--max-ram`` to expect for blocks, while their size in memory is unknown. More would
announce blocks that do not fit; less would host too few."""


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
        """Return the model of ``config``: runs ``LoadedModel.of`` on the torch thread."""
        load = partial(LoadedModel.of, config, progress, self.peers, published=published, notice=notice)
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

        Return False without a connection, or if the swarm file does not name the model. Raises
        ``Unreachable`` if no host has it.
        """
        from swarmnet_protocols.models.outline import fetch_outline

        manifest = config.network.rules.names.get(config.model)
        wait = self.peers.wait  # until the node is connected
        if manifest is None or not await asyncio.get_running_loop().run_in_executor(None, wait):
            return False
        await fetch_outline(self.peers, config.model, manifest, config.cache_dir)
        return True


@dataclass(frozen=True)
class ListedModels:
    """The models that a node of ``model`` may switch to: ``HostableModels`` of ``node.py``."""

    config: NodeConfig
    """The options of the owner at the start of the node."""
    reader: ModelReader
    notice: Callable[[str], None]
    model: "LocalModel"
    block_bytes: int | None = None
    """Bytes of weights of the blocks hosted before the first switch. None until the node
    switches."""
    _known: dict[bytes, "ServedModel"] = field(default_factory=dict)

    @property
    def manifests(self) -> Sequence[bytes]:
        own = self.model.manifest.hash
        return [each for each in dict.fromkeys(listed(self.config.network.rules).values()) if each != own]

    def own(self) -> "ServedModel":
        return _described(self.model)

    async def read(self, manifest: bytes, blocks: int) -> "ServedModel":
        if manifest not in self._known:
            model = await self.reader.open(replace(self.config, model=self._name(manifest)))
            _check(model, manifest)
            self._known[manifest] = _described(model)
        found = self._known[manifest]
        max_ram_bytes = self.config.limits.max_ram_bytes
        room_bytes = blocks * self.own().block_bytes
        if max_ram_bytes is not None and self.config.num_blocks is None:
            room_bytes = RAM_SHARE * max_ram_bytes
        return replace(found, length=min(found.blocks, round(room_bytes / found.block_bytes)))

    async def hosting(self, manifest: bytes, weight_bytes: int, limits: OwnerLimits) -> "Hosting":
        from swarmnet_node.node import Hosting

        is_limited = limits.max_ram_bytes is not None and self.config.num_blocks is None
        block_bytes = self.block_bytes or weight_bytes
        config = replace(
            self.config,
            model=self._name(manifest),
            limits=limits,
            num_blocks=None,
            max_block_bytes=None if is_limited else block_bytes,
        )
        loaded = await self.reader.load(config, published=True)
        _check(loaded.model, manifest)
        hosting = loaded.hosting(config, self.notice)
        if not isinstance(hosting, Hosting):
            raise ConfigError(f"{loaded.model.name} has no blocks to host", hint="")
        return replace(hosting, others=replace(self, model=loaded.model, block_bytes=block_bytes))

    def _name(self, manifest: bytes) -> str:
        return next(name for name, each in listed(self.config.network.rules).items() if each == manifest)


def other_models(
    config: NodeConfig, reader: ModelReader, notice: Callable[[str], None], loaded: LoadedModel
) -> ListedModels | None:
    """Return the models that a node may switch to.

    None if the owner named blocks or experts, or forbids switching, or the swarm file lists no
    other model.
    """
    if not config.may_switch:
        return None
    models = ListedModels(config, reader, notice, loaded.model)
    return models if models.manifests else None


def listed(rules: Rules) -> dict[str, bytes]:
    """Return the manifest hashes, by name, of models that the swarm file lists with a pieces hash.

    Their parts can be verified, whether they come from the hub or from peers.
    """
    return {name: manifest for name, manifest in rules.names.items() if manifest in rules.pieces_hashes}


def _check(model: "LocalModel", manifest: bytes) -> None:
    """Raise ``NotAuthorised`` unless the swarm file lists ``model`` under its name."""
    if model.manifest.hash != manifest:
        raise NotAuthorised(
            f"the files of {model.name} here, or at the hub, are not those that the swarm file lists",
            hint="`swarmnet model show` prints their manifest, `swarmnet swarm show` that of the swarm",
        )


def _described(model: "LocalModel") -> "ServedModel":
    from swarmnet_protocols.routing.model_needs import ServedModel

    manifest = model.manifest
    size = sum(file.size for file in manifest.files)
    return ServedModel(manifest.hash, model.name, manifest.blocks, size / manifest.blocks, ())
