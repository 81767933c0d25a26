"""Perplexity of Python's standard library after the blocks of SmolLM2-135M were quantised at load, relative to the same weights in float32.

    python -m tests.bench.perplexity [--tokens 100000] [--precisions int8 int4]

The model's file is Q4_1, which rounding to Q4_1 again would reproduce. So its weights are expanded to float32 and its channels permuted,
hidden ones, those of each MLP and those of each head of values: the model computes the same function, and groups of 32 weights come from many
groups of the file. Prints one JSON object a precision; ``stderr_percent`` is the standard error of the paired difference.
"""

import argparse
import json
import math
import random
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.quantize import PRECISIONS, quantize

WINDOW = 1024
"""Tokens that are scored together, each after those before it."""
LOGITS = 256
"""Positions whose logits are in memory at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    local = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    model: Any = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    permute_channels(model, torch.Generator().manual_seed(0))
    windows = torch.tensor(text(local.tokenizer(), options.tokens)).split(WINDOW)
    expected = losses(model, windows)
    matrices = {
        name: each.detach().clone() for name, each in model.model.layers.named_parameters() if each.dim() == 2
    }
    for precision in options.precisions:
        for name, matrix in matrices.items():
            stored = PackedTensor.of(Format.F32, matrix.view(torch.uint8))
            weight = model.model.layers.get_parameter(name)
            weight.data = quantize(stored, PRECISIONS[precision]).dequantize()
        more = losses(model, windows) - expected
        stderr = more.std().item() / math.sqrt(len(more))
        figures = {
            "perplexity": expected.mean().exp().item(),
            "percent": 100 * math.expm1(more.mean().item()),
            "stderr_percent": 100 * stderr,
        }
        about = {"bench": "perplexity", "precision": precision, "format": PRECISIONS[precision].name}
        about |= {"tokens": len(more)}
        print(json.dumps(about | {name: round(value, 3) for name, value in figures.items()}), flush=True)


def text(tokenizer: Any, count: int) -> list[int]:
    """``count`` tokens of the modules of the standard library, in a random order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    ids: list[int] = []
    while len(ids) < count and files:
        ids += tokenizer(files.pop().read_text(errors="ignore")).input_ids
    return ids[:count]


@torch.inference_mode()
def losses(model: Any, windows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Minus the logarithm of the probability of each token, the first of each window apart."""
    found = []
    for window in windows:
        hidden = model.model(window[None]).last_hidden_state[0, :-1]
        for states, tokens in zip(hidden.split(LOGITS), window[1:].split(LOGITS), strict=True):
            found.append(functional.cross_entropy(model.lm_head(states), tokens, reduction="none"))
    return torch.cat(found).double()


@torch.inference_mode()
def permute_channels(model: Any, generator: torch.Generator) -> None:
    """Permute the channels of a Llama with tied embeddings. The function that it computes stays the same."""
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    hidden = torch.randperm(config.hidden_size, generator=generator)
    _reorder(model.model.embed_tokens, 1, hidden)
    _reorder(model.model.norm, 0, hidden)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _reorder(norm, 0, hidden)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _reorder(linear, 1, hidden)
        for linear in (attention.o_proj, mlp.down_proj):
            _reorder(linear, 0, hidden)
        inner = torch.randperm(config.intermediate_size, generator=generator)
        _reorder(mlp.gate_proj, 0, inner)
        _reorder(mlp.up_proj, 0, inner)
        _reorder(mlp.down_proj, 1, inner)
        of_head = torch.randperm(head_size, generator=generator)
        for module, dim, heads in (
            (attention.v_proj, 0, config.num_key_value_heads),
            (attention.o_proj, 1, config.num_attention_heads),
        ):
            _reorder(module, dim, torch.cat([of_head + head * head_size for head in range(heads)]))


def _reorder(module: Any, dim: int, order: torch.Tensor) -> None:
    module.weight.data = module.weight.index_select(dim, order)


if __name__ == "__main__":
    main()
