"""A simulated network in one process, for tests: links with delay and bandwidth between peers that
crash, hang and are cut off.

All times come from the running loop. In virtual time a network costs nothing, and one seed gives
one trace of deliveries.

- :class:`MemoryNetwork` carries messages over links and injects faults.
- :class:`MemoryTransport` is one peer on it, and :class:`MemoryStream` one end of a stream. They
  apply the same limits as the transport over libp2p, with the same code: resources, subnets, rates
  and flow control.
"""

import asyncio
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from swarmnet_protocols.errors import (
    IncompatibleVersion,
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
)
from swarmnet_protocols.net import Handler, Message, PeerId, ProtocolSpec, ReachKind
from swarmnet_protocols.net.framing import SIZES, check_sizes, encode
from swarmnet_protocols.net.limits.flow_control import ReceiveWindow, SendWindow
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.limits.resources import ResourceLimitReached, ResourceManager, Scope
from swarmnet_protocols.net.limits.stream_scope import StreamScope, supervise
from swarmnet_protocols.net.limits.subnets import SubnetLimits
from swarmnet_protocols.net.refusal import OUT_OF_RESOURCES, Refusal, Refused
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire.report_pb2 import Reach

STREAM_BUFFER_BYTES = 1 << 20
"""A send waits while at least this many bytes of the stream were sent and not received."""


@dataclass(frozen=True)
class LinkProfile:
    """One direction of a path between two peers. Messages on it are never lost or reordered."""

    delay_s: float = 0.01
    jitter_s: float = 0.0
    """Largest random addition to the delay, uniformly distributed."""
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Delivery:
    """A message at the time of its delivery."""

    time_s: float
    source: PeerId
    target: PeerId
    protocol: ProtocolSpec
    message: Message


class _Link:
    """One direction between two peers."""

    def __init__(self, profile: LinkProfile, rng: random.Random) -> None:
        self.profile = profile
        self.in_flight: deque[Callable[[], None]] = deque()
        """Messages that were sent and not delivered, in the order of sending: timers of equal
        deadlines may fire in any order."""
        self.due = 0
        """Number of messages in flight that are due, and wait only for the path to open again."""
        self._rng = rng
        self._free_at = 0.0
        self._last_arrival = 0.0

    def arrival(self, now: float, size_bytes: int) -> float:
        """The time at which something sent at ``now`` arrives."""
        self._free_at = max(now, self._free_at) + size_bytes / self.profile.bytes_per_s
        delay_s = self.profile.delay_s + self._rng.uniform(0.0, self.profile.jitter_s)
        self._last_arrival = max(self._last_arrival, self._free_at + delay_s)
        return self._last_arrival


