"""Properties of p2pd that only real processes and sockets show."""

import asyncio
import os
import random
import signal
import socket
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from swarmnet_protocols.errors import (
    ConfigError,
    PeerUnreachable,
    ProtocolViolation,
    StreamEnded,
    Unreachable,
)
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.limits.resource_limits import SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.p2pd import transport as p2pd
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport, peer_of
from swarmnet_protocols.net.protocol_ids import ADMISSION, ALL, PING
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.wire import refusal_pb2
from tests.defences import defence, replacing

from .conftest import LOOPBACK, UNKNOWN_PEER, P2pdLab, peer_process

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0


def test_temporary_files_may_have_a_longer_path_than_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def main() -> None:
        async with P2pdTransport.create(P2pdConfig(tmp_path / "identity", listen=LOOPBACK)) as transport:
            assert peer_of(transport.addresses()[0]) == transport.peer_id

    asyncio.run(main())


def test_a_killed_process_ends_its_streams_and_its_p2pd(
    p2pd_lab: P2pdLab, protocol: ProtocolSpec, tmp_path: Path
) -> None:
    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        async with peer_process(tmp_path, protocol) as (process, address):
            (child,) = [each for each in psutil.Process(process.pid).children() if each.name() == "p2pd"]
            peer = peer_of(address)
            stream = await a.open(peer, protocol, addresses=[address], deadline_s=DEADLINE_S)
            await stream.send(Message(b"", b"alive"))
            assert (await stream.receive()).payload == b"alive"

            os.killpg(process.pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(StreamEnded):
                await stream.receive()
            print(f"stream_end_after_sigkill_s={time.monotonic() - started:.3f} goal=1")

            await asyncio.to_thread(child.wait, DEADLINE_S)
            with pytest.raises(PeerUnreachable):
                await a.open(peer, protocol, addresses=[address], deadline_s=2.0)

    p2pd_lab.run(scenario)


def test_p2pd_ends_when_only_its_parent_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with peer_process(tmp_path, ProtocolSpec("/test/unused")) as (process, _):
            children = psutil.Process(process.pid).children(recursive=True)
            assert [child.name() for child in children] == ["p2pd"]
            process.kill()  # the process alone: its p2pd is in a session of its own
            _, alive = await asyncio.to_thread(psutil.wait_procs, children, DEADLINE_S)
            assert not alive

    asyncio.run(main())


def test_a_refused_peer_that_keeps_its_stream_open_holds_no_resources(
    p2pd_lab: P2pdLab, protocol: ProtocolSpec
) -> None:
    """A refused peer may read the reason late if no other peer needs the stream."""

    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        refused = asyncio.Semaphore(0)

        async def refuse(stream: Stream) -> None:
            stream.refuse(Refusal(refusal_pb2.REASON_NOT_AUTHORISED, "no"))
            refused.release()

        async def answer(stream: Stream) -> None:
            await stream.send(await stream.receive())

        served = replace(protocol, id=f"{protocol.id}/served")
        await b.serve(protocol, refuse)
        await b.serve(served, answer)
        await a.connect(b.peer_id, b.addresses(), deadline_s=DEADLINE_S)
        b.resources.limit(Resource.INBOUND_STREAMS, system=16)
        pipes = [
            await a._daemon.open_stream(b.peer_id, protocol.id, deadline_s=DEADLINE_S) for _ in range(24)
        ]
        try:
            async with asyncio.timeout(DEADLINE_S):
                for _ in pipes:
                    await refused.acquire()
            assert b.resources.system.used[Resource.INBOUND_STREAMS] == 12
            stream = await a.open(b.peer_id, served, deadline_s=DEADLINE_S)
            await stream.send(Message(b"heard?"))
            assert (await stream.receive()).header == b"heard?"
            stream.close()
        finally:
            b.resources.limit(Resource.INBOUND_STREAMS, system=SYSTEM_LIMITS[Resource.INBOUND_STREAMS])
            for pipe in pipes:
                pipe.writer.close()

    p2pd_lab.run(scenario)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)) as info:
            start(P2pdConfig(tmp_path / "id", listen=(f"/ip4/127.0.0.1/tcp/{port}",)))
    assert "--listen" in info.value.hint


def test_a_port_in_use_by_another_p2pd_is_not_shared(p2pd_lab: P2pdLab, tmp_path: Path) -> None:
    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        listen = tuple(address.partition("/p2p/")[0] for address in a.addresses())
        with pytest.raises(ConfigError, match="in use"):
            async with P2pdTransport.create(P2pdConfig(tmp_path / "id", listen=listen)):
                pass

    p2pd_lab.run(scenario)


