"""Rosters: the join requests of a round, the leader's roster, and their wire form. Pure."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import public_key_of
from swarmnet_protocols.routing.coordinates import Coordinate, read_coordinate
from swarmnet_protocols.training import MAX_MEMBERS, MAX_WORKERS
from swarmnet_protocols.training.bandwidth import Measured, agreed_rates
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.pacing import NOTHING, Spent, Wait, waited_for
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb

MAX_ADDRESSES = 16
MAX_ADDRESSES_OF_MANY = 4
"""As ``MAX_ADDRESSES``, in a roster of several groups. With more, it does not fit one message."""
MAX_BYTES_PER_S = 1e12
MAX_WEIGHT = 1e12
MAX_ROUND_S = 1e7
"""Longest round that a worker may claim: four months."""
LEAST_ROUND_S = 1e-6
"""Shortest time that counts; a shorter one is unknown. With less, a false time may have an infinite
inverse. With more, a fast worker of a tiny model looks unknown."""
EXCHANGES_PER_ROUND = 1 << 16
"""Number of exchanges that a round can have. Each round numbers its exchanges from its own start.

So a peer that falsely claims a high number uses up the numbers of one round only.
"""
MAX_AHEAD_OF_LEADER = 256
"""A leader leaves out a follower whose last exchange is this many numbers ahead of its own."""
MAX_AHEAD_OF_FOLLOWER = 4096
"""A follower accepts a roster whose exchange is at most this many numbers ahead of its own last
one.

It may have missed earlier attempts of the round.
"""
ADDRESS_BOOK_HASH_BYTES = 16
"""Half a SHA-256. Enough to compare the addresses of two workers."""


ORIGIN = Coordinate()
"""The place of a worker that has measured no delay."""


@dataclass(frozen=True)
class JoinRequest:
    """A worker that wants to be in a roster: its position, and the rates that it measured."""

    member: RoundMember
    position: WorkerPosition
    measured: Measured
    spent: Spent = NOTHING
    """The seconds that the worker spent on its round, by their cause."""
    arrived_s: float = 0.0
    """Loop time at which the leader got the request."""
    coordinate: Coordinate = ORIGIN
    """The worker's place in the network."""
    followers: "tuple[JoinRequest, ...]" = ()
    """The requests of workers that follow this one, which follows another leader itself."""

    def everybody(self) -> "tuple[JoinRequest, ...]":
        """Return this request and those of the worker's followers."""
        return self, *(each for follower in self.followers for each in follower.everybody())


@dataclass(frozen=True)
class Roster:
    """The members of one exchange, ordered by peer id. They are in one group, or in several."""

    round: int
    exchange_number: int
    members: tuple[RoundMember, ...]
    waited: Wait | None = None
    """The worker that all others waited for."""
    numbers: tuple[int, ...] = ()
    """The group of every member; empty if all are in one."""

    @property
    def groups(self) -> tuple[tuple[RoundMember, ...], ...]:
        """The members of each group; empty if all are in one."""
        groups: list[list[RoundMember]] = [[] for _ in set(self.numbers)]
        for member, number in zip(self.members, self.numbers, strict=bool(self.numbers)):
            groups[number].append(member)
        return tuple(map(tuple, groups))

    def group_of(self, peer: PeerId) -> tuple[RoundMember, ...]:
        """Return the members that average with ``peer``."""
        return self.groups[self.numbers[self.slot(peer)]] if self.numbers else self.members

    @classmethod
    def of(cls, leader: JoinRequest, followers: Sequence[JoinRequest], max_members: int) -> "Roster":
        """Make the roster of a leader, its followers and theirs.

        If there are too many, contributors have priority over newcomers.
        """
        present = {each.member.peer: each for follower in followers for each in follower.everybody()}
        present |= {each.member.peer: each for each in (leader, *followers)}
        ordered = sorted(
            present.values(), key=lambda each: (each is not leader, each.member.weight == 0, each.member.peer)
        )
        reports = {each.member.peer: each for each in ordered[:max_members]}
        peers, round = sorted(reports), leader.position.round
        groups = arranged({peer: reports[peer].coordinate for peer in peers})
        numbers = {peer: number for number, group in enumerate(groups) for peer in group}
        measured = {peer: each.measured for peer, each in reports.items()}
        rates = {peer: rate for group in groups for peer, rate in agreed_rates(group, measured).items()}
        newest = max(each.member.last_exchange for each in reports.values())
        members = tuple(replace(reports[peer].member, bytes_per_s=rates[peer]) for peer in peers)
        if len(groups) > 1:
            members = tuple(
                replace(each, addresses=each.addresses[:MAX_ADDRESSES_OF_MANY]) for each in members
            )
        waited = waited_for(
            {peer: each.arrived_s for peer, each in reports.items()},
            {peer: each.spent for peer, each in reports.items()},
        )
        split = tuple(numbers[peer] for peer in peers) if len(groups) > 1 else ()
        return cls(round, next_exchange_number(round, newest), members, waited, split)

    def slot(self, peer: PeerId) -> int:
        """Return the index of a member. It selects the member's data in the next round."""
        return [member.peer for member in self.members].index(peer)


