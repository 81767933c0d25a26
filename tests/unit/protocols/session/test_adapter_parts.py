"""Limits of an adapter, as its owner makes it and as bytes from another peer."""

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save

from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.models import resolve
from swarmnet_protocols.session import MAX_RANK
from swarmnet_protocols.session.adapters import (
    MAX_HEADER_BYTES,
    MAX_PREFIX_POSITIONS,
    Adapter,
    read_part,
)
from tests.support.models.peft_oracle import random_tensors
from tests.support.models.tiny_models import save_tiny

DOWN, UP = "1.self_attn.q_proj.down", "1.self_attn.q_proj.up"
KEY, VALUE = "1.prefix.key", "1.prefix.value"
Tensors = dict[str, torch.Tensor]


def pair(**changes: torch.Tensor) -> Tensors:
    return {**random_tensors([1]), **changes}


def prefix(positions: int = 3, *, block: int = 1) -> Tensors:
    return {f"{block}.prefix.{kind}": torch.ones(2, positions, 8) for kind in ("key", "value")}


def without(tensors: Tensors, name: str) -> Tensors:
    return {each: tensor for each, tensor in tensors.items() if each != name}


BAD: dict[str, tuple[Tensors, str]] = {
    "another name": ({"model.layers.1.q_proj.weight": torch.ones(2, 2)}, "a tensor 'model"),
    "a block with a leading zero": ({f"0{name}": tensor for name, tensor in pair().items()}, "a tensor '01"),
    "a path out of the layer": ({"1.../q_proj.down": torch.ones(2, 2)}, "a tensor '1"),
    "half a pair": (without(pair(), UP), "without 1.self_attn.q_proj.up"),
    "the other half": (without(pair(), DOWN), "without 1.self_attn.q_proj.down"),
    "half a prefix": (without(prefix(), VALUE), "without 1.prefix.value"),
    "the other half of a prefix": (without(prefix(), KEY), "without 1.prefix.key"),
    "ranks that differ": (pair(**{DOWN: torch.ones(3, 32)}), "belongs to a pair"),
    "a pair of vectors": (pair(**{DOWN: torch.ones(32)}), "belongs to a pair"),
    "a rank out of bounds": (random_tensors([1], rank=MAX_RANK + 1), f"rank {MAX_RANK + 1}"),
    "prefixes that differ": ({**prefix(3), **prefix(4, block=2)}, "prefixes of 3 and of 4"),
    "a key and a value of other lengths": ({**prefix(3), KEY: torch.ones(2, 4, 8)}, "belongs to a prefix"),
    "a prefix of matrices": ({KEY: torch.ones(2, 4), VALUE: torch.ones(2, 4)}, "belongs to a prefix"),
    "a prefix out of bounds": (prefix(MAX_PREFIX_POSITIONS + 1), f"{MAX_PREFIX_POSITIONS + 1} positions"),
    "not a number": (pair(**{UP: torch.full((32, 4), float("nan"))}), "not finite"),
    "infinity": ({**prefix(), VALUE: torch.full((2, 3, 8), float("inf"))}, "not finite"),
}


@pytest.mark.parametrize(("tensors", "why"), BAD.values(), ids=BAD.keys())
def test_tensors_that_no_host_would_accept_are_refused(tensors: Tensors, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Adapter(tensors)


@pytest.mark.parametrize(("tensors", "why"), BAD.values(), ids=BAD.keys())
def test_a_part_with_such_tensors_is_refused(tensors: Tensors, why: str) -> None:
    with pytest.raises(ProtocolViolation, match=why):
        read_part(save(tensors))


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], size: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}


FILES: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "garbage": lambda: b"\x07" * 100,
    "a header that is longer than the file": lambda: struct.pack("<Q", 1 << 40) + b"{}",
    "a header that is too long": lambda: with_header({"__metadata__": {"x": "y" * MAX_HEADER_BYTES}}),
    "a header that is a list": lambda: with_header([1]),
    "more than it says": lambda: save(pair()) + b"x",
    "less than it says": lambda: save(pair())[:-1],
    "a shape beyond all memory": lambda: with_header({DOWN: entry([1 << 40, 1 << 20], 8)}, bytes(8)),
    "a shape without numbers": lambda: with_header({DOWN: entry([0, 32], 0), UP: entry([32, 0], 0)}),
    "integers": lambda: save({DOWN: torch.ones(4, 32, dtype=torch.int32), UP: torch.ones(32, 4)}),
    "doubles": lambda: save({DOWN: torch.ones(4, 32, dtype=torch.float64), UP: torch.ones(32, 4)}),
    "a byte format": lambda: save({name: tensor.to(torch.float8_e4m3fn) for name, tensor in pair().items()}),
}


@pytest.mark.parametrize("make", FILES.values(), ids=FILES.keys())
def test_files_that_are_not_parts_are_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(ProtocolViolation):
        read_part(make())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_has_the_tensors_of_its_blocks(dtype: torch.dtype) -> None:
    tensors = {**random_tensors(range(5)), **{k: v for n in range(5) for k, v in prefix(block=n).items()}}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    part = Adapter(tensors).part(1, 3)

    assert part is not None
    found = read_part(part.data)
    assert found.keys() == {name for name in tensors if name[0] in "12"}
    assert all(torch.equal(found[name], tensors[name].float()) for name in found)
    again = Adapter(dict(reversed(tensors.items()))).part(1, 3)
    assert again == part, "the same tensors have another hash"


