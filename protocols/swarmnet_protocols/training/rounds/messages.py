"""The control messages of a round with their wire form, and the effects of its state machine.

``RoundState.receive`` (round_state.py) takes arriving control messages. The effect ``Send`` carries
outgoing ones. Numbers in received messages are checked against :class:`RoundShape`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net.identity import SIGNATURE_BYTES
from swarmnet_protocols.wire import training_pb2 as pb

HASH_BYTES = 32
MAX_ATTEMPT = 1 << 16
CANDIDATES = 2
"""Most results of one slice that a member reports.

There are two if a reducer was replaced after some members had its result.
"""

Hashes = tuple[bytes, ...]
"""An outcome: the hash of every slice's result (COMMIT), or the empty tuple (DISCARD)."""

DISCARD: Hashes = ()


@dataclass(frozen=True)
class RoundShape:
    """Exclusive upper bounds on the member and slice numbers in the messages of a round."""

    members: int
    slices: int


# ---- control messages ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare:
    """The sender follows the coordinator of attempt ``attempt``.

    If the sender is that coordinator, it asks for a report.
    """

    attempt: int


@dataclass(frozen=True)
class Vote:
    """The sender's only vote in the round.

    ``signature`` covers the round's terms and ``hashes`` (``votes.py``).
    """

    hashes: Hashes
    signature: bytes


@dataclass(frozen=True)
class Report:
    """A report to the coordinator.

    It has the hashes of the sender's results for each slice, and the sender's vote if it has voted.
    """

    held: tuple[tuple[bytes, ...], ...]
    vote: Vote | None


@dataclass(frozen=True)
class Assignment:
    """One slice in a plan.

    - ``reducer``: the member that aggregates the slice.
    - ``chosen``: the hash of the chosen result; b"" while there is none.
    - ``holder``: a member that holds the chosen result.
    """

    reducer: int
    chosen: bytes = b""
    holder: int = 0


@dataclass(frozen=True)
class SlicePlan:
    """The coordinator's assignment of every slice."""

    assignments: tuple[Assignment, ...]


@dataclass(frozen=True)
class Proposal:
    """The outcome for which the coordinator asks the members to vote."""

    hashes: Hashes


@dataclass(frozen=True)
class Decided:
    """The final decision of the round.

    It has an outcome, and the signature of each member that voted for it, in the order of members.
    """

    hashes: Hashes
    votes: tuple[tuple[int, bytes], ...] = ()
    signature: bytes = b""
    """The signature of the member that sends this message."""


@dataclass(frozen=True)
class Accusation:
    """Proof that ``member`` is dishonest: it signed a false decision, or voted for two outcomes."""

    member: int
    decided: Decided | None = None
    votes: tuple[Vote, ...] = ()


@dataclass(frozen=True)
class RequestResult:
    """Asks for the result of ``slice`` with this hash."""

    slice: int
    hash: bytes


@dataclass(frozen=True)
class RequestContribution:
    """Asks for the contribution to ``slice``. The sender has become its reducer."""

    slice: int


Control = (
    Prepare
    | Report
    | SlicePlan
    | Proposal
    | Vote
    | Decided
    | Accusation
    | RequestResult
    | RequestContribution
)


# ---- effects: what a member must do --------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Send a control message to ``member``."""

    member: int
    message: Control


@dataclass(frozen=True)
class SendContribution:
    """Send this member's contribution to ``slice`` to ``member``."""

    member: int
    slice: int


@dataclass(frozen=True)
class SendResult:
    """Send the result of ``slice`` with this hash to ``member``."""

    member: int
    slice: int
    hash: bytes


@dataclass(frozen=True)
class Reduce:
    """Aggregate the contributions of ``members`` to ``slice``.

    Report the result with ``RoundState.hold``.
    """

    slice: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Refute:
    """``member`` is dishonest: take nothing more from it in this round.

    ``reason`` says why. ``is_proven``: there is a proof that convinces others, so the member is
    also excluded from later rounds.
    """

    member: int
    reason: str
    is_proven: bool


@dataclass(frozen=True)
class Finish:
    """The round has ended at this member.

    It is committed (``hashes``), discarded (``DISCARD``) or behind (None).
    """

    hashes: Hashes | None
    reason: str


Effect = Send | SendContribution | SendResult | Reduce | Refute | Finish


# ---- wire form -----------------------------------------------------------------------------------


def encode_control(message: Control) -> pb.ExchangeRequest:
    """Return the wire form of ``message``."""
    match message:
        case Prepare(attempt):
            return pb.ExchangeRequest(prepare=pb.Prepare(attempt=attempt))
        case Report(held, vote):
            entries = [
                pb.Held(slice=index, hash=each) for index, hashes in enumerate(held) for each in hashes
            ]
            return pb.ExchangeRequest(
                report=pb.Report(held=entries, vote=None if vote is None else _vote(vote))
            )
        case SlicePlan(assignments):
            parts = [
                pb.Assignment(reducer=assignment.reducer, chosen=assignment.chosen, holder=assignment.holder)
                for assignment in assignments
            ]
            return pb.ExchangeRequest(plan=pb.Plan(assignments=parts))
        case Proposal(hashes):
            return pb.ExchangeRequest(propose=pb.Proposal(hashes=b"".join(hashes)))
        case Vote():
            return pb.ExchangeRequest(vote=_vote(message))
        case Decided():
            return pb.ExchangeRequest(decided=_decided(message))
        case Accusation(member, decided, proof):
            return pb.ExchangeRequest(
                accusation=pb.Accusation(
                    member=member,
                    decided=None if decided is None else _decided(decided),
                    votes=[_vote(vote) for vote in proof],
                )
            )
        case RequestResult(index, wanted):
            return pb.ExchangeRequest(request_result=pb.RequestResult(slice=index, hash=wanted))
        case RequestContribution(index):
            return pb.ExchangeRequest(request_contribution=pb.RequestContribution(slice=index))


