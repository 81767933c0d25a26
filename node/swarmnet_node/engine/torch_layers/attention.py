"""Attention of a packed batch: each new position attends to its own sequence.

A forward computes the products of all its positions at once, so a batch has no sequence dimension:
its hidden states are [T, D]. Only attention has to know the sequence of each position. There are
three kinds of batch:

1. :class:`PackedBatch` for sessions: appends keys and values to each sequence's KV cache, then
   attends to the cache.
2. :class:`RangedBatch` for sessions with caches in an arena, on an accelerator. It does the same
   without a loop over sequences.
3. :class:`SequenceBatch` for passes: whole sequences, without caches and with gradients.

transformers calls :func:`packed_attention` in each layer of every family (``AttentionInterface``).
The batch reaches it as a keyword argument of the model's forward.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import torch

from swarmnet_node.engine.caches.cache_arena import SPARE_ROWS, CacheArena
from swarmnet_node.engine.caches.kv_cache import LayerShape, Prefix, SequenceCache
from swarmnet_node.engine.kernels.backend import AttentionRule, Backend, Ranges
from swarmnet_node.engine.kernels.torch_backend import causal_mask

IMPLEMENTATION = "swarmnet_packed"
"""The name of this attention in transformers. No mask function is registered under it, so
transformers makes no masks."""


class Batch(Protocol):
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Attend. Shapes: query [1, H, T, d], key and value [1, Hkv, T, d], result [1, T, H, d]."""


def register() -> None:
    """Register the packed attention with transformers. Idempotent."""
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
    """Attend as transformers calls it. ``kwargs["packed"]`` is the batch."""
    batch: Batch = kwargs["packed"]
    rule = AttentionRule(
        kwargs.get("scaling"), kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux")
    )
    layer: Any = module.layer_idx
    return batch.attend(layer, query, key, value, rule), None


