"""Ranges of an arena: what a sequence wrote stays its own, whatever grows, ends or moves."""

import random
from typing import Any

import pytest
import torch

from swarmnet_node.engine.caches.cache_arena import SPARE_ROWS, CacheArena
from swarmnet_node.engine.caches.kv_cache import GROWTH_POSITIONS, KVGeometry, LayerShape, SequenceCache

CPU = torch.device("cpu")
SHAPES = (LayerShape(2, 4, 4), LayerShape(1, 4, 8))


def geometry(blocks_of_64: int) -> KVGeometry:
    arena = CacheArena(SHAPES, torch.float32, [CPU] * 2, blocks_of_64 * GROWTH_POSITIONS)
    return KVGeometry(SHAPES, torch.float32, CPU, arena)


def extend(sequence: SequenceCache, count: int, mark: float) -> None:
    """Write ``count`` more positions, each of which contains ``mark`` and its own number."""
    sequence.reserve(sequence.length + count)
    for buffers in sequence.layers:
        for buffer in buffers:
            new = torch.arange(sequence.length, sequence.length + count) + mark
            buffer[0, :, sequence.length : sequence.length + count] = new[None, :, None]
    sequence.length += count


def holds(sequence: SequenceCache, mark: float) -> bool:
    wanted = (torch.arange(sequence.length) + mark)[None, :, None]
    return all(
        bool((buffer[0, :, : sequence.length] == wanted).all())
        for buffers in sequence.layers
        for buffer in buffers
    )


def test_the_memory_of_an_arena_is_allocated_once_and_counted_exactly() -> None:
    shared = geometry(4)
    arena: Any = shared.arena
    buffers = [buffer for layer in arena.buffers for buffer in layer]
    per_position = sum(each[0].nbytes for each in buffers)
    assert (
        shared.bytes_per_position == per_position == KVGeometry(SHAPES, torch.float32, CPU).bytes_per_position
    )
    assert {len(each) for each in buffers} == {4 * GROWTH_POSITIONS + SPARE_ROWS}
    addresses = [each.data_ptr() for each in buffers]
    sequence = SequenceCache(shared)
    extend(sequence, 200, 0.5)
    assert sequence.nbytes == shared.bytes_for(200) == 256 * per_position
    assert [buffer.data_ptr() for layer in arena.buffers for buffer in layer] == addresses


@pytest.mark.parametrize("draw", range(6))
def test_sequences_keep_what_they_wrote_until_every_position_is_used(draw: int) -> None:
    """Random growth, forks, truncation and ends, in an arena that is often full."""
    shared, rng = geometry(8), random.Random(draw)
    alive: dict[int, SequenceCache] = {}
    refused = 0
    for mark in range(0, 200_000, 1000):
        action = rng.random()
        if action < 0.2 and alive:
            del alive[rng.choice(list(alive))]
        elif action < 0.3 and alive:
            twin_of = rng.choice(list(alive))
            twin = None
            try:
                twin = alive[twin_of].fork(rng.randint(0, alive[twin_of].length))
            except torch.OutOfMemoryError:
                refused += 1
            if twin is not None:
                assert holds(twin, twin_of)
                del twin
        elif action < 0.4 and alive:
            sequence = alive[rng.choice(list(alive))]
            sequence.truncate(rng.randint(0, sequence.length))
        else:
            chosen = rng.choice([mark, *alive])
            sequence = alive.get(chosen) or SequenceCache(shared)
            count = rng.randint(1, 130)
            used = sum(each.nbytes for each in alive.values()) - sequence.nbytes * (chosen in alive)
            fits = (
                used + shared.bytes_for(sequence.length + count)
                <= 8 * GROWTH_POSITIONS * shared.bytes_per_position
            )
            needs_more = shared.bytes_for(sequence.length + count) > sequence.nbytes
            if fits or not needs_more:
                extend(sequence, count, chosen)
                alive[chosen] = sequence
            else:
                with pytest.raises(torch.OutOfMemoryError):
                    sequence.reserve(sequence.length + count)
                refused += 1
        assert all(holds(each, own) for own, each in alive.items())
    assert refused


def test_a_sequence_grows_where_it_is_while_what_follows_is_free() -> None:
    shared = geometry(4)
    first = SequenceCache(shared)
    extend(first, 10, 0.0)
    extend(first, 150, 0.0)
    assert first.start == 0
    second = SequenceCache(shared)
    extend(second, 1, 7.0)
    assert second.start == 192
    del first
    extend(second, 100, 7.0)
    assert second.start in {0, 192}
    assert holds(second, 7.0)


def test_a_part_of_a_stage_has_its_own_layers_of_the_arena() -> None:
    shared = geometry(2)
    arena: Any = shared.arena
    part = KVGeometry(SHAPES[1:], torch.float32, CPU, arena, first=1)
    sequence = SequenceCache(part)
    extend(sequence, 3, 5.0)
    assert (len(sequence.layers), sequence.layers[0][1].shape) == (1, (1, 1, 64, 8))
    assert arena.buffers[1][1][:3, 0, 0].tolist() == [5.0, 6.0, 7.0]
    assert sequence.nbytes == 64 * arena.bytes_per_position
