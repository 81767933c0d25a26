"""A failed host is banned for a while."""

from swarmnet_client.hosts.exclusions import BAN_MAX_S, BAN_S, Bans
from swarmnet_protocols.net import PeerId

A, B, C = (PeerId(name) for name in "abc")


def test_a_host_that_fails_again_is_banned_twice_as_long() -> None:
    bans = Bans()
    bans.failed(A, 0.0)
    assert [*bans.at(BAN_S - 0.1)] == [A]
    assert [*bans.at(BAN_S)] == []
    bans.failed(A, BAN_S + 1.0)
    assert [*bans.at(3 * BAN_S)] == [A]
    assert [*bans.at(3 * BAN_S + 1.0)] == []
    now, ban_s = BAN_S + 1.0, 2 * BAN_S
    while ban_s < BAN_MAX_S:
        now, ban_s = now + ban_s + 1.0, min(2 * ban_s, BAN_MAX_S)
        bans.failed(A, now)
    bans.failed(A, now := now + ban_s + 1.0)
    assert [*bans.at(now + BAN_MAX_S - 0.1)] == [A]
    assert [*bans.at(now + BAN_MAX_S)] == []
    bans.served(A)
    bans.failed(A, now)
    assert [*bans.at(now + BAN_S)] == []


def test_failures_during_a_ban_do_not_double_it() -> None:
    """A dead host is tried and pinged as long as it is announced, because it may be started
    again."""
    bans = Bans()
    for number in range(20):
        bans.failed(A, number)
    assert [*bans.at(19 + BAN_S - 0.1)] == [A]
    assert [*bans.at(19 + BAN_S)] == []


def test_hosts_whose_failures_are_long_past_are_forgotten() -> None:
    bans = Bans()
    for number in range(100):
        bans.failed(PeerId(f"host {number}"), number * 3 * BAN_S)
    assert len(bans._failed) == 1


def test_the_host_that_failed_longest_ago_is_tried_first() -> None:
    bans = Bans()
    for peer, now in ((A, 1.0), (B, 2.0), (C, 3.0), (A, 4.0)):
        bans.failed(peer, now)
    assert [*bans.at(5.0)] == [B, C, A]


def test_an_old_failure_is_forgotten() -> None:
    bans = Bans()
    bans.failed(A, 1.0)
    bans.failed(A, 1.0 + 2 * BAN_S + 1.0)
    assert [*bans.at(2.0 + 3 * BAN_S + 0.1)] == []
