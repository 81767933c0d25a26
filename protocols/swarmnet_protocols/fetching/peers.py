"""Peers of the swarm as sources of weights: their tables of pieces, which pieces they have, and the pieces."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from swarmnet_protocols.errors import IntegrityError, SwarmnetError, Unreachable
from swarmnet_protocols.fetching.download import PieceSource
from swarmnet_protocols.fetching.pieces import (
    HASH_BYTES,
    PIECE_BYTES,
    ModelFile,
    PieceTable,
    Tables,
    has_bit,
    listing_hash,
)
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.protocol_ids import WEIGHTS
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import weights_pb2 as pb

T = TypeVar("T")
MAX_PEERS = 8
"""Most peers that are asked at the same time."""
STREAMS = 2
"""Streams with each peer, so that it has the next request when it has sent a piece."""
CONNECT_S = 60.0
"""Seconds that a download waits for the connection to the swarm before it continues without peers."""
MAX_LISTING_BYTES = 1 << 20

WeightStream = TypedStream[pb.WeightsRequest, pb.WeightsReply]


class WeightHost(Protocol):
    """A peer that may have weights."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> Sequence[str]: ...


FindHosts = Callable[[bytes], Awaitable[Sequence[WeightHost]]]
"""The hosts of a model, by the hash of its manifest."""


async def fetch_document(
    stream: WeightStream, model: bytes, what: pb.What, file: bytes = b"", *, max_bytes: int
) -> bytes:
    """A document of a peer; empty if the peer does not have it. Raises ``IntegrityError`` if it is longer than ``max_bytes``, or ends too early."""
    found = bytearray()
    total = 1
    while len(found) < total:
        reply, payload = await _ask(stream, model, what, file, len(found), PIECE_BYTES)
        total = reply.total_bytes
        _check_size(what, total, max_bytes)
        if total and not payload:
            raise IntegrityError(f"{pb.What.Name(what)} ends after {len(found)} of {total} bytes")
        found += payload
    return bytes(found)


def _check_size(what: pb.What, total: int, max_bytes: int) -> None:
    if total > max_bytes:
        raise IntegrityError(f"{pb.What.Name(what)} of {total} bytes, at most {max_bytes} were expected")


async def fetch_file(stream: WeightStream, model: bytes, file: ModelFile) -> bytes:
    """A whole small file, not verified. Raises ``Unreachable`` if the peer does not have it."""
    found = bytearray()
    while len(found) < file.size:
        length = min(PIECE_BYTES, file.size - len(found))
        _, payload = await _ask(stream, model, pb.WHAT_DATA, file.sha256, len(found), length)
        if not payload:
            raise Unreachable(f"it does not have {file.name}")
        found += payload
    return bytes(found)


async def _ask(
    stream: WeightStream, model: bytes, what: pb.What, file: bytes, offset: int, length: int
) -> tuple[pb.WeightsReply, Buffer]:
    await stream.send(pb.WeightsRequest(manifest=model, what=what, file=file, offset=offset, length=length))
    reply, payload = await stream.receive()
    if len(payload) > length:
        raise IntegrityError(f"{len(payload)} bytes were sent, {length} were asked for")
    return reply, payload


@dataclass
class PeerSource:
    """One stream with a peer, as a source of pieces."""

    name: str
    stream: WeightStream
    model: bytes
    held: Mapping[bytes, bytes]
    """One bit for each piece that the peer has, by the SHA-256 of the file."""
    is_last: bool = False
    connections: int = 1
    max_bytes: int = PIECE_BYTES
    sent: int = field(default=0, init=False)

    def has(self, file: ModelFile, piece: int) -> bool:
        """Whether the peer reported that it has a piece."""
        return has_bit(self.held.get(file.sha256, b""), piece)

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        """The bytes [start, end). Raises ``Unreachable`` if the peer does not have them any more, and the errors of ``TypedStream``."""
        _, payload = await _ask(self.stream, self.model, pb.WHAT_DATA, file.sha256, start, end - start)
        if len(payload) < end - start:
            raise Unreachable("it does not have pieces that it reported")
        return bytes(payload)


