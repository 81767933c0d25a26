"""Failures of a chain: suspects of refusals, retries, and the error for the user."""

import pytest

from swarmnet_client.chain.failures import (
    ATTEMPTS,
    DIRECTORY_S,
    OUT_OF_RESOURCES_ATTEMPTS,
    PAUSE_S,
    QUICK_ATTEMPTS,
    RetryPolicy,
    Suspects,
    Unfilled,
    before_attempt,
    explain,
)
from swarmnet_protocols.errors import IncompatibleVersion, NotAuthorised
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resources import ResourceLimitReached
from swarmnet_protocols.net.refusal import Refusal, Refused
from swarmnet_protocols.wire import refusal_pb2

ONE, TWO, THREE = PeerId("one"), PeerId("two"), PeerId("three")
NO_HOSTS: frozenset[PeerId] = frozenset()
REASON = refusal_pb2.REASON_NOT_FINITE


def refused(reason: refusal_pb2.Reason, detail: str, retry_after_s: float = 0.0) -> Refused:
    return Refused("one", Refusal(reason, detail, retry_after_s).to_wire())


def test_the_error_says_why_hosts_refuse() -> None:
    error = explain(refused(refusal_pb2.REASON_NOT_AUTHORISED, "no member"))
    assert isinstance(error, NotAuthorised)
    assert str(error) == "one refused the stream: no member"
    assert "owner of the swarm" in error.hint
    error = explain(refused(refusal_pb2.REASON_OUT_OF_RESOURCES, "no room", 2.0))
    assert isinstance(error, ResourceLimitReached)
    assert error.retry_after_s == 2.0


def test_hosts_of_another_version_are_no_reason_to_try_again() -> None:
    error = explain(IncompatibleVersion("protocols not supported: [/swarmnet/pass/9]"))
    assert isinstance(error, IncompatibleVersion)
    assert "upgrade" in error.hint
    assert "/swarmnet/pass/9" in str(error)


def test_a_chain_is_given_up_after_many_attempts_and_recover_s() -> None:
    retries = RetryPolicy(recover_s=12.0)
    quick = [retries.is_given_up(0.1 * number, idle=False) for number in range(3 * ATTEMPTS)]
    assert not any(quick), "not before recover_s has passed"
    assert retries.is_given_up(12.1, idle=False)


def test_an_answer_resets_the_count_of_attempts() -> None:
    retries = RetryPolicy(recover_s=1.0)
    for number in range(100):
        assert not retries.is_given_up(float(number), idle=False)
        retries.answered()


def test_a_full_host_is_asked_again_after_its_time_then_twice_that() -> None:
    retries = RetryPolicy(recover_s=12.0)
    full = refused(refusal_pb2.REASON_OUT_OF_RESOURCES, "no room", 3.0)
    pauses = []
    for number in range(5):
        is_given_up = retries.is_given_up(float(number), full, idle=False)
        assert is_given_up == (number == OUT_OF_RESOURCES_ATTEMPTS)
        pauses.append((retries.pause_s(full), retries.pause_s(None)))
    assert pauses[:4] == [(0.0, 0.0), (0.0, 0.0), (3.0, 0.0), (6.0, PAUSE_S)]
    assert retries.pause_s(refused(refusal_pb2.REASON_OUT_OF_RESOURCES, "no room", 60.0)) == 6.0


def test_waits_for_busy_hosts_count_from_a_refusal_to_an_answer() -> None:
    budget = RetryPolicy(recover_s=12.0)
    assert budget.may_wait(6.0, 10.0, 100.0)
    assert not budget.may_wait(6.0, 10.0, 106.0)
    assert budget.may_wait(4.0, 10.0, 106.0)
    budget.answered()
    assert budget.may_wait(6.0, 10.0, 110.0)


@pytest.mark.parametrize("idle", [True, False])
def test_an_idle_chain_may_break_now_and_then(idle: bool) -> None:
    retries = RetryPolicy(recover_s=1.0)
    given_up = []
    for number in range(ATTEMPTS + 2):
        given_up.append(retries.is_given_up(10.0 * number, idle=idle))
        retries.repaired(10.0 * number + 0.5)
    assert any(given_up) is not idle


def hosts(*peers: PeerId) -> frozenset[PeerId]:
    return frozenset(peers)


def test_one_host_that_repeats_its_refusal_is_suspected() -> None:
    suspects = Suspects()
    for _ in range(3):
        assert suspects.narrow(REASON, hosts(ONE)) == (hosts(ONE), NO_HOSTS)


def test_two_hosts_with_the_same_reason_are_cleared() -> None:
    suspects = Suspects()
    suspects.narrow(REASON, hosts(ONE))
    assert suspects.narrow(REASON, hosts(TWO)) == (NO_HOSTS, hosts(ONE, TWO))
    assert suspects.narrow(REASON, hosts(ONE)) == (NO_HOSTS, hosts(ONE, TWO))


def test_a_host_present_at_every_refusal_is_suspected() -> None:
    suspects = Suspects()
    assert suspects.narrow(REASON, hosts(ONE, TWO)) == (hosts(ONE, TWO), NO_HOSTS)
    assert suspects.narrow(REASON, hosts(ONE, THREE)) == (hosts(ONE), hosts(TWO, THREE))
    assert suspects.narrow(REASON, hosts(TWO, THREE)) == (NO_HOSTS, hosts(ONE, TWO, THREE))


def test_two_hosts_with_different_reasons_clear_no_host() -> None:
    suspects = Suspects()
    suspects.narrow(refusal_pb2.REASON_PROTOCOL, hosts(ONE))
    assert suspects.narrow(refusal_pb2.REASON_TOO_LONG, hosts(TWO)) == (hosts(TWO), NO_HOSTS)


def test_what_comes_before_an_attempt_follows_from_what_failed() -> None:
    no_route, not_opened = Unfilled.NO_ROUTE, Unfilled.NOT_OPENED
    assert before_attempt([Unfilled.DOUBTFUL]) == (0.0, DIRECTORY_S)
    assert before_attempt([no_route, no_route]) == (0.0, None), "only the directory can help"
    assert before_attempt([no_route, not_opened]) == (0.0, DIRECTORY_S), "a route is known to exist"
    assert before_attempt([not_opened] * QUICK_ATTEMPTS) == (PAUSE_S, DIRECTORY_S)
