"""Adapters that PEFT puts into a swarm model are found for upload to hosts; adapters that hosts
cannot apply are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, DynamicCache

from swarmnet_client.model.client_adapter import ClientAdapter, prefix_tensors
from swarmnet_client.model.placeholders import stand_ins
from swarmnet_client.model.remote_blocks import RemoteBlocks
from swarmnet_protocols.errors import ConfigError
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, save_tiny
from tests.unit.protocols.models.test_models import load

CPU = torch.device("cpu")


def hollow(directory: Path, family: str = "llama-untied") -> Any:
    return load(save_tiny(family, directory / "model"), directory).load_local_layers(
        lambda layers: stand_ins(layers, CPU), dtype=torch.float32, device=CPU
    )


@pytest.fixture
def model(tmp_path: Path) -> Any:
    return hollow(tmp_path)


def config(**options: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
        | options
    )


def randomised(peft_model: Any) -> Any:
    """Set the parameters of an adapter as after some training, so that it is not the identity."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.1, generator=generator)
    return peft_model


def found(model: Any) -> dict[str, torch.Tensor]:
    return ClientAdapter.of(model.model.layers, {}).tensors()


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
        },
    ],
    ids=["plain", "patterns"],
)
def test_a_pair_is_what_peft_adds_to_the_layer(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    ours = hollow(tmp_path, family)
    targets = {"target_modules": ["q_proj", "v_proj", "o_proj"]}
    tuned = randomised(get_peft_model(ours, config(**targets, **options)))
    tuned.save_pretrained(tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    plain: Any = PeftModel.from_pretrained(whole, tmp_path / "adapter")

    tensors = found(ours)
    count = 0
    for name, module in plain.named_modules():
        if hasattr(module, "lora_A"):
            short = name.split("layers.")[1]
            product = tensors[f"{short}.up"] @ tensors[f"{short}.down"]
            assert_near(product, module.get_delta_weight("default"))
            count += 1
    assert len(tensors) == 2 * count == 2 * 3 * ours.config.num_hidden_layers


def test_only_what_is_active_is_found(model: Any) -> None:
    tuned = randomised(get_peft_model(model, config(target_modules=["q_proj"])))
    tuned.add_adapter("second", config(r=2, lora_alpha=1, target_modules=["q_proj", "v_proj"]))
    randomised(tuned)
    first = found(model)
    assert {name.split(".", 1)[1] for name in first} == {"self_attn.q_proj.down", "self_attn.q_proj.up"}

    tuned.base_model.set_adapter(["default", "second"])
    both = found(model)
    assert both["3.self_attn.q_proj.down"].shape == (6, 32)
    module = model.model.layers[3].self_attn.q_proj
    assert_near(
        both["3.self_attn.q_proj.up"] @ both["3.self_attn.q_proj.down"],
        module.get_delta_weight("default") + module.get_delta_weight("second"),
    )
    assert both["3.self_attn.v_proj.down"].shape == (2, 32)

    with tuned.disable_adapter():
        assert found(model) == {}
    tuned.unload()
    assert found(model) == {}


def test_gradients_reach_the_parameters_of_peft(model: Any) -> None:
    randomised(get_peft_model(model, config()))
    sum(tensor.sum() for tensor in found(model).values()).backward()  # type: ignore[union-attr]
    module = model.model.layers[0].mlp.down_proj
    assert torch.equal(module.lora_A.default.weight.grad, torch.ones(4, 48))
    assert torch.equal(module.lora_B.default.weight.grad, torch.full((32, 4), 3.0))


def refuse_dropout(model: Any) -> Any:
    return get_peft_model(model, config(lora_dropout=0.1)).train()


def with_adapter_names(model: Any) -> Any:
    tuned = get_peft_model(model, config())
    tuned.base_model.model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: None)
    return tuned


def with_trained_weights(model: Any) -> Any:
    tuned = get_peft_model(model, config())
    model.requires_grad_(True)
    return tuned


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a variant": (lambda model: get_peft_model(model, config(alora_invocation_tokens=[1])), "ALora"),
    "LoRA's bias": (
        lambda model: get_peft_model(model, config(lora_bias=True, target_modules="all-linear")),
        "lora_bias",
    ),
    "dropout": (refuse_dropout, "lora_dropout=0"),
    "another method": (
        lambda model: get_peft_model(model, IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
        "not LoRA",
    ),
    "hooks": (with_adapter_names, "adapter_names"),
    "weights of the blocks": (with_trained_weights, "bias='none'"),
}


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*")
@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_hosts_cannot_serve_are_refused(case: str, model: Any) -> None:
    make, message = REFUSED[case]
    make(model)
    with pytest.raises(ConfigError, match=message):
        found(model)


def test_experts_that_are_no_linear_modules_are_refused(tmp_path: Path) -> None:
    model = hollow(tmp_path, "mixtral")
    get_peft_model(model, config(target_modules=None, target_parameters=["experts.gate_up_proj"]))
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts.*linear"):
        found(model)


def test_blocks_in_another_order_are_refused(model: Any) -> None:
    model.model.layers = torch.nn.ModuleList([*model.model.layers[1:], model.model.layers[0]])
    with pytest.raises(ConfigError, match="its place among the blocks"):
        found(model)


def test_dropout_does_not_matter_in_evaluation(model: Any) -> None:
    refuse_dropout(model).eval()
    assert found(model)


@pytest.mark.parametrize("safe", [True, False])
def test_merging_is_refused(safe: bool, model: Any) -> None:
    tuned = randomised(get_peft_model(model, config()))
    with pytest.raises(ConfigError, match="merge"):
        tuned.merge_and_unload(safe_merge=safe)


def test_copies_of_blocks_modules_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="cannot read, copy"):
        get_peft_model(model, config(modules_to_save=["o_proj"]))


