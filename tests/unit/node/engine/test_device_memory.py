"""How blocks are fitted to the memory of accelerators, from reports of cards that are not here."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from transformers import LlamaConfig

from swarmnet_node.config import NodeConfig
from swarmnet_node.engine.device_memory import BlockNeeds, fit_on_cards, room_bytes, spread
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.host_checks import Trial, trial_inputs
from swarmnet_node.loading import fitting
from swarmnet_node.loading.loaded_model import LoadedModel
from swarmnet_node.loading.reading import read_model
from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.machine.devices import MOST_SHARE, Card
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.models.partial_model import build_span, weight_bytes
from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_linear import install
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products
from swarmnet_protocols.timing import Timing
from tests.support.models.tiny_models import write_gguf

MIB, GIB = 1 << 20, 1 << 30
META = torch.device("meta")
CONTEXT_BYTES = 500 * MIB
"""What a driver keeps for a process that computes: it is used before the first block is loaded."""
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = BlockNeeds(packed_bytes=MIB, expanded_bytes=4 * MIB, widths=LayerWidths(64, 64, 96), dtype_bytes=2)


def card(total: int, used: int = CONTEXT_BYTES, index: int = 0) -> Card:
    return Card(torch.device("cuda", index), f"cuda:{index}", total, total - used)


def llama_70b() -> BlockNeeds:
    """The needs of a block of Llama-70B in bfloat16 and Q4_K, by the tensors of a span on the meta
    device."""
    config = LlamaConfig(**LLAMA_70B)
    with META:
        builder = build_span(config, 0, 1)
        span: Any = builder._cls(builder._config).to(torch.bfloat16)
    expanded = weight_bytes(span)
    weights, block_bytes = GGML_QUANT_SIZES[Format.Q4_K]
    packed = {}
    for path, linear in span.named_modules():
        if isinstance(linear, torch.nn.Linear):
            row_bytes = linear.in_features // weights * block_bytes
            data = torch.empty(linear.out_features, row_bytes, dtype=torch.uint8, device=META)
            packed[f"{path}.weight"] = PackedTensor.of(Format.Q4_K, data)
    install(span, packed, Products(None))
    return BlockNeeds(weight_bytes(span), expanded, LayerWidths.of(config), 2)


def test_a_card_of_24_gb_hosts_40_blocks_of_llama_70b_at_4_bits() -> None:
    needs = llama_70b()
    assert needs.expanded_bytes == pytest.approx(1.711e9, rel=1e-3)
    assert needs.packed_bytes == pytest.approx(0.481e9, rel=1e-3)
    options: dict[str, Any] = {"wanted": 80, "is_fixed": False, "cache_bytes": GIB, "most": None}
    cards = [card(24 * GIB)]
    packed = fit_on_cards(cards, needs, **options)
    assert packed.packed
    assert packed.total >= 40
    dense = fit_on_cards(cards, needs, forms=(False,), **options)
    assert not dense.packed
    assert dense.total == 12
    for found in (packed, dense):
        allocated = found.total * needs.weight_bytes(packed=found.packed) + GIB
        allocated += needs.scratch_bytes(packed=found.packed)
        assert allocated + CONTEXT_BYTES <= MOST_SHARE * 24 * GIB
        one_more = allocated + needs.weight_bytes(packed=found.packed)
        assert one_more + CONTEXT_BYTES > MOST_SHARE * 24 * GIB


def test_weights_are_expanded_when_all_wanted_blocks_then_fit() -> None:
    needs = llama_70b()
    few = fit_on_cards([card(24 * GIB)], needs, wanted=10, is_fixed=True, cache_bytes=GIB, most=None)
    assert (few.total, few.packed) == (10, False)
    more = fit_on_cards([card(24 * GIB)], needs, wanted=20, is_fixed=True, cache_bytes=GIB, most=None)
    assert (more.total, more.packed) == (20, True)


@pytest.mark.parametrize(
    ("used", "most", "expected"),
    [
        (0, None, 950),
        (400, None, 550),  # other programs fill the card too
        (990, None, 0),
        (0, 0.5, 500),
        (400, 0.5, 500),
        (700, 0.5, 250),
        (0, 300 * MIB, 300),
        (0, 1.0, 950),
    ],
)
def test_the_room_on_a_card_is_what_others_and_its_owner_leave(
    used: int, most: float | None, expected: int
) -> None:
    assert room_bytes(card(1000 * MIB, used * MIB), most) == pytest.approx(expected * MIB, abs=2)


def test_blocks_that_do_not_fit_are_refused_with_what_would_fit() -> None:
    scratch = SMALL.scratch_bytes(packed=True)
    cards = [card(scratch + 700 * MIB, 0)]
    fitting = fit_on_cards(cards, SMALL, wanted=10_000, is_fixed=False, cache_bytes=8 * MIB, most=None).total
    assert fitting > 500
    options: dict[str, Any] = {"is_fixed": True, "cache_bytes": 8 * MIB, "most": None}
    fit_on_cards(cards, SMALL, wanted=fitting, **options)
    with pytest.raises(OutOfResources, match="do not fit") as refused:
        fit_on_cards(cards, SMALL, wanted=fitting + 1, **options)
    assert f"--num-blocks {fitting}," in refused.value.hint
    with pytest.raises(OutOfResources, match="do not fit"):
        fit_on_cards([card(GIB)], SMALL, wanted=1, is_fixed=False, cache_bytes=4 * GIB, most=None)


@pytest.mark.parametrize(
    ("count", "rooms", "expected"),
    [
        (10, (100, 100), (5, 5)),
        (9, (200, 100), (6, 3)),
        (3, (0, 7), (0, 3)),
        (1, (5, 6), (0, 1)),
        (0, (3,), (0,)),
    ],
)
def test_blocks_are_spread_in_proportion_to_free_memory(
    count: int, rooms: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert spread(count, rooms) == expected


def test_no_card_gets_more_than_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        rooms = torch.randint(0, 1000, (3,), generator=generator).tolist()
        each = int(torch.randint(1, 300, (1,), generator=generator))
        most = sum(room // each for room in rooms)
        if most:
            counts = spread(most, rooms)
            assert all(had * each <= room for had, room in zip(counts, rooms, strict=True))


def test_two_cards_host_more_blocks_than_one() -> None:
    needs = llama_70b()
    cards = [card(24 * GIB, index=0), card(12 * GIB, index=1)]
    found = fit_on_cards(cards, needs, wanted=80, is_fixed=False, cache_bytes=GIB, most=None)
    assert found.total == sum(found.blocks) > 60
    assert found.blocks[0] > 2 * found.blocks[1] > 0


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, used: int, **options: Any) -> LoadedModel:
    """What a node of a tiny gguf model decides on a card with ``used`` bytes in use. Outside its
    hours it loads nothing."""
    monkeypatch.setattr(fitting, "cards_of", lambda given: [Card(META, "a card", GIB, GIB - used)])
    config = NodeConfig(
        model=str(write_gguf(folder / "tiny.gguf", "llama")),
        network=Network(Rules(b"key", Admission.OPEN), P2pdConfig(folder / "identity.key", listen=())),
        swarm_name="lab",
        cache_dir=folder / "cache",
        folder=folder,
        device="meta",
        limits=options.pop("limits", OwnerLimits(schedule="mon 00:00-00:01")),
        **{"max_cache_bytes": MIB, **options},
    )
    return read_model(config, None, SwarmPeers(config.network.rules.pieces_hashes, Timing()))


def test_a_node_hosts_what_fits_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loaded(tmp_path, monkeypatch, 0)
    assert whole.layout is not None
    assert (whole.blocks, whole.is_packed) == ((0, 3), False)
    scratch = [whole.layout.needs.scratch_bytes(packed=packed) for packed in (False, True)]
    least = {packed: GIB - int(0.05 * GIB) - scratch[packed] - MIB for packed in (False, True)}
    with pytest.raises(OutOfResources, match="3 blocks do not fit"):
        loaded(tmp_path, monkeypatch, GIB, blocks=(0, 3))
    two = loaded(tmp_path, monkeypatch, least[False] - 2 * whole.layout.needs.expanded_bytes - 100)
    assert (two.blocks, two.num_blocks, two.is_packed) == (None, 2, False)
    assert two.layout is not None
    assert "2 of 3 blocks fit: 2 on a card (0." in two.layout.describe(3)


def test_ram_does_not_bound_the_blocks_on_an_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "block_needs", lambda own: SMALL)
    limits = OwnerLimits(schedule="mon 00:00-00:01", max_ram_bytes=64 * GIB)
    assert loaded(tmp_path, monkeypatch, 0, limits=limits).num_blocks == 3
    limits = OwnerLimits(schedule="mon 00:00-00:01", max_ram_bytes=64 * MIB)
    with pytest.raises(OutOfResources, match="a node does not fit into 64 MiB") as refused:
        loaded(tmp_path, monkeypatch, 0, limits=limits)
    assert "--num-blocks" not in refused.value.hint


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_node_with_a_card_loads_a_block_on_the_cpu_to_check_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    found = replace(loaded(tmp_path, monkeypatch, 0), is_packed=is_packed)
    cpu = torch.device("cpu")
    stage = found.on_cpu().load(1, 2)
    assert (stage.device, stage.is_on_accelerator) == (cpu, False)
    inputs = trial_inputs(stage.hidden_size, random.Random(0))
    own = load_stage(found.model, 1, 2, dtype=torch.float32, device=cpu).run_sequences(inputs, (len(inputs),))
    outputs = stage.run_sequences(inputs, (len(inputs),)).float()
    assert Trial((1, 2), inputs, as_array(own)).agrees(as_array(outputs))
