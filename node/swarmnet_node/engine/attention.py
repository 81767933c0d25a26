"""Attention of a packed batch: positions of many sequences in one row, each attending to its own, with a cache or without.

transformers calls :func:`packed_attention` from every layer of every family (``AttentionInterface``); the batch comes to
it through the keyword arguments of the model's forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from swarmnet_node.engine.kv_cache import LayerShape, Prefix, SequenceCache

IMPLEMENTATION = "swarmnet_packed"
"""The name transformers knows this attention by. It has no mask function, so transformers makes no masks for it."""


@dataclass(frozen=True)
class Rule:
    """How a layer attends: what transformers hands to its attention functions."""

    scaling: float | None
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class Batch(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Shapes: query [1, H, T, d], key and value [1, Hkv, T, d]; the result is [1, T, H, d]."""


def register() -> None:
    """Make the packed attention known to transformers; may be called any number of times."""
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers; ``kwargs`` holds the batch under ``packed``."""
    batch: Batch = kwargs["packed"]
    rule = Rule(
        kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux")
    )
    layer: Any = module.layer_idx
    return batch.attend(layer, query, key, value, rule), None


class GeometryProbe:
    """Stands in for a batch to learn what each layer keeps and how it attends, whatever its family."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.layers: list[tuple[LayerShape, Rule]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        self.indices.append(layer)
        self.layers.append((LayerShape(key.shape[1], key.shape[3], value.shape[3]), rule))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


class PackedBatch:
    """New positions of several lanes, laid one after another: ``counts[i]`` of ``lanes[i]``.

    The lanes' first buffers belong to layer ``first_layer``. The lanes have room for the new positions; attending writes
    their keys and values and leaves ``length`` as it is.
    """

    def __init__(
        self, sequences: Sequence[SequenceCache], counts: Sequence[int], *, first_layer: int = 0
    ) -> None:
        self._sequences = sequences
        self._first_layer = first_layer
        self._counts = list(counts)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        if len(self._sequences) == 1:
            return self._attend_sequence(0, layer, (query, key, value), rule).transpose(1, 2)
        parts = zip(*(torch.split(states, self._counts, 2) for states in (query, key, value)), strict=True)
        outputs = [self._attend_sequence(row, layer, part, rule) for row, part in enumerate(parts)]
        return torch.cat(outputs, 2).transpose(1, 2)

    def _attend_sequence(
        self, row: int, layer: int, states: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rule: Rule
    ) -> torch.Tensor:
        query, key, value = states
        sequence, count = self._sequences[row], self._counts[row]
        start, end = sequence.length, sequence.length + count
        keys, values = sequence.layer(layer - self._first_layer)
        keys.narrow(2, start, count).copy_(key)
        values.narrow(2, start, count).copy_(value)
        first = 0 if rule.sliding_window is None else max(0, start + 1 - rule.sliding_window)
        seen_keys, seen_values = keys.narrow(2, first, end - first), values.narrow(2, first, end - first)
        if rule.softcap is not None or rule.sinks is not None:
            mask = self._mask(row, rule.sliding_window) if count > 1 else None
            return _attend_eagerly(query, seen_keys, seen_values, mask, rule)
        if count == 1:
            return _attend_one(query, seen_keys, seen_values, rule.scaling)
        causal = start == 0 and (rule.sliding_window is None or count <= rule.sliding_window)
        return scaled_dot_product_attention(
            query,
            seen_keys,
            seen_values,
            attn_mask=None if causal else self._mask(row, rule.sliding_window),
            is_causal=causal,
            scale=rule.scaling,
            enable_gqa=True,
        )

    def _mask(self, row: int, sliding_window: int | None) -> torch.Tensor:
        """Which of the keys from the first visible one on each new position sees: [count, keys]."""
        if (row, sliding_window) not in self._masks:
            sequence, count = self._sequences[row], self._counts[row]
            first = 0 if sliding_window is None else max(0, sequence.length + 1 - sliding_window)
            positions = torch.arange(first, sequence.length + count, device=sequence.geometry.device)
            self._masks[row, sliding_window] = _causal(positions[-count:], positions, sliding_window)
        return self._masks[row, sliding_window]


class SequenceBatch:
    """Whole sequences, laid one after another: ``counts[i]`` positions of the i-th. Keeps nothing; gradients flow through.

    Each layer, the first being ``first_layer``, has a prefix that every sequence begins with, or none has.
    """

    def __init__(
        self, counts: Sequence[int], prefixes: Sequence[Prefix] = (), *, first_layer: int = 0
    ) -> None:
        self._counts = list(counts)
        self._prefixes = prefixes
        self._first_layer = first_layer

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        states = (query, key, value)
        prefix = self._prefixes[layer - self._first_layer] if self._prefixes else None
        if len(set(self._counts)) == 1:  # sequences of one length are the rows of a batch
            rows = (len(self._counts), self._counts[0], -1)
            query, key, value = (each.reshape(each.shape[1], *rows).transpose(0, 1) for each in states)
            return _attend_sequences(query, key, value, prefix, rule).transpose(1, 2).flatten(0, 1)[None]
        parts = zip(*(torch.split(each, self._counts, 2) for each in states), strict=True)
        outputs = [_attend_sequences(query, key, value, prefix, rule) for query, key, value in parts]
        return torch.cat(outputs, 2).transpose(1, 2)


def _attend_sequences(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefix: Prefix | None, rule: Rule
) -> torch.Tensor:
    """Shapes: query [B, H, T, d], key and value [B, Hkv, T, d]; the result is [B, H, T, d]."""
    count = query.shape[2]
    if prefix is not None:
        key, value = (
            torch.cat([first.expand(len(query), -1, -1, -1), states], 2)
            for first, states in zip(prefix, (key, value), strict=True)
        )
    total = key.shape[2]
    eager = rule.softcap is not None or rule.sinks is not None
    causal = total == count and (rule.sliding_window is None or count <= rule.sliding_window)
    mask = None
    if eager or not causal:
        positions = torch.arange(total, device=query.device)
        mask = _causal(positions[-count:], positions, rule.sliding_window)
    if eager:
        return _attend_eagerly(query, key, value, mask, rule)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=rule.scaling, enable_gqa=True
    )


def _attend_eagerly(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rule: Rule
) -> torch.Tensor:
    """Attention with capped scores or sinks, which the fused kernel does not have. ``mask`` [queries, keys]: what sees what."""
    rows, heads, count, size = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, count, size)
    scores = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    scores = scores * (size**-0.5 if rule.scaling is None else rule.scaling)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if rule.sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        sinks = rule.sinks.to(scores.dtype).reshape(1, keys.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return (weights.to(values.dtype) @ values.unsqueeze(2)).reshape(rows, heads, count, -1)


def _causal(queries: torch.Tensor, keys: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Which keys [k] each query [q] sees, both given by their positions: [q, k]."""
    mask = keys[None, :] <= queries[:, None]
    if sliding_window is not None:
        mask &= keys[None, :] > queries[:, None] - sliding_window
    return mask


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """One new position sees every key. Heads that share keys become queries of one head, so nothing is repeated."""
    heads = query.shape[1]
    grouped = query.reshape(1, keys.shape[1], -1, query.shape[3])
    return scaled_dot_product_attention(grouped, keys, values, scale=scaling).reshape(1, heads, 1, -1)
