"""Configs that are published for models that people use are accepted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from swarmnet_protocols.models.checkpoints.safetensors_file import SafetensorsCheckpoint
from swarmnet_protocols.models.partial_model import ModelBuilder, causal_class, decoder_stack, with_blocks

PUBLISHED = Path(__file__).parents[4] / "data" / "published_configs.json"
CONFIGS: dict[str, dict[str, Any]] = {
    name: each["config"] for name, each in json.loads(PUBLISHED.read_text()).items()
}
FEW = 4
"""Blocks that are built."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_accepted(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file({"model.layers.0.input_layernorm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    checkpoint.check_kind()
    config = checkpoint.config()
    decoder_stack(config)
    ModelBuilder(causal_class(config), with_blocks(config, 0, FEW)).empty()
