"""A stream of real nodes: framed messages over the unix socket that p2pd makes of a libp2p stream."""

import asyncio
from collections.abc import Callable

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.resources import Scope
from swarmnet_protocols.transport import Buffer, Message, PeerId, ProtocolSpec, Refusal
from swarmnet_protocols.transport.framing import FrameReader, encode
from swarmnet_protocols.transport.meter import Meter
from swarmnet_protocols.transport.p2pd_daemon import unpack_multiaddr
from swarmnet_protocols.transport.p2pd_pipe import Pipe
from swarmnet_protocols.transport.pacing import PIECE_BYTES, Pace, PacedReader
from swarmnet_protocols.transport.refusing import ENDED, LINGER_S, encode_refusal

MAX_MIB_ON_ITS_WAY = 16.0
"""libp2p takes so much of what is sent on a stream before the other side has any of it."""


class P2pdStream:
    """A message stream over one libp2p stream."""

    def __init__(
        self,
        peer: PeerId,
        protocol: ProtocolSpec,
        pipe: Pipe,
        meter: Meter,
        on_close: Callable[["P2pdStream"], None],
        pace: Pace,
    ) -> None:
        self.packed_address = b""
        self._up = pace.up
        self._on_close = on_close
        self._peer = peer
        self._protocol = protocol
        self._pipe = pipe
        self._frames = FrameReader(PacedReader(pipe.reader, pace.down), protocol, meter)
        self._meter = meter
        meter.drop = self.drop
        # ``send`` then returns when the kernel has all of a message, and the caller may reuse its buffers.
        pipe.writer.transport.set_write_buffer_limits(high=0)
        self._sending = asyncio.Lock()
        self._sent_bytes = 0
        self._is_halfway = False
        """Part of a message has been sent, and what follows would be taken for the rest."""
        self._closed = False

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def address(self) -> str:
        return unpack_multiaddr(self.packed_address) if self.packed_address else ""

    @property
    def scope(self) -> Scope:
        return self._meter.scope

    async def send(self, message: Message) -> None:
        head, payload = encode(message, self._protocol)
        async with self._sending:
            await self._meter.send(len(head) + len(payload))
            self._check_open()
            if self._pipe.writer.is_closing() or self._pipe.reader.at_eof() or self._frames.is_over:
                raise StreamEnded("the stream ended")
            try:
                await self._write(head, payload)
            except OSError as error:
                raise StreamEnded(f"the stream broke: {error}") from error

    async def _write(self, head: bytes, payload: Buffer) -> None:
        size_bytes = len(head) + len(payload)
        if not self._up.is_limited or size_bytes <= PIECE_BYTES:
            await self._up.turn(size_bytes, of_bytes=size_bytes)
            self._check_open()
            self._sent_bytes += size_bytes
            self._pipe.writer.write(head)
            if payload:
                self._pipe.writer.write(payload)
            await self._pipe.writer.drain()
            return
        view = memoryview(payload)
        pieces: list[Buffer] = [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
        try:
            for piece in [head, *pieces]:
                await self._up.turn(len(piece), of_bytes=size_bytes)
                self._check_open()
                self._is_halfway = True
                self._sent_bytes += len(piece)
                self._pipe.writer.write(piece)
                await self._pipe.writer.drain()
        except BaseException:
            self.close()
            raise
        self._is_halfway = False

    async def receive(self) -> Message:
        self._check_open()
        message = await self._meter.receive(self._frames.read)
        self._check_open()
        return message

    def _check_open(self) -> None:
        if self._closed:
            raise StreamEnded("the stream was closed")

    def close(self) -> None:
        if self._sent_bytes and not self._frames.is_over:
            mib_on_its_way = min(self._sent_bytes / (1 << 20), MAX_MIB_ON_ITS_WAY)
            self._end(ENDED, within_s=self._meter.piece_s * (1 + mib_on_its_way))
        else:
            self._end(b"", within_s=0.0)

    def drop(self) -> None:
        """As ``close``, and it is not waited until the other side has heard anything."""
        self.close()
        self._meter.close()
        self._pipe.writer.close()

    def refuse(self, refusal: Refusal) -> None:
        self._end(encode_refusal(refusal), within_s=LINGER_S)

    def _end(self, last_word: bytes, *, within_s: float) -> None:
        """End it with a last word if there is one, and at once if there is none, or if it would not be understood."""
        if self._closed:
            return
        self._closed = True
        self._meter.end()
        if last_word and not self._is_halfway:
            self._pipe.end(last_word, within_s=within_s)
        else:
            self._pipe.writer.close()
        self._on_close(self)

    async def flush(self) -> None:
        """Wait until the other side has everything that was sent before ``close``, or has had its time."""
        try:
            await self._pipe.closed()
        finally:
            self._meter.close()
