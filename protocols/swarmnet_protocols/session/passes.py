"""Passes: forwards and backwards of whole sequences through some blocks, for training. Their limits, and how their tensors are sent.

Shapes: P positions of all sequences of a pass together, D hidden size.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.session.wire_tensors import decode_tensor, encode_tensor, position_bytes, wire_dtype
from swarmnet_protocols.wire import session_pb2 as pb

MAX_POSITIONS = 1024
"""Most positions of one pass, including the prefix of each sequence. A step of another client's session may wait for the whole pass."""
MAX_SEQUENCES = 256
"""Most sequences of one pass."""

NextPart = Callable[[], Awaitable[tuple[pb.Part, Buffer]]]
"""Receives the next part of a tensor and its payload."""


def check_counts(counts: Sequence[int]) -> None:
    """Raise ``ProtocolViolation`` unless ``counts`` can be the lengths of a pass's sequences. ``MAX_POSITIONS`` is not checked."""
    if not 1 <= len(counts) <= MAX_SEQUENCES or min(counts) < 1:
        raise ProtocolViolation(f"a pass of {len(counts)} sequences, or one without positions")


def split_tensor(values: torch.Tensor) -> Iterator[tuple[pb.Part, memoryview]]:
    """The messages for a CPU tensor [P, D], each as large as a message may be."""
    for piece in torch.split(values, _positions_in_part(values.shape[1], values.dtype)):
        tensor, payload = encode_tensor(piece)
        yield pb.Part(tensor=tensor), payload


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values of all tensors, in the order of their names: float32 [values, 1]."""
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])[:, None]


def unpack_tensors(packed: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of ``pack_tensors``, for tensors with the names and shapes of ``like``."""
    names = sorted(like)
    parts = torch.split(packed[:, 0], [like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


async def receive_tensor(next_part: NextPart, *, positions: int, hidden_size: int) -> torch.Tensor:
    """A finite tensor [positions, hidden_size] from the messages of ``split_tensor``.

    Memory grows with what has arrived, not with what was announced. Raises ``ProtocolViolation`` for other messages, and what
    ``next_part`` raises.
    """
    pieces = []
    left = positions
    while left:
        part, payload = await next_part()
        count = min(left, _positions_in_part(hidden_size, wire_dtype(part.tensor.dtype)))
        piece = decode_tensor(part.tensor, payload, positions=count, hidden_size=hidden_size)
        if not torch.isfinite(piece).all():
            raise ProtocolViolation("a tensor with values that are not finite")
        pieces.append(piece)
        left -= count
    return torch.cat(pieces)


def _positions_in_part(hidden_size: int, dtype: torch.dtype) -> int:
    return max(1, PASS.max_payload_bytes // position_bytes(dtype, hidden_size))
