"""Shared randomness: random signs and random rounding from a counter-based generator.

They are equal on every machine, and any part can be drawn alone.
"""

import numpy as np
import torch
from numpy.typing import NDArray

UINT32_END = 1 << 32

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(UINT32_END - 1)
_HALF = np.uint64(32)

_BLOCK = 128
"""Signs from one counter value: the bits of four 32-bit words."""
_ROUNDED = 8
"""Elements rounded with one counter value: 16 bits each."""
_CHUNK_BLOCKS = 1 << 12
"""Blocks computed at a time. With more, intermediate results would not fit the processor's
cache."""


def philox4x32(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Compute Philox4x32-10 of ``counters`` [4, n] under ``key``. Returns [4, n].

    All values are 32-bit words in uint64. Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
    as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    words = list(counters)
    for round in range(_ROUNDS):
        keys = [np.uint64((k + round * step) % UINT32_END) for k, step in zip(key, _KEY_STEPS, strict=True)]
        product0, product1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            (product1 >> _HALF) ^ words[1] ^ keys[0],
            product1 & _LOW,
            (product0 >> _HALF) ^ words[3] ^ keys[1],
            product0 & _LOW,
        ]
    return np.stack(words)


def add_signs(values: torch.Tensor, scale: float, seed: int, stream: tuple[int, int], start: int = 0) -> None:
    """Add ``scale`` * z to ``values`` in place: float32 [n] on any device.

    z is elements [start, start + n) of the sequence of random signs given by ``seed`` (64 bits) and
    ``stream`` (two 32-bit numbers). Element i is bit i % 32 of word i // 32 % 4 of Philox block i
    // 128. A bit of 0 means 1 and a bit of 1 means -1.

    ``scale`` is rounded to float32. z is exact and the sum is one IEEE addition, so every machine
    gets the same bits. Only parts of z are in memory. Raises ``ValueError`` for a seed, stream or
    element out of range.
    """
    end = start + len(values)
    if not 0 <= seed < UINT32_END**2 or not all(0 <= word < UINT32_END for word in stream):
        raise ValueError(f"seed {seed} or stream {stream} out of range")
    if not 0 <= start <= end <= UINT32_END**2:
        raise ValueError(f"elements [{start}, {end}) are out of range")
    of_byte = _signs_of_bytes().mul_(scale).to(values.device)
    last = -(-end // _BLOCK)
    for block in range(start // _BLOCK, last, _CHUNK_BLOCKS):
        drawn = _random_bytes(seed, stream, block, min(block + _CHUNK_BLOCKS, last)).to(values.device)
        signs = of_byte.index_select(0, drawn.int()).flatten()
        offset = block * _BLOCK
        first, stop = max(start, offset), min(end, offset + len(signs))
        values[first - start : stop - start] += signs[first - offset : stop - offset]


def round_to_bfloat16(
    values: torch.Tensor, seed: int, stream: tuple[int, int], start: int = 0
) -> torch.Tensor:
    """Round finite float32 ``values`` [n] to bfloat16, up or down at random, without a bias.

    Element i uses bytes 2i and 2i + 1 of the stream. The bits are equal on every machine. Raises
    ``ValueError`` unless ``start`` is a multiple of 8.
    """
    drawn = _random_halves(seed, stream, start, len(values))
    dropped = drawn.to(values.device, torch.int32) & 0xFFFF
    return ((values.view(torch.int32) + dropped) >> 16).to(torch.int16).view(torch.bfloat16)


def random_fractions(seed: int, start: int, count: int) -> torch.Tensor:
    """Return fractions [start, start + count) of the sequence of ``seed``, float32 in (0, 1).

    Fraction i is (b + 1/2) / 65536, where b is bytes 2i and 2i + 1 of stream (0, 0). They are equal
    on every machine. Raises ``ValueError`` unless ``start`` is a multiple of 8.
    """
    drawn = _random_halves(seed, (0, 0), start, count).to(torch.int32) & 0xFFFF
    return (drawn.float() + 0.5) / 65536


def _random_halves(seed: int, stream: tuple[int, int], start: int, count: int) -> torch.Tensor:
    """Return 16 random bits for each of the elements [start, start + count), int16."""
    if start % _ROUNDED:
        raise ValueError(f"start {start} is not a multiple of {_ROUNDED}")
    first, last = start // _ROUNDED, -(-(start + count) // _ROUNDED)
    return _random_bytes(seed, stream, first, last).view(torch.int16)[:count]


def _signs_of_bytes() -> torch.Tensor:
    """Return the signs of the bits of each byte value, lowest bit first: float32 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


def _random_bytes(seed: int, stream: tuple[int, int], first: int, last: int) -> torch.Tensor:
    """Return the bytes of blocks [first, last), 16 each: four little-endian words, uint8."""
    blocks = np.arange(first, last, dtype=np.uint64)
    counters = np.empty((4, len(blocks)), dtype=np.uint64)
    counters[0] = blocks & _LOW
    counters[1] = blocks >> _HALF
    counters[2:] = np.array(stream, dtype=np.uint64)[:, None]
    words = philox4x32(counters, (seed % UINT32_END, seed // UINT32_END))
    return torch.from_numpy(np.ascontiguousarray(words.T.astype("<u4")).view(np.uint8).reshape(-1))
