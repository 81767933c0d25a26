"""Experts on peers hold against rows that are not finite, false announcements, silent streams and
requests to drop experts."""

import asyncio
import math
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from swarmnet_node import expert_node
from swarmnet_node.expert_node import ExpertNode
from swarmnet_node.experts import expert_choice, expert_link, expert_links, expert_witness
from swarmnet_node.experts.expert_choice import SHARE
from swarmnet_node.experts.expert_link import FAULT_S, MAX_ANSWER_S, ExpertLink
from swarmnet_node.experts.expert_links import ExpertLinks
from swarmnet_node.experts.expert_service import ExpertService
from swarmnet_node.hosting import slots
from swarmnet_node.hosting.slots import NEW_S
from swarmnet_node.node import Node
from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertHost, experts_topic, to_bits
from swarmnet_protocols.directory.host_announcements import PROTOCOL
from swarmnet_protocols.directory.records import Publisher
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.limits.resource_limits import PEER_LIMITS, SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.session.expert_rows import ExpertRows, ExpertsStream, encode_experts, encode_rows
from swarmnet_protocols.session.steps import Row, Step
from swarmnet_protocols.wire import records_pb2, session_pb2
from tests.defences import Patch, defence, nothing, replacing, yes
from tests.support.attacks.raw_client import Stranger
from tests.support.network.memory_network import LinkProfile, MemoryTransport
from tests.support.swarm.expert_lab import (
    LAN,
    LONG,
    PROMPTS,
    ExpertLab,
    FaultyService,
    attach,
    open_experts,
    spread,
    told,
)
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, peer, simulate


async def assert_answers_rightly(lab: Lab) -> None:
    assert (await told(lab)).tokens == lab.reference.greedy(PROMPTS[3], LONG)


def claim(lab: Lab, name: str, experts: BlockExperts) -> None:
    """Publish that an invented peer, which does not answer, has ``experts``."""
    local = lab.reference.local
    record = records_pb2.ExpertsRecord(
        manifest=lab.manifest,
        state=records_pb2.HOST_STATE_ONLINE,
        protocol=PROTOCOL,
        precision=local.precision,
        blocks=[
            records_pb2.BlockExperts(block=block, experts=to_bits(each)) for block, each in experts.items()
        ],
    )
    publisher = Publisher(peer(name), SWARM, lab.board.clock)
    topic = experts_topic(lab.manifest)
    lab.board.post(*publisher.seal(topic, record.SerializeToString(), lifetime_s=3600.0))


# ---- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_bring_no_peer_into_discredit(mixtral: Reference, value: float) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        for number, own in enumerate([*spread(2), *spread(2)]):
            await experts.peer(f"peer{number}", experts.everywhere(own))
        trunk = await experts.trunk("a", own=())
        assert trunk.experts.dispatcher is not None
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            stranger = Stranger(lab, transport)
            await stranger.send_open(span=session_pb2.Span(start=0, end=4))
            link = await stranger.link()
            step = Step(1, (Row(0, 0, 1, 1, 0),), np.full((1, 32), value, np.float32))
            await stranger.step(link, step)
            await asyncio.sleep(5.0)
        now = asyncio.get_running_loop().time()
        assert len(trunk.experts.dispatcher.links.every) == 4
        for each in trunk.experts.dispatcher.links.every:
            assert each.is_open
            assert not each.is_avoided(now)
        await assert_answers_rightly(lab)

    simulate(mixtral, scenario, link=LAN)


