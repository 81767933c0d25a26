"""Messages of misbehaving clients that hosts refuse."""

import asyncio
from typing import Any

import numpy as np
import pytest

from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.session import HostedSession
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.protocol_ids import SESSION
from swarmnet_protocols.session.steps import Row, Step
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing, yes
from tests.support.attacks.raw_client import (
    HIDDEN,
    ID,
    Stranger,
    a_step,
    assert_ends,
    link_reply,
    session_reply,
    with_stranger,
)
from tests.support.attacks.refusals import refusal
from tests.support.attacks.switched_off import count_only
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.swarm_lab import Reference


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": bytes(31)}, refusal_pb2.REASON_WRONG_SWARM),
        ({"manifest": bytes(32)}, refusal_pb2.REASON_WRONG_MODEL),
        ({"span": pb.Span(start=1, end=3)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=1, end=1)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=0, end=1 << 31)}, refusal_pb2.REASON_WRONG_SPAN),
    ],
)
def test_a_session_for_blocks_that_are_not_hosted_is_refused(
    reference: Reference, changes: dict[str, Any], reason: int
) -> None:
    async def talk(stranger: Stranger) -> None:
        assert (await refusal(session_reply(await stranger.send_open(**changes)))).reason == reason

    with_stranger(reference, talk)


@pytest.mark.parametrize(
    "changes", [{"session": b"short"}, {"wire": pb.DTYPE_UNSPECIFIED}, {"session": ID * 2}]
)
def test_an_invalid_open_message_ends_the_stream(reference: Reference, changes: dict[str, Any]) -> None:
    async def talk(stranger: Stranger) -> None:
        await assert_ends(await stranger.send_open(**changes))

    with_stranger(reference, talk)


