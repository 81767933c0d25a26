"""Who comes to a round, and the roster that it gives: what they are, and how they travel. Pure."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.bandwidth import Measured, agreed_rates
from swarmnet_protocols.training.rounds.terms import MAX_MEMBERS, Member
from swarmnet_protocols.wire import workers_pb2 as pb

MAX_ADDRESSES = 16
MAX_BYTES_PER_S = 1e12
MAX_ID = 128
MAX_WEIGHT = 1e12
EXCHANGES_A_ROUND = 1 << 16
"""Numbers that a round has for its exchanges: whoever claims to be far ahead can use up those of one round only."""
MAX_AHEAD = 256
"""A guest may have seen so many more exchanges of a round than whoever gathers it."""
MAX_LEAP = 4096
"""So many more may a roster be ahead of a worker that was not there when the round was tried."""
PLACES_BYTES = 16
"""Of a hash, enough to see whether two are told of the same."""


@dataclass(frozen=True)
class Candidate(Member):
    """A worker that wants to be in a round."""

    exchanges: int = 0
    """Number of the newest exchange it took part in."""


@dataclass(frozen=True)
class Guest:
    """What a worker says to whoever gathers a round that it wants to be in."""

    member: Candidate
    round: int
    state: bytes
    measured: Measured


@dataclass(frozen=True)
class Roster:
    """The members of one round, in the order of peer ids."""

    round: int
    exchange: int
    """Number of the exchange that follows: a round may take several, and each has a number of its own."""
    members: tuple[Candidate, ...]

    @classmethod
    def of(
        cls, round: int, me: Candidate, measured: Measured, guests: Sequence[Guest], max_members: int
    ) -> "Roster":
        """The roster that ``me``, who gathers and knows what is ``measured``, gives: with guests as long as there is room."""
        # Contributors before listeners: a full round is no place for newcomers.
        invited = sorted(guests, key=lambda guest: (guest.member.weight == 0, guest.member.peer))
        chosen = invited[: max_members - 1]
        members = sorted([me, *(guest.member for guest in chosen)], key=lambda member: member.peer)
        reports = {me.peer: measured} | {guest.member.peer: guest.measured for guest in chosen}
        rates = agreed_rates([member.peer for member in members], reports)
        return cls(
            round,
            next_exchange(round, max(member.exchanges for member in members)),
            tuple(replace(member, bytes_per_s=rates[member.peer]) for member in members),
        )

    def slot(self, peer: PeerId) -> int:
        """The place of a member: its share of the data in the next round."""
        return [member.peer for member in self.members].index(peer)


@dataclass(frozen=True)
class Places:
    """Where the members of a roster are: what all of them were told, and need not be told again while ``hash`` is the same."""

    addresses: Mapping[PeerId, tuple[str, ...]]
    """In the order of peer ids."""
    hash: bytes

    @classmethod
    def of(cls, members: Sequence[Member]) -> "Places":
        addresses = {member.peer: member.addresses[:MAX_ADDRESSES] for member in members}
        text = json.dumps(list(addresses.items()))
        return cls(addresses, hashlib.sha256(text.encode()).digest()[:PLACES_BYTES])

    def are(self, hash: bytes, peer: PeerId) -> bool:
        """Whether they are those of this hash, and that of ``peer`` is among them."""
        return hash == self.hash and peer in self.addresses

    def has(self, member: Member) -> bool:
        """Whether it is where it was."""
        return self.addresses.get(member.peer) == member.addresses[:MAX_ADDRESSES]


NOWHERE = Places.of(())


def member_to_wire(member: Candidate, places: Places = NOWHERE) -> pb.Member:
    """Without what ``places`` says of it."""
    known = places.has(member)
    return pb.Member(
        id="" if known else member.peer,
        addresses=() if known else member.addresses[:MAX_ADDRESSES],
        weight=member.weight,
        exchanges=member.exchanges,
    )


def member_from_wire(member: pb.Member) -> Candidate:
    return Candidate(
        _peer(member.id),
        tuple(member.addresses[:MAX_ADDRESSES]),
        weight=_weight(member.weight),
        exchanges=member.exchanges,
    )


def next_exchange(round: int, seen: int) -> int:
    """The number of an exchange of ``round`` where those up to ``seen`` were before."""
    return max(round * EXCHANGES_A_ROUND, seen) + 1


def latest_exchange(round: int, seen: int, ahead: int) -> int:
    """The highest number of an exchange of ``round`` that somebody who has ``seen`` one believes, of others ``ahead`` of it."""
    return min(max(round * EXCHANGES_A_ROUND, seen) + ahead, (round + 1) * EXCHANGES_A_ROUND)


def _weight(weight: float) -> float:
    if not 0 <= weight <= MAX_WEIGHT:
        raise ProtocolViolation("a member's weight is out of range")
    return weight


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


def roster_to_wire(roster: Roster, known: bytes = b"") -> pb.Roster:
    """The wire form, for somebody who has the places of this hash."""
    rates = [member.bytes_per_s for member in roster.members]
    if Places.of(roster.members).hash != known:
        return pb.Roster(
            round=roster.round,
            members=map(member_to_wire, roster.members),
            exchange=roster.exchange,
            bytes_per_s=rates,
        )
    return pb.Roster(
        round=roster.round,
        exchange=roster.exchange,
        known=known,
        weights=_shortened([member.weight for member in roster.members]),
        bytes_per_s=_shortened(rates),
    )


def roster_from_wire(wire: pb.Roster, *, round: int, me: Candidate, places: Places = NOWHERE) -> Roster:
    """The roster of ``round``, in which ``me`` is; ``places`` are those it may name by their hash.

    Raises ``ProtocolViolation`` for anything else, and for an exchange that is no later than the newest of ``me``.
    """
    members = _known_members(wire, places) if wire.known else _told_members(wire)
    peers = [member.peer for member in members]
    if peers != sorted(set(peers)):
        raise ProtocolViolation("the members of a roster are in order, and none twice")
    if wire.round != round or me.peer not in peers:
        raise ProtocolViolation("the roster of another round")
    newest = max(me.exchanges, *(member.exchanges for member in members))
    if not next_exchange(round, newest) <= wire.exchange <= latest_exchange(round, me.exchanges, MAX_LEAP):
        raise ProtocolViolation("the number of an exchange is later than any before, and not by far")
    return Roster(wire.round, wire.exchange, members)


def _told_members(wire: pb.Roster) -> tuple[Candidate, ...]:
    if not len(wire.members) == len(wire.bytes_per_s) <= MAX_MEMBERS:
        raise ProtocolViolation("a roster has a rate for every member, and not too many of either")
    return tuple(
        replace(member_from_wire(member), bytes_per_s=_rate(rate))
        for member, rate in zip(wire.members, wire.bytes_per_s, strict=True)
    )


def _known_members(wire: pb.Roster, places: Places) -> tuple[Candidate, ...]:
    if wire.members or wire.known != places.hash:
        raise ProtocolViolation("a roster of members that nobody told")
    weights = _lengthened(wire.weights, len(places.addresses))
    rates = _lengthened(wire.bytes_per_s, len(places.addresses))
    return tuple(
        Candidate(peer, addresses, bytes_per_s=_rate(rate), weight=_weight(weight))
        for (peer, addresses), rate, weight in zip(places.addresses.items(), rates, weights, strict=True)
    )


def _shortened(numbers: list[float]) -> list[float]:
    """One number that stands for all, if they are equal."""
    return numbers[:1] if len(set(numbers)) == 1 else numbers


def _lengthened(numbers: Sequence[float], count: int) -> Sequence[float]:
    if len(numbers) not in (1, count):
        raise ProtocolViolation(f"{len(numbers)} numbers of {count} members")
    return list(numbers) * count if len(numbers) == 1 else numbers
