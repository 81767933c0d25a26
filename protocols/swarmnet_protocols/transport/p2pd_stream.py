"""A stream of real nodes: framed messages over the unix socket that p2pd makes of a libp2p stream."""

import asyncio
import contextlib
from collections.abc import Callable

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.resources import Scope
from swarmnet_protocols.transport import Buffer, Message, PeerId, ProtocolSpec, Refusal
from swarmnet_protocols.transport.framing import FrameReader, encode
from swarmnet_protocols.transport.meter import Meter
from swarmnet_protocols.transport.p2pd_daemon import unpack_multiaddr
from swarmnet_protocols.transport.pacing import PIECE_BYTES, Pace, PacedReader
from swarmnet_protocols.transport.refusing import encode_refusal, linger


class P2pdStream:
    """A message stream over one libp2p stream."""

    def __init__(
        self,
        peer: PeerId,
        protocol: ProtocolSpec,
        pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        meter: Meter,
        on_close: Callable[["P2pdStream"], None],
        pace: Pace,
    ) -> None:
        self.packed_address = b""
        reader, writer = pipe
        self._up = pace.up
        self._on_close = on_close
        self._peer = peer
        self._protocol = protocol
        self._reader = reader
        self._frames = FrameReader(PacedReader(reader, pace.down), protocol, meter)
        self._meter = meter
        meter.drop = self.drop
        self._writer = writer
        # ``send`` then returns when the kernel has all of a message, and the caller may reuse its buffers.
        writer.transport.set_write_buffer_limits(high=0)
        self._sending = asyncio.Lock()
        self._receiving = asyncio.Lock()
        self._reading: asyncio.Timeout | None = None
        self._closed = False
        self._lingers = False

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
            if self._closed:
                raise StreamEnded("the stream was closed")
            if self._writer.is_closing() or self._reader.at_eof():
                raise StreamEnded("the stream ended")
            try:
                await self._write(head, payload)
            except OSError as error:
                raise StreamEnded(f"the stream broke: {error}") from error

    async def _write(self, head: bytes, payload: Buffer) -> None:
        size_bytes = len(head) + len(payload)
        if not self._up.is_limited or size_bytes <= PIECE_BYTES:
            await self._up.turn(size_bytes, of_bytes=size_bytes)
            self._writer.write(head)
            if payload:
                self._writer.write(payload)
            await self._writer.drain()
            return
        view = memoryview(payload)
        pieces: list[Buffer] = [view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES)]
        try:
            for piece in [head, *pieces]:
                await self._up.turn(len(piece), of_bytes=size_bytes)
                self._writer.write(piece)
                await self._writer.drain()
        except BaseException:
            self.close()  # half a message is on its way: nothing that follows would be understood
            raise

    async def receive(self) -> Message:
        if self._closed:
            raise StreamEnded("the stream was closed")
        async with self._receiving:
            try:
                async with asyncio.timeout(None) as self._reading:
                    message = await self._meter.receive(self._frames.read)
            except TimeoutError as error:  # there is none but that of ``refuse``
                raise StreamEnded("the stream was closed") from error
            finally:
                self._reading = None
        if self._closed:
            raise StreamEnded("the stream was closed")
        return message

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._meter.close()
            self._writer.close()
            self._on_close(self)

    def drop(self) -> None:
        """As ``close``; of whoever was refused, it is not waited until it has heard so."""
        self.close()
        self._meter.close()
        self._writer.close()

    def refuse(self, refusal: Refusal) -> None:
        if self._closed or self._sending.locked():
            self.close()
            return
        self._closed = self._lingers = True
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())
        self._writer.write(encode_refusal(refusal))
        self._on_close(self)

    async def flush(self) -> None:
        """Wait until everything sent before ``close`` has left this process, and whoever was refused has heard it."""
        if self._lingers:
            try:
                async with self._receiving:  # until whoever receives has heard that it is over
                    await linger(self._reader, self._writer)
            finally:
                self._meter.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
