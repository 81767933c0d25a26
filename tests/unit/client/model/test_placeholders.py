"""The placeholder layers of a swarm model: they have the names and shapes of the real layers, no
weights, and fail if used as real ones."""

import copy
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from swarmnet_client.model.placeholders import RemoteWeight, stand_ins
from swarmnet_protocols.errors import ConfigError
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, save_tiny
from tests.unit.protocols.models.test_models import load

CPU = torch.device("cpu")


def hollow(family: str, directory: Path) -> Any:
    """A model of the family whose layers are placeholders."""
    return load(save_tiny(family, directory / "model"), directory).load_local_layers(
        lambda layers: stand_ins(layers, CPU), dtype=torch.float32, device=CPU
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return hollow("llama-untied", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_its_own_names_and_shapes(family: str, tmp_path: Path) -> None:
    model = hollow(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == [
        (name, p.shape, p.dtype) for name, p in reference.named_parameters()
    ]
    assert [(n, type(m)) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)] == [
        (n, type(m)) for n, m in reference.named_modules() if isinstance(m, torch.nn.Linear)
    ]
    assert model.config.to_dict() | {"_name_or_path": ""} == reference.config.to_dict() | {
        "_name_or_path": ""
    }
    assert model.name_or_path == ""
    assert not model.training
    with torch.inference_mode():
        expected = model.lm_head(model.model.norm(torch.ones(1, 3, 32)))
        found = model(torch.tensor([[5, 6, 7]]), swarm_call=torch.ones_like, use_cache=False).logits
    if family != "gemma2":  # which caps its logits
        assert_near(found / found[0, 0, 0], expected / expected[0, 0, 0])


def test_eighty_large_layers_take_no_memory() -> None:
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=80, num_key_value_heads=8, **shape)
    with torch.device("meta"):
        layers = LlamaModel(config).layers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = stand_ins(layers, CPU)
    assert sum(parameter.numel() for parameter in made.parameters()) > 65 * 10**9
    made.to(torch.bfloat16).to(CPU)
    assert made[79].mlp.up_proj.weight.dtype == torch.bfloat16
    # KB; the layers alone would be 275 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_state_dict_has_only_local_weights_and_is_loaded_again(llama: Any) -> None:
    state = llama.state_dict()
    assert set(state) == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert llama.load_state_dict(state).missing_keys == []
    del state["lm_head.weight"]
    with pytest.raises(RuntimeError, match="lm_head"):
        llama.load_state_dict(state)


def test_a_placeholder_weight_survives_moving_and_casting(llama: Any) -> None:
    weight = llama.model.layers[2].mlp.up_proj.weight
    llama.to(torch.bfloat16).train().eval()
    assert llama.model.layers[2].mlp.up_proj.weight is weight
    assert isinstance(weight, RemoteWeight)
    assert weight.dtype == torch.bfloat16
    assert weight.untyped_storage().nbytes() == 2
    llama.to(torch.float32)
    assert weight.dtype == torch.float32
    assert not weight.requires_grad


def test_placeholder_weights_cannot_be_read_changed_or_copied(llama: Any) -> None:
    weight = llama.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(ConfigError, match="hosts"):
        weight.data += 1
    with pytest.raises(ConfigError, match="hosts"):
        weight.data = torch.zeros(32, 32)
    with pytest.raises(ConfigError, match="hosts"):
        copy.deepcopy(llama.model.layers[0])
    assert weight.float().isnan().all()
