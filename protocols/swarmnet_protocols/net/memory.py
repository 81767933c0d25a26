"""The Internet in one process: simulated links between peers, for tests and the simulator.

All times come from the running loop, so that in virtual time a network has no cost and one seed gives one trace.
"""

import asyncio
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from swarmnet_protocols.errors import IncompatibleVersion, PeerUnreachable, SwarmnetError
from swarmnet_protocols.net import Handler, Message, PeerId, ProtocolSpec
from swarmnet_protocols.net.handlers import supervise
from swarmnet_protocols.net.memory_stream import MemoryStream
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.rate_limit import LinkLimiter
from swarmnet_protocols.net.refusal import no_room
from swarmnet_protocols.net.resources import ResourceLimitReached, ResourceManager
from swarmnet_protocols.net.subnets import SubnetLimits
from swarmnet_protocols.timing import Timing


@dataclass(frozen=True)
class LinkProfile:
    """One direction of a path between two peers. Messages on it are never lost or reordered."""

    delay_s: float = 0.01
    jitter_s: float = 0.0
    """Up to this much is added to the delay, uniformly."""
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Delivery:
    """A message as it arrives."""

    time_s: float
    source: PeerId
    target: PeerId
    protocol: ProtocolSpec
    message: Message


class _Link:
    """What is on its way from one peer to another."""

    def __init__(self, profile: LinkProfile, rng: random.Random) -> None:
        self.profile = profile
        self.waiting: deque[Callable[[], None]] = deque()
        """What has not arrived, in order: timers of equal deadlines may fire in any."""
        self.due = 0
        """How many of them would have arrived, were the path open."""
        self._rng = rng
        self._free_at = 0.0
        self._last_arrival = 0.0

    def arrival(self, now: float, size_bytes: int) -> float:
        """When something handed to the link at ``now`` comes out of it."""
        self._free_at = max(now, self._free_at) + size_bytes / self.profile.bytes_per_s
        delay_s = self.profile.delay_s + self._rng.uniform(0.0, self.profile.jitter_s)
        self._last_arrival = max(self._last_arrival, self._free_at + delay_s)
        return self._last_arrival


