"""gguf files of hybrids that older converters wrote, or that have more than answers need; and those
that are refused.

``test_families.py`` compares files of today's converter with directories.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from swarmnet_protocols.models.partial_model import weight_bytes
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from swarmnet_protocols.quantization.packed_tensor import GROUP
from tests.support.gguf.families import FILES
from tests.support.gguf.writing import write
from tests.support.models.rounding import assert_near
from tests.support.models.tensor_layers import TensorLayers

CPU = torch.device("cpu")
HINT = "use the model's Hugging Face layout"


@pytest.fixture
def made(tmp_path: Path) -> "Maker":
    return Maker(tmp_path)


class Maker:
    """Makes a model of a family, and files of the model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = 0

    def model(self, name: str, **changes: Any) -> Any:
        family = FILES[name].family
        family = replace(family, config={**family.config, **changes})
        directory = family.save(self._folder / "directory")
        found = getattr(transformers, family.architecture).from_pretrained(directory, dtype=torch.float32)
        return found.eval()

    def file(self, name: str, model: Any, **changes: Any) -> Path:
        self._files += 1
        folder = self._folder / str(self._files)
        folder.mkdir()
        return write(folder / "model.gguf", FILES[name], model, **changes)


def opened(path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=path.parent / "cache")


def config_of(path: Path) -> Any:
    return GgufCheckpoint([path], path.parent / "metadata").config()


def assert_answers(path: Path, model: Any) -> None:
    ids = torch.randint(3, 100, (1, 150), generator=torch.Generator().manual_seed(0))
    whole = opened(path).load_whole(dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        found, expected = whole(ids).logits, model(ids).logits
    assert_near(found, expected)


QUANTISED = {"linear_num_value_heads": 8, "hidden_size": 64, "intermediate_size": 64}
QUANTISED |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def format_of(name: str) -> GGMLQuantizationType:
    """As llama.cpp gives the tensors of one weight several formats."""
    is_finer = "attn_qkv" in name or "ssm_out" in name
    return GGMLQuantizationType.Q8_0 if is_finer else GGMLQuantizationType.Q4_0


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_projections_of_a_quantised_file_stay_packed_and_exact(family: str, made: Maker) -> None:
    """Value heads of 8 columns change places within blocks of 32 weights, and rows of two formats
    join."""
    model = made.model(family, **QUANTISED)
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    found = []
    for is_expanded in (False, True):
        path = made.file(family, model, quantized=format_of, is_expanded=is_expanded)
        if not is_expanded:
            options |= {"backend": load_backend(default_cache_dir())}
        stage = load_stage(opened(path), 0, 4, packed=not is_expanded, **options)
        rows = TensorLayers(opened(path)).embed(torch.arange(3, 43))
        found.append(stage.forward([(stage.new_sequence(), rows)])[0])
        linears = {
            name: module
            for name, module in stage._model.named_modules()
            if type(module).__name__ in ("Linear", "PackedLinear") and "shared_expert_gate" not in name
        }
        assert {type(module).__name__ for module in linears.values()} == {
            "Linear" if is_expanded else "PackedLinear"
        }
    assert_near(*found)


AHEAD = {"nextn.eh_proj.weight": (32, 64), "nextn.enorm.weight": (32,), "attn_norm.weight": (32,)}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "glm4_moe", "deepseek_v3"])
def test_blocks_that_predict_further_tokens_are_not_needed(family: str, made: Maker) -> None:
    model = made.model(family)
    keys: dict[str, Any] = {"block_count": 5, "nextn_predict_layers": 1}
    if family.startswith("qwen"):
        kinds = [kind == "linear_attention" for kind in model.config.layer_types]
        keys["attention.recurrent_layers"] = [*kinds, False]
    ahead = {f"blk.4.{name}": torch.randn(shape) for name, shape in AHEAD.items()}
    assert_answers(made.file(family, model, keys=keys, tensors=ahead), model)
    lacking = ahead | {"blk.4.nextn.eh_proj.weight": None}
    with pytest.raises(ConfigError, match=r"blk\.4\."):
        opened(made.file(family, model, keys=keys, tensors=lacking))


def test_layer_types_follow_the_interval_in_files_without_a_list(made: Maker) -> None:
    model = made.model("qwen3_5")
    for interval, types in ((4, "LLLF"), (2, "LFLF")):
        keys = {"attention.recurrent_layers": None, "full_attention_interval": interval}
        config = config_of(made.file("qwen3_5", model, keys=keys))
        assert "".join(kind[0].upper() for kind in config.layer_types) == types


