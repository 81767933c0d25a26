"""Real nodes find out that a machine answers as a host and computes something else, and take its
blocks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from swarmnet.swarm_file import load_valid
from swarmnet_protocols.directory.host_announcements import host_announcement
from swarmnet_protocols.joining.network import LOOPBACK, Network, connect
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.protocol_ids import PASS, PING
from swarmnet_protocols.routing.relocation import LOOK_S
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb
from tests.support.attacks.forgers import constant
from tests.support.attacks.invented_hosts import answer_as_host, answer_passes
from tests.support.processes.nodes import Swarm
from tests.support.swarm.tiny_swarm import load_tiny

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
TAKEN_S = 8 * LOOK_S


@asynccontextmanager
async def idle_host(lab: Swarm, manifest: bytes, span: tuple[int, int]) -> AsyncIterator[None]:
    """A machine that answers for blocks that it does not have, and claims to be fast."""
    rules = load_valid(lab.file, wall_clock()).rules()
    peer = P2pdConfig(lab.directory / "idle.key", LOOPBACK, bootstrap=tuple(lab.bootstrap))
    async with connect(Network(rules, peer)) as (transport, directory):
        await transport.serve(PING, partial(answer_as_host, manifest, *span))
        await transport.serve(PASS, partial(answer_passes, constant))

        async def renew() -> None:
            while True:
                record = pb.HostRecord(
                    manifest=manifest,
                    start=span[0],
                    end=span[1],
                    state=pb.HOST_STATE_ONLINE,
                    step_s=1e-6,
                    stays=True,
                    precision="f32",
                )
                await host_announcement(record, transport, Timing().record_s).publish(directory)
                await asyncio.sleep(Timing().announce_s)

        async with in_background(renew()):
            yield


def test_nodes_take_the_blocks_of_a_machine_with_false_outputs(tmp_path: Path) -> None:
    """In virtual time, with all kinds of such machines: ``sim/defences/test_idle_hosts.py``."""
    manifest = load_tiny(tmp_path).local.manifest.hash
    lab = Swarm(tmp_path / "lab", tmp_path / "cache", model=str(tmp_path / "model"))

    def spans() -> set[tuple[int, int]]:
        records = [node.status.host.record for node in lab.nodes.values()]
        return {(record.start, record.end) for record in records}

    async def scenario() -> None:
        first = await asyncio.to_thread(lambda: lab.launch("a", "--num-blocks", "3").ready)
        own = tuple(first["blocks"])
        claimed = (3, 6) if own == (0, 3) else (0, 3)
        async with idle_host(lab, manifest, claimed):
            await asyncio.sleep(2.0)
            second = await asyncio.to_thread(lambda: lab.launch("b", "--num-blocks", "3").ready)
            assert tuple(second["blocks"]) == own, "all blocks seem to have a host"
            async with asyncio.timeout(TAKEN_S):
                while await asyncio.to_thread(spans) != {own, claimed}:  # noqa: ASYNC110 - a process
                    await asyncio.sleep(1.0)

    try:
        asyncio.run(scenario())
    finally:
        lab.close()
