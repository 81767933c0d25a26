"""What members of a round tell each other to reach one decision, and its wire form. All of it is bounded by :class:`Shape`."""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.wire import training_pb2 as pb

HASH_BYTES = 32
MAX_ATTEMPT = 1 << 16
CANDIDATES = 2
"""Results a member keeps of one slice: two, when an owner was replaced after it had answered some."""

Hashes = tuple[bytes, ...]
"""A proposal: the hash of every slice's result to commit, or nothing to discard."""

DISCARD: Hashes = ()


@dataclass(frozen=True)
class Shape:
    """The sizes every message of a round must keep to."""

    members: int
    slices: int


@dataclass(frozen=True)
class Prepare:
    """There is an attempt of this number: report to its coordinator."""

    attempt: int


@dataclass(frozen=True)
class Vote:
    """Hashes proposed, or accepted, under an attempt."""

    attempt: int
    hashes: Hashes


@dataclass(frozen=True)
class Report:
    """A member's promise to accept nothing below ``attempt``, with the results it holds of every slice and its last vote."""

    attempt: int
    held: tuple[tuple[bytes, ...], ...]
    vote: Vote | None


@dataclass(frozen=True)
class Slot:
    """Who reduces a slice, which result all are to have (b"": none yet), and who has it."""

    owner: int
    chosen: bytes = b""
    holder: int = 0


@dataclass(frozen=True)
class Plan:
    attempt: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Ack:
    """The proposal of this attempt is accepted."""

    attempt: int


@dataclass(frozen=True)
class Decided:
    hashes: Hashes


@dataclass(frozen=True)
class Want:
    """Send me this result."""

    slice: int
    hash: bytes


@dataclass(frozen=True)
class Call:
    """This slice is mine to reduce now: send me your contribution."""

    slice: int


Control = Prepare | Report | Plan | Vote | Ack | Decided | Want | Call


def encode_control(message: Control) -> pb.ExchangeRequest:
    """The wire form of ``message``."""
    match message:
        case Prepare(attempt):
            return pb.ExchangeRequest(prepare=pb.Prepare(attempt=attempt))
        case Report(attempt, held, vote):
            entries = [
                pb.Held(slice=index, hash=each) for index, hashes in enumerate(held) for each in hashes
            ]
            return pb.ExchangeRequest(
                report=pb.Report(attempt=attempt, held=entries, vote=None if vote is None else _vote(vote))
            )
        case Plan(attempt, slots):
            parts = [pb.Slot(owner=slot.owner, chosen=slot.chosen, holder=slot.holder) for slot in slots]
            return pb.ExchangeRequest(plan=pb.Plan(attempt=attempt, slots=parts))
        case Vote():
            return pb.ExchangeRequest(propose=_vote(message))
        case Ack(attempt):
            return pb.ExchangeRequest(ack=pb.Ack(attempt=attempt))
        case Decided(hashes):
            return pb.ExchangeRequest(decided=pb.Decided(hashes=b"".join(hashes)))
        case Want(index, wanted):
            return pb.ExchangeRequest(want=pb.Want(slice=index, hash=wanted))
        case Call(index):
            return pb.ExchangeRequest(call=pb.Call(slice=index))


def decode_control(request: pb.ExchangeRequest, shape: Shape) -> Control | None:
    """The control message in ``request``, every number within ``shape``; None if it is of another kind.

    Raises ``ProtocolViolation``.
    """
    match request.WhichOneof("kind"):
        case "prepare":
            return Prepare(_attempt(request.prepare.attempt))
        case "report":
            report = request.report
            vote = _read_vote(report.vote, shape) if report.HasField("vote") else None
            return Report(_attempt(report.attempt), _held(report.held, shape), vote)
        case "plan":
            return Plan(_attempt(request.plan.attempt), _slots(request.plan.slots, shape))
        case "propose":
            return _read_vote(request.propose, shape)
        case "ack":
            return Ack(_attempt(request.ack.attempt))
        case "decided":
            return Decided(_hashes(request.decided.hashes, shape))
        case "want":
            return Want(below(request.want.slice, shape.slices, "slice"), hash_of_size(request.want.hash))
        case "call":
            return Call(below(request.call.slice, shape.slices, "slice"))
        case _:
            return None


def below(number: int, limit: int, what: str) -> int:
    """``number``, or ``ProtocolViolation`` unless it is in [0, limit)."""
    if not 0 <= number < limit:
        raise ProtocolViolation(f"{what} {number} is not below {limit}")
    return number


def hash_of_size(value: bytes, size_bytes: int = HASH_BYTES) -> bytes:
    """``value``, or ``ProtocolViolation`` unless it has this size: without another, that of a SHA-256."""
    if len(value) != size_bytes:
        raise ProtocolViolation(f"a hash of {len(value)} bytes")
    return value


def _attempt(number: int) -> int:
    return below(number, MAX_ATTEMPT, "attempt")


def _vote(vote: Vote) -> pb.Vote:
    return pb.Vote(attempt=vote.attempt, hashes=b"".join(vote.hashes))


def _read_vote(vote: pb.Vote, shape: Shape) -> Vote:
    return Vote(_attempt(vote.attempt), _hashes(vote.hashes, shape))


def _hashes(joined: bytes, shape: Shape) -> Hashes:
    if len(joined) not in (0, shape.slices * HASH_BYTES):
        raise ProtocolViolation(f"{len(joined)} bytes of hashes for {shape.slices} slices")
    return tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))


def _held(entries: Sequence[pb.Held], shape: Shape) -> tuple[tuple[bytes, ...], ...]:
    if len(entries) > CANDIDATES * shape.slices:
        raise ProtocolViolation(f"{len(entries)} results of {shape.slices} slices")
    held: list[tuple[bytes, ...]] = [()] * shape.slices
    for entry in entries:
        held[below(entry.slice, shape.slices, "slice")] += (hash_of_size(entry.hash),)
    return tuple(held)


def _slots(entries: Sequence[pb.Slot], shape: Shape) -> tuple[Slot, ...]:
    if len(entries) != shape.slices:
        raise ProtocolViolation(f"a plan of {len(entries)} slices, not {shape.slices}")
    return tuple(
        Slot(
            below(entry.owner, shape.members, "member"),
            hash_of_size(entry.chosen) if entry.chosen else b"",
            below(entry.holder, shape.members, "member"),
        )
        for entry in entries
    )
