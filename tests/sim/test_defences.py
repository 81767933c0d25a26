"""What hosts refuse from strangers, and what clients refuse from hosts and from records."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from swarmnet_node.host import HostLimits
from swarmnet_protocols.directory import MemoryDirectory
from swarmnet_protocols.errors import OutOfResources, StreamEnded
from swarmnet_protocols.hosts import hosts_topic, read_hosts
from swarmnet_protocols.protocol_ids import LINK, SESSION
from swarmnet_protocols.session.steps import Row, Step, encode_step, encode_tensor
from swarmnet_protocols.transport import Message, Stream, Transport
from swarmnet_protocols.transport.memory import MemoryStream
from swarmnet_protocols.wire import records_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.swarm_lab import SWARM, Lab, Reference, peer, simulate

HIDDEN = 32
ID = bytes(16)


class Stranger:
    """Somebody who speaks to one host in raw messages."""

    def __init__(self, lab: Lab, transport: Transport) -> None:
        self.lab = lab
        self.transport = transport
        self.host = lab.peer_id("a")

    def wanted(self, **changes: Any) -> pb.Open:
        options: dict[str, Any] = {
            "session": ID,
            "epoch": 1,
            "swarm": SWARM,
            "manifest": self.lab.manifest,
            "span": pb.Span(start=0, end=2),
            "wire": pb.DTYPE_FLOAT32,
            "max_length": 64,
        }
        return pb.Open(**{**options, **changes})

    async def send_open(self, **changes: Any) -> Stream:
        stream = await self.transport.open(self.host, SESSION, deadline_s=1.0)
        await stream.send(Message(pb.SessionRequest(open=self.wanted(**changes)).SerializeToString()))
        return stream

    async def link(self, *, session: bytes = ID, epoch: int = 1) -> Stream:
        stream = await self.transport.open(self.host, LINK, deadline_s=1.0)
        link = pb.Link(session=session, epoch=epoch)
        await stream.send(Message(pb.LinkRequest(link=link).SerializeToString()))
        return stream

    async def step(self, link: Stream, step: Step) -> None:
        message, payload = encode_step(step, torch.float32)
        await link.send(Message(pb.LinkRequest(step=message).SerializeToString(), payload))


async def session_reply(stream: Stream) -> pb.SessionReply:
    """The next reply that is not a beat."""
    while True:
        reply = pb.SessionReply.FromString((await stream.receive()).header)
        if reply.WhichOneof("kind") not in ("beat", "opened"):
            return reply


async def assert_ends(stream: Stream) -> None:
    """The other side closes the stream at once, whatever it says before."""

    async def drain() -> None:
        while True:
            await stream.receive()

    with pytest.raises(StreamEnded):
        await asyncio.wait_for(drain(), 1.0)


async def link_reply(stream: Stream) -> pb.LinkReply:
    while True:
        reply = pb.LinkReply.FromString((await stream.receive()).header)
        if reply.WhichOneof("kind") != "beat":
            return reply


def a_step(seq: int, start: int, count: int = 1, *, width: int = HIDDEN, replay: bool = False) -> Step:
    rows = (Row(0, start, count, 0 if replay else 1, 0),)
    return Step(seq, rows, torch.zeros(count, width), replay=replay)


def with_stranger(reference: Reference, talk: Callable[[Stranger], Awaitable[None]], **hosting: Any) -> None:
    """Let a stranger talk to a node of blocks 0:2. Afterwards nothing is left of it there."""

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 2), **hosting))
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            await talk(Stranger(lab, transport))
        await asyncio.sleep(lab.timing.link_wait_s + lab.timing.reply_s + 1)
        assert lab.sessions() == {}
        assert lab.cache_bytes() == {}

    simulate(reference, scenario)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": bytes(31)}, pb.REASON_WRONG_SWARM),
        ({"manifest": bytes(32)}, pb.REASON_WRONG_MODEL),
        ({"span": pb.Span(start=1, end=3)}, pb.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=1, end=1)}, pb.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=0, end=1 << 31)}, pb.REASON_WRONG_SPAN),
    ],
)
def test_a_session_for_what_is_not_hosted_is_refused(
    reference: Reference, changes: dict[str, Any], reason: int
) -> None:
    async def talk(stranger: Stranger) -> None:
        assert (await session_reply(await stranger.send_open(**changes))).refused.reason == reason

    with_stranger(reference, talk)


@pytest.mark.parametrize(
    "changes", [{"session": b"short"}, {"wire": pb.DTYPE_UNSPECIFIED}, {"session": ID * 2}]
)
def test_an_opening_that_makes_no_sense_ends_the_stream(
    reference: Reference, changes: dict[str, Any]
) -> None:
    async def talk(stranger: Stranger) -> None:
        await assert_ends(await stranger.send_open(**changes))

    with_stranger(reference, talk)


def test_a_session_id_is_taken_once(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        await stranger.send_open()
        await assert_ends(await stranger.send_open())

    with_stranger(reference, talk)


def test_no_client_has_more_sessions_than_its_share(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        for number in range(3):
            await stranger.send_open(session=bytes([number]) * 16)
        refused = await session_reply(await stranger.send_open(session=b"x" * 16))
        assert refused.refused.reason == pb.REASON_OUT_OF_MEMORY

    with_stranger(reference, talk, limits=HostLimits(sessions_per_client=3))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([a_step(2, 0)], pb.REASON_PROTOCOL),
        ([a_step(1, 3)], pb.REASON_PROTOCOL),
        ([a_step(1, 0, 4), a_step(2, 2)], pb.REASON_PROTOCOL),
        ([a_step(1, 0), a_step(1, 0)], pb.REASON_PROTOCOL),
        ([a_step(1, 0), a_step(1, 1, replay=True)], pb.REASON_PROTOCOL),
        ([a_step(1, 0, 60), a_step(2, 60, 5)], pb.REASON_TOO_LONG),
    ],
    ids=["late start", "gap", "overlap", "repetition", "replay after steps", "too long"],
)
def test_steps_out_of_order_or_place_end_the_session(
    reference: Reference, steps: list[Step], reason: int
) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(), await stranger.link()
        assert (await link_reply(link)).HasField("linked")
        for step in steps:
            await stranger.step(link, step)
        replies = [await session_reply(session) for _ in steps]
        assert [reply.WhichOneof("kind") for reply in replies] == ["output"] * (len(steps) - 1) + ["refused"]
        assert replies[-1].refused.reason == reason

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
        assert (await link_reply(await stranger.link(epoch=4))).refused.reason == pb.REASON_STALE_EPOCH
        assert (await link_reply(await stranger.link(epoch=6))).HasField("linked")
        await assert_ends(first)

    with_stranger(reference, talk)


def test_a_link_may_come_a_little_before_its_session_but_does_not_wait_for_ever(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        early = await stranger.link()
        await stranger.send_open()
        assert (await link_reply(early)).HasField("linked")
        lost = await stranger.link(session=b"y" * 16)
        assert (await link_reply(lost)).refused.reason == pb.REASON_UNKNOWN_SESSION

    with_stranger(reference, talk)


def test_links_that_wait_are_bounded_and_those_that_give_up_are_forgotten(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        waiting = [await stranger.link(session=bytes([number]) * 16) for number in range(1, 4)]
        refused = await link_reply(await stranger.link(session=b"z" * 16))
        assert refused.refused.reason == pb.REASON_UNKNOWN_SESSION
        for link in waiting:
            link.close()
        await asyncio.sleep(1.0)
        early = await stranger.link()
        await stranger.send_open()
        assert (await link_reply(early)).HasField("linked")

    with_stranger(reference, talk, limits=HostLimits(early_links=3))


def test_a_cache_over_its_budget_is_refused_before_it_is_allocated(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        session, link = await stranger.send_open(max_length=1 << 20), await stranger.link()
        await link_reply(link)
        await stranger.step(link, a_step(1, 0, 60))
        assert (await session_reply(session)).HasField("output")
        held = stranger.lab.cache_bytes()["a"]
        await stranger.step(link, a_step(2, 60, 60))
        assert (await session_reply(session)).refused.reason == pb.REASON_OUT_OF_MEMORY
        assert stranger.lab.cache_bytes().get("a", 0) <= held

    with_stranger(reference, talk, max_cache_bytes=20_000)


def test_a_client_that_does_not_read_does_not_keep_its_session(reference: Reference) -> None:
    async def talk(stranger: Stranger) -> None:
        await stranger.send_open(max_length=1 << 20)
        link = await stranger.link()
        await link_reply(link)
        count = 1000
        for seq in range(1, 16):
            rows = (Row(0, 0, count, count, 0, seq > 1),)
            await stranger.step(link, Step(seq, rows, torch.zeros(count, HIDDEN)))
        await asyncio.sleep(2 * stranger.lab.timing.client_silence_s)
        assert stranger.lab.sessions() == {}
        assert stranger.lab.cache_bytes() == {}

    with_stranger(reference, talk)


# ---- what clients refuse ----------------------------------------------------------------------------------

PROMPT = [2, 7, 1, 8]
LAYOUT = {"a": (0, 2), "b": (2, 4), "c": (4, 6), "c2": (4, 6)}


def nan_output(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    tensor, values = encode_tensor(torch.full(list(reply.output.tensor.shape), math.nan))
    return pb.SessionReply(output=pb.Output(step=reply.output.step, tensor=tensor)), bytes(values)


def wrong_size(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    tensor, values = encode_tensor(torch.zeros(7, HIDDEN))
    return pb.SessionReply(output=pb.Output(step=reply.output.step, tensor=tensor)), bytes(values)


def wrong_bytes(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    return reply, payload[:-4]


def lie_too_long(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    return pb.SessionReply(refused=pb.Refused(reason=pb.REASON_TOO_LONG)), b""


def blame(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    return pb.SessionReply(refused=pb.Refused(reason=pb.REASON_PROTOCOL)), b""


@pytest.mark.parametrize("lie", [nan_output, wrong_size, wrong_bytes, lie_too_long, blame])
def test_a_last_hop_that_lies_is_replaced(
    reference: Reference, lie: Callable[..., tuple[pb.SessionReply, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = MemoryStream.send
    liar = ""

    async def send(self: MemoryStream, message: Message) -> None:
        nonlocal liar
        if self._protocol.id == SESSION.id and self.peer == peer("client").peer_id:
            reply = pb.SessionReply.FromString(message.header)
            if reply.HasField("output") and reply.output.step >= 3:
                liar = liar or self._transport.peer_id
                if self._transport.peer_id == liar:
                    changed, payload = lie(reply, bytes(message.payload))
                    message = Message(changed.SerializeToString(), payload)
        await honest(self, message)

    monkeypatch.setattr(MemoryStream, "send", send)

    async def scenario(lab: Lab) -> list[int]:
        for name, blocks in LAYOUT.items():
            await lab.start(name, lab.hosting(blocks))
        await asyncio.sleep(1.0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, PROMPT, 6)
            assert liar not in [hop for hop, _, _ in chain.report.route]
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 6)
    assert liar


def test_a_hop_that_feeds_the_next_one_nonsense_is_replaced(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop after it refuses and blames it: neither is trusted, for one of the two is wrong."""
    honest = MemoryStream.send
    liar = ""

    async def send(self: MemoryStream, message: Message) -> None:
        nonlocal liar
        sender = self._transport.peer_id
        if self.protocol.id == LINK.id and sender in (peer("b").peer_id, peer("b2").peer_id):
            sent = pb.LinkRequest.FromString(message.header)
            if sent.HasField("step") and sent.step.seq >= 3 and liar in ("", sender):
                liar = sender
                sent.step.seq += 5
                message = Message(sent.SerializeToString(), message.payload)
        await honest(self, message)

    monkeypatch.setattr(MemoryStream, "send", send)

    async def scenario(lab: Lab) -> list[int]:
        for name, blocks in {**LAYOUT, "b2": (2, 4)}.items():
            await lab.start(name, lab.hosting(blocks))
        await asyncio.sleep(1.0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            tokens = await lab.generate(chain, PROMPT, 6)
            assert liar not in [hop for hop, _, _ in chain.report.route]
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 6)
    assert liar


