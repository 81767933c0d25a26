"""A ping measures the delay to a host. The host replies with its blocks, load and coordinate."""

import math
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.coordinates import Coordinate, read_coordinate
from swarmnet_protocols.wire import session_pb2 as pb

PingStream = TypedStream[pb.Ping, pb.Pong]


@dataclass(frozen=True)
class Pong:
    """The checked contents of a pong, and the measured delay."""

    delay_s: float
    """Half the round trip in seconds."""
    queue_s: float
    """Seconds that a step waits in the host's queue, as the host reports."""
    cache_free: float
    """Free share of the host's memory for KV caches, as the host reports.

    1 if the report is out of range.
    """
    busy: float
    """Share of the last seconds in which the host computed, as it reports.

    1 if the report is out of range. At most n / (n + 1) with n open sessions, because one more
    session gets an equal part of the host's time.
    """
    coordinate: Coordinate | None
    manifest: bytes
    """The model that the host names."""
    span: tuple[int, int]
    """The blocks [start, end) that the host names."""


async def answer_pings(stream: TypedStream[pb.Pong, pb.Ping], pong: Callable[[int], pb.Pong]) -> None:
    """Answer each ping with ``pong(nonce)`` until the other side closes the stream."""
    with suppress(StreamEnded):
        while True:
            message, _ = await stream.receive()
            await stream.send(pong(message.nonce))


async def ping(stream: PingStream, rng: random.Random) -> Pong:
    """Ping the host at the other end of a PING stream once.

    Raises ``ProtocolViolation`` if the host answers another ping.
    """
    nonce = rng.getrandbits(63)
    sent_at = loop_time()
    await stream.send(pb.Ping(nonce=nonce))
    pong, _ = await stream.receive()
    if pong.nonce != nonce:
        raise ProtocolViolation(f"{stream.peer} answered another ping")
    return Pong(
        (loop_time() - sent_at) / 2,
        pong.queue_s if 0 <= pong.queue_s < math.inf else 0.0,
        pong.cache_free if 0 <= pong.cache_free <= 1 else 1.0,
        min(pong.busy, pong.sessions / (pong.sessions + 1)) if 0 <= pong.busy <= 1 else 1.0,
        read_coordinate(pong.coordinate),
        pong.manifest,
        (pong.start, pong.end),
    )
