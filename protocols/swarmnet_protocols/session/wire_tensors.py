"""Tensors on the wire: their element types, and how activations [P, D] become bytes.

Shapes: P positions, D hidden size. Floating-point types are sent unchanged. The 8-bit type
(``ElementType.INT8``) is blockwise absmax quantisation after Dettmers et al. 2022 ("8-bit
Optimizers via Block-wise Quantization", section 2.1). The largest values travel separately, as in
LLM.int8 (section 3.2), because a few values of residual streams are a thousand times larger than
the rest. Each position is encoded alone. So its bytes depend neither on its neighbours nor on a
replay:

    D int8 codes | a bfloat16 scale for each block of 32 channels
    | the channels of the k outliers, int32 | their values, bfloat16

k is D / 128, rounded up. An outlier's code is 0. The encoding takes 0.28 of float32's bytes. An
ordinary value changes by at most 1/252 of the largest ordinary value of its block. An outlier
changes by at most 1/256 of itself.
"""

import numpy as np

from swarmnet_protocols.arrays import Array, as_float32
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.session.arrays import ElementType, rounded, type_of
from swarmnet_protocols.wire import session_pb2 as pb

BLOCK = 32
"""Channels that share a scale."""
CHANNELS_PER_OUTLIER = 128
LARGEST = 3.3e38
"""Largest magnitude sent in 8 bits. Larger values are cut to it.

Values near the largest float32 would round to infinity in bfloat16, and the receiver would blame
the sender.
"""
_SLOW_NUMBERS = 1 << 17
"""Tensors with at least this many numbers are encoded in a thread. This many take 4 ms.

256 positions of hidden size 4,096 take 28 ms to encode and 12 ms to decode.
"""
_ONE = np.uint16(0x3F80)
"""The number 1 in bfloat16."""


def wire_type(code: int) -> ElementType:
    """Return the element type of a peer's code. Raises ``ProtocolViolation`` if it is unknown."""
    try:
        return ElementType(code)
    except ValueError:
        raise ProtocolViolation(f"unknown dtype {code}") from None


def position_bytes(wire: ElementType, hidden_size: int) -> int:
    """Return the bytes of one position that is sent as ``wire``."""
    if wire is not ElementType.INT8:
        return hidden_size * wire.itemsize
    return hidden_size + 2 * _blocks(hidden_size) + 6 * _outliers(hidden_size)


def is_slow(wire: ElementType, positions: int, hidden_size: int) -> bool:
    """Return whether encoding or decoding ``positions`` would block an event loop for too long."""
    return wire is ElementType.INT8 and positions * hidden_size >= _SLOW_NUMBERS


def encode_tensor(values: Array, wire: ElementType | None = None) -> tuple[pb.Tensor, memoryview]:
    """Return the header and payload of activations [P, D] sent as ``wire``; None: their own type.

    The payload shares the memory of ``values`` if these are contiguous and of the type ``wire``.
    """
    wire = wire or type_of(values)
    header = pb.Tensor(dtype=wire.value, shape=list(values.shape))
    if values.size == 0:
        return header, memoryview(b"")
    sent = _quantize(values) if wire is ElementType.INT8 else np.ascontiguousarray(rounded(values, wire))
    return header, sent.view(np.uint8).data.cast("B")


def decode_tensor(header: pb.Tensor, payload: Buffer, *, positions: int, hidden_size: int) -> Array:
    """Decode a peer's header and payload into activations [positions, hidden_size].

    The payload is in memory and bounded by its frame. No memory is allocated for sizes that the
    header claims. Raises ``ProtocolViolation`` for any other shape or size.
    """
    wire = wire_type(header.dtype)
    _check_shape(header, [positions, hidden_size])
    if len(payload) != positions * position_bytes(wire, hidden_size):
        raise ProtocolViolation(f"{len(payload)} bytes for a tensor of {positions} x {hidden_size} {wire}")
    if positions == 0:
        return np.empty((0, hidden_size), wire.dtype)
    writable = payload if isinstance(payload, bytearray) else bytearray(payload)
    if wire is ElementType.INT8:
        return _dequantize(np.frombuffer(writable, np.uint8).reshape(positions, -1), hidden_size)
    return np.frombuffer(writable, wire.dtype).reshape(positions, hidden_size)


def _check_shape(header: pb.Tensor, expected: list[int]) -> None:
    if list(header.shape) != expected:
        raise ProtocolViolation(f"a tensor of shape {list(header.shape)[:8]} instead of {expected}")


def as_received(values: Array, wire: ElementType) -> Array:
    """Return values [P, D] as the receiver of ``encode_tensor(values, wire)`` decodes them."""
    if wire is not ElementType.INT8:
        return rounded(values, wire)
    return _dequantize(_quantize(values), values.shape[1])


def _quantize(values: Array) -> Array:
    """Encode values [P, D] as uint8 [P, bytes of a position]."""
    positions, hidden_size = values.shape
    count = _outliers(hidden_size)
    exact = np.clip(as_float32(values), -LARGEST, LARGEST)
    channels = np.argpartition(-np.abs(exact), count - 1, axis=1)[:, :count]
    outliers = rounded(np.take_along_axis(exact, channels, 1), ElementType.BFLOAT16)
    np.put_along_axis(exact, channels, 0.0, 1)
    blocks = _in_blocks(exact)
    scales = rounded(np.abs(blocks).max(-1) / np.float32(127), ElementType.BFLOAT16)
    divisors = as_float32(np.where(scales == 0, _ONE, scales))[..., None]
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.rint(blocks / divisors), -127, 127).astype(np.int8)
    parts = (
        codes.reshape(positions, _blocks(hidden_size) * BLOCK)[:, :hidden_size],
        scales,
        channels.astype(np.int32),
        outliers,
    )
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)


def _dequantize(encoded: Array, hidden_size: int) -> Array:
    """Decode the bytes of P positions into float32 [P, D].

    Raises ``ProtocolViolation`` for an outlier outside the position.
    """
    outliers, blocks = _outliers(hidden_size), _blocks(hidden_size)
    ends = np.cumsum([hidden_size, 2 * blocks, 4 * outliers])
    codes, scales, channels, values = map(np.ascontiguousarray, np.split(encoded, ends, axis=1))
    indices = channels.view(np.int32).astype(np.int64)
    if ((indices < 0) | (indices >= hidden_size)).any():
        raise ProtocolViolation(f"an outlier outside the {hidden_size} channels of a position")
    with np.errstate(over="ignore", invalid="ignore"):  # a peer chooses the scales
        scaled = _in_blocks(codes.view(np.int8).astype(np.float32))
        scaled *= as_float32(scales.view(np.uint16))[..., None]
    decoded = np.ascontiguousarray(scaled.reshape(len(encoded), blocks * BLOCK)[:, :hidden_size])
    np.put_along_axis(decoded, indices, as_float32(values.view(np.uint16)), 1)
    return decoded


def _in_blocks(values: Array) -> Array:
    """Return values [P, D] as [P, blocks, BLOCK], padded with zeros."""
    positions, hidden_size = values.shape
    blocks = _blocks(hidden_size)
    padded = np.pad(values, ((0, 0), (0, blocks * BLOCK - hidden_size)))
    return padded.reshape(positions, blocks, BLOCK)


def _blocks(hidden_size: int) -> int:
    return -(-hidden_size // BLOCK)


def _outliers(hidden_size: int) -> int:
    return -(-hidden_size // CHANNELS_PER_OUTLIER)
