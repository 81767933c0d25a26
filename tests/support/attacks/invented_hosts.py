"""Hosts that are announced and do not exist, or answer calls and compute something else."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import torch

from swarmnet_protocols.arrays import as_array, as_tensor
from swarmnet_protocols.directory.host_announcements import PROTOCOL, hosts_topic
from swarmnet_protocols.machine.aio import in_background
from swarmnet_protocols.net import Stream
from swarmnet_protocols.net.protocol_ids import PASS, PING
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.session.passes import receive_tensor, split_tensor
from swarmnet_protocols.session.pings import answer_pings
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import refusal_pb2, session_pb2
from tests.support.attacks.forgers import Forger
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.swarm.swarm_lab import SWARM, Lab, peer

RENEW_S = 30.0
WIDTH = 32
"""Hidden size of the tiny model."""


def replay(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def refuse(_: torch.Tensor) -> torch.Tensor:
    raise Refusal(refusal_pb2.REASON_OVERLOADED, "too much work")


@asynccontextmanager
async def invented_hosts(
    lab: Lab,
    spans: Sequence[tuple[int, int]],
    *,
    name: str = "invented",
    answers: Forger | None = None,
    **fields: Any,
) -> AsyncIterator[None]:
    """Announce hosts of ``spans`` while the context is open, as fast as any, with other ``fields``
    of their records.

    ``answers``: a machine of the local network answers pings in their names, and makes the outputs
    of passes from their inputs.
    """
    said: dict[str, Any] = {
        "state": pb.HOST_STATE_ONLINE,
        "protocol": PROTOCOL,
        "step_s": 1e-6,
        "stays": True,
        "precision": "f32",
    } | fields
    identities = [peer(f"{name}-{number}") for number in range(len(spans))]

    async def renew() -> None:
        directories = [MemoryDirectory(lab.board, identity, SWARM) for identity in identities]
        while True:
            for directory, identity, (start, end) in zip(directories, identities, spans, strict=True):
                record = pb.HostRecord(manifest=lab.manifest, start=start, end=end, **said)
                topic = hosts_topic(lab.manifest, identity.peer_id)
                await directory.publish(topic, record.SerializeToString(), lifetime_s=3 * RENEW_S)
            await asyncio.sleep(RENEW_S)

    transports = [lab.network.transport(identity.peer_id) for identity in identities]
    async with AsyncExitStack() as stack:
        for transport, identity, (start, end) in zip(transports, identities, spans, strict=True):
            await stack.enter_async_context(transport)  # its records are seen while it is there
            if answers is not None:
                lab.network.move(identity.peer_id, "/ip4/192.168.0.7/tcp/4001")
                await transport.serve(PING, partial(answer_as_host, lab.manifest, start, end))
                await transport.serve(PASS, partial(answer_passes, answers))
        await stack.enter_async_context(in_background(renew()))
        yield


async def answer_as_host(manifest: bytes, start: int, end: int, stream: Stream) -> None:
    pings = PING.accept(stream)
    await answer_pings(
        pings, lambda nonce: session_pb2.Pong(nonce=nonce, manifest=manifest, start=start, end=end)
    )


async def answer_passes(lie: Forger, stream: Stream) -> None:
    asked = PASS.accept(stream)
    begin, _ = await asked.receive()
    await asked.send(session_pb2.PassReply(heartbeat=session_pb2.Heartbeat()))

    async def part() -> tuple[session_pb2.Part, Any]:
        message, payload = await asked.receive()
        return message.part, payload  # type: ignore[return-value]

    inputs = await receive_tensor(part, positions=sum(begin.begin.counts), hidden_size=WIDTH)
    try:
        outputs = as_array(lie(as_tensor(inputs)))
    except Refusal as refusal:
        asked.refuse(refusal)
        return
    for message, payload in split_tensor(outputs):
        await asked.send(session_pb2.PassReply(part=message), payload)
    await asyncio.sleep(10.0)
