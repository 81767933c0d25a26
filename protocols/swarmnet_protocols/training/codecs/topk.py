"""The largest values of each chunk, in two bits each (SparseLoCo, arXiv 2508.15706, sections 3 and 4).

A payload is a record for each chunk: four bucket means in bfloat16; the places of the kept values in their chunk,
strictly increasing, 12 bits each, two in three bytes with the first in the high bits; their buckets, 2 bits each, four
a byte with the first in the low bits. A full chunk of 4096 values takes 120 bytes: 15 bits a kept value, 136 times
less than float32.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.codecs.payload import (
    MAX_SCALE,
    MIN_SCALE,
    SCALE_BYTES,
    check_scales,
    check_size,
    read,
    write,
)
from swarmnet_protocols.transport import Buffer

CHUNK = 4096

_KEPT = 64
_BUCKETS = 4
_BUCKET_WIDTH = 6 / _BUCKETS
"""In standard deviations of the values kept: the buckets span six, around their mean."""

_CHUNKS_AT_ONCE = 64
"""Encoded together: enough to be fast, few enough to stay in the processor's cache."""

_MEANS_BYTES = _BUCKETS * SCALE_BYTES

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class TopKCodec:
    """Of every 4096 values the 64 largest in magnitude, the earlier of equals; of a shorter last chunk up to 64.

    Every other value decodes as zero, and a kept one as the mean of its bucket.
    """

    name: str = "topk"
    biased: bool = True

    def encode(self, values: torch.Tensor) -> bytes:
        whole = len(values) // CHUNK * CHUNK
        parts = *torch.split(values[:whole].view(-1, CHUNK), _CHUNKS_AT_ONCE), values[whole:].view(1, -1)
        return b"".join(_encode_chunks(part.contiguous().numpy()) for part in parts if part.numel())

    def decode(self, payload: Buffer, count: int) -> torch.Tensor:
        check_size(payload, self.max_bytes(count), count)
        chunks, short = divmod(count, CHUNK)
        whole_bytes = chunks * _record_bytes(CHUNK)
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
        return chunks * _record_bytes(CHUNK) + (_record_bytes(short) if short else 0)


def _record_sizes(length: int) -> tuple[int, int, int]:
    """Of a chunk of ``length`` values: how many are kept, the bytes of their places, and of their buckets."""
    kept = min(_KEPT, length)
    return kept, -(-kept // 2) * 3, -(-kept // 4)


def _record_bytes(length: int) -> int:
    _, place_bytes, bucket_bytes = _record_sizes(length)
    return _MEANS_BYTES + place_bytes + bucket_bytes


def _encode_chunks(chunks: NDArray[np.float32]) -> bytes:
    """The records of chunks [chunks, length]."""
    count = len(chunks)
    places = _largest(chunks, _record_sizes(chunks.shape[1])[0])
    kept = np.take_along_axis(chunks, places, axis=1).astype(np.float64)
    if not np.isfinite(kept).all():
        raise ValueError("a value is not finite")
    deviations = kept.std(axis=1, keepdims=True)
    # Divided by infinity, equal values all fall into one bucket.
    widths = np.where(deviations > 0, _BUCKET_WIDTH * deviations, np.inf)
    steps = np.floor((kept - kept.mean(axis=1, keepdims=True)) / widths)
    buckets = np.clip(steps + _BUCKETS // 2, 0, _BUCKETS - 1).astype(np.int64)
    slots = (np.arange(count)[:, None] * _BUCKETS + buckets).ravel()
    sizes = np.bincount(slots, minlength=count * _BUCKETS)
    sums = np.bincount(slots, weights=kept.ravel(), minlength=count * _BUCKETS)
    means = _bounded(torch.from_numpy(sums / np.maximum(sizes, 1)))
    means_bytes = np.frombuffer(write(means), dtype=np.uint8).reshape(count, _MEANS_BYTES)
    return np.concatenate((means_bytes, _pack_places(places), _pack_buckets(buckets)), axis=1).tobytes()


def _decode_chunks(records: Bytes, chunks: NDArray[np.float32]) -> None:
    """Write what the records [chunks, record] say into ``chunks``, zeros [chunks, length]."""
    length = chunks.shape[1]
    kept, place_bytes, _ = _record_sizes(length)
    means_bytes, places_bytes, buckets_bytes = np.split(
        records, [_MEANS_BYTES, _MEANS_BYTES + place_bytes], axis=1
    )
    means = read(means_bytes.tobytes(), torch.bfloat16)
    check_scales(means.abs())
    places, buckets = _unpack_places(places_bytes), _unpack_buckets(buckets_bytes)
    if places[:, kept:].any() or buckets[:, kept:].any():
        raise ProtocolViolation("the padding is not zero")
    places, buckets = places[:, :kept], buckets[:, :kept]
    if (places[:, -1] >= length).any() or (np.diff(places, axis=1) <= 0).any():
        raise ProtocolViolation("the places of the kept values are not strictly increasing, or out of range")
    table = means.float().numpy().reshape(len(records), _BUCKETS)
    np.put_along_axis(chunks, places, np.take_along_axis(table, buckets, axis=1), axis=1)


def _largest(chunks: NDArray[np.float32], kept: int) -> Integers:
    """The places [chunks, kept], increasing, of the largest magnitudes; the earliest of those equal to the smallest."""
    count, length = chunks.shape
    # As integers the bits of magnitudes have the order of the magnitudes, and NaNs come last.
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
    """Means as bfloat16 within the bounds of a scale; those under it are zero."""
    rounded = means.clamp(-MAX_SCALE, MAX_SCALE).to(torch.bfloat16)
    return rounded.where(rounded.abs() >= MIN_SCALE, 0)


def _padded(numbers: Integers, multiple: int) -> Integers:
    return np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % multiple)))


def _pack_places(places: Integers) -> Bytes:
    padded = _padded(places, 2)
    first, second = padded[:, 0::2], padded[:, 1::2]
    packed = np.stack((first >> 4, (first & 0xF) << 4 | second >> 8, second & 0xFF), axis=2)
    return packed.astype(np.uint8).reshape(len(places), -1)


def _unpack_places(packed: Bytes) -> Integers:
    triples = packed.astype(np.int64).reshape(len(packed), -1, 3)
    high, middle, low = triples[:, :, 0], triples[:, :, 1], triples[:, :, 2]
    return np.stack((high << 4 | middle >> 4, (middle & 0xF) << 8 | low), axis=2).reshape(len(packed), -1)


_BUCKET_SHIFTS = (0, 2, 4, 6)


def _pack_buckets(buckets: Integers) -> Bytes:
    quads = _padded(buckets, 4).reshape(len(buckets), -1, 4)
    packed: Integers = np.sum(quads << np.array(_BUCKET_SHIFTS), axis=2)
    return packed.astype(np.uint8)


def _unpack_buckets(packed: Bytes) -> Integers:
    quads: Integers = packed.astype(np.int64)[:, :, None] >> np.array(_BUCKET_SHIFTS) & 0x3
    return quads.reshape(len(packed), -1)
