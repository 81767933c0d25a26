"""State transfer: a worker downloads a job's state by hash from several other workers.

It does so when it is new, or was away. The id of a state is the SHA-256 of its size and its chunks'
hashes, so every chunk from any worker is verified on its own. ``fetching/download.py`` assigns
chunks to sources, repeats slow ones, and drops a source that sends wrong bytes.

The contributions of gossip travel in the same way (``pairs.py``): a partner asks for the id.
"""

import hashlib
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from swarmnet_protocols.errors import IntegrityError, ProtocolViolation, SwarmnetError, Unreachable
from swarmnet_protocols.fetching.download import download
from swarmnet_protocols.fetching.hedging import hedged
from swarmnet_protocols.fetching.piece_file import PieceMemory
from swarmnet_protocols.fetching.pieces import HASH_BYTES, PIECE_BYTES, ModelFile
from swarmnet_protocols.machine.aio import News, loop_time
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
"""Streams with each worker. With two, a worker already has the next request when it has sent a
chunk."""
KEPT_STATES = 2
"""States in memory: the newest, and an older one only while a peer downloads it."""
KEPT_OFFERS = 2
"""Contributions in memory. A partner that is a round behind needs the last but one."""
MAX_PATIENCE_S = 10.0
"""Most seconds of a round that a partner waits for a contribution. Well below ``Timing.chunk_s``,
after which the partner gives up."""
PATIENCE = 1 / 4
"""Share of a round that a partner waits. With more, a worker that is a little late delays others
longer. With less, averages contain older contributions."""


def state_id(size_bytes: int, chunk_hashes: bytes) -> bytes:
    """Return the id of a state, 32 bytes. ``chunk_hashes``: the SHA-256 of every chunk."""
    return hashlib.sha256(struct.pack(">Q", size_bytes) + chunk_hashes).digest()


@dataclass(frozen=True)
class PackedState:
    """A state as bytes in several pieces, which are not copied.

    They may change only after ``StateServer.withdraw``.
    """

    pieces: tuple[memoryview, ...]
    size_bytes: int
    chunk_hashes: bytes
    id: bytes

    @classmethod
    def of(cls, pieces: Iterable[Buffer]) -> "PackedState":
        """Hash ``pieces``."""
        views = tuple(memoryview(piece) for piece in pieces)
        size_bytes = sum(len(view) for view in views)
        hashes = b""
        for start in range(0, size_bytes, CHUNK_BYTES):
            digest = hashlib.sha256()
            for part in _between(views, start, start + CHUNK_BYTES):
                digest.update(part)
            hashes += digest.digest()
        return cls(views, size_bytes, hashes, state_id(size_bytes, hashes))

    def chunk(self, index: int) -> Buffer:
        """Return a copy of the bytes of one chunk. The pieces may change while it is sent."""
        return b"".join(_between(self.pieces, index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES))


