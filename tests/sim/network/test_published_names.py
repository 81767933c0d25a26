"""What a node publishes of itself says nothing about the folders of its machine."""

import asyncio
from dataclasses import replace
from pathlib import Path

from swarmnet_node import running_node
from swarmnet_protocols.directory.catalog import TOPIC
from tests.defences import defence, replacing
from tests.support.swarm.expert_lab import report_of
from tests.support.swarm.swarm_lab import Lab, Reference, simulate


@defence(
    "the public name of a model has no path",
    off=replacing(running_node, "name_for_peers", str),
)
def test_a_model_on_this_machine_is_published_without_its_path(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        path = str(Path("/home/alice/models/my-model"))
        await lab.start("a", replace(lab.hosting((0, 6)), model=path))
        await asyncio.sleep(5.0)
        listed = lab.board.read(TOPIC)
        assert listed
        assert all(b"my-model" in record and b"alice" not in record for record in listed)
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            report = await report_of(transport, lab.peer_id("a"))
        assert report.host.model == "my-model"
        assert b"alice" not in report.SerializeToString()
        assert lab.nodes["a"].status().model == path

    simulate(reference, scenario)
