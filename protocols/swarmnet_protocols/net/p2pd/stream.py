"""A stream of real nodes: framed messages over the unix socket that p2pd makes of a libp2p stream."""

import asyncio
import math
from collections.abc import Callable

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.net import Buffer, Message, PeerId, ProtocolSpec, Refusal
from swarmnet_protocols.net.flow_control import LimitedReader, ReceiveWindow, SendWindow
from swarmnet_protocols.net.framing import FrameReader, encode
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.p2pd.daemon import unpack_multiaddr
from swarmnet_protocols.net.p2pd.pipe import Pipe
from swarmnet_protocols.net.rate_limit import PIECE_BYTES, LinkLimiter
from swarmnet_protocols.net.refusal import ENDED, LINGER_S, SIZES, encode_refusal
from swarmnet_protocols.net.resources import Scope

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
        pace: LinkLimiter,
    ) -> None:
        self.packed_address = b""
        self._up = pace.up
        self._on_close = on_close
        self._peer = peer
        self._protocol = protocol
        self._pipe = pipe
        self._meter = meter
        meter.drop = self.drop
        pipe.heard = 0.0  # p2pd spoke first, whatever becomes of the other side
        # ``send`` then returns when the kernel has all of a message, and the caller may reuse its buffers.
        pipe.writer.transport.set_write_buffer_limits(high=0)
        self._sending = asyncio.Lock()
        self._sent_bytes = 0
        self.arrives_by = 0.0
        """When all that was sent is on the other side, over the slowest line that is worth waiting for."""
        self._is_halfway = False
        """Part of a message has been sent, and what follows would be taken for the rest."""
        self._closed = False
        self._owed = bytearray()
        """What is to be granted, and has to wait for the end of a message."""
        self._allowance = SendWindow() if protocol.has_flow_control and meter.is_ours else None
        self._grants = (
            ReceiveWindow(pace.down, self._tell) if protocol.has_flow_control and not meter.is_ours else None
        )
        reader = LimitedReader(pipe.reader, pace.down, self._grants)
        self._frames = FrameReader(reader, protocol, meter, allowance=self._allowance, grants=self._grants)

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
        try:
            async with self._sending:
                await self._send(message)
        except OSError as error:
            raise StreamEnded(f"the stream broke: {error}") from error
        finally:
            self._tell_owed()

    async def _send(self, message: Message) -> None:
        max_uncredited_bytes = math.inf if self._allowance is None else self._allowance.max_uncredited_bytes
        head, payload = encode(message, self._protocol, max_uncredited_bytes=max_uncredited_bytes)
        await self._meter.send(len(head) + len(payload))
        self._check_open()
        if self._pipe.writer.is_closing() or self._pipe.reader.at_eof() or self._frames.is_over:
            raise StreamEnded("the stream ended")
        if len(payload) > max_uncredited_bytes or (
            self._up.is_limited and len(head) + len(payload) > PIECE_BYTES
        ):
            await self._write_in_pieces(head, memoryview(payload), waits=len(payload) > max_uncredited_bytes)
            return
        await self._turn(len(head) + len(payload), of_bytes=len(head) + len(payload))
        self._pipe.writer.write(head)
        if payload:
            self._pipe.writer.write(payload)
        await self._pipe.writer.drain()

    async def _write_in_pieces(self, head: bytes, payload: memoryview, *, waits: bool) -> None:
        allowance = self._allowance if waits else None
        if allowance is not None:
            allowance.start(len(payload))
        piece: Buffer = head
        sent_bytes = 0
        try:
            while piece:
                await self._turn(len(piece), of_bytes=len(head) + len(payload))
                self._is_halfway = True
                self._pipe.writer.write(piece)
                await self._pipe.writer.drain()
                next_bytes = min(PIECE_BYTES, len(payload) - sent_bytes)
                if allowance is not None and next_bytes:
                    next_bytes = await allowance.acquire(next_bytes)
                piece = payload[sent_bytes : sent_bytes + next_bytes]
                sent_bytes += next_bytes
        except BaseException:
            self.close()
            raise
        self._is_halfway = False

    async def _turn(self, size_bytes: int, *, of_bytes: int) -> None:
        await self._up.acquire(size_bytes, message_bytes=of_bytes)
        self._check_open()
        self._sent_bytes += size_bytes
        begins = max(self.arrives_by, asyncio.get_running_loop().time())
        self.arrives_by = begins + self._meter.piece_s * size_bytes / (1 << 20)

    def _tell(self, word: int, size_bytes: int) -> None:
        """Say so between two messages."""
        self._owed += SIZES.pack(word, size_bytes)
        if not self._sending.locked():
            self._tell_owed()

    def _tell_owed(self) -> None:
        if self._owed and not self._closed and not self._pipe.writer.is_closing():
            self._up.count(len(self._owed))
            self._pipe.writer.write(self._owed)
            self._owed = bytearray()

    @property
    def heard(self) -> float:
        """When anything last came, on the clock of the loop; 0 if nothing has."""
        return self._pipe.heard

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
        for half in (self._allowance, self._grants):
            if half is not None:
                half.close()
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
