"""Two peers on every kind of transport."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import pytest

from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId, ProtocolSpec, Transport
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.pylibp2p.transport import PyLibp2pTransport, prepare_libp2p
from swarmnet_protocols.reachability.relay import Relay
from swarmnet_protocols.reachability.reservations import Reservations
from swarmnet_protocols.reachability.routed_transport import RoutedTransport
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.support.network import virtual_time
from tests.support.network.loop_thread import LoopThread
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.private_swarm import PrivateSwarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
LOOPBACK_QUIC = ("/ip4/127.0.0.1/udp/0/quic-v1",)

SLOW_LABS = ("p2pd", "quic", "circuit", "libp2p", "libp2p_to_p2pd", "p2pd_to_libp2p", "libp2p_circuit")

Scenario = Callable[[Transport, Transport], Awaitable[None]]


class Lab(Protocol):
    link: LinkLimiter
    """The limiter of the second peer's network link."""

    def run(self, scenario: Scenario) -> None:
        """Run ``scenario`` with two peers."""


class MemoryLab:
    def __init__(self) -> None:
        self.link = LinkLimiter()

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            network = MemoryNetwork(
                random.Random(0), LinkProfile(delay_s=0.02, jitter_s=0.01, bytes_per_s=1e8)
            )
            alice, bob = (Identity.from_seed(seed).peer_id for seed in (b"alice", b"bob"))
            async with network.transport(alice) as a, network.transport(bob) as b:
                b.link = self.link
                await scenario(a, b)

        virtual_time.run(main())


class GuardedLab:
    """Two members of a private swarm. A dialler makes the handshake first."""

    def __init__(self) -> None:
        self.link = LinkLimiter()

    def run(self, scenario: Scenario) -> None:
        async def main() -> None:
            network = MemoryNetwork(
                random.Random(0), LinkProfile(delay_s=0.02, jitter_s=0.01, bytes_per_s=1e8)
            )
            swarm = PrivateSwarm()
            async with (
                swarm.member(network, "alice", ANY_ROLE) as alice,
                swarm.member(network, "bob", ANY_ROLE) as bob,
            ):
                bob.raw.link = self.link
                await scenario(alice.transport, bob.transport)

        virtual_time.run(main())


class P2pdLab:
    """Two p2pd processes that serve all tests of a module."""

    def __init__(self, loop: LoopThread, directory: Path, listen: tuple[str, ...] = LOOPBACK) -> None:
        self.link = LinkLimiter()
        self.loop = loop
        self._directory = directory
        self._listen = listen
        self._stack = contextlib.AsyncExitStack()
        self._pair: tuple[P2pdTransport, P2pdTransport] | None = None

    async def _peer(self, name: str, link: LinkLimiter) -> P2pdTransport:
        config = P2pdConfig(self._directory / name, listen=self._listen, link=link)
        return await self._stack.enter_async_context(P2pdTransport.create(config))

    async def pair(self) -> tuple[P2pdTransport, P2pdTransport]:
        if self._pair is None:
            self._pair = (await self._peer("a", LinkLimiter()), await self._peer("b", self.link))
        return self._pair

    def run(self, scenario: Callable[[P2pdTransport, P2pdTransport], Awaitable[None]]) -> None:
        async def main() -> None:
            await scenario(*await self.pair())

        self.loop.run(main())

    @classmethod
    @contextlib.contextmanager
    def running(cls, directory: Path, *options: Any) -> Iterator[Self]:
        """A lab on a loop of its own, which is closed at the end."""
        with LoopThread() as loop:
            lab = cls(loop, directory, *options)
            try:
                yield lab
            finally:
                loop.run(lab._stack.aclose())


class PyLibp2pLab(P2pdLab):
    """Both peers over py-libp2p, or only the named one."""

    def __init__(self, loop: LoopThread, directory: Path, names: str = "ab") -> None:
        super().__init__(loop, directory)
        self._names = names

    async def _peer(self, name: str, link: LinkLimiter) -> P2pdTransport:
        if name not in self._names:
            return await super()._peer(name, link)
        config = P2pdConfig(self._directory / name, listen=self._listen, link=link)
        return await self._stack.enter_async_context(PyLibp2pTransport.create(config))


class OnlyRelayed(RoutedTransport):
    """A peer that announces no address of its own, so that others reach it only through relays."""

    def own_addresses(self) -> Sequence[str]:
        return ()


