"""Tensors on the wire: their element types, and how activations [P, D] become bytes.

Shapes: P positions, D hidden size. Floating-point types are sent unchanged. The 8-bit type
(``torch.int8`` in this code) is blockwise absmax quantisation after Dettmers et al. 2022 ("8-bit
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

import torch
from torch.nn.functional import pad

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
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

_DTYPES: dict[int, torch.dtype] = {
    pb.DTYPE_FLOAT32: torch.float32,
    pb.DTYPE_BFLOAT16: torch.bfloat16,
    pb.DTYPE_FLOAT16: torch.float16,
    pb.DTYPE_INT8_BLOCKS: torch.int8,
}
_WIRE = {dtype: code for code, dtype in _DTYPES.items()}


def wire_dtype(code: int) -> torch.dtype:
    """Return the element type of a peer's code. Raises ``ProtocolViolation`` if it is unknown."""
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise ProtocolViolation(f"unknown dtype {code}")
    return dtype


def wire_code(dtype: torch.dtype) -> "pb.DType":
    """Return the code of an element type."""
    return _WIRE[dtype]  # type: ignore[return-value]


def decoded_dtype(wire: torch.dtype) -> torch.dtype:
    """Return the dtype of values that were sent as ``wire``."""
    return torch.float32 if wire is torch.int8 else wire


def position_bytes(wire: torch.dtype, hidden_size: int) -> int:
    """Return the bytes of one position that is sent as ``wire``."""
    if wire is not torch.int8:
        return hidden_size * wire.itemsize
    return hidden_size + 2 * _blocks(hidden_size) + 6 * _outliers(hidden_size)


def is_slow(wire: torch.dtype, positions: int, hidden_size: int) -> bool:
    """Return whether encoding or decoding ``positions`` would block an event loop for too long."""
    return wire is torch.int8 and positions * hidden_size >= _SLOW_NUMBERS


def encode_tensor(values: torch.Tensor, wire: torch.dtype | None = None) -> tuple[pb.Tensor, memoryview]:
    """Return the header and payload of a CPU tensor [P, D] sent as ``wire``; None: its own dtype.

    The payload shares the memory of ``values`` if these are contiguous and of the type ``wire``.
    """
    wire = wire or values.dtype
    header = pb.Tensor(dtype=wire_code(wire), shape=list(values.shape))
    if values.numel() == 0:
        return header, memoryview(b"")
    sent = _quantize(values.detach()) if wire is torch.int8 else values.detach().to(wire).contiguous()
    return header, sent.view(torch.uint8).numpy().data.cast("B")


def decode_tensor(header: pb.Tensor, payload: Buffer, *, positions: int, hidden_size: int) -> torch.Tensor:
    """Decode a peer's header and payload into a tensor [positions, hidden_size].

    Its dtype is ``decoded_dtype``. The payload is in memory and bounded by its frame. No memory is
    allocated for sizes that the header claims. Raises ``ProtocolViolation`` for any other shape or
    size.
    """
    wire = wire_dtype(header.dtype)
    _check_shape(header, [positions, hidden_size])
    if len(payload) != positions * position_bytes(wire, hidden_size):
        raise ProtocolViolation(f"{len(payload)} bytes for a tensor of {positions} x {hidden_size} {wire}")
    if positions == 0:
        return torch.empty(0, hidden_size, dtype=decoded_dtype(wire))
    writable = payload if isinstance(payload, bytearray) else bytearray(payload)
    if wire is torch.int8:
        return _dequantize(torch.frombuffer(writable, dtype=torch.uint8).view(positions, -1), hidden_size)
    return torch.frombuffer(writable, dtype=wire).reshape(positions, hidden_size)


def _check_shape(header: pb.Tensor, expected: list[int]) -> None:
    if list(header.shape) != expected:
        raise ProtocolViolation(f"a tensor of shape {list(header.shape)[:8]} instead of {expected}")


def as_received(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """Return values [P, D] as the receiver of ``encode_tensor(values, wire)`` decodes them."""
    if wire is not torch.int8:
        return values.to(wire)
    return _dequantize(_quantize(values), values.shape[1])


def _quantize(values: torch.Tensor) -> torch.Tensor:
    """Encode values [P, D] as uint8 [P, bytes of a position]."""
    hidden_size = values.shape[1]
    exact = values.float().clamp(-LARGEST, LARGEST)
    channels = exact.abs().topk(_outliers(hidden_size), dim=1, sorted=False).indices
    outliers = exact.gather(1, channels).bfloat16()
    blocks = _in_blocks(exact.scatter(1, channels, 0.0))
    scales = (blocks.abs().amax(-1) / 127).bfloat16()
    divisors = torch.where(scales == 0, 1, scales).float()[..., None]
    codes = (blocks / divisors).round().clamp(-127, 127).to(torch.int8).flatten(1)
    parts = (codes[:, :hidden_size].contiguous(), scales, channels.int(), outliers)
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _dequantize(encoded: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """Decode the bytes of P positions into float32 [P, D].

    Raises ``ProtocolViolation`` for an outlier outside the position.
    """
    outliers = _outliers(hidden_size)
    sizes = [hidden_size, 2 * _blocks(hidden_size), 4 * outliers, 2 * outliers]
    codes, scales, channels, values = (
        part.clone(memory_format=torch.contiguous_format) for part in torch.split(encoded, sizes, dim=1)
    )
    indices = channels.view(torch.int32).long()
    if ((indices < 0) | (indices >= hidden_size)).any():
        raise ProtocolViolation(f"an outlier outside the {hidden_size} channels of a position")
    scaled = _in_blocks(codes.view(torch.int8).float()) * scales.view(torch.bfloat16).float()[..., None]
    decoded: torch.Tensor = scaled.flatten(1)[:, :hidden_size]
    return decoded.scatter(1, indices, values.view(torch.bfloat16).float())


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return values [P, D] as [P, blocks, BLOCK], padded with zeros."""
    positions, hidden_size = values.shape
    blocks = _blocks(hidden_size)
    return pad(values, (0, blocks * BLOCK - hidden_size)).view(positions, blocks, BLOCK)


def _blocks(hidden_size: int) -> int:
    return -(-hidden_size // BLOCK)


def _outliers(hidden_size: int) -> int:
    return -(-hidden_size // CHANNELS_PER_OUTLIER)