def test_a_stream_has_the_address_of_its_opener(p2pd_lab: P2pdLab) -> None:
    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def note(stream: Stream) -> None:
            opened.set_result(stream.address)

        await b.serve(ADMISSION, note)
        stream = await a.open(b.peer_id, ADMISSION, addresses=b.addresses(), deadline_s=DEADLINE_S)
        assert (await opened).startswith("/ip4/127.0.0.1/tcp/")
        assert not stream.address

    p2pd_lab.run(scenario)


def test_an_identity_is_used_once_unless_it_only_dials(tmp_path: Path) -> None:
    listening = P2pdConfig(tmp_path / "id", listen=LOOPBACK)
    dialling = replace(listening, only_dials=True)

    async def scenario() -> None:
        async with P2pdTransport.create(listening):
            for config in (listening, dialling):
                with pytest.raises(ConfigError, match="another process"):
                    async with P2pdTransport.create(config):
                        pass
        async with P2pdTransport.create(dialling), P2pdTransport.create(dialling):
            pass

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "config",
    [
        {"listen": ("nonsense",)},
        {"listen": ("/ip4/127.0.0.1/tcp/99999",)},
        {"listen": ("/ip4/192.0.2.1/tcp/4001",)},
        {"listen": LOOPBACK, "announce": ("/ip4/no/tcp/1",)},
        {"listen": LOOPBACK, "bootstrap": ("/ip4/127.0.0.1/tcp/4001",)},
        {"listen": LOOPBACK, "bootstrap": ("/ip4/127.0.0.1/tcp/4001/p2p/0OIl",)},
    ],
)
def test_a_bad_address_is_a_config_error(tmp_path: Path, config: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError) as info:
        start(P2pdConfig(tmp_path / "id", **config))  # type: ignore[arg-type]
    assert info.value.hint


def test_an_invalid_peer_id_is_a_config_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with P2pdTransport.create(P2pdConfig(tmp_path / "id", listen=LOOPBACK)) as transport:
            for addresses in ((), ("/ip4/127.0.0.1/tcp/4001/p2p/0OIl",)):
                with pytest.raises(ConfigError, match="not a peer id"):
                    await transport.open(
                        PeerId("0OIl"), ADMISSION, addresses=addresses, deadline_s=DEADLINE_S
                    )

    asyncio.run(scenario())


def test_dead_bootstrap_peers_matter_only_if_asked(tmp_path: Path) -> None:
    bootstrap = (f"/ip4/127.0.0.1/tcp/1/p2p/{UNKNOWN_PEER}",)
    start(P2pdConfig(tmp_path / "id", listen=LOOPBACK, bootstrap=bootstrap))
    with pytest.raises(Unreachable, match="bootstrap"):
        start(P2pdConfig(tmp_path / "id", listen=LOOPBACK, bootstrap=bootstrap, require_bootstrap=True))


def test_a_live_bootstrap_peer_is_connected(
    p2pd_lab: P2pdLab, protocol: ProtocolSpec, tmp_path: Path
) -> None:
    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        async def greet(stream: Stream) -> None:
            await stream.send(Message(b"hello"))

        await a.serve(protocol, greet)
        config = P2pdConfig(
            tmp_path / "id", listen=LOOPBACK, bootstrap=tuple(a.addresses()), require_bootstrap=True
        )
        async with P2pdTransport.create(config) as joined:
            stream = await joined.open(a.peer_id, protocol, deadline_s=DEADLINE_S)
            assert (await stream.receive()).header == b"hello"

    p2pd_lab.run(scenario)


