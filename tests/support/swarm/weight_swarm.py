"""Hosts that serve weights to each other over a simulated network, on a loop in a thread of its
own."""

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.fetching.server import Library, WeightServer
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.outline import fetch_outline
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import WEIGHTS
from swarmnet_protocols.timing import Timing
from tests.support.models.model_hub import NAME
from tests.support.network.loop_thread import LoopThread
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport

TIMING = Timing()


@dataclass(frozen=True)
class Host:
    peer: PeerId
    addresses: tuple[str, ...] = ()


@dataclass
class WeightSwarm:
    loop: LoopThread
    network: MemoryNetwork
    hosts: list[Host] = field(default_factory=list)
    transports: list[MemoryTransport] = field(default_factory=list)

    def host(self, library: Library, is_busy: Callable[[], bool] = lambda: False) -> PeerId:
        """A host that serves ``library``."""

        async def start() -> PeerId:
            transport = await self._transport()
            await WEIGHTS.serve(transport, WeightServer(library, is_busy).handle, TIMING)
            self.hosts.append(Host(transport.peer_id))
            return transport.peer_id

        return self.loop.run(start())

    def join(self, model: LocalModel, pieces_hash: bytes | None = None) -> None:
        """Let a model take weights from the hosts. ``pieces_hash``: that of the swarm file."""
        model.parts.peers = self.peers({} if pieces_hash is None else {model.manifest.hash: pieces_hash})

    def peers(self, pieces_hashes: Mapping[bytes, bytes], models: Collection[bytes] = ()) -> SwarmPeers:
        """The hosts, as a newcomer knows them."""

        async def attach() -> SwarmPeers:
            peers = SwarmPeers(pieces_hashes, TIMING, models)
            peers.attach(await self._transport(), self._find)
            return peers

        return self.loop.run(attach())

    def outline(self, model: bytes, pieces_hash: bytes, cache_dir: Path, name: str = NAME) -> None:
        """Fetch the outline of the hub's model, or one of another name, from the hosts."""

        async def fetch() -> None:
            peers = SwarmPeers({model: pieces_hash}, TIMING)
            peers.attach(await self._transport(), self._find)
            await fetch_outline(peers, name, model, cache_dir)

        self.loop.run(fetch())

    async def _find(self, _: bytes) -> Sequence[Host]:
        return self.hosts

    async def _transport(self) -> MemoryTransport:
        transport = self.network.transport(Identity.from_seed(f"{len(self.transports)}".encode()).peer_id)
        await transport.__aenter__()
        self.transports.append(transport)
        return transport


@contextmanager
def weight_swarm(link: LinkProfile = LinkProfile()) -> Iterator[WeightSwarm]:  # noqa: B008 - it is frozen
    """A swarm without hosts; any two members are connected by ``link``."""
    with LoopThread() as loop:
        swarm = WeightSwarm(loop, MemoryNetwork(random.Random(0), link))

        async def end() -> None:
            await asyncio.gather(*(each.__aexit__(None, None, None) for each in swarm.transports))

        try:
            yield swarm
        finally:
            loop.run(end())
