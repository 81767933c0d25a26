"""The hops of one chain: what the chain must have, its open sessions, the requests that they
answer, and single passes at a host."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Literal

from swarmnet_client.chain.trace import KeepStep
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.routing.spans import overlap
from swarmnet_protocols.session.arrays import ElementType, are_finite, type_of
from swarmnet_protocols.session.link import NextHop
from swarmnet_protocols.session.passes import request_pass
from swarmnet_protocols.session.received_digests import DIGEST_BYTES
from swarmnet_protocols.session.wire_tensors import decode_tensor
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb

if TYPE_CHECKING:
    from swarmnet_protocols.session.adapters import Adapter

_ACTIVATIONS = {"bf16": ElementType.BFLOAT16, "f16": ElementType.FLOAT16}
"""Element types by the activation part of a precision name."""
SessionStream = TypedStream[pb.SessionRequest, pb.SessionReply]


class SessionRole(Enum):
    """The role of a session in its chain."""

    HOP = auto()
    """It sends its outputs to the next hop, or to the client if it is the last hop."""
    SUCCESSOR = auto()
    """A hop that replaces a lost one after the chain has answered. It begins with a replay."""
    STANDBY = auto()
    """The last session of a standby. It sends to no peer until it takes over."""
    SPARE = auto()
    """A standby that its host may refuse or end for other work."""


@dataclass(frozen=True)
class ChainSpec:
    """The requirements of a chain over blocks [0, ``blocks``).

    - ``max_length``: most positions of a sequence, each of ``hidden_size`` numbers.
    - ``dtype``: element type of the client's values.
    - ``wire``: element type on the wire; None for the type of the sending host.
    - ``adapter``: applied by the hosts. Its prefix counts as positions of every sequence.
    - ``log_bytes``: limit of the log of inputs that the client keeps for replays.
    - ``standby``: whether each hop has a standby where other hosts have its blocks. None: only on
      hosts without other work, once a replay would take long.
    - ``trace``: gets each answered step with its times.
    - ``wait_s``: longest wait, in seconds, for overloaded hosts before the first answer.
    - ``is_batch``: hosts compute its steps in the time that steps of other chains leave.
    """

    blocks: int
    hidden_size: int
    max_length: int
    dtype: ElementType
    wire: ElementType | None = None
    log_bytes: int = 1 << 30
    adapter: "Adapter | None" = None
    standby: bool | None = None
    trace: KeepStep | None = None
    wait_s: float = 0.0
    is_batch: bool = False

    @property
    def prefix_positions(self) -> int:
        """Positions that every sequence begins with."""
        return 0 if self.adapter is None else self.adapter.prefix_positions

    def wire_of(self, precision: str) -> ElementType:
        """Return the element type of the outputs of a host that computes in ``precision``.

        The inputs of the first hop use this type too. It is ``wire`` if given, else the type the
        host computes in, so that nothing is lost.
        """
        return self.wire or _ACTIVATIONS.get(precision.partition("/")[2], self.dtype)


@dataclass
class ChainReport:
    """Route, failovers and audits of a chain so far."""

    trips: int = 0
    """Calls of ``Chain.forward``: each costs a trip around the chain."""
    failovers: int = 0
    """Hops that were replaced, hand-overs included."""
    handovers: int = 0
    """Hops that a standby replaced before they left."""
    longest_stall_s: float = 0.0
    route: list[tuple[PeerId, int, int]] = field(default_factory=list)
    """Host and blocks [start, end) of each hop."""
    precisions: list[str] = field(default_factory=list)
    """Precisions of all hops so far: first the most common of the first route, then others as they
    came.
    """
    audits: int = 0
    """Outputs of a hop that another host computed again."""
    wrong: list[PeerId] = field(default_factory=list)
    """Hosts whose outputs two others contradicted. Answers from before their replacement may be
    wrong.
    """

    def set_route(self, hops: Sequence[Hop]) -> None:
        """Note the hops of a route that covers all blocks."""
        self.route = [(hop.peer, hop.start, hop.end) for hop in hops]
        blocks: Counter[str] = Counter()
        for hop in hops:
            blocks[hop.precision] += hop.end - hop.start
        self.precisions += [each for each, _ in blocks.most_common() if each not in self.precisions]


@dataclass(frozen=True)
class HopTranscript:
    """A hop's own account of the first positions of a sequence.

    It has a digest of the inputs that the hop received, and the outputs [P, D] that it sent. The
    last hop shows no outputs: the client received them.
    """

    received: bytes
    sent: Array | None

    @classmethod
    def read(cls, shown: pb.Shown, payload: Buffer) -> "HopTranscript":
        """Read a reply. Raises ``ProtocolViolation`` unless the outputs are a [P, D] tensor."""
        if not shown.HasField("sent"):
            return cls(shown.received, None)
        if len(shown.sent.shape) != 2:
            raise ProtocolViolation("the outputs of a transcript are not [positions, hidden size]")
        positions, hidden_size = shown.sent.shape
        return cls(
            shown.received,
            decode_tensor(shown.sent, payload, positions=positions, hidden_size=hidden_size),
        )

    def checked(self, shape: tuple[int, int] | None, wire: ElementType) -> "HopTranscript":
        """Return this transcript, or raise ``ProtocolViolation`` if it is malformed.

        With ``shape`` [P, D], it must have outputs of that shape, sent as ``wire``.
        """
        if len(self.received) != DIGEST_BYTES:
            raise ProtocolViolation("a transcript without a digest of the inputs")
        if shape is not None:
            sent = self.sent
            if sent is None or sent.shape != shape or type_of(sent) is not wire.decoded:
                raise ProtocolViolation(
                    "a transcript with outputs of another shape or type than was requested"
                )
            if not are_finite(sent):
                raise ProtocolViolation("a transcript with outputs that are not finite")
        return self


@dataclass(eq=False)
class LiveHop:
    """A hop with an open session."""

    hop: Hop
    session: bytes
    stream: SessionStream
    heard_at: float
    """Loop time of its last message."""
    progress_at: float
    """Loop time at which ``applied`` last grew."""
    announced: tuple[int, int] | None = None
    """The blocks [start, end) that its host announced when the session was opened."""
    applied: int = 0
    """The last step that it has computed, from its heartbeats."""
    next: "LiveHop | None" = None
    """The hop that receives its outputs; None for the last hop."""
    epoch: int = 0
    """Epoch of its link to ``next``."""
    alive: bool = True
    leaving: bool = False
    """Its host is about to stop, and asked the client to replace it."""
    leaving_since: float = math.inf
    """Loop time when the host asked to be replaced.

    Infinite if the host only moves to other blocks: then it waits for nothing.
    """
    stands_by: bool = False
    """True if the hop has not been told yet where to send its outputs."""
    promoted_next: bool = False
    """True if ``next`` is a promoted standby, and the hop was not told yet."""
    showing: "asyncio.Future[HopTranscript] | None" = None
    """Set while ``show`` waits for its reply."""

    @property
    def peer(self) -> PeerId:
        return self.hop.peer

    @property
    def needs_link(self) -> bool:
        """True if the hop does not know yet that it is to send to ``next``."""
        return self.stands_by or self.promoted_next

    @property
    def log_fields(self) -> dict[str, object]:
        return self.target(self.epoch).log_fields

    def linked_to(self, successor: "LiveHop | None", epoch: int) -> None:
        """Note where the hop is about to be told to send its outputs."""
        self.next, self.epoch, self.stands_by, self.promoted_next = successor, epoch, False, False

    def end(self, error: SwarmnetError) -> None:
        """Take the hop out of the chain. ``show`` raises ``error``."""
        self.alive = False
        if self.showing is not None and not self.showing.done():
            self.showing.set_exception(error)

    async def receive(self, stream: SessionStream) -> tuple[pb.SessionReply, Buffer]:
        """Return the next message of ``stream``, except heartbeats. Raises as
        ``TypedStream.receive``.
        """
        received = await stream.receive()
        self.heard_at = loop_time()
        return received

    async def show(self, sequence: int, count: int, *, within_s: float) -> HopTranscript:
        """Request the hop's transcript of the first ``count`` positions of a sequence. One request
        at a time.

        Raises what sending raises, ``TimeoutError``, or the error of the hop if it is replaced
        meanwhile.
        """
        self.showing = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                show = pb.Show(sequence=sequence, count=count)
                await self.stream.send(pb.SessionRequest(show=show))
                return await self.showing
        finally:
            self.showing = None

    def complete_show(self, shown: pb.Shown, payload: Buffer) -> None:
        """Complete the request of ``show``; late replies are dropped. Raises ``ProtocolViolation``
        for a malformed reply."""
        if self.showing is not None and not self.showing.done():
            self.showing.set_result(HopTranscript.read(shown, payload))

    def target(self, epoch: int) -> NextHop:
        """Return this hop as the target of the previous hop's link."""
        return NextHop(self.hop.peer, self.hop.addresses, self.session, epoch)

    async def send_heartbeats(self, stream: SessionStream, period_s: float) -> None:
        """Send heartbeats on ``stream`` until it ends."""
        # the task that receives from the hop gets the same error
        with contextlib.suppress(SwarmnetError):
            await stream.send_heartbeats(period_s, lambda: pb.SessionRequest(heartbeat=pb.Heartbeat()))

    async def relink(self, epoch: int, target: NextHop | None, record: bytes, needed: Iterable[int]) -> None:
        """Have the hop send to ``target`` from now on, or with None to the client. ``record`` is
        the announcement of the target's host. A fresh target gets only the ``needed`` sequences."""
        relink = pb.Relink(
            epoch=epoch,
            next=target.to_wire(record) if target else None,
            needed=pb.Sequences(numbers=needed),
        )
        await self._request(pb.SessionRequest(relink=relink))

    async def tee(self, target: NextHop, record: bytes) -> None:
        """Have the hop send to ``target``, a standby of its next hop, too."""
        await self._request(pb.SessionRequest(tee=pb.Tee(epoch=target.epoch, standby=target.to_wire(record))))

    async def _request(self, request: pb.SessionRequest) -> None:
        # the task that receives from the hop gets the same error
        with contextlib.suppress(SwarmnetError):
            await self.stream.send(request)


