"""Probes: only the asker itself is dialled, only libp2p counts as an answer, and clocks are
compared."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from swarmnet_protocols.errors import ProtocolViolation, StreamEnded
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import LOOPBACK_NETWORKS, Network
from swarmnet_protocols.net.limits.resource_limits import PEER_LIMITS, SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.protocol_ids import PROBE
from swarmnet_protocols.reachability import dial_back
from swarmnet_protocols.reachability.dial_back import (
    HELLO,
    MAX_PORTS,
    Probed,
    Probes,
    direct_address,
    probe,
    speaks_libp2p,
)
from tests.defences import defence, replacing, yes
from tests.support.attacks.switched_off import count_only
from tests.support.network import virtual_time
from tests.support.network.memory_network import LinkProfile, MemoryNetwork

ASKER, ANSWERER = PeerId("asker"), PeerId("answerer")
NOW = 1_800_000_000.0


def probed(
    addresses: Sequence[str],
    ports: Sequence[int],
    *,
    ahead_s: float = 0.0,
    networks: tuple[Network, ...] = (),
) -> Probed:
    """The reply of a peer, whose clock is ``ahead_s`` ahead, to a requester that is connected from
    ``addresses``."""

    async def addresses_of(peer: PeerId) -> Sequence[str]:
        assert peer == ASKER
        return addresses

    async def main() -> Probed:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.0))
        async with network.transport(ASKER) as asker, network.transport(ANSWERER) as answerer:
            await PROBE.serve(answerer, Probes(addresses_of, lambda: NOW + ahead_s, lambda: networks).answer)
            stream = await PROBE.open(asker, ANSWERER)
            return await probe(stream, ports, lambda: NOW)

    return asyncio.run(main())


def listening(first: bytes, use: Callable[[int], Awaitable[Any]]) -> Any:
    """Call ``use`` while a server on this machine sends ``first`` on every connection."""

    async def main() -> Any:
        def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(first)
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            return await use(server.sockets[0].getsockname()[1])

    return asyncio.run(main())


@pytest.mark.parametrize(("first", "answer"), [(HELLO, True), (b"SSH-2.0-x\r\n" * 3, False), (b"", False)])
def test_only_libp2p_counts_as_an_answer(first: bytes, answer: bool) -> None:
    assert listening(first, lambda port: speaks_libp2p("127.0.0.1", port)) is answer


def test_a_closed_port_is_no_answer() -> None:
    async def closed(port: int) -> int:
        return port

    assert asyncio.run(speaks_libp2p("127.0.0.1", listening(HELLO, closed))) is False


@pytest.mark.parametrize(
    ("addresses", "ip"),
    [
        (["/ip4/203.0.113.5/tcp/4001"], "203.0.113.5"),
        (["/ip6/2001:db8::1/udp/4001/quic-v1"], "2001:db8::1"),
        (["/ip4/198.51.100.1/tcp/4001/p2p/R/p2p-circuit"], ""),
        (["/ip4/198.51.100.1/tcp/1/p2p/R/p2p-circuit", "/ip4/203.0.113.5/tcp/2"], "203.0.113.5"),
        (["/dns4/example.org/tcp/1", "/ip4/300.1.1.1/tcp/1", "nonsense", ""], ""),
        (["/ip4/203.0.113.5/tcp/²", "/ip6/fe80::1%eth0/tcp/1"], ""),
        ([], ""),
    ],
)
def test_a_probe_dials_the_address_that_the_asker_came_from(addresses: list[str], ip: str) -> None:
    """A relay is not the asker: to dial it at the asker's port would reach another peer."""
    found = direct_address(addresses)
    assert (str(found.ip) if found is not None else "") == ip


def test_through_a_relay_clocks_are_compared_and_no_address_dialled() -> None:
    said = probed(["/ip4/127.0.0.1/tcp/4001/p2p/R/p2p-circuit"], [4001], ahead_s=600.0)
    assert (said.observed_ip, said.reached) == ("", ())
    assert said.behind_s == pytest.approx(600.0)


