"""gguf files with recurrent states, latent attention or routed experts have the answers of their directories."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from swarmnet.paths import default_cache_dir
from swarmnet_client.model.local_layers import LoadOptions, LocalLayers
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints.gguf_file import GgufCheckpoint
from tests.support.gguf_hybrids import FAMILIES, make, write

CPU = torch.device("cpu")
LENGTHS = (16, 150, 1000)
NEW_TOKENS = 24
HINT = "use the model in Hugging Face layout"


@dataclass
class Case:
    model: LocalModel
    local_layers: LocalLayers
    tokens: dict[int, list[int]]
    """Greedy tokens of the directory after prompts of ``LENGTHS`` tokens."""
    logits: dict[int, torch.Tensor]
    """Logits of the directory at the last position of each prompt."""


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(length))


def opened(path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=path.parent / "cache")


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    whole = opened(path).load_whole(dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        found: torch.Tensor = whole(ids).logits[0, -1]
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    made = make(request.param)
    made.save_pretrained(folder / "directory")
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder / "directory", dtype=torch.float32, attn_implementation="eager"
    )
    reference.generation_config.eos_token_id = None
    tokens, logits = {}, {}
    with torch.inference_mode():
        for length in LENGTHS:
            ids = prompt(length)
            found = reference.generate(
                ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
            tokens[length] = found.sequences[0, length:].tolist()
            logits[length] = found.logits[0][0]
    model = opened(write(folder / "model.gguf", request.param, made))
    return Case(model, LocalLayers(model, LoadOptions(torch.float32, CPU)), tokens, logits)


@pytest.mark.matrix
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)], ids=["one-host", "two-hosts", "three-hosts"])
def test_a_file_has_the_tokens_and_logits_of_its_directory(
    case: Case, cuts: tuple[int, ...], length: int
) -> None:
    spans = itertools.pairwise((0, *cuts, case.model.manifest.blocks))
    stages = [Stage.load(case.model, *span, dtype=torch.float32, device=CPU) for span in spans]
    sequences = [stage.new_sequence() for stage in stages]
    tokens: list[int] = []
    new, first = prompt(length)[0], None
    while len(tokens) < NEW_TOKENS:
        rows = case.local_layers.embed(new)
        for stage, sequence in zip(stages, sequences, strict=True):
            [rows] = stage.forward([(sequence, rows)])
        logits = case.local_layers.logits(rows[-1:])[0]
        first = logits if first is None else first
        tokens.append(int(logits.argmax()))
        new = torch.tensor(tokens[-1:])
    assert first is not None
    expected = case.logits[length]
    assert (first - expected).norm() / expected.norm() < 2e-5
    assert tokens == case.tokens[length]


QUANTISED = {"linear_num_value_heads": 8, "hidden_size": 64, "intermediate_size": 64}
QUANTISED |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}


def format_of(name: str) -> GGMLQuantizationType:
    """As llama.cpp gives the tensors of one weight several formats."""
    is_finer = "attn_qkv" in name or "ssm_out" in name
    return GGMLQuantizationType.Q8_0 if is_finer else GGMLQuantizationType.Q4_0


@pytest.mark.parametrize("family", ["qwen35", "qwen3next"])
def test_a_quantised_file_stays_packed_and_equals_its_float32_values(family: str, tmp_path: Path) -> None:
    """Value heads of 8 columns change places within the blocks of 32 weights."""
    made = make(family, **QUANTISED)
    backend = load_backend(default_cache_dir())
    found = []
    for is_expanded in (False, True):
        folder = tmp_path / str(is_expanded)
        folder.mkdir()
        path = write(folder / "a.gguf", family, made, formats=format_of, is_expanded=is_expanded)
        model = opened(path)
        stage = Stage.load(
            model, 0, 4, dtype=torch.float32, device=CPU, backend=backend, packed=not is_expanded
        )
        rows = LocalLayers(model, LoadOptions(torch.float32, CPU)).embed(prompt(40)[0])
        found.append(stage.forward([(stage.new_sequence(), rows)])[0])
        weight = stage._model.layers[0].linear_attn.out_proj.weight
        assert (weight is None) == (not is_expanded)
    assert (found[0] - found[1]).norm() / found[1].norm() < 2e-5


AHEAD = {"nextn.eh_proj.weight": (32, 64), "nextn.enorm.weight": (32,), "attn_norm.weight": (32,)}


@pytest.mark.parametrize("family", ["qwen35", "qwen3next", "glm4moe", "deepseek3"])
def test_blocks_that_predict_further_tokens_are_not_needed(family: str, tmp_path: Path) -> None:
    made, ids = make(family), prompt(20)
    keys: dict[str, Any] = {"block_count": 5, "nextn_predict_layers": 1}
    if family.startswith("qwen"):
        kinds = [kind == "linear_attention" for kind in made.config.layer_types]
        keys["attention.recurrent_layers"] = [*kinds, False]
    ahead = {f"blk.4.{name}": torch.randn(shape) for name, shape in AHEAD.items()}
    path = write(tmp_path / "a.gguf", family, made, keys=keys, tensors=ahead)
    with torch.inference_mode():
        expected = made(ids).logits[0, -1]
    assert (logits_of(path, ids) - expected).norm() / expected.norm() < 2e-5
    lacking = ahead | {"blk.4.nextn.eh_proj.weight": None}
    with pytest.raises(ConfigError, match=r"blk\.4\."):
        opened(write(tmp_path / "b.gguf", family, made, keys=keys, tensors=lacking))


def test_layer_types_follow_the_interval_in_files_without_a_list(tmp_path: Path) -> None:
    made = make("qwen35")
    for interval, types in ((4, "LLLF"), (2, "LFLF")):
        keys = {"attention.recurrent_layers": None, "full_attention_interval": interval}
        path = write(tmp_path / f"{interval}.gguf", "qwen35", made, keys=keys)
        config: Any = GgufCheckpoint([path], tmp_path / "metadata" / str(interval)).config()
        assert "".join(kind[0].upper() for kind in config.layer_types) == types


def test_qwen3_next_files_of_older_converters_have_one_tensor_of_queries_keys_values_and_gates(
    tmp_path: Path,
) -> None:
    made, ids = make("qwen3next"), prompt(20)
    changed: dict[str, Any] = {}
    for block, layer in enumerate(made.model.layers):
        if hasattr(layer, "linear_attn"):
            changed |= {f"blk.{block}.attn_qkv.weight": None, f"blk.{block}.attn_gate.weight": None}
            changed[f"blk.{block}.ssm_in.weight"] = layer.linear_attn.in_proj_qkvz.weight.detach()
    path = write(tmp_path / "a.gguf", "qwen3next", made, tensors=changed)
    with torch.inference_mode():
        expected = made(ids).logits[0, -1]
    assert (logits_of(path, ids) - expected).norm() / expected.norm() < 2e-5


GROUPS = {"expert_group_count": None, "expert_group_used_count": None}


def old_deepseek(made: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and tensors of converters that did not split ``kv_b_proj``."""
    config = made.config
    tensors: dict[str, Any] = {}
    for block, layer in enumerate(made.model.layers):
        tensors |= {f"blk.{block}.attn_k_b.weight": None, f"blk.{block}.attn_v_b.weight": None}
        tensors[f"blk.{block}.attn_kv_b.weight"] = layer.self_attn.kv_b_proj.weight.detach()
    size = config.qk_nope_head_dim + config.qk_rope_head_dim
    keys = {
        "attention.head_count_kv": config.num_attention_heads, "attention.key_length": size,
        "attention.value_length": config.v_head_dim, "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }  # fmt: skip
    return keys, tensors


@pytest.mark.parametrize("family", ["deepseek2-lite", "deepseek3"])
def test_deepseek_files_of_older_converters_have_keys_and_values_in_one_tensor(
    family: str, tmp_path: Path
) -> None:
    made, ids = make(family), prompt(150)
    keys, tensors = old_deepseek(made)
    path = write(tmp_path / "a.gguf", family, made, keys=keys, tensors=tensors)
    with torch.inference_mode():
        expected = made(ids).logits[0, -1]
    assert (logits_of(path, ids) - expected).norm() / expected.norm() < 2e-5


def test_groups_of_experts_that_no_key_tells_are_those_of_known_models(tmp_path: Path) -> None:
    made = make("deepseek3")
    path = write(tmp_path / "a.gguf", "deepseek3", made, keys=GROUPS)
    with pytest.raises(ConfigError, match=r"no key deepseek2\.expert_group_count") as caught:
        opened(path)
    assert caught.value.hint is not None
    assert HINT in caught.value.hint
    lite = make("deepseek2-lite", num_hidden_layers=27, n_routed_experts=64, moe_intermediate_size=2)
    path = write(tmp_path / "b.gguf", "deepseek2-lite", lite, keys=GROUPS)
    config: Any = GgufCheckpoint([path], tmp_path / "metadata").config()
    assert (config.n_group, config.topk_group, config.topk_method) == (1, 1, "greedy")


@pytest.mark.parametrize("keys", [{"expert_weights_norm": True}, {"expert_gating_func": 3}])
def test_routing_that_deepseek_v2_of_transformers_does_not_do_is_refused(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf", "deepseek2", make("deepseek2"), keys=keys)
    with pytest.raises(ConfigError, match=r"deepseek2\." + next(iter(keys))) as caught:
        GgufCheckpoint([path], tmp_path / "metadata").config()
    assert caught.value.hint == HINT


def test_a_tied_head_of_falcon_h1_is_refused_for_its_scale_is_unknown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "falcon-h1", make("falcon-h1"), tensors={"output.weight": None})
    with pytest.raises(ConfigError, match=r"output\.weight") as caught:
        opened(path)
    assert caught.value.hint == HINT


@pytest.mark.parametrize("name", [
    "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "attn_gate.weight", "ssm_out.weight", "post_attention_norm.weight",
])  # fmt: skip
def test_a_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "qwen35", make("qwen35"), tensors={f"blk.1.{name}": None})
    with pytest.raises(IntegrityError, match=r"layers\.0\."):
        opened(path).load_span(1, 2, dtype=torch.float32, device=CPU)


def test_a_number_of_blocks_that_the_tensors_cannot_have_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "qwen35", make("qwen35"), keys={"block_count": 4_000_000_000})
    with pytest.raises(ConfigError, match="block_count less nextn_predict_layers is 4000000000"):
        opened(path)
