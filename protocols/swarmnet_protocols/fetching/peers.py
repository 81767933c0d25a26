"""Peers of the swarm as sources of weights: piece tables, which pieces they have, and the pieces.

No peer holds up a download. While a host is slow to answer, the next host is asked the same, and an
answer below a minimum rate ends. So one honest host is enough, whatever the others do.
"""

import asyncio
import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from swarmnet_protocols.errors import DeadlineExceeded, IntegrityError, SwarmnetError, Unreachable
from swarmnet_protocols.fetching.download import PieceSource
from swarmnet_protocols.fetching.hedging import hedged
from swarmnet_protocols.fetching.pieces import (
    HASH_BYTES,
    PIECE_BYTES,
    ModelFile,
    PieceTable,
    Tables,
    has_bit,
    listing_hash,
)
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import Buffer, PeerId, Transport
from swarmnet_protocols.net.limits.subnets import subnet_of
from swarmnet_protocols.net.protocol_ids import WEIGHTS
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import weights_pb2 as pb

T = TypeVar("T")
MAX_HOSTS = 64
"""Most hosts of a model that are asked for one download."""
LATE_S = 30.0
"""Seconds that an answer may take in addition to the time for its bytes. Busy hosts answer late."""
MIN_BYTES_PER_S = 35_000.0
"""Least mean rate of an answer in bytes per second, from the slowest link worth using."""
STREAMS = 2
"""Streams with each peer. The peer then has the next request when it has sent a piece."""
CONNECT_S = 60.0
"""Seconds that a download waits for the connection to the swarm before it continues without
peers."""
MAX_LISTING_BYTES = 1 << 20

WeightStream = TypedStream[pb.WeightsRequest, pb.WeightsReply]


