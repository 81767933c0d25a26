"""Rosters: the choice of a round's members among the candidates, and rosters from peers."""

from dataclasses import replace

import pytest

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.matchmaking import rosters
from swarmnet_protocols.training.matchmaking.rosters import (
    EXCHANGES_PER_ROUND,
    MAX_AHEAD_OF_FOLLOWER,
    MAX_ROUND_S,
    NO_ADDRESSES,
    AddressBook,
    JoinRequest,
    Roster,
    member_from_wire,
    request_from_wire,
    request_to_wire,
    roster_from_wire,
    roster_to_wire,
)
from swarmnet_protocols.training.rounds.terms import UNMEASURED_BYTES_PER_S, RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.training.lab import PEERS

A, B, C, D = map(PeerId, "abcd")


def request(
    peer: PeerId,
    *,
    weight: float = 1.0,
    last_exchange: int = 0,
    measured: Measured | None = None,
    round: int = 3,
) -> JoinRequest:
    member = RoundMember(peer, weight=weight, last_exchange=last_exchange)
    return JoinRequest(member, WorkerPosition(round, b""), measured or {})


def test_contributors_come_before_listeners_and_members_are_sorted() -> None:
    roster = Roster.of(request(C), [request(D), request(A, weight=0), request(B)], 3)
    assert [member.peer for member in roster.members] == [B, C, D]


def test_a_full_round_of_one_takes_no_follower() -> None:
    me = request(B)
    assert Roster.of(me, [request(A)], 1).members == (me.member,)


def test_an_exchange_number_is_the_highest_and_belongs_to_its_round() -> None:
    me = request(A, last_exchange=3 * EXCHANGES_PER_ROUND + 5)
    later = request(B, last_exchange=3 * EXCHANGES_PER_ROUND + 7)
    assert Roster.of(me, [later], 2).exchange_number == 3 * EXCHANGES_PER_ROUND + 8
    assert Roster.of(me, [later], 1).exchange_number == 3 * EXCHANGES_PER_ROUND + 6
    me = request(A, last_exchange=3 * EXCHANGES_PER_ROUND + 5, round=4)
    assert Roster.of(me, [later], 2).exchange_number == 4 * EXCHANGES_PER_ROUND + 1


def test_rates_are_what_members_measured_of_each_other() -> None:
    rates = {A: 4e6, B: 4e6, C: 8e6, D: 1e3}
    me = request(A, measured=rates)
    followers = [request(B, measured=rates), request(C, measured=rates), request(D, weight=0)]
    roster = Roster.of(me, followers, 3)
    assert {member.peer: member.bytes_per_s for member in roster.members} == {A: 4e6, B: 4e6, C: 8e6}
    alone = Roster.of(me, [], 3)
    assert [member.bytes_per_s for member in alone.members] == [UNMEASURED_BYTES_PER_S]


FIRST = 3 * EXCHANGES_PER_ROUND
"""One below the first exchange number of round 3."""


FIRST_PEER, SECOND_PEER, THIRD_PEER = sorted(PEERS[:3])


@pytest.mark.parametrize("rates", [[], [1e6], [1e6, 0.0], [1e6, float("nan")], [1e6] * 3])
def test_a_roster_without_a_good_rate_for_every_member_is_refused(rates: list[float]) -> None:
    members = [pb.Member(id=FIRST_PEER), pb.Member(id=SECOND_PEER)]
    wire = pb.Roster(round=3, members=members, exchange_number=FIRST + 1, bytes_per_s=[1e6, 2e6])
    assert roster_from_wire(wire, round=3, me=RoundMember(FIRST_PEER)).members[1].bytes_per_s == 2e6
    with pytest.raises(ProtocolViolation):
        roster_from_wire(
            pb.Roster(round=3, members=members, exchange_number=FIRST + 1, bytes_per_s=rates),
            round=3,
            me=RoundMember(FIRST_PEER),
        )


ALICE = RoundMember(
    FIRST_PEER, ("/ip4/10.0.0.1",), bytes_per_s=1e6, weight=1.0, last_exchange=2 * EXCHANGES_PER_ROUND
)
BOB = RoundMember(SECOND_PEER, (), bytes_per_s=2e6, weight=0.0)
ROSTER = Roster(3, FIRST + 7, (ALICE, BOB))
SHORT = roster_to_wire(ROSTER, AddressBook.of(ROSTER.members).hash)


@defence("a member of a roster can sign", off=replacing(rosters, "public_key_of", nothing), id="b")
@pytest.mark.parametrize("id", ["", "b", "QmNoKey", FIRST_PEER + "1", "1" * 200])
def test_a_member_that_cannot_sign_is_refused(id: str) -> None:
    with pytest.raises(ProtocolViolation, match="can sign"):
        member_from_wire(pb.Member(id=id))


