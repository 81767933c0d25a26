"""A place on the network: libp2p and the DHT of one swarm, under one identity."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.transport.p2pd import P2pdTransport

ANY_PORT = ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
"""For those who dial and are never dialled."""


@dataclass(frozen=True)
class Network:
    """Which swarm, as whom, and how to reach it."""

    swarm: bytes
    identity_path: Path
    """Made with a fresh key if there is no such file."""
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ANY_PORT
    announce: tuple[str, ...] = ()


@asynccontextmanager
async def connect(
    network: Network, *, client_mode: bool = False
) -> AsyncIterator["tuple[P2pdTransport, Directory]"]:
    """Connected while the context is open. In client mode no records are kept for others.

    Raises ``Unreachable`` when bootstraps are named and none answers.
    """
    from swarmnet_protocols.dht import DhtDirectory
    from swarmnet_protocols.identity import Identity
    from swarmnet_protocols.transport.p2pd import P2pdConfig, P2pdTransport

    identity = Identity.load_or_create(network.identity_path)
    config = P2pdConfig(
        network.identity_path,
        listen=network.listen,
        announce=network.announce,
        bootstrap=network.bootstrap,
        require_bootstrap=bool(network.bootstrap),
    )
    async with (
        P2pdTransport.create(config) as transport,
        DhtDirectory.create(
            transport, identity, swarm=network.swarm, bootstrap=network.bootstrap, client_mode=client_mode
        ) as directory,
    ):
        yield transport, directory
