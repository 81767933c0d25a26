"""Hosts whose blocks overlap fail, leave, move, refuse or are cut off at any message of an answer: the client sees a pause, never an error."""

import pytest

from swarmnet_client.chain import standby
from tests.sim.overlaps import PROMPT, TOKENS, converse
from tests.support.swarm_lab import Reference, simulate

LAYOUTS = 8
"""Swarms of each seed: every other one with two faults, one soon after the other."""


def test_an_answer_goes_on_over_overlapping_hosts_whatever_happens_to_one_or_two_of_them(
    reference: Reference, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block always has a host that is well. No host follows itself in a chain: it could not dial itself."""
    monkeypatch.setattr(standby, "SPARE_POSITIONS", len(PROMPT))
    for number in range(LAYOUTS):
        answer = simulate(
            reference,
            lambda lab, faults=1 + number % 2: converse(lab, faults=faults),
            seed=LAYOUTS * seed + number,
        )
        assert answer.tokens == reference.greedy(PROMPT, TOKENS)
        assert not answer.repeats, answer
        assert answer.longest_s <= answer.bound_s + 1e-6, answer
