"""Who comes to a round, and the roster that it gives: what they are, and how they travel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.training.rates import Measured
from swarmnet_protocols.training.terms import MAX_MEMBERS, Member
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.wire import workers_pb2 as pb

MAX_ADDRESSES = 16
MAX_BYTES_PER_S = 1e12
MAX_ID = 128
MAX_WEIGHT = 1e12
MAX_EXCHANGES = 1 << 62


@dataclass(frozen=True)
class Candidate(Member):
    """A worker that wants to be in a round."""

    exchanges: int = 0
    """Number of the newest exchange it took part in."""


@dataclass(frozen=True)
class Roster:
    """The members of one round, in the order of peer ids."""

    round: int
    exchange: int
    """Number of the exchange that follows: a round may take several, and each has a number of its own."""
    members: tuple[Candidate, ...]

    def slot(self, peer: PeerId) -> int:
        """The place of a member: its share of the data in the next round."""
        return [member.peer for member in self.members].index(peer)


def member_to_wire(member: Candidate) -> pb.Member:
    return pb.Member(
        id=member.peer,
        addresses=member.addresses[:MAX_ADDRESSES],
        weight=member.weight,
        exchanges=member.exchanges,
    )


def member_from_wire(member: pb.Member) -> Candidate:
    if not 0 <= member.weight <= MAX_WEIGHT:
        raise ProtocolViolation("a member's weight is out of range")
    if member.exchanges >= MAX_EXCHANGES:
        raise ProtocolViolation("not a member")
    return Candidate(
        _peer(member.id),
        tuple(member.addresses[:MAX_ADDRESSES]),
        weight=member.weight,
        exchanges=member.exchanges,
    )


def _peer(id: str) -> PeerId:
    if not 0 < len(id) <= MAX_ID:
        raise ProtocolViolation("not a peer id")
    return PeerId(id)


def _rate(bytes_per_s: float) -> float:
    if not 0 < bytes_per_s <= MAX_BYTES_PER_S:
        raise ProtocolViolation(f"a link of {bytes_per_s:g} bytes a second")
    return bytes_per_s


def measured_to_wire(measured: Measured) -> list[pb.Measured]:
    newest = list(measured.items())[-MAX_MEMBERS:]
    return [pb.Measured(id=peer, bytes_per_s=min(rate, MAX_BYTES_PER_S)) for peer, rate in newest]


def measured_from_wire(measured: Sequence[pb.Measured]) -> Measured:
    return {_peer(each.id): _rate(each.bytes_per_s) for each in measured[:MAX_MEMBERS]}


def roster_to_wire(roster: Roster) -> pb.Roster:
    return pb.Roster(
        round=roster.round,
        members=map(member_to_wire, roster.members),
        exchange=roster.exchange,
        bytes_per_s=[member.bytes_per_s for member in roster.members],
    )


def roster_from_wire(wire: pb.Roster, *, round: int, me: PeerId) -> Roster:
    if not len(wire.members) == len(wire.bytes_per_s) <= MAX_MEMBERS:
        raise ProtocolViolation("a roster has a rate for every member, and not too many of either")
    members = tuple(
        replace(member_from_wire(member), bytes_per_s=_rate(rate))
        for member, rate in zip(wire.members, wire.bytes_per_s, strict=True)
    )
    peers = [member.peer for member in members]
    if peers != sorted(set(peers)):
        raise ProtocolViolation("the members of a roster are in order, and none twice")
    if wire.round != round or me not in peers:
        raise ProtocolViolation("the roster of another round")
    if not max(member.exchanges for member in members) < wire.exchange <= MAX_EXCHANGES:
        raise ProtocolViolation("the number of an exchange is later than any before")
    return Roster(wire.round, wire.exchange, members)
