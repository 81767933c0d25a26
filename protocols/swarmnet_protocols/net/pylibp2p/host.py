"""A libp2p host on its own thread.

It listens, dials, and joins each libp2p stream to a socket of this process, as p2pd does. py-libp2p
runs on trio, the rest of swarmnet on asyncio. Requests go to the thread as tasks (``_call``).
Streams come back as one end of a socket pair, so the layers above use the same code as for p2pd's
streams.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_keys
from libp2p.security.noise.transport import Transport as Noise
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import YamuxStream

from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.machine.platform import return_freed_memory
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import own_interfaces
from swarmnet_protocols.net.limits.resource_limits import SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.limits.subnets import Occupancy, Place, subnet_of
from swarmnet_protocols.net.p2pd.daemon import P2pd, pack_multiaddr, pack_peer, unpack_peer
from swarmnet_protocols.net.pipe import Pipe, adopt
from swarmnet_protocols.net.pylibp2p import connection as limits
from swarmnet_protocols.net.pylibp2p.carrying import PING_BYTES, Carrier, echo, reset, socket_pair
from swarmnet_protocols.net.pylibp2p.connection import (
    MAX_STREAMS,
    STREAM_ERRORS,
    Connection,
    listener,
    negotiate,
    open_tcp,
    upgrade,
)

_log = logging.getLogger(__name__)

PING = "/ipfs/ping/1.0.0"
HANDSHAKE_S = 10.0
"""Timeout for the handshakes of a connection, and for the negotiation of a stream."""
MAX_PENDING = 128
"""Most inbound connections whose handshakes are under way. Each takes about a millisecond of
processor time."""
MAX_PENDING_PER_SUBNET = 16
RETURN_S = 1.0
"""Seconds after the end of a connection until freed memory is returned. Less costs processor time
in a swarm whose peers come and go; more lets outsiders fill memory meanwhile."""
T = TypeVar("T")
OnStream = Callable[[socket.socket, PeerId, str, str], None]
"""Takes one end of a socket pair, the peer, the protocol id and the multiaddr of an inbound
stream."""


class PyLibp2p(P2pd):
    """A running host, with the interface of :class:`P2pd`. Made by :func:`run_host`."""

    def __init__(self, peer_id: PeerId, announce: Sequence[str], on_stream: OnStream) -> None:
        self._state = SimpleNamespace(returncode=None)
        self.process = cast(Any, self._state)  # what ConnectionGuard reads of p2pd's
        self.peer_id = peer_id
        self._announce = announce
        self._on_stream = on_stream
        self._loop = asyncio.get_running_loop()
        self._served: set[str] = {PING}
        self._connections: dict[PeerId, list[Connection]] = {}
        self._pending: Counter[str] = Counter()
        self._streams = 0
        self._carrier = Carrier()
        self._returns_memory = False
        """True if a return of freed memory to the system is scheduled."""
        self._max_buffered_bytes = 0
        """Upper bound of the unread bytes. An exact count looks at every stream."""
        self._sockets: list[socket.socket] = []
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery

    # ---- from asyncio ---------------------------------------------------------------------------

    async def start(self, seed: bytes, listen: Sequence[str]) -> None:
        """Start listening. Raises ``ConfigError`` for an address that cannot be used."""
        keys = create_new_key_pair(seed)
        self._noise = Noise(keys, create_noise_keys().private_key)
        self._sockets = [listener(address) for address in listen if "/tcp/" in address]
        self._thread = threading.Thread(target=self._run, name="py-libp2p", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def stop(self) -> None:
        def end() -> None:
            for connection in self._all_connections():
                connection.abort()
            self._nursery.cancel_scope.cancel()

        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(end)
        await self._ended.wait()

    async def ended(self) -> None:
        await self._ended.wait()

    def memory_bytes(self) -> int:
        """Return the bytes received on connections and not read."""
        return sum(each.yamux.buffered_bytes() for each in self._all_connections())

    async def identify(self) -> list[str]:
        if self._announce:
            return list(self._announce)
        found = []
        for each in self._sockets:
            host, port = each.getsockname()[:2]
            family = "ip6" if each.family == socket.AF_INET6 else "ip4"
            hosts = [host]
            if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
                hosts = [
                    ip for ip, _ in own_interfaces() if (":" in ip) == (family == "ip6") and "%" not in ip
                ]
            found += [f"/{family}/{ip}/tcp/{port}" for ip in hosts]
        return found

    async def connections(self) -> dict[PeerId, list[str]]:
        found: dict[PeerId, list[str]] = {}
        for each in self._all_connections():
            found.setdefault(each.peer, []).append(each.address)
        return found

    async def packed_connections(self) -> list[tuple[bytes, bytes]]:
        return [(pack_peer(each.peer), pack_multiaddr(each.address)) for each in self._all_connections()]

    async def connect(self, peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        if self._connection(peer) is None:
            pack_peer(peer)
            await self._call(lambda: self._connect(peer, addresses, deadline_s))

    async def open_stream(self, peer: PeerId, protocol_id: str, *, deadline_s: float) -> Pipe:
        pack_peer(peer)
        ours, theirs = socket_pair()
        try:
            await self._call(lambda: self._open(peer, protocol_id, theirs, deadline_s))
        except BaseException:
            ours.close()
            raise
        return await adopt(ours)

    async def answers(self, peer: PeerId, *, within_s: float) -> bool:
        return await self._call(lambda: self._answers(peer, within_s))

    async def disconnect_all(self, packed_peers: Sequence[bytes]) -> None:
        peers = [unpack_peer(each) for each in packed_peers]

        async def abort() -> None:
            for peer in peers:
                for connection in self._connections.get(peer, []):
                    connection.abort()

        await self._call(abort)

    async def handle_streams(self, protocol_id: str, socket_path: Path) -> None:
        self._served.add(protocol_id)

    async def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run ``function`` on the thread. Cancelling the caller cancels it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        scope = trio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    future.set_result(await function())
            except Exception as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)
            finally:
                if not future.done():
                    future.set_exception(PeerUnreachable("py-libp2p is not running"))

        def start() -> None:
            if self._nursery.cancel_scope.cancel_called:
                future.set_exception(PeerUnreachable("py-libp2p is not running"))
            else:
                self._nursery.start_soon(run)

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError as error:
            raise PeerUnreachable("py-libp2p is not running", hint="restart this node") from error
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.exception())
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(scope.cancel)
            raise

    # ---- on the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception:  # noqa: BLE001 - of any kind: this peer has no transport
            _log.exception("py-libp2p ended")
        finally:
            for each in self._sockets:
                each.close()
            self._state.returncode = 0
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for each in self._sockets:
                accepting = trio.SocketListener(trio.socket.from_stdlib_socket(each))
                nursery.start_soon(trio.serve_listeners, self._accept, [accepting])
            self._started.set_result(None)
            await trio.sleep_forever()

    async def _accept(self, stream: trio.SocketStream) -> None:
        """Serve an inbound connection. Trio closes ``stream`` afterwards."""
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:  # gone already
            return
        address = f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"
        subnet = subnet_of(address)
        if self._pending.total() >= MAX_PENDING or self._pending[subnet] >= MAX_PENDING_PER_SUBNET:
            _log.debug("too many handshakes: refused %s", address)
            return
        self._pending[subnet] += 1
        try:
            with trio.fail_after(HANDSHAKE_S):
                connection = await upgrade(stream, self._noise, address, self._make_room)
        except Exception:  # noqa: BLE001 - whatever a stranger sends harms no other connection
            _log.debug("a handshake with %s failed", address, exc_info=True)
            return
        finally:
            self._pending[subnet] -= 1
            if not self._pending[subnet]:
                del self._pending[subnet]
        await self._serve(connection)

    async def _connect(self, peer: PeerId, addresses: Sequence[str], deadline_s: float) -> None:
        errors: list[str] = []

        async def dial(address: str, scope: trio.CancelScope) -> None:
            try:
                connection = await self._reach(peer, address)
            except Exception as error:  # noqa: BLE001 - noise raises what the peer's bytes lead to
                errors.append(f"{address}: {str(error) or type(error).__name__}")
            else:
                self._add(connection)
                scope.cancel()

        with trio.move_on_after(deadline_s):
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    nursery.start_soon(dial, address, nursery.cancel_scope)
        if self._connection(peer) is None:
            raise PeerUnreachable(f"{peer} does not answer: {'; '.join(errors) or 'in time'}")

    async def _reach(self, peer: PeerId, address: str) -> Connection:
        match address.split("/"):
            case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *rest] if (
                not rest or rest == ["p2p", peer]
            ):
                stream = await open_tcp(host, int(port), self._sockets)
            case _:
                raise PeerUnreachable("py-libp2p dials TCP only")
        try:
            return await upgrade(stream, self._noise, address.partition("/p2p/")[0], self._make_room, peer)
        except BaseException:
            stream.socket.close()
            raise

    def _add(self, connection: Connection) -> None:
        self._connections.setdefault(connection.peer, []).append(connection)
        self._nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        """Serve the streams of a connection until it ends."""
        listed = self._connections.setdefault(connection.peer, [])
        if connection not in listed:
            listed.append(connection)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.yamux.start)
                with contextlib.suppress(MuxedConnUnavailable):
                    while True:
                        stream = await connection.yamux.accept_stream()
                        limit = SYSTEM_LIMITS[Resource.INBOUND_STREAMS]
                        if connection.inbound_streams >= MAX_STREAMS or self._streams >= limit:
                            await stream.reset()
                        else:
                            nursery.start_soon(self._serve_stream, connection, stream)
                nursery.cancel_scope.cancel()
        except Exception:  # noqa: BLE001 - of one connection: the others go on
            _log.debug("the connection to %s broke", connection.peer, exc_info=True)
        finally:
            connection.abort()
            connection.yamux.drop()
            listed.remove(connection)
            if not self._returns_memory:
                self._returns_memory = True
                self._nursery.start_soon(self._return_memory)
            if not listed:
                self._connections.pop(connection.peer, None)

    async def _return_memory(self) -> None:
        """Return freed memory to the system after connections have ended.

        Bytes from outsiders lie in pieces of many sizes. The C library would keep the most they
        ever took.
        """
        await trio.sleep(RETURN_S)
        self._returns_memory = False
        return_freed_memory()

    async def _serve_stream(self, connection: Connection, stream: YamuxStream) -> None:
        connection.inbound_streams += 1
        self._streams += 1
        try:
            with trio.fail_after(HANDSHAKE_S):
                protocol_id = await negotiate(stream, self._served)
            if protocol_id == PING:
                await echo(stream)
                return
            ours, theirs = socket_pair()
            try:
                self._loop.call_soon_threadsafe(
                    self._on_stream, ours, connection.peer, protocol_id, connection.address
                )
            except RuntimeError:  # the loop is closed
                ours.close()
            await self._carrier.carry(stream, theirs)
        except (*STREAM_ERRORS, PeerUnreachable) as error:
            _log.debug("a stream of %s ended: %s", connection.peer, error)
        finally:
            connection.inbound_streams -= 1
            self._streams -= 1
            await reset(stream)
            connection.yamux.drop(stream)

    async def _open(self, peer: PeerId, protocol_id: str, theirs: socket.socket, deadline_s: float) -> None:
        try:
            connection = self._connected(peer)
            with trio.move_on_after(deadline_s) as scope:
                stream = await connection.open(protocol_id)
            if scope.cancelled_caught:
                raise PeerUnreachable(f"{peer} did not answer within {deadline_s:g} s")
        except BaseException:
            theirs.close()
            raise
        self._nursery.start_soon(self._carrier.carry, stream, theirs)

    async def _answers(self, peer: PeerId, within_s: float) -> bool:
        connection = self._connected(peer)
        asked_at = trio.current_time()
        with trio.move_on_after(within_s):
            stream = await connection.open(PING)
            try:
                await stream.write(bytes(PING_BYTES))
                await stream.read(PING_BYTES)
            except STREAM_ERRORS:
                return True
            finally:
                await reset(stream)
            return True
        # A busy peer may take longer for the ping than for what it sends on other streams.
        return connection.tcp.received_at > asked_at

    def _connected(self, peer: PeerId) -> Connection:
        if (connection := self._connection(peer)) is None:
            raise PeerUnreachable(f"no connection to {peer}, and no address to dial")
        return connection

    def _connection(self, peer: PeerId) -> Connection | None:
        return next((each for each in list(self._connections.get(peer, [])) if each.is_open), None)

    def _make_room(self, size_bytes: int) -> None:
        """Make room for ``size_bytes`` more in the buffers.

        At the limit, end the connection that holds the most in the largest subnet and peer.
        """
        self._max_buffered_bytes += size_bytes
        if self._max_buffered_bytes <= limits.MAX_BUFFERED_BYTES:
            return
        places = [
            Place(subnet_of(each.address) or each.peer, each.peer, held, (-held,), each)
            for each in self._all_connections()
            if (held := each.yamux.buffered_bytes())
        ]
        self._max_buffered_bytes = size_bytes + sum(place.amount for place in places)
        if self._max_buffered_bytes > limits.MAX_BUFFERED_BYTES:
            victim = Occupancy(places).victim(lambda _: True)
            if victim is not None:
                _log.debug("%s sends more than is read: disconnected", victim.peer)
                victim.abort()

    def _all_connections(self) -> list[Connection]:
        return [each for peers in list(self._connections.values()) for each in list(peers)]
