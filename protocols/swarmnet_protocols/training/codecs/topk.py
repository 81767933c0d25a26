"""Top-k sparsification: sends the 64 largest of every 4096 values with two bits each.

SparseLoCo, arXiv 2508.15706, sections 3 and 4. A payload is one record per chunk:

1. Four bucket means in bfloat16.
2. The indices of the kept values in the chunk, strictly increasing, in Elias-Fano coding (Elias,
   JACM 21(2), 1974). First come the low six bits of each index. Then comes a bitmap: bit ``index //
   64 + i`` is set for the i-th kept value.
3. The bucket of each kept value, 2 bits.

Bits fill bytes from the lowest. A full chunk takes 88 bytes: 11 bits per kept value, 186 times less
than float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.codecs.payload import (
    MAX_SCALE,
    MIN_SCALE,
    SCALE_BYTES,
    check_scales,
    check_size,
    read,
    write,
)

CHUNK = 4096

_KEPT = 64
_BUCKETS = 4
_BUCKET_WIDTH = 6 / _BUCKETS
"""Width of a bucket in standard deviations of the kept values.

The buckets span six deviations around the mean.
"""

_CHUNKS_AT_ONCE = 64
"""Chunks encoded at a time. More would leave the processor's cache."""

_MEANS_BYTES = _BUCKETS * SCALE_BYTES
_LOW_BITS = 6
_BUCKET_BITS = 2

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TopKCodec:
    """Keeps the 64 values of largest magnitude in every chunk of 4096.

    Of equal values the earlier counts. A shorter last chunk keeps up to 64. A kept value decodes as
    the mean of its bucket, every other value as zero.
    """

    name: str = "topk"
    biased: bool = True
    sparse: bool = True

    def encode(self, values: torch.Tensor) -> bytes:
        whole = len(values) // CHUNK * CHUNK
        parts = *torch.split(values[:whole].view(-1, CHUNK), _CHUNKS_AT_ONCE), values[whole:].view(1, -1)
        return b"".join(_encode_chunks(part.contiguous().numpy()) for part in parts if part.numel())

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        check_size(payload, self.max_bytes(count), count)
        chunks, short = divmod(count, CHUNK)
        whole_bytes = chunks * _Record(CHUNK).size_bytes
        data = read(payload, torch.uint8).numpy()
        values = np.zeros(count, dtype=np.float32)
        if chunks:
            whole = values[: chunks * CHUNK].reshape(chunks, CHUNK)
            _decode_chunks(data[:whole_bytes].reshape(chunks, -1), whole)
        if short:
            _decode_chunks(data[whole_bytes:].reshape(1, -1), values[chunks * CHUNK :].reshape(1, -1))
        return torch.from_numpy(values)

    def max_bytes(self, count: int) -> int:
        chunks, short = divmod(count, CHUNK)
        return chunks * _Record(CHUNK).size_bytes + (_Record(short).size_bytes if short else 0)


