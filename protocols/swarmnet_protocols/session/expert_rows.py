"""Rows that a host sends to a peer with routed experts, and the outputs that come back.

1. The host of a block computes the router.
2. Each peer that has some of the chosen experts gets their rows once, with the indexes of each
   expert's rows.
3. The peer answers with each expert's outputs, in the same order.

Shapes: n rows of hidden size D. An expert computes some of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarmnet_protocols.arrays import as_array, as_tensor
from swarmnet_protocols.directory.expert_announcements import (
    MAX_EXPERT_BLOCKS,
    BlockExperts,
    from_bits,
    is_bits,
    to_bits,
)
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.quantization.packed_experts import Outputs
from swarmnet_protocols.session.arrays import ElementType, are_finite, type_of
from swarmnet_protocols.session.wire_tensors import decode_tensor, encode_tensor, wire_type
from swarmnet_protocols.wire import session_pb2 as pb

MAX_ROWS = 512
"""Most rows of one request: the positions of one forward."""
MAX_PAIRS = 4096
"""Most rows of all experts of a request together. Their indexes must fit into a header."""

TrunkStream = TypedStream[pb.ExpertsRequest, pb.ExpertsReply]
"""A stream as seen by the host that sends rows."""
ExpertsStream = TypedStream[pb.ExpertsReply, pb.ExpertsRequest]
"""A stream as seen by the peer that has experts."""


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Hidden states [n, D], and the ascending row indexes of each expert of a block."""

    block: int
    values: torch.Tensor
    rows: Mapping[int, torch.Tensor]

    @property
    def pairs(self) -> int:
        """Rows of all experts together. The answer has this many rows."""
        return sum(len(rows) for rows in self.rows.values())

    def outputs(self, tensor: torch.Tensor) -> Outputs:
        """Split an answer [pairs, D] into the outputs of each expert."""
        sizes = [len(rows) for rows in self.rows.values()]
        return dict(zip(self.rows, torch.split(tensor, sizes), strict=True))


def split_rows(block: int, hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> Iterator[ExpertRows]:
    """Yield requests for rows of ``hidden`` [T, D], on the CPU. Each answer fits into one message.

    ``rows``: expert → indexes of its rows.
    """
    most = max_pairs(hidden.shape[1], type_of(as_array(hidden)))
    left = most
    taken: dict[int, torch.Tensor] = {}
    for expert in sorted(rows):
        indexes = rows[expert]
        while len(indexes):
            if left == 0:
                yield _request(block, hidden, taken)
                left, taken = most, {}
            taken[expert], indexes = indexes[:left], indexes[left:]
            left -= len(taken[expert])
    if taken:
        yield _request(block, hidden, taken)


def _request(block: int, hidden: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> ExpertRows:
    """Make a request with the rows of ``hidden`` that some expert computes."""
    if len(hidden) == 1:  # a step of one sequence
        return ExpertRows(block, hidden, rows)
    used = torch.unique(torch.cat(list(rows.values())))
    return ExpertRows(
        block,
        hidden[used],
        {expert: torch.searchsorted(used, indexes) for expert, indexes in rows.items()},
    )


def max_pairs(hidden_size: int, type: ElementType) -> int:
    """Return the most rows that one answer can have."""
    return max(1, min(MAX_ROWS, MAX_PAIRS, EXPERTS.max_payload_bytes // (hidden_size * type.itemsize)))


def encode_rows(request: ExpertRows, number: int) -> tuple[pb.Rows, memoryview]:
    """Return the header and payload of a request."""
    tensor, payload = encode_tensor(as_array(request.values))
    experts = [pb.ExpertRows(expert=expert, rows=rows.tolist()) for expert, rows in request.rows.items()]
    return pb.Rows(id=number, block=request.block, tensor=tensor, experts=experts), payload


def decode_rows(message: pb.Rows, payload: Buffer, *, hidden_size: int) -> ExpertRows:
    """Return a request from a peer.

    Raises ``ProtocolViolation`` unless every index names a row, the answer fits into a message, and
    the rows are finite.
    """
    count = message.tensor.shape[0] if message.tensor.shape else 0
    type = wire_type(message.tensor.dtype)
    pairs = sum(len(each.rows) for each in message.experts)
    numbers = [each.expert for each in message.experts]
    if count > MAX_ROWS or pairs > max_pairs(hidden_size, type) or type is ElementType.INT8:
        raise ProtocolViolation(f"{count} rows, {pairs} with experts, are too many for one request")
    if numbers != sorted({*numbers}):
        raise ProtocolViolation("experts that are not ascending")
    for each in message.experts:
        indexes = list(each.rows)
        if not indexes or indexes != sorted({*indexes}) or indexes[-1] >= count:
            raise ProtocolViolation(f"expert {each.expert} has rows that are not among the {count}")
    values = decode_tensor(message.tensor, payload, positions=count, hidden_size=hidden_size)
    if not are_finite(values):
        raise ProtocolViolation("rows that are not finite")
    rows = {each.expert: torch.tensor(list(each.rows)) for each in message.experts}
    return ExpertRows(message.block, as_tensor(values), rows)


def decode_outputs(message: pb.Computed, payload: Buffer, request: ExpertRows, number: int) -> Outputs:
    """Return the outputs in the answer to ``request`` with this number.

    Infinity and NaN pass: large rows may have caused them, so the peer is not to blame. Raises
    ``ProtocolViolation`` for any other answer.
    """
    if message.id != number:
        raise ProtocolViolation(f"an answer to request {message.id} instead of {number}")
    if wire_type(message.tensor.dtype) is not type_of(as_array(request.values)):
        raise ProtocolViolation("outputs of another element type than the rows")
    values = decode_tensor(
        message.tensor, payload, positions=request.pairs, hidden_size=request.values.shape[1]
    )
    return request.outputs(as_tensor(values))


def encode_experts(experts: BlockExperts) -> list[pb.ExpertSet]:
    """Encode the experts of some blocks for ``Rearrange``."""
    return [pb.ExpertSet(block=block, experts=to_bits(experts[block])) for block in sorted(experts)]


def decode_experts(sets: Sequence[pb.ExpertSet]) -> BlockExperts:
    """Invert ``encode_experts``.

    Raises ``ProtocolViolation`` for blocks that do not ascend, or more blocks than announcements
    have.
    """
    blocks = [each.block for each in sets]
    if (
        blocks != sorted({*blocks})
        or len(blocks) > MAX_EXPERT_BLOCKS
        or not all(is_bits(each.experts) for each in sets)
    ):
        raise ProtocolViolation("invalid sets of experts")
    return {each.block: from_bits(each.experts) for each in sets}
