"""Real peers of a DHT, open or private, and records that a stranger stores raw."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from swarmnet_protocols.directory.dht.directory import DhtDirectory
from swarmnet_protocols.directory.records import Record, dht_keys, seal
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.certificates import Admittance, issue
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire.roles import ANY_ROLE, Role
from tests.support.network.loop_thread import LoopThread

from .conftest import LOOPBACK

SWARM = bytes(32)
MALLORY = Identity.from_seed(b"mallory")
AUTHORITY = Identity.from_seed(b"authority")


@dataclass(frozen=True)
class Peer:
    identity: Identity
    transport: P2pdTransport
    directory: DhtDirectory

    @property
    def node(self) -> Any:
        return self.directory._node


def hivemind_id(peer: Peer) -> Any:
    from hivemind.p2p import PeerID

    return PeerID.from_base58(peer.identity.peer_id)


OPEN = Rules(SWARM, Admission.OPEN)
PRIVATE = Rules(SWARM, Admission.CERTIFICATE, keys={AUTHORITY.public_key: inf})


@contextlib.asynccontextmanager
async def join(
    path: Path,
    bootstrap: tuple[str, ...] = (),
    *,
    client_mode: bool = False,
    is_reachable: bool = True,
    rules: Rules = OPEN,
    roles: frozenset[Role] = ANY_ROLE,
) -> AsyncIterator[Peer]:
    """A peer. In a private swarm it has a certificate for ``roles``, unless these are empty."""
    identity = Identity.load_or_create(path)
    membership = Membership(rules, identity.peer_id, wall_clock)
    if rules is PRIVATE and roles:
        membership.replace_certificate(certify(identity.peer_id, roles))
    config = P2pdConfig(path, listen=LOOPBACK, bootstrap=bootstrap)
    async with (
        P2pdTransport.create(config) as transport,
        Handshakes(transport, membership, Timing()).running() as handshakes,
        DhtDirectory.create(
            transport,
            handshakes,
            identity,
            bootstrap=lambda: bootstrap,
            client_mode=client_mode,
            is_reachable=is_reachable,
        ) as directory,
    ):
        yield Peer(identity, transport, directory)


def certify(peer: PeerId, roles: frozenset[Role]) -> bytes:
    return issue(Admittance(peer, roles), swarm=SWARM, key=AUTHORITY, now=wall_clock(), lifetime_s=3600)


@contextlib.asynccontextmanager
async def join_five(directory: Path, rules: Rules) -> AsyncIterator[list[Peer]]:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(join(directory / "0", rules=rules))
        bootstrap = tuple(first.transport.addresses())
        others = [
            await stack.enter_async_context(join(directory / str(number), bootstrap, rules=rules))
            for number in range(1, 5)
        ]
        yield [first, *others]


class Five:
    def __init__(self, loop: LoopThread, peers: list[Peer]) -> None:
        self._loop = loop
        self._peers = peers

    def run(self, scenario: Callable[[list[Peer]], Awaitable[None]]) -> None:
        async def main() -> None:
            await scenario(self._peers)

        self._loop.run(main())


@contextlib.contextmanager
def running_five(directory: Path, rules: Rules) -> Iterator[Five]:
    with LoopThread() as loop:
        context = join_five(directory, rules)
        peers = loop.run(context.__aenter__())
        try:
            yield Five(loop, peers)
        finally:
            loop.run(context.__aexit__(None, None, None))


def rules_of(peers: list[Peer]) -> Rules:
    return peers[0].directory._handshakes.membership.rules


async def bodies(peer: Peer, topic: str) -> set[bytes]:
    return {record.body for record in await peer.directory.lookup(topic)}


def mallorys(**changes: Any) -> Record:
    certificate = certify(MALLORY.peer_id, ANY_ROLE)
    record = Record(SWARM, "target", MALLORY.public_key, 1, round(wall_clock() + 60, 3), b"evil", certificate)
    return replace(record, **changes)


@dataclass(frozen=True)
class RawStore:
    """The arguments of hivemind's own store call; honest unless changed."""

    record: Record
    sealed: bytes
    key: bytes
    subkey: Any
    expires_at: float

    @classmethod
    def of(cls, record: Record) -> "RawStore":
        sealed = seal(MALLORY, record)
        return cls(record, sealed, dht_keys(record.swarm, record.topic)[0], record.signer, record.expires_at)


async def raw_store(sender: Peer, target: Peer, store: RawStore) -> list[bool] | None:
    from hivemind.dht.routing import DHTID

    answer: list[bool] | None = await sender.node.protocol.call_store(
        hivemind_id(target),
        [DHTID.generate(source=store.key)],
        [msgpack.packb(store.sealed)],
        store.expires_at,
        subkeys=[store.subkey],
    )
    return answer