def decode_control(request: pb.ExchangeRequest, shape: RoundShape) -> Control | None:
    """Decode the control message in ``request``; None for a contribution, a result or a hello.

    Raises ``ProtocolViolation`` for a number outside ``shape`` or a hash of the wrong size.
    """
    match request.WhichOneof("kind"):
        case "prepare":
            return Prepare(below(request.prepare.attempt, MAX_ATTEMPT, "attempt"))
        case "report":
            vote = _read_vote(request.report.vote, shape) if request.report.HasField("vote") else None
            return Report(_held(request.report.held, shape), vote)
        case "plan":
            return SlicePlan(_assignments(request.plan.assignments, shape))
        case "propose":
            return Proposal(_hashes(request.propose.hashes, shape))
        case "vote":
            return _read_vote(request.vote, shape)
        case "decided":
            return _read_decided(request.decided, shape)
        case "accusation":
            return _read_accusation(request.accusation, shape)
        case "request_result":
            return RequestResult(
                below(request.request_result.slice, shape.slices, "slice"),
                sized_hash(request.request_result.hash),
            )
        case "request_contribution":
            return RequestContribution(below(request.request_contribution.slice, shape.slices, "slice"))
        case _:
            return None


def below(number: int, limit: int, what: str) -> int:
    """Return ``number``. Raises ``ProtocolViolation`` unless it is in [0, limit)."""
    if not 0 <= number < limit:
        raise ProtocolViolation(f"{what} {number} is not below {limit}")
    return number


def sized_hash(value: bytes, size_bytes: int = HASH_BYTES) -> bytes:
    """Return ``value``. Raises ``ProtocolViolation`` unless it has ``size_bytes``."""
    if len(value) != size_bytes:
        raise ProtocolViolation(f"a hash of {len(value)} bytes")
    return value


def _vote(vote: Vote) -> pb.Vote:
    return pb.Vote(hashes=b"".join(vote.hashes), signature=vote.signature)


def _read_vote(vote: pb.Vote, shape: RoundShape) -> Vote:
    return Vote(_hashes(vote.hashes, shape), sized_hash(vote.signature, SIGNATURE_BYTES))


def _decided(decided: Decided) -> pb.Decided:
    ballots = [pb.Ballot(member=member, signature=signature) for member, signature in decided.votes]
    return pb.Decided(hashes=b"".join(decided.hashes), votes=ballots, signature=decided.signature)


def _read_decided(decided: pb.Decided, shape: RoundShape) -> Decided:
    return Decided(
        _hashes(decided.hashes, shape),
        _ballots(decided.votes, shape),
        sized_hash(decided.signature, SIGNATURE_BYTES),
    )


def _read_accusation(accusation: pb.Accusation, shape: RoundShape) -> Accusation:
    if len(accusation.votes) not in (0, 2):
        raise ProtocolViolation(f"an accusation with {len(accusation.votes)} votes")
    return Accusation(
        below(accusation.member, shape.members, "member"),
        _read_decided(accusation.decided, shape) if accusation.HasField("decided") else None,
        tuple(_read_vote(vote, shape) for vote in accusation.votes),
    )


def _ballots(votes: Sequence[pb.Ballot], shape: RoundShape) -> tuple[tuple[int, bytes], ...]:
    if len(votes) > shape.members:
        raise ProtocolViolation(f"{len(votes)} votes of {shape.members} members")
    return tuple(
        (below(each.member, shape.members, "member"), sized_hash(each.signature, SIGNATURE_BYTES))
        for each in votes
    )


def _hashes(joined: bytes, shape: RoundShape) -> Hashes:
    if len(joined) not in (0, shape.slices * HASH_BYTES):
        raise ProtocolViolation(f"{len(joined)} bytes of hashes for {shape.slices} slices")
    return tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))


def _held(entries: Sequence[pb.Held], shape: RoundShape) -> tuple[tuple[bytes, ...], ...]:
    if len(entries) > CANDIDATES * shape.slices:
        raise ProtocolViolation(f"{len(entries)} results of {shape.slices} slices")
    held: list[tuple[bytes, ...]] = [()] * shape.slices
    for entry in entries:
        held[below(entry.slice, shape.slices, "slice")] += (sized_hash(entry.hash),)
    return tuple(held)


def _assignments(entries: Sequence[pb.Assignment], shape: RoundShape) -> tuple[Assignment, ...]:
    if len(entries) != shape.slices:
        raise ProtocolViolation(f"a plan of {len(entries)} slices, not {shape.slices}")
    return tuple(
        Assignment(
            below(entry.reducer, shape.members, "member"),
            sized_hash(entry.chosen) if entry.chosen else b"",
            below(entry.holder, shape.members, "member"),
        )
        for entry in entries
    )
