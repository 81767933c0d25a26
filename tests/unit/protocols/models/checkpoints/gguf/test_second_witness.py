"""A gguf file of every family gives llama.cpp's greedy tokens and logits.

``test_families.py`` compares the same files with transformers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.models import resolve
from tests.support.gguf.families import FILES
from tests.support.gguf.witness import WitnessRefusesError, greedy_logits, needs_llama_cpp
from tests.support.gguf.writing import write
from tests.support.models.rounding import NEAR
from tests.support.models.tensor_layers import TensorLayers

CPU = torch.device("cpu")
PROMPTS = (16, 150, 400, 1000)
"""Lengths of prompts. llama.cpp rounds contexts up to multiples of 256 positions."""
NEW_TOKENS = 24
NOT_READ = {"mixtral with a tensor for each expert": "blk.0.ffn_down_exps.weight' not found"}
"""Files that llama.cpp no longer reads, and what it says."""
CHANGES: Mapping[str, Mapping[str, Any]] = {
    # llama.cpp looks for these norms in models of at least 64 blocks, as Command R+ has.
    "cohere with norms of heads": {"num_hidden_layers": 64},
    # llama.cpp scores a group of experts by its best two, as V3 does, and V2 by its best one.
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    # llama.cpp tells from the number of blocks that the Lite models do not compress queries.
    "deepseek_v2 lite": {"num_hidden_layers": 27},
    # llama.cpp ignores the window. It takes the long factors if the context is longer than the
    # original, transformers if the text is.
    "phi3": {"original_max_position_embeddings": 300, "sliding_window": 2048},
}
"""Changes to configs after which llama.cpp computes what transformers computes.

Without them, other factors of Phi-3 gave errors of 2.3e-2, and other experts of DeepSeek V2 6.0e-2
or more.
"""
TABLE_BOUND = 2e-3
"""The limit of errors where llama.cpp looks GELU up in a table of 16-bit numbers. It gave 7e-4."""
GELU = {"gemma2", "gemma3_text", "gemma4", "starcoder2"}

pytestmark = [pytest.mark.thorough, needs_llama_cpp]


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name, folder = request.param, tmp_path_factory.mktemp("file")
    family = FILES[name].family
    family = replace(family, config={**family.config, **CHANGES.get(name, {})})
    reference: Any = getattr(transformers, family.architecture).from_pretrained(
        family.save(folder / "model"), dtype=torch.float32
    )
    return name, write(folder / "model.gguf", FILES[name], reference)


def our_logits(file: Path, prompt: torch.Tensor) -> torch.Tensor:
    model = resolve(str(file), cache_dir=file.parent / "cache")
    local_layers = TensorLayers(model)
    stage = load_stage(model, 0, model.manifest.blocks, dtype=torch.float32, device=CPU)
    sequence, new, found = stage.new_sequence(), prompt, []
    for _ in range(NEW_TOKENS):
        [rows] = stage.forward([(sequence, local_layers.embed(new))])
        found.append(local_layers.logits(rows[-1:])[0])
        new = found[-1].argmax()[None]
    return torch.stack(found)


@pytest.mark.parametrize("length", PROMPTS)
def test_greedy_tokens_and_logits_are_those_of_llama_cpp(file: tuple[str, Path], length: int) -> None:
    name, path = file
    prompt = torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(length))
    if name in NOT_READ:
        with pytest.raises(WitnessRefusesError, match=NOT_READ[name]):
            greedy_logits(path, prompt.tolist(), NEW_TOKENS)
        return
    ours, others = our_logits(path, prompt), greedy_logits(path, prompt.tolist(), NEW_TOKENS)
    assert ours.argmax(-1).tolist() == others.argmax(-1).tolist()
    errors = (ours - others).norm(dim=-1) / others.norm(dim=-1)
    assert errors.max() < (TABLE_BOUND if name in GELU else NEAR)
