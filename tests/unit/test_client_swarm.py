"""A client excludes a host, or a pair of neighbours, for a time, and forgets hosts that left."""

import asyncio
import random

from swarmnet_client.swarm.pings import PingMonitor
from swarmnet_client.swarm.swarm import CONVICTED_S, SEPARATED_S, Exclusions
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.memory import LinkProfile, MemoryNetwork
from swarmnet_protocols.routing.chain_search import HostInfo, pair_of
from swarmnet_protocols.timing import Timing

ONE, OTHER = PeerId("one"), PeerId("other")


def test_a_pair_is_kept_apart_for_a_while_in_either_order() -> None:
    exclusions = Exclusions()
    exclusions.separate(OTHER, ONE, now=5.0)
    assert exclusions.separated(5.0 + SEPARATED_S - 1) == {pair_of(ONE, OTHER)}
    assert not exclusions.separated(5.0 + SEPARATED_S)


def test_a_conviction_ends() -> None:
    exclusions = Exclusions()
    assert not exclusions.is_convicted(ONE, now=0.0)
    exclusions.convict(ONE, now=0.0)
    assert exclusions.is_convicted(ONE, now=CONVICTED_S - 1)
    assert not exclusions.is_convicted(OTHER, now=CONVICTED_S - 1)
    assert not exclusions.is_convicted(ONE, now=CONVICTED_S)


def test_a_conviction_outlasts_an_answer() -> None:
    exclusions = Exclusions()
    exclusions.bans.failed(ONE, 0.0)
    exclusions.convict(ONE, now=0.0)
    exclusions.bans.served(ONE)
    assert not exclusions.bans.at(0.0)
    assert exclusions.is_convicted(ONE, now=0.0)


def test_measurements_of_a_host_that_left_are_dropped() -> None:
    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile())
        monitor = PingMonitor(network.transport(PeerId("client")), Timing(), random.Random(0), lambda _: None)
        monitor.delay_s |= {ONE: 0.1, OTHER: 0.1}
        monitor.queue_s |= {ONE: 0.0, OTHER: 0.0}
        monitor.follow({ONE: HostInfo(ONE, 0, 4, 0.1)})
        assert monitor.delay_s.keys() == monitor.queue_s.keys() == {ONE}
        await monitor.close()

    asyncio.run(scenario())
