"""A peer changes its experts for one host at a time, slowly, and drops none that no other peer has."""

import pytest

from swarmnet_node.experts.expert_choice import (
    ARRANGER_S,
    PERIOD_S,
    Followed,
    accepted_drops,
    accepted_loads,
    follows,
)
from swarmnet_protocols.net import PeerId

A, B = PeerId("a"), PeerId("b")
COUNTS = dict.fromkeys(range(8), 32)


@pytest.mark.parametrize(
    ("host", "after_s", "expected"),
    [
        (A, 0.0, False),
        (A, PERIOD_S, True),
        (B, PERIOD_S, False),
        (B, ARRANGER_S - 1, False),
        (B, ARRANGER_S, True),
    ],
)
def test_a_peer_follows_one_host_at_a_time(host: PeerId, after_s: float, expected: bool) -> None:
    assert follows(Followed(A, 100.0), host, 100.0 + after_s) is expected
    assert follows(None, host, 100.0)


def test_only_experts_that_another_peer_has_are_dropped() -> None:
    held = {0: frozenset({0, 1, 2}), 1: frozenset({5})}
    others = [{0: frozenset({1})}, {0: frozenset({2, 9}), 1: frozenset({6})}]
    wanted = {0: frozenset({0, 1, 9}), 1: frozenset({5}), 7: frozenset({0})}
    assert accepted_drops(wanted, held, others) == {0: {1}}
    assert accepted_drops(wanted, held, []) == {}


def test_experts_are_loaded_while_there_is_room_and_few_at_once() -> None:
    held = {0: frozenset({0, 1})}
    many = {block: frozenset(range(32)) for block in range(8)}
    assert accepted_loads({0: frozenset({1, 2, 3})}, held, [many], COUNTS, 3) == {0: {2}}
    assert accepted_loads({0: frozenset({2})}, held, [many], COUNTS, 2) == {}
    assert sum(map(len, accepted_loads(many, held, [many], COUNTS, 200).values())) == 12  # 5 % of 256
    unknown = {0: frozenset({32}), 9: frozenset({0})}
    assert accepted_loads(unknown, held, [], COUNTS, 200) == {}


def test_experts_that_no_other_peer_has_are_loaded_at_once() -> None:
    many = {block: frozenset(range(32)) for block in range(8)}
    loaded = accepted_loads(many, {}, [{0: frozenset(range(32))}], COUNTS, 250)
    assert sum(map(len, loaded.values())) == 7 * 32 + 12
    assert sum(map(len, accepted_loads(many, {}, [], COUNTS, 100).values())) == 100