class CircuitLab(P2pdLab):
    """The first peer reaches the second one through a relay only."""

    async def trio(self) -> tuple[RoutedTransport, RoutedTransport, Relay]:
        """Both peers and the relay."""
        if self._trio is None:
            identities = [Identity.load_or_create(self._directory / name) for name in ("a", "b")]
            a, b = [
                OnlyRelayed(direct, identity)
                for direct, identity in zip(await self.pair(), identities, strict=True)
            ]
            third = await self._peer("relay", LinkLimiter())
            relay = Relay(third, lambda: True, LinkLimiter())
            await relay.serve()

            async def candidates() -> Sequence[str]:
                return third.addresses()

            reservations = Reservations(b, candidates, b.direct.address_of, b.accept_circuit)
            b.reserve_at_relays(reservations)
            keeping = asyncio.create_task(reservations.run())
            self._stack.push_async_callback(cancel, keeping)
            assert await reservations.wait_for_one(5.0)
            self._trio = a, b, relay
        return self._trio

    def run(self, scenario: Scenario) -> None:  # type: ignore[override]
        async def main() -> None:
            a, b, _ = await self.trio()
            await scenario(a, b)
            assert not await a.direct.is_connected(b.peer_id)

        self.loop.run(main())

    _trio: tuple[RoutedTransport, RoutedTransport, Relay] | None = None


class PyLibp2pCircuitLab(CircuitLab):
    """All three peers over py-libp2p."""

    async def _peer(self, name: str, link: LinkLimiter) -> P2pdTransport:
        config = P2pdConfig(self._directory / name, listen=self._listen, link=link)
        return await self._stack.enter_async_context(PyLibp2pTransport.create(config))


@contextlib.asynccontextmanager
async def peer_process(
    directory: Path, protocol: ProtocolSpec
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process of a peer that echoes, and its address. It is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("peer_process.py")),
        str(directory),
        protocol.id,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture(scope="module")
def p2pd_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[P2pdLab]:
    with P2pdLab.running(tmp_path_factory.mktemp("p2pd")) as lab:
        yield lab


@pytest.fixture(scope="module")
def quic_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[P2pdLab]:
    with P2pdLab.running(tmp_path_factory.mktemp("quic"), LOOPBACK_QUIC) as lab:
        yield lab


@pytest.fixture(scope="module")
def libp2p_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PyLibp2pLab]:
    with PyLibp2pLab.running(tmp_path_factory.mktemp("libp2p"), "ab") as lab:
        yield lab


@pytest.fixture(scope="module")
def libp2p_to_p2pd_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PyLibp2pLab]:
    with PyLibp2pLab.running(tmp_path_factory.mktemp("libp2p"), "a") as lab:
        yield lab


@pytest.fixture(scope="module")
def p2pd_to_libp2p_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PyLibp2pLab]:
    with PyLibp2pLab.running(tmp_path_factory.mktemp("libp2p"), "b") as lab:
        yield lab


@pytest.fixture(scope="module")
def circuit_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CircuitLab]:
    with CircuitLab.running(tmp_path_factory.mktemp("circuit")) as lab:
        yield lab


@pytest.fixture(scope="module")
def libp2p_circuit_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CircuitLab]:
    """Its peers close one after another. Streams of the first one wait until the others close them:
    in tests not for ten seconds."""
    prepare_libp2p()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnet_protocols.net.pylibp2p.carrying.CLOSE_S", 0.5)
        with PyLibp2pCircuitLab.running(tmp_path_factory.mktemp("libp2p_circuit")) as lab:
            yield lab


@pytest.fixture(
    params=[
        "memory",
        "guarded",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LABS),
    ]
)
def lab(request: pytest.FixtureRequest) -> Lab:
    if request.param == "memory":
        return MemoryLab()
    if request.param == "guarded":
        return GuardedLab()
    lab: P2pdLab = request.getfixturevalue(f"{request.param}_lab")
    return lab


@pytest.fixture
def protocol(request: pytest.FixtureRequest) -> ProtocolSpec:
    """A protocol id of this test's own, as the peers serve all tests."""
    return ProtocolSpec(
        f"/test/{request.node.name}/{next(_numbers)}",
        max_header_bytes=1 << 10,
        max_payload_bytes=4 << 20,
        roles=ANY_ROLE,
        served_by=ANY_ROLE,
    )


_numbers = itertools.count()

UNKNOWN_PEER: PeerId = Identity.from_seed(b"unknown").peer_id
