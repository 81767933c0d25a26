"""A trunk reports the experts that it waits for, and peers report the experts that they compute."""

import asyncio
import random
import re

import pytest

from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.directory.node_reports import experts_of
from swarmnet_protocols.directory.node_reports import rows_of as rows_by_expert
from swarmnet_protocols.errors import NoRoute
from swarmnet_protocols.wire import records_pb2
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.virtual_time import WaitingExecutor
from tests.support.swarm.expert_lab import (
    LAN,
    ExpertLab,
    report_of,
    told,
)
from tests.support.swarm.fake_machine import FakeMachine
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, peer, simulate


def test_reports_say_who_computes_which_experts(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        blocks = {*experts.blocks}
        starting = asyncio.create_task(experts.trunk("trunk", own=range(2)))
        await asyncio.sleep(30)
        async with lab.network.transport(lab.peer_id("observer")) as observer:
            waiting = (await report_of(observer, lab.peer_id("trunk"))).host
            assert waiting.record.state == records_pb2.HOST_STATE_JOINING
            lacked = {block: frozenset(range(2, 8)) for block in blocks}
            assert experts_of(waiting.trunk.lacks) == experts_of(waiting.trunk.missing) == lacked
            assert experts_of(waiting.experts) == experts.everywhere(range(2))
            peer = await experts.peer("peer", experts.everywhere(range(2, 8)))
            trunk = await starting
            await told(lab)
            there = (await report_of(observer, lab.peer_id("peer"))).host
            assert there.expert_streams == 1
            rows = rows_by_expert(there.experts)
            assert {block for block, _ in rows} == blocks
            assert {expert for _, expert in rows} <= {*range(2, 8)}
            host = (await report_of(observer, lab.peer_id("trunk"))).host
            assert (host.record.state, len(host.trunk.missing)) == (records_pb2.HOST_STATE_ONLINE, 0)
            assert list(host.trunk.round_trips_s) == pytest.approx([2 * LAN.delay_s], rel=0.5)
            assert (
                sum(rows.values())
                == host.trunk.rows
                == sum(rows_by_expert(peer.status().host.experts).values())
                > 0
            )
            await lab.stop("peer")
            await asyncio.sleep(5)
            alone = (await report_of(observer, lab.peer_id("trunk"))).host
            assert experts_of(alone.trunk.missing) == lacked
            status = trunk.status()
            assert (status.state, experts_of(status.host.trunk.missing)) == ("joining", lacked)

    simulate(mixtral, scenario, link=LAN)


def test_a_trunks_owner_sees_which_experts_it_awaits_and_may_end_it(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        hosting = experts.trunk_hosting(range(2), WaitingExecutor())
        async with lab.supervised(
            "trunk", hosting, FakeMachine(), OwnerLimits(), is_loaded=False
        ) as supervisor:
            await asyncio.sleep(30)
            status = supervisor.status()
            assert status.state == "joining"
            missing = experts_of(status.host.trunk.missing)
            assert missing == {block: frozenset(range(2, 8)) for block in experts.blocks}
            supervisor.finish(30.0)
            assert not await supervisor.started()
            await supervisor.finished()
            await asyncio.sleep(1.0)
            directory = MemoryDirectory(lab.board, peer("looker"), SWARM)
            async with lab.client("looker"):
                [found] = await HostSample(directory, lab.manifest, random.Random(0)).refresh()
            assert found.state == "leaving"

    simulate(mixtral, scenario, link=LAN)


def test_a_client_is_told_for_which_experts_hosts_wait(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        starting = asyncio.create_task(experts.trunk("trunk", own=range(2)))
        await experts.peer("peer", experts.everywhere(range(2, 7)))
        await asyncio.sleep(20)
        with pytest.raises(NoRoute, match=r"hosts wait for experts 0-\d:7 \(block:experts\)") as raised:
            await told(lab)
        assert re.search(r"swarmnet join SWARM --experts '0-\d:7'", raised.value.hint)
        starting.cancel()

    simulate(mixtral, scenario, link=LAN)
