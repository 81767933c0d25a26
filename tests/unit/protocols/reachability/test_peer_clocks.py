"""Advice on the clock of this machine, from the times of peers."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.joining.network import Trust
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import PROBE
from swarmnet_protocols.reachability import dial_back
from swarmnet_protocols.reachability.dial_back import Probes, advise_on_clock
from swarmnet_protocols.timing import Timing
from tests.support.network import virtual_time
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork

NOW = 1_800_000_000.0


def advice(*errors_s: float | None) -> str:
    """The advice to a client whose clock is each of ``errors_s`` behind that of a peer; None: the
    peer does not answer."""

    async def nowhere(_: PeerId) -> list[str]:
        return []

    async def main() -> str:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.0))
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(network.transport(Identity.from_seed(b"client").peer_id))
            addresses = []
            for number, error_s in enumerate(errors_s):
                peer = Identity.from_seed(bytes([number])).peer_id
                addresses.append(f"/memory/0/p2p/{peer}")
                if error_s is not None:
                    transport = await stack.enter_async_context(network.transport(peer))
                    ahead_s = NOW + error_s
                    await PROBE.serve(transport, Probes(nowhere, lambda ahead_s=ahead_s: ahead_s).answer)
            return await advise_on_clock(client, addresses)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("errors_s", "said"),
    [
        ((), ""),
        ((None,), ""),
        ((1.0, -2.0), ""),
        ((-7200.0,), "120 minutes ahead of the clocks of peers"),
        ((7200.0, None, 7201.0), "120 minutes behind the clocks of peers"),
        ((0.0, 7200.0, 1.0), ""),
    ],
)
def test_the_median_of_the_peers_that_answer_counts(
    errors_s: tuple[float | None, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_back, "wall_clock", lambda: NOW)
    monkeypatch.setattr(dial_back, "CLOCK_S", 0.2)
    found = advice(*errors_s)
    assert (said in found) if said else not found


def test_a_client_without_hosts_is_told_of_its_clock() -> None:
    """Records of hosts have expired, or seem to: to start another node would not help."""

    async def main() -> str:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.0))
        identity = Identity.from_seed(b"client")
        async with network.transport(identity.peer_id) as client:
            directory = MemoryDirectory(MemoryBoard(network, lambda: NOW), identity, bytes(32))

            async def ahead() -> str:
                return "the clock is ahead"

            rng, timing = random.Random(0), Timing()
            hosts = ModelHosts(client, directory, bytes(32), rng, timing, Trust(), check_clock=ahead)
            await hosts.refresh()
            with pytest.raises(NoRoute) as refused:
                hosts.route((0, 2))
            return refused.value.hint

    assert virtual_time.run(main()) == "the clock is ahead"
