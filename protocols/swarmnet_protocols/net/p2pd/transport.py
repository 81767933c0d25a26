"""The transport of real nodes: libp2p, through a p2pd child process."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import (
    ConfigError,
    IncompatibleVersion,
    PeerUnreachable,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.machine.identity_lock import identity_in_use
from swarmnet_protocols.net import Handler, PeerId, ProtocolSpec
from swarmnet_protocols.net.dialling import dialable, own_interfaces, shared_networks
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.p2pd.connection_limits import ConnectionLimits, Guard
from swarmnet_protocols.net.p2pd.daemon import P2pd, prepare_hivemind, run_p2pd, unpack_multiaddr
from swarmnet_protocols.net.p2pd.pipe import Pipe
from swarmnet_protocols.net.p2pd.process import MAX_MEMORY_BYTES, DaemonConfig, listening_at
from swarmnet_protocols.net.p2pd.stream import P2pdStream
from swarmnet_protocols.net.p2pd.wire_meter import WireMeter
from swarmnet_protocols.net.rate_limit import LinkLimiter
from swarmnet_protocols.net.refusal import LINGER_S, encode_refusal, overloaded
from swarmnet_protocols.net.resources import ResourceLimitReached, ResourceManager
from swarmnet_protocols.net.stream_scope import StreamScope, supervise
from swarmnet_protocols.net.subnets import SubnetLimits
from swarmnet_protocols.timing import Timing

_log = logging.getLogger(__name__)

_BOOTSTRAP_S = 5.0
_FLUSH_S = 2.0
_ADDRESSES_EVERY_S = 30.0
_SETTLE_S = 0.5
_SETTLE_UNLIMITED_S = 5.0
MAX_LINGERING = 64
"""For so many streams that there is no room for, it is seen to that the other side learns so."""
_CONNECTIONS_EVERY = 4
"""So many times that bytes are counted, it is looked which connections there are."""
_RESTING_EVERY = 2 * _CONNECTIONS_EVERY
"""So many times that they could be, bytes are counted while no line is limited and nothing goes through streams: the directory's few."""