def test_a_host_without_room_is_left_for_one_that_has(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await lab.start("small", lab.hosting((0, 6), max_cache_bytes=70_000))
        async with lab.client() as swarm:
            await asyncio.sleep(1.0)
            async with lab.chain(swarm) as chain:
                started = []

                async def start_large() -> None:
                    await lab.start("large", lab.hosting((0, 6)))

                def on_token(number: int) -> None:
                    if number == 1:
                        started.append(asyncio.create_task(start_large()))

                tokens = await lab.generate(chain, PROMPT * 15, 12, on_token)
                assert [hop for hop, _, _ in chain.report.route] == [lab.peer_id("large")]
            await asyncio.gather(*started)
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT * 15, 12)


def test_no_room_anywhere_is_an_error_of_its_own(reference: Reference) -> None:
    async def scenario(lab: Lab) -> float:
        await lab.start("small", lab.hosting((0, 6), max_cache_bytes=70_000))
        await asyncio.sleep(1.0)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            began = asyncio.get_running_loop().time()
            with pytest.raises(OutOfResources):
                await lab.generate(chain, PROMPT * 15, 12)
            return asyncio.get_running_loop().time() - began

    assert simulate(reference, scenario) <= 20.0


def test_a_lane_longer_than_the_session_is_refused_at_once(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm, lab.chain(swarm, max_length=8) as chain:
            await chain.forward((Row(0, 0, 8, 1, 0),), torch.arange(8))
            with pytest.raises(OutOfResources):
                await chain.forward((Row(0, 8, 1, 1, 0),), torch.arange(1))
            await chain.forward((Row(0, 7, 1, 1, 0, rewrite=True),), torch.arange(1))

    simulate(reference, scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"start": 4, "end": 2},
        {"start": 0, "end": 1 << 30},
        {"step_s": math.nan},
        {"step_s": -1.0},
        {"step_s": math.inf},
        {"manifest": bytes(32)},
        {"protocol": 99},
    ],
    ids=str,
)
def test_a_record_that_makes_no_sense_is_not_read(reference: Reference, change: dict[str, Any]) -> None:
    async def scenario(lab: Lab) -> int:
        directory = MemoryDirectory(lab.board, peer("hostile"), SWARM)
        options: dict[str, Any] = {
            "manifest": lab.manifest,
            "start": 0,
            "end": 6,
            "state": records_pb2.HOST_STATE_ONLINE,
            "protocol": 1,
            "step_s": 0.0,
        }
        found = []
        async with lab.network.transport(lab.peer_id("hostile")):
            for body in (options, {**options, **change}):
                record = records_pb2.HostRecord(**body).SerializeToString()
                await directory.publish(hosts_topic(lab.manifest), record, lifetime_s=45.0)
                await asyncio.sleep(1.0)
                found.append(len(await read_hosts(directory, lab.manifest)))
        assert found[0] == 1
        return found[1]

    assert simulate(reference, scenario) == 0


def test_a_host_that_announces_and_does_not_serve_costs_a_pause(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        directory = MemoryDirectory(lab.board, peer("hostile"), SWARM)
        record = records_pb2.HostRecord(
            manifest=lab.manifest, start=0, end=6, state=records_pb2.HOST_STATE_ONLINE, protocol=1, step_s=0.0
        )
        async with lab.network.transport(lab.peer_id("hostile")):
            await directory.publish(hosts_topic(lab.manifest), record.SerializeToString(), lifetime_s=45.0)
            await lab.start("honest", lab.hosting((0, 6)))
            await asyncio.sleep(1.0)
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                return await lab.generate(chain, PROMPT, 4)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 4)
