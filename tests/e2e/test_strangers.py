"""Hostile strangers against a real node: it stays within its memory, reports the errors, and serves
its other clients."""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarmnet.paths import default_cache_dir
from swarmnet.swarm_file import load_valid
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_node.hosting.slots import NEW_S
from swarmnet_protocols.directory.host_announcements import hosts_topic
from swarmnet_protocols.directory.records import Record, seal
from swarmnet_protocols.errors import IncompatibleVersion
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.models import EXPERTS_MODEL
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.dialling import MAX_DIALLED
from swarmnet_protocols.net.endpoint import MAX_LINGERING
from swarmnet_protocols.net.framing import REFUSED
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.resource_limits import PEER_LIMITS, Resource
from swarmnet_protocols.net.p2pd.config import P2pdConfig
from swarmnet_protocols.net.p2pd.transport import P2pdTransport
from swarmnet_protocols.net.protocol_ids import EXPERTS, INFERENCE, LINK, PASS, PING, SESSION
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import parse
from swarmnet_protocols.session.passes import MAX_POSITIONS
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2, refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.attacks.ports import QUIET_HOST, Ports
from tests.support.attacks.refusals import final_refusal
from tests.support.attacks.strangers import (
    DEADLINE_S,
    GROWTH_BYTES,
    Scenario,
    await_end,
    opened,
    raw_streams,
    read_to_end,
    run_stranger,
    send_garbage,
    send_oversized,
)
from tests.support.models.tiny import BLOCKS
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.swarm.generation import greedy
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import load_tiny

pytestmark = pytest.mark.slow

PROMPT = [5, 6, 7, 8]
NEXT_HOP = Identity.from_seed(b"the next hop")


@dataclass
class Victim:
    """A node of a tiny model, a client it serves, and how large it is."""

    lab: Swarm
    node: NodeProcess
    reference: Reference
    model: Any

    @property
    def peer(self) -> PeerId:
        return PeerId(self.node.ready["peer_id"])

    @property
    def rss_bytes(self) -> int:
        size: int = psutil.Process(self.node.pid).memory_info().rss
        return size

    def open(self, session: bytes, **changes: Any) -> Message:
        """A good request for a session, but for ``changes``."""
        good: dict[str, Any] = {
            "session": session,
            "epoch": 1,
            "manifest": self.reference.local.manifest.hash,
            "span": pb.Span(start=0, end=BLOCKS),
            "wire": pb.DTYPE_FLOAT32,
            "max_length": 64,
            "swarm": load_valid(self.lab.file, wall_clock()).swarm_id,
        }
        return Message(pb.SessionRequest(open=pb.Open(**good | changes)).SerializeToString())

    def announced(self, addresses: list[str]) -> bytes:
        """An announcement signed by ``NEXT_HOP`` as a host of the model at these addresses."""
        swarm, manifest = load_valid(self.lab.file, wall_clock()).swarm_id, self.reference.local.manifest.hash
        body = records_pb2.HostRecord(manifest=manifest, addresses=addresses).SerializeToString()
        topic = hosts_topic(manifest, NEXT_HOP.peer_id)
        record = Record(swarm, topic, NEXT_HOP.public_key, 1, wall_clock() + 60, body)
        return seal(NEXT_HOP, record)

    def check(self) -> None:
        """The honest client is served as ever."""
        assert greedy(self.model, [PROMPT], 8) == [self.reference.greedy(PROMPT, 8)]


BANNER = b"SSH-2.0-OpenSSH_9.2p1\r\n"


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    directory = tmp_path_factory.mktemp("strangers")
    reference = load_tiny(directory)
    lab = Swarm(directory / "lab", directory / "cache", model=str(directory / "model"))
    try:
        (node,) = lab.start((0, BLOCKS))
        with lab.connect() as model:
            found = Victim(lab, node, reference, model)
            found.check()
            yield found
            found.check()
    finally:
        lab.close()


def attack(victim: Victim, scenario: Scenario, directory: Path) -> int:
    """Run a stranger's scenario; returns the bytes by which the memory of the node grew."""
    before = victim.rss_bytes
    run_stranger(victim.node.ready["addresses"], scenario, directory)
    growth = victim.rss_bytes - before
    print(f"growth_mib={growth / (1 << 20):.1f} goal={GROWTH_BYTES >> 20}")
    victim.check()
    return growth


async def refusal(stream: Stream) -> Refused:
    """The node's refusal of the session."""
    async with asyncio.timeout(DEADLINE_S):
        return await final_refusal(stream)


