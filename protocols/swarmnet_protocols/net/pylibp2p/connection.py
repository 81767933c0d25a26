"""One connection of py-libp2p: TCP, noise and yamux, and the limits that py-libp2p lacks.

This module runs on trio. The life of a connection:

1. TCP connects, noise proves the peer id, and yamux carries streams.
2. Each stream is negotiated.
3. Either side ends the connection with all its streams.

Three behaviours of py-libp2p are changed:

- Its yamux drops a stream whose receiver grants no window for 5 s. Here a sender waits as long as
  the connection lives.
- Its yamux accepts more bytes than the window it granted, and a window for each stream of each
  connection. Here the unread bytes of all connections are limited together.
- A cancelled write leaves part of a frame on the wire. Here a frame that has begun is written
  whole, or the connection is closed.
"""

import errno
import socket
from collections.abc import Callable, Container, Iterable

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream

from swarmnet_protocols.errors import ConfigError, IncompatibleVersion, PeerUnreachable
from swarmnet_protocols.machine.platform import reclaim_port, share_port
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.daemon import pack_multiaddr
from swarmnet_protocols.net.p2pd.process import check_free

MULTISTREAM = "/multistream/1.0.0"
MAX_LINE_BYTES = 1024
"""Most bytes of one line of a negotiation, as in multistream-select."""
MAX_OFFERS = 16
"""Protocols that a peer may offer for one stream."""
MAX_BUFFERED_BYTES = 20 << 20
"""Most unread bytes, over all streams of all connections. One stream grants at most 16 MiB."""
MAX_STREAMS = 256
"""Most inbound streams of one connection. go-libp2p accepts as many before they are negotiated."""
WRITE_S = 30.0
"""Seconds that the other side has to take a frame before the connection ends."""
WINDOW_CHECK_S = 0.005
"""Seconds until the first check for send window. py-libp2p does not signal when the window grows.
The period doubles up to ``MAX_WINDOW_CHECK_S``."""
MAX_WINDOW_CHECK_S = 0.08
PIECE_BYTES = 32 << 10
"""Bytes of one yamux frame. It fits into one noise message, unlike py-libp2p's own largest
frames."""
READ_BYTES = 256 << 10
_PORT_IN_USE = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)
STREAM_ERRORS = (
    BaseLibp2pError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)
"""Exceptions of py-libp2p for a stream or connection that has ended."""


class BufferedTcp(ReadWriteCloser):  # type: ignore[misc]
    """A TCP stream that is read in large pieces. noise reads two bytes of length before each
    message.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self.received_at = 0.0
        """Trio time of the last received bytes; 0 before any."""

    async def read(self, n: int | None = None) -> bytes:
        if not self._buffer:
            try:
                self._buffer += await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise ConnectionClosedError(str(error)) from error
            self.received_at = trio.current_time()
        data = bytes(self._buffer[:n])
        del self._buffer[:n]
        return data

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(str(error)) from error

    async def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Close at once: tasks that read or write it get an error."""
        self._stream.socket.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


class BoundedYamux(Yamux):  # type: ignore[misc]
    """Yamux whose buffers are limited, and whose frames are written whole."""

    make_room: Callable[[int], None]
    """Called with the bytes that are about to be buffered."""

    async def _read_data_body(self, length: int) -> bytes:
        self.make_room(length)
        data: bytes = await super()._read_data_body(length)
        return data

    async def _write_frame(self, data: bytes) -> None:
        async with self._write_lock:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + WRITE_S) as scope:
                await self.secured_conn.write(data)
        if scope.cancelled_caught:
            await self.secured_conn.close()
            raise ConnectionClosedError("the other side takes nothing")

    def drop(self, stream: YamuxStream | None = None) -> None:
        """Free the unread bytes of a stream, or of all.

        Reference cycles may keep this object long after the connection.
        """
        if stream is None:
            self.stream_buffers.clear()
        else:
            self.stream_buffers.pop(stream.stream_id, None)

    def buffered_bytes(self) -> int:
        """Return bytes received and not read, over all streams."""
        return sum(map(len, self.stream_buffers.values()))


class Connection:
    """A connection with one authenticated peer."""

    def __init__(self, peer: PeerId, address: str, tcp: BufferedTcp, yamux: BoundedYamux) -> None:
        self.peer = peer
        self.address = address
        """The multiaddr of the other side."""
        self.tcp = tcp
        self.yamux = yamux
        self.inbound_streams = 0

    @property
    def is_open(self) -> bool:
        return not self.yamux.event_shutting_down.is_set()

    async def open(self, protocol_id: str) -> YamuxStream:
        """Open a stream.

        Raises ``IncompatibleVersion`` if the other side does not serve the protocol, and
        ``PeerUnreachable`` if the peer is gone.
        """
        if len(self.yamux.streams) - self.inbound_streams >= MAX_STREAMS:
            raise PeerUnreachable(f"too many streams to {self.peer}")
        try:
            stream: YamuxStream = await self.yamux.open_stream()
            try:
                await select(stream, protocol_id)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await stream.reset()
                raise
        except STREAM_ERRORS as error:
            raise PeerUnreachable(f"the connection to {self.peer} broke: {error}") from error
        return stream

    def abort(self) -> None:
        """End the connection at once, with all its streams."""
        self.tcp.abort()


