"""Adapter uploads: each host receives the part of the client's adapter for its blocks."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import cancel, loop_time
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import ADAPTER
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_protocols.session.adapters import Adapter, AdapterPart

T = TypeVar("T")
_Location = tuple[PeerId, int, int]
"""A host and a span of blocks."""

ATTEMPTS = 3
"""Most times that one request is sent to a host. Before each, the adapter's part is uploaded unless
the host is known to have it.

A host that still lacks it drops adapters too fast to be of use.
"""


class AdapterUploader:
    """Uploads one adapter: once to each host, the part for the hop there. Without an adapter it
    uploads nothing."""

    def __init__(
        self, hosts: ModelHosts, adapter: "Adapter | None", progressed: Callable[[], None] = lambda: None
    ) -> None:
        """``progressed`` is called whenever a host has received some of the bytes."""
        self.hosts = hosts
        self._adapter = adapter
        self._progressed = progressed
        self._hashes: dict[_Location, bytes] = {}
        self._uploading: defaultdict[_Location, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def with_adapter(self, hop: Hop, request: Callable[[bytes], Awaitable[T]]) -> T:
        """Call ``request`` with the hash of the adapter's part for ``hop``, once the host has that
        part.

        If the host has dropped the part, it is uploaded again. Raises what ``upload_adapter`` and
        ``request`` raise.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return await request(await self._hash_at(hop))
            except Refused as refusal:
                if refusal.reason != refusal_pb2.REASON_UNKNOWN_ADAPTER:
                    raise
                self._hashes.pop((hop.peer, hop.start, hop.end), None)
        return await request(await self._hash_at(hop))

    async def _hash_at(self, hop: Hop) -> bytes:
        """Return the hash of the part for ``hop``. Upload the part unless this host is known to
        have it.

        Concurrent callers share one upload.
        """
        location = hop.peer, hop.start, hop.end
        async with self._uploading[location]:
            if location not in self._hashes:
                self._hashes[location] = await upload_adapter(
                    self.hosts, hop, self._adapter, self._progressed
                )
            return self._hashes[location]


async def upload_adapter(
    hosts: ModelHosts, hop: Hop, adapter: "Adapter | None", progressed: Callable[[], None] = lambda: None
) -> bytes:
    """Upload the adapter's part for the blocks of ``hop`` unless the host has it. Returns its hash;
    empty without an adapter.

    Raises ``ConfigError`` if the adapter has a prefix for only some of the blocks; ``Refused``,
    ``StreamEnded`` or ``DeadlineExceeded``; and the errors of ``ADAPTER.open``.
    """
    part = await asyncio.to_thread(adapter.part, hop.start, hop.end) if adapter is not None else None
    if part is None:
        return b""
    upload = pb.Upload(
        swarm=hosts.swarm_id,
        manifest=hosts.manifest,
        span=pb.Span(start=hop.start, end=hop.end),
        adapter=part.hash,
        size_bytes=len(part.data),
    )
    timing = hosts.timing
    client = await ADAPTER.open(hosts.transport, hop.peer, timing, addresses=hop.addresses)
    sending: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(timing.stall_s) as limit:

            def progress() -> None:
                limit.reschedule(loop_time() + timing.stall_s)
                progressed()

            await client.send(pb.AdapterRequest(upload=upload))
            while True:
                reply, _ = await client.receive()
                match reply.WhichOneof("kind"):
                    case "stored":
                        return part.hash
                    case "wanted" if sending is None:
                        sending = asyncio.create_task(_send(client, part, progress))
                    case _:
                        raise ProtocolViolation("an unexpected message on an adapter")
    except TimeoutError as error:
        raise DeadlineExceeded(f"{hop.peer} accepts no more of the adapter") from error
    finally:
        await cancel(sending)  # ignores the error of the task: ``client.receive`` has raised the same one
        client.close()


_Upload = TypedStream[pb.AdapterRequest, pb.AdapterReply]


async def _send(client: _Upload, part: "AdapterPart", progressed: Callable[[], None]) -> None:
    data = memoryview(part.data)
    chunk = pb.AdapterRequest(chunk=pb.Chunk())
    for start in range(0, len(data), ADAPTER.max_payload_bytes):
        await client.send(chunk, data[start : start + ADAPTER.max_payload_bytes])
        progressed()