def test_qwen3_next_files_may_have_queries_to_gates_in_one_tensor(made: Maker) -> None:
    model = made.model("qwen3_next")
    changed: dict[str, Any] = {}
    for block, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            changed |= {f"blk.{block}.attn_qkv.weight": None, f"blk.{block}.attn_gate.weight": None}
            changed[f"blk.{block}.ssm_in.weight"] = layer.linear_attn.in_proj_qkvz.weight.detach()
    assert_answers(made.file("qwen3_next", model, tensors=changed), model)


@pytest.mark.parametrize("family", ["deepseek_v2 lite", "deepseek_v3"])
def test_deepseek_files_may_have_keys_and_values_in_one_tensor(family: str, made: Maker) -> None:
    model = made.model(family)
    config = model.config
    tensors: dict[str, Any] = {}
    for block, layer in enumerate(model.model.layers):
        tensors |= {f"blk.{block}.attn_k_b.weight": None, f"blk.{block}.attn_v_b.weight": None}
        tensors[f"blk.{block}.attn_kv_b.weight"] = layer.self_attn.kv_b_proj.weight.detach()
    keys = {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    assert_answers(made.file(family, model, keys=keys, tensors=tensors), model)


GROUPS = {"expert_group_count": None, "expert_group_used_count": None}


def test_groups_of_experts_without_a_key_are_those_of_known_models(made: Maker) -> None:
    unknown = made.file("deepseek_v3", made.model("deepseek_v3"), keys=GROUPS)
    with pytest.raises(ConfigError, match=r"no key deepseek2\.expert_group_count") as caught:
        config_of(unknown)
    assert caught.value.hint is not None
    assert HINT in caught.value.hint


def test_deepseek_v2_lite_is_known_by_its_blocks_and_experts(made: Maker) -> None:
    changes = {"num_hidden_layers": 27, "n_routed_experts": 64, "moe_intermediate_size": 2}
    model = made.model("deepseek_v2 lite", **changes)
    config = config_of(made.file("deepseek_v2 lite", model, keys=GROUPS))
    assert (config.n_group, config.topk_group, config.topk_method) == (1, 1, "greedy")


@pytest.mark.parametrize("keys", [{"expert_weights_norm": True}, {"expert_gating_func": 3}])
def test_routing_of_deepseek_v2_that_transformers_lacks_is_refused(keys: dict[str, Any], made: Maker) -> None:
    path = made.file("deepseek_v2", made.model("deepseek_v2"), keys=keys)
    with pytest.raises(ConfigError, match=rf"deepseek2\.{next(iter(keys))}") as caught:
        config_of(path)
    assert caught.value.hint == HINT


def test_a_tied_head_of_falcon_h1_is_refused_for_its_scale_is_unknown(made: Maker) -> None:
    path = made.file("falcon_h1", made.model("falcon_h1"), tensors={"output.weight": None})
    with pytest.raises(ConfigError, match=r"output\.weight") as caught:
        config_of(path)
    assert caught.value.hint == HINT


def test_a_number_of_blocks_that_no_model_has_is_refused_at_once(made: Maker) -> None:
    path = made.file("qwen3_5", made.model("qwen3_5"), keys={"block_count": 4_000_000_000})
    with pytest.raises(ConfigError, match="block_count - nextn_predict_layers is 4000000000"):
        config_of(path)


@pytest.mark.parametrize(("name", "values"), [
    ("ssm_a", torch.ones(6)),
    ("attn_gate.weight", torch.ones(47, 32)),
    ("ssm_conv1d.weight", torch.ones(79, 4)),
])  # fmt: skip
def test_tensors_that_fit_no_model_are_refused_by_name(name: str, values: torch.Tensor, made: Maker) -> None:
    path = made.file("qwen3_5", made.model("qwen3_5"), tensors={f"blk.1.{name}": values})
    with pytest.raises(IntegrityError, match=rf"blk\.1\.{name}|linear_attn"):
        opened(path).load_span(0, 2, dtype=torch.float32, device=CPU)


def test_keys_and_values_of_latent_attention_count_as_expanded(made: Maker) -> None:
    model = made.model("deepseek_v3", kv_lora_rank=32, qk_nope_head_dim=32)
    path = made.file("deepseek_v3", model, quantized=GGMLQuantizationType.Q8_0)
    span = opened(path).load_span(0, 1, dtype=torch.float32, device=CPU, packed=True)
    checkpoint = GgufCheckpoint([path], path.parent / "metadata")
    names = [name for name in checkpoint.tensor_names if name.startswith("blk.0.")]
    sizes = checkpoint.sizes(names)
    segments = [
        each
        for module in span.modules()
        if isinstance(module, PackedLinear)
        for each in module.packed.segments
    ]
    padding = sum(each.data.nbytes - each.rows * each.row_bytes for each in segments)
    assert 0 < padding < len(segments) * GROUP * max(each.row_bytes for each in segments)
    assert sizes.in_memory(4) + padding == weight_bytes(span) > sizes.stored_bytes
    assert not sizes.formats