def test_a_client_cannot_use_a_host_as_a_port_scanner(victim: Victim, tmp_path: Path) -> None:
    """A host dials few of many addresses that the next hop has signed, and no other address. It
    does not report what listens there."""
    answers: list[tuple[pb.SessionReply, float]] = []

    async def scenario(transport: P2pdTransport) -> None:
        clock = asyncio.get_running_loop().time
        with contextlib.ExitStack() as stack:
            opened = Ports(stack, 100, BANNER)
            by_name = Ports(stack, 1, BANNER, "127.0.0.1")
            (port,) = by_name.ports
            with socket.create_server(("127.0.0.1", 0)) as closed:
                closed_port = closed.getsockname()[1]
            named = [
                [f"/ip4/{QUIET_HOST}/tcp/{each}" for each in opened.ports],
                [f"/ip4/127.0.0.1/tcp/{closed_port}"],
                [f"/dns4/localhost/tcp/{port}", f"/ip6/::ffff:127.0.0.1/tcp/{port}"],
            ]
            stream = await transport.open(victim.peer, SESSION, deadline_s=DEADLINE_S)
            for epoch, addresses in enumerate(named, 1):
                hop = pb.Peer(id=NEXT_HOP.peer_id, session=bytes(16), record=victim.announced(addresses))
                began = clock()
                if epoch == 1:
                    await stream.send(victim.open(bytes([77] * 16), next=hop))
                else:
                    relink = pb.SessionRequest(relink=pb.Relink(epoch=epoch, next=hop))
                    await stream.send(Message(relink.SerializeToString()))
                answers.append((await link_lost(stream), clock() - began))
            assert 0 < len(opened.connections) <= MAX_DIALLED
            assert not by_name.connections
            stream.close()

    attack(victim, scenario, tmp_path)
    for epoch, (reply, _) in enumerate(answers, 1):
        assert reply == pb.SessionReply(link_lost=pb.LinkLost(epoch=epoch, peer=NEXT_HOP.peer_id))
    assert min(took_s for _, took_s in answers) >= Timing().open_s - 0.1


def test_empty_sessions_keep_no_client_out(victim: Victim, tmp_path: Path) -> None:
    """Four strangers open all sessions there are, compute nothing, and beat; an honest client comes
    from the same network."""
    held: list[int] = []

    async def scenario(first: P2pdTransport) -> None:
        async with contextlib.AsyncExitStack() as stack:
            strangers = [first]
            for number in range(3):
                config = P2pdConfig(
                    tmp_path / f"id{number}",
                    listen=("/ip4/127.0.0.1/tcp/0",),
                    bootstrap=tuple(victim.node.ready["addresses"]),
                )
                strangers.append(await stack.enter_async_context(P2pdTransport.create(config)))
            for transport in strangers:
                for _ in range(ClientLimits().sessions_per_client):
                    stream = await transport.open(victim.peer, SESSION, deadline_s=DEADLINE_S)
                    stack.callback(stream.close)
                    await stream.send(victim.open(os.urandom(16)))
                    held.append(parse(pb.SessionReply, (await stream.receive()).header).HasField("opened"))
            await asyncio.sleep(NEW_S)
            began = time.monotonic()
            await asyncio.to_thread(serve_a_newcomer, victim)
            print(f"served_s={time.monotonic() - began:.2f} goal=5")

    attack(victim, scenario, tmp_path)
    assert sum(held) >= ClientLimits().sessions - 1  # the client of the fixture may have a session


def serve_a_newcomer(victim: Victim) -> None:
    """A client that has never been there is served."""
    with victim.lab.connect() as model:
        assert greedy(model, [PROMPT], 4) == [victim.reference.greedy(PROMPT, 4)]


async def link_lost(stream: Stream) -> pb.SessionReply:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            reply = parse(pb.SessionReply, (await stream.receive()).header)
            if reply.HasField("link_lost"):
                return reply


@pytest.mark.parametrize("protocol", INFERENCE, ids=lambda protocol: protocol.id)
def test_garbage_ends_the_stream_it_came_on(victim: Victim, protocol: ProtocolSpec, tmp_path: Path) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        await send_garbage(transport, victim.peer, protocol)

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES


@pytest.mark.parametrize("protocol", INFERENCE, ids=lambda protocol: protocol.id)
def test_an_oversized_frame_is_refused_before_it_is_read(
    victim: Victim, protocol: ProtocolSpec, tmp_path: Path
) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        await send_oversized(transport, victim.peer, protocol)

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES


