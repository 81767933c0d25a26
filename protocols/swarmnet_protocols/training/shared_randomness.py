"""Random directions that every machine draws alike, any part of them alone: a bit of a counter-based generator each."""

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
"""Signs of one counter: the bits of four words."""
_CHUNK_BLOCKS = 1 << 12
"""Blocks at a time, so that the intermediates stay in the cache."""


def philox4x32(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Philox4x32-10 of ``counters`` [4, n] under ``key``: [4, n], all 32-bit words in uint64.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
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
    """values <- values + scale z in place, float32 [n] on any device, ``scale`` taken as float32.

    z is elements [start, start + n) of the sequence of random signs that ``seed`` and ``stream`` name. Element i is bit i % 32 of
    word i // 32 % 4 of the Philox block i // 128: 0 for 1 and 1 for -1. So z is exact, and the sum is one IEEE addition: the
    same bits on every machine. z is never held whole.

    Raises ``ValueError`` unless the seed is a 64-bit and each of ``stream`` a 32-bit number.
    """
    end = start + len(values)
    if not 0 <= seed < UINT32_END**2 or not all(0 <= word < UINT32_END for word in stream):
        raise ValueError(f"seed {seed} or stream {stream} out of range")
    if not 0 <= start <= end <= UINT32_END**2:
        raise ValueError(f"no elements [{start}, {end})")
    of_byte = _signs_of_bytes().mul_(scale).to(values.device)
    last = -(-end // _BLOCK)
    for block in range(start // _BLOCK, last, _CHUNK_BLOCKS):
        drawn = _random_bytes(seed, stream, block, min(block + _CHUNK_BLOCKS, last)).to(values.device)
        signs = of_byte.index_select(0, drawn.int()).flatten()
        offset = block * _BLOCK
        first, stop = max(start, offset), min(end, offset + len(signs))
        values[first - start : stop - start] += signs[first - offset : stop - offset]


def _signs_of_bytes() -> torch.Tensor:
    """[256, 8] float32: the signs that the bits of each byte stand for, the lowest bit first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


def _random_bytes(seed: int, stream: tuple[int, int], first: int, last: int) -> torch.Tensor:
    """The 16 bytes of each block [first, last), uint8: its four words, the lowest byte first."""
    blocks = np.arange(first, last, dtype=np.uint64)
    counters = np.empty((4, len(blocks)), dtype=np.uint64)
    counters[0] = blocks & _LOW
    counters[1] = blocks >> _HALF
    counters[2:] = np.array(stream, dtype=np.uint64)[:, None]
    words = philox4x32(counters, (seed % UINT32_END, seed // UINT32_END))
    return torch.from_numpy(np.ascontiguousarray(words.T.astype("<u4")).view(np.uint8).reshape(-1))