@defence("no fault excludes a peer for good", off=replacing(expert_link, "FAULT_S", 1e9))
def test_a_peer_with_answers_of_a_wrong_shape_is_tried_ever_later(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        everything = experts.everywhere(range(8))
        lab.network.set_link(lab.peer_id("trunk"), lab.peer_id("honest"), LinkProfile(delay_s=0.003))
        await experts.peer("honest", everything)
        await experts.trunk("trunk", own=())
        faulty = await experts.faulty_peer("faulty", everything, "wrong shape")
        asked = []
        for pause_s in (10.0, FAULT_S - 20.0, FAULT_S, 2 * FAULT_S - 20.0):
            await asyncio.sleep(pause_s)
            await assert_answers_rightly(lab)
            asked.append(faulty.asked)
        assert asked == [1, 1, 2, 2]

    simulate(mixtral, scenario, link=LAN, limit_s=300)


# ---- announcements -----------------------------------------------------------------------------


@defence(
    "dead announcements do not keep out peers that answer",
    off=replacing(expert_links, "in_turn", lambda peers, *_: sorted(peers)),
)
def test_dead_announcements_do_not_keep_out_peers_that_answer(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        everything = experts.everywhere(range(8))
        for number in range(3 * expert_links.MAX_LINKS):
            claim(lab, f"dead{number}", everything)
        for number, own in enumerate(spread(2)):
            await experts.peer(f"peer{number}", experts.everywhere(own))
        async with asyncio.timeout(20.0):
            await experts.trunk("trunk", own=())
        await assert_answers_rightly(lab)

    simulate(mixtral, scenario, link=LAN)


def keep_only_announced(patch: Patch) -> None:
    """Links end with the announcements of their peers."""
    update = ExpertLinks._update

    async def updating(links: ExpertLinks, hosts: Mapping[PeerId, ExpertHost]) -> None:
        for gone in links._links.keys() - hosts.keys():
            await links._drop(gone)
        await update(links, hosts)

    patch.setattr(ExpertLinks, "_update", updating)


async def announced(links: ExpertLinks) -> list[BlockExperts]:
    """In place of what peers say when they answer."""
    return [each.experts for each in await links._sample.refresh()]


@defence("no flood of announcements ends links that are open", off=keep_only_announced)
def test_a_link_outlives_the_announcement_of_its_peer(mixtral: Reference) -> None:
    """A flood may keep it out of every sample of the directory."""

    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        await experts.peer("peer", experts.everywhere(range(8)))
        trunk = await experts.trunk("trunk", own=())
        lab.board._postings.clear()
        lab.board.post = lambda *_: None  # type: ignore[method-assign] - nothing is found from here on
        await asyncio.sleep(100.0)
        assert trunk.experts.dispatcher is not None
        assert not trunk.experts.dispatcher.links.missing()

    simulate(mixtral, scenario, link=LAN)


def end_links_by_any_error(patch: Patch) -> None:
    """An error that is none of swarmnet's ends the task of a link."""

    async def keep_open(link: ExpertLink) -> None:
        await link._run()

    patch.setattr(ExpertLink, "keep_open", keep_open)


@defence("no error that an address causes ends the search for peers with experts", off=end_links_by_any_error)
def test_an_address_that_raises_any_error_ends_no_search(
    mixtral: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        everything = experts.everywhere(range(8))
        for number in range(2 * expert_links.MAX_TRIED):
            claim(lab, f"dead{number}", everything)
        honest = await experts.peer("peer", everything)
        opened = MemoryTransport.open

        async def failing(
            transport: MemoryTransport, target: PeerId, protocol: ProtocolSpec, **options: Any
        ) -> Stream:
            if protocol is EXPERTS and target != lab.peer_id("peer"):
                raise ValueError("invalid literal for int() with base 10: '²'")
            return await opened(transport, target, protocol, **options)

        monkeypatch.setattr(MemoryTransport, "open", failing)
        async with asyncio.timeout(20.0):
            await experts.trunk("trunk", own=())
        assert honest.status().host.expert_streams == 1

    simulate(mixtral, scenario, link=LAN)


def wait_as_announced(patch: Patch) -> None:
    for bound in ("MAX_ANSWER_S", "MAX_ROW_S"):
        patch.setattr(expert_link, bound, math.inf)


@defence("an announced time does not make a host wait for ever", off=wait_as_announced)
def test_a_peer_that_never_answers_holds_a_forward_a_minute_at_most(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        everything = experts.everywhere(range(8))
        await experts.peer("peer", everything)
        trunk = await experts.trunk("trunk", own=())
        silent = await experts.faulty_peer("silent", everything, "no reply", row_s=3600.0)
        await asyncio.sleep(10.0)
        await lab.stop("peer")
        assert trunk.experts.dispatcher is not None
        started = asyncio.get_running_loop().time()
        with pytest.raises(SwarmnetError):
            await trunk.experts.dispatcher.compute(0, torch.zeros(1, 32), {1: torch.tensor([0])})
        assert silent.asked > 0
        assert asyncio.get_running_loop().time() - started < MAX_ANSWER_S + 10.0

    simulate(mixtral, scenario, link=LAN, limit_s=200)


# ---- streams -----------------------------------------------------------------------------------


@defence(
    "silent streams give way to a host that needs experts", off=replacing(slots, "slot_to_evict", nothing)
)
def test_silent_streams_give_way_to_a_host_that_needs_experts(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        node = await experts.peer("peer", experts.everywhere(range(8)))
        async with AsyncExitStack() as stack:
            for number in range(SYSTEM_LIMITS[Resource.EXPERTS] // PEER_LIMITS[Resource.EXPERTS]):
                name = f"silent{number}"
                lab.network.move(lab.peer_id(name), f"/ip4/10.0.0.{number}/tcp/1")
                transport = await stack.enter_async_context(lab.network.transport(lab.peer_id(name)))
                for _ in range(PEER_LIMITS[Resource.EXPERTS]):
                    stream = await open_experts(lab, transport, "peer")
                    await stream.send(attach(lab))
                    await stream.receive()
            assert node.status().host.expert_streams == SYSTEM_LIMITS[Resource.EXPERTS]
            await asyncio.sleep(NEW_S)
            async with asyncio.timeout(20.0):
                await experts.trunk("trunk", own=())
            await assert_answers_rightly(lab)

    simulate(mixtral, scenario, link=LAN)


# ---- requests to move experts ------------------------------------------------------------------


async def ask_to_drop(lab: Lab, target: str, experts: BlockExperts) -> None:
    """Ask a peer to drop experts, as a host does, once announcements are visible, and wait until it
    has decided."""
    await asyncio.sleep(5.0)
    async with lab.network.transport(lab.peer_id("stranger")) as transport:
        stream = await open_experts(lab, transport, target)
        await stream.send(attach(lab))
        await stream.receive()
        message = session_pb2.Rearrange(drops=encode_experts(experts))
        await stream.send(session_pb2.ExpertsRequest(rearrange=message))
        await asyncio.sleep(45.0)


def count(experts: BlockExperts) -> int:
    return sum(map(len, experts.values()))


def every_cell(experts: BlockExperts) -> set[tuple[int, int]]:
    return {(block, expert) for block, each in experts.items() for expert in each}


@dataclass(frozen=True)
class Only:
    """A peer that has every expert and lets hosts choose, and a host without experts."""

    experts: ExpertLab
    every: BlockExperts
    peer: ExpertNode
    trunk: Node

    @classmethod
    async def start(cls, lab: Lab) -> "Only":
        experts = ExpertLab(lab)
        every = experts.everywhere(range(8))
        node = await experts.choosing_peer("peer", count(every))
        return cls(experts, every, node, await experts.trunk("trunk", own=()))

    def is_complete(self) -> bool:
        """Whether the host reaches every expert."""
        assert self.trunk.experts.dispatcher is not None
        return not self.trunk.experts.dispatcher.links.missing()


async def believed(links: ExpertLinks, _compute: object) -> BlockExperts:
    """In place of a look at other peers."""
    return links.wanted


@defence(
    "no expert is dropped because an announcement names it",
    off=replacing(expert_node, "computed_elsewhere", believed),
)
def test_no_expert_is_dropped_because_an_announcement_names_it(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        only = await Only.start(lab)
        claim(lab, "liar", only.every)
        dropping = asyncio.create_task(ask_to_drop(lab, "peer", only.every))
        while not dropping.done():
            await asyncio.sleep(1.0)
            assert only.is_complete()
        await dropping
        assert every_cell(only.peer.experts) == every_cell(only.every)
        await assert_answers_rightly(lab)

    simulate(mixtral, scenario, link=LAN)


class Parrot(FaultyService):
    """Has the peer that it imitates compute its rows."""

    async def compute(self, request: ExpertRows) -> torch.Tensor:
        if not request.rows:
            return request.values
        self.asked += 1
        async with self.lab.network.transport(self.lab.peer_id("helper")) as transport:
            stream = await open_experts(self.lab, transport, "peer")
            await stream.send(attach(self.lab))
            await stream.receive()
            message, payload = encode_rows(request, 1)
            await stream.send(session_pb2.ExpertsRequest(rows=message), payload)
            reply, outputs = await stream.receive()
            return torch.frombuffer(bytearray(outputs), dtype=torch.float32).reshape(
                *reply.computed.tensor.shape
            )

    async def _answer(self, stream: ExpertsStream, number: int, rows: ExpertRows) -> None:
        await ExpertService._answer(self, stream, number, rows)


@defence(
    "no expert is dropped for a peer that has it computed by its only holder",
    off=replacing(ExpertService, "withhold", nothing),
)
def test_no_expert_is_dropped_for_a_peer_that_asks_its_only_holder(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        only = await Only.start(lab)
        parrot = await only.experts.faulty_peer("parrot", only.every, "", kind=Parrot)
        await ask_to_drop(lab, "peer", only.every)
        assert parrot.asked > 0
        assert every_cell(only.peer.experts) == every_cell(only.every)

    simulate(mixtral, scenario, link=LAN)


@defence("one message moves a share of a peer's experts", off=replacing(expert_choice, "SHARE", 1.0))
def test_one_message_moves_a_share_of_the_experts_of_another_peer(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        only = await Only.start(lab)
        await only.experts.peer("other", only.every)
        await ask_to_drop(lab, "peer", only.every)
        every = count(only.every)
        assert count(only.peer.experts) == every - int(SHARE * every)
        assert only.is_complete()
        await assert_answers_rightly(lab)

    simulate(mixtral, scenario, link=LAN)


@defence(
    "no expert is dropped for a peer that computes it wrongly", off=replacing(expert_witness, "is_alike", yes)
)
def test_no_expert_is_dropped_for_a_peer_that_computes_it_wrongly(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        only = await Only.start(lab)
        wrong = await only.experts.faulty_peer("wrong", only.every, "false")
        await ask_to_drop(lab, "peer", only.every)
        assert wrong.asked > 0
        assert every_cell(only.peer.experts) == every_cell(only.every)

    simulate(mixtral, scenario, link=LAN)


@defence(
    "a joining peer counts the experts of peers that answer",
    off=replacing(expert_node, "answering", announced),
)
def test_a_joining_peer_counts_the_experts_of_peers_that_answer(mixtral: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        experts = ExpertLab(lab)
        for number in range(3):
            claim(lab, f"liar{number}", experts.everywhere(range(4)))
        await experts.peer("honest", experts.everywhere(range(2)))
        await asyncio.sleep(5.0)
        joined = await experts.choosing_peer("peer", count(experts.everywhere(range(2))))
        assert every_cell(joined.experts) == every_cell(experts.everywhere({2, 3}))

    simulate(mixtral, scenario, link=LAN)