def _between(pieces: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return the bytes [start, end) of the concatenated pieces."""
    ends = itertools.accumulate(len(piece) for piece in pieces)
    cut = [
        piece[max(0, start - stop + len(piece)) : max(0, end - stop + len(piece))]
        for piece, stop in zip(pieces, ends, strict=True)
    ]
    return [part for part in cut if len(part)]


class StateServer:
    """Serves the newest state of one ``job``, and fetches states.

    Also serves an older state to peers that were already downloading it, and copies of states of
    other jobs or stages.
    """

    def __init__(self, transport: Transport, job: bytes, timing: Timing) -> None:
        self._transport = transport
        self.job = job
        self._timing = timing
        self._states: dict[bytes, PackedState] = {}
        self._fetched: dict[Stream, bytes] = {}
        self._offers: dict[int, PackedState] = {}
        """This worker's last contributions, by round."""
        self._expected: tuple[int, float, float] = (-1, 0.0, 0.0)
        """The round of the next contribution, its loop time, and the seconds to wait for it."""
        self._copies: dict[bytes, PackedState] = {}
        self._offered = News()
        self.contributed_bytes = 0
        """Bytes of contributions that partners downloaded."""

    async def serve(self) -> None:
        """Serve until the transport closes."""
        await STATE.serve(self._transport, self._answer, self._timing)

    def offer(self, state: PackedState) -> bytes:
        """Make ``state`` the newest and return its id."""
        self._states.pop(state.id, None)
        self._states[state.id] = state
        self._forget()
        return state.id

    async def fetch(
        self,
        job: bytes,
        state: bytes,
        workers: Sequence[RoundMember],
        *,
        max_bytes: int,
        on_bytes: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[bytearray, dict[PeerId, str]]:
        """Download a state of this or another job or stage, as ``fetch_state`` does."""
        return await fetch_state(
            self._transport, job, state, workers, self._timing, max_bytes=max_bytes, on_bytes=on_bytes
        )

    def keep(self, job: bytes, copy: PackedState | None) -> None:
        """Serve a copy of the state of another job or stage. With None, stop serving it."""
        if copy is None:
            self._copies.pop(job, None)
        else:
            self._copies[job] = copy

    async def withdraw(self, copy: Callable[[Sequence[memoryview]], Awaitable[memoryview]] | None) -> None:
        """Stop reading the newest state, because its memory is about to change.

        Peers that are downloading it get the rest from the memory that ``copy`` returns. Without
        ``copy``, they ask again for the next state.
        """
        for id in [*self._states][-1:]:
            if copy is not None and id in self._fetched.values():
                copied = await copy(self._states[id].pieces)
                self._states[id] = replace(self._states[id], pieces=(copied,))
            else:
                del self._states[id]

    def expect(self, round: int, in_s: float) -> None:
        """Let partners wait for the contribution to ``round``, which will come ``in_s`` seconds
        from now."""
        patience_s = min(PATIENCE * in_s, MAX_PATIENCE_S)
        self._expected = round, loop_time() + in_s, patience_s

    async def contribute(self, round: int, contribution: PackedState) -> None:
        """Offer this worker's contribution to ``round``."""
        self._offers.pop(round, None)
        self._offers[round] = contribution
        for old in [*self._offers][:-KEPT_OFFERS]:
            del self._offers[old]
        await self._offered.tell()

    async def _offer(self, round: int) -> pb.Offer:
        """Return the contribution to ``round``, or the newest one if that will not come soon."""
        expected, ready_s, patience_s = self._expected
        late_s = ready_s + patience_s - loop_time()
        if expected == round and late_s <= 2 * patience_s:
            await self._offered.until(lambda: round in self._offers, late_s)
        if not self._offers:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this worker has not contributed yet")
        nearest = round if round in self._offers else [*self._offers][-1]
        return pb.Offer(round=nearest, state=self._offers[nearest].id)

    def _forget(self) -> None:
        older = [*self._states][:-1]
        fetched = [state for state in older if state in self._fetched.values()]
        for state in set(older) - set(fetched[1 - KEPT_STATES :]):
            del self._states[state]

    async def _answer(self, stream: TypedStream[pb.StateReply, pb.StateRequest]) -> None:
        try:
            with stream.stream.scope.reserve(Resource.TRANSFERS):
                while True:
                    request, _ = await stream.receive()
                    if request.HasField("ask_offer") and request.job == self.job:
                        offer = await self._offer(request.ask_offer.round)
                        await stream.send(pb.StateReply(offer=offer))
                    else:
                        await stream.send(*self._reply(stream.stream, request))
        finally:
            if self._fetched.pop(stream.stream, None) is not None:
                self._forget()

    def _reply(self, stream: Stream, request: pb.StateRequest) -> tuple[pb.StateReply, Buffer]:
        """Return the reply to a request and its payload.

        Raises ``Refusal`` for a state that is not kept here.
        """
        offers = {offer.id: offer for offer in self._offers.values()}
        state = self._states.get(request.state) or offers.get(request.state)
        if request.job != self.job:
            state = self._copies.get(request.job)
        if state is None or state.id != request.state:
            raise Refusal(refusal_pb2.REASON_UNKNOWN_STATE, "this state is not kept here")
        self._fetched[stream] = state.id
        kind = request.WhichOneof("kind")
        _log.debug("download %s to %s: %s %s", state.id.hex()[:8], stream.peer, kind, request.fetch.chunk)
        match kind:
            case "describe":
                return pb.StateReply(
                    description=pb.Description(size_bytes=state.size_bytes)
                ), state.chunk_hashes
            case "fetch" if request.fetch.chunk < len(state.chunk_hashes) // HASH_BYTES:
                index = request.fetch.chunk
                if state.id in offers:
                    self.contributed_bytes += len(state.chunk(index))
                return pb.StateReply(chunk=pb.Chunk(index=index)), state.chunk(index)
            case _:
                raise ProtocolViolation("not a request for a part of a state")


class StateSource:
    """One stream with a worker, as a source of the chunks of one state. ``prepare`` opens it."""

    is_last = False
    connections = 1
    max_bytes = CHUNK_BYTES

    def __init__(
        self, transport: Transport, worker: RoundMember, job: bytes, state: bytes, timing: Timing
    ) -> None:
        self.name: str = worker.peer
        self._transport = transport
        self._worker = worker
        self._wanted = pb.StateRequest(job=job, state=state)
        self._timing = timing
        self._stream: TypedStream[pb.StateRequest, pb.StateReply] | None = None

    async def prepare(self) -> None:
        """Open the stream, unless it is open. Raises the errors of ``Transport.open``."""
        if self._stream is None:
            self._stream = await STATE.open(
                self._transport, self._worker.peer, self._timing, addresses=self._worker.addresses
            )

    def has(self, file: ModelFile, piece: int) -> bool:
        """Return whether the worker may have a chunk. A worker has all of a state or none of it."""
        return self._stream is not None

    async def describe(self, max_bytes: int) -> tuple[int, bytes]:
        """Return the size of the state, and the hashes of its chunks.

        Raises ``IntegrityError`` for another or a larger state.
        """
        reply, payload = await self._ask(pb.StateRequest(describe=pb.Describe()))
        size, hashes = reply.description.size_bytes, bytes(payload)
        if not reply.HasField("description") or len(hashes) != -(-size // CHUNK_BYTES) * HASH_BYTES:
            raise IntegrityError("a description that does not fit its size")
        if state_id(size, hashes) != self._wanted.state:
            raise IntegrityError("the description of another state")
        if size > max_bytes:
            raise IntegrityError(f"a state of {size} bytes, at most {max_bytes} were expected")
        return size, hashes

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        """Return the chunk [start, end), not verified. Raises the errors of ``TypedStream``."""
        reply, payload = await self._ask(pb.StateRequest(fetch=pb.Fetch(chunk=start // CHUNK_BYTES)))
        if not reply.HasField("chunk") or len(payload) != end - start:
            raise IntegrityError(f"{len(payload)} bytes were sent, {end - start} were asked for")
        return bytes(payload)

    async def _ask(self, request: pb.StateRequest) -> tuple[pb.StateReply, Buffer]:
        if self._stream is None:
            raise Unreachable("its stream is not open")
        request.MergeFrom(self._wanted)
        await self._stream.send(request)
        return await self._stream.receive()

    def close(self) -> None:
        """Close the stream."""
        if self._stream is not None:
            self._stream.close()


async def ask_offer(
    transport: Transport, job: bytes, partner: RoundMember, round: int, timing: Timing
) -> tuple[int, bytes]:
    """Ask ``partner`` for its contribution to ``round``. Returns the round and the id of the
    contribution that it offers. Raises the errors of ``TypedStream``."""
    stream = await STATE.open(transport, partner.peer, timing, addresses=partner.addresses)
    reply, _ = await stream.ask(pb.StateRequest(job=job, ask_offer=pb.AskOffer(round=round)))
    if not reply.HasField("offer"):
        raise ProtocolViolation("not an offer")
    return reply.offer.round, reply.offer.state


async def fetch_state(  # noqa: PLR0913 - what, from whom, and how
    transport: Transport,
    job: bytes,
    state: bytes,
    workers: Sequence[RoundMember],
    timing: Timing,
    *,
    max_bytes: int,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[bytearray, dict[PeerId, str]]:
    """Download the state with the id ``state`` from ``workers``.

    Returns it, and the workers that sent wrong data with their errors. A state of more than
    ``max_bytes`` is refused before memory is allocated. For ``on_bytes`` see ``download``.

    Raises ``IntegrityError`` if all workers sent wrong data. Raises ``Unreachable`` if no worker is
    left for another reason. Both name the workers.
    """
    dropped: dict[PeerId, str] = {}

    def drop(worker: str, error: IntegrityError) -> None:
        dropped[PeerId(worker)] = str(error)

    sources = [
        StateSource(transport, worker, job, state, timing) for worker in workers for _ in range(STREAMS)
    ]
    try:
        size, hashes = await _describe(sources[::STREAMS], max_bytes, drop)
        parts = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
        memory = PieceMemory(ModelFile("the state", size, state), parts)
        left = [source for source in sources if source.name not in dropped]
        await download([(memory, range(len(parts)))], left, on_bytes, drop)
        return memory.data, dropped
    finally:
        for source in sources:
            source.close()


async def _describe(
    sources: Sequence[StateSource], max_bytes: int, drop: Callable[[str, IntegrityError], None]
) -> tuple[int, bytes]:
    """Return the first valid description that a source gives. It is valid if it has the state's
    id."""
    errors: dict[str, SwarmnetError] = {}
    found: list[tuple[int, bytes]] = []

    async def described(source: StateSource) -> bool:
        try:
            await source.prepare()
            found.append(await source.describe(max_bytes))
        except SwarmnetError as error:
            errors[source.name] = error
            if isinstance(error, IntegrityError):
                drop(source.name, error)
        return bool(found)

    await hedged(sources, described)
    if found:
        return found[0]
    causes = "; ".join(f"{peer}: {error}" for peer, error in errors.items())
    is_wrong = errors and all(isinstance(error, IntegrityError) for error in errors.values())
    kind = IntegrityError if is_wrong else Unreachable
    raise kind(f"the state could not be fetched ({causes or 'no worker offers it'})")