@dataclass(frozen=True)
class _Record:
    """The layout of the record of a chunk of ``length`` values."""

    length: int

    @property
    def kept(self) -> int:
        return min(_KEPT, self.length)

    @property
    def bitmap_bits(self) -> int:
        return (self.length - 1 >> _LOW_BITS) + self.kept

    @property
    def field_bytes(self) -> tuple[int, ...]:
        """Bytes of the means, the low bits, the bitmap and the buckets."""
        bits = self.kept * _LOW_BITS, self.bitmap_bits, self.kept * _BUCKET_BITS
        return _MEANS_BYTES, *(-(-each // 8) for each in bits)

    @property
    def size_bytes(self) -> int:
        return sum(self.field_bytes)


def _encode_chunks(chunks: NDArray[np.float32]) -> bytes:
    """Encode chunks [chunks, length] as records."""
    count = len(chunks)
    record = _Record(chunks.shape[1])
    indices = _largest(chunks, record.kept)
    kept = np.take_along_axis(chunks, indices, axis=1).astype(np.float64)
    if not np.isfinite(kept).all():
        raise ValueError("a value is not finite")
    deviations = kept.std(axis=1, keepdims=True)
    # Equal values have deviation zero. Divided by infinity, all fall into one bucket.
    widths = np.where(deviations > 0, _BUCKET_WIDTH * deviations, np.inf)
    steps = np.floor((kept - kept.mean(axis=1, keepdims=True)) / widths)
    buckets = np.clip(steps + _BUCKETS // 2, 0, _BUCKETS - 1).astype(np.int64)
    slots = (np.arange(count)[:, None] * _BUCKETS + buckets).ravel()
    sizes = np.bincount(slots, minlength=count * _BUCKETS)
    sums = np.bincount(slots, weights=kept.ravel(), minlength=count * _BUCKETS)
    means = _bounded(torch.from_numpy(sums / np.maximum(sizes, 1)))
    means_bytes = np.frombuffer(write(means), dtype=np.uint8).reshape(count, _MEANS_BYTES)
    low = _pack(indices & (1 << _LOW_BITS) - 1, _LOW_BITS)
    columns = means_bytes, low, _bitmap(indices, record), _pack(buckets, _BUCKET_BITS)
    return np.concatenate(columns, axis=1).tobytes()


def _decode_chunks(records: Bytes, chunks: NDArray[np.float32]) -> None:
    """Decode records [chunks, record] into ``chunks`` [chunks, length], which holds zeros."""
    record = _Record(chunks.shape[1])
    means_bytes, low, bitmap, buckets_bytes = np.split(records, np.cumsum(record.field_bytes[:-1]), axis=1)
    means = read(means_bytes.tobytes(), torch.bfloat16)
    check_scales(means.abs())
    indices = _high_parts(bitmap, record) << _LOW_BITS | _unpack(low, _LOW_BITS, record.kept)
    buckets = _unpack(buckets_bytes, _BUCKET_BITS, record.kept)
    if (indices[:, -1] >= record.length).any() or (np.diff(indices, axis=1) <= 0).any():
        raise ProtocolViolation("the indices of the kept values are not strictly increasing, or out of range")
    table = means.float().numpy().reshape(len(records), _BUCKETS)
    np.put_along_axis(chunks, indices, np.take_along_axis(table, buckets, axis=1), axis=1)


def _largest(chunks: NDArray[np.float32], kept: int) -> Integers:
    """Return the increasing indices [chunks, kept] of the largest magnitudes.

    Of equal magnitudes the earliest counts.
    """
    count, length = chunks.shape
    # The bits of non-negative floats, read as integers, have the same order. NaNs come last.
    magnitudes = np.abs(chunks).view(np.int32)
    smallest = np.partition(magnitudes, length - kept, axis=1)[:, length - kept]
    found = np.flatnonzero(magnitudes >= smallest[:, None])
    rows = found // length
    tied = magnitudes.ravel()[found] == smallest[rows]
    ties = np.bincount(rows[tied], minlength=count)
    wanted_ties = kept - np.bincount(rows[~tied], minlength=count)
    rank = np.cumsum(tied) - (np.cumsum(ties) - ties)[rows]
    chosen: Integers = found[~tied | (rank <= wanted_ties[rows])]
    return np.reshape(chosen % length, (count, kept))


def _bounded(means: torch.Tensor) -> torch.Tensor:
    """Return means as bfloat16, clamped to the bounds of a scale.

    Means below ``MIN_SCALE`` become zero.
    """
    rounded = means.clamp(-MAX_SCALE, MAX_SCALE).to(torch.bfloat16)
    return rounded.where(rounded.abs() >= MIN_SCALE, 0)


def _bitmap(indices: Integers, record: _Record) -> Bytes:
    """Return the Elias-Fano bitmap of increasing indices [chunks, kept]."""
    bits = np.zeros((len(indices), record.bitmap_bits), dtype=np.uint8)
    np.put_along_axis(bits, (indices >> _LOW_BITS) + np.arange(record.kept), 1, axis=1)
    return np.packbits(bits, axis=1, bitorder="little")


def _high_parts(bitmap: Bytes, record: _Record) -> Integers:
    bits = _checked_bits(bitmap, record.bitmap_bits)
    if (bits.sum(axis=1) != record.kept).any():
        raise ProtocolViolation(f"a bitmap of indices does not have {record.kept} bits set")
    found: Integers = np.flatnonzero(bits) % record.bitmap_bits
    return found.reshape(len(bitmap), record.kept) - np.arange(record.kept)


def _pack(numbers: Integers, width: int) -> Bytes:
    """Pack numbers [chunks, k] below 2 ** ``width`` into ``width`` bits each."""
    bits = np.unpackbits(numbers.astype(np.uint8)[:, :, None], axis=2, count=width, bitorder="little")
    return np.packbits(bits.reshape(len(numbers), -1), axis=1, bitorder="little")


def _unpack(packed: Bytes, width: int, count: int) -> Integers:
    bits = _checked_bits(packed, count * width).reshape(len(packed), count, width)
    return np.packbits(bits, axis=2, bitorder="little")[:, :, 0].astype(np.int64)


def _checked_bits(packed: Bytes, count: int) -> Bytes:
    """Return the first ``count`` bits of each row.

    Raises ``ProtocolViolation`` if another bit is set.
    """
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    if bits[:, count:].any():
        raise ProtocolViolation("the padding is not zero")
    return bits[:, :count]
