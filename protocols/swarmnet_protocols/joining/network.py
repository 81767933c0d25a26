"""A place on the network: libp2p and the DHT of one swarm, under one identity, behind a door."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.process import MAX_MEMORY_BYTES

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.joining.admission import IssuerConfig
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.net.rate_limit import LinkLimiter

ANY_PORT = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
"""For those who dial and are never dialled."""


@dataclass(frozen=True)
class Trust:
    """Which hosts a client uses, as its user or the swarm file names them."""

    hosts: frozenset[PeerId] = frozenset()
    """No others are used; none named: all are."""
    first_and_last: frozenset[PeerId] = frozenset()
    """Preferred at the ends of a chain, where prompt and answer can be read; none named: guards that the client picks itself."""
    guards_folder: Path | None = None
    """Where the client keeps these; without it, they last as long as the process."""


@dataclass(frozen=True)
class Network:
    """Which swarm, as whom, and how to reach it."""

    rules: Rules
    identity_path: Path | None = None
    """Made with a fresh key if there is no such file. Without a path: a fresh identity each time."""
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ANY_PORT
    announce: tuple[str, ...] = ()
    membership_folder: Path | None = None
    """Where the certificate of this identity is, and what is revoked is kept; without it, nothing is."""
    adopt: Callable[[bytes], Rules] | None = None
    """Keeps a newer swarm file that an issuer hands out, and gives its rules: see ``Membership.adopt``."""
    swarm_file: Callable[[], bytes] | None = None
    """Reads the newest one that is kept: see ``Membership.swarm_file``."""
    issuer: "IssuerConfig | None" = None
    """What makes this peer let others in."""
    trust: Trust = Trust()
    link: "LinkLimiter | None" = None
    """Counts what goes over the network, and holds it back to the rates it is set to."""
    max_p2pd_bytes: int = MAX_MEMORY_BYTES
    """See ``P2pdConfig``, as for ``step_aside``."""
    step_aside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext


@asynccontextmanager
async def connect(
    network: Network, *, client_mode: bool = False
) -> AsyncIterator["tuple[Transport, Directory]"]:
    """Connected while the context is open. In client mode no records are kept for others, and the identity may be shared.

    Raises ``ConfigError`` for an identity that another process uses, ``NotAuthorised`` when this peer is not, or no more, a member of the swarm, and ``Unreachable`` when bootstraps are
    named, this peer is none of them, and none answers.
    """
    from swarmnet_protocols.directory.dht import DhtDirectory
    from swarmnet_protocols.errors import NotAuthorised
    from swarmnet_protocols.joining.admission import Admissions
    from swarmnet_protocols.machine.clock import wall_clock
    from swarmnet_protocols.membership.guarded_transport import GuardedTransport
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.net.p2pd.transport import P2pdConfig, P2pdTransport
    from swarmnet_protocols.net.probes import Probes
    from swarmnet_protocols.net.protocol_ids import PROBE
    from swarmnet_protocols.net.rate_limit import LinkLimiter
    from swarmnet_protocols.timing import Timing

    async with AsyncExitStack() as stack:
        identity_path = network.identity_path
        if identity_path is None:
            scratch = stack.enter_context(TemporaryDirectory(prefix="swarmnet-"))  # 0700
            identity_path = Path(scratch, "identity.key")
        identity = Identity.load_or_create(identity_path)
        membership = Membership(network.rules, identity.peer_id, wall_clock, folder=network.membership_folder)
        membership.adopt, membership.swarm_file = network.adopt, network.swarm_file
        if network.issuer is not None:
            network.issuer.certify(membership)
        membership.check()
        others = tuple(each for each in network.bootstrap if not each.endswith(f"/p2p/{identity.peer_id}"))
        config = P2pdConfig(
            identity_path,
            listen=network.listen,
            announce=network.announce,
            bootstrap=others,
            # Where others begin must be able to start when nobody else is there.
            require_bootstrap=bool(others) and others == network.bootstrap,
            link=network.link or LinkLimiter(),
            only_dials=client_mode,
            max_daemon_bytes=network.max_p2pd_bytes,
            step_aside=network.step_aside,
        )
        raw = await stack.enter_async_context(P2pdTransport.create(config))
        door = await stack.enter_async_context(Handshakes.run(raw, membership, Timing()))
        directory = await stack.enter_async_context(
            DhtDirectory.create(raw, door, identity, bootstrap=others, client_mode=client_mode)
        )
        admissions = Admissions.run(raw, membership, directory, bootstrap=others, issuer=network.issuer)
        await stack.enter_async_context(admissions)
        guarded = GuardedTransport(raw, door)
        if not client_mode:
            with suppress(NotAuthorised):  # an observer has no role to serve anybody in
                await guarded.serve(PROBE, Probes(raw.addresses_of, wall_clock).answer)
        yield guarded, directory