def test_only_the_ports_that_answer_as_libp2p_are_reported_as_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled = []

    async def speaks(host: str, port: int) -> bool:
        dialled.append((host, port))
        return port == 4002

    monkeypatch.setattr("swarmnet_protocols.reachability.dial_back.speaks_libp2p", speaks)
    said = probed(["/ip4/203.0.113.5/tcp/60000"], [4001, 4002, 4001])
    assert said.observed_ip == "203.0.113.5"
    assert said.reached == (4002,)
    assert sorted(dialled) == [("203.0.113.5", 4001), ("203.0.113.5", 4002)]


@defence(
    "a peer has ports of this machine dialled only in a swarm of this machine",
    off=replacing(dial_back, "may_dial_back", yes),
    address="/ip4/127.0.0.1/tcp/60000",
    networks=(),
    is_dialled=False,
)
@pytest.mark.parametrize(
    ("address", "networks", "is_dialled"),
    [
        ("/ip4/127.0.0.1/tcp/60000", (), False),
        ("/ip6/::1/tcp/60000", (), False),
        ("/ip4/169.254.169.254/tcp/60000", (), False),
        ("/ip6/64:ff9b::7f00:1/tcp/60000", (), False),
        ("/ip4/127.0.0.1/tcp/60000", LOOPBACK_NETWORKS, True),
        ("/ip4/10.1.2.3/tcp/60000", (), True),
    ],
)
def test_ports_of_this_machine_are_dialled_only_in_its_own_swarm(
    address: str, networks: tuple[Network, ...], is_dialled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tunnel, a proxy or a punched hole makes a stranger appear on loopback."""
    dialled = []

    async def speaks(_host: str, port: int) -> bool:
        dialled.append(port)
        return True

    monkeypatch.setattr("swarmnet_protocols.reachability.dial_back.speaks_libp2p", speaks)
    said = probed([address], [22], networks=networks)
    assert dialled == ([22] if is_dialled else [])
    assert bool(said.observed_ip) == is_dialled


def test_the_asker_sends_no_more_ports_than_are_allowed() -> None:
    assert probed([], list(range(1, 20))).reached == ()


@defence("concurrent dials for probes are limited", off=count_only)
def test_probes_at_once_are_limited_for_one_asker_and_for_all() -> None:
    dialling, dialled = asyncio.Event(), 0

    async def addresses_of(_peer: PeerId) -> Sequence[str]:
        nonlocal dialled
        dialled += 1
        await dialling.wait()
        return []

    async def main() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.01))
        async with AsyncExitStack() as stack:
            answerer = await stack.enter_async_context(network.transport(ANSWERER))
            await PROBE.serve(answerer, Probes(addresses_of, lambda: NOW).answer)
            asking = []
            for number in range(SYSTEM_LIMITS[Resource.PROBES] + 1):
                asker = await stack.enter_async_context(network.transport(PeerId(f"asker {number}")))
                for _ in range(PEER_LIMITS[Resource.PROBES] + 1):
                    stream = await PROBE.open(asker, ANSWERER)
                    asking.append(asyncio.ensure_future(probe(stream, [], lambda: NOW)))
            await asyncio.wait(asking, timeout=1.0)
            assert dialled == SYSTEM_LIMITS[Resource.PROBES] * PEER_LIMITS[Resource.PROBES]
            dialling.set()
            answers = await asyncio.gather(*asking, return_exceptions=True)
            assert sum(isinstance(each, Probed) for each in answers) == dialled
            assert sum(isinstance(each, StreamEnded) for each in answers) == len(answers) - dialled

    virtual_time.run(main())


@pytest.mark.parametrize("ports", [[0], [70_000], list(range(1, MAX_PORTS + 2))])
def test_a_probe_with_impossible_ports_is_not_answered(
    ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from swarmnet_protocols.net import Message
    from swarmnet_protocols.wire import probe_pb2

    class Asking:
        peer = ASKER

        async def receive(self) -> Message:
            return Message(probe_pb2.ProbeRequest(ports=ports).SerializeToString())

        async def send(self, _message: Message) -> None:
            raise AssertionError("answered")

        def close(self) -> None: ...

    async def addresses_of(_peer: PeerId) -> Sequence[str]:
        raise AssertionError("looked at")

    stream: Any = Asking()
    with pytest.raises(ProtocolViolation):
        asyncio.run(Probes(addresses_of, lambda: NOW).answer(PROBE.accept(stream)))