def test_a_session_id_is_used_once(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        await stranger.send_open()
        await assert_ends(await stranger.send_open())

    with_stranger(reference, talk)


def test_a_session_that_ends_during_a_forward_leaves_nothing(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        engine = stranger.lab.nodes["a"].engine
        assert engine is not None
        engine._executor = TimedExecutor(2.0)
        session, link = await stranger.send_open(), await stranger.link()
        await link_reply(link)
        await stranger.step(link, a_step(1, 0))
        await asyncio.sleep(1.0)
        session.close()
        await asyncio.sleep(2.0)

    with_stranger(reference, talk)


@defence("only the client that opened a session resumes it", off=replacing(HostedSession, "belongs_to", yes))
def test_only_the_client_that_opened_a_session_resumes_it(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session = await stranger.send_open()
        resume = Message(pb.SessionRequest(resume=pb.Resume(session=ID)).SerializeToString())
        lab = stranger.lab
        async with lab.network.transport(lab.peer_id("thief")) as transport:
            stolen = await transport.open(stranger.host, SESSION, deadline_s=1.0)
            await stolen.send(resume)
            refused = await refusal(session_reply(stolen))
            assert refused.reason == refusal_pb2.REASON_UNKNOWN_SESSION
        resumed = await stranger.transport.open(stranger.host, SESSION, deadline_s=1.0)
        await resumed.send(resume)
        assert (await session_reply(session)).HasField("moved")

    with_stranger(reference, talk)


def test_a_session_that_does_not_exist_is_not_resumed(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        stream = await stranger.transport.open(stranger.host, SESSION, deadline_s=1.0)
        await stream.send(Message(pb.SessionRequest(resume=pb.Resume(session=b"short")).SerializeToString()))
        assert (await refusal(session_reply(stream))).reason == refusal_pb2.REASON_UNKNOWN_SESSION

    with_stranger(reference, talk)


@defence("sessions of a client are limited", off=count_only)
def test_no_client_has_more_sessions_than_its_share(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        for number in range(3):
            await stranger.send_open(session=bytes([number]) * 16)
        refused = await refusal(session_reply(await stranger.send_open(session=b"x" * 16)))
        assert refused.reason == refusal_pb2.REASON_OUT_OF_RESOURCES
        assert refused.retry_after_s > 0

    with_stranger(reference, talk, limits=ClientLimits(sessions_per_client=3))


@defence("waiting links of a client are limited", off=count_only)
def test_one_client_leaves_pending_links_to_others(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        for number in range(1, 3):
            await stranger.link(session=bytes([number]) * 16)
        refused = await refusal(link_reply(await stranger.link(session=b"z" * 16)))
        assert "pending links of " + stranger.transport.peer_id in refused.detail

    with_stranger(reference, talk, limits=ClientLimits(pending_links_per_client=2))


@defence("activation logs have a budget", off=count_only)
def test_a_client_that_never_acknowledges_stays_within_the_log_budget(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(), await stranger.link()
        await link_reply(link)
        for number in range(4):
            await stranger.step(link, a_step(number + 1, 4 * number, 4))
        assert all([(await session_reply(session)).HasField("output") for _ in range(3)])
        refused = await refusal(session_reply(session))
        assert refused.reason == refusal_pb2.REASON_OUT_OF_RESOURCES
        assert "log bytes of this session" in refused.detail

    with_stranger(reference, talk, limits=ClientLimits(log_bytes=3 * 4 * HIDDEN * 4))


@defence(
    "positions of a client are accepted at a limited rate", off=replacing(Scope, "charge", lambda *_: 0.0)
)
def test_positions_come_at_the_rate_of_the_client(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(), await stranger.link()
        await link_reply(link)
        started = asyncio.get_running_loop().time()
        for number in range(5):
            await stranger.step(link, a_step(number + 1, 8 * number, 8))
        for _ in range(5):
            assert (await session_reply(session)).HasField("output")
        # 40 positions, of which 16 are a burst, at 4 a second.
        assert asyncio.get_running_loop().time() - started == pytest.approx(6.0, abs=0.2)

    with_stranger(reference, talk, limits=ClientLimits(positions_per_s=4.0))


def test_without_memory_for_a_queue_a_host_reads_one_step_at_a_time(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(), await stranger.link()
        await link_reply(link)
        resources = stranger.lab.nodes["a"].dependencies.transport.resources
        step_bytes = 16 * HIDDEN * 4
        resources.limit(Resource.MEMORY, per_peer=step_bytes + 100)
        for number in range(3):
            await stranger.step(link, a_step(number + 1, 16 * number, 16))
        for _ in range(3):
            assert (await session_reply(session)).HasField("output")
        resources.limit(Resource.MEMORY, per_peer=step_bytes - 1)
        await stranger.step(link, a_step(4, 48, 16))
        await assert_ends(link)

    with_stranger(reference, talk)


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([a_step(2, 0)], refusal_pb2.REASON_PROTOCOL),
        ([a_step(1, 3)], refusal_pb2.REASON_PROTOCOL),
        ([a_step(1, 0, 4), a_step(2, 2)], refusal_pb2.REASON_PROTOCOL),
        ([a_step(1, 0), a_step(1, 0)], refusal_pb2.REASON_PROTOCOL),
        ([a_step(1, 0), a_step(1, 1, replay=True)], refusal_pb2.REASON_PROTOCOL),
        ([a_step(1, 0, 60), a_step(2, 60, 5)], refusal_pb2.REASON_TOO_LONG),
    ],
    ids=["late start", "gap", "overlap", "repetition", "replay after steps", "too long"],
)
def test_steps_in_the_wrong_order_or_position_end_the_session(
    reference: Reference, steps: list[Step], reason: int
) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(), await stranger.link()
        assert (await link_reply(link)).HasField("linked")
        for step in steps:
            await stranger.step(link, step)
        assert all([(await session_reply(session)).HasField("output") for _ in steps[1:]])
        assert (await refusal(session_reply(session))).reason == reason

    with_stranger(reference, talk)


def test_a_step_of_the_wrong_shape_ends_its_link(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        await stranger.send_open()
        link = await stranger.link()
        await link_reply(link)
        await stranger.step(link, a_step(1, 0, width=HIDDEN + 1))
        await assert_ends(link)

    with_stranger(reference, talk)


def test_a_link_of_an_old_epoch_is_refused_and_a_newer_one_takes_over(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        await stranger.send_open()
        first = await stranger.link(epoch=5)
        assert (await link_reply(first)).HasField("linked")
        refused = await refusal(link_reply(await stranger.link(epoch=4)))
        assert refused.reason == refusal_pb2.REASON_STALE_EPOCH
        assert (await link_reply(await stranger.link(epoch=6))).HasField("linked")
        await assert_ends(first)

    with_stranger(reference, talk)


def test_a_link_waits_a_limited_time_for_its_session(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        early = await stranger.link()
        await stranger.send_open()
        assert (await link_reply(early)).HasField("linked")
        lost = await stranger.link(session=b"y" * 16)
        assert (await refusal(link_reply(lost))).reason == refusal_pb2.REASON_UNKNOWN_SESSION

    with_stranger(reference, talk)


def test_waiting_links_are_bounded_and_closed_ones_are_forgotten(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        waiting = [await stranger.link(session=bytes([number]) * 16) for number in range(1, 4)]
        refused = await refusal(link_reply(await stranger.link(session=b"z" * 16)))
        assert refused.reason == refusal_pb2.REASON_OUT_OF_RESOURCES
        assert refused.retry_after_s > 0
        for link in waiting:
            link.close()
        await asyncio.sleep(1.0)
        early = await stranger.link()
        await stranger.send_open()
        assert (await link_reply(early)).HasField("linked")

    with_stranger(reference, talk, limits=ClientLimits(pending_links=3))


@defence("KV caches have a budget", off=count_only)
def test_a_cache_over_its_budget_is_refused_before_it_is_allocated(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(max_length=1 << 20), await stranger.link()
        await link_reply(link)
        await stranger.step(link, a_step(1, 0, 60))
        assert (await session_reply(session)).HasField("output")
        held = stranger.lab.cache_bytes()["a"]
        await stranger.step(link, a_step(2, 60, 60))
        assert (await refusal(session_reply(session))).reason == refusal_pb2.REASON_OUT_OF_RESOURCES
        assert stranger.lab.cache_bytes().get("a", 0) <= held

    with_stranger(reference, talk, max_cache_bytes=80_000)


def test_a_client_that_does_not_read_loses_its_session(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        await stranger.send_open(max_length=1 << 20)
        link = await stranger.link()
        await link_reply(link)
        count = 1000
        for seq in range(1, 16):
            rows = (Row(0, 0, count, count, 0, seq > 1),)
            await stranger.step(link, Step(seq, rows, np.zeros((count, HIDDEN), np.float32)))
        await asyncio.sleep(2 * stranger.lab.timing.client_silence_s)
        assert stranger.lab.sessions() == {}
        assert stranger.lab.cache_bytes() == {}

    with_stranger(reference, talk)