@defence(
    "times that a follower claims are bounded",
    off=replacing(rosters, "round_seconds", lambda seconds: seconds),
    spent_s=[-1.0],
)
@pytest.mark.parametrize("spent_s", [[-1.0], [1.0, float("nan")], [1.0, 1.0, 2 * MAX_ROUND_S]])
def test_a_follower_with_impossible_times_is_refused(spent_s: list[float]) -> None:
    wire = request_to_wire(b"", request(FIRST_PEER), NO_ADDRESSES)
    wire.spent_s.extend(spent_s)
    with pytest.raises(ProtocolViolation, match="out of range"):
        request_from_wire(wire, FIRST_PEER, NO_ADDRESSES)


@defence("times have finite inverses", off=replacing(rosters, "LEAST_ROUND_S", 0.0))
def test_a_time_too_short_to_divide_by_is_unknown() -> None:
    claimed = member_from_wire(pb.Member(id=FIRST_PEER, round_s=5e-324))
    assert claimed.round_s == 0.0


def test_a_roster_by_hash_has_the_same_members() -> None:
    assert not SHORT.members
    short = roster_from_wire(SHORT, round=3, me=ALICE, book=AddressBook.of(ROSTER.members))
    assert short.members == (replace(ALICE, last_exchange=0), BOB)
    equal = Roster(3, FIRST + 7, (ALICE, replace(ALICE, peer=SECOND_PEER)))
    book = AddressBook.of(equal.members)
    wire = roster_to_wire(equal, book.hash)
    assert (list(wire.weights), list(wire.bytes_per_s)) == ([1.0], [1e6])
    assert [each.weight for each in roster_from_wire(wire, round=3, me=ALICE, book=book).members] == [1, 1]


@defence(
    "a leader does not use up exchange numbers",
    off=replacing(rosters, "highest_exchange_number", lambda *_: 1 << 64),
    wrong=pb.Roster(exchange_number=4 * EXCHANGES_PER_ROUND),
)
@pytest.mark.parametrize(
    "wrong",
    [
        pb.Roster(known=b"0" * 16),
        pb.Roster(weights=[1.0, 1.0, 1.0]),
        pb.Roster(weights=[float("nan")]),
        pb.Roster(bytes_per_s=[1.0]),
        pb.Roster(rounds_s=[float("nan")]),
        pb.Roster(rounds_s=[-1.0]),
        pb.Roster(waited=pb.Waited(member=2, why="disk")),
        pb.Roster(waited=pb.Waited(member=1, why="mood")),
        pb.Roster(waited=pb.Waited(member=1, why="disk", seconds=-1.0)),
        pb.Roster(members=[pb.Member(id=THIRD_PEER)]),
        pb.Roster(round=4),
        pb.Roster(exchange_number=3 * EXCHANGES_PER_ROUND),
        pb.Roster(exchange_number=3 * EXCHANGES_PER_ROUND + MAX_AHEAD_OF_FOLLOWER + 1),
        pb.Roster(exchange_number=(1 << 64) - 1),
    ],
    ids=lambda wrong: str(wrong)[:20],
)
def test_a_roster_by_hash_is_checked(wrong: pb.Roster) -> None:
    wire = pb.Roster()
    wire.CopyFrom(SHORT)
    wire.MergeFrom(wrong)  # repeated fields are extended
    with pytest.raises(ProtocolViolation):
        roster_from_wire(wire, round=3, me=ALICE, book=AddressBook.of(ROSTER.members))


def test_a_roster_with_an_exchange_number_that_was_used_is_refused() -> None:
    """ALICE leader that reports a lower last exchange than the follower sent cannot make it repeat
    one."""
    wire = roster_to_wire(Roster(3, FIRST + 4, (replace(ALICE, last_exchange=FIRST + 3), BOB)))
    with pytest.raises(ProtocolViolation, match="exchange number 196612"):
        roster_from_wire(wire, round=3, me=replace(ALICE, last_exchange=FIRST + 4))


@defence(
    "a roster divides all of its members",
    off=replacing(rosters, "_group_numbers", lambda wire, members: ()),
    groups=[0, 1],
)
@pytest.mark.parametrize("groups", [[0], [0, 0], [0, 1], [0, 2, 1, 1]])
def test_a_roster_with_impossible_groups_is_refused(groups: list[int]) -> None:
    members = tuple(replace(ALICE, peer=peer) for peer in sorted(PEERS[:3]))
    roster = Roster(3, FIRST + 7, members, None, (0, 1, 0))
    assert roster.group_of(members[2].peer) == (members[0], members[2])
    wire = roster_to_wire(roster)
    assert roster_from_wire(wire, round=3, me=ALICE) == replace(
        roster, members=tuple(replace(each, bytes_per_s=1e6) for each in members)
    )
    wire.groups[:] = groups
    with pytest.raises(ProtocolViolation, match="group"):
        roster_from_wire(wire, round=3, me=ALICE)
