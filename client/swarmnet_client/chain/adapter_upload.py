"""Uploads the parts of an adapter to the hosts that apply them."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.errors import DeadlineExceeded, ProtocolViolation
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import ADAPTER
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_search import Hop
from swarmnet_protocols.session.adapters import Adapter, AdapterPart
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

T = TypeVar("T")
_Place = tuple[PeerId, int, int]
"""A host and a span of blocks."""

ATTEMPTS = 3
"""Uploads of one part to a host that says it does not have it. A host that forgets faster is of no use."""


class Placement:
    """Which hosts have which part of one adapter. Without an adapter there are no parts."""

    def __init__(
        self, swarm: Swarm, adapter: Adapter | None, moved: Callable[[], None] = lambda: None
    ) -> None:
        """``moved`` is called whenever a host has received some of the bytes."""
        self.swarm = swarm
        self._adapter = adapter
        self._moved = moved
        self._hashes: dict[_Place, bytes] = {}
        self._placing: defaultdict[_Place, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def ask(self, hop: Hop, question: Callable[[bytes], Awaitable[T]]) -> T:
        """The result of ``question``, called with the hash of the adapter's part for ``hop`` once the host has that part.

        The part is uploaded again to a host that has dropped it. Raises what ``place`` and ``question`` raise.
        """
        for _ in range(ATTEMPTS - 1):
            try:
                return await question(await self._at(hop))
            except Refused as refusal:
                if refusal.reason != refusal_pb2.REASON_UNKNOWN_ADAPTER:
                    raise
                self._hashes.pop((hop.peer, hop.start, hop.end), None)
        return await question(await self._at(hop))

    async def _at(self, hop: Hop) -> bytes:
        """The hash of the part at ``hop``. Callers at the same time share one upload."""
        where = hop.peer, hop.start, hop.end
        async with self._placing[where]:
            if where not in self._hashes:
                self._hashes[where] = await place(self.swarm, hop, self._adapter, self._moved)
            return self._hashes[where]


async def place(
    swarm: Swarm, hop: Hop, adapter: Adapter | None, moved: Callable[[], None] = lambda: None
) -> bytes:
    """Upload the adapter's part for the blocks of ``hop`` unless the host has it. Returns its hash; empty without an adapter.

    Raises ``ConfigError`` for a prefix that some of the blocks lack, what opening a stream raises, ``Refused``,
    ``StreamEnded`` or ``DeadlineExceeded``.
    """
    part = await asyncio.to_thread(adapter.part, hop.start, hop.end) if adapter is not None else None
    if part is None:
        return b""
    offer = pb.Offer(
        swarm=swarm.id,
        manifest=swarm.manifest,
        span=pb.Span(start=hop.start, end=hop.end),
        adapter=part.hash,
        size_bytes=len(part.data),
    )
    timing = swarm.timing
    stream = await swarm.transport.open(hop.peer, ADAPTER, addresses=hop.addresses, deadline_s=timing.open_s)
    sending: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(timing.stall_s) as limit:

            def progress() -> None:
                limit.reschedule(asyncio.get_running_loop().time() + timing.stall_s)
                moved()

            client = _Upload(stream, pb.AdapterRequest, pb.AdapterReply, silence_s=timing.silence_s)
            await client.send(pb.AdapterRequest(offer=offer))
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
        await cancel(sending)  # the receiving side has seen the same error
        stream.close()


_Upload = TypedStream[pb.AdapterRequest, pb.AdapterReply]


async def _send(client: _Upload, part: AdapterPart, moved: Callable[[], None]) -> None:
    data = memoryview(part.data)
    chunk = pb.AdapterRequest(chunk=pb.Chunk())
    for start in range(0, len(data), ADAPTER.max_payload_bytes):
        await client.send(chunk, data[start : start + ADAPTER.max_payload_bytes])
        moved()
