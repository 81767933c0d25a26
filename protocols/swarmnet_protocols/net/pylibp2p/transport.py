"""The transport over py-libp2p, with the streams, limits, dialling rules and wire ids of p2pd."""

import contextlib
import socket
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path

from google.protobuf import descriptor_pool

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.aio import in_background, persist
from swarmnet_protocols.machine.identity_lock import identity_in_use
from swarmnet_protocols.machine.lean_imports import prepare_package
from swarmnet_protocols.machine.platform import allow_open_files
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.daemon import pack_multiaddr, prepare_hivemind
from swarmnet_protocols.net.p2pd.process import OPEN_FILES
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.pipe import adopt

_PACKAGES = ("libp2p", "libp2p.security", "libp2p.transport")
"""Packages whose ``__init__`` imports unused parts: TLS, QUIC, WebSocket, pubsub, relays."""


def prepare_libp2p() -> None:
    """Import the parts of py-libp2p that are used. Raises ``ConfigError`` if it is not
    installed."""
    try:
        for package in _PACKAGES:
            prepare_package(package)
    except ConfigError as error:
        raise ConfigError(
            "py-libp2p is not installed",
            hint="pip install '.[libp2p]' && pip install --no-deps libp2p==0.8.1",
        ) from error
    # hivemind and py-libp2p both declare crypto.pb.KeyType, and a descriptor pool accepts a name
    # once.
    own_pool = descriptor_pool.DescriptorPool()
    default_pool, descriptor_pool.Default = descriptor_pool.Default, lambda: own_pool
    try:
        import_module("swarmnet_protocols.net.pylibp2p.host")
    finally:
        descriptor_pool.Default = default_pool


class PyLibp2pTransport(P2pdTransport):
    """A libp2p peer without a child process. Made by :meth:`create`."""

    @classmethod
    @contextlib.asynccontextmanager
    async def create(cls, config: P2pdConfig) -> AsyncIterator["PyLibp2pTransport"]:
        """Run a transport as ``P2pdTransport.create`` does.

        It listens on TCP only and ignores other addresses of ``config.listen``.
        """
        prepare_hivemind()
        prepare_libp2p()
        from swarmnet_protocols.net.pylibp2p.host import PyLibp2p

        identity = Identity.load_or_create(config.identity_path)
        for address in (*config.listen, *config.announce):
            pack_multiaddr(address)
        allow_open_files(2 * OPEN_FILES)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(identity_in_use(config.identity_path, alone=not config.only_dials))

            def accept(ours: socket.socket, peer: PeerId, protocol_id: str, address: str) -> None:
                async def handle() -> None:
                    await transport.endpoint.handle(await adopt(ours), peer, protocol_id, address)

                transport.endpoint.accept(handle, ours.close)

            host: PyLibp2p = PyLibp2p(identity.peer_id, config.announce, accept)
            transport = cls(identity.peer_id, host, Path(), config)
            await host.start(identity.seed(), config.listen)
            try:
                await transport._refresh_addresses()
                transport.endpoint.start(persist("the supervision of py-libp2p", transport._supervise_daemon))
                await transport._bootstrap(config)
                yield transport
            finally:
                await transport.endpoint.close()
                await host.stop()

    async def _supervise_daemon(self) -> None:
        """Enforce the limits on connections, and refresh the addresses.

        There is no process to restart. At the memory limit, peers are disconnected.
        """
        async with in_background(persist("the refresh of addresses", self._refresh_addresses_periodically)):
            while await self._connection_guard.run():
                pass
