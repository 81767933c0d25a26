"""The hosts of one model as a client knows them: their announcements, delays, speeds and failures, and the routes that follow."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swarmnet_client.audit.plan import Ledger
from swarmnet_client.swarm.entry_guards import EntryGuards
from swarmnet_client.swarm.traffic import CountingTransport, Traffic
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import read_hosts
from swarmnet_protocols.errors import NoRoute, ProtocolViolation, SwarmnetError
from swarmnet_protocols.joining.network import Network, Trust, connect
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import PING
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.routing.chain_search import (
    Bans,
    Hop,
    HostInfo,
    View,
    believed,
    find_chain,
    pair_of,
    uncovered,
)
from swarmnet_protocols.routing.measured_speed import Speeds
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import session_pb2 as pb

PINGED_HOSTS = 24
"""Hosts to which a client keeps a ping stream. A larger swarm is routed by announcements."""
PARTED_S = 60.0
"""Seconds for which two hosts that did not reach each other are not made neighbours."""
CONVICTED_S = 6 * 3600.0
"""Seconds for which a host with wrong outputs is not used."""
SMOOTHING = 0.3
"""Weight of the newest ping in the running mean of a host's delay."""
EXPLORE = 0.05
"""Share of routes in which an unmeasured host counts as fast as the fastest measured one, so that it gets measured."""


