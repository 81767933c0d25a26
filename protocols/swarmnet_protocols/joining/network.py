"""Join a swarm: transport, handshakes, directory and admission under one identity.

:func:`connect` builds these layers, lowest first:

1. p2pd (or py-libp2p), the transport;
2. the membership handshake;
3. the directory;
4. the admission protocol;
5. the guarded transport, which carries every other protocol.

``errands.py`` has the short connections of peers that are not members.
"""

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from swarmnet_protocols.machine.aio import in_background, persist
from swarmnet_protocols.machine.files import scratch_folder
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.config import P2pdConfig

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.directory.dht.directory import DhtDirectory
    from swarmnet_protocols.joining.own_key import OwnerFiles
    from swarmnet_protocols.joining.pairing import House
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.net.p2pd.transport import P2pdTransport
    from swarmnet_protocols.wire import membership_pb2 as pb

_log = logging.getLogger(__name__)

ANY_PORT = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
ANY_PORT_IPV6 = ("/ip6/::/tcp/0", "/ip6/::/udp/0/quic-v1")
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
"""Listen address of a peer that only dials."""
_CHOSEN = {"transport": "auto"}
REMEMBER_FIRST_S = 10.0
"""Seconds until the peers of the swarm are stored for the first time. With more, a process that is
killed early has stored none."""
REMEMBER_S = 600.0
"""Seconds between two later stores of the peers of the swarm."""
MAX_REMEMBERED = 16
"""Most peers whose addresses are stored."""
REMEMBERED_EACH = 2
"""Most addresses of one peer that are stored: one for each transport."""


def choose_transport(name: str) -> None:
    """Use ``p2pd`` or ``libp2p`` in this process from now on. ``auto`` is p2pd where its binary
    exists.
    """
    _CHOSEN["transport"] = name


def transport_class() -> "type[P2pdTransport]":
    """Return the transport class of this process. Raises ``ConfigError`` for an unknown choice."""
    from swarmnet_protocols.errors import ConfigError
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind
    from swarmnet_protocols.net.p2pd.process import binary
    from swarmnet_protocols.net.p2pd.transport import P2pdTransport

    name = _CHOSEN["transport"]
    if name == "auto":
        prepare_hivemind()
        name = "p2pd" if binary().is_file() else "libp2p"
    if name == "p2pd":
        return P2pdTransport
    if name == "libp2p":
        from swarmnet_protocols.net.pylibp2p.transport import PyLibp2pTransport

        return PyLibp2pTransport
    raise ConfigError(f"there is no transport {name!r}", hint="use p2pd, libp2p or auto")


def any_port() -> tuple[str, ...]:
    """Return listen addresses for any port of every interface: IPv4, and IPv6 where this machine
    has it.

    Behind a provider's NAT, IPv6 is often the only way in.
    """
    return (*ANY_PORT, *ANY_PORT_IPV6) if _has_ipv6() else ANY_PORT


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def client_listen(bootstrap: Sequence[str]) -> tuple[str, ...]:
    """Return the listen addresses of a client: any port, or loopback if the swarm is on loopback.

    A client listens because hole punching starts from a port that listens.
    """
    from swarmnet_protocols.net.dialling import is_loopback

    return LOOPBACK if bootstrap and all(map(is_loopback, bootstrap)) else any_port()


@dataclass(frozen=True)
class Trust:
    """The hosts that a client may use. The user or the swarm file names them."""

    hosts: frozenset[PeerId] = frozenset()
    """The only hosts to use; empty: all."""
    first_and_last: frozenset[PeerId] = frozenset()
    """Preferred first and last hops, which can read prompt and answer; empty: the client picks
    guards."""
    guards_folder: Path | None = None
    """Folder for the guards that the client picked; None: it forgets them with the process."""


