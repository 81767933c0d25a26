"""The transport of real nodes: libp2p, through a p2pd child process."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError, PeerUnreachable, StreamEnded, Unreachable
from swarmnet_protocols.identity import Identity
from swarmnet_protocols.transport import Handler, Message, PeerId, ProtocolSpec
from swarmnet_protocols.transport.framing import FrameReader, encode
from swarmnet_protocols.transport.handling import supervise
from swarmnet_protocols.transport.p2pd_daemon import (
    READER_BYTES,
    DaemonConfig,
    P2pd,
    prepare_hivemind,
    run_p2pd,
)

if TYPE_CHECKING:
    from hivemind.p2p import P2P

_log = logging.getLogger(__name__)

_BOOTSTRAP_S = 5.0
_FLUSH_S = 2.0
_ADDRESSES_EVERY_S = 30.0


@dataclass(frozen=True)
class P2pdConfig:
    identity_path: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    """Published instead of the addresses found by p2pd."""
    bootstrap: tuple[str, ...] = ()
    """Peers to connect to at the start; they also relay for us if nobody can dial us."""
    require_bootstrap: bool = False
    """Fail with ``Unreachable`` when none of them answers."""


def peer_of(address: str) -> PeerId:
    """The peer id at the end of a multiaddr. Raises ``ConfigError`` if there is none."""
    _, _, peer = address.rpartition("/p2p/")
    if not peer or "/" in peer:
        raise ConfigError(
            f"{address!r} does not end in /p2p/PEER_ID",
            hint="take the address a node prints when it is ready",
        )
    return PeerId(peer)


class P2pdStream:
    """A message stream over one libp2p stream."""

    def __init__(
        self,
        peer: PeerId,
        protocol: ProtocolSpec,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_close: Callable[["P2pdStream"], None],
    ) -> None:
        self._on_close = on_close
        self._peer = peer
        self._protocol = protocol
        self._reader = reader
        self._frames = FrameReader(reader, protocol)
        self._writer = writer
        # ``send`` then returns when the kernel has all of a message, and the caller may reuse its buffers.
        writer.transport.set_write_buffer_limits(high=0)
        self._sending = asyncio.Lock()
        self._closed = False

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def send(self, message: Message) -> None:
        head, payload = encode(message, self._protocol)
        async with self._sending:
            if self._closed:
                raise StreamEnded("the stream was closed")
            if self._writer.is_closing() or self._reader.at_eof():
                raise StreamEnded("the stream ended")
            try:
                self._writer.write(head)
                if payload:
                    self._writer.write(payload)
                await self._writer.drain()
            except OSError as error:
                raise StreamEnded(f"the stream broke: {error}") from error

    async def receive(self) -> Message:
        if self._closed:
            raise StreamEnded("the stream was closed")
        message = await self._frames.read()
        if self._closed:
            raise StreamEnded("the stream was closed")
        return message

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.close()
            self._on_close(self)

    async def flush(self) -> None:
        """Wait until everything sent before ``close`` has left this process."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class P2pdTransport:
    """Made by :meth:`create`."""

    def __init__(self, peer_id: PeerId, daemon: P2pd, p2p: "P2P", socket_path: Path) -> None:
        self.p2p = p2p
        """hivemind's handle on the same p2pd, for the DHT."""
        self._peer_id = peer_id
        self._daemon = daemon
        self._socket_path = socket_path
        self._addresses: tuple[str, ...] = ()
        self._handlers: dict[str, tuple[ProtocolSpec, Handler]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._streams: set[P2pdStream] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def create(cls, config: P2pdConfig) -> AsyncIterator["P2pdTransport"]:
        """A transport that is up while the context is open.

        Raises ``ConfigError`` for a bad identity file or address and for a port in use, ``Unreachable`` when
        ``require_bootstrap`` is set and nobody answers.
        """
        identity = Identity.load_or_create(config.identity_path)
        prepare_hivemind()
        from hivemind.p2p import P2P
        from hivemind.utils.multiaddr import Multiaddr

        daemon_config = DaemonConfig(
            config.identity_path, config.listen, config.announce, relays=config.bootstrap
        )
        async with run_p2pd(daemon_config) as daemon:
            p2p = await P2P.replicate(Multiaddr(f"/unix{daemon.control_path}"))
            socket_path = daemon.control_path.with_name("streams.sock")
            transport = cls(identity.peer_id, daemon, p2p, socket_path)
            server = await asyncio.start_unix_server(transport._accept, socket_path, limit=READER_BYTES)
            try:
                await transport._refresh_addresses()
                transport._own(transport._keep_addresses_fresh(), transport._tasks)
                await transport._bootstrap(config)
                yield transport
            finally:
                server.close()
                await transport._close()
                await p2p.shutdown()
                # hivemind leaves these two to the garbage collector, with an error if p2pd died.
                control = p2p._client.control
                await asyncio.gather(control._read_task, control._write_task, return_exceptions=True)

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def addresses(self) -> Sequence[str]:
        return self._addresses

    async def died(self) -> None:
        """Return once p2pd has ended, whoever ended it."""
        await self._daemon.process.wait()

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        self._handlers[protocol.id] = (protocol, handler)
        await self._daemon.handle_streams(protocol.id, self._socket_path)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> P2pdStream:
        """As promised by ``Transport``; a peer that was connected and died unseen is found out by the first ``receive``."""
        try:
            async with asyncio.timeout(deadline_s):
                if addresses:
                    await self.connect(peer, addresses, deadline_s=deadline_s)
                reader, writer = await self._daemon.open_stream(peer, protocol.id, deadline_s=deadline_s)
        except TimeoutError as error:
            raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s") from error
        return self._stream(peer, protocol, reader, writer)

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to ``peer`` unless it is connected. Raises ``PeerUnreachable`` within about ``deadline_s``."""
        # TCP first: a killed process ends its TCP connections at once, its QUIC connections after 30 s.
        tcp = [address for address in addresses if "/tcp/" in address and "/p2p-circuit" not in address]
        if tcp and len(tcp) < len(addresses):
            with contextlib.suppress(PeerUnreachable, TimeoutError):
                async with asyncio.timeout(deadline_s / 2):
                    await self._daemon.connect(peer, tcp, deadline_s=deadline_s / 2)
                    return
        await self._daemon.connect(peer, addresses, deadline_s=deadline_s)

    async def _bootstrap(self, config: P2pdConfig) -> None:
        async def connect(address: str) -> bool:
            try:
                async with asyncio.timeout(_BOOTSTRAP_S):
                    await self.connect(peer_of(address), [address], deadline_s=_BOOTSTRAP_S)
            except (PeerUnreachable, TimeoutError) as error:
                _log.warning("bootstrap peer %s does not answer: %s", address, error)
                return False
            return True

        answers = await asyncio.gather(*map(connect, config.bootstrap))
        if config.require_bootstrap and not any(answers):
            raise Unreachable(
                "no bootstrap peer answers: " + ", ".join(config.bootstrap),
                hint="check the address and that a node runs there: --bootstrap ADDR",
            )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._own(self._handle(reader, writer), self._tasks)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
        from hivemind.proto import p2pd_pb2 as pb

        info = pb.StreamInfo()
        try:
            await read_pbmsg_safe(reader, info)
        except (OSError, asyncio.IncompleteReadError):  # p2pd gave up before it said who calls
            writer.close()
            return
        except asyncio.CancelledError:
            writer.close()
            raise
        protocol, handler = self._handlers[info.proto]
        stream = self._stream(PeerId(PeerID(info.peer).to_base58()), protocol, reader, writer)
        await supervise(handler, stream, protocol)

    def _stream(
        self, peer: PeerId, protocol: ProtocolSpec, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> P2pdStream:
        stream = P2pdStream(peer, protocol, reader, writer, self._stream_closed)
        self._streams.add(stream)
        return stream

    def _stream_closed(self, stream: P2pdStream) -> None:
        self._streams.discard(stream)
        self._own(stream.flush(), self._flushes)

    def _own(self, coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _refresh_addresses(self) -> None:
        self._addresses = tuple(f"{address}/p2p/{self._peer_id}" for address in await self._daemon.identify())

    async def _keep_addresses_fresh(self) -> None:
        with contextlib.suppress(PeerUnreachable):  # p2pd is gone: there is nothing to keep fresh
            while True:
                await asyncio.sleep(_ADDRESSES_EVERY_S)
                await self._refresh_addresses()

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams):
            stream.close()
        if self._flushes:
            _, late = await asyncio.wait(self._flushes, timeout=_FLUSH_S)
            for task in late:
                task.cancel()
