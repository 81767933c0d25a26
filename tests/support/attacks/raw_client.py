"""A client that exchanges raw messages with a simulated host, and what it sends and reads."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from google.protobuf.message import Message as Protobuf

from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Message, Stream, Transport
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import LINK, PASS, SESSION
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.passes import split_tensor
from swarmnet_protocols.session.steps import Row, Step, encode_step
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, simulate

Reply = TypeVar("Reply", bound=Protobuf)

HIDDEN = 32
ID = bytes(16)


class Stranger:
    """A peer that exchanges raw messages with one host."""

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
        message, payload = encode_step(step, ElementType.FLOAT32)
        await link.send(Message(pb.LinkRequest(step=message).SerializeToString(), payload))

    async def begin_pass(self, **changes: Any) -> Stream:
        """Begin a pass of 8 positions in two sequences through all blocks, but for ``changes``."""
        good: dict[str, Any] = {
            "swarm": SWARM,
            "manifest": self.lab.manifest,
            "span": pb.Span(start=0, end=6),
            "counts": (5, 3),
            "wire": pb.DTYPE_FLOAT32,
        }
        stream = await self.transport.open(self.host, PASS, deadline_s=1.0)
        await stream.send(Message(pb.PassRequest(begin=pb.Begin(**good | changes)).SerializeToString()))
        return stream

    async def ask_pass(self, values: torch.Tensor, **changes: Any) -> pb.PassReply:
        """The answer to a pass with one tensor."""
        stream = await self.begin_pass(**changes)
        await stream.receive()  # a heartbeat, unless the pass is refused
        for part, payload in split_tensor(as_array(values)):
            await stream.send(Message(pb.PassRequest(part=part).SerializeToString(), payload))
        reply = await next_reply(stream, pb.PassReply)
        stream.close()
        return reply


async def next_reply(stream: Stream, message: type[Reply], *skipped: str) -> Reply:
    """The next reply that is neither a heartbeat nor of a kind that is ``skipped``."""
    while True:
        reply = message.FromString((await stream.receive()).header)
        if reply.WhichOneof("kind") not in ("heartbeat", *skipped):
            return reply


async def session_reply(stream: Stream) -> pb.SessionReply:
    return await next_reply(stream, pb.SessionReply, "opened")


async def link_reply(stream: Stream) -> pb.LinkReply:
    return await next_reply(stream, pb.LinkReply)


async def assert_ends(stream: Stream) -> None:
    """The other side closes the stream at once; earlier messages are ignored."""

    async def drain() -> None:
        while True:
            await stream.receive()

    with pytest.raises(StreamEnded):
        await asyncio.wait_for(drain(), 1.0)


def a_step(seq: int, start: int, count: int = 1, *, width: int = HIDDEN, replay: bool = False) -> Step:
    rows = (Row(0, start, count, 0 if replay else 1, 0),)
    return Step(seq, rows, np.zeros((count, width), np.float32), replay=replay)


def with_stranger(reference: Reference, talk: Callable[[Stranger], Awaitable[None]], **hosting: Any) -> None:
    """Let a stranger talk to a node of blocks 0:2. Afterwards nothing is left of it there."""

    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 2), **hosting))
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            await talk(Stranger(lab, transport))
        await asyncio.sleep(lab.timing.link_wait_s + lab.timing.reply_s + 1)
        assert lab.sessions() == {}
        assert lab.cache_bytes() == {}
        used = lab.nodes["a"].dependencies.transport.resources.system.used
        assert {
            resource: amount
            for resource, amount in used.items()
            if amount and resource != Resource.OUTBOUND_STREAMS
        } == {}

    simulate(reference, scenario)
