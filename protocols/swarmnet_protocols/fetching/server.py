"""Serve this machine's weights to members of the swarm, at a lower priority than its sessions."""

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.fetching.pieces import PIECE_BYTES
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import weights_pb2 as pb

_log = logging.getLogger(__name__)

AT_ONCE = 2
"""Most replies at the same time, to all peers together. Streams take turns."""
TURN_S = 3.0
"""Seconds until a turn ends even if the peer has not taken the reply.

With more, peers that do not read keep others waiting. With less, more replies share a slow uplink
with the sessions."""
BUSY_SHARE = 0.25
"""Largest share of time for sending weights while sessions are open."""


class Library(Protocol):
    """The weights of one model on this machine."""

    @property
    def model(self) -> bytes:
        """The hash of the model's manifest."""

    def document(self, what: pb.What, file: bytes) -> bytes:
        """Return the document ``what``: the table of pieces of a file, the bits of the pieces of a
        file that are here, the listing, or the manifest. Empty if the document is not here."""

    def place(self, file: bytes, start: int, end: int) -> tuple[Path, int] | None:
        """Return where the bytes [start, end) of a file are, and the size of the whole file.

        None unless all these bytes are here and verified.
        """


class Standing(IntEnum):
    """The speed at which a stream took its last reply. The lowest standing gets the next turn."""

    TOOK = 0
    """The stream took the reply within its turn."""
    NEW = 1
    """The stream has had no reply."""
    LEFT = 2
    """The stream did not take its reply in time. All others come first."""


class SendTurn:
    """The right to send a reply. It ends with the reply, or after ``TURN_S``."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.is_held = True
        self._on_end = on_end

    def end(self) -> None:
        """Let the next stream send. Idempotent."""
        if self.is_held:
            self.is_held = False
            self._on_end()


class SendTurns:
    """Turns to send: ``AT_ONCE`` at a time, by standing, then in the order of asking."""

    def __init__(self) -> None:
        self._free = AT_ONCE
        self._numbers = itertools.count()
        self._waiting: list[tuple[Standing, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def acquire(self, standing: Standing) -> AsyncIterator[SendTurn]:
        """Take a turn while the context is open, for at most ``TURN_S``."""
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            due: asyncio.Future[None] = loop.create_future()
            heapq.heappush(self._waiting, (standing, next(self._numbers), due))
            try:
                await due
            except asyncio.CancelledError:
                if not due.cancelled():  # the turn had come
                    self._pass_on()
                raise
        turn = SendTurn(self._pass_on)
        timer = loop.call_later(TURN_S, turn.end)
        try:
            yield turn
        finally:
            timer.cancel()
            turn.end()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, due = heapq.heappop(self._waiting)
            if not due.done():
                due.set_result(None)
                return
        self._free += 1


class WeightServer:
    """The handler of ``WEIGHTS``. Each peer has few streams, each stream one reply at a time."""

    def __init__(self, library: Library, is_busy: Callable[[], bool]) -> None:
        """Create the handler of ``library``.

        While ``is_busy`` says that sessions are open, weights are sent at most ``BUSY_SHARE`` of
        the time.
        """
        self._library = library
        self._is_busy = is_busy
        self._turns = SendTurns()

    async def handle(self, stream: TypedStream[pb.WeightsReply, pb.WeightsRequest]) -> None:
        """Answer the requests of one stream until it ends."""
        standing, scope = Standing.NEW, stream.stream.scope
        with scope.reserve(Resource.TRANSFERS):
            while True:
                request, _ = await stream.receive()
                async with self._turns.acquire(standing) as turn:
                    began = time.monotonic()
                    total, payload = await self._answer(request)
                    name, start = request.file.hex()[:8], request.offset
                    _log.debug("download %s to %s: %d bytes from %d", name, stream.peer, len(payload), start)
                    with scope.reserve(Resource.MEMORY, len(payload)):
                        await stream.send(pb.WeightsReply(total_bytes=total), payload)
                    standing = Standing.TOOK if turn.is_held else Standing.LEFT
                    if self._is_busy():
                        took_s = time.monotonic() - began
                        await asyncio.sleep(took_s * (1 / BUSY_SHARE - 1))

    async def _answer(self, request: pb.WeightsRequest) -> tuple[int, bytes]:
        """Return the size of the requested item, and the bytes. Raises ``Refusal`` for another
        model.
        """
        if request.manifest != self._library.model:
            raise Refusal(refusal_pb2.REASON_WRONG_MODEL, "the weights of this model are not here")
        start, end = request.offset, request.offset + request.length
        if not 0 < request.length <= PIECE_BYTES or request.what == pb.WHAT_UNSPECIFIED:
            raise ProtocolViolation("not a request for a part of the weights")
        if request.what != pb.WHAT_DATA:
            whole = await asyncio.to_thread(self._library.document, request.what, request.file)
            return len(whole), whole[start:end]
        place = self._library.place(request.file, start, end)
        if place is None:
            return 0, b""
        path, size = place
        return size, await asyncio.to_thread(_read, path, start, end - start)


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except OSError:
        return b""  # removed meanwhile