@dataclass(frozen=True)
class P2pdConfig:
    identity_path: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    """Published instead of the addresses found by p2pd."""
    bootstrap: tuple[str, ...] = ()
    """Peers to connect to at the start; they also relay for us if nobody can dial us."""
    named: tuple[str, ...] = ()
    """Other addresses that our owner named. They are dialled as they are, as those of ``bootstrap``."""
    require_bootstrap: bool = False
    """Fail with ``Unreachable`` when none of them answers."""
    link: LinkLimiter = field(default_factory=LinkLimiter)
    """Counts what goes over the network, and holds it back to the rates it is set to."""
    only_dials: bool = False
    """Nobody dials us: several processes of this machine may then be on the network under one identity."""
    timing: Timing = field(default_factory=Timing)
    max_daemon_bytes: int = MAX_MEMORY_BYTES
    """p2pd is restarted when it holds more memory than this although no stranger is connected."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    step_aside: Callable[[], AbstractAsyncContextManager[object]] = contextlib.nullcontext
    """Entered before p2pd is restarted, and left when it is back: what is served to others moves away first."""


def peer_of(address: str) -> PeerId:
    """The peer id at the end of a multiaddr. Raises ``ConfigError`` if there is none."""
    _, _, peer = address.rpartition("/p2p/")
    if not peer or "/" in peer:
        raise ConfigError(
            f"{address!r} does not end in /p2p/PEER_ID",
            hint="take the address a node prints when it is ready",
        )
    return PeerId(peer)


class P2pdTransport:
    """Made by :meth:`create`."""

    def __init__(
        self,
        peer_id: PeerId,
        daemon: P2pd,
        socket_path: Path,
        config: P2pdConfig,
        daemon_config: DaemonConfig,
    ) -> None:
        self.resources = ResourceManager()
        self._timing = config.timing
        self._subnet_limits = SubnetLimits(self.resources, self._timing)
        self._peer_id = peer_id
        self._daemon = daemon
        self._daemon_config = daemon_config
        self._config = config
        self._socket_path = socket_path
        self._link = config.link
        self._named = frozenset((*config.bootstrap, *config.named))
        self._places = (*self._named, *(() if config.only_dials else (*config.listen, *config.announce)))
        self._addresses: tuple[str, ...] = ()
        self._handlers: dict[str, tuple[ProtocolSpec, Handler]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._turned_away: set[asyncio.Task[None]] = set()
        self._streams: set[P2pdStream] = set()
        self._checking: set[PeerId] = set()
        self._guard = Guard(daemon, self.resources, config.connections, config.max_daemon_bytes)

    @classmethod
    @contextlib.asynccontextmanager
    async def create(cls, config: P2pdConfig) -> AsyncIterator["P2pdTransport"]:
        """A transport that is up while the context is open.

        Raises ``ConfigError`` for a bad identity file or address, for a port in use, and for an identity under which another
        process is on the network, ``Unreachable`` when ``require_bootstrap`` is set and nobody answers.
        """
        identity = Identity.load_or_create(config.identity_path)
        prepare_hivemind()
        daemon_config = DaemonConfig(
            config.identity_path,
            config.listen,
            config.announce,
            relays=config.bootstrap,
            max_memory_bytes=config.max_daemon_bytes,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(identity_in_use(config.identity_path, alone=not config.only_dials))
            daemon = await stack.enter_async_context(run_p2pd(daemon_config))
            socket_path = daemon.control_path.with_name("streams.sock")
            transport = cls(identity.peer_id, daemon, socket_path, config, daemon_config)
            loop = asyncio.get_running_loop()
            server = await loop.create_unix_server(lambda: Pipe(transport._accept), str(socket_path))
            try:
                await transport._refresh_addresses()
                transport._own(transport._live(), transport._tasks)
                await transport._bootstrap(config)
                yield transport
            finally:
                server.close()
                await transport._close()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def addresses(self) -> Sequence[str]:
        return self._addresses

    async def is_connected(self, peer: PeerId) -> bool:
        return peer in await self._daemon.connections()

    async def died(self) -> None:
        """Return once p2pd has ended, whoever ended it."""
        await self._daemon.ended()

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        is_new = protocol.id not in self._handlers
        self._handlers[protocol.id] = (protocol, handler)
        if is_new:
            await self._daemon.handle_streams(protocol.id, self._socket_path)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> P2pdStream:
        """As promised by ``Transport``: what may be dialled is said by ``dialable``, and what our owner named. That a peer which was connected died unseen is found out by the first ``receive``.

        Where the connection died and not the peer, it is closed after ``alive_s``, and every stream over it ends: the next one is
        opened over a new connection.
        """
        try:
            async with asyncio.timeout(deadline_s):
                if addresses:
                    await self.connect(peer, await self._dialable(peer, addresses), deadline_s=deadline_s)
                pipe = await self._daemon.open_stream(peer, protocol.id, deadline_s=deadline_s)
        except TimeoutError as error:
            raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s") from error
        stream = self._stream(peer, protocol, pipe, StreamScope.outbound(self.resources, peer, self._timing))
        self._own(self._check(peer), self._tasks)
        return stream

    async def _dialable(self, peer: PeerId, addresses: Sequence[str]) -> Sequence[str]:
        named = [address for address in addresses if address in self._named]
        if len(named) == len(addresses):
            return named
        found = [*named, *dialable(peer, addresses, shared_networks(own_interfaces(), self._places))]
        if not found and not await self.is_connected(peer):
            raise PeerUnreachable(f"no address of {peer} may be dialled from here")
        return found

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to ``peer`` unless it is connected. The addresses are dialled as they are. Raises ``PeerUnreachable`` within about ``deadline_s``."""
        # TCP first: a killed process ends its TCP connections at once, its QUIC connections after 30 s.
        tcp = [address for address in addresses if "/tcp/" in address and "/p2p-circuit" not in address]
        if tcp and len(tcp) < len(addresses):
            with contextlib.suppress(PeerUnreachable, TimeoutError):
                async with asyncio.timeout(deadline_s / 2):
                    await self._daemon.connect(peer, tcp, deadline_s=deadline_s / 2)
                    self._guard.dialled(peer)
                    return
        await self._daemon.connect(peer, addresses, deadline_s=deadline_s)
        self._guard.dialled(peer)

    async def _check(self, peer: PeerId) -> None:
        """Close the connection to ``peer`` if it carries nothing.

        When a link was cut and is whole again, TCP may take as long as it was cut to try again, and p2pd as long to give it up;
        meanwhile streams over it open at once, and nothing comes back.
        """
        clock, patience_s = asyncio.get_running_loop().time, self._timing.alive_s
        asked = clock()
        if peer in self._checking or self._has_received(peer, asked - patience_s):
            return
        self._checking.add(peer)
        try:
            if await self._daemon.answers(peer, within_s=patience_s) or self._has_received(peer, asked):
                return
            if any(stream.arrives_by > clock() for stream in self._with(peer)):
                return
            _log.info("the connection to %s carries nothing: it is dialled anew", peer)
            await self._daemon.disconnect(peer)
        except (PeerUnreachable, IncompatibleVersion) as error:  # there is none, or somebody answered
            _log.debug("no echo of %s: %s", peer, error)
        finally:
            self._checking.discard(peer)

    def _has_received(self, peer: PeerId, since: float) -> bool:
        return any(stream.received_at > since for stream in self._with(peer))

    def _with(self, peer: PeerId) -> list[P2pdStream]:
        return [stream for stream in self._streams if stream.peer == peer]

    async def addresses_of(self, peer: PeerId) -> list[str]:
        """The multiaddrs from which ``peer`` is connected now; none if it is not."""
        return (await self._daemon.connections()).get(peer, [])

    async def _bootstrap(self, config: P2pdConfig) -> None:
        silent: dict[str, str] = {}

        async def connect(address: str) -> None:
            try:
                async with asyncio.timeout(_BOOTSTRAP_S):
                    await self.connect(peer_of(address), [address], deadline_s=_BOOTSTRAP_S)
            except (PeerUnreachable, TimeoutError) as error:
                silent[address] = str(error).partition("\n")[0] or f"nothing within {_BOOTSTRAP_S:g} s"

        await asyncio.gather(*map(connect, config.bootstrap))
        if config.require_bootstrap and len(silent) == len(config.bootstrap):
            raise Unreachable(
                "no bootstrap peer answers: " + ", ".join(config.bootstrap),
                hint="check the address and that a node runs there: --bootstrap ADDR",
            )
        for address, why in silent.items():
            _log.warning("bootstrap peer %s does not answer: %s", address, why)

    # ---- p2pd ---------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Look after p2pd until it ends of itself, and restart it when it must be."""
        loop = asyncio.get_running_loop()
        while True:
            beside = [
                loop.create_task(each)
                for each in (
                    self._keep_addresses_fresh(),
                    self._settle(),
                )
            ]
            try:
                is_worn = await self._guard.keep()
            finally:
                await cancel(*beside)
            if not is_worn:
                return
            try:
                await self.restart_daemon()
            except SwarmnetError as error:  # whoever waits for ``died`` is told
                _log.error("p2pd does not start again: %s", error)
                return

    async def restart_daemon(self) -> None:
        """End p2pd and start it anew at the same ports, once what is served to others has moved away.

        Every connection and stream ends. Raises ``ConfigError`` when it does not start.
        """
        async with self._config.step_aside():
            _log.warning("p2pd is restarted: it holds %d MiB", self._daemon.memory_bytes() >> 20)
            listen = tuple(listening_at(each, self._addresses) for each in self._daemon_config.listen)
            await self._daemon.restart(replace(self._daemon_config, listen=listen))
            for protocol, _ in self._handlers.values():
                await self._daemon.handle_streams(protocol.id, self._socket_path)
            await self._refresh_addresses()
            await self._bootstrap(replace(self._config, require_bootstrap=False))

    def _accept(self, pipe: Pipe) -> None:
        self._own(self._handle(pipe), self._tasks)

    async def _handle(self, pipe: Pipe) -> None:
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
        from hivemind.proto import p2pd_pb2 as pb

        info = pb.StreamInfo()
        try:
            await read_pbmsg_safe(pipe.reader, info)
        except (OSError, asyncio.IncompleteReadError):  # p2pd gave up before it said who calls
            pipe.writer.close()
            return
        except asyncio.CancelledError:
            pipe.writer.close()
            raise
        protocol, handler = self._handlers[info.proto]
        peer = PeerId(PeerID(info.peer).to_base58())
        try:
            scope = self._subnet_limits.accept(peer, unpack_multiaddr(info.addr) if info.addr else "")
        except ResourceLimitReached as error:
            _log.debug("no stream of %s is taken: %s", peer, error)
            refusal = encode_refusal(overloaded(error))
            if len(self._turned_away) < MAX_LINGERING:
                pipe.end(refusal, within_s=LINGER_S)
                self._own(pipe.closed(), self._turned_away)
            else:
                pipe.writer.write(refusal)
                pipe.writer.close()
            return
        stream = self._stream(peer, protocol, pipe, scope)
        stream.packed_address = info.addr
        await supervise(handler, stream, protocol)

    def _stream(self, peer: PeerId, protocol: ProtocolSpec, pipe: Pipe, scope: StreamScope) -> P2pdStream:
        stream = P2pdStream(peer, protocol, pipe, scope, self._stream_closed, self._link)
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

    async def _settle(self) -> None:
        """Charge the lines with what p2pd really sends and receives: the directory, relaying and repetitions too."""
        if not WireMeter.is_supported():
            return
        up, down = self._link.up, self._link.down
        meter, sees_all, settled_bytes = WireMeter(self._daemon.process.pid), False, 0.0
        for look in itertools.count():
            if self._daemon.process.returncode is not None:
                return
            is_limited = up.is_limited or down.is_limited
            is_resting = up.total_bytes + down.total_bytes == settled_bytes and not is_limited
            if not is_resting or look % _RESTING_EVERY == 0:
                try:
                    if look % _CONNECTIONS_EVERY == 0:
                        sees_all = not await self._uses_quic()
                    carried = meter.read()
                except (OSError, PeerUnreachable) as error:  # no file is left, say: estimates stand
                    _log.debug("it is not seen what p2pd carries: %s", error)
                else:
                    up.reconcile(carried.up, is_complete=sees_all)
                    down.reconcile(carried.down, is_complete=sees_all)
                    settled_bytes = up.total_bytes + down.total_bytes
            await asyncio.sleep(_SETTLE_S if is_limited else _SETTLE_UNLIMITED_S)

    async def _uses_quic(self) -> bool:
        """Whether any connection is one whose bytes the kernel does not count by process."""
        connections = await self._daemon.connections()
        return any("/quic" in address for addresses in connections.values() for address in addresses)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in list(self._streams):
            stream.close()
        if flushes := self._flushes | self._turned_away:
            _, late = await asyncio.wait(flushes, timeout=_FLUSH_S)
            for task in late:
                task.cancel()
