"""Handing the state of a job to a newcomer or a laggard: by hash, in chunks, from several peers at once.

The id of a state is the hash of its chunks' hashes, so every chunk is checked on its own and it does not matter who sent it. A
source that sends a wrong byte is dropped and named; its chunks come from the others.
"""

import asyncio
import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import IntegrityError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.net import Buffer, Message, PeerId, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.protocol_ids import STATE
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.net.resources import Resource
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import workers_pb2 as pb

CHUNK_BYTES = 1 << 20
HASH_BYTES = 32
ASKED_AHEAD = 2
"""Chunks asked of a source at a time: while one is on its way the request for the next is there, and a long line stays full."""
KEPT_STATES = 2
"""Whoever fetches a state when the next one is committed can finish. Nobody else keeps it in memory."""


@dataclass(frozen=True)
class StateManifest:
    """What a state is made of: its size, and the SHA-256 of every chunk."""

    size_bytes: int
    chunk_hashes: tuple[bytes, ...]

    @property
    def id(self) -> bytes:
        return hashlib.sha256(struct.pack(">Q", self.size_bytes) + b"".join(self.chunk_hashes)).digest()

    def chunk_bytes(self, index: int) -> int:
        return min(CHUNK_BYTES, self.size_bytes - index * CHUNK_BYTES)


