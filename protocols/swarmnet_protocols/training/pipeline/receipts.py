"""Receipts: each worker of a chain signs what it computed for a microbatch. Pure.

A receipt has the hashes of four tensors: inputs and outputs, and the gradients of both. It
convicts a liar by itself: whoever has the weights and finds tensors with the hashes of the inputs
and of the outputs' gradient can compute the other two. Nobody can sign it for another worker, so
nobody can be accused of an answer that it did not give.

Receipts travel home with the gradient. Every worker checks the receipts that it gets: the inputs in
each must be the outputs in the one before. An honest worker passes on nothing else. So if receipts
disagree, the worker that sent them is at fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.identity import SIGNATURE_BYTES, public_key_of, verify
from swarmnet_protocols.wire import pipeline_pb2 as pb

HASH_BYTES = 32
LEAST_BITS, MOST_BITS = 8, 24
"""Significant bits of bfloat16 and of float32."""
_DOMAIN = b"swarmnet-receipt-1"
_ACCUSATION = b"swarmnet-accusation-1"


def tensor_hash(data: Buffer) -> bytes:
    """Return the SHA-256 of an encoded tensor."""
    return sha256(data).digest()


@dataclass(frozen=True)
class Receipt:
    """A worker's statement about one microbatch."""

    state: bytes
    """The hash of the stage's state; empty if the worker's weights have changed since."""
    inputs: bytes
    outputs: bytes
    grad_outputs: bytes
    grad_inputs: bytes
    bits: int
    """Significant bits of the numbers that the worker computed with: 24 in float32."""
    signature: bytes = b""

    def signed_bytes(self, subject: bytes) -> bytes:
        """Return the bytes that the worker signs. ``subject`` names job, microbatch and stage."""
        hashes = self.state + self.inputs + self.outputs + self.grad_outputs + self.grad_inputs
        return _DOMAIN + sha256(subject).digest() + bytes([self.bits]) + hashes

    def is_signed(self, subject: bytes, worker: PeerId) -> bool:
        return verify(public_key_of(worker), self.signature, self.signed_bytes(subject))

    def accusation(self, subject: bytes) -> bytes:
        """Return the bytes that a worker signs to say that this receipt is false."""
        return _ACCUSATION + self.signed_bytes(subject)

    def is_accused(self, subject: bytes, accuser: PeerId, signature: bytes) -> bool:
        return verify(public_key_of(accuser), signature, self.accusation(subject))


def check_receipts(
    receipts: Sequence[Receipt],
    workers: Sequence[tuple[PeerId, bytes]],
    *,
    outputs: bytes,
    gradient: bytes,
) -> None:
    """Raise ``ProtocolViolation`` unless these workers have signed receipts that agree.

    ``workers``: the workers in the order of the chain, each with its subject. ``outputs`` and
    ``gradient``: hashes of the tensor that the first worker got, and of its answer.
    """
    if len(receipts) != len(workers):
        raise ProtocolViolation(f"{len(receipts)} receipts of {len(workers)} workers")
    for receipt, (worker, subject) in zip(receipts, workers, strict=True):
        if (receipt.inputs, receipt.grad_inputs) != (outputs, gradient):
            raise ProtocolViolation(f"{worker} got other tensors than the worker before it says")
        if not receipt.is_signed(subject, worker):
            raise ProtocolViolation(f"a receipt that {worker} has not signed")
        outputs, gradient = receipt.outputs, receipt.grad_outputs


def receipts_to_wire(receipts: Sequence[Receipt]) -> pb.Receipts:
    return pb.Receipts(receipts=map(receipt_to_wire, receipts))


def receipt_to_wire(receipt: Receipt) -> pb.Receipt:
    return pb.Receipt(
        state=receipt.state,
        inputs=receipt.inputs,
        outputs=receipt.outputs,
        grad_outputs=receipt.grad_outputs,
        grad_inputs=receipt.grad_inputs,
        bits=receipt.bits,
        signature=receipt.signature,
    )


def receipts_from_wire(wire: pb.Receipts, most: int) -> tuple[Receipt, ...]:
    """Parse at most ``most`` receipts. Raises ``ProtocolViolation``."""
    if len(wire.receipts) > most:
        raise ProtocolViolation("more receipts than workers")
    return tuple(map(receipt_from_wire, wire.receipts))


def receipt_from_wire(wire: pb.Receipt) -> Receipt:
    """Parse a receipt. Raises ``ProtocolViolation`` for hashes of another size."""
    hashes = (wire.inputs, wire.outputs, wire.grad_outputs, wire.grad_inputs)
    sizes = {len(each) for each in hashes} | {len(wire.state) or HASH_BYTES}
    if sizes != {HASH_BYTES} or len(wire.signature) != SIGNATURE_BYTES:
        raise ProtocolViolation("a receipt with a hash or signature of another size")
    if not LEAST_BITS <= wire.bits <= MOST_BITS:
        raise ProtocolViolation("a receipt of an unknown precision")
    return Receipt(wire.state, *hashes, wire.bits, wire.signature)
