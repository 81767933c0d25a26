"""Frequencies of rotary embeddings against those of transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from swarmnet_node.engine.kernels.rotary_embeddings import rotary_embedding

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn with other bounds": {
        **{"factor": 16.0, "original_max_position_embeddings": 256, "beta_fast": 20.0, "beta_slow": 2.0},
        **{"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
    },
    "yarn with a scale": {
        **{"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 0.5},
    },
    "longrope": {
        **{"short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [4.0] * 64},
        "original_max_position_embeddings": 4096,
    },
    "proportional": {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 150_000.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    """Nearly all are equal; torch rounds each operation to float32."""
    parameters = {"rope_type": name.partition(" ")[0], "rope_theta": theta, **SETTINGS[name]}
    config = LlamaConfig(
        **{"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131_072},
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    mine = rotary_embedding(config.rope_parameters, 128, 131_072, is_interleaved=False)
    expected = theirs.inv_freq.double()
    errors = (torch.tensor(mine.frequencies).double() - expected).abs()
    assert (errors <= 2.0**-21 * expected).all()
    assert mine.scale == pytest.approx(float(theirs.attention_scaling), rel=2.0**-21)


def test_settings_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(KeyError):
        rotary_embedding({"rope_type": "spiral", "rope_theta": 1e4}, 128, 2048, is_interleaved=False)


@pytest.mark.parametrize("factor", [0.0, 1.5, 1e12])
def test_more_components_than_a_head_has_are_refused(factor: float) -> None:
    settings = {"rope_theta": 1e4, "partial_rotary_factor": factor}
    with pytest.raises(ValueError, match="of 128 components"):
        rotary_embedding(settings, 128, 2048, is_interleaved=False)