class SwarmPeers:
    """The hosts of models in one swarm. It exists before the connection to the swarm does, so that another thread can wait for that."""

    def __init__(
        self, pieces_hashes: Mapping[bytes, bytes], timing: Timing, models: Collection[bytes] = ()
    ) -> None:
        """``pieces_hashes``: those of the swarm file, by the hash of the manifest. ``models``: the hashes of all manifests that it names."""
        self._pieces_hashes = pieces_hashes
        self._models = models
        self._timing = timing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: Transport | None = None
        self._find: FindHosts | None = None
        self._settled = threading.Event()

    def attach(self, transport: Transport, find: FindHosts) -> None:
        """Use ``transport``, which is connected to the swarm; ``find`` looks up hosts. Called on the event loop of the network."""
        self._loop, self._transport, self._find = asyncio.get_running_loop(), transport, find
        self._settled.set()

    def detach(self) -> None:
        """Report that the connection failed or has ended: downloads continue without peers. Idempotent."""
        self._loop = self._transport = self._find = None
        self._settled.set()

    def lists(self, model: bytes) -> bool:
        """Whether the swarm file names the hash of this model's manifest."""
        return model in self._models

    def wait(self) -> bool:
        """Wait for the connection. Returns whether peers can be asked from this thread, which must not be the thread of the network's event loop."""
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                return False
            if not self._settled.is_set():
                return False  # this event loop may be the one on which the connection is made
        return self._settled.wait(CONNECT_S) and self._loop is not None

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop of the network, from another thread."""
        if self._loop is None:
            raise Unreachable("the connection to the swarm has ended")
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    async def first(self, model: bytes, ask: Callable[[WeightStream], Awaitable[T]]) -> T:
        """Call ``ask`` with one host of a model after another, until it returns. Raises ``Unreachable``, with all errors, if it raised for every host."""
        causes = []
        async with self._streams(model, 1) as streams:
            for stream in streams:
                try:
                    return await ask(stream)
                except SwarmnetError as error:
                    causes.append(f"peer {stream.peer}: {error}")
        raise Unreachable(
            f"no peer of the swarm gives the model ({'; '.join(causes) or 'no host is known'})",
            hint="try again when the hub can be reached, or a host of the model",
        )

    @property
    def is_attached(self) -> bool:
        """Whether there is a connection to the swarm."""
        return self._transport is not None

    async def tables(self, model: bytes, files: Sequence[ModelFile], tables: Tables) -> None:
        """Ask hosts of a model for the tables of files, and add them to ``tables``.

        Tables that the swarm file's pieces hash covers are known, others are claimed. Peers that fail or have no table are passed over.
        """
        wanted = {file.sha256: file for file in files}
        vouched: dict[bytes, bytes] = {}
        async with self._streams(model, 1) as streams:
            for stream in streams:
                with suppress(SwarmnetError):
                    if not vouched:
                        vouched = await self._vouched(stream, model, tables)
                    for file in list(wanted.values()):
                        if await self._table(stream, model, file, vouched.get(file.sha256), tables):
                            del wanted[file.sha256]

    async def _vouched(self, stream: WeightStream, model: bytes, tables: Tables) -> dict[bytes, bytes]:
        """The hashes of the tables that the model's pieces hash covers, by file; empty without one."""
        expected = self._pieces_hashes.get(model)
        if expected is None:
            return {}
        listing = await fetch_document(stream, model, pb.WHAT_LISTING, max_bytes=MAX_LISTING_BYTES)
        if listing_hash(listing) != expected:
            return {}
        tables.add_listing(model, listing)
        parts = [listing[at : at + HASH_BYTES] for at in range(0, len(listing), HASH_BYTES)]
        return dict(zip(parts[::2], parts[1::2], strict=True))

    async def _table(
        self, stream: WeightStream, model: bytes, file: ModelFile, vouched: bytes | None, tables: Tables
    ) -> bool:
        """Ask one peer for the table of a file. Returns whether no other peer need be asked."""
        data = await fetch_document(
            stream, model, pb.WHAT_TABLE, file.sha256, max_bytes=PieceTable.max_bytes(file.size)
        )
        if not data:
            return False
        table = PieceTable.decode(data, file.size)
        if vouched is not None and table.hash(file) == vouched:
            tables.add(file, table)
            return True
        if tables.claimed(file) is None:
            tables.claim(file, table)
        return model not in self._pieces_hashes

    @asynccontextmanager
    async def sources(self, model: bytes, files: Sequence[ModelFile]) -> AsyncIterator[Sequence[PieceSource]]:
        """Hosts of a model that have pieces of files, while the context is open."""
        async with self._streams(model, STREAMS) as streams:
            found = await asyncio.gather(
                *(self._source(stream, model, files) for stream in streams), return_exceptions=True
            )
            for error in found:
                if isinstance(error, BaseException) and not isinstance(error, SwarmnetError):
                    raise error
            yield [source for source in found if isinstance(source, PeerSource) and any(source.held.values())]

    async def _source(self, stream: WeightStream, model: bytes, files: Sequence[ModelFile]) -> PeerSource:
        held: dict[bytes, bytes] = {}
        for file in files:
            held[file.sha256] = await fetch_document(
                stream,
                model,
                pb.WHAT_HELD,
                file.sha256,
                max_bytes=PieceTable.max_bytes(file.size) // (8 * HASH_BYTES) + 1,
            )
        return PeerSource(f"peer {stream.peer}", stream, model, held)

    @asynccontextmanager
    async def _streams(self, model: bytes, count: int) -> AsyncIterator[list[WeightStream]]:
        """``count`` streams with each host of a model that answers, of at most ``MAX_PEERS``."""
        transport, find = self._transport, self._find
        if transport is None or find is None:
            yield []
            return
        timing = self._timing

        async def open_one(host: WeightHost) -> WeightStream:
            stream = await transport.open(
                host.peer, WEIGHTS, addresses=host.addresses, deadline_s=timing.open_s
            )
            return WeightStream(
                stream, pb.WeightsRequest, pb.WeightsReply, silence_s=timing.chunk_s, send_s=timing.chunk_s
            )

        hosts: Sequence[WeightHost] = []
        with suppress(SwarmnetError):
            hosts = [host for host in await find(model) if host.peer != transport.peer_id]
        # The order depends on the asking peer, so that newcomers are spread over the hosts.
        order = sorted(
            hosts, key=lambda host: hashlib.sha256(f"{transport.peer_id} {host.peer}".encode()).digest()
        )
        opened = await asyncio.gather(
            *(open_one(host) for host in order[:MAX_PEERS] for _ in range(count)), return_exceptions=True
        )
        async with AsyncExitStack() as stack:
            streams = []
            for each in opened:
                if isinstance(each, TypedStream):
                    stack.callback(each.close)
                    streams.append(each)
            for each in opened:
                if isinstance(each, BaseException) and not isinstance(each, SwarmnetError):
                    raise each
            yield streams