@dataclass(frozen=True)
class PackedState:
    """A state as bytes, in pieces that stay where they are: whoever packs it changes them no more."""

    pieces: tuple[memoryview, ...]
    manifest: StateManifest

    @classmethod
    def of(cls, pieces: Iterable[Buffer]) -> "PackedState":
        """Hashes all of it."""
        views = tuple(memoryview(piece) for piece in pieces)
        size_bytes = sum(len(view) for view in views)
        hashes = []
        for start in range(0, size_bytes, CHUNK_BYTES):
            digest = hashlib.sha256()
            for part in _between(views, start, start + CHUNK_BYTES):
                digest.update(part)
            hashes.append(digest.digest())
        return cls(views, StateManifest(size_bytes, tuple(hashes)))

    @property
    def id(self) -> bytes:
        return self.manifest.id

    def chunk(self, index: int) -> Buffer:
        first, *others = _between(self.pieces, index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        return b"".join((first, *others)) if others else first


def _between(pieces: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The bytes [start, end) of all pieces."""
    ends = itertools.accumulate(len(piece) for piece in pieces)
    cut = [
        piece[max(0, start - stop + len(piece)) : max(0, end - stop + len(piece))]
        for piece, stop in zip(pieces, ends, strict=True)
    ]
    return [part for part in cut if len(part)]


@dataclass(frozen=True)
class Source:
    peer: PeerId
    addresses: tuple[str, ...] = ()


class StateServer:
    """Serves the newest state of one job to whoever asks, and the one before it to whoever was fetching that."""

    def __init__(self, transport: Transport, job: bytes, timing: Timing) -> None:
        self._transport = transport
        self._job = job
        self._timing = timing
        self._states: dict[bytes, PackedState] = {}
        self._fetched: dict[Stream, bytes] = {}

    async def serve(self) -> None:
        """Answer until the transport closes."""
        await self._transport.serve(STATE, self._answer)

    def offer(self, state: PackedState) -> bytes:
        """Make ``state`` the newest; its id."""
        self._states.pop(state.id, None)
        self._states[state.id] = state
        self._forget()
        return state.id

    def _forget(self) -> None:
        *older, _ = self._states
        fetched = [state for state in older if state in self._fetched.values()]
        for state in set(older) - set(fetched[1 - KEPT_STATES :]):
            del self._states[state]

    async def _answer(self, stream: Stream) -> None:
        try:
            with stream.scope.reserve(Resource.TRANSFERS):
                while True:
                    message = await receive_within(stream, self._timing.client_silence_s)
                    await self._reply(stream, parse(pb.StateRequest, message.header))
        finally:
            if self._fetched.pop(stream, None) is not None:
                self._forget()

    async def _reply(self, stream: Stream, request: pb.StateRequest) -> None:
        state = self._states.get(request.state)
        if request.job != self._job or state is None:
            refused = pb.StateRefused(reason="this state is not kept here")
            await self._send(stream, Message(pb.StateReply(refused=refused).SerializeToString()))
            return
        self._fetched[stream] = state.id
        manifest = state.manifest
        match request.WhichOneof("kind"):
            case "describe":
                description = pb.StateReply(description=pb.Description(size_bytes=manifest.size_bytes))
                await self._send(
                    stream, Message(description.SerializeToString(), b"".join(manifest.chunk_hashes))
                )
            case "fetch" if request.fetch.chunk < len(manifest.chunk_hashes):
                chunk = pb.StateReply(chunk=pb.Chunk(index=request.fetch.chunk))
                data = state.chunk(request.fetch.chunk)
                await self._send(stream, Message(chunk.SerializeToString(), data))
            case _:
                raise ProtocolViolation("not a request for a part of a state")

    async def _send(self, stream: Stream, message: Message) -> None:
        await send_within(stream, message, self._timing.chunk_s)


class StateDownload:
    """One state on its way here. What has arrived stays when sources are lost: ``run`` may be called again with others."""

    def __init__(self, job: bytes, state: bytes, *, max_bytes: int) -> None:
        """``max_bytes``: the largest this state can be; nothing larger is allocated."""
        self.dropped: dict[PeerId, str] = {}
        """Sources that sent what is not this state, and what that was."""
        self._job = job
        self._state = state
        self._max_bytes = max_bytes
        self._manifest: StateManifest | None = None
        self._data = bytearray()
        self._missing: deque[int] = deque()
        self._left = -1
        self._done = asyncio.Event()

    async def run(
        self,
        transport: Transport,
        sources: Sequence[Source],
        timing: Timing,
        on_chunk: Callable[[int, int], None] = lambda done, total: None,
    ) -> bytearray:
        """The state. ``on_chunk`` hears of chunks held and chunks in all.

        Raises ``IntegrityError`` when all sources were dropped for what they sent, ``Unreachable`` when none of them is left
        for another reason; both name the sources.
        """
        errors: dict[PeerId, SwarmnetError] = {}

        async def take(source: Source) -> None:
            try:
                await self._take(transport, source, timing, on_chunk)
            except IntegrityError as error:
                self.dropped[source.peer] = str(error)
            except SwarmnetError as error:
                errors[source.peer] = error

        async with asyncio.TaskGroup() as group:
            for source in sources:
                if source.peer not in self.dropped:
                    group.create_task(take(source))
        if self._left == 0:
            return self._data
        causes = "; ".join(f"{peer}: {reason}" for peer, reason in {**self.dropped, **errors}.items())
        kind = IntegrityError if self.dropped and not errors else Unreachable
        raise kind(f"the state could not be fetched ({causes or 'nobody offers it'})")

    async def _take(
        self,
        transport: Transport,
        source: Source,
        timing: Timing,
        on_chunk: Callable[[int, int], None],
    ) -> None:
        """Take chunks from one source until none is left to take."""
        stream = await transport.open(
            source.peer, STATE, addresses=source.addresses, deadline_s=timing.open_s
        )
        asked: deque[int] = deque()
        try:
            manifest = await self._described(stream, timing)
            while self._left:
                while self._missing and len(asked) < ASKED_AHEAD:
                    asked.append(self._missing.popleft())
                    await self._ask(stream, fetch=pb.Fetch(chunk=asked[-1]))
                if not asked:  # the last ones are on their way from others, who may yet fail
                    await self._done.wait()
                    self._done.clear()
                    continue
                await self._take_chunk(stream, manifest, asked[0], timing)
                asked.popleft()
                self._done.set()
                self._left -= 1
                on_chunk(len(manifest.chunk_hashes) - self._left, len(manifest.chunk_hashes))
        finally:
            self._missing.extend(asked)
            self._done.set()
            stream.close()

    async def _described(self, stream: Stream, timing: Timing) -> StateManifest:
        if self._manifest is not None:
            return self._manifest
        await self._ask(stream, describe=pb.Describe())
        message, reply = await self._answer(stream, timing)
        size, hashes = reply.description.size_bytes, bytes(message.payload)
        chunks = -(-size // CHUNK_BYTES)
        if not reply.HasField("description") or len(hashes) != chunks * HASH_BYTES:
            raise IntegrityError("a description that does not describe its state")
        parts = tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
        manifest = StateManifest(size, parts)
        if manifest.id != self._state:
            raise IntegrityError("the description of another state")
        if size > self._max_bytes:
            raise IntegrityError(f"a state of {size} bytes, {self._max_bytes} were expected at most")
        if self._manifest is None:
            self._manifest, self._data = manifest, bytearray(size)
            self._missing, self._left = deque(range(chunks)), chunks
        return self._manifest

    async def _take_chunk(self, stream: Stream, manifest: StateManifest, index: int, timing: Timing) -> None:
        message, reply = await self._answer(stream, timing)
        good = (
            reply.HasField("chunk")
            and len(message.payload) == manifest.chunk_bytes(index)
            and hashlib.sha256(message.payload).digest() == manifest.chunk_hashes[index]
        )
        if not good:
            raise IntegrityError(f"chunk {index} is not what its hash says")
        start = index * CHUNK_BYTES
        self._data[start : start + len(message.payload)] = message.payload

    async def _ask(
        self, stream: Stream, *, describe: pb.Describe | None = None, fetch: pb.Fetch | None = None
    ) -> None:
        request = pb.StateRequest(job=self._job, state=self._state, describe=describe, fetch=fetch)
        await stream.send(Message(request.SerializeToString()))

    async def _answer(self, stream: Stream, timing: Timing) -> tuple[Message, pb.StateReply]:
        message = await receive_within(stream, timing.chunk_s)
        reply = parse(pb.StateReply, message.header)
        if reply.HasField("refused"):
            raise Unreachable(printable(reply.refused.reason))
        return message, reply