@dataclass(eq=False)
class ClientLink:
    """The client as a sender: its own link to the first hop. It outlives all hops."""

    next: LiveHop | None = None
    epoch: int = 0
    sending: asyncio.Task[None] | None = None
    peer: None = None
    alive: Literal[True] = True
    leaving: Literal[False] = False

    @property
    def needs_link(self) -> bool:
        """True if the link was not made yet, or is lost."""
        return self.sending is None or self.sending.done()

    def linked_to(self, successor: LiveHop | None, epoch: int) -> None:
        """Note where the client is about to send its steps."""
        self.next, self.epoch = successor, epoch


Sender = LiveHop | ClientLink
"""The sender of steps to a hop: the previous hop, or the client."""


def gaps(hops: Sequence[LiveHop], blocks: int) -> list[tuple[int, int]]:
    """Return the ranges of blocks within [0, ``blocks``) that no hop covers. ``hops`` are in
    order."""
    reached, missing = 0, []
    for live in hops:
        if live.hop.start > reached:
            missing.append((reached, live.hop.start))
        reached = live.hop.end
    if reached < blocks:
        missing.append((reached, blocks))
    return missing


def runs(route: Sequence[Hop], hops: Sequence[LiveHop]) -> list[tuple[list[Hop], LiveHop | None]]:
    """Return the parts of a route that are not open yet, each with the open hop that follows it.

    That hop is None if the part goes to the end of the chain.
    """
    opened = {live.hop: live for live in hops}
    found: list[tuple[list[Hop], LiveHop | None]] = []
    new: list[Hop] = []
    for hop in route:
        if hop not in opened:
            new.append(hop)
        elif new:
            found.append((new, opened[hop]))
            new = []
    return [*found, (new, None)] if new else found