def test_a_peer_with_experts_survives_garbage_and_oversized_frames(tmp_path: Path) -> None:
    lab = Swarm(tmp_path / "lab", default_cache_dir(), model=EXPERTS_MODEL)
    try:
        node = lab.launch("peer", "--experts", "0:0-3")
        peer, addresses = PeerId(node.ready["peer_id"]), node.ready["addresses"]

        async def scenario(transport: P2pdTransport) -> None:
            await send_garbage(transport, peer, EXPERTS)
            await send_oversized(transport, peer, EXPERTS)

        before = psutil.Process(node.pid).memory_info().rss
        run_stranger(addresses, scenario, tmp_path)
        assert psutil.Process(node.pid).memory_info().rss - before < GROWTH_BYTES
        assert node.status.state == "online"
    finally:
        lab.close()


def test_large_messages_that_never_come_cost_nothing(victim: Victim, tmp_path: Path) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        announced = struct.pack(">II", 10, SESSION.max_payload_bytes)
        async with raw_streams(transport, victim.peer, SESSION, 100) as pipes:
            for pipe in pipes:
                pipe.writer.write(announced)
            # a first message is not waited for longer than a first answer may take
            for pipe in pipes:
                await read_to_end(pipe)

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES


def test_a_peer_may_not_take_all_sessions(victim: Victim, tmp_path: Path) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        rng = random.Random(0)
        refused = []
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(70):
                stream = await stack.enter_async_context(opened(transport, victim.peer, SESSION))
                await stream.send(victim.open(rng.randbytes(16)))
                try:
                    await stream.receive()
                except Refused as error:
                    refused.append(error.reason)
            assert refused == [refusal_pb2.REASON_OUT_OF_RESOURCES] * 6
            await asyncio.to_thread(victim.check)

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"manifest": bytes(32)}, refusal_pb2.REASON_WRONG_MODEL),
        ({"span": pb.Span(start=0, end=BLOCKS + 1)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=3, end=3)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"swarm": bytes(32)}, refusal_pb2.REASON_WRONG_SWARM),
    ],
    ids=["another model", "blocks it does not host", "no blocks", "another swarm"],
)
def test_a_session_it_cannot_serve_is_refused_with_the_reason(
    victim: Victim, changes: dict[str, Any], reason: int, tmp_path: Path
) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        async with opened(transport, victim.peer, SESSION) as stream:
            await stream.send(victim.open(bytes(range(16)), **changes))
            answer = await refusal(stream)
            assert answer.reason == reason
            assert answer.detail
            await await_end(stream)

    attack(victim, scenario, tmp_path)


def test_a_peer_may_not_take_all_passes(victim: Victim, tmp_path: Path) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        begin = pb.Begin(
            manifest=victim.reference.local.manifest.hash,
            span=pb.Span(start=0, end=BLOCKS),
            counts=[MAX_POSITIONS],
            wire=pb.DTYPE_FLOAT32,
            swarm=load_valid(victim.lab.file, wall_clock()).swarm_id,
        )
        refused = []
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(20):
                stream = await stack.enter_async_context(opened(transport, victim.peer, PASS))
                await stream.send(Message(pb.PassRequest(begin=begin).SerializeToString()))
                try:
                    await stream.receive()
                except Refused as error:
                    refused.append(error.reason)
            assert refused == [refusal_pb2.REASON_OUT_OF_RESOURCES] * 16
            await asyncio.to_thread(victim.check)

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES


def _step(**changes: Any) -> pb.LinkRequest:
    good: dict[str, Any] = {
        "seq": 1,
        "rows": [pb.Row(sequence=0, start=0, count=1, outputs=1, source=0)],
        "tensor": pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1, 32]),
    }
    return pb.LinkRequest(step=pb.Step(**good | changes))


@pytest.mark.parametrize(
    "step",
    [
        _step(seq=5),
        _step(tensor=pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1 << 30, 32])),
        _step(tensor=pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1, 33])),
        _step(rows=[pb.Row(sequence=0, start=0, count=1 << 30, outputs=1, source=0)]),
        _step(rows=[pb.Row(sequence=0, start=9, count=1, outputs=1, source=0)]),
    ],
    ids=["a gap", "a huge tensor", "another width", "a huge row", "a position out of nowhere"],
)
def test_a_step_that_breaks_the_rules_is_not_computed(
    victim: Victim, step: pb.LinkRequest, tmp_path: Path
) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        session, before = random.Random(0).randbytes(16), victim.node.status.host.forwards
        async with (
            opened(transport, victim.peer, SESSION) as stream,
            opened(transport, victim.peer, LINK) as link,
        ):
            await stream.send(victim.open(session))
            await link.send(
                Message(pb.LinkRequest(link=pb.Link(session=session, epoch=1)).SerializeToString())
            )
            await link.send(Message(step.SerializeToString(), bytes(4 * 32)))
            await await_end(link)
        assert victim.node.status.host.forwards == before

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES


