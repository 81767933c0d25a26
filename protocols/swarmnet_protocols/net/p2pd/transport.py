"""The transport over libp2p, through a p2pd child process."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from swarmnet_protocols.errors import (
    ConfigError,
    IncompatibleVersion,
    PeerUnreachable,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.machine.aio import in_background, loop_time, persist
from swarmnet_protocols.machine.identity_lock import identity_in_use
from swarmnet_protocols.net import Handler, PeerId, ProtocolSpec, ReachKind
from swarmnet_protocols.net.dialling import Network, dialable, own_interfaces, shared_networks
from swarmnet_protocols.net.endpoint import Endpoint
from swarmnet_protocols.net.framed_stream import FramedStream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.multiaddr import parse_multiaddrs, peer_in
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.connection_limits import ConnectionGuard
from swarmnet_protocols.net.p2pd.daemon import P2pd, prepare_hivemind, run_p2pd, unpack_multiaddr
from swarmnet_protocols.net.p2pd.process import listening_at
from swarmnet_protocols.net.pipe import Pipe
from swarmnet_protocols.net.typed_stream import MAX_EXTENSION
from swarmnet_protocols.wire.report_pb2 import Reach

_log = logging.getLogger(__name__)

_BOOTSTRAP_S = 5.0
"""Timeout for connecting to a bootstrap peer."""
_ADDRESSES_S = 5.0
"""Seconds between two requests for this peer's addresses."""


def peer_of(address: str) -> PeerId:
    """Return the peer id at the end of a multiaddr. Raises ``ConfigError`` without one."""
    peer = peer_in(address)
    if not peer or "/" in peer:
        raise ConfigError(
            f"{address!r} does not end in /p2p/PEER_ID",
            hint="take the address a node prints when it is ready",
        )
    return peer


def no_bootstrap_peer(addresses: Sequence[str]) -> Unreachable:
    return Unreachable(
        "no bootstrap peer answers: " + ", ".join(addresses),
        hint="check the address and that a node runs there: --bootstrap ADDR",
    )


