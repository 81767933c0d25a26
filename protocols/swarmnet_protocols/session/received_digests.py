"""What a hop can say of the positions it received: digests that show whether it is what its upstream sent. No I/O.

The first positions of every lane are enough: what a hop computes at a position depends on none that come after it.
"""

import hashlib

import torch

from swarmnet_protocols.net.resources import Reservation, ResourceLimitReached
from swarmnet_protocols.session.steps import Step, encode_tensor

MAX_DIGEST_POSITIONS = 256
"""Positions of a lane that a hop is asked for at most."""
DIGEST_BYTES = hashlib.sha256().digest_size


def digest(values: torch.Tensor) -> bytes:
    """What stands for a CPU tensor [P, D] as it goes over the wire: 32 bytes."""
    return hashlib.sha256(_each(values)).digest()


def _each(values: torch.Tensor) -> bytes:
    _, payload = encode_tensor(values)
    size = len(payload) // max(1, len(values))
    return b"".join(
        hashlib.sha256(payload[start : start + size]).digest() for start in range(0, len(payload), size)
    )


class ReceivedDigests:
    """Digests of the first positions of every lane, ``MAX_DIGEST_POSITIONS`` at most. Their bytes are held in ``room``; without room it has none."""

    def __init__(self, room: Reservation) -> None:
        self._room = room
        self._sequences: dict[int, bytes] | None = {}

    def add(self, step: Step) -> None:
        """Note a step that was applied."""
        if self._sequences is None:
            return
        before = dict(self._sequences)
        for row, values in zip(step.rows, step.split(), strict=True):
            if row.start < MAX_DIGEST_POSITIONS:
                kept = before.get(row.source, b"")[: row.start * DIGEST_BYTES]
                self._sequences[row.sequence] = kept + _each(values[: MAX_DIGEST_POSITIONS - row.start])
            elif row.source != row.sequence:
                self._sequences[row.sequence] = before.get(row.source, b"")
        try:
            self._room.resize(sum(map(len, self._sequences.values())))
        except ResourceLimitReached:
            self._sequences = None
            self._room.resize(0)

    def forget(self) -> None:
        """Begin anew."""
        self._sequences = {}
        self._room.resize(0)

    def digest(self, sequence: int, count: int) -> bytes:
        """Of the first ``count`` positions of a lane, as ``digest`` has it. Empty where they are not here."""
        known = (self._sequences or {}).get(sequence, b"")[: count * DIGEST_BYTES]
        if count < 1 or len(known) < count * DIGEST_BYTES:
            return b""
        return hashlib.sha256(known).digest()
