"""Rosters: the choice of a round's members among the candidates."""

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.rosters import EXCHANGES_PER_ROUND, JoinRequest, Roster
from swarmnet_protocols.training.rounds.terms import UNMEASURED_BYTES_PER_S, RoundMember

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