@defence(
    "addresses that peers name are checked before they are dialled",
    off=replacing(p2pd, "dialable", lambda _peer, addresses, _networks: tuple(addresses)),
)
def test_private_addresses_named_by_a_peer_are_not_dialled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS names, and loopback on a machine with a network, are not dialled; addresses that the
    owner named are."""
    monkeypatch.setattr(p2pd, "own_interfaces", lambda: [("192.168.7.20", "255.255.255.0")])

    async def scenario() -> None:
        connected = asyncio.Event()

        async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            writer.close()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            named = f"/ip4/127.0.0.1/tcp/{port}/p2p/{UNKNOWN_PEER}"
            public = "/ip4/93.184.216.34/tcp/1"
            for owners, addresses in [
                ((public,), (named, f"/dns4/localhost/tcp/{port}")),
                ((public, named), (named,)),
            ]:
                config = P2pdConfig(tmp_path / "id", listen=LOOPBACK, named=owners, only_dials=True)
                async with P2pdTransport.create(config) as transport:
                    assert not connected.is_set()
                    with pytest.raises(PeerUnreachable):
                        await transport.open(UNKNOWN_PEER, PING, addresses=addresses, deadline_s=DEADLINE_S)
                    assert not await transport.is_connected(UNKNOWN_PEER)
        assert connected.is_set()

    asyncio.run(scenario())


def start(config: P2pdConfig) -> None:
    async def main() -> None:
        async with P2pdTransport.create(config):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("protocol_id", [protocol.id for protocol in ALL])
def test_garbage_ends_its_stream_and_harms_no_other(p2pd_lab: P2pdLab, protocol_id: str) -> None:
    (protocol,) = [each for each in ALL if each.id == protocol_id]
    rng = random.Random(protocol_id)

    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        arrived = asyncio.Event()
        outcomes: asyncio.Queue[type[Exception]] = asyncio.Queue()

        async def handler(stream: Stream) -> None:
            arrived.set()
            try:
                while True:
                    await stream.send(await stream.receive())
            except (ProtocolViolation, StreamEnded) as error:
                outcomes.put_nowait(type(error))

        await b.serve(protocol, handler)
        good = await a.open(b.peer_id, protocol, addresses=b.addresses(), deadline_s=DEADLINE_S)
        await good.send(Message(b"first"))
        assert (await good.receive()).header == b"first"
        before = psutil.Process().memory_info().rss
        for expected, data in [
            (ProtocolViolation, b"\xff" * 4096),
            (ProtocolViolation, struct.pack(">II", protocol.max_header_bytes + 1, 0)),
            (ProtocolViolation, struct.pack(">II", 0, protocol.max_payload_bytes + 1)),
            (StreamEnded, struct.pack(">II", 10, protocol.max_payload_bytes) + b"cut short"),
            (StreamEnded, b"\0\0"),
            *[(None, rng.randbytes(rng.randrange(1, 5000))) for _ in range(30)],
        ]:
            arrived.clear()
            pipe = await a._daemon.open_stream(b.peer_id, protocol.id, deadline_s=DEADLINE_S)
            pipe.writer.write(data)
            async with asyncio.timeout(DEADLINE_S):
                # a stream that is closed before it has got there may never be seen
                await arrived.wait()
                pipe.writer.close()
                outcome = await outcomes.get()
            assert expected in (outcome, None)
        assert psutil.Process().memory_info().rss - before < 32 << 20
        await good.send(Message(b"alive"))
        assert (await good.receive()).header == b"alive"
        good.close()

    p2pd_lab.run(scenario)


def test_the_transport_closes_while_streams_are_busy(tmp_path: Path, protocol: ProtocolSpec) -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def echo(stream: Stream) -> None:
            try:
                while True:
                    await stream.send(await stream.receive())
            finally:
                ended.set()

        async with P2pdTransport.create(P2pdConfig(tmp_path / "a", listen=LOOPBACK)) as a:
            async with P2pdTransport.create(P2pdConfig(tmp_path / "b", listen=LOOPBACK)) as b:
                await b.serve(protocol, echo)
                stream = await a.open(b.peer_id, protocol, addresses=b.addresses(), deadline_s=DEADLINE_S)
                await stream.send(Message(b"x"))
                await stream.receive()
            assert ended.is_set(), "a handler outlived its transport"
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(StreamEnded):
                    await stream.receive()

    asyncio.run(main())


def test_nothing_is_kept_of_a_closed_stream(p2pd_lab: P2pdLab, protocol: ProtocolSpec) -> None:
    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        async def once(stream: Stream) -> None:
            await stream.send(await stream.receive())

        await b.serve(protocol, once)
        before = len(a.endpoint.streams), len(b.endpoint.streams)
        for _ in range(20):
            stream = await a.open(b.peer_id, protocol, addresses=b.addresses(), deadline_s=DEADLINE_S)
            await stream.send(Message(b"x"))
            await stream.receive()
            stream.close()
        while a.endpoint.flushes or b.endpoint.flushes:
            await asyncio.wait(a.endpoint.flushes | b.endpoint.flushes)
        assert (len(a.endpoint.streams), len(b.endpoint.streams)) == before

    p2pd_lab.run(scenario)