def arranged(places: Mapping[PeerId, Coordinate]) -> list[list[PeerId]]:
    """Divide workers into as few groups of at most ``MAX_MEMBERS`` as possible, near ones together.

    The sizes differ by at most one. Half of the groups get the workers on one side of the widest
    axis, and so on in each half.
    """
    return _halved(sorted(places), places, -(-len(places) // MAX_MEMBERS))


def _halved(peers: list[PeerId], places: Mapping[PeerId, Coordinate], groups: int) -> list[list[PeerId]]:
    if groups <= 1:
        return [sorted(peers)]
    axes = list(zip(*(places[peer].position for peer in peers), strict=True))
    widest = max(range(len(axes)), key=lambda axis: max(axes[axis]) - min(axes[axis]))
    ordered = sorted(peers, key=lambda peer: (places[peer].position[widest], peer))
    least, larger = divmod(len(peers), groups)
    cut = least * (groups // 2) + min(larger, groups // 2)
    return [
        *_halved(ordered[:cut], places, groups // 2),
        *_halved(ordered[cut:], places, groups - groups // 2),
    ]


@dataclass(frozen=True)
class AddressBook:
    """The addresses of a roster's members.

    A worker that has the book with the same ``hash`` does not get it again.
    """

    addresses: Mapping[PeerId, tuple[str, ...]]
    """Member → multiaddrs, ordered by peer id."""
    hash: bytes

    @classmethod
    def of(cls, members: Sequence[RoundMember]) -> "AddressBook":
        addresses = {member.peer: member.addresses[:MAX_ADDRESSES] for member in members}
        text = json.dumps(list(addresses.items()))
        return cls(addresses, hashlib.sha256(text.encode()).digest()[:ADDRESS_BOOK_HASH_BYTES])

    def matches(self, hash: bytes, peer: PeerId) -> bool:
        """Return whether this book has the hash ``hash`` and contains ``peer``."""
        return hash == self.hash and peer in self.addresses

    def has(self, member: RoundMember) -> bool:
        """Return whether the book has the present addresses of ``member``."""
        return self.addresses.get(member.peer) == member.addresses[:MAX_ADDRESSES]


NO_ADDRESSES = AddressBook.of(())


def place_as_leader(peer: PeerId, round: int, state: bytes) -> bytes:
    """Return the place of ``peer`` in the order of leaders of a round that starts from ``state``.

    The lowest place leads. The state is the outcome of the last round, so no peer id leads every
    round. A leader that leaves an honest worker out does so in few rounds.
    """
    return hashlib.sha256(b"%d/%b/%b" % (round, state, peer.encode())).digest()


def next_exchange_number(round: int, seen: int) -> int:
    """Return the lowest exchange number of ``round`` above ``seen``."""
    return max(round * EXCHANGES_PER_ROUND, seen) + 1


def highest_exchange_number(round: int, seen: int, ahead: int) -> int:
    """Return the highest exchange number of ``round`` that a worker accepts after ``seen``.

    It is at most ``ahead`` numbers above ``seen``, or above the start of the round.
    """
    return min(max(round * EXCHANGES_PER_ROUND, seen) + ahead, (round + 1) * EXCHANGES_PER_ROUND)


def member_to_wire(member: RoundMember, book: AddressBook = NO_ADDRESSES) -> pb.Member:
    """Return the wire form, without id and addresses if ``book`` has them."""
    known = book.has(member)
    return pb.Member(
        id="" if known else member.peer,
        addresses=() if known else member.addresses[:MAX_ADDRESSES],
        weight=member.weight,
        last_exchange=member.last_exchange,
        round_s=member.round_s,
    )


def member_from_wire(member: pb.Member) -> RoundMember:
    """Parse a member. Raises ``ProtocolViolation`` for an invalid peer id, weight or round time."""
    return RoundMember(
        _peer(member.id),
        tuple(member.addresses[:MAX_ADDRESSES]),
        weight=_weight(member.weight),
        last_exchange=member.last_exchange,
        round_s=round_seconds(member.round_s),
    )


def request_to_wire(job: bytes, request: JoinRequest, book: AddressBook) -> pb.MatchmakingRequest:
    """Return the wire form, without id and addresses if ``book`` has them."""
    return pb.MatchmakingRequest(
        job=job,
        round=request.position.round,
        state=request.position.state,
        member=member_to_wire(request.member, book),
        measured=measured_to_wire(request.measured),
        known=book.hash if book.has(request.member) else b"",
        spent_s=request.spent if any(request.spent) else (),
        followers=len(request.followers),
        coordinate=() if request.coordinate == ORIGIN else request.coordinate.numbers(),
    )


def request_from_wire(request: pb.MatchmakingRequest, peer: PeerId, book: AddressBook) -> JoinRequest:
    """Parse the request of ``peer``.

    Raises ``ProtocolViolation`` if it joins under another id, leaves out addresses that are not in
    ``book``, or has an invalid number.
    """
    if request.known:
        if not book.matches(request.known, peer):
            raise ProtocolViolation("a follower must send its id and addresses")
        request.member.id, request.member.addresses[:] = peer, book.addresses[peer]
    member = member_from_wire(request.member)
    if member.peer != peer:
        raise ProtocolViolation("a follower may join only under its own peer id")
    position = WorkerPosition(request.round, request.state)
    spent = Spent(*map(round_seconds, request.spent_s[: len(Spent._fields)]))
    place = read_coordinate(request.coordinate) or ORIGIN
    return JoinRequest(member, position, measured_from_wire(request.measured), spent, coordinate=place)


def measured_to_wire(measured: Measured) -> list[pb.Measured]:
    """Return the wire form of the newest ``MAX_MEMBERS`` rates."""
    newest = list(measured.items())[-MAX_MEMBERS:]
    return [pb.Measured(id=peer, bytes_per_s=min(rate, MAX_BYTES_PER_S)) for peer, rate in newest]


def measured_from_wire(measured: Sequence[pb.Measured]) -> Measured:
    """Parse measured rates. Raises ``ProtocolViolation`` for an invalid peer id or rate."""
    return {_peer(each.id): _rate(each.bytes_per_s) for each in measured[:MAX_MEMBERS]}


def roster_to_wire(roster: Roster, known: bytes = b"") -> pb.Roster:
    """Return the wire form for a follower that has the address book with the hash ``known``."""
    rates = [member.bytes_per_s for member in roster.members]
    waited = None
    if roster.waited is not None:
        late = roster.slot(roster.waited.peer)
        waited = pb.Waited(member=late, why=roster.waited.why, seconds=roster.waited.seconds)
    if AddressBook.of(roster.members).hash != known:
        return pb.Roster(
            round=roster.round,
            members=map(member_to_wire, roster.members),
            exchange_number=roster.exchange_number,
            bytes_per_s=rates,
            waited=waited,
            groups=roster.numbers,
        )
    return pb.Roster(
        round=roster.round,
        exchange_number=roster.exchange_number,
        known=known,
        weights=_compact([member.weight for member in roster.members]),
        bytes_per_s=_compact(rates),
        rounds_s=_compact([member.round_s for member in roster.members]),
        waited=waited,
        groups=roster.numbers,
    )


def roster_from_wire(
    wire: pb.Roster, *, round: int, me: RoundMember, book: AddressBook = NO_ADDRESSES
) -> Roster:
    """Parse the roster of ``round`` that ``me`` asked for. It may leave ``me`` out.

    ``book``: addresses that the roster may name by their hash. Raises ``ProtocolViolation`` for
    another round's roster, or an exchange number that is not above every member's last one or too
    far above that of ``me``.
    """
    members = _known_members(wire, book) if wire.known else _listed_members(wire)
    peers = [member.peer for member in members]
    if peers != sorted(set(peers)):
        raise ProtocolViolation("a roster must be sorted by peer id, without duplicates")
    if wire.round != round:
        raise ProtocolViolation("the roster of another round")
    newest = max(me.last_exchange, *(member.last_exchange for member in members))
    lowest = next_exchange_number(round, newest)
    highest = highest_exchange_number(round, me.last_exchange, MAX_AHEAD_OF_FOLLOWER)
    if not lowest <= wire.exchange_number <= highest:
        raise ProtocolViolation(f"exchange number {wire.exchange_number} is not in [{lowest}, {highest}]")
    numbers = _group_numbers(wire, len(members))
    return Roster(wire.round, wire.exchange_number, members, _waited(wire, members), numbers)


def _group_numbers(wire: pb.Roster, members: int) -> tuple[int, ...]:
    sizes = Counter(wire.groups)
    expected = members if members > MAX_MEMBERS or sizes else 0
    if len(wire.groups) != expected or (sizes and [*sorted(sizes)] != [*range(max(2, len(sizes)))]):
        raise ProtocolViolation("a roster of many members names the group of each, from 0")
    if any(size > MAX_MEMBERS for size in sizes.values()):
        raise ProtocolViolation(f"a group has at most {MAX_MEMBERS} members")
    return tuple(wire.groups)


def _waited(wire: pb.Roster, members: Sequence[RoundMember]) -> Wait | None:
    if not wire.HasField("waited"):
        return None
    late = wire.waited
    if late.member >= len(members) or late.why not in Spent._fields:
        raise ProtocolViolation("a wait for nobody, or for no known reason")
    return Wait(members[late.member].peer, late.why, round_seconds(late.seconds))


def _listed_members(wire: pb.Roster) -> tuple[RoundMember, ...]:
    if not len(wire.members) == len(wire.bytes_per_s) <= MAX_WORKERS:
        raise ProtocolViolation(f"a roster must have one rate for each member, and at most {MAX_WORKERS}")
    return tuple(
        replace(member_from_wire(member), bytes_per_s=_rate(rate))
        for member, rate in zip(wire.members, wire.bytes_per_s, strict=True)
    )


def _known_members(wire: pb.Roster, book: AddressBook) -> tuple[RoundMember, ...]:
    if wire.members or wire.known != book.hash:
        raise ProtocolViolation("the roster refers to an address book that this worker does not have")
    weights = _expand(wire.weights, len(book.addresses))
    rates = _expand(wire.bytes_per_s, len(book.addresses))
    rounds_s = _expand(wire.rounds_s, len(book.addresses))
    return tuple(
        RoundMember(
            peer,
            addresses,
            bytes_per_s=_rate(rate),
            weight=_weight(weight),
            round_s=round_seconds(round_s),
        )
        for (peer, addresses), rate, weight, round_s in zip(
            book.addresses.items(), rates, weights, rounds_s, strict=True
        )
    )


def _compact(numbers: list[float]) -> list[float]:
    """Return one number if all are equal, else all."""
    return numbers[:1] if len(set(numbers)) == 1 else numbers


def _expand(numbers: Sequence[float], count: int) -> Sequence[float]:
    if len(numbers) not in (1, count):
        raise ProtocolViolation(f"{len(numbers)} numbers for {count} members")
    return list(numbers) * count if len(numbers) == 1 else numbers


def _weight(weight: float) -> float:
    if not 0 <= weight <= MAX_WEIGHT:
        raise ProtocolViolation("a member's weight is out of range")
    return weight


def round_seconds(seconds: float) -> float:
    """Return the claimed time of a worker's round, 0 if it is unknown or no time at all.

    Raises ``ProtocolViolation`` out of range.
    """
    if not 0 <= seconds <= MAX_ROUND_S:
        raise ProtocolViolation("the time of a worker's round is out of range")
    return seconds if seconds >= LEAST_ROUND_S else 0.0


def _peer(id: str) -> PeerId:
    try:
        public_key_of(PeerId(id))
    except ValueError as error:
        raise ProtocolViolation("not the peer id of a worker that can sign") from error
    return PeerId(id)


def _rate(bytes_per_s: float) -> float:
    if not 0 < bytes_per_s <= MAX_BYTES_PER_S:
        raise ProtocolViolation(f"a rate of {bytes_per_s:g} bytes per second")
    return bytes_per_s
