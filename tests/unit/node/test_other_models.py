"""The models to which a node may switch: those that the swarm file lists with their pieces, unless
its owner forbids it, and within its limits."""

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.config import NodeConfig
from swarmnet_node.hosted_blocks import Hosting
from swarmnet_node.loading import other_models as other_models_module
from swarmnet_node.loading.other_models import ListedModels, listed, other_models
from swarmnet_node.loading.reading import ModelReader, read_model
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.directory.host_announcements import load_of
from swarmnet_protocols.errors import ConfigError, NotAuthorised, OutOfResources
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.models.tiny_models import write_gguf
from tests.support.swarm.weight_swarm import WeightSwarm, weight_swarm

NEVER = OwnerLimits(schedule="mon 00:00-00:01")
"""A schedule that keeps the node from loading its blocks."""
HASH = bytes(32)


class Group:
    """A swarm for the models alpha, of 3 blocks, and beta, of 6; a newcomer has the files of
    alpha."""

    def __init__(self, swarm: WeightSwarm, folder: Path) -> None:
        self.swarm, self.folder = swarm, folder
        self.alpha, self.beta = self._saved("alpha", 3), self._saved("beta", 6)

    def _saved(self, name: str, blocks: int) -> LocalModel:
        path = write_gguf(self.folder / f"{name}.gguf", "llama", blocks=blocks)
        model = resolve(str(path), cache_dir=self.folder / name)
        model.verify()
        self.swarm.host(model.shared())
        return model

    def config(self, **options: Any) -> NodeConfig:
        models = (self.alpha, self.beta)
        names = {model.path.name: model.manifest.hash for model in models}
        pieces = {model.manifest.hash: model.pieces_hash for model in models if model.pieces_hash}
        rules = Rules(
            b"key", Admission.OPEN, models=frozenset(names.values()), names=names, pieces_hashes=pieces
        )
        return NodeConfig(
            **{
                "model": str(self.alpha.path),
                "network": Network(
                    options.pop("rules", rules), P2pdConfig(self.folder / "identity.key", listen=())
                ),
                "swarm_name": "lab",
                "cache_dir": self.folder / "new",
                "folder": self.folder,
                "device": "cpu",
                "limits": NEVER,
                **options,
            }
        )

    def outline(self, model: LocalModel, name: str = "beta.gguf") -> None:
        """The newcomer has the outline of ``model`` under this name."""
        assert model.pieces_hash is not None
        self.swarm.outline(model.manifest.hash, model.pieces_hash, self.folder / "new", name)

    def models(self, **options: Any) -> ListedModels:
        """The other models of the newcomer, which hosts all of alpha."""
        config = self.config(**options)
        rules = config.network.rules
        peers = self.swarm.peers(rules.pieces_hashes, rules.models)
        reader = ModelReader(ThreadPoolExecutor(1), peers)
        loaded = read_model(config, None, peers)
        found = other_models(config, reader, lambda _: None, loaded)
        assert found is not None
        return found

    def switched(self, models: ListedModels, weight_bytes: int, limits: OwnerLimits = NEVER) -> Hosting:
        return asyncio.run(models.hosting(self.beta.manifest.hash, weight_bytes, limits))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with weight_swarm() as swarm:
        yield Group(swarm, tmp_path)


def block_bytes(group: Group) -> int:
    model = read_model(group.config(num_blocks=1), None, group.swarm.peers({}))
    return model.load(0, 1).weight_bytes


def test_a_node_hosts_as_many_blocks_of_another_model_as_fit(group: Group) -> None:
    group.outline(group.beta)
    models = group.models()
    assert models.manifests == [group.beta.manifest.hash]
    described = asyncio.run(models.read(group.beta.manifest.hash, 2))
    assert (described.name, described.blocks, described.claims) == ("beta.gguf", 6, ())
    assert described.length == 2, "about two of its blocks have the size of two blocks of alpha"
    one = block_bytes(group)
    hosting = group.switched(models, 2 * one + 1)
    assert (hosting.manifest, hosting.num_blocks) == (group.beta.manifest.hash, 2)
    assert hosting.placed is None, "it chooses them when it joins"
    assert hosting.load(1, 3).weight_bytes == 2 * one, "their pieces come from the hosts"
    assert hosting.others is not None
    assert hosting.others.manifests == [group.alpha.manifest.hash], "back to where it came from"
    with pytest.raises(OutOfResources, match="a block of beta"):
        group.switched(models, one - 1)


