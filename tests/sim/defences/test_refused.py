"""The errors of a client whose streams are refused by hosts."""

import pytest

from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net.limits.resource_limits import Resource
from tests.support.network.private_swarm import PrivateSwarm
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("private", [None, PrivateSwarm()], ids=["open", "private"])
def test_hosts_out_of_resources_are_named_and_answer_later(
    reference: Reference, private: PrivateSwarm | None
) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        host = lab.network.find(lab.peer_id("a"))
        assert host is not None
        host.resources.limit(Resource.INBOUND_STREAMS, per_peer=0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            with pytest.raises(
                OutOfResources, match=f"{host.peer_id} refused the stream: it is out of resources"
            ) as info:
                await lab.generate(chain, PROMPT, 2)
            assert "try again later" in info.value.hint
            host.resources.limit(Resource.INBOUND_STREAMS, per_peer=99)
            async with lab.chain(swarm) as another:
                assert await lab.generate(another, PROMPT, 2) == reference.greedy(PROMPT, 2)

    simulate(reference, scenario, private=private)