def listener(address: str) -> socket.socket:
    """Return a socket that listens on ``address``. Raises ``ConfigError`` if it cannot be used."""
    pack_multiaddr(address)
    check_free(address)
    match address.split("/"):
        case ["", ("ip4" | "ip6") as family, host, "tcp", port]:
            pass
        case _:
            raise ConfigError(f"py-libp2p cannot listen on {address}", hint="listen on /ip4/0.0.0.0/tcp/0")
    found = socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6)
    try:
        # with connections that this peer dials: see ``open_tcp``
        reclaim_port(found, is_shared=True)
        if family == "ip6":
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, int(port)))
        found.listen(128)
        found.setblocking(False)
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(
            f"cannot listen on {address}: {error}", hint="choose another port: --listen"
        ) from error
    return found


async def open_tcp(host: str, port: int, listeners: Iterable[socket.socket]) -> trio.SocketStream:
    """Open a TCP connection, if possible from the port of one of ``listeners``.

    A router then has one mapping for both, as a punched hole needs.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for listener in listeners:
        own_host, own_port = listener.getsockname()[:2]
        if listener.family != family or own_host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            continue
        plain = socket.socket(family, socket.SOCK_STREAM)
        plain.setblocking(False)
        end = trio.socket.from_stdlib_socket(plain)
        try:
            share_port(plain)
            await end.bind((own_host, own_port))
            await end.connect((host, port))
        except BaseException as error:
            end.close()
            # Windows shares no port with a listener; elsewhere there is or was such a
            # connection from this port.
            if isinstance(error, PermissionError) or getattr(error, "errno", 0) in _PORT_IN_USE:
                break
            raise
        return trio.SocketStream(end)
    return await trio.open_tcp_stream(host, port)


async def upgrade(
    stream: trio.SocketStream,
    noise: Noise,
    address: str,
    make_room: Callable[[int], None],
    expected: PeerId | None = None,
) -> Connection:
    """Negotiate encryption and streams over a TCP connection, made to ``expected`` or accepted.

    ``make_room`` is as in :class:`BoundedYamux`. Raises any error, and leaves closing to the
    caller.
    """
    stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp = BufferedTcp(stream)
    raw = RawConnection(tcp, expected is not None)
    if expected is None:
        await negotiate(raw, {str(NOISE)})
        secure = await noise.secure_inbound(raw)
    else:
        await select(raw, str(NOISE))
        secure = await noise.secure_outbound(raw, ID.from_base58(expected))
    remote: ID = secure.get_remote_peer()
    peer = PeerId(remote.to_base58())
    if expected is not None and peer != expected:
        raise PeerUnreachable(f"another peer answers at {address}: {peer}")
    if expected is None:
        await negotiate(secure, {YAMUX})
    else:
        await select(secure, YAMUX)
    yamux = BoundedYamux(secure, remote, is_initiator=expected is not None)
    yamux.make_room = make_room
    return Connection(peer, address, tcp, yamux)


async def select(stream: ReadWriteCloser, protocol_id: str) -> None:
    """Have the other side serve ``protocol_id`` on ``stream``. Raises ``IncompatibleVersion`` if it
    does not."""
    await stream.write(_line(MULTISTREAM) + _line(protocol_id))
    if (answer := await _read_line(stream)) != MULTISTREAM:
        raise PeerUnreachable(f"not a libp2p peer: it says {answer[:64]!r}")
    if await _read_line(stream) != protocol_id:
        raise IncompatibleVersion(f"the peer does not serve {protocol_id}")


async def negotiate(stream: ReadWriteCloser, served: Container[str]) -> str:
    """Return the protocol that the other side selects among ``served``.

    Raises ``PeerUnreachable`` if it selects none.
    """
    await stream.write(_line(MULTISTREAM))
    if await _read_line(stream) == MULTISTREAM:
        for _ in range(MAX_OFFERS):
            offer = await _read_line(stream)
            if offer in served:
                await stream.write(_line(offer))
                return offer
            await stream.write(_line("na"))
    raise PeerUnreachable("no protocol was negotiated")


def _line(text: str) -> bytes:
    size = len(text) + 1
    prefix = bytes([size]) if size < 0x80 else bytes([size & 0x7F | 0x80, size >> 7])
    return prefix + text.encode() + b"\n"


async def _read_line(stream: ReadWriteCloser) -> str:
    size = (await _read_exactly(stream, 1))[0]
    if size & 0x80:
        size = size & 0x7F | (await _read_exactly(stream, 1))[0] << 7
    if not 0 < size <= MAX_LINE_BYTES:
        raise PeerUnreachable(f"a line of {size} bytes in a negotiation")
    return (await _read_exactly(stream, size)).decode(errors="replace").removesuffix("\n")


async def _read_exactly(stream: ReadWriteCloser, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        piece = await stream.read(size_bytes - len(data))
        if not piece:
            raise PeerUnreachable("the peer closed the connection")
        data += piece
    return data


async def wait_window(stream: YamuxStream) -> int:
    """Wait for send window. Returns the bytes that may be sent; 0 when the stream has ended.

    A peer that has closed its side reads no more: p2pd closes both directions at once.
    """
    wait_s = WINDOW_CHECK_S
    while not stream.closed and not stream.send_closed:
        if stream.send_window > 0:
            return int(stream.send_window)
        if stream.recv_closed:
            return 0
        await trio.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_WINDOW_CHECK_S)
    return 0