class P2pdTransport:
    """A libp2p peer. Made by :meth:`create`."""

    def __init__(
        self,
        peer_id: PeerId,
        daemon: P2pd,
        socket_path: Path,
        config: P2pdConfig,
    ) -> None:
        self.endpoint = Endpoint(config.link, config.timing)
        self.resources = self.endpoint.resources
        self._timing = config.timing
        self._peer_id = peer_id
        self._daemon = daemon
        self._config = config
        self._socket_path = socket_path
        self._named = frozenset((*config.bootstrap, *config.named))
        self._owners_addresses = (
            *self._named,
            *(() if config.only_dials else (*config.listen, *config.announce)),
        )
        self._addresses: tuple[str, ...] = ()
        self._pinging: dict[PeerId, bool] = {}
        """Peers that are being pinged → whether to ping them again."""
        self._connection_guard = ConnectionGuard(
            daemon,
            self.resources,
            config.connections,
            config.max_daemon_bytes,
            self.endpoint.real_address,
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def create(cls, config: P2pdConfig) -> AsyncIterator["P2pdTransport"]:
        """Run a transport while the context is open.

        Raises ``ConfigError`` for an invalid identity file or address, a port in use, and an
        identity in use by another process. Raises ``Unreachable`` if ``require_bootstrap`` is set
        and no bootstrap peer answers.
        """
        identity = Identity.load_or_create(config.identity_path)
        prepare_hivemind()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(identity_in_use(config.identity_path, alone=not config.only_dials))
            daemon = await stack.enter_async_context(run_p2pd(config))
            socket_path = daemon.control_path.with_name("streams.sock")
            transport = cls(identity.peer_id, daemon, socket_path, config)
            loop = asyncio.get_running_loop()
            server = await loop.create_unix_server(lambda: Pipe(transport._accept), str(socket_path))
            try:
                await transport._refresh_addresses()
                transport.endpoint.start(persist("the supervision of p2pd", transport._supervise_daemon))
                await transport._bootstrap(config)
                yield transport
            finally:
                server.close()
                await transport.endpoint.close()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    def addresses(self) -> Sequence[str]:
        return self._addresses

    def reach(self) -> Reach:
        """Return ``UNKNOWN``, since ``swarmnet_protocols.reachability`` detects the reach."""
        return Reach(kind=ReachKind.UNKNOWN)

    async def is_connected(self, peer: PeerId) -> bool:
        return peer in await self._daemon.connections()

    async def connected_peers(self) -> Collection[PeerId]:
        """Return the peers that are connected directly."""
        return (await self._daemon.connections()).keys()

    async def died(self) -> None:
        """Return when p2pd has ended and is not restarted."""
        await self._daemon.ended()

    async def serve(self, protocol: ProtocolSpec, handler: Handler) -> None:
        if self.endpoint.serve(protocol, handler):
            await self._daemon.handle_streams(protocol.id, self._socket_path)

    async def open(
        self, peer: PeerId, protocol: ProtocolSpec, *, addresses: Sequence[str] = (), deadline_s: float
    ) -> FramedStream:
        """Open a stream as ``Transport.open`` does.

        Addresses are dialled if ``dialable`` allows them or the owner named them. The connection
        may be dead even if the stream opens. A ping detects that and closes the connection with all
        its streams, so that the next stream gets a new connection.
        """
        try:
            async with asyncio.timeout(deadline_s):
                if addresses:
                    permitted = self.permitted(peer, addresses)
                    if not permitted and not await self.is_connected(peer):
                        raise PeerUnreachable(f"none of the addresses of {peer} may be dialled")
                    await self.connect(peer, permitted, deadline_s=deadline_s)
                pipe = await self._daemon.open_stream(peer, protocol.id, deadline_s=deadline_s)
        except TimeoutError as error:
            raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s") from error
        finally:
            self.endpoint.start(self._check_alive(peer))
        return self.endpoint.open(pipe, peer, protocol)

    def permitted(self, peer: PeerId, addresses: Sequence[str]) -> Sequence[str]:
        """Return the addresses that the owner named, or where ``dialable`` allows ``peer``."""
        named = [address for address in addresses if address in self._named]
        if len(named) == len(addresses):
            return named
        return [*named, *dialable(peer, addresses, self.networks())]

    def networks(self) -> Sequence[Network]:
        """Return the networks where peers with private addresses may be dialled
        (``shared_networks``).
        """
        return shared_networks(own_interfaces(), self._owners_addresses)

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        """Connect to ``peer`` at any of ``addresses``, unless it is connected.

        Raises ``PeerUnreachable`` after about ``deadline_s``.
        """
        # TCP first: a killed process ends its TCP connections at once, its QUIC connections after
        # 30 s.
        tcp = [address for address in addresses if "/tcp/" in address and "/p2p-circuit" not in address]
        if tcp and len(tcp) < len(addresses):
            with contextlib.suppress(PeerUnreachable, TimeoutError):
                async with asyncio.timeout(deadline_s / 2):
                    await self._daemon.connect(peer, tcp, deadline_s=deadline_s / 2)
                    self._connection_guard.dialled(peer)
                    return
        await self._daemon.connect(peer, addresses, deadline_s=deadline_s)
        self._connection_guard.dialled(peer)

    async def _check_alive(self, peer: PeerId) -> None:
        """Close the connection to ``peer`` if it is silent: no answer to a ping, and no other
        bytes.

        When a path works again after an interruption, TCP may wait as long as the interruption was
        before it retransmits, and p2pd keeps the connection for 40 s. Meanwhile streams can be
        opened, but no message arrives.
        """
        if peer in self._pinging:
            self._pinging[peer] = True
            return
        try:
            self._pinging[peer] = True
            while self._pinging[peer]:  # a stream that is opened during a ping needs another one
                self._pinging[peer] = False
                if not await self._is_alive(peer):
                    _log.info("the connection to %s does not answer: closing it", peer)
                    await self._daemon.disconnect(peer)
                    return
        # Without a connection there is nothing to close, and IncompatibleVersion is an answer.
        except (PeerUnreachable, IncompatibleVersion) as error:
            _log.debug("no ping of %s: %s", peer, error)
        finally:
            self._pinging.pop(peer, None)

    async def _is_alive(self, peer: PeerId) -> bool:
        """Tell whether the connection to ``peer`` is alive. One of these is enough:

        - Bytes of the peer came within the last ``alive_s``.
        - The ping is answered, or other bytes come, within ``silence_s``. The wait is longer, as
          for late heartbeats, if bytes came within the last ``silence_s``.
        - Bytes sent to the peer may still be on their way.
        """
        asked = loop_time()
        heard_at, silence_s = self._heard_at(peer), self._timing.silence_s
        if heard_at > asked - self._timing.alive_s:
            return True
        # A ping takes two round trips. Each may wait behind long prompts, in the queues of both
        # peers' uplinks.
        if heard_at > asked - silence_s:
            silence_s *= MAX_EXTENSION
        if await self._daemon.answers(peer, within_s=silence_s) or self._heard_at(peer) > asked:
            return True
        return any(stream.arrives_by > loop_time() for stream in self.endpoint.streams_with(peer))

    def _heard_at(self, peer: PeerId) -> float:
        """Return the loop time of the last bytes of ``peer`` on any stream; minus infinity without
        one.
        """
        return max((stream.received_at for stream in self.endpoint.streams_with(peer)), default=-math.inf)

    async def addresses_of(self, peer: PeerId) -> list[str]:
        """Return the multiaddrs of the connections of ``peer``."""
        addresses = (await self._daemon.connections()).get(peer, [])
        return [self.endpoint.real_address(each) for each in addresses]

    async def address_of(self, peer: PeerId) -> str:
        """Return the multiaddr of a connection of ``peer``; empty if it is not connected."""
        return next(iter(await self.addresses_of(peer)), "")

    async def was_dialled(self) -> bool:
        """Tell whether a peer on another machine has dialled this one and is connected."""
        own = {host for host, _ in own_interfaces()}
        for peer, addresses in (await self._daemon.connections()).items():
            if not self._connection_guard.has_dialled(peer):
                found = list(parse_multiaddrs(map(self.endpoint.real_address, addresses)))
                if any(not each.is_relayed and str(each.ip) not in own for each in found):
                    return True
        return False

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
            raise no_bootstrap_peer(config.bootstrap)
        for address, why in silent.items():
            _log.warning("bootstrap peer %s does not answer: %s", address, why)

    # ---- p2pd -----------------------------------------------------------------------------------

    async def _supervise_daemon(self) -> None:
        """Enforce the limits on p2pd until it ends. Restart it when it takes too much memory."""
        while True:
            refreshing = persist("the refresh of addresses", self._refresh_addresses_periodically)
            async with in_background(refreshing):
                must_restart = await self._connection_guard.run()
            if not must_restart:
                return
            try:
                await self.restart_daemon()
            except SwarmnetError as error:  # ``died`` returns
                _log.error("p2pd could not be restarted: %s", error)
                return

    async def restart_daemon(self) -> None:
        """Restart p2pd on the same ports, after sessions have moved to other hosts
        (``step_aside``).

        Every connection and stream ends. Raises ``ConfigError`` if p2pd does not start.
        """
        async with self._config.step_aside():
            _log.warning("restarting p2pd, which uses %d MiB", self._daemon.memory_bytes() >> 20)
            listen = tuple(listening_at(each, self._addresses) for each in self._config.listen)
            await self._daemon.restart(replace(self._config, listen=listen))
            for protocol in self.endpoint.protocols:
                await self._daemon.handle_streams(protocol.id, self._socket_path)
            await self._refresh_addresses()
            await self._bootstrap(replace(self._config, require_bootstrap=False))

    def _accept(self, pipe: Pipe) -> None:
        self.endpoint.accept(lambda: self._handle(pipe), pipe.writer.close)

    async def _handle(self, pipe: Pipe) -> None:
        from hivemind.p2p import PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe
        from hivemind.proto import p2pd_pb2 as pb

        info = pb.StreamInfo()
        try:
            await read_pbmsg_safe(pipe.reader, info)
        except (OSError, asyncio.IncompleteReadError):  # p2pd closed the socket before it named the peer
            pipe.writer.close()
            return
        except BaseException:
            pipe.writer.close()
            raise
        await self.endpoint.handle(
            pipe, PeerId(PeerID(info.peer).to_base58()), info.proto, unpack_multiaddr(info.addr)
        )

    async def _refresh_addresses(self) -> None:
        self._addresses = tuple(f"{address}/p2p/{self._peer_id}" for address in await self._daemon.identify())

    async def _refresh_addresses_periodically(self) -> None:
        with contextlib.suppress(PeerUnreachable):  # p2pd has ended
            while True:
                await asyncio.sleep(_ADDRESSES_S)
                await self._refresh_addresses()
