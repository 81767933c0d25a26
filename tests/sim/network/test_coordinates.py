"""Hosts and clients learn where they are in delay space from their own pings, and a client
estimates delays between hosts that it never measured."""

import asyncio

import pytest

from tests.support.network.memory_network import LinkProfile
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PLACES_S = {"a": 0.0, "b": 0.01, "c": 0.09, "d": 0.1, "client": 0.05}
"""Places along one line, in seconds: two pairs of neighbours, with the client between the pairs."""


def test_a_client_estimates_the_delay_between_two_hosts(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        names = list(PLACES_S)
        for index, one in enumerate(names):
            for other in names[:index]:
                delay_s = abs(PLACES_S[one] - PLACES_S[other]) + 0.002
                for pair in ((one, other), (other, one)):
                    lab.network.set_link(*map(lab.peer_id, pair), LinkProfile(delay_s=delay_s))
        for name in "abcd":
            await lab.start(name, lab.hosting((0, 6)))
        async with lab.client() as swarm:
            await asyncio.sleep(600.0)
            view = swarm._view()
            estimated = {
                pair: view.delay_between(*map(lab.peer_id, pair)) for pair in ("ab", "cd", "ac", "bd", "ad")
            }
        assert estimated["ab"] == pytest.approx(0.012, abs=0.01)
        assert estimated["cd"] == pytest.approx(0.012, abs=0.01)
        for far in ("ac", "bd", "ad"):
            assert estimated[far] == pytest.approx(0.09, rel=0.35)

    simulate(reference, scenario, limit_s=900)
