"""A peer changes its experts for one host at a time, who has it compute most rows, and few at
once."""

import pytest

from swarmnet_node.experts import expert_choice
from swarmnet_node.experts.expert_choice import (
    ARRANGER_S,
    PERIOD_S,
    SHARE,
    Followed,
    accepted_drops,
    accepted_loads,
    follows,
)
from swarmnet_protocols.net import PeerId
from tests.defences import defence, replacing

A, B = PeerId("a"), PeerId("b")
COUNTS = dict.fromkeys(range(8), 32)


@defence(
    "a peer moves experts for the host that sends most rows",
    off=replacing(expert_choice, "ARRANGER_S", 0.0),
    host=B,
    after_s=PERIOD_S,
    rows={},
    expected=False,
)
@pytest.mark.parametrize(
    ("host", "after_s", "rows", "expected"),
    [
        (A, 0.0, {}, False),
        (A, PERIOD_S, {}, True),
        (B, PERIOD_S, {}, False),
        (B, PERIOD_S, {A: 5, B: 5}, False),
        (B, PERIOD_S, {A: 5, B: 6}, True),
        (B, PERIOD_S - 1, {A: 5, B: 6}, False),
        (B, ARRANGER_S - 1, {}, False),
        (B, ARRANGER_S, {}, True),
    ],
)
def test_a_peer_follows_the_host_that_sends_most_rows(
    host: PeerId, after_s: float, rows: dict[PeerId, int], expected: bool
) -> None:
    assert follows(Followed(A, 100.0), host, 100.0 + after_s, rows) is expected
    assert follows(None, host, 100.0, rows)


def test_one_request_drops_a_share_of_the_experts_that_a_peer_has() -> None:
    held = {0: frozenset(range(16)), 1: frozenset(range(4))}
    assert accepted_drops({0: frozenset({3, 40}), 7: frozenset({0})}, held) == {0: {3}}
    assert sum(map(len, accepted_drops(held, held).values())) == int(SHARE * 20)
    assert accepted_drops(held, {1: frozenset({2})}) == {1: {2}}


def test_one_request_loads_a_share_of_the_capacity_if_there_is_room() -> None:
    held = {0: frozenset({0, 1})}
    many = {block: frozenset(range(32)) for block in range(8)}
    assert accepted_loads({0: frozenset({1, 2, 3})}, held, COUNTS, 3) == {0: {2}}
    assert accepted_loads({0: frozenset({2})}, held, COUNTS, 2) == {}
    assert sum(map(len, accepted_loads(many, held, COUNTS, 200).values())) == int(SHARE * 200)
    unknown = {0: frozenset({32}), 9: frozenset({0})}
    assert accepted_loads(unknown, held, COUNTS, 200) == {}
