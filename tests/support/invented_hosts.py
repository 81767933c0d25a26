"""Announcements of hosts that do not exist, in a simulated swarm: signed records, renewed for ever,
as any peer may publish them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from swarmnet_protocols.directory.host_announcements import PROTOCOL, hosts_topic
from swarmnet_protocols.net import Stream
from swarmnet_protocols.net.protocol_ids import PASS, PING
from swarmnet_protocols.session.pings import answer_pings
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire import session_pb2
from tests.support.memory_directory import MemoryDirectory
from tests.support.swarm_lab import SWARM, Lab, peer

RENEW_S = 30.0


@asynccontextmanager
async def invented_hosts(
    lab: Lab,
    spans: Sequence[tuple[int, int]],
    *,
    name: str = "invented",
    answers: bool = False,
    **fields: Any,
) -> AsyncIterator[None]:
    """Announce hosts of ``spans`` while the context is open, as fast as any, with other ``fields``
    of their records.

    ``answers``: a machine of the local network answers pings in their names, and computes nothing
    true.
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
    for transport, identity, (start, end) in zip(transports, identities, spans, strict=True):
        await transport.__aenter__()  # its records are seen while it is on the network
        if answers:
            lab.network.move(identity.peer_id, "/ip4/192.168.0.7/tcp/4001")
            await transport.serve(PING, _pings(lab.manifest, start, end))
            await transport.serve(PASS, _passes)
    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for transport in transports:
            await transport.__aexit__(None, None, None)


def _pings(manifest: bytes, start: int, end: int) -> Any:
    async def serve(stream: Stream) -> None:
        pings = PING.accept(stream)
        await answer_pings(
            pings, lambda nonce: session_pb2.Pong(nonce=nonce, manifest=manifest, start=start, end=end)
        )

    return serve


async def _passes(stream: Stream) -> None:
    """Answer a pass with its own inputs, as cheaply as can be."""
    asked = PASS.accept(stream)
    await asked.receive()
    await asked.send(session_pb2.PassReply(heartbeat=session_pb2.Heartbeat()))
    part, payload = await asked.receive()
    await asked.send(session_pb2.PassReply(part=part.part), payload)
    await asyncio.sleep(10.0)
