"""Rates that receivers measure: the measurement of one, and the agreed rates when some reports are
false."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.bandwidth import MAX_PEERS, MIN_BYTES, Arrival, ArrivalRates, agreed_rates
from swarmnet_protocols.training.codecs import ALIGNMENT
from swarmnet_protocols.training.rounds.terms import UNMEASURED_BYTES_PER_S, partition
from swarmnet_protocols.training.rounds.transfers import PartialPayload

RATES = st.floats(min_value=1e3, max_value=1e9)
ANYTHING = st.floats(min_value=1e-300, max_value=1e12)


def peers(count: int) -> list[PeerId]:
    return [PeerId(f"peer {number:03}") for number in range(count)]


def truthful(rates: dict[PeerId, float]) -> dict[PeerId, dict[PeerId, float]]:
    """The reports of honest members if each link has one rate."""
    return {me: {peer: rate for peer, rate in rates.items() if peer != me} for me in rates}


def test_recent_measurements_count_most() -> None:
    rates = ArrivalRates()
    me, other = peers(2)
    rates.add([Arrival(me, MIN_BYTES, 1.0), Arrival(other, MIN_BYTES, 4.0)])
    assert rates.bytes_per_s() == {me: MIN_BYTES, other: MIN_BYTES / 4}
    for _ in range(6):
        rates.add([Arrival(me, MIN_BYTES, 10.0)])
    assert rates.bytes_per_s()[me] == pytest.approx(MIN_BYTES / 10, rel=0.02)


def test_short_payloads_and_those_that_took_no_time_say_nothing() -> None:
    rates = ArrivalRates()
    rates.add([Arrival(peers(1)[0], MIN_BYTES - 1, 1.0), Arrival(peers(1)[0], MIN_BYTES, 0.0)])
    assert rates.bytes_per_s() == {}


def test_only_parts_that_were_not_held_back_say_how_fast_a_link_is() -> None:
    assembly = PartialPayload(size_bytes=10, hash=b"")
    assembly.add(0, b"ab", now=5.0, paced=False)
    assembly.add(2, b"cde", now=6.0, paced=False)
    assembly.add(5, b"f", now=20.0, paced=True)
    assert not assembly.add(6, b"gh", now=20.5, paced=False)
    assert assembly.add(8, b"ij", now=99.0, paced=True)
    assert (assembly.timed_bytes, assembly.timed_s) == (5, 1.5)


def test_no_more_peers_are_remembered_than_there_may_be() -> None:
    rates = ArrivalRates()
    all_peers = peers(MAX_PEERS + 5)
    for peer in all_peers:
        rates.add([Arrival(peer, MIN_BYTES, 1.0)])
    assert list(rates.bytes_per_s()) == all_peers[5:]


def test_without_reports_rates_are_equal_or_the_median() -> None:
    *known, new = peers(6)
    assert agreed_rates(known, {}) == dict.fromkeys(known, UNMEASURED_BYTES_PER_S)
    reports = truthful(dict(zip(known, [1e6, 2e6, 2e6, 2e6, 9e6], strict=True)))
    assert agreed_rates([*known, new], reports)[new] == 2e6


def test_reports_about_the_reporter_or_a_non_member_do_not_count() -> None:
    members = peers(3)
    reports = {members[0]: {members[0]: 1e12, PeerId("stranger"): 1.0}}
    assert set(agreed_rates(members, reports).values()) == {UNMEASURED_BYTES_PER_S}


@given(st.lists(RATES, min_size=4, max_size=12), st.data())
def test_among_four_or_more_one_liar_changes_nothing(true_rates: list[float], data: st.DataObject) -> None:
    members = peers(len(true_rates))
    truth = dict(zip(members, true_rates, strict=True))
    lies = {peer: data.draw(ANYTHING) for peer in members}
    assert agreed_rates(members, truthful(truth) | {members[0]: lies}) == truth


@given(st.tuples(RATES, RATES, RATES), st.tuples(ANYTHING, ANYTHING))
def test_of_three_one_liar_moves_others_no_further_than_to_the_middle(
    true_rates: tuple[float, float, float], lies: tuple[float, float]
) -> None:
    members = peers(3)
    truth = dict(zip(members, true_rates, strict=True))
    reports = truthful(truth) | {members[0]: dict(zip(members[1:], lies, strict=True))}
    agreed = agreed_rates(members, reports)
    assert agreed[members[0]] == truth[members[0]]
    for member in members[1:]:
        middles = [
            statistics.median_low([*honest, lie])
            for honest in [[min(true_rates)] * 2, [max(true_rates)] * 2]
            for lie in lies
        ]
        bounds = [truth[member], *middles]
        assert min(bounds) <= agreed[member] <= max(bounds)


@pytest.mark.parametrize("lie", [1e-300, 1e12])
def test_of_three_equals_a_liar_changes_nothing(lie: float) -> None:
    members = peers(3)
    reports = truthful(dict.fromkeys(members, 1e6)) | {members[0]: dict.fromkeys(members, lie)}
    assert set(agreed_rates(members, reports).values()) == {1e6}


def test_a_liar_is_not_believed_before_the_others_have_measured() -> None:
    members = peers(4)
    lies = dict.fromkeys(members[1:], 1e-3)
    assert len(set(agreed_rates(members, {members[0]: lies}).values())) == 1
    reports = {members[0]: lies} | {peer: {members[0]: 1e6} for peer in members[1:]}
    assert set(agreed_rates(members, reports).values()) == {1e6}


@given(st.lists(RATES, min_size=3, max_size=20), st.integers(0, 19))
def test_no_member_reduces_more_than_half(rates: list[float], fastest: int) -> None:
    rates[fastest % len(rates)] = 1e12
    count = 1 << 24
    owned = [end - start for start, end in partition(count, rates)]
    assert max(owned) <= count // 2 + ALIGNMENT
    assert sum(owned) == count


def test_each_of_two_members_reduces_half() -> None:
    assert partition(1 << 20, [1e12, 1.0]) == ((0, 1 << 19), (1 << 19, 1 << 20))
