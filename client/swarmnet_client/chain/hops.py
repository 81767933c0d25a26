"""The hops of a chain as its client knows them, and how one becomes part of it."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmnet_client.chain.adapter_upload import Placement
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.protocol_ids import SESSION
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.cost import Hop
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.link import NextHop
from swarmnet_protocols.session.received_digests import DIGEST_BYTES
from swarmnet_protocols.session.steps import decode_tensor, wire_code
from swarmnet_protocols.wire import session_pb2 as pb

SessionStream = TypedStream[pb.SessionRequest, pb.SessionReply]


@dataclass(frozen=True)
class ChainSpec:
    """What a chain is for: blocks [0, blocks), lanes of at most ``max_length`` positions of ``hidden_size`` numbers.

    The hosts apply ``adapter``; positions of its prefix count as positions of every lane.
    """

    blocks: int
    hidden_size: int
    max_length: int
    wire: torch.dtype
    log_bytes: int = 1 << 30
    adapter: Adapter | None = None

    @property
    def prefix_positions(self) -> int:
        """Positions that every lane begins with."""
        return 0 if self.adapter is None else self.adapter.prefix_positions


@dataclass
class ChainReport:
    """What happened to a chain so far."""

    failovers: int = 0
    longest_stall_s: float = 0.0
    route: list[tuple[PeerId, int, int]] = field(default_factory=list)
    audits: int = 0
    """Times what a host sent on was computed again by another one."""
    wrong: list[PeerId] = field(default_factory=list)
    """Hosts that gave wrong outputs, as two others say. What came of the chain before each was replaced may be wrong."""


@dataclass(frozen=True)
class Shown:
    """What a hop says it received and sent on for the first positions of a lane: a digest, and values."""

    received: bytes
    sent: torch.Tensor | None

    @classmethod
    def read(cls, shown: pb.Shown, payload: Buffer) -> "Shown":
        """Raises ``ProtocolViolation`` for what cannot be an answer."""
        if not shown.HasField("sent"):
            return cls(shown.received, None)
        if len(shown.sent.shape) != 2:
            raise ProtocolViolation("a hop shows [positions, hidden size]")
        positions, hidden_size = shown.sent.shape
        return cls(
            shown.received,
            decode_tensor(shown.sent, payload, positions=positions, hidden_size=hidden_size),
        )

    def checked(self, count: int, spec: ChainSpec | None) -> "Shown":
        """It, if it is of ``count`` positions; ``spec`` says what is sent on, None: nothing. Raises ``ProtocolViolation``."""
        if len(self.received) != DIGEST_BYTES:
            raise ProtocolViolation("a hop does not say what it received")
        if spec is not None:
            sent = self.sent
            if sent is None or sent.shape != (count, spec.hidden_size) or sent.dtype != spec.wire:
                raise ProtocolViolation("a hop shows other values than it was asked for")
            if not torch.isfinite(sent).all():
                raise ProtocolViolation("a hop shows values that are not finite")
        return self


@dataclass(eq=False)
class LiveHop:
    """A hop of the chain with an open session.

    ``link`` is whom it feeds, ``heard`` when it last said anything, ``applied`` the last step it computed, ``moved``
    when that last changed, ``leaving`` whether it asked us to go elsewhere.
    """

    hop: Hop
    session: bytes
    stream: SessionStream
    heard: float
    moved: float
    link: "LiveHop | None" = None
    epoch: int = 0
    alive: bool = True
    leaving: bool = False
    applied: int = 0
    showing: "asyncio.Future[Shown] | None" = None

    async def show(self, sequence: int, count: int, *, within_s: float) -> Shown:
        """What it received and sent on for the first ``count`` positions of a lane; one question at a time.

        Raises what sending raises, ``TimeoutError``, or the error for which the hop is dropped meanwhile.
        """
        self.showing = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                show = pb.Show(sequence=sequence, count=count)
                await self.stream.send(pb.SessionRequest(show=show))
                return await self.showing
        finally:
            self.showing = None

    def shows(self, shown: pb.Shown, payload: Buffer) -> None:
        """It has said something; what was not asked for, or no longer, is dropped. Raises ``ProtocolViolation`` for what is no answer."""
        if self.showing is not None and not self.showing.done():
            self.showing.set_result(Shown.read(shown, payload))

    def target(self, epoch: int) -> NextHop:
        """This hop as the next one of its upstream."""
        return NextHop(self.hop.peer, self.hop.addresses, self.session, epoch)

    async def heartbeat(self, period_s: float) -> None:
        """Tell the hop, until it is gone, that its client is there."""
        with contextlib.suppress(SwarmnetError):  # whoever listens to the hop sees the same end
            await self.stream.send_heartbeats(period_s)

    async def relink(self, target: NextHop, record: bytes) -> None:
        """Have the hop feed ``target``, whose announcement is ``record``, from now on."""
        relink = pb.Relink(epoch=target.epoch, next=_peer(target, record))
        with contextlib.suppress(SwarmnetError):  # whoever listens to the hop sees the same end
            await self.stream.send(pb.SessionRequest(relink=relink))


@dataclass(eq=False)
class Head:
    """The client's own end of the chain: it feeds the first hop."""

    link: LiveHop | None = None
    feeding: asyncio.Task[None] | None = None


