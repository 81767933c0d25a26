"""The models in the swarm file that a node may switch to.

Reads their outlines, and says what the node would host of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swarmnet_node.config import NodeConfig
from swarmnet_node.loading.loaded_model import LoadedModel
from swarmnet_node.loading.reading import ModelReader
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.errors import ConfigError, NotAuthorised
from swarmnet_protocols.membership.rules import Rules

if TYPE_CHECKING:
    from swarmnet_node.hosted_blocks import Hosting
    from swarmnet_protocols.models import LocalModel
    from swarmnet_protocols.routing.model_needs import ServedModel

RAM_SHARE = 0.5
"""Share of ``--max-ram`` to expect for blocks, while their size in memory is unknown. More would
announce blocks that do not fit; less would host too few."""


@dataclass(frozen=True)
class ListedModels:
    """The models that a node of ``model`` may switch to: its ``OtherModels``."""

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
        from swarmnet_node.hosted_blocks import Hosting
        from swarmnet_node.loading.hosted import hosting_of

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
        hosting = hosting_of(loaded, config, self.notice)
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