class MemoryNetwork:
    """Every peer, the links between them, and what may happen to both."""

    def __init__(self, rng: random.Random, default: LinkProfile = LinkProfile()) -> None:
        self.observers: list[Callable[[Delivery], None]] = []
        """Called with each message before its receiver sees it: the place to inject a fault."""
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
        """The transport of ``peer``, which is on the network while the context is open. A crashed peer may come back."""
        return MemoryTransport(self, peer)

    def set_link(self, a: PeerId, b: PeerId, profile: LinkProfile) -> None:
        """Use ``profile`` in both directions between two peers from now on."""
        self._link(a, b).profile = profile
        self._link(b, a).profile = profile

    def move(self, peer: PeerId, address: str) -> None:
        """``peer`` opens its streams from this multiaddr from now on."""
        self._addresses[peer] = address

    def address_of(self, peer: PeerId) -> str:
        """Where ``move`` has put a peer; empty if it has not."""
        return self._addresses.get(peer, "")

    def crash(self, peer: PeerId) -> None:
        """The process of ``peer`` is gone: the other ends of its streams see the end, nobody can dial it."""
        self.resume(peer)
        if transport := self._transports.get(peer):
            transport.end("the peer crashed")

    def hang(self, peer: PeerId) -> None:
        """``peer`` is stopped: nothing is delivered to or from it, its streams stay open."""
        self._hung.add(peer)

    def resume(self, peer: PeerId) -> None:
        """Undo ``hang``: what was held back arrives now."""
        self._hung.discard(peer)
        self._release()

    def reset(self, a: PeerId, b: PeerId, protocol: ProtocolSpec) -> None:
        """End the streams under ``protocol`` between two peers, as when a connection is reset; both may make new ones."""
        for peer, other in ((a, b), (b, a)):
            if transport := self._transports.get(peer):
                transport.reset(other, protocol)

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Nothing passes between two peers, and neither is told."""
        self._cut |= {(a, b), (b, a)}

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo ``cut``: what was held back arrives now."""
        self._cut -= {(a, b), (b, a)}
        self._release()

    def isolate(self, peer: PeerId) -> None:
        """Cut ``peer`` off from everybody."""
        self._isolated.add(peer)

    def rejoin(self, peer: PeerId) -> None:
        """Undo ``isolate``: what was held back arrives now."""
        self._isolated.discard(peer)
        self._release()

    def is_online(self, peer: PeerId) -> bool:
        """Whether ``peer`` runs and is neither hung nor isolated."""
        return peer in self._transports and peer not in self._hung and peer not in self._isolated

    def passes(self, a: PeerId, b: PeerId) -> bool:
        """Whether both run and messages pass between them."""
        return {a, b} <= self._transports.keys() and not self._blocked((a, b)) and not self._blocked((b, a))

    def trace_hash(self) -> str:
        """A digest of every delivery so far, with its time."""
        return self._trace.hexdigest()

    def attach(self, transport: "MemoryTransport") -> None:
        """Put a peer on the network. Raises ``SwarmnetError`` for a second one with the same id."""
        if transport.peer_id in self._transports:
            raise SwarmnetError(f"{transport.peer_id} is already on the network")
        self._transports[transport.peer_id] = transport

    def detach(self, transport: "MemoryTransport") -> None:
        """Take a peer off the network; idempotent."""
        if self._transports.get(transport.peer_id) is transport:
            del self._transports[transport.peer_id]

    def find(self, peer: PeerId) -> "MemoryTransport | None":
        return self._transports.get(peer)

    def carry(self, source: PeerId, target: PeerId, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Call ``arrive`` when ``size_bytes`` sent now from ``source`` reach ``target``."""
        loop = asyncio.get_running_loop()
        link = self._link(source, target)
        link.waiting.append(arrive)
        loop.call_at(link.arrival(loop.time(), size_bytes), self._fall_due, (source, target))

    def record(self, source: PeerId, target: PeerId, protocol: ProtocolSpec, message: Message) -> None:
        """Add what arrives now to the trace and show it to the observers."""
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
            # A generator of its own, so that a peer more does not change what happens on other links.
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
            link.waiting.popleft()()

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
        self.pace = LinkLimiter()
        """What it sends is not held back, what comes is."""
        self._timing = Timing()
        self._crowds = SubnetLimits(self.resources, self._timing)
        self._peer_id = peer_id
        self._handlers: dict[str, tuple[ProtocolSpec, Handler]] = {}
        # A dict, not a set: closing follows the order of opening.
        self._streams: dict[MemoryStream, None] = {}
        self._connected: dict[PeerId, MemoryTransport] = {}
        """With whom there was a stream: as in libp2p, a connection outlasts its streams, until either side leaves."""
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

    async def died(self) -> None:
        await self._left.wait()

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        self._handlers[protocol.id] = (protocol, handler)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> MemoryStream:
        if not self._open:
            raise PeerUnreachable("this peer is not on the network")
        stream = MemoryStream(self, peer, protocol, Meter.of_ours(self.resources, peer, self._timing))
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

    def forget(self, stream: MemoryStream) -> None:
        """The stream has been closed."""
        self._streams.pop(stream, None)

    def reset(self, peer: PeerId, protocol: ProtocolSpec) -> None:
        """End the streams with ``peer`` under ``protocol``."""
        for stream in list(self._streams):
            if stream.peer == peer and stream.protocol.id == protocol.id:
                stream.end("the connection was reset")

    def end(self, reason: str) -> None:
        """Leave the network and close every stream; handlers are cancelled. Idempotent."""
        self._open = False
        self._left.set()
        self.network.detach(self)
        for stream in list(self._streams):
            stream.end(reason)
        for task in list(self._tasks):
            task.cancel()

    def _request_arrives(
        self, client: MemoryStream, protocol: ProtocolSpec, answer: "asyncio.Future[SwarmnetError | None]"
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

    def _accept(self, client: MemoryStream, peer: PeerId, protocol: ProtocolSpec) -> SwarmnetError | None:
        if protocol.id not in self._handlers:
            return IncompatibleVersion(f"{self._peer_id} does not speak {protocol.id}")
        served, handler = self._handlers[protocol.id]
        try:
            meter = self._crowds.admit(peer, self.network.address_of(peer))
        except ResourceLimitReached as error:
            client.refused(no_room(error))
            return None
        stream = MemoryStream(self, peer, served, meter)
        stream.connect(client)
        self._streams[stream] = None
        if (opener := self.network.find(peer)) is not None:
            self._connected[peer] = opener
        task = asyncio.get_running_loop().create_task(supervise(handler, stream, served))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return None
