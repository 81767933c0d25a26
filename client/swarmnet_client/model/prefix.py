"""The prefix of PEFT's PREFIX_TUNING, which arrives as a KV cache, as tensors for hosts."""

from typing import Any

import torch
from transformers.cache_utils import Cache

from swarmnet_protocols.errors import ConfigError


def tensors_of(cache: Cache, config: Any) -> dict[str, torch.Tensor]:
    """The keys and values [key heads, n, head size] of every block, float32 on the CPU, part of the cache's graph.

    Raises ``ConfigError`` for a cache that is not the same prefix for every row and every block.
    """
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_key_value_heads, cache.get_seq_length(), head_size)
    if len(cache.layers) != config.num_hidden_layers or shape[1] == 0:
        raise _refusal(f"a cache of {len(cache.layers)} blocks and {shape[1]} positions")
    tensors = {}
    for block, layer in enumerate(cache.layers):
        for name, values in (("key", layer.keys), ("value", layer.values)):
            if values is None or tuple(values.shape[1:]) != shape:
                found = None if values is None else list(values.shape[1:])
                raise _refusal(f"its {name}s of block {block} are {found}, not {list(shape)}")
            if not torch.equal(values, values[:1].expand_as(values)):
                raise _refusal("its rows differ")
            tensors[f"{block}.prefix.{name}"] = values[0].to("cpu", torch.float32)
    return tensors


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"past_key_values is neither a cache of this model nor a prefix for it: {why}",
        hint="leave it out, or use PEFT's PREFIX_TUNING",
    )