class GeometryProbe:
    """A batch that computes zeros.

    It records each layer's attention rule, and the shape of its keys and values.
    """

    def __init__(self) -> None:
        self.indices: list[int] = []
        self.layers: list[tuple[LayerShape, AttentionRule]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        self.indices.append(layer)
        self.layers.append((LayerShape(key.shape[1], key.shape[3], value.shape[3]), rule))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


class PackedBatch:
    """``counts[i]`` new positions of ``sequences[i]``, one sequence after another.

    The sequences must have room for the new positions. ``attend`` writes keys and values and leaves
    ``length`` unchanged. The first buffers of the sequences belong to layer ``first_layer``.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceCache],
        counts: Sequence[int],
        backend: Backend,
        *,
        first_layer: int = 0,
    ) -> None:
        self._sequences = sequences
        self._counts = list(counts)
        self._backend = backend
        self._first_layer = first_layer
        self._masks: dict[tuple[int, int | None, torch.device], torch.Tensor] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        if len(self._sequences) == 1:
            return self._attend_sequence(0, layer, (query, key, value), rule).transpose(1, 2)
        parts = zip(*(torch.split(states, self._counts, 2) for states in (query, key, value)), strict=True)
        outputs = [self._attend_sequence(row, layer, part, rule) for row, part in enumerate(parts)]
        return torch.cat(outputs, 2).transpose(1, 2)

    def _attend_sequence(
        self,
        row: int,
        layer: int,
        states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rule: AttentionRule,
    ) -> torch.Tensor:
        query, key, value = states
        sequence, count = self._sequences[row], self._counts[row]
        start, end = sequence.length, sequence.length + count
        keys, values = sequence.layers[layer - self._first_layer]
        keys.narrow(2, start, count).copy_(key)
        values.narrow(2, start, count).copy_(value)
        window = rule.sliding_window
        first = 0 if window is None else max(0, start + 1 - window)
        is_causal = count == 1 or (start == 0 and (window is None or count <= window))
        return self._backend.attention(
            query,
            keys.narrow(2, first, end - first),
            values.narrow(2, first, end - first),
            rule,
            None if is_causal else self._mask(row, window, query.device),
        )

    def _mask(self, row: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
        """Return the mask of a row's new positions over its visible keys: [count, keys].

        The keys start at the first visible one. All layers of a device share the mask.
        """
        if (row, sliding_window, device) not in self._masks:
            sequence, count = self._sequences[row], self._counts[row]
            first = 0 if sliding_window is None else max(0, sequence.length + 1 - sliding_window)
            positions = torch.arange(first, sequence.length + count, device=device)
            self._masks[row, sliding_window, device] = causal_mask(
                positions[-count:], positions, sliding_window
            )
        return self._masks[row, sliding_window, device]


class RangedBatch:
    """New positions of several sequences in an arena.

    One operation writes their keys and values to ``places`` (int64 [T]) of the arena, and
    ``Backend.ranged_attention`` attends to ``ranges``. Unlike ``PackedBatch`` it reads only
    tensors, so it can be recorded.
    """

    def __init__(self, arena: CacheArena, backend: Backend, places: torch.Tensor, ranges: Ranges) -> None:
        self._arena = arena
        self._backend = backend
        self._places = {places.device: places}
        self._ranges = {places.device: ranges}

    @classmethod
    def of(
        cls, arena: CacheArena, backend: Backend, sequences: Sequence[SequenceCache], counts: Sequence[int]
    ) -> "RangedBatch":
        """Make a batch of ``counts[i]`` new positions of ``sequences[i]``.

        The sequences are in the order of their starts, and have room for the positions.
        """
        device = sequences[0].geometry.device
        places = torch.cat(
            [
                torch.arange(each.start + each.length, each.start + each.length + count)
                for each, count in zip(sequences, counts, strict=True)
            ]
        )
        lengths = [each.length + count for each, count in zip(sequences, counts, strict=True)]
        starts = [*(each.start for each in sequences), arena.positions + SPARE_ROWS]
        queries = [0, *accumulate(counts)]
        numbers = torch.tensor([*starts, *lengths, *queries], dtype=torch.int32).to(device)
        of_starts, of_lengths, of_queries = torch.split(numbers, [len(starts), len(lengths), len(queries)])
        ranges = Ranges(of_starts, of_lengths, of_queries, max(counts), max(lengths))
        return cls(arena, backend, places.to(device), ranges)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        keys, values = self._arena.buffers[layer]
        places, ranges = self._on(keys.device)
        keys.index_copy_(0, places, key[0].transpose(0, 1))
        values.index_copy_(0, places, value[0].transpose(0, 1))
        return self._backend.ranged_attention(query[0].transpose(0, 1), keys, values, ranges, rule)[None]

    def _on(self, device: torch.device) -> tuple[torch.Tensor, Ranges]:
        """Return places and ranges on the device of a layer.

        The layers of a stage may be on several devices.
        """
        if device not in self._places:
            [places, ranges] = next(zip(self._places.values(), self._ranges.values(), strict=True))
            self._places[device] = places.to(device)
            self._ranges[device] = replace(
                ranges,
                starts=ranges.starts.to(device),
                lengths=ranges.lengths.to(device),
                first_queries=ranges.first_queries.to(device),
            )
        return self._places[device], self._ranges[device]


class SequenceBatch:
    """Whole sequences, ``counts[i]`` positions of the i-th, one after another.

    There are no caches, but gradients. ``prefixes`` has the keys and values that precede every
    sequence, for each layer from ``first_layer`` on. Without a prefix it is empty.
    """

    def __init__(
        self,
        counts: Sequence[int],
        backend: Backend,
        prefixes: Sequence[Prefix] = (),
        *,
        first_layer: int = 0,
    ) -> None:
        self._counts = list(counts)
        self._backend = backend
        self._prefixes = prefixes
        self._first_layer = first_layer

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        states = (query, key, value)
        prefix = self._prefixes[layer - self._first_layer] if self._prefixes else None
        if len(set(self._counts)) == 1:  # sequences of equal length become rows of one call
            rows = (len(self._counts), self._counts[0], -1)
            query, key, value = (each.reshape(each.shape[1], *rows).transpose(0, 1) for each in states)
            return self._attend(query, key, value, prefix, rule).transpose(1, 2).flatten(0, 1)[None]
        parts = zip(*(torch.split(each, self._counts, 2) for each in states), strict=True)
        outputs = [self._attend(query, key, value, prefix, rule) for query, key, value in parts]
        return torch.cat(outputs, 2).transpose(1, 2)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prefix: Prefix | None,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Attend. Shapes: query [B, H, T, d], key and value [B, Hkv, T, d], result [B, H, T, d]."""
        if prefix is not None:
            key, value = (
                torch.cat([first.expand(len(query), -1, -1, -1), states], 2)
                for first, states in zip(prefix, (key, value), strict=True)
            )
        count, total = query.shape[2], key.shape[2]
        visible = None
        if total != count or (rule.sliding_window is not None and count > rule.sliding_window):
            positions = torch.arange(total, device=query.device)
            visible = causal_mask(positions[-count:], positions, rule.sliding_window)
        return self._backend.attention(query, key, value, rule, visible)
