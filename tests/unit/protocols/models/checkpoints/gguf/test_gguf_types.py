"""Every type of gguf that stays packed gives what its values give, in families of every kind.

``test_gguf_families.py`` has one type, and all families.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from torch import nn

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.exact_stage import ExactStage
from swarmnet_node.engine.kernels.backend import PRODUCTS
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.models import resolve
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from swarmnet_protocols.quantization.formats import BLOCKS, OWN_FORMATS, Format
from swarmnet_protocols.quantization.packed_experts import PackedExperts
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.support.gguf.families import FILES
from tests.support.gguf.files import GgufFile, Tensor
from tests.support.gguf.packed_matrices import weight_matrix
from tests.support.gguf.witness import expanded, greedy_logits, needs_llama_cpp
from tests.support.gguf.writing import write
from tests.support.models.rounding import TINY_TERMS, assert_near
from tests.support.models.tensor_layers import TensorLayers

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
TYPES = [each for each in Format if each not in {Format.F32, *OWN_FORMATS}]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
WIDE |= {"shared_expert_intermediate_size": 256, "head_dim": 64}
"""Rows of whole blocks of 256 weights, which are the longest blocks."""
ANSWER_TOKENS = 24
KINDS = {
    "llama": {},
    "qwen3_moe": {},
    # llama.cpp rounds the bounds of yarn to whole dimensions, and OpenAI's config says not to.
    "gpt_oss": {"rope_scaling": {"rope_type": "default"}},
    "deepseek_v3": {"q_lora_rank": 256, "v_head_dim": 64, "kv_lora_rank": 256},
    "qwen3_5": {"linear_num_value_heads": 32},
    "qwen3_5_moe": {"linear_num_value_heads": 32},
}
"""Dense families, mixtures of experts and hybrids, and settings that make their rows long."""
TERMS = {name: TINY_TERMS * (2 if name in ("qwen3_5", "qwen3_5_moe") else 1) for name in KINDS}
"""Terms that an output depends on, one after another. A recurrent state also depends on the state
before it. With random weights, sums in another order gave errors of 7e-5 with such states, and of
2e-6 without them."""
PLAIN = (".bias", "inp", "ssm_alpha", "ssm_beta", "ssm_conv1d", "token_embd", "attn_k_b", "attn_v_b")
"""Parts of names of matrices that llama.cpp's quantiser leaves, or that have no packed product."""


def pair(name: str, kind: Format, folder: Path) -> tuple[Path, Path]:
    """Write a file with matrices of a type, and its twin with the same values as float32."""
    file = FILES[name]
    own = file.family.config
    wide = {setting: size for setting, size in WIDE.items() if setting in own}
    family = replace(file.family, config={**own, **wide, **KINDS[name]})
    model = getattr(transformers, family.architecture).from_pretrained(
        family.save(folder / "directory"), dtype=torch.float32
    )
    packed, values = (
        GgufFile.read(write(folder / "source.gguf", replace(file, family=family), model)) for _ in range(2)
    )
    for seed, (tensor_name, tensor) in enumerate(packed.tensors.items()):
        *counts, columns = tensor.data.shape
        if counts and columns % BLOCKS[kind][0] == 0 and not any(each in tensor_name for each in PLAIN):
            matrix = weight_matrix(kind, math.prod(counts), columns, seed)
            values.tensors[tensor_name] = Tensor(matrix.dequantize().numpy().reshape(tensor.data.shape))
            data = matrix.segments[0].data.reshape(*counts, -1)
            packed.tensors[tensor_name] = Tensor(data, GGMLQuantizationType(kind))
    for twin in ("packed", "values"):
        (folder / twin).mkdir()
    return packed.write(folder / "packed/model.gguf"), values.write(folder / "values/model.gguf")


class Loaded:
    """A file as one host and one client have it."""

    def __init__(self, path: Path, **options: Any) -> None:
        model = resolve(str(path), cache_dir=path.parent / "cache")
        self.stage = load_stage(model, 0, model.manifest.blocks, **FLOAT32, **options)
        self._local = TensorLayers(model)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after each token of a text."""
        [rows] = self.stage.forward([(self.stage.new_sequence(), self._local.embed(tokens))])
        return self._local.logits(as_tensor(rows))


def packed_as_stored(path: Path) -> Loaded:
    return Loaded(path, packed=True, backend=load_backend(default_cache_dir()))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", KINDS)
def test_a_quantised_file_equals_its_dequantised_twin(name: str, kind: Format, tmp_path: Path) -> None:
    packed, values = pair(name, kind, tmp_path)
    mine, twin = packed_as_stored(packed), Loaded(values)
    tokens = torch.randint(3, 100, (16,), generator=torch.Generator().manual_seed(0))
    found, expected = mine.logits(tokens), twin.logits(tokens)
    assert_near(found, expected, TERMS[name])
    if isinstance(mine.stage, ExactStage):
        layers = mine.stage._layers
        assert all(
            isinstance(getattr(each, name).weight, PackedTensor) for each in layers for name in PRODUCTS
        )
        return
    plain = {path for path, each in mine.stage._model.named_modules() if type(each) is nn.Linear}
    assert {path.rpartition(".")[2] for path in plain} <= {"kv_b_proj"}
    for _, experts in experts_modules(mine.stage._model):
        assert isinstance(experts.down_proj, PackedExperts)


@needs_llama_cpp
@pytest.mark.thorough
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", KINDS)
def test_a_quantised_file_has_the_values_that_llama_cpp_gives_it(
    name: str, kind: Format, tmp_path: Path
) -> None:
    """llama.cpp computes with values that it has expanded.

    With quantised weights llama.cpp rounds activations to 8 bits: dense models differ by 0.7 to
    3.5 %, and recurrent states with random weights by more.
    """
    packed, _ = pair(name, kind, tmp_path)
    prompt = torch.randint(3, 100, (150,), generator=torch.Generator().manual_seed(0))
    others = greedy_logits(expanded(packed), prompt.tolist(), ANSWER_TOKENS)
    text = torch.cat([prompt, others.argmax(-1)])
    ours = packed_as_stored(packed).logits(text[:-1])[len(prompt) - 1 :]
    assert ours.argmax(-1).tolist() == others.argmax(-1).tolist()
    for one, other in zip(ours, others, strict=True):
        assert_near(one, other, TERMS[name])
