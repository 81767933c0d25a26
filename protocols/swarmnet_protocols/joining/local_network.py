"""Find peers of a swarm in the local network by multicast DNS (RFC 6762, RFC 6763).

With it, a swarm file without addresses is enough.

1. A peer that can be dialled registers an instance of ``_swarmnet._tcp.local.`` under a random
   name, with its addresses in the TXT record (``mdns_record.py``).
2. Every peer of a swarm that allows mDNS browses these instances. A record of its own swarm names a
   found peer.
3. A found peer is used like a bootstrap peer. Every peer contacts each found peer once, even if it
   knows others. So two groups that began apart become one.

Anyone in the local network may send answers. Answers without a record of this swarm are dropped
before any part of them is stored (:class:`_Ear`), so they take no peer's place. Number and size of
records are bounded. Only addresses in networks of this machine's interfaces are dialled. libp2p's
peer id and the membership handshake prove who answers there.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from swarmnet_protocols.errors import NotAuthorised, SwarmnetError, Unreachable
from swarmnet_protocols.joining.mdns_record import MAX_ANNOUNCED, is_local, make_record, read_record
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, persist, within
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import (
    LOOPBACK_NETWORKS,
    Network,
    ip_of,
    own_interfaces,
    shared_networks,
)
from swarmnet_protocols.net.limits.rate_limit import RateLimit
from swarmnet_protocols.net.limits.resource_limits import Rate
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.multiaddr import peer_in

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf._dns import DNSText
    from zeroconf._protocol.incoming import DNSIncoming
    from zeroconf.asyncio import AsyncServiceInfo

    from swarmnet_protocols.directory.dht.directory import DhtDirectory

_log = logging.getLogger(__name__)

SERVICE = "_swarmnet._tcp.local."
MAX_FOUND = 64
"""Most found peers that are remembered, and most that are contacted at the same time. Further ones
are ignored."""
MAX_NAMES = 4
"""Most names of one peer that are remembered. Anyone may send its record again under other
names."""
MAX_RECORDS = 32
"""Most records of a packet. A larger packet is dropped. A peer announces about six."""
SOURCE_PACKETS = RateLimit(200.0, 1000.0)
"""Packets that are read from one address: per second, and in one burst. Each takes about 50
microseconds.

With fewer, peers on one machine are not all heard. With more, one machine takes more of the event
loop."""
MAX_PACKETS = RateLimit(1000.0, 4000.0)
"""Packets that are read from all addresses."""
QUERY_PACKETS = 10
"""Number of packets that a query counts as, because it may be answered."""
RETRY_S = 5.0
"""Seconds before another try with a found peer that did not answer."""
CHECK_S = 3.0
"""Seconds between two comparisons of this machine's addresses with the announced ones."""
FIRST_S = 4.0
"""Seconds that a peer without known peers waits for the first. The first two queries are sent
within 1.2 s."""
FIND_S = 12.0
"""Seconds that a command waits for the first peer, if it can do nothing without one. A responder
repeats a record at most once a second, and packets get lost."""
SETTLE_S = 3.0
"""Seconds to collect further peers after the first. The first peer may be a member that is being
revoked. A peer that has just answered another query waits a second before it repeats its record."""


@dataclass(frozen=True)
class _Place:
    """The addresses and networks of this machine. When they change, everything is announced
    again."""

    networks: tuple[Network, ...]
    interfaces: tuple[str, ...]
    """IPv4 addresses of the interfaces that speak mDNS."""
    announced: tuple[str, ...]


async def _only_find(_: Sequence[str]) -> bool:
    return True


