"""Perplexity of Python's standard library after the blocks of SmolLM2-135M were quantised at load,
relative to the same weights in bfloat16.

    python -m tests.bench.perplexity [--tokens 100000] [--precisions int8 int4] [--channels shuffled]

The model's file is Q4_1, so the grid of the file must not help the rounding. Weights are expanded,
and channels change places, hidden ones, those of each MLP and those of each head of values: the
model computes the same function. ``--channels shuffled`` makes each group of 32 weights from many
groups of the file, ``shifted`` from the halves of two, and ``as they are`` leaves them: that shows
what the grid hides, and is no result. Then they are rounded to bfloat16, as checkpoints have them:
that is the reference. Errors are added to those that the file has, whose own reference is not here.
Activations are float32.

Prints one JSON object for bfloat16 and each precision; ``bits`` are those of a weight,
``stderr_percent`` is the standard error of the paired difference. Progress goes to stderr.
"""

import argparse
import json
import math
import random
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from swarmnet_protocols.quantization.formats import PRECISIONS, Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.quantize import GROUP, quantize

WINDOW = 1024
"""Tokens that are scored together, each after those before it."""
LOGITS = 256
"""Positions whose logits are in memory at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--channels", choices=("shuffled", "shifted", "as they are"), default="shuffled")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    local = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    model: Any = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    permute_channels(model, order_of(options.channels))
    model.to(torch.bfloat16).to(torch.float32)
    windows = torch.tensor(text(local.tokenizer(), options.tokens)).split(WINDOW)
    expected = losses(model, windows, "bf16")
    report("bf16", options.channels, expected, expected, bits=16.0)
    matrices = {
        name: each.detach().clone() for name, each in model.model.layers.named_parameters() if each.dim() == 2
    }
    for precision in options.precisions:
        packed_bytes = 0
        for name, matrix in matrices.items():
            stored = PackedTensor.of(Format.F32, matrix.view(torch.uint8))
            rounded = quantize(stored, PRECISIONS[precision].format_of(name, matrix.shape[1]))
            packed_bytes += rounded.nbytes
            model.model.layers.get_parameter(name).data = rounded.dequantize()
        found = losses(model, windows, precision)
        bits = 8 * packed_bytes / sum(matrix.numel() for matrix in matrices.values())
        report(precision, options.channels, found, expected, bits=bits)


def report(
    precision: str, channels: str, found: torch.Tensor, expected: torch.Tensor, *, bits: float
) -> None:
    """Print the figures of one precision: ``found`` are its losses of each token, ``expected``
    those of the reference."""
    more = found - expected
    figures = {
        "perplexity": found.mean().exp().item(),
        "percent": 100 * math.expm1(more.mean().item()),
        "stderr_percent": 100 * more.std().item() / math.sqrt(len(more)),
        "bits": bits,
    }
    about = {"bench": "perplexity", "precision": precision, "channels": channels, "tokens": len(more)}
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
def losses(model: Any, windows: tuple[torch.Tensor, ...], name: str) -> torch.Tensor:
    """Minus the logarithm of the probability of each token except the first of each window.
    ``name`` is shown with the progress."""
    found = []
    started = time.monotonic()
    for number, window in enumerate(windows, start=1):
        hidden = model.model(window[None]).last_hidden_state[0, :-1]
        for states, tokens in zip(hidden.split(LOGITS), window[1:].split(LOGITS), strict=True):
            found.append(functional.cross_entropy(model.lm_head(states), tokens, reduction="none"))
        left = (time.monotonic() - started) / number * (len(windows) - number)
        print(f"{name}: {number} of {len(windows)} windows, {left:.0f} s left", file=sys.stderr, flush=True)
    return torch.cat(found).double()


def order_of(channels: str) -> Callable[[int], torch.Tensor]:
    """A function from the number of channels to their new order."""
    generator = torch.Generator().manual_seed(0)
    match channels:
        case "shuffled":
            return lambda count: torch.randperm(count, generator=generator)
        case "shifted":
            return lambda count: torch.arange(count).roll(GROUP // 2)
    return torch.arange


@torch.inference_mode()
def permute_channels(model: Any, order: Callable[[int], torch.Tensor]) -> None:
    """Permute the channels of a Llama with tied embeddings. The function that it computes stays the
    same."""
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    hidden = order(config.hidden_size)
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
        inner = order(config.intermediate_size)
        _reorder(mlp.gate_proj, 0, inner)
        _reorder(mlp.up_proj, 0, inner)
        _reorder(mlp.down_proj, 1, inner)
        of_head = order(head_size)
        for module, dim, heads in (
            (attention.v_proj, 0, config.num_key_value_heads),
            (attention.o_proj, 1, config.num_attention_heads),
        ):
            _reorder(module, dim, torch.cat([of_head + head * head_size for head in range(heads)]))


def _reorder(module: Any, dim: int, order: torch.Tensor) -> None:
    module.weight.data = module.weight.index_select(dim, order)


if __name__ == "__main__":
    main()