def test_the_limits_of_the_owner_hold_for_another_model(group: Group) -> None:
    group.outline(group.beta)
    with pytest.raises(OutOfResources):
        group.switched(group.models(), 1, OwnerLimits(schedule=NEVER.schedule, max_ram_bytes=1 << 20))
    enough = OwnerLimits(schedule=NEVER.schedule, max_ram_bytes=1 << 40)
    assert group.switched(group.models(), 1, enough).num_blocks == 6, "all that the memory holds"
    few = group.models(num_blocks=1)
    assert group.switched(few, block_bytes(group), enough).num_blocks == 1, "not more than --num-blocks"
    with pytest.raises(ConfigError, match="quantised already"):
        group.switched(replace(few, config=replace(few.config, dtype="int8")), 1 << 30)
    with pytest.raises(OutOfResources, match="--max-disk"):
        group.switched(group.models(max_disk_bytes=1 << 10), 1 << 30).load(0, 6)


@defence(
    "only models that the swarm file lists with their pieces are switched to",
    off=replacing(other_models_module, "listed", lambda rules: dict(rules.names)),
)
def test_only_models_that_the_swarm_file_lists_with_pieces_are_taken(group: Group) -> None:
    alpha, beta = group.alpha.manifest.hash, group.beta.manifest.hash
    names = {"alpha.gguf": alpha, "beta.gguf": beta}
    rules = Rules(b"key", Admission.OPEN, names=names, pieces_hashes={alpha: HASH})
    assert listed(rules) == {"alpha.gguf": alpha}
    config, peers = group.config(rules=rules), group.swarm.peers({})
    reader = ModelReader(ThreadPoolExecutor(1), peers)
    loaded = read_model(config, None, peers)
    assert other_models(config, reader, lambda _: None, loaded) is None


@defence(
    "other files under the name of a listed model are not switched to",
    off=replacing(other_models_module, "_check", nothing),
)
def test_another_model_under_a_listed_name_is_not_taken(group: Group) -> None:
    group.outline(group.alpha, name="beta.gguf")
    models = group.models()
    with pytest.raises(NotAuthorised, match="not those that the swarm file lists"):
        asyncio.run(models.read(group.beta.manifest.hash, 3))
    with pytest.raises(NotAuthorised, match="not those that the swarm file lists"):
        group.switched(models, 1 << 30)


@defence(
    "a load out of range counts as none",
    off=replacing(__name__, "load_of", lambda record: record.load),
    load=1.01,
    sessions=20,
    counts=0.0,
)
@pytest.mark.parametrize(
    ("load", "sessions", "counts"),
    [(0.9, 20, 0.9), (1.0, 1, 0.5), (1.0, 0, 0.0), (1.01, 20, 0.0), (-1.0, 20, 0.0), (float("nan"), 20, 0.0)],
)
def test_a_load_out_of_range_or_of_one_client_counts_for_less(
    load: float, sessions: int, counts: float
) -> None:
    assert load_of(pb.HostRecord(load=load, sessions=sessions)) == pytest.approx(counts)


@defence(
    "a node whose owner forbids it does not switch",
    off=replacing(
        sys.modules[__name__],
        "other_models",
        lambda config, reader, notice, loaded: ListedModels(config, reader, notice, loaded.model),
    ),
    option={"keep_model": True},
)
@pytest.mark.parametrize("option", [{"keep_model": True}, {"stay": True}, {"blocks": (0, 3)}])
def test_a_node_whose_owner_forbids_it_has_no_other_models(group: Group, option: dict[str, Any]) -> None:
    config, peers = group.config(**option), group.swarm.peers({})
    reader = ModelReader(ThreadPoolExecutor(1), peers)
    loaded = read_model(group.config(), None, peers)
    assert other_models(group.config(), reader, lambda _: None, loaded) is not None
    assert other_models(config, reader, lambda _: None, loaded) is None