class LocalNetwork:
    """The peers of one swarm in the local network."""

    def __init__(
        self, swarm: bytes, *, listen: Sequence[str] = (), own: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Create the view of one swarm.

        ``own`` returns the current multiaddrs of this peer with its id; empty if nobody dials it.
        ``listen`` are the addresses that it was told to use.
        """
        self._swarm = swarm
        self._own = own
        self._is_on_loopback = bool(listen) and all(
            (ip := ip_of(each)) is not None and ip.is_loopback for each in listen
        )
        """True if this peer listens on loopback only. Then the swarm is on this machine, and
        nothing is sent to its networks."""
        self._found: dict[PeerId, dict[str, tuple[str, ...]]] = {}
        """Peer → name that it announced → addresses."""
        self._meeting: dict[PeerId, asyncio.Task[None]] = {}
        self._has_joined = asyncio.Event()
        self._refusal: NotAuthorised | None = None

    def addresses(self) -> list[str]:
        """Return the addresses of found peers that have not left."""
        return list(dict.fromkeys(each for peer in self._found for each in self._addresses_of(peer)))

    def _addresses_of(self, peer: PeerId) -> list[str]:
        return [each for addresses in self._found.get(peer, {}).values() for each in addresses]

    def with_found(self, others: Sequence[str]) -> Sequence[str]:
        """Return ``others`` and the addresses of found peers."""
        return (*others, *self.addresses())

    async def wait_joined(self, within_s: float) -> None:
        """Return when this peer has joined through a found peer, or after ``within_s``."""
        await within(within_s, self._has_joined.wait())

    @contextlib.asynccontextmanager
    async def join(self, directory: "DhtDirectory", *, needs_peers: bool) -> AsyncIterator[None]:
        """Announce this peer, and join the directory through found peers, while the context is
        open.

        Waits ``FIRST_S`` for the first peer if the directory knows none. If none comes and
        ``needs_peers`` is set, raises ``NotAuthorised`` if a peer refused this one, else
        ``Unreachable``.
        """
        async with self.run(directory.join_through):
            if not directory.knows_peers:
                await self.wait_joined(FIRST_S)
            if needs_peers and not directory.knows_peers:
                raise self._refusal or Unreachable(
                    f"no bootstrap peer answers, and no peer was found in the local network within {FIRST_S:g} s",
                    hint="start a node there, or give the address that a node prints: --bootstrap ADDR",
                )
            yield

    @contextlib.asynccontextmanager
    async def run(self, join: Callable[[Sequence[str]], Awaitable[bool]] = _only_find) -> AsyncIterator[None]:
        """Announce this peer and look for others while the context is open.

        ``join`` is called with the addresses of each found peer. While it returns False, it is
        called again after a pause.
        """
        import zeroconf.asyncio  # noqa: F401 - if it is not installed, the caller is told, not a background task

        async with in_background(persist("mDNS", lambda: self._run(join))):
            yield

    async def _run(self, join: Callable[[Sequence[str]], Awaitable[bool]]) -> None:
        from zeroconf import Error as ZeroconfError

        while True:
            place = self._place()
            if place.interfaces:
                try:
                    async with self._present(place, join):
                        await self._until_moved(place)
                except (OSError, ZeroconfError) as error:
                    _log.warning("mDNS does not work in the local network: %s", error)
            await asyncio.sleep(CHECK_S)

    async def _until_moved(self, place: _Place) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self._place() != place:
                return

    def _place(self) -> _Place:
        interfaces = own_interfaces()
        networks: tuple[Network, ...] = LOOPBACK_NETWORKS
        if not self._is_on_loopback:
            networks = tuple(each for each in shared_networks(interfaces, ()) if not each.is_global)
        own = (host for host, _ in interfaces if ":" not in host)
        spoken = sorted({host for host in own if is_local(f"/ip4/{host}/tcp/0", networks)})
        announced = [each for each in self._own() if is_local(each, networks)]
        return _Place(networks, tuple(spoken), tuple(announced[:MAX_ANNOUNCED]))

    @contextlib.asynccontextmanager
    async def _present(
        self, place: _Place, join: Callable[[Sequence[str]], Awaitable[bool]]
    ) -> AsyncIterator[None]:
        """Browse, and register the addresses of ``place``, while the context is open."""
        from zeroconf import ServiceStateChange
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        def notice(
            zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange"
        ) -> None:
            if state_change is ServiceStateChange.Removed:
                self._forget(name)

        def hear(text: "DNSText") -> bool:
            """Remember the peer of a TXT record, or forget it if it leaves.

            Returns whether the record is of this swarm.
            """
            addresses = read_record(self._swarm, text.text, place.networks)
            if addresses and not text.ttl:
                self._forget(text.name)
            elif addresses and self._remember(text.name, addresses):
                self._start_meeting(peer_in(addresses[0]), join)
            return bool(addresses)

        own_name = f"{secrets.token_hex(20)}.{SERVICE}"
        dns = AsyncZeroconf(interfaces=list(place.interfaces))
        sources = ResourceManager()
        sources.limit_rate(Rate.FRAMES, system=MAX_PACKETS, per_peer=SOURCE_PACKETS)
        browser: AsyncServiceBrowser | None = None
        try:
            await dns.zeroconf.async_wait_for_start()
            for reader in dns.zeroconf.engine.readers:
                ear = _Ear(reader.transport.get_protocol(), sources, hear)
                reader.transport.set_protocol(ear)
            browser = AsyncServiceBrowser(dns.zeroconf, SERVICE, handlers=[notice])
            if place.announced:
                # The name is random, so no other peer can have it and probing is useless.
                info = _service(own_name, place.announced, make_record(self._swarm, place.announced))
                await dns.async_register_service(info, cooperating_responders=True)
            yield
        finally:
            if browser is not None:
                await browser.async_cancel()
            await cancel(*self._meeting.values())
            self._found.clear()
            await dns.async_close()

    def _start_meeting(self, peer: PeerId, join: Callable[[Sequence[str]], Awaitable[bool]]) -> None:
        """Join through a found peer in the background, unless it or too many others are being
        tried."""
        if peer not in self._meeting and len(self._meeting) < MAX_FOUND:
            self._meeting[peer] = asyncio.create_task(self._meet(peer, join), name="mdns peer")
            self._meeting[peer].add_done_callback(lambda _: self._meeting.pop(peer))

    async def _meet(self, peer: PeerId, join: Callable[[Sequence[str]], Awaitable[bool]]) -> None:
        """Try to join through a peer until it answers or has left."""
        _log.info("found %s in the local network", peer)
        while addresses := self._addresses_of(peer):
            try:
                if await join(tuple(addresses)):
                    self._has_joined.set()
                    return
            except SwarmnetError as error:
                if isinstance(error, NotAuthorised):
                    self._refusal = error
                _log.info("%s, found in the local network: %s", peer, error)
            await asyncio.sleep(RETRY_S)

    def _remember(self, name: str, addresses: tuple[str, ...]) -> bool:
        """Remember a peer under one more name. Returns whether it has new addresses."""
        peer = peer_in(addresses[0])
        if peer in map(peer_in, self._own()):
            return False
        if peer not in self._found and len(self._found) >= MAX_FOUND:
            return False
        is_new = not set(addresses) <= set(self._addresses_of(peer))
        names = self._found.setdefault(peer, {})
        names.pop(name, None)
        names[name] = addresses
        if len(names) > MAX_NAMES:
            del names[next(iter(names))]
        return is_new

    def _forget(self, name: str) -> None:
        for peer, names in list(self._found.items()):
            names.pop(name, None)
            if not names:
                del self._found[peer]


class _Ear(asyncio.DatagramProtocol):
    """The filter of one mDNS socket. Only queries, and answers with a record of this swarm, reach
    zeroconf.

    zeroconf would keep the records of any answer, and ask for the addresses of any name.
    """

    def __init__(
        self,
        zeroconf: asyncio.BaseProtocol,
        sources: ResourceManager,
        hear: Callable[["DNSText"], bool],
    ) -> None:
        """Create the filter. ``hear`` takes each TXT record and returns whether it is of this
        swarm.
        """
        self._zeroconf = cast(asyncio.DatagramProtocol, zeroconf)
        self._sources = sources
        self._hear = hear

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        from zeroconf._protocol.incoming import DNSIncoming

        now = loop_time()
        source = self._sources.peer(str(addr[0]), now)
        if source.charge(Rate.FRAMES, 0, now):
            return
        packet = DNSIncoming(data)
        source.charge(Rate.FRAMES, QUERY_PACKETS if packet.is_query() else 1, now)
        if packet.valid and (packet.is_query() or self._is_wanted(packet)):
            self._zeroconf.datagram_received(data, addr)

    def _is_wanted(self, packet: "DNSIncoming") -> bool:
        """Tell whether an answer has a record of this swarm."""
        from zeroconf._dns import DNSText

        if packet.num_answers + packet.num_authorities + packet.num_additionals > MAX_RECORDS:
            return False
        heard = [self._hear(each) for each in packet.answers() if isinstance(each, DNSText)]
        return any(heard)

    def error_received(self, exc: Exception) -> None:
        self._zeroconf.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._zeroconf.connection_lost(exc)


def _service(name: str, announced: Sequence[str], record: bytes) -> "AsyncServiceInfo":
    from zeroconf.asyncio import AsyncServiceInfo

    # Readers of mDNS want the DNS records of host and port. Peers read only the TXT record.
    hosts = dict.fromkeys(str(ip_of(each)) for each in announced)
    port = int(announced[0].split("/")[4])
    return AsyncServiceInfo(SERVICE, name, port, properties=record, parsed_addresses=list(hosts))


async def find_addresses(swarm: bytes, *, within_s: float = FIND_S) -> list[str]:
    """Return the addresses of peers of ``swarm`` found in the local network.

    The search ends ``SETTLE_S`` after the first peer, or after ``within_s`` without any.
    """

    local = LocalNetwork(swarm)
    async with local.run():
        await local.wait_joined(within_s)
        if local.addresses():
            await asyncio.sleep(SETTLE_S)
        return local.addresses()
