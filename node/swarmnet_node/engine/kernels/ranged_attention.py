"""Attention of a whole batch over ranges of one buffer of keys and values, in one call.

On CUDA in 16 bits, this is torch's variable-length attention (``torch.nn.attention.varlen``,
FlashAttention-2, Dao, 2023). Elsewhere, and with capped scores or sinks, the ranges are gathered
into padded keys and values for torch's ordinary attention. Then each sequence may have only one
query.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from swarmnet_node.engine.kernels.backend import AttentionRule, Ranges

MAX_FUSED_HEAD = 256
"""The largest head size of FlashAttention-2."""
PADDING_SHARE = 4
"""Largest ratio of padded to actual keys for one call with padding. Beyond it, one call for each
sequence is faster."""


def is_fused(query: torch.Tensor, values: torch.Tensor, rule: AttentionRule) -> bool:
    """Return whether torch has a fused kernel for such tensors. The kernel takes several queries of
    a sequence."""
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and values.shape[-1] == size <= MAX_FUSED_HEAD
        and size % 8 == 0
        and rule.softcap is None
        and rule.sinks is None
        and varlen_attention() is not None
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def is_worth_padding(lengths: Sequence[int]) -> bool:
    """Return whether attention with padding is faster than one sequence at a time, for these
    lengths."""
    return len(lengths) > 1 and max(lengths) * len(lengths) <= PADDING_SHARE * sum(lengths)


def fused_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ranges: Ranges, rule: AttentionRule
) -> torch.Tensor:
    """Run ``Backend.ranged_attention`` where ``is_fused`` holds.

    A sequence's output is the same to the bit whatever other sequences are in the batch.
    """
    varlen_attn = varlen_attention()
    if varlen_attn is None:
        raise RuntimeError("this version of torch has no variable-length attention over a cache")
    outputs: torch.Tensor = varlen_attn(
        query,
        keys,
        values,
        ranges.first_queries,
        ranges.starts,  # the starts of sequences; ``seqused_k`` has their lengths
        ranges.most_queries,
        ranges.longest,
        scale=rule.scaling,
        window_size=_window(ranges, rule),
        enable_gqa=True,
        seqused_k=ranges.lengths,
        num_splits=1,  # with more, the order of a sum would depend on the other sequences
    )
    return outputs


def padded_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ranges: Ranges, rule: AttentionRule
) -> torch.Tensor:
    """Run ``Backend.ranged_attention`` for one query of each sequence, on any device."""
    positions, lengths = torch.arange(ranges.longest, device=query.device)[None], ranges.lengths[:, None]
    index = ranges.starts[:-1, None] + _own_positions(positions, lengths)
    visible = positions < lengths
    if rule.sliding_window is not None:
        visible = visible & (positions >= lengths - rule.sliding_window)
    padded_keys, padded_values = keys[index].transpose(1, 2), values[index].transpose(1, 2)
    count, heads, size = query.shape
    if rule.softcap is not None or rule.sinks is not None:
        outputs = attention_with_scores(
            query[:, :, None], padded_keys, padded_values, rule, visible[:, None, None, None]
        )
        return outputs[:, :, 0]
    # Heads that share keys become queries of one head, so that no key is repeated.
    grouped = query.reshape(count, keys.shape[1], -1, size)
    outputs = functional.scaled_dot_product_attention(
        grouped, padded_keys, padded_values, attn_mask=visible[:, None, None], scale=rule.scaling
    )
    return outputs.reshape(count, heads, -1)


def attention_with_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: AttentionRule,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with capped scores or sinks, which torch's fused attention lacks."""
    rows, heads, count, size = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, count, size)
    scores = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    scores = scores * (size**-0.5 if rule.scaling is None else rule.scaling)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if rule.sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        sinks = rule.sinks.to(scores.dtype).reshape(1, keys.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return (weights.to(values.dtype) @ values.unsqueeze(2)).reshape(rows, heads, count, -1)


def _window(ranges: Ranges, rule: AttentionRule) -> tuple[int, int]:
    """Return how many keys before and after its own a query sees. -1 means all.

    A single query is the last position, and needs no mask.
    """
    if rule.sliding_window is not None:
        return rule.sliding_window - 1, 0
    return (-1, -1) if ranges.most_queries == 1 else (-1, 0)


def _own_positions(positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Clamp positions to the last one of each sequence.

    Otherwise a weight of 0 would meet another sequence's value, such as infinity, and give NaN.
    """
    return torch.minimum(positions, lengths - 1)


@cache
def varlen_attention() -> Any:
    """Return torch's variable-length attention over a cache. None if this version of torch lacks
    it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"seqused_k", "num_splits", "window_size", "enable_gqa"} <= set(known) else None
