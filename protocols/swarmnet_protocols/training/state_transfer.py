"""State transfer: a worker downloads a job's state by hash from several other workers.

It does so when it is new, or was away. The id of a state is the SHA-256 of its size and its chunks'
hashes, so every chunk from any worker is verified on its own. ``fetching/download.py`` assigns
chunks to sources, repeats slow ones, and drops a source that sends wrong bytes.
"""

import hashlib
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarmnet_protocols.errors import IntegrityError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.fetching.download import download
from swarmnet_protocols.fetching.hedging import hedged
from swarmnet_protocols.fetching.piece_memory import PieceMemory
from swarmnet_protocols.fetching.pieces import HASH_BYTES, PIECE_BYTES, ModelFile
from swarmnet_protocols.net import Buffer, PeerId, Stream, Transport
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import STATE
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import workers_pb2 as pb

_log = logging.getLogger(__name__)

CHUNK_BYTES = PIECE_BYTES
STREAMS = 2
"""Streams with each worker. With two, the next request is there when a chunk has been sent."""
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


@dataclass(frozen=True)
class PackedState:
    """A state as bytes in several pieces. The pieces are not copied and must not be changed."""

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
        """Return the bytes of one chunk. Copies them only if they span pieces."""
        first, *others = _between(self.pieces, index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES)
        return b"".join((first, *others)) if others else first


def _between(pieces: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return the bytes [start, end) of the concatenated pieces."""
    ends = itertools.accumulate(len(piece) for piece in pieces)
    cut = [
        piece[max(0, start - stop + len(piece)) : max(0, end - stop + len(piece))]
        for piece, stop in zip(pieces, ends, strict=True)
    ]
    return [part for part in cut if len(part)]


class StateServer:
    """Serves the newest state of one job.

    Also serves an older state to peers that were already downloading it.
    """

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
        """Return the reply to a request and its payload.

        Raises ``Refusal`` for a state that is not kept here.
        """
        state = self._states.get(request.state)
        if request.job != self._job or state is None:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this state is not kept here")
        self._fetched[stream] = state.id
        manifest, kind = state.manifest, request.WhichOneof("kind")
        _log.debug("download %s to %s: %s %s", state.id.hex()[:8], stream.peer, kind, request.fetch.chunk)
        match kind:
            case "describe":
                description = pb.Description(size_bytes=manifest.size_bytes)
                return pb.StateReply(description=description), b"".join(manifest.chunk_hashes)
            case "fetch" if request.fetch.chunk < len(manifest.chunk_hashes):
                index = request.fetch.chunk
                return pb.StateReply(chunk=pb.Chunk(index=index)), state.chunk(index)
            case _:
                raise ProtocolViolation("not a request for a part of a state")


StateStream = TypedStream[pb.StateRequest, pb.StateReply]


@dataclass
class StateSource:
    """One stream with a worker, as a source of the chunks of one state. ``prepare`` opens it."""

    name: str
    open: Callable[[], Awaitable[StateStream]]
    request: Callable[..., pb.StateRequest]
    """Makes a request about the state."""
    is_last: bool = False
    connections: int = 1
    max_bytes: int = CHUNK_BYTES
    _stream: StateStream | None = field(default=None, init=False)

    async def prepare(self) -> None:
        """Open the stream, unless it is open. Raises the errors of ``Transport.open``."""
        if self._stream is None:
            self._stream = await self.open()

    def has(self, file: ModelFile, piece: int) -> bool:
        """Return whether the worker may have a chunk. A worker has all of a state or none of it."""
        return self._stream is not None

    async def describe(self, state: bytes, max_bytes: int) -> StateManifest:
        """Return the hashes of the chunks.

        Raises ``IntegrityError`` for another or a larger state.
        """
        reply, payload = await self._ask(self.request(describe=pb.Describe()))
        size, hashes = reply.description.size_bytes, bytes(payload)
        if not reply.HasField("description") or len(hashes) != -(-size // CHUNK_BYTES) * HASH_BYTES:
            raise IntegrityError("a description that does not fit its size")
        parts = tuple(hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
        manifest = StateManifest(size, parts)
        if manifest.id != state:
            raise IntegrityError("the description of another state")
        if size > max_bytes:
            raise IntegrityError(f"a state of {size} bytes, at most {max_bytes} were expected")
        return manifest

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        """Return the chunk [start, end), not verified. Raises the errors of ``TypedStream``."""
        reply, payload = await self._ask(self.request(fetch=pb.Fetch(chunk=start // CHUNK_BYTES)))
        if not reply.HasField("chunk") or len(payload) != end - start:
            raise IntegrityError(f"{len(payload)} bytes were sent, {end - start} were asked for")
        return bytes(payload)

    async def _ask(self, request: pb.StateRequest) -> tuple[pb.StateReply, Buffer]:
        if self._stream is None:
            raise Unreachable("its stream is not open")
        await self._stream.send(request)
        return await self._stream.receive()

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()


class StateDownload:
    """The download of one state.

    It keeps arrived chunks, so ``run`` may be repeated with other sources.
    """

    def __init__(self, job: bytes, state: bytes, *, max_bytes: int) -> None:
        """``max_bytes``: a larger state is refused before memory is allocated."""
        self.dropped: dict[PeerId, str] = {}
        """Sources that sent wrong data → the error."""
        self._job = job
        self._state = state
        self._max_bytes = max_bytes
        self._memory: PieceMemory | None = None

    async def run(
        self,
        transport: Transport,
        sources: Sequence[RoundMember],
        timing: Timing,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ) -> bytearray:
        """Download the state and return it. For ``on_bytes`` see ``download``.

        Raises ``IntegrityError`` if all sources sent wrong data. Raises ``Unreachable`` if no
        source is left for another reason. Both name the sources.
        """
        streams = [
            StateSource(
                source.peer,
                partial(STATE.open, transport, source.peer, timing, addresses=source.addresses),
                partial(pb.StateRequest, job=self._job, state=self._state),
            )
            for source in sources
            if source.peer not in self.dropped
            for _ in range(STREAMS)
        ]
        try:
            if self._memory is None:
                self._memory = await self._describe(streams[::STREAMS])
            wanted = [(self._memory, range(len(self._memory.starts) - 1))]
            left = [each for each in streams if each.name not in self.dropped]
            await download(wanted, left, on_bytes, self._drop)
            return self._memory.data
        finally:
            for each in streams:
                each.close()

    def _drop(self, source: str, error: IntegrityError) -> None:
        self.dropped[PeerId(source)] = str(error)

    async def _describe(self, sources: Sequence[StateSource]) -> PieceMemory:
        """Allocate room for the state, as the first source with a valid description describes it.

        A description is valid if it has the state's id.
        """
        errors: dict[str, SwarmnetError] = {}
        found: list[StateManifest] = []

        async def described(source: StateSource) -> bool:
            try:
                await source.prepare()
                found.append(await source.describe(self._state, self._max_bytes))
            except SwarmnetError as error:
                errors[source.name] = error
                if isinstance(error, IntegrityError):
                    self._drop(source.name, error)
            return bool(found)

        await hedged(sources, described)
        if found:
            size_bytes, hashes = found[0].size_bytes, found[0].chunk_hashes
            return PieceMemory(ModelFile("the state", size_bytes, self._state), hashes)
        causes = "; ".join(f"{peer}: {error}" for peer, error in errors.items())
        is_wrong = errors and all(isinstance(error, IntegrityError) for error in errors.values())
        kind = IntegrityError if is_wrong else Unreachable
        raise kind(f"the state could not be fetched ({causes or 'no worker offers it'})")