@dataclass(frozen=True)
class Network:
    """The swarm to join, and the peer that joins it."""

    rules: Rules
    peer: P2pdConfig
    """This peer. Its ``bootstrap`` comes from the swarm file and from the owner. Its ``named`` are
    the addresses in ``known`` that the owner gave."""
    is_anonymous: bool = False
    """True if each connection has a new identity, instead of the one of ``peer``."""
    may_begin: bool = False
    """True if this peer may begin the swarm again when no other peer of it answers."""
    known: tuple[str, ...] = ()
    """Addresses from earlier connections. They need not answer. Addresses that the owner did not
    give must pass ``net/dialling.py``."""
    remember: Callable[[Sequence[str]], None] | None = None
    """Stores addresses of peers in the swarm, to become ``known`` next time. Raises ``OSError``."""
    mdns: bool = False
    """True if this peer also looks for peers in the local network, and announces itself there."""
    membership_folder: Path | None = None
    """Folder of the certificate and the revocation lists. None: memory only."""
    adopt: Callable[[bytes], Rules] | None = None
    """Stores a newer swarm file and returns its rules: see ``Membership``."""
    swarm_file: Callable[[], bytes] | None = None
    """Reads the newest swarm file on disk: see ``Membership``."""
    owner: "OwnerFiles | None" = None
    """The files of the swarm's owner on this machine; None without any."""
    machine: "Callable[[], pb.Machine] | None" = None
    """Makes the message that names the node and the client of this machine in renewals."""
    house: "House | None" = None
    """Pairs newcomers in the local network by a code; None: see ``pairing.py``."""
    trust: Trust = Trust()
    name: str = ""
    """The name of this node that everybody sees; empty without one."""