class WeightHost(Protocol):
    """A peer that may have weights."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def addresses(self) -> Sequence[str]: ...


FindHosts = Callable[[bytes], Awaitable[Sequence[WeightHost]]]
"""Finds the hosts of a model by the hash of its manifest."""
FindModel = Callable[[str], Awaitable[bytes | None]]
"""Finds the manifest hash of the model that hosts announce under a name."""


async def fetch_document(
    stream: WeightStream, model: bytes, what: pb.What, file: bytes = b"", *, max_bytes: int
) -> bytes:
    """Fetch a document from a peer; empty if the peer does not have it.

    Raises ``IntegrityError`` if the document is longer than ``max_bytes`` or ends too early, and
    ``DeadlineExceeded`` if it comes too slowly.
    """
    answer = _Answer(stream, model, what, file)
    total = 1
    while len(answer.found) < total:
        total, payload = await answer.next(PIECE_BYTES)
        _check_size(what, total, max_bytes)
        if total and not payload:
            raise IntegrityError(f"{pb.What.Name(what)} ends after {len(answer.found)} of {total} bytes")
    return bytes(answer.found)


def _check_size(what: pb.What, total: int, max_bytes: int) -> None:
    if total > max_bytes:
        raise IntegrityError(f"{pb.What.Name(what)} of {total} bytes, at most {max_bytes} were expected")


async def fetch_file(stream: WeightStream, model: bytes, file: ModelFile) -> bytes:
    """Fetch a whole small file without verifying it.

    Raises ``Unreachable`` if the peer does not have it, and ``DeadlineExceeded`` if it comes too
    slowly.
    """
    answer = _Answer(stream, model, pb.WHAT_DATA, file.sha256)
    while len(answer.found) < file.size:
        _, payload = await answer.next(min(PIECE_BYTES, file.size - len(answer.found)))
        if not payload:
            raise Unreachable(f"it does not have {file.name}")
    return bytes(answer.found)


class _Answer:
    """The part of a document or file that a peer has sent, at ``MIN_BYTES_PER_S`` or faster."""

    def __init__(self, stream: WeightStream, model: bytes, what: pb.What, file: bytes) -> None:
        self.found = bytearray()
        self._stream = stream
        self._model = model
        self._what = what
        self._file = file
        self._began = loop_time()

    async def next(self, length: int) -> tuple[int, Buffer]:
        """Ask for the next ``length`` bytes, and append them.

        Returns the size of the whole, and the bytes that came.
        """
        until = self._began + LATE_S + len(self.found) / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout_at(until):
                reply, payload = await _ask(
                    self._stream, self._model, self._what, self._file, len(self.found), length
                )
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self._stream.peer} sends less than {MIN_BYTES_PER_S:g} bytes/s"
            ) from error
        self.found += payload
        return reply.total_bytes, payload


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
    """One stream with a peer, as a source of pieces. ``prepare`` opens it."""

    name: str
    open: Callable[[], Awaitable[WeightStream]]
    model: bytes
    files: Sequence[ModelFile]
    is_last: bool = False
    connections: int = 1
    max_bytes: int = PIECE_BYTES
    _held: dict[bytes, bytes] = field(default_factory=dict, init=False)
    """SHA-256 of a file → one bit for each piece that the peer has."""
    _stream: WeightStream | None = field(default=None, init=False)

    async def prepare(self) -> None:
        """Open the stream, and ask which pieces the peer has.

        Raises the errors of ``Transport.open`` and ``fetch_document``.
        """
        self._stream = await self.open()
        for file in self.files:
            max_bytes = PieceTable.max_bytes(file.size) // (8 * HASH_BYTES) + 1
            self._held[file.sha256] = await fetch_document(
                self._stream, self.model, pb.WHAT_HELD, file.sha256, max_bytes=max_bytes
            )

    def has(self, file: ModelFile, piece: int) -> bool:
        """Return whether the peer reported that it has a piece."""
        return has_bit(self._held.get(file.sha256, b""), piece)

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        """Return the bytes [start, end).

        Raises ``Unreachable`` if the peer no longer has them, and the errors of ``TypedStream``.
        """
        if self._stream is None:
            raise Unreachable("its stream is not open")
        _, payload = await _ask(self._stream, self.model, pb.WHAT_DATA, file.sha256, start, end - start)
        if len(payload) < end - start:
            raise Unreachable("it does not have pieces that it reported")
        return bytes(payload)

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()


class SwarmPeers:
    """The hosts of models in one swarm.

    The object exists before the connection to the swarm, so that another thread can wait for it.
    """

    def __init__(
        self, pieces_hashes: Mapping[bytes, bytes], timing: Timing, models: Collection[bytes] = ()
    ) -> None:
        """Create it without a connection.

        - ``pieces_hashes``: manifest hash → pieces hash, from the swarm file.
        - ``models``: the manifest hashes that the swarm file names.
        """
        self._pieces_hashes = pieces_hashes
        self._models = models
        self._timing = timing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._transport: Transport | None = None
        self._find: FindHosts | None = None
        self._find_model: FindModel | None = None
        self._failed: set[PeerId] = set()
        """Hosts that failed or were slow to answer: they are asked last."""
        self._settled = threading.Event()

    def attach(self, transport: Transport, find: FindHosts, find_model: FindModel | None = None) -> None:
        """Use ``transport``, which is connected to the swarm. ``find`` looks up hosts, and
        ``find_model`` the model that they announce under a name.

        Call this on the event loop of the network.
        """
        self._loop, self._transport, self._find = asyncio.get_running_loop(), transport, find
        self._find_model = find_model
        self._settled.set()

    async def announced(self, name: str) -> bytes | None:
        """Return the manifest hash of the model that hosts announce under ``name``, or None."""
        return None if self._find_model is None else await self._find_model(name)

    def detach(self) -> None:
        """Note that the connection failed or ended, so that downloads continue without peers.
        Idempotent.
        """
        self._loop = self._transport = self._find = None
        self._settled.set()

    def lists(self, model: bytes) -> bool:
        """Tell whether the swarm file names this model's manifest hash."""
        return model in self._models

    def wait(self) -> bool:
        """Wait for the connection. Returns whether peers can be asked from this thread.

        This must not be the thread of the network's event loop.
        """
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
        """Return the first result of ``ask``, called with one host of a model after another.

        Raises ``Unreachable`` with all errors if ``ask`` raised for every host.
        """
        causes: list[str] = []
        answers: list[T] = []

        async def answered(host: WeightHost) -> bool:
            try:
                async with self._stream(host) as stream:
                    answers.append(await ask(stream))
            except SwarmnetError as error:
                self._failed.add(host.peer)
                causes.append(f"peer {host.peer}: {error}")
            return bool(answers)

        await hedged(await self._hosts(model), answered, self._late)
        if answers:
            return answers[0]
        raise Unreachable(
            f"no peer of the swarm provides the model ({'; '.join(causes) or 'no host is known'})",
            hint="try again when the hub can be reached, or a host of the model",
        )

    async def tables(self, model: bytes, files: Sequence[ModelFile], tables: Tables) -> None:
        """Ask hosts of a model for the tables of files, and add them to ``tables``.

        Tables that the swarm file's pieces hash covers are known; others are claimed. Peers that
        fail or have no table are skipped.
        """
        wanted = {file.sha256: file for file in files}
        vouched: dict[bytes, bytes] = {}

        async def have_all(host: WeightHost) -> bool:
            try:
                async with self._stream(host) as stream:
                    if not vouched:
                        vouched.update(await self._vouched(stream, model, tables))
                    for file in list(wanted.values()):
                        if await self._table(stream, model, file, vouched.get(file.sha256), tables):
                            wanted.pop(file.sha256, None)
            except SwarmnetError:
                self._failed.add(host.peer)
            return not wanted

        await hedged(await self._hosts(model), have_all, self._late)

    async def _vouched(self, stream: WeightStream, model: bytes, tables: Tables) -> dict[bytes, bytes]:
        """Return file → hash of its table, as the model's pieces hash covers them; empty without
        one.
        """
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
        """Offer hosts of a model as sources of pieces while the context is open.

        No host is asked before ``prepare``.
        """
        found = [
            PeerSource(f"peer {host.peer}", partial(self._open, host), model, files)
            for host in await self._hosts(model)
            for _ in range(STREAMS)
        ]
        try:
            yield found
        finally:
            for source in found:
                source.close()

    async def _hosts(self, model: bytes) -> list[WeightHost]:
        """Return the hosts to ask, in order.

        Hosts of different subnets take turns. The order depends on the asking peer, which spreads
        newcomers over the hosts.
        """
        transport, find = self._transport, self._find
        if transport is None or find is None:
            return []
        own = transport.peer_id
        hosts: Sequence[WeightHost] = []
        with suppress(SwarmnetError):
            hosts = [host for host in await find(model) if host.peer != own]
        drawn = sorted(hosts, key=lambda host: hashlib.sha256(f"{own} {host.peer}".encode()).digest())
        seen = Counter[str]()
        turns: list[tuple[bool, int, WeightHost]] = []
        for host in drawn:
            subnet = next(filter(None, map(subnet_of, host.addresses)), host.peer)
            turns.append((host.peer in self._failed, seen[subnet], host))
            seen[subnet] += 1
        return [host for *_, host in sorted(turns, key=lambda turn: turn[:2])][:MAX_HOSTS]

    @asynccontextmanager
    async def _stream(self, host: WeightHost) -> AsyncIterator[WeightStream]:
        with contextlib.closing(await self._open(host)) as stream:
            yield stream

    async def _open(self, host: WeightHost) -> WeightStream:
        transport, timing = self._transport, self._timing
        if transport is None:
            raise Unreachable("the connection to the swarm has ended")
        return await WEIGHTS.open(transport, host.peer, timing, addresses=host.addresses)

    def _late(self, host: WeightHost) -> None:
        self._failed.add(host.peer)
