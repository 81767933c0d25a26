"""Hosts of weights that send little, or do not read: a newcomer gets its weights from the others,
and a server serves the others."""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from swarmnet_protocols.errors import DeadlineExceeded
from swarmnet_protocols.fetching import download as download_module
from swarmnet_protocols.fetching import hedging, peers, server
from swarmnet_protocols.fetching.download import REPEAT_S, download
from swarmnet_protocols.fetching.hedging import HEDGE_S, hedged
from swarmnet_protocols.fetching.peers import LATE_S, SwarmPeers, WeightStream, fetch_document
from swarmnet_protocols.fetching.pieces import PIECE_BYTES, Tables, listing_hash, listing_of
from swarmnet_protocols.fetching.server import TURN_S, WeightServer
from swarmnet_protocols.net import PeerId, Stream
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.protocol_ids import WEIGHTS
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import weights_pb2 as pb
from tests.defences import defence, replacing
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport
from tests.support.network.virtual_time import run
from tests.support.swarm.weight_swarm import Host
from tests.unit.protocols.fetching.test_download import DATA, KEY, new_file, table

MODEL = bytes(32)
LISTING = listing_of({KEY.sha256: table().hash(KEY)})


class World:
    """Hosts of one model, and a newcomer, on a simulated network."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.01))
        self.hosts: list[Host] = []
        self._stack = stack

    async def transport(self, name: str) -> MemoryTransport:
        return await self._stack.enter_async_context(
            self.network.transport(Identity.from_seed(name.encode()).peer_id)
        )

    async def host(self, name: str, handle: Callable[[Stream], Awaitable[None]]) -> PeerId:
        transport = await self.transport(name)
        await transport.serve(WEIGHTS, handle)
        self.hosts.append(Host(transport.peer_id))
        return transport.peer_id

    async def newcomer(self) -> SwarmPeers:
        found = SwarmPeers({MODEL: listing_hash(LISTING)}, Timing())
        found.attach(await self.transport("newcomer"), self._find)
        return found

    async def _find(self, _: bytes) -> Sequence[Host]:
        return self.hosts


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(World(stack))

    run(main())


def served(stream: Stream) -> TypedStream[pb.WeightsReply, pb.WeightsRequest]:
    return WEIGHTS.accept(stream)


def part(request: pb.WeightsRequest) -> tuple[int, bytes]:
    """What an honest host of the whole model answers."""
    whole = {
        pb.WHAT_LISTING: LISTING,
        pb.WHAT_TABLE: table().encode(),
        pb.WHAT_HELD: b"\xff\xff",
        pb.WHAT_DATA: DATA,
    }[request.what]
    return len(whole), whole[request.offset : request.offset + request.length]


async def honest(stream: Stream) -> None:
    typed = served(stream)
    while True:
        request, _ = await typed.receive()
        total, payload = part(request)
        await asyncio.sleep(0.01)
        await typed.send(pb.WeightsReply(total_bytes=total), payload)


async def drip(stream: Stream) -> None:
    """One byte of a long document each 25 s."""
    typed = served(stream)
    while True:
        await typed.receive()
        await asyncio.sleep(25.0)
        await typed.send(pb.WeightsReply(total_bytes=1 << 20), b"\xff")


async def hold(stream: Stream) -> None:
    """It claims to have everything, and sends nothing of it."""
    typed = served(stream)
    while True:
        request, _ = await typed.receive()
        if request.what == pb.WHAT_DATA:
            await asyncio.Event().wait()
        await typed.send(pb.WeightsReply(total_bytes=part(request)[0]), part(request)[1])


@defence(
    "a host that is slow to answer holds up no newcomer", off=replacing(hedging, "HEDGE_S", 1e6), attack=drip
)
@defence(
    "pieces that hosts hold back are asked of others",
    off=replacing(download_module, "REPEAT_S", 1e6),
    attack=hold,
)
@pytest.mark.parametrize("attack", [drip, hold])
def test_hosts_that_send_little_hold_up_no_newcomer(
    attack: Callable[[Stream], Awaitable[None]], tmp_path: Path
) -> None:
    async def scenario(world: World) -> None:
        for number in range(5):
            await world.host(f"slow {number}", attack)
        await world.host("honest", honest)
        newcomer, tables = await world.newcomer(), Tables(tmp_path)

        async def head(stream: WeightStream) -> bytes:
            return await peers.fetch_file(stream, MODEL, KEY)

        assert await newcomer.first(MODEL, head) == DATA
        await newcomer.tables(MODEL, [KEY], tables)
        assert tables.known(KEY) == table()
        file = new_file(tmp_path)
        async with newcomer.sources(MODEL, [KEY]) as sources:
            await download([(file, range(len(file.starts) - 1))], sources)
        assert hashlib.sha256(file.path.read_bytes()).digest() == KEY.sha256
        # Each host is waited for once, and what two streams hold is asked of the honest one.
        assert asyncio.get_running_loop().time() < 5 * HEDGE_S + 3 * REPEAT_S

    in_world(scenario)


@defence("an answer has a minimum rate", off=replacing(peers, "LATE_S", 2 * LATE_S))
def test_an_answer_has_a_minimum_rate() -> None:
    async def scenario(world: World) -> None:
        slow = await world.host("slow", drip)
        typed = await WEIGHTS.open(await world.transport("newcomer"), slow)
        with pytest.raises(DeadlineExceeded):
            await fetch_document(typed, MODEL, pb.WHAT_LISTING, max_bytes=1 << 20)
        assert asyncio.get_running_loop().time() < LATE_S + 1.0

    in_world(scenario)


class Documents:
    """A library of one model whose table fills a reply."""

    model = MODEL

    def document(self, what: pb.What, file: bytes) -> bytes:
        return bytes(PIECE_BYTES)

    def place(self, file: bytes, start: int, end: int) -> None:
        return None


@defence("a peer that does not read loses its turn", off=replacing(server, "TURN_S", 1e6), is_busy=False)
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "with sessions"])
def test_peers_that_do_not_read_keep_no_other_peer_waiting(is_busy: bool) -> None:
    server = WeightServer(Documents(), lambda: is_busy)

    async def scenario(world: World) -> None:
        host = await world.host("host", lambda stream: server.handle(served(stream)))
        request = pb.WeightsRequest(manifest=MODEL, what=pb.WHAT_TABLE, length=PIECE_BYTES)
        greedy = await world.transport("greedy")
        for _ in range(4):
            typed = await WEIGHTS.open(greedy, host)
            for _ in range(40):
                await typed.send(request)
        await asyncio.sleep(1.0)
        honest_ = await world.transport("honest")
        mine = await WEIGHTS.open(honest_, host)
        for _ in range(3):
            assert len(await fetch_document(mine, MODEL, pb.WHAT_TABLE, max_bytes=PIECE_BYTES)) == PIECE_BYTES
        assert asyncio.get_running_loop().time() < 4 * TURN_S

    in_world(scenario)


def test_a_late_peer_is_reported_once() -> None:
    late: list[int] = []

    async def ask(peer: int) -> bool:
        await asyncio.sleep(10 * HEDGE_S if peer < 3 else 0.0)
        return True

    run(hedged(range(4), ask, late.append))
    assert late == [0, 1, 2]
