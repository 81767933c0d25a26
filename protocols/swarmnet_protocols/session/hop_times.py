"""Times of a step on one hop, by the hop's own clock.

Hops report them to a client that records a trace.
"""

import math
from dataclasses import dataclass
from enum import Enum

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.wire import session_pb2 as pb

MAX_S = 1e8
"""Largest time in seconds since a session was opened."""


class Moment(Enum):
    """An event in the life of a step, on a hop or at the client. The time is noted afterwards."""

    RECEIVED = "received"
    """The step's inputs had arrived."""
    STARTED = "started"
    """The step's first forward began."""
    COMPUTED = "computed"
    """The step was computed."""
    TAKEN = "taken"
    """All steps before this one had been sent."""
    ENCODED = "encoded"
    """The step was ready to be sent."""
    SENT = "sent"
    """The step had been handed to the network."""
    ASKED = "asked"
    """The client wanted the step."""
    EMBEDDED = "embedded"
    """The client had the step's embeddings."""
    ANSWERED = "answered"
    """The client had the step's outputs."""


HOP_MOMENTS = (
    Moment.RECEIVED,
    Moment.STARTED,
    Moment.COMPUTED,
    Moment.TAKEN,
    Moment.ENCODED,
    Moment.SENT,
)
"""The moments of a step on a hop, in order."""


@dataclass(frozen=True)
class HopTimes:
    """The times of one step on a hop, in seconds since the session was opened.

    One time for each of ``HOP_MOMENTS``.
    """

    step: int
    at_s: tuple[float, ...]

    @property
    def stay_s(self) -> float:
        """Seconds that the step spent on the hop."""
        return self.at_s[-1] - self.at_s[0]


def encode_times(times: HopTimes) -> pb.Timed:
    fields = {f"{moment.value}_s": at_s for moment, at_s in zip(HOP_MOMENTS, times.at_s, strict=True)}
    return pb.Timed(step=times.step, **fields)


def decode_times(message: pb.Timed) -> HopTimes:
    """Decode the times that a hop reported.

    Raises ``ProtocolViolation`` unless they are finite, in order, and between 0 and ``MAX_S``.
    """
    at_s = tuple(float(getattr(message, f"{moment.value}_s")) for moment in HOP_MOMENTS)
    _check(at_s)
    return HopTimes(message.step, at_s)


def _check(at_s: tuple[float, ...]) -> None:
    if not all(map(math.isfinite, at_s)) or list(at_s) != sorted(at_s):
        raise ProtocolViolation(f"times of a step that are not in order: {at_s}")
    if at_s[0] < 0 or at_s[-1] > MAX_S:
        raise ProtocolViolation(f"times of a step that are out of range: {at_s}")
