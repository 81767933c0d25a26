"""State transfer: a newcomer, or a worker that was away, downloads a job's state by hash, in chunks, from several workers at once.

The id of a state is the SHA-256 of its size and its chunks' hashes, so every chunk from any worker is verified on its own. A source that sends
wrong bytes is dropped and named in the error; its chunks are fetched from the others.
"""

import asyncio
import contextlib
import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import IntegrityError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import Buffer, PeerId, Stream, Transport
from swarmnet_protocols.net.limits.resources import Resource
from swarmnet_protocols.net.protocol_ids import STATE
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import workers_pb2 as pb

CHUNK_BYTES = 1 << 20
HASH_BYTES = 32
REPEAT_S = 5.0
"""Seconds after which a source without work repeats a request that another source has not answered."""
CHUNKS_IN_FLIGHT = 2
"""Chunks requested from a source at a time. With two, the next request is there when a chunk has been sent, so the link stays busy."""
KEPT_STATES = 2
"""States in memory: the newest, and an older one only while a peer downloads it."""


@dataclass(frozen=True)
class StateManifest:
    """The size of a state in bytes, and the SHA-256 of every chunk."""

    size_bytes: int
    chunk_hashes: tuple[bytes, ...]

    @property
    def id(self) -> bytes:
        """The state's id, 32 bytes."""
        return hashlib.sha256(struct.pack(">Q", self.size_bytes) + b"".join(self.chunk_hashes)).digest()

    def chunk_bytes(self, index: int) -> int:
        """Bytes of one chunk: ``CHUNK_BYTES``, or less for the last."""
        return min(CHUNK_BYTES, self.size_bytes - index * CHUNK_BYTES)


