"""What a node publishes of itself says nothing about the folders of its machine."""

import asyncio
from dataclasses import replace
from pathlib import Path

from swarmnet_protocols.directory.catalog import ANNOUNCE_S, read_catalog
from tests.sim.test_experts import report_of
from tests.support.memory_directory import MemoryDirectory
from tests.support.swarm_lab import SWARM, Lab, Reference, peer, simulate


def test_a_model_on_this_machine_is_published_without_its_path(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        path = str(Path("/home/alice/models/my-model"))
        await lab.start("a", replace(lab.hosting((0, 6)), model=path))
        await asyncio.sleep(2 * ANNOUNCE_S)
        catalog = await read_catalog(MemoryDirectory(lab.board, peer("reader"), SWARM))
        assert [model.name for model in catalog.models] == ["my-model"]
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            report = await report_of(transport, lab.peer_id("a"))
        assert report.host.model == "my-model"
        assert b"alice" not in report.SerializeToString()
        assert lab.nodes["a"].status().model == path

    simulate(reference, scenario)