def test_an_adapter_copies_its_tensors() -> None:
    tensors = random_tensors([0])
    adapter = Adapter(tensors)
    before = adapter.part(0, 1)
    tensors["0.self_attn.q_proj.up"].zero_()

    assert Adapter(tensors).part(0, 1) != before
    assert adapter.part(0, 2) == before
    assert adapter.part(1, 2) is None


def test_a_part_of_a_prefix_is_for_every_block_or_refused() -> None:
    adapter = Adapter({**prefix(block=1), **prefix(block=2)})
    assert adapter.prefix_positions == len(prefix()[KEY][0])
    assert adapter.part(1, 3) is not None
    for span in ((0, 2), (2, 4), (3, 4)):
        with pytest.raises(ConfigError, match="not for block"):
            adapter.part(*span)


# ---- what a stage has --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Stage]:
    """Blocks 1 to 4 of models of two families."""
    found = {}
    for family in ("qwen3-moe", "llama-tied"):
        root = tmp_path_factory.mktemp(family)
        model = resolve(str(save_tiny(family, root / "model")), cache_dir=root / "cache")
        found[family] = load_stage(model, 1, 4, dtype=torch.float32, device=torch.device("cpu"))
    return found


UNFIT: dict[str, tuple[str, Tensors, str]] = {
    "a block that is elsewhere": (
        "llama-tied",
        random_tensors([4]),
        "block 4, which this host does not have",
    ),
    "a module that is nowhere": (
        "llama-tied",
        random_tensors([1], modules=[("self_attn.qkv", 32, 32)]),
        "no linear module self_attn.qkv",
    ),
    "a module that is not linear": (
        "llama-tied",
        random_tensors([1], modules=[("input_layernorm", 32, 32)]),
        "no linear module input_layernorm",
    ),
    "experts": (
        "qwen3-moe",
        random_tensors([2], modules=[("mlp.experts", 32, 32)]),
        "no linear module mlp.experts",
    ),
    "an expert": (
        "qwen3-moe",
        random_tensors([2], modules=[("mlp.experts.0.up_proj", 16, 32)]),
        "no linear module mlp.experts.0.up_proj",
    ),
    "other inputs": (
        "llama-tied",
        random_tensors([1], modules=[("self_attn.q_proj", 32, 31)]),
        "31 inputs and 32 outputs",
    ),
    "other outputs": (
        "llama-tied",
        random_tensors([1], modules=[("self_attn.k_proj", 32, 32)]),
        "32 inputs and 32 outputs",
    ),
    "a prefix of other heads": (
        "llama-tied",
        {KEY: torch.ones(4, 3, 8), VALUE: torch.ones(4, 3, 8)},
        "a prefix of",
    ),
    "a prefix of other sizes": (
        "llama-tied",
        {KEY: torch.ones(2, 3, 4), VALUE: torch.ones(2, 3, 4)},
        "a prefix of",
    ),
}


@pytest.mark.parametrize(("family", "tensors", "why"), UNFIT.values(), ids=UNFIT.keys())
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    family: str, tensors: Tensors, why: str, stages: Mapping[str, Stage]
) -> None:
    with pytest.raises(ProtocolViolation, match=why):
        stages[family].load_adapter(tensors, 1)


@pytest.mark.parametrize("span", [(1, 2), (2, 4)])
def test_an_adapter_is_not_used_for_fewer_blocks_than_it_is_for(
    span: tuple[int, int], stages: Mapping[str, Stage]
) -> None:
    adapter = stages["llama-tied"].load_adapter(random_tensors([1, 2]), 1)
    adapter.check_span(1, 3)
    adapter.check_span(1, 4)
    with pytest.raises(ProtocolViolation, match="more than the blocks"):
        adapter.check_span(*span)


def test_a_prefix_is_for_every_block_of_a_span(stages: Mapping[str, Stage]) -> None:
    adapter = stages["llama-tied"].load_adapter({**prefix(block=1), **prefix(block=2)}, 1)
    adapter.check_span(1, 3)
    with pytest.raises(ProtocolViolation, match="some of the blocks"):
        adapter.check_span(1, 4)


def test_the_bytes_of_an_adapter_are_those_of_its_memory(stages: Mapping[str, Stage]) -> None:
    modules = [("self_attn.q_proj", 32, 32), ("self_attn.v_proj", 16, 32), ("mlp.down_proj", 32, 48)]
    tensors = {**random_tensors([1, 3], modules=modules)} | {
        name: tensor for block in (1, 2, 3) for name, tensor in prefix(block=block).items()
    }
    adapter = stages["llama-tied"].load_adapter(tensors, 1)

    assert adapter.tensors.keys() == tensors.keys()
    assert all(torch.equal(adapter.tensors[name], tensor) for name, tensor in tensors.items())
    held = list(adapter.tensors.values())
    for updates in adapter.lora.layers:
        for update in updates.values():
            held += [update.down, *(up for _, _, up in update.ups)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    assert adapter.nbytes == sum(storages.values())