@dataclass(frozen=True)
class PackedState:
    """A state as bytes in several pieces, which are not copied and must not be changed."""

    pieces: tuple[memoryview, ...]
    manifest: StateManifest

    @classmethod
    def of(cls, pieces: Iterable[Buffer]) -> "PackedState":
        """Hash ``pieces`` into a manifest."""
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
        """The state's id, 32 bytes."""
        return self.manifest.id

    def chunk(self, index: int) -> Buffer:
        """The bytes of one chunk; copied only if they span pieces."""
        first, *others = _between(self.pieces, index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        return b"".join((first, *others)) if others else first


def _between(pieces: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The bytes [start, end) of the concatenated pieces."""
    ends = itertools.accumulate(len(piece) for piece in pieces)
    cut = [
        piece[max(0, start - stop + len(piece)) : max(0, end - stop + len(piece))]
        for piece, stop in zip(pieces, ends, strict=True)
    ]
    return [part for part in cut if len(part)]


class StateServer:
    """Serves the newest state of one job, and an older one to peers that were already downloading it."""

    def __init__(self, transport: Transport, job: bytes, timing: Timing) -> None:
        self._transport = transport
        self._job = job
        self._timing = timing
        self._states: dict[bytes, PackedState] = {}
        self._fetched: dict[Stream, bytes] = {}

    async def serve(self) -> None:
        """Serve until the transport closes."""
        await STATE.serve(self._transport, self._answer, self._timing)

    def offer(self, state: PackedState) -> bytes:
        """Make ``state`` the newest and return its id."""
        self._states.pop(state.id, None)
        self._states[state.id] = state
        self._forget()
        return state.id

    def _forget(self) -> None:
        *older, _ = self._states
        fetched = [state for state in older if state in self._fetched.values()]
        for state in set(older) - set(fetched[1 - KEPT_STATES :]):
            del self._states[state]

    async def _answer(self, stream: TypedStream[pb.StateReply, pb.StateRequest]) -> None:
        try:
            with stream.stream.scope.reserve(Resource.TRANSFERS):
                while True:
                    request, _ = await stream.receive()
                    await stream.send(*self._reply(stream.stream, request))
        finally:
            if self._fetched.pop(stream.stream, None) is not None:
                self._forget()

    def _reply(self, stream: Stream, request: pb.StateRequest) -> tuple[pb.StateReply, Buffer]:
        """The reply to a request and its payload. Raises ``Refusal`` for a state that is not kept here."""
        state = self._states.get(request.state)
        if request.job != self._job or state is None:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this state is not kept here")
        self._fetched[stream] = state.id
        manifest = state.manifest
        match request.WhichOneof("kind"):
            case "describe":
                description = pb.Description(size_bytes=manifest.size_bytes)
                return pb.StateReply(description=description), b"".join(manifest.chunk_hashes)
            case "fetch" if request.fetch.chunk < len(manifest.chunk_hashes):
                index = request.fetch.chunk
                return pb.StateReply(chunk=pb.Chunk(index=index)), state.chunk(index)
            case _:
                raise ProtocolViolation("not a request for a part of a state")


StateStream = TypedStream[pb.StateRequest, pb.StateReply]


class StateDownload:
    """The download of one state. Chunks that arrived are kept if sources are lost, so ``run`` may be called again with other sources."""

    def __init__(self, job: bytes, state: bytes, *, max_bytes: int) -> None:
        """``max_bytes``: most bytes of the state. A larger one is refused before memory is allocated."""
        self.dropped: dict[PeerId, str] = {}
        """Sources that sent wrong data, and the error."""
        self._job = job
        self._state = state
        self._max_bytes = max_bytes
        self._manifest: StateManifest | None = None
        self._data = bytearray()
        self._missing: deque[int] = deque()
        self._asked: dict[int, float] = {}
        """When each chunk that has not arrived was asked for last."""
        self._left = -1
        self._done = asyncio.Event()

    async def run(
        self,
        transport: Transport,
        sources: Sequence[RoundMember],
        timing: Timing,
        on_chunk: Callable[[int, int], None] = lambda done, total: None,
    ) -> bytearray:
        """Download the state and return it. ``on_chunk`` is called with the number of chunks that arrived and the number of all chunks.

        Raises ``IntegrityError`` if all sources sent wrong data, and ``Unreachable`` if no source is left for another reason; both
        name the sources.
        """
        errors: dict[PeerId, SwarmnetError] = {}

        async def take(source: RoundMember) -> None:
            try:
                await self._take(transport, source, timing, on_chunk)
            except IntegrityError as error:
                self.dropped[source.peer] = str(error)
            except SwarmnetError as error:
                errors[source.peer] = error

        running = {asyncio.create_task(take(source)) for source in sources if source.peer not in self.dropped}
        try:
            while running and self._left:
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
        finally:
            await cancel(*running)
        if self._left == 0:
            return self._data
        causes = "; ".join(f"{peer}: {reason}" for peer, reason in {**self.dropped, **errors}.items())
        kind = IntegrityError if self.dropped and not errors else Unreachable
        raise kind(f"the state could not be fetched ({causes or 'no worker offers it'})")

    async def _take(
        self,
        transport: Transport,
        source: RoundMember,
        timing: Timing,
        on_chunk: Callable[[int, int], None],
    ) -> None:
        """Fetch chunks from one source until all chunks have arrived."""
        typed = await STATE.open(transport, source.peer, timing, addresses=source.addresses)
        asked: deque[int] = deque()
        try:
            manifest = await self._get_manifest(typed)
            while self._left:
                while len(asked) < CHUNKS_IN_FLIGHT and (chunk := self._next_chunk(asked)) is not None:
                    asked.append(chunk)
                    await typed.send(self._request(fetch=pb.Fetch(chunk=chunk)))
                if not asked:  # the rest was requested from other sources, which may still fail
                    self._done.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(REPEAT_S):
                            await self._done.wait()
                    continue
                await self._receive_chunk(typed, manifest, asked[0])
                if self._asked.pop(asked.popleft(), None) is not None:
                    self._left -= 1
                    on_chunk(len(manifest.chunk_hashes) - self._left, len(manifest.chunk_hashes))
                self._done.set()
        finally:
            self._missing.extend(chunk for chunk in asked if self._asked.pop(chunk, None) is not None)
            self._done.set()
            typed.close()

    def _next_chunk(self, asked: Collection[int]) -> int | None:
        """A chunk to ask a source for, which has yet to answer for ``asked``; None if there is none.

        When all are asked for, a source without work repeats the chunk that another one has held for longest.
        """
        now = asyncio.get_running_loop().time()
        if self._missing:
            chunk = self._missing.popleft()
        else:
            late = {} if asked else {each: at for each, at in self._asked.items() if at < now - REPEAT_S}
            if not late:
                return None
            chunk = min(late, key=late.__getitem__)
        self._asked[chunk] = now
        return chunk

    async def _get_manifest(self, stream: StateStream) -> StateManifest:
        if self._manifest is not None:
            return self._manifest
        await stream.send(self._request(describe=pb.Describe()))
        reply, payload = await stream.receive()
        size, hashes = reply.description.size_bytes, bytes(payload)
        chunks = -(-size // CHUNK_BYTES)
        if not reply.HasField("description") or len(hashes) != chunks * HASH_BYTES:
            raise IntegrityError("a description that does not fit its size")
        parts = tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
        manifest = StateManifest(size, parts)
        if manifest.id != self._state:
            raise IntegrityError("the description of another state")
        if size > self._max_bytes:
            raise IntegrityError(f"a state of {size} bytes, at most {self._max_bytes} were expected")
        if self._manifest is None:
            self._manifest, self._data = manifest, bytearray(size)
            self._missing, self._left = deque(range(chunks)), chunks
        return self._manifest

    async def _receive_chunk(self, stream: StateStream, manifest: StateManifest, index: int) -> None:
        reply, payload = await stream.receive()
        good = (
            reply.HasField("chunk")
            and len(payload) == manifest.chunk_bytes(index)
            and hashlib.sha256(payload).digest() == manifest.chunk_hashes[index]
        )
        if not good:
            raise IntegrityError(f"chunk {index} does not have its hash")
        start = index * CHUNK_BYTES
        self._data[start : start + len(payload)] = payload

    def _request(
        self, *, describe: pb.Describe | None = None, fetch: pb.Fetch | None = None
    ) -> pb.StateRequest:
        return pb.StateRequest(job=self._job, state=self._state, describe=describe, fetch=fetch)
