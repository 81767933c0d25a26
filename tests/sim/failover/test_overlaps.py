"""Hosts whose blocks overlap fail, leave, move, refuse or are cut off at any message of an answer:
the client sees a pause, never an error."""

import pytest

from swarmnet_client.chain import standby
from tests.sim.failover.overlaps import PROMPT, TOKENS, converse
from tests.support.swarm.swarm_lab import Reference, simulate

LAYOUTS = 8
"""Swarms of each seed: every other one with two faults, one soon after the other."""
HARD = (167, 1957, 2043, 2621, 5865, 5961, 7317)
"""Swarms in which answers once failed or waited for long: pairs of hosts that do not reach each
other, hosts that refuse, and hosts that move, in the same chain."""


def test_an_answer_over_overlapping_hosts_survives_one_or_two_of_them(
    reference: Reference, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block always has a host that is well. No host follows itself in a chain: it could not
    dial itself."""
    monkeypatch.setattr(standby, "SPARE_POSITIONS", len(PROMPT))
    for number in range(LAYOUTS):
        check(reference, LAYOUTS * seed + number)


@pytest.mark.parametrize("swarm", HARD)
def test_an_answer_goes_on_over_the_hardest_swarms(
    reference: Reference, swarm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "SPARE_POSITIONS", len(PROMPT))
    check(reference, swarm)


def check(reference: Reference, swarm: int) -> None:
    """The tokens are right, no host follows itself, and no wait is longer than the faults
    explain."""
    answer = simulate(reference, lambda lab: converse(lab, faults=1 + swarm % 2), seed=swarm)
    assert answer.tokens == reference.greedy(PROMPT, TOKENS)
    assert not answer.repeats, answer
    assert answer.longest_s <= answer.bound_s + 1e-6, answer