class MemoryNetwork:
    """The peers, the links between them, and their faults."""

    def __init__(self, rng: random.Random, default: LinkProfile = LinkProfile()) -> None:
        self.observers: list[Callable[[Delivery], None]] = []
        """Called with each message before it is delivered: the place to inject a fault."""
        self.refusal_observers: list[Callable[[MemoryStream, Refusal], None]] = []
        """Called with each refusal, and the side of the stream that is refused, before it is
        delivered."""
        self._seed = rng.getrandbits(64)
        self._default = default
        self._links: dict[tuple[PeerId, PeerId], _Link] = {}
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._cut: set[tuple[PeerId, PeerId]] = set()
        self._hung: set[PeerId] = set()
        self._isolated: set[PeerId] = set()
        self._addresses: dict[PeerId, str] = {}
        self._trace = hashlib.sha256()

    def transport(self, peer: PeerId) -> "MemoryTransport":
        """The transport of ``peer``, which is on the network while its context is open. A crashed
        peer may get another one."""
        return MemoryTransport(self, peer)

    def set_link(self, a: PeerId, b: PeerId, profile: LinkProfile) -> None:
        """Use ``profile`` in both directions between two peers."""
        self._link(a, b).profile = profile
        self._link(b, a).profile = profile

    def move(self, peer: PeerId, address: str) -> None:
        """Set the multiaddr from which ``peer`` opens its streams."""
        self._addresses[peer] = address

    def address_of(self, peer: PeerId) -> str:
        """The multiaddr set by ``move``; empty without one."""
        return self._addresses.get(peer, "")

    def crash(self, peer: PeerId) -> None:
        """End the process of ``peer``: the other ends of its streams see the end, and it cannot be
        dialled."""
        self.resume(peer)
        if transport := self._transports.get(peer):
            transport.end("the peer crashed")

    def hang(self, peer: PeerId) -> None:
        """Stop ``peer`` (SIGSTOP): nothing is delivered to or from it, and its streams stay
        open."""
        self._hung.add(peer)

    def resume(self, peer: PeerId) -> None:
        """Undo ``hang``: deliver what was held back."""
        self._hung.discard(peer)
        self._release()

    def reset(self, a: PeerId, b: PeerId, protocol: ProtocolSpec) -> None:
        """End the streams under ``protocol`` between two peers, as a connection reset does."""
        for peer, other in ((a, b), (b, a)):
            if transport := self._transports.get(peer):
                transport.reset(other, protocol)

    def improve(self, a: PeerId, b: PeerId, protocol: ProtocolSpec) -> None:
        """Streams that ``a`` opens to ``b`` now would take a better path than those under
        ``protocol`` that are open."""
        for stream in list(self._transports[a].open_streams):
            if stream.peer == b and stream.protocol.id == protocol.id:
                stream.improved.set()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Drop the path between two peers without notice to either."""
        self._cut |= {(a, b), (b, a)}

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo ``cut``: deliver what was held back."""
        self._cut -= {(a, b), (b, a)}
        self._release()

    def isolate(self, peer: PeerId) -> None:
        """Drop all paths of ``peer``."""
        self._isolated.add(peer)

    def rejoin(self, peer: PeerId) -> None:
        """Undo ``isolate``: deliver what was held back."""
        self._isolated.discard(peer)
        self._release()

    @property
    def size(self) -> int:
        """Number of peers that run."""
        return len(self._transports)

    def is_online(self, peer: PeerId) -> bool:
        """Whether ``peer`` runs and is neither stopped nor isolated."""
        return peer in self._transports and peer not in self._hung and peer not in self._isolated

    def passes(self, a: PeerId, b: PeerId) -> bool:
        """Whether both run and messages pass between them."""
        return {a, b} <= self._transports.keys() and not self._blocked((a, b)) and not self._blocked((b, a))

    def trace_hash(self) -> str:
        """A digest of all deliveries and their times."""
        return self._trace.hexdigest()

    def attach(self, transport: "MemoryTransport") -> None:
        """Add a peer. Raises ``SwarmnetError`` if one with the same id is there."""
        if transport.peer_id in self._transports:
            raise SwarmnetError(f"{transport.peer_id} is already on the network")
        self._transports[transport.peer_id] = transport

    def detach(self, transport: "MemoryTransport") -> None:
        """Remove a peer. Idempotent."""
        if self._transports.get(transport.peer_id) is transport:
            del self._transports[transport.peer_id]

    def find(self, peer: PeerId) -> "MemoryTransport | None":
        return self._transports.get(peer)

    def carry(self, source: PeerId, target: PeerId, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Send ``size_bytes`` from ``source`` to ``target``; ``arrive`` is called when they are
        delivered."""
        loop = asyncio.get_running_loop()
        link = self._link(source, target)
        link.in_flight.append(arrive)
        loop.call_at(link.arrival(loop.time(), size_bytes), self._fall_due, (source, target))

    def record(self, source: PeerId, target: PeerId, protocol: ProtocolSpec, message: Message) -> None:
        """Add a delivery to the trace and call the observers."""
        delivery = Delivery(asyncio.get_running_loop().time(), source, target, protocol, message)
        digest = hashlib.sha256(message.header)
        digest.update(message.payload)
        self._trace.update(
            f"{delivery.time_s!r} {source} {target} {protocol.id} "
            f"{len(message.header)} {len(message.payload)} {digest.hexdigest()}\n".encode()
        )
        for observer in self.observers:
            observer(delivery)

    def _link(self, source: PeerId, target: PeerId) -> _Link:
        if (source, target) not in self._links:
            # A generator for each link, so that another peer does not change the jitter of existing
            # links.
            rng = random.Random(f"{self._seed}/{source}/{target}")
            self._links[source, target] = _Link(self._default, rng)
        return self._links[source, target]

    def _fall_due(self, path: tuple[PeerId, PeerId]) -> None:
        link = self._links[path]
        link.due += 1
        self._deliver_due(path, link)

    def _deliver_due(self, path: tuple[PeerId, PeerId], link: _Link) -> None:
        while link.due and not self._blocked(path):
            link.due -= 1
            link.in_flight.popleft()()

    def _blocked(self, path: tuple[PeerId, PeerId]) -> bool:
        return path in self._cut or any(peer in self._hung or peer in self._isolated for peer in path)

    def _release(self) -> None:
        for path, link in list(self._links.items()):
            self._deliver_due(path, link)


class MemoryTransport:
    """One peer on a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId) -> None:
        self.network = network
        self.resources = ResourceManager()
        self.link = LinkLimiter()
        """Only the incoming direction is limited."""
        self._timing = Timing()
        self._subnet_limits = SubnetLimits(self.resources, self._timing)
        self._peer_id = peer_id
        self._handlers: dict[str, tuple[ProtocolSpec, Handler]] = {}
        # A dict keeps the order of opening, in which streams are closed.
        self._streams: dict[MemoryStream, None] = {}
        self._connected: dict[PeerId, MemoryTransport] = {}
        """Peers with which there was a stream: as in libp2p, a connection outlasts its streams
        until either side leaves."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._open = False
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.network.attach(self)
        self._open = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        tasks = list(self._tasks)
        self.end("the peer left")
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def addresses(self) -> Sequence[str]:
        return (f"/memory/0/p2p/{self._peer_id}",)

    async def is_connected(self, peer: PeerId) -> bool:
        return peer in self._connected and self.network.find(peer) is self._connected[peer]

    def reach(self) -> Reach:
        return Reach(kind=ReachKind.OPEN)

    async def died(self) -> None:
        await self._left.wait()

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        self._handlers[protocol.id] = (protocol, handler)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> "MemoryStream":
        if not self._open:
            raise PeerUnreachable("this peer is not on the network")
        if peer == self._peer_id:  # as libp2p does
            raise PeerUnreachable("a peer does not dial itself")
        stream = MemoryStream(self, peer, protocol, StreamScope.outbound(self.resources, peer, self._timing))
        self._streams[stream] = None
        answer: asyncio.Future[SwarmnetError | None] = asyncio.get_running_loop().create_future()
        self.network.carry(self._peer_id, peer, 0, lambda: self._request_arrives(stream, protocol, answer))
        try:
            async with asyncio.timeout(deadline_s):
                refusal = await answer
            if refusal is not None:
                raise refusal
            if (target := self.network.find(peer)) is not None:
                self._connected[peer] = target
        except BaseException as error:
            stream.close()
            if isinstance(error, TimeoutError):
                raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s") from error
            raise
        return stream

    def forget(self, stream: "MemoryStream") -> None:
        """Remove a closed stream."""
        self._streams.pop(stream, None)

    @property
    def open_streams(self) -> "Iterable[MemoryStream]":
        return tuple(self._streams)

    def reset(self, peer: PeerId, protocol: ProtocolSpec) -> None:
        """End the streams with ``peer`` under ``protocol``."""
        for stream in list(self._streams):
            if stream.peer == peer and stream.protocol.id == protocol.id:
                stream.end("the connection was reset")

    def end(self, reason: str) -> None:
        """Leave the network, close every stream and cancel the handlers. Idempotent."""
        self._open = False
        self._left.set()
        self.network.detach(self)
        for stream in list(self._streams):
            stream.end(reason)
        for task in list(self._tasks):
            task.cancel()

    def _request_arrives(
        self, client: "MemoryStream", protocol: ProtocolSpec, answer: "asyncio.Future[SwarmnetError | None]"
    ) -> None:
        if client.closed:
            return
        target = self.network.find(client.peer)
        if target is None:
            refusal: SwarmnetError | None = PeerUnreachable(f"{client.peer} is not on the network")
        else:
            refusal = target._accept(client, self._peer_id, protocol)

        def answer_arrives() -> None:
            if not answer.done():
                answer.set_result(refusal)

        self.network.carry(client.peer, self._peer_id, 0, answer_arrives)

    def _accept(self, client: "MemoryStream", peer: PeerId, protocol: ProtocolSpec) -> SwarmnetError | None:
        if protocol.id not in self._handlers:
            return IncompatibleVersion(f"{self._peer_id} does not speak {protocol.id}")
        served, handler = self._handlers[protocol.id]
        try:
            scope = self._subnet_limits.accept(peer, self.network.address_of(peer))
        except ResourceLimitReached as error:
            client.on_refused(Refusal.out_of_resources(error, OUT_OF_RESOURCES))
            return None
        stream = MemoryStream(self, peer, served, scope)
        stream.connect(client)
        self._streams[stream] = None
        if (opener := self.network.find(peer)) is not None:
            self._connected[peer] = opener
        task = asyncio.get_running_loop().create_task(supervise(handler, stream, served))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return None


@dataclass(eq=False)
class _Incoming:
    """A message of which at least the header has arrived."""

    message: Message
    size_bytes: int
    needs_credit: bool
    """The payload arrives in pieces, as credit is granted."""
    unread_bytes: int = 0
    """Bytes of the payload that have arrived and not been read, if it needs credit."""
    is_started: bool = False
    """Whether the receive window has been told of it."""


class MemoryStream:
    """One end of a stream on a :class:`MemoryNetwork`."""

    def __init__(
        self, transport: MemoryTransport, peer: PeerId, protocol: ProtocolSpec, scope: StreamScope
    ) -> None:
        self.remote: MemoryStream | None = None
        """The other end, once the stream is open."""
        self.improved = asyncio.Event()
        """Set by ``MemoryNetwork.improve`` when there is a better path."""
        self._transport = transport
        self._network = transport.network
        self._peer = peer
        self._protocol = protocol
        self._scope = scope
        scope.evict = self.close
        self._inbox: deque[_Incoming | tuple[int, int]] = deque()
        """Messages, and control frames of flow control."""
        self._unreceived_bytes = 0
        """Bytes sent by this end and not received by the other."""
        self._send_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._end_reason = ""
        self._refusal: Refusal | None = None
        self._send_window = SendWindow() if protocol.has_flow_control and scope.is_outbound else None
        self._receive_window: ReceiveWindow | None = None

    def connect(self, remote: "MemoryStream") -> None:
        """Connect this end to ``remote``, which opened the stream."""
        self.remote, remote.remote = remote, self
        if self._protocol.has_flow_control:
            self._receive_window = ReceiveWindow(self._transport.link.down, self._send_control)

    @property
    def peer(self) -> PeerId:
        return self._peer

    async def path_improved(self) -> None:
        await self.improved.wait()

    @property
    def address(self) -> str:
        return self._network.address_of(self._peer)

    @property
    def scope(self) -> Scope:
        return self._scope.peer_scope

    @property
    def protocol(self) -> ProtocolSpec:
        return self._protocol

    @property
    def closed(self) -> bool:
        return self._closed

    async def send(self, message: Message) -> None:
        async with self._send_lock:
            window = self._send_window
            max_uncredited_bytes = math.inf if window is None else window.max_uncredited_bytes
            head, payload = encode(message, self._protocol, max_uncredited_bytes=max_uncredited_bytes)
            # A copy: the caller may reuse its buffers as soon as this returns.
            message = Message(message.header, bytes(payload))
            size_bytes = len(head) + len(payload)
            await self._scope.wait_send(size_bytes)
            while self._unreceived_bytes >= STREAM_BUFFER_BYTES and not self._closed and not self._end_reason:
                await self._wait_changed()
            if self._closed or self._end_reason or self.remote is None:
                raise self._end_error()
            self._unreceived_bytes += size_bytes
            incoming = _Incoming(message, size_bytes, needs_credit=len(payload) > max_uncredited_bytes)
            if window is not None and incoming.needs_credit:
                await self._send_credited(self.remote, incoming, window)
            else:
                self._carry(size_bytes, partial(self.remote._deliver, incoming))

    async def _send_credited(self, remote: "MemoryStream", incoming: _Incoming, window: SendWindow) -> None:
        left_bytes = len(incoming.message.payload)
        window.start(left_bytes)
        self._carry(incoming.size_bytes - left_bytes, partial(remote._deliver, incoming))
        try:
            while left_bytes:
                piece_bytes = await window.acquire(left_bytes)
                left_bytes -= piece_bytes
                self._carry(
                    piece_bytes, partial(remote._deliver_piece, incoming, piece_bytes, is_last=not left_bytes)
                )
        except BaseException:  # part of a message has been sent
            self.close()
            raise

    async def receive(self) -> Message:
        return await self._scope.receive(self._read)

    async def _read(self) -> Message:
        incoming = await self._next_message()
        message, size_bytes = incoming.message, incoming.size_bytes
        check_sizes(len(message.header), len(message.payload), self._protocol)
        header_bytes, payload_bytes = size_bytes - len(message.payload), len(message.payload)
        window = self._receive_window
        if window is not None and not incoming.is_started:
            window.start(
                header_bytes,
                payload_bytes,
                needs_credit=incoming.needs_credit,
                received_bytes=header_bytes,
            )
            incoming.is_started = True
        await self._scope.reserve(size_bytes)
        if window is not None and incoming.needs_credit:
            await self._read_credited(incoming, window)
        else:
            await self._transport.link.down.acquire(size_bytes, message_bytes=size_bytes)
        self._inbox.popleft()
        if self.remote is not None:
            self.remote._on_received(size_bytes)
        return message

    async def _next_message(self) -> _Incoming:
        """The first message in the inbox. Control frames before it are handled."""
        while True:
            while not self._inbox or self._closed:
                if self._closed or self._end_reason:
                    raise self._end_error()
                await self._wait_changed()
            first = self._inbox[0]
            if isinstance(first, _Incoming):
                return first
            if self._send_window is None:
                raise ProtocolViolation("flow control on a stream without it")
            self._send_window.on_control(*first)
            self._inbox.popleft()

    async def _read_credited(self, incoming: _Incoming, window: ReceiveWindow) -> None:
        while window.is_open:
            if self._closed or self._end_reason:
                raise self._end_error()
            if incoming.unread_bytes:
                read_bytes, incoming.unread_bytes = incoming.unread_bytes, 0
                window.received(read_bytes)
            elif not await window.grant() and not incoming.unread_bytes:
                await self._wait_changed()

    def close(self) -> None:
        self.end("the other side closed the stream")

    def refuse(self, refusal: Refusal) -> None:
        if self.remote is not None and not self._closed:
            remote = self.remote
            self._carry(0, lambda: remote.on_refused(refusal))
        self.close()

    def on_refused(self, refusal: Refusal) -> None:
        """The other side has refused the stream."""
        for observer in self._network.refusal_observers:
            observer(self, refusal)
        self._refusal = refusal
        self._on_end("the other side refused the stream")

    def end(self, reason: str) -> None:
        """Close this end. The other one receives the end and its reason after everything that was
        sent. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._scope.close()
        self._transport.forget(self)
        self._changed.set()
        for window in (self._send_window, self._receive_window):
            if window is not None:
                window.close()
        if remote := self.remote:
            self._carry(0, lambda: remote._on_end(reason))

    def _end_error(self) -> StreamEnded:
        if self._refusal is not None and not self._closed:
            return Refused(self._peer, self._refusal.to_wire())
        return StreamEnded(self._end_reason or "the stream was closed")

    async def _wait_changed(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _carry(self, size_bytes: int, arrive: Callable[[], None]) -> None:
        self._network.carry(self._transport.peer_id, self._peer, size_bytes, arrive)

    def _send_control(self, kind: int, size_bytes: int) -> None:
        if self.remote is not None:
            self._carry(SIZES.size, partial(self.remote._deliver, (kind, size_bytes)))

    def _deliver(self, first: _Incoming | tuple[int, int]) -> None:
        """Deliver a control frame, or a message; of a message that needs credit, its header."""
        if self._closed:
            return
        if isinstance(first, _Incoming) and not first.needs_credit:
            self._network.record(self._peer, self._transport.peer_id, self._protocol, first.message)
        self._inbox.append(first)
        self._changed.set()

    def _deliver_piece(self, incoming: _Incoming, size_bytes: int, *, is_last: bool) -> None:
        """Deliver more of a payload."""
        if self._closed:
            return
        if is_last:
            self._network.record(self._peer, self._transport.peer_id, self._protocol, incoming.message)
        incoming.unread_bytes += size_bytes
        self._changed.set()

    def _on_received(self, size_bytes: int) -> None:
        """The other side has received this much."""
        self._unreceived_bytes -= size_bytes
        self._changed.set()

    def _on_end(self, reason: str) -> None:
        self._end_reason = reason
        self._changed.set()
        if self._send_window is not None:
            self._send_window.close()