@pytest.mark.parametrize(
    "options", [{"init_lora_weights": "olora"}, {"use_dora": True}], ids=["OLoRA", "DoRA"]
)
def test_methods_that_need_the_weights_of_blocks_are_refused(options: dict[str, Any], model: Any) -> None:
    with pytest.raises(ConfigError, match="hosts"):
        get_peft_model(model, config(**options))


def test_an_adapter_is_made_once_for_each_version_of_the_parameters(model: Any) -> None:
    tuned = randomised(get_peft_model(model, config()))
    blocks = RemoteBlocks(None, None, None, None)  # type: ignore[arg-type]  # none is used

    def adapter() -> Any:
        return blocks.adapter(ClientAdapter.of(model.model.layers, {}))

    first = adapter()
    assert adapter() is first
    with torch.no_grad():
        model.model.layers[4].mlp.down_proj.lora_B.default.weight[0, 0] += 1
    changed = adapter()
    assert changed is not first
    assert changed.part(4, 5).hash != first.part(4, 5).hash
    assert changed.part(0, 4).hash == first.part(0, 4).hash
    with tuned.disable_adapter():
        assert adapter() is None


# ---- prefixes ----------------------------------------------------------------------------------


def prefix_cache(model: Any, rows: int = 2) -> DynamicCache:
    tuned = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    cache: DynamicCache = tuned.get_prompt(rows)
    return cache


@pytest.mark.parametrize("family", ["llama-untied", "gemma3", "qwen3"])
def test_a_prefix_of_peft_becomes_keys_and_values_of_every_block(family: str, tmp_path: Path) -> None:
    model = hollow(tmp_path, family)
    size = getattr(model.config, "head_dim", None) or 8
    tuned = get_peft_model(
        model,
        PrefixTuningConfig(
            num_virtual_tokens=3, task_type="CAUSAL_LM", token_dim=2 * size, num_attention_heads=2
        ),
    )
    tensors = prefix_tensors(tuned.get_prompt(2), model.config)
    assert len(tensors) == 10
    assert tensors["4.prefix.value"].shape == (2, 3, size)
    sum(tensor.sum() for tensor in tensors.values()).backward()  # type: ignore[union-attr]
    (parameter,) = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_a_prefix_that_is_not_every_rows_is_refused(model: Any) -> None:
    cache = prefix_cache(model)
    with torch.no_grad():
        cache.layers[3].keys = cache.layers[3].keys.clone()
        cache.layers[3].keys[1, 0, 0, 0] += 1
    with pytest.raises(ConfigError, match="rows differ"):
        prefix_tensors(cache, model.config)


def test_a_cache_that_is_no_prefix_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="past_key_values"):
        prefix_tensors(DynamicCache(), model.config)
    cache = prefix_cache(model)
    cache.layers[2].values = cache.layers[2].values[:, :, :2]
    with pytest.raises(ConfigError, match=r"values of block 2 are \[2, 2, 8\]"):
        prefix_tensors(cache, model.config)
    del cache.layers[4]
    with pytest.raises(ConfigError, match="4 blocks"):
        prefix_tensors(cache, model.config)