@asynccontextmanager
async def connect(
    network: Network, *, client_mode: bool = False
) -> AsyncIterator["tuple[Transport, Directory]"]:
    """Join a swarm while the context is open. Yields the guarded transport and the directory.

    In client mode this peer stores no records for others, and several processes may use its
    identity at once. With ``mdns`` a peer in the local network may answer instead of a bootstrap
    peer.

    Raises:

    - ``ConfigError`` for an identity that another process uses.
    - ``NotAuthorised`` when this peer is not a member of the swarm.
    - ``Unreachable`` when no peer of the swarm answers. A peer that the swarm file names, or that
      ``may_begin``, may start alone. Without bootstrap addresses, any peer but a client may.
    """
    from swarmnet_protocols.directory.dht.directory import DhtDirectory
    from swarmnet_protocols.directory.relay_announcements import RelayFinder, relay_announcer
    from swarmnet_protocols.errors import NotAuthorised
    from swarmnet_protocols.joining.admission import Admissions
    from swarmnet_protocols.joining.local_network import LocalNetwork
    from swarmnet_protocols.machine.clock import wall_clock
    from swarmnet_protocols.membership.guarded_transport import GuardedTransport
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.net.p2pd.transport import no_bootstrap_peer
    from swarmnet_protocols.net.protocol_ids import PROBE
    from swarmnet_protocols.reachability.detection import Reachability
    from swarmnet_protocols.reachability.dial_back import Probes
    from swarmnet_protocols.reachability.hole_punching import HolePunching, describe
    from swarmnet_protocols.reachability.relay import Relay
    from swarmnet_protocols.reachability.routed_transport import RoutedTransport
    from swarmnet_protocols.timing import Timing

    async with AsyncExitStack() as stack:
        peer = network.peer
        if network.is_anonymous:
            scratch = stack.enter_context(scratch_folder())
            peer = replace(peer, identity_path=scratch / "identity.key")
        identity = Identity.load_or_create(peer.identity_path)
        membership = Membership(
            network.rules,
            identity.peer_id,
            wall_clock,
            folder=network.membership_folder,
            adopt=network.adopt,
            swarm_file=network.swarm_file,
        )
        if network.owner is not None:
            network.owner.certify(membership)
        membership.check()
        others = tuple(each for each in peer.bootstrap if not each.endswith(f"/p2p/{identity.peer_id}"))
        may_begin = others != peer.bootstrap or network.may_begin
        needs_peers = not may_begin and (bool(others) or client_mode)
        peer = replace(
            peer,
            bootstrap=others,
            # With mDNS or known addresses, another peer may answer in place of a bootstrap peer.
            require_bootstrap=needs_peers and not network.mdns and not network.known,
            only_dials=client_mode,
        )
        raw = await stack.enter_async_context(transport_class().create(peer))
        others = tuple(dict.fromkeys((*others, *permitted(raw, network.known))))
        routed = RoutedTransport(
            raw,
            identity,
            guarded=lambda: guarded,
            punch=lambda other: punching.begin(other),  # noqa: PLW0108 - it is made below
            describe_reach=lambda: describe(reachability, punching, relay, routed),
        )
        handshakes = await stack.enter_async_context(
            Handshakes(routed, membership, Timing(), network.name).running()
        )
        guarded = GuardedTransport(routed, handshakes)
        reachability = Reachability(routed, guarded, others, wall_clock, raw.address_of, raw.was_dialled)
        relay = Relay(guarded, lambda: reachability.is_open, peer.link)
        punching = HolePunching(routed, guarded, reachability)
        await punching.serve()
        stack.push_async_callback(punching.close)
        if not client_mode:
            with suppress(NotAuthorised):  # an observer has no role that may serve these
                await PROBE.serve(guarded, Probes(raw.addresses_of, wall_clock, raw.networks).answer)
                await relay.serve()
            stack.push_async_callback(reachability.close)
            await reachability.find_out()
        if client_mode:
            local = LocalNetwork(membership.rules.swarm)
        else:
            local = LocalNetwork(membership.rules.swarm, listen=peer.listen, own=raw.addresses)
        bootstrap = partial(local.with_found, others)
        directory = await stack.enter_async_context(
            DhtDirectory.create(
                routed,
                handshakes,
                identity,
                bootstrap=bootstrap,
                client_mode=client_mode,
                is_reachable=reachability.is_open,
            )
        )
        if not client_mode:
            finder = RelayFinder(directory, random.Random(), lambda: reachability.relays_held)
            running = reachability.run(finder.find, directory.set_reachable)
            announcer = relay_announcer(
                directory,
                random.Random(),
                lambda: routed.addresses() if relay.relays else (),
                reachability.answers,
            )
            announcing = persist("the announcement as a relay", announcer.run)
            await stack.enter_async_context(in_background(running, announcing))
        if network.mdns:
            await stack.enter_async_context(local.join(directory, needs_peers=needs_peers))
        elif needs_peers and network.known and not directory.knows_peers:
            raise no_bootstrap_peer(others)
        if network.remember is not None:
            remembering = partial(_remember, raw, directory, network.remember)
            stack.callback(remembering)
            keeping = persist("the list of known peers", lambda: _repeat(remembering))
            await stack.enter_async_context(in_background(keeping))
        admissions = Admissions(
            routed,
            handshakes,
            directory,
            bootstrap=bootstrap,
            owner=network.owner,
            machine=network.machine() if network.machine else None,
        )
        await stack.enter_async_context(admissions.running())
        if network.house is not None:
            from swarmnet_protocols.joining.pairing import open_door

            door = open_door(network.house, routed, raw, peer.listen)
            await stack.enter_async_context(door)
        yield guarded, directory


def permitted(transport: "P2pdTransport", addresses: Sequence[str]) -> Iterator[str]:
    """Yield the addresses that this peer may dial, without its own."""
    from swarmnet_protocols.net.p2pd.transport import peer_of

    for each in addresses:
        peer = peer_of(each)
        if peer != transport.peer_id:
            suffix = f"/p2p/{peer}"
            yield from (
                address.removesuffix(suffix) + suffix for address in transport.permitted(peer, [each])
            )


def _remember(
    transport: "P2pdTransport", directory: "DhtDirectory", remember: Callable[[Sequence[str]], None]
) -> None:
    """Store up to two addresses of each peer in the routing table, for the next start."""
    addresses_to_keep = [
        each
        for addresses in islice(directory.peers().values(), MAX_REMEMBERED)
        for each in islice(permitted(transport, addresses), REMEMBERED_EACH)
    ]
    if addresses_to_keep:
        try:
            remember(addresses_to_keep)
        except OSError as error:
            _log.warning("the list of known peers cannot be written: %s", error.strerror)


async def _repeat(remembering: Callable[[], None]) -> NoReturn:
    await asyncio.sleep(REMEMBER_FIRST_S)
    while True:
        remembering()
        await asyncio.sleep(REMEMBER_S)