class Swarm:
    """The hosts of one model. The directory, pings and chains report to it; chains ask it for routes."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        manifest: bytes,
        rng: random.Random,
        timing: Timing,
        trust: Trust = Trust(),  # noqa: B008 - it is frozen
    ) -> None:
        """Session ids are drawn from ``rng``, which outside of simulations is a ``SystemRandom``."""
        self._trust = trust
        path = None
        if trust.guards_folder is not None:
            name = f"{directory.swarm.hex()[:32]}-{manifest.hex()[:32]}.json"
            path = trust.guards_folder / name
        self._guards = EntryGuards(path, rng, wall_clock)
        self._speeds = Speeds()
        self.traffic = Traffic()
        self.transport: Transport = CountingTransport(transport, self.traffic)
        self.timing = timing
        self.manifest = manifest
        self._directory = directory
        self._rng = rng
        self._hosts: dict[PeerId, HostInfo] = {}
        self._delay_s: dict[PeerId, float] = {}
        self._queue_s: dict[PeerId, float] = {}
        self._bans = Bans()
        self._convicted: dict[PeerId, float] = {}
        self.ledger = Ledger(rng)
        self._parted: dict[tuple[PeerId, PeerId], float] = {}
        self._pings: dict[PeerId, asyncio.Task[None]] = {}
        self._refreshing = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def watch(
        cls,
        transport: Transport,
        directory: Directory,
        manifest: bytes,
        *,
        rng: random.Random,
        timing: Timing,
        trust: Trust = Trust(),  # noqa: B008 - it is frozen
    ) -> AsyncIterator["Swarm"]:
        """A view of the hosts that is refreshed while the context is open."""
        swarm = cls(transport, directory, manifest, rng, timing, trust)
        watching = asyncio.create_task(swarm._watch(), name="swarm")
        try:
            yield swarm
        finally:
            await cancel(watching, *swarm._pings.values())

    @classmethod
    @asynccontextmanager
    async def visit(cls, local: LocalModel, network: Network) -> AsyncIterator["Swarm"]:
        """Join the swarm of ``network`` as a client, and watch the hosts of ``local``.

        Raises ``ConfigError`` where the swarm is for other models, and what ``connect`` raises.
        """
        manifest = local.manifest.hash
        network.rules.check_model(local.name, manifest)
        async with (
            connect(network, client_mode=True) as (transport, directory),
            cls.watch(
                transport,
                directory,
                manifest,
                rng=random.SystemRandom(),
                timing=Timing(),
                trust=network.trust,
            ) as swarm,
        ):
            yield swarm

    def route(
        self, span: tuple[int, int], *, source: PeerId | None = None, sink: PeerId | None = None
    ) -> list[Hop]:
        """The hosts of a chain over the blocks of ``span``. Raises ``NoRoute``."""
        view = self._view(explore=self._rng.random() < EXPLORE)
        try:
            return find_chain(view, span, self._rng, source=source, sink=sink)
        except NoRoute as error:
            raise self.no_route(error.missing) from error

    def no_route(self, missing: Sequence[tuple[int, int]]) -> NoRoute:
        """The error for blocks without a host that this client may use."""
        return NoRoute(missing, among_trusted=bool(self._trust.hosts))

    def measured(self, chain: Sequence[Hop], step_s: float) -> None:
        """A decode step took ``step_s`` through ``chain``, from the client and back."""
        now = self._now()
        self._speeds.measured(believed(self._view()), chain, step_s, now)

    def built(self, first: PeerId, last: PeerId) -> None:
        """A chain with these first and last hops was opened."""
        if not self._trust.first_and_last:
            self._guards.used(first, last, self._hosts)

    def can_replace(self, hop: Hop) -> bool:
        """Whether other hosts have all blocks of ``hop``."""
        others = [
            host for host in self._hosts.values() if host.peer not in {hop.peer, *self._bans.at(self._now())}
        ]
        return not uncovered(others, (hop.start, hop.end))

    def new_session(self) -> bytes:
        """A random session id. It is a secret: a host that knows it may link to the session."""
        return self._rng.randbytes(16)

    def parted(self, one: PeerId, other: PeerId) -> None:
        """Two hosts are alive and do not reach each other."""
        now = self._now()
        self._parted = {pair: until for pair, until in self._parted.items() if until > now}
        self._parted[pair_of(one, other)] = now + PARTED_S

    def failed(self, peer: PeerId) -> None:
        """A host failed: ban it for a while."""
        self._bans.failed(peer, self._now())

    def convict(self, peer: PeerId) -> None:
        """A host gave wrong outputs: it is not used for ``CONVICTED_S``, even if no other host has its blocks."""
        now = self._now()
        self._convicted = {each: until for each, until in self._convicted.items() if until > now}
        self._convicted[peer] = now + CONVICTED_S
        self._hosts.pop(peer, None)

    @property
    def banned(self) -> Sequence[PeerId]:
        """Hosts that are banned now."""
        return self._bans.at(self._now())

    def served(self, peer: PeerId) -> None:
        """A host answered: lift its ban."""
        self._bans.served(peer)

    @property
    def id(self) -> bytes:
        """Id of the swarm, 32 bytes."""
        return self._directory.swarm

    @property
    def hosts(self) -> Sequence[HostInfo]:
        return tuple(self._hosts.values())

    def record_of(self, peer: PeerId) -> bytes:
        """The newest signed announcement of a host; empty if none is known."""
        info = self._hosts.get(peer)
        return info.record if info else b""

    async def refresh(self) -> None:
        """Read the directory now. Callers at the same time share one look-up.

        If the directory is out of reach, the known hosts stay in use.
        """
        if self._refreshing.locked():
            async with self._refreshing:
                return
        async with self._refreshing:
            found = await read_hosts(self._directory, self.manifest)
            if found:
                now, allowed = self._now(), self._trust.hosts
                self._hosts = {
                    host.peer: host
                    for host in found
                    if (not allowed or host.peer in allowed)
                    and self._convicted.get(host.peer, -math.inf) <= now
                }
            self._ping_hosts()

    def _view(self, *, explore: bool = False) -> View:
        now = self._now()
        parted = frozenset(pair for pair, until in self._parted.items() if until > now)
        return View(
            tuple(self._hosts.values()),
            self._delay_s,
            self._queue_s,
            self._bans.at(now),
            parted,
            block_s=self._speeds.at(self._hosts, now),
            guards=self._trust.first_and_last or self._guards.peers(),
            explore=explore,
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        while True:
            # The directory may answer later; the known hosts stay in use.
            with contextlib.suppress(SwarmnetError):
                await self.refresh()
            await asyncio.sleep(self.timing.refresh_s)

    def _ping_hosts(self) -> None:
        for peer in [peer for peer, task in self._pings.items() if task.done() or peer not in self._hosts]:
            self._pings.pop(peer).cancel()
        for host in list(self._hosts.values()):
            if len(self._pings) >= PINGED_HOSTS:
                return
            if host.peer not in self._pings:
                self._pings[host.peer] = asyncio.create_task(self._ping(host))

    async def _ping(self, host: HostInfo) -> None:
        """Measure the delay and queue of one host until it fails: then it is banned, and the next refresh tries again."""
        try:
            stream = await self.transport.open(
                host.peer, PING, addresses=host.addresses, deadline_s=self.timing.open_s
            )
        except SwarmnetError:
            self.failed(host.peer)
            return
        pings = TypedStream(stream, pb.Ping, pb.Pong, silence_s=self.timing.pong_s)
        try:
            while True:
                await self._ping_once(pings)
                await asyncio.sleep(self.timing.ping_s)
        except SwarmnetError:
            self.failed(host.peer)
        finally:
            stream.close()

    async def _ping_once(self, stream: TypedStream[pb.Ping, pb.Pong]) -> None:
        nonce = self._rng.getrandbits(63)
        sent = self._now()
        await stream.send(pb.Ping(nonce=nonce))
        pong, _ = await stream.receive()
        if pong.nonce != nonce:
            raise ProtocolViolation(f"{stream.peer} answered another ping")
        measured = (self._now() - sent) / 2
        known = self._delay_s.get(stream.peer, measured)
        self._delay_s[stream.peer] = known + SMOOTHING * (measured - known)
        self._queue_s[stream.peer] = pong.queue_s if 0 <= pong.queue_s < math.inf else 0.0
