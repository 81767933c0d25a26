"""Types of gguf without a packed product: what they take in memory is said and counted before they
are loaded."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from swarmnet_client.model.load_options import LoadOptions, memory_notice
from swarmnet_node.config import NodeConfig
from swarmnet_node.loading.fitting import footprints
from swarmnet_node.loading.reading import read_model
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.partial_model import weight_bytes
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.timing import Timing
from tests.support.gguf.files import GgufFile
from tests.support.models.tiny_models import write_gguf

CPU = torch.device("cpu")
LATE = "blk.2."
"""The last of three blocks."""


def wide(tmp_path: Path, kinds: dict[str, Type]) -> LocalModel:
    """A model whose matrices have the types of the prefixes of their names, in rows of 256 weights.

    Values are zeros, because gguf's Python code does not write all types.
    """
    file = GgufFile.read(write_gguf(tmp_path / "source.gguf", "llama"))
    file.keys["llama.embedding_length"].value = file.keys["llama.feed_forward_length"].value = 256
    for name, tensor in file.tensors.items():
        if tensor.data.ndim == 1:
            tensor.data = np.ones(256, np.float32)
            continue
        tensor.kind = next((kind for prefix, kind in kinds.items() if name.startswith(prefix)), Type.F32)
        rows = 64 if name == "token_embd.weight" else 128 if "attn_k" in name or "attn_v" in name else 256
        weights, block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind]
        tensor.data = np.zeros((rows, 256 // weights * block_bytes), np.uint8)
    return resolve(str(file.write(tmp_path / "model.gguf")), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", [
    Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.TQ1_0, Type.TQ2_0, Type.NVFP4,
], ids=lambda kind: kind.name)  # fmt: skip
def test_what_is_expanded_is_known_before_it_is_loaded(kind: Type, tmp_path: Path) -> None:
    model = wide(tmp_path, {"blk.": kind})
    sizes = model.sizes(0, 1, 2)
    assert sizes.formats == (kind.name,)
    loaded = model.load_span(0, 3, dtype=torch.float32, device=CPU, packed=True)
    assert sizes.in_memory(4) == weight_bytes(loaded)
    assert sizes.stored_bytes < weight_bytes(loaded) / 6
    text = sizes.notice("blocks 0:3", torch.float32)
    assert text.startswith(
        f"{kind.name} is computed in float32: blocks 0:3 take 4.7 MB of memory instead of 0."
    )


@pytest.mark.parametrize("format", [
    each for each in Format if each < 1000 and each not in (Format.F32, Format.F16, Format.BF16)
], ids=lambda format: format.name)  # fmt: skip
def test_nothing_is_said_of_formats_that_stay_packed(format: Format, tmp_path: Path) -> None:
    model = wide(tmp_path, {"": Type(format)})
    assert model.sizes("local_layers", 0, 1, 2).notice("all weights", torch.float32) == ""
    loaded = model.load_span(0, 3, dtype=torch.float32, device=CPU, packed=True)
    assert model.sizes(0, 1, 2).stored_bytes == weight_bytes(loaded)


def test_a_block_whose_format_is_expanded_is_the_largest(tmp_path: Path) -> None:
    model = wide(tmp_path, {LATE: Type.IQ3_S, "blk.": Type.Q8_0})
    assert (model.largest_block(0, 3), model.largest_block(0, 2)) == (2, 0)


def test_a_client_tells_the_size_of_embeddings_that_are_not_dense(tmp_path: Path) -> None:
    model = wide(tmp_path, {"token_embd": Type.IQ3_S})
    packed = memory_notice(model, LoadOptions.picked(only_generates=True, device="cpu"))
    assert packed.startswith("IQ3_S is computed in float32: the embeddings and the head take")
    assert memory_notice(model, LoadOptions.picked(device="cpu")) == ""


def test_a_node_tells_before_it_loads_and_counts_it_in_its_limit(tmp_path: Path) -> None:
    model = wide(tmp_path, {LATE: Type.IQ3_S, "blk.": Type.Q8_0})
    config = NodeConfig(
        model=str(model.path),
        network=Network(Rules(b"key", Admission.OPEN), P2pdConfig(tmp_path / "identity.key", listen=())),
        swarm_name="lab",
        cache_dir=tmp_path / "cache",
        folder=tmp_path,
        device="cpu",
        limits=OwnerLimits(schedule="mon 00:00-00:01", max_ram_bytes=1 << 40),
    )
    said: list[str] = []
    peers = SwarmPeers(config.network.rules.pieces_hashes, Timing())
    loaded = read_model(config, None, peers, notice=said.append)
    assert said == ["IQ3_S is computed in float32: blocks 0:3 take 2.4 MB of memory instead of 1.0 MB"]
    footprint, _ = footprints(loaded)
    assert footprint.block_bytes == model.sizes(2).in_memory(4)
