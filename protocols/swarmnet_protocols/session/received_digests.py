"""Digests of the positions that a hop received. No I/O.

An audit uses them to check whether the upstream hop sent the values that it reports. Only the first
positions of each sequence are digested. Outputs at a position do not depend on later positions, so
an audit can recompute the first positions without the rest.
"""

import hashlib

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.net.limits.resources import Reservation, ResourceLimitReached
from swarmnet_protocols.session.steps import Step
from swarmnet_protocols.session.wire_tensors import encode_tensor

MAX_DIGEST_POSITIONS = 256
"""Most positions of a sequence that are digested, and that an audit asks for."""
DIGEST_BYTES = hashlib.sha256().digest_size


def digest(values: Array) -> bytes:
    """Return the SHA-256 over the SHA-256 of each position of an array [P, D].

    The values must already be rounded to the wire format.
    """
    return hashlib.sha256(_position_digests(values)).digest()


def _position_digests(values: Array) -> bytes:
    _, payload = encode_tensor(values)
    size = len(payload) // max(1, len(values))
    return b"".join(
        hashlib.sha256(payload[start : start + size]).digest() for start in range(0, len(payload), size)
    )


class ReceivedDigests:
    """Digests of the first ``MAX_DIGEST_POSITIONS`` positions of each sequence of a session."""

    def __init__(self, reservation: Reservation) -> None:
        """Count the digests' bytes in ``reservation``, and drop all digests at its limit."""
        self._reservation = reservation
        self._sequences: dict[int, bytes] | None = {}

    def add(self, step: Step) -> None:
        """Add the positions of an applied step."""
        if self._sequences is None:
            return
        before = dict(self._sequences)
        for row, values in zip(step.rows, step.split(), strict=True):
            if row.start < MAX_DIGEST_POSITIONS:
                kept = before.get(row.source, b"")[: row.start * DIGEST_BYTES]
                added = _position_digests(values[: MAX_DIGEST_POSITIONS - row.start])
                self._sequences[row.sequence] = kept + added
            elif row.source != row.sequence:
                self._sequences[row.sequence] = before.get(row.source, b"")
        try:
            self._reservation.resize(sum(map(len, self._sequences.values())))
        except ResourceLimitReached:
            self._sequences = None
            self._reservation.resize(0)

    def forget(self) -> None:
        """Drop all positions and start again."""
        self._sequences = {}
        self._reservation.resize(0)

    def digest(self, sequence: int, count: int) -> bytes:
        """Return ``digest`` of the first ``count`` positions; empty if they are unknown."""
        known = (self._sequences or {}).get(sequence, b"")[: count * DIGEST_BYTES]
        if count < 1 or len(known) < count * DIGEST_BYTES:
            return b""
        return hashlib.sha256(known).digest()