def gaps(hops: Sequence[LiveHop], blocks: int) -> list[tuple[int, int]]:
    """Which of the blocks [0, blocks) none of ``hops`` covers; they are in order."""
    reached, missing = 0, []
    for live in hops:
        if live.hop.start > reached:
            missing.append((reached, live.hop.start))
        reached = live.hop.end
    if reached < blocks:
        missing.append((reached, blocks))
    return missing


def upstream(hops: Sequence[LiveHop], live: LiveHop) -> list[LiveHop]:
    """Who feeds ``live``, who feeds that one, and so on."""
    found: list[LiveHop] = []
    while feeder := next((hop for hop in hops if hop.link is (found[-1] if found else live)), None):
        found.append(feeder)
    return found


async def open_hop(
    placement: Placement, spec: ChainSpec, hop: Hop, identity: tuple[bytes, int], target: NextHop | None
) -> LiveHop:
    """Open a session on a host; ``identity`` is its id and epoch, ``target`` whom it feeds (None: it answers us).

    ``placement`` brings it the chain's adapter first. Raises what ``place`` raises, ``ProtocolViolation``, or ``Refused``.
    """
    session, epoch = identity
    request = pb.Open(
        session=session,
        epoch=epoch,
        swarm=placement.swarm.id,
        manifest=placement.swarm.manifest,
        span=pb.Span(start=hop.start, end=hop.end),
        next=_peer(target, placement.swarm.record_of(target.peer)) if target else None,
        wire=wire_code(spec.wire),
        max_length=spec.max_length,
    )

    async def ask(adapter: bytes) -> LiveHop:
        request.adapter = adapter
        return await _open(placement, hop, request)

    return await placement.ask(hop, ask)


async def _open(placement: Placement, hop: Hop, request: pb.Open) -> LiveHop:
    swarm = placement.swarm
    timing = swarm.timing
    stream = await swarm.transport.open(hop.peer, SESSION, addresses=hop.addresses, deadline_s=timing.open_s)
    client = SessionStream(stream, pb.SessionRequest, pb.SessionReply, silence_s=timing.silence_s)
    try:
        await client.send(pb.SessionRequest(open=request))
        reply, _ = await client.receive()
        if not reply.HasField("opened"):
            raise ProtocolViolation("a session is answered with Opened or Refused")
    except BaseException:
        stream.close()
        raise
    now = asyncio.get_running_loop().time()
    return LiveHop(hop, request.session, client, heard=now, moved=now)


def _peer(target: NextHop, record: bytes) -> pb.Peer:
    return pb.Peer(id=target.peer, record=record, session=target.session)
