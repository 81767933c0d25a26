"""Rosters: the choice of a round's members among the candidates."""

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.bandwidth import Measured
from swarmnet_protocols.training.rosters import EXCHANGES_PER_ROUND, Candidate, JoinRequest, Roster
from swarmnet_protocols.training.rounds.terms import UNMEASURED_BYTES_PER_S

A, B, C, D = map(PeerId, "abcd")


def follower(
    peer: PeerId, *, weight: float = 1.0, last_exchange: int = 0, measured: Measured | None = None
) -> JoinRequest:
    return JoinRequest(
        Candidate(peer, (), weight=weight, last_exchange=last_exchange), 3, b"", measured or {}
    )


def test_contributors_come_before_listeners_and_members_are_sorted() -> None:
    followers = [follower(D), follower(A, weight=0), follower(B)]
    roster = Roster.of(3, Candidate(C, (), weight=1.0), {}, followers, 3)
    assert [member.peer for member in roster.members] == [B, C, D]


def test_a_full_round_of_one_takes_no_follower() -> None:
    me = Candidate(B, ())
    assert Roster.of(3, me, {}, [follower(A)], 1).members == (me,)


def test_an_exchange_number_is_the_highest_and_belongs_to_its_round() -> None:
    me = Candidate(A, (), weight=1.0, last_exchange=3 * EXCHANGES_PER_ROUND + 5)
    later = follower(B, last_exchange=3 * EXCHANGES_PER_ROUND + 7)
    assert Roster.of(3, me, {}, [later], 2).exchange_number == 3 * EXCHANGES_PER_ROUND + 8
    assert Roster.of(3, me, {}, [later], 1).exchange_number == 3 * EXCHANGES_PER_ROUND + 6
    assert Roster.of(4, me, {}, [later], 2).exchange_number == 4 * EXCHANGES_PER_ROUND + 1


def test_rates_are_what_members_measured_of_each_other() -> None:
    me = Candidate(A, (), weight=1.0)
    rates = {A: 4e6, B: 4e6, C: 8e6, D: 1e3}
    followers = [follower(B, measured=rates), follower(C, measured=rates), follower(D, weight=0)]
    roster = Roster.of(3, me, rates, followers, 3)
    assert {member.peer: member.bytes_per_s for member in roster.members} == {A: 4e6, B: 4e6, C: 8e6}
    alone = Roster.of(3, me, rates, [], 3)
    assert [member.bytes_per_s for member in alone.members] == [UNMEASURED_BYTES_PER_S]
