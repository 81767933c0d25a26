"""The end of a round between an origin and one worker of a later stage.

1. The origin lists the microbatches that the worker counts. The worker answers which
   microbatches it lacks.
2. When stage 0 has ended its exchange, the origin says which origins count, and their tokens.
3. The stream stays open until the worker's stage has committed the round. Meanwhile the list may
   change, because workers fail.
"""

from collections.abc import Collection, Mapping

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training import MAX_WORKERS
from swarmnet_protocols.training.pipeline.ledger import StepEnd
from swarmnet_protocols.training.pipeline.microbatches import peer_from_wire
from swarmnet_protocols.wire import pipeline_pb2 as pb

ToWorker = TypedStream[pb.StepRequest, pb.StepReply]
ToOrigin = TypedStream[pb.StepReply, pb.StepRequest]

MAX_TOKENS = 1 << 40
"""Most tokens of a round."""


def listing(job: bytes, round: int, listed: Mapping[int, int]) -> pb.StepRequest:
    return pb.StepRequest(
        listing=pb.Listing(job=job, round=round, numbers=listed.keys(), tokens=listed.values())
    )


def listing_from_wire(wire: pb.Listing, *, job: bytes, count: int, most: int) -> dict[int, int]:
    """Parse a listing: microbatch → predicted tokens.

    ``count``: microbatches of a batch; ``most``: tokens of a microbatch. Raises
    ``ProtocolViolation``.
    """
    listed = dict(zip(wire.numbers, wire.tokens, strict=False))
    if wire.job != job or not len(listed) == len(wire.numbers) == len(wire.tokens) <= count:
        raise ProtocolViolation("the listing of another job, or one that names a microbatch twice")
    if any(number >= count or tokens > most for number, tokens in listed.items()):
        raise ProtocolViolation("a listing out of range")
    return listed


def missing_from_wire(wire: pb.Listed, listed: Mapping[int, int]) -> set[int]:
    """Parse the answer to a listing. Raises ``ProtocolViolation``."""
    missing = set(wire.missing)
    if not missing <= listed.keys():
        raise ProtocolViolation("a worker that misses what it does not count")
    return missing


def end_to_wire(end: StepEnd) -> pb.StepRequest:
    return pb.StepRequest(end=pb.StepEnd(origins=end.origins, tokens=end.tokens))


def end_from_wire(wire: pb.StepEnd) -> StepEnd:
    """Parse the end of a round in stage 0. Raises ``ProtocolViolation``."""
    if wire.tokens > MAX_TOKENS:
        raise ProtocolViolation("a round of too many tokens")
    return StepEnd(peers_from_wire(wire.origins), wire.tokens)


def peers_from_wire(wire: Collection[str]) -> tuple[PeerId, ...]:
    """Parse an ordered list of peers. Raises ``ProtocolViolation``."""
    if len(wire) > MAX_WORKERS or list(wire) != sorted(set(wire)):
        raise ProtocolViolation("peers must be ordered, each once")
    return tuple(map(peer_from_wire, wire))