def test_another_version_of_a_protocol_is_reported_as_not_supported(victim: Victim, tmp_path: Path) -> None:
    async def scenario(transport: P2pdTransport) -> None:
        newer = ProtocolSpec(SESSION.id.rpartition("/")[0] + "/999")
        with pytest.raises(IncompatibleVersion, match="not supported"):
            await transport.open(victim.peer, newer, deadline_s=DEADLINE_S)
        async with opened(transport, victim.peer, PING) as stream:  # the one both speak still works
            await stream.send(Message(pb.Ping(nonce=7).SerializeToString()))
            assert parse(pb.Pong, (await stream.receive()).header).nonce == 7

    attack(victim, scenario, tmp_path)


def test_two_thousand_silent_streams_are_ended(victim: Victim, tmp_path: Path) -> None:
    descriptors = psutil.Process(victim.node.pid).num_fds()

    async def scenario(transport: P2pdTransport) -> None:
        async with raw_streams(transport, victim.peer, PING, 2000) as pipes:
            most = PEER_LIMITS[Resource.INBOUND_STREAMS] + MAX_LINGERING + descriptors + 16
            assert psutil.Process(victim.node.pid).num_fds() <= most
            for pipe in pipes:
                assert (await read_to_end(pipe))[:4] in (b"", struct.pack(">I", REFUSED))

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES
    assert psutil.Process(victim.node.pid).num_fds() <= descriptors + 16


def test_two_thousand_connections_without_a_handshake_are_closed(victim: Victim, tmp_path: Path) -> None:
    (p2pd,) = [each for each in psutil.Process(victim.node.pid).children() if each.name() == "p2pd"]
    before = p2pd.memory_info().rss

    async def scenario(transport: P2pdTransport) -> None:
        (address,) = victim.node.ready["addresses"]
        async with opened(transport, victim.peer, PING) as stream:
            pings = asyncio.create_task(keep_pinging(stream))
            half_open = [
                asyncio.create_task(
                    drip(address, every_s=1.0) if number % 20 == 0 else drip(address, 0.0, b"")
                )
                for number in range(2000)
            ]
            await asyncio.to_thread(await_connections, p2pd, 2000)
            growth = p2pd.memory_info().rss - before
            lasted_s = await asyncio.gather(*half_open)
            print(f"longest_s={max(lasted_s):.1f} p2pd_growth_mib={growth / (1 << 20):.1f}")
            assert not pings.done()
            pings.cancel()

    assert attack(victim, scenario, tmp_path) < GROWTH_BYTES
    assert len(p2pd.net_connections("tcp")) < 100


async def keep_pinging(stream: Stream) -> None:
    while True:
        await stream.send(Message(pb.Ping(nonce=7).SerializeToString()))
        assert parse(pb.Pong, (await stream.receive()).header).nonce == 7
        await asyncio.sleep(0.5)


async def drip(address: str, every_s: float, hello: bytes = b"\x13/multistream/1.0.0\n\x07/noise\n") -> float:
    """Connect to a multiaddr and send ``hello`` byte by byte until the other side closes the
    connection: the seconds that took."""
    began = time.monotonic()
    _, _, host, _, port, *_ = address.split("/")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.closing(writer):
        closed = asyncio.create_task(_wait_closed(reader))
        for byte in hello:
            await asyncio.wait([closed], timeout=every_s)
            if closed.done():
                break
            writer.write(bytes([byte]))
        await closed
    return time.monotonic() - began


async def _wait_closed(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        await reader.read()


def await_connections(process: psutil.Process, count: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(process.net_connections("tcp")) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ten_thousand_hostile_frames_a_second_cost_no_memory(victim: Victim) -> None:
    victim.check()
    before, descriptors = victim.rss_bytes, psutil.Process(victim.node.pid).num_fds()
    command = [
        sys.executable,
        "-m",
        "tests.support.attacks.hostile",
        "6",
        "10000",
        "2",
        victim.lab.bootstrap[0],
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        assert json.loads(attacker.stdout.readline())["event"] == "attacking"
        answered = 0
        while attacker.poll() is None:
            victim.check()
            answered += 1
        sent = json.loads(attacker.stdout.readline())["sent"]
    growth = victim.rss_bytes - before
    print(f"sent={sent} answered={answered} growth_mib={growth / (1 << 20):.1f}")
    assert len(sent) >= 3
    assert answered > 0
    assert growth < 64 << 20
    most = descriptors + PEER_LIMITS[Resource.INBOUND_STREAMS] + MAX_LINGERING
    assert psutil.Process(victim.node.pid).num_fds() <= most
    victim.check()