def displaced(hops: Sequence[LiveHop], new: Sequence[LiveHop]) -> list[LiveHop]:
    """Return the hops that give way to ``new`` ones.

    They share blocks with a new hop, or would be its neighbour on the same host, which cannot dial
    itself.
    """
    return [live for live in hops if any(_excludes(each.hop, live.hop) for each in new)]


def _excludes(one: Hop, other: Hop) -> bool:
    if overlap(one, (other.start, other.end)):
        return True
    return one.peer == other.peer and (one.end == other.start or other.end == one.start)


def upstream(hops: Sequence[LiveHop], live: LiveHop) -> list[LiveHop]:
    """Return the hops before ``live``, the nearest first."""
    found: list[LiveHop] = []
    while sender := next((hop for hop in hops if hop.next is (found[-1] if found else live)), None):
        found.append(sender)
    return found


class GraphGone(SwarmnetError):
    """The host does not have the graph of a forward pass that the backward pass was to use."""


async def ask_pass(
    hosts: ModelHosts,
    hop: Hop,
    begin: pb.Begin,
    tensors: Sequence[Array],
    shapes: Sequence[tuple[int, int]],
) -> list[Array]:
    """Have ``hop`` compute the pass ``begin`` from ``tensors``; returns tensors of ``shapes``.

    Raises ``GraphGone``, what opening a stream raises, and what ``request_pass`` raises.
    """
    try:
        stream = await PASS.open(hosts.transport, hop.peer, hosts.timing, addresses=hop.addresses)
        return await request_pass(stream, begin, tensors, shapes, hosts.timing)
    except Refused as refusal:
        if refusal.reason == refusal_pb2.REASON_GRAPH_GONE and begin.backward and begin.graph:
            raise GraphGone(str(refusal)) from refusal
        raise
