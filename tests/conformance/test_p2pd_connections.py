"""Connections between real peers that are dead, or silent but alive."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.net import Message, PeerId, ProtocolSpec, Stream
from swarmnet_protocols.net.p2pd.transport import P2pdTransport, peer_of
from swarmnet_protocols.timing import Timing

from .conftest import P2pdLab, peer_process


class Detour:
    """Made by ``to``. Connections to ``address`` reach the peer through the proxy."""

    def __init__(self, ip: str, port: str) -> None:
        self.address = ""
        self._target = ip, port
        self._carries = asyncio.Event()
        self._carries.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, address: str) -> AsyncIterator[Self]:
        """A detour to ``address``, a TCP multiaddr, for as long as the context."""
        *_, ip, _, port, p2p, peer = address.split("/")
        detour = cls(ip, port)
        server = await asyncio.start_server(detour._accept, "127.0.0.1", 0)
        detour.address = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}/{p2p}/{peer}"
        try:
            yield detour
        finally:
            server.close()
            await cancel(*detour._tasks)

    def hold(self) -> asyncio.Event:
        """Stall the connections that are open, without closing them, until the returned event is
        set."""
        held, self._carries = self._carries, asyncio.Event()
        held.clear()
        self._carries.set()
        return held

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer, self._carries))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carries: asyncio.Event
    ) -> None:
        with contextlib.closing(writer):
            there, back = await asyncio.open_connection(*self._target)
            with contextlib.closing(back), contextlib.suppress(OSError):
                await race(_pass_on(reader, back, carries), _pass_on(there, writer, carries))


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carries: asyncio.Event
) -> None:
    while data := await reader.read(1 << 16):
        await carries.wait()
        writer.write(data)
        await writer.drain()


pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
LIBP2P_GIVES_UP_S = 40.0
"""Seconds for which p2pd keeps a silent connection: its muxer pings after 30 s and waits for 10."""
MUCH = bytes(1 << 18)

Silence = Callable[[Detour, Stream, asyncio.subprocess.Process], AbstractAsyncContextManager[None]]
"""A context during which nothing comes over the stream."""


@contextlib.asynccontextmanager
async def echoing_behind_a_detour(
    a: P2pdTransport, protocol: ProtocolSpec, directory: Path
) -> AsyncIterator[tuple[Detour, Stream, asyncio.subprocess.Process]]:
    """A peer that ``a`` has reached through the detour, and a stream to it that has just echoed."""
    async with peer_process(directory, protocol) as (process, address), Detour.to(address) as detour:
        stream = await a.open(peer_of(address), protocol, addresses=[detour.address], deadline_s=DEADLINE_S)
        await echoes(stream, b"at first")
        yield detour, stream, process


async def echoes(stream: Stream, said: bytes) -> None:
    await stream.send(Message(b"", said))
    await hears(stream, said)


async def hears(stream: Stream, said: bytes) -> None:
    async with asyncio.timeout(DEADLINE_S):
        assert (await stream.receive()).payload == said


def test_a_stalled_connection_is_replaced(p2pd_lab: P2pdLab, protocol: ProtocolSpec, tmp_path: Path) -> None:
    """The state after a cut: both ends are alive, and TCP retransmits only after a while."""

    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        async with echoing_behind_a_detour(a, protocol, tmp_path) as (detour, stream, _):
            detour.hold()
            # What was heard before the cut proves nothing about the connection now.
            await asyncio.sleep(2 * Timing().alive_s)
            over_nothing = await a.open(
                stream.peer, protocol, addresses=[detour.address], deadline_s=DEADLINE_S
            )
            await over_nothing.send(Message(b"", b"lost"))
            async with asyncio.timeout(LIBP2P_GIVES_UP_S / 2):
                for ending in (over_nothing, stream):
                    with pytest.raises(StreamEnded):
                        await ending.receive()
            anew = await a.open(stream.peer, protocol, addresses=[detour.address], deadline_s=DEADLINE_S)
            await echoes(anew, b"anew")

    p2pd_lab.run(scenario)


def test_a_stream_that_is_opened_during_a_ping_is_followed_by_another(
    p2pd_lab: P2pdLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first ping may have come before a cut."""
    peer, asked, closed = PeerId("other"), list[float](), list[PeerId]()

    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        answered = asyncio.Event()

        async def answers(_: PeerId, *, within_s: float) -> bool:
            asked.append(within_s)
            await answered.wait()
            return len(asked) == 1

        async def disconnect(other: PeerId) -> None:
            closed.append(other)

        monkeypatch.setattr(a._daemon, "answers", answers)
        monkeypatch.setattr(a._daemon, "disconnect", disconnect)
        first = asyncio.create_task(a._check_alive(peer))
        await asyncio.sleep(0)
        await a._check_alive(peer)
        answered.set()
        await first

    p2pd_lab.run(scenario)
    assert len(asked) == 2
    assert closed == [peer]


@contextlib.asynccontextmanager
async def a_process_held_up(
    detour: Detour, stream: Stream, process: asyncio.subprocess.Process
) -> AsyncIterator[None]:
    """A stopped Python process whose p2pd still answers pings."""
    process.send_signal(signal.SIGSTOP)
    yield
    process.send_signal(signal.SIGCONT)
    await echoes(stream, b"again")


@contextlib.asynccontextmanager
async def a_line_busy_with_what_we_sent(
    detour: Detour, stream: Stream, process: asyncio.subprocess.Process
) -> AsyncIterator[None]:
    """A slow link: the echo arrives after all bytes that were sent before."""
    held = detour.hold()
    await stream.send(Message(b"", MUCH))
    yield
    held.set()
    await hears(stream, MUCH)


@contextlib.asynccontextmanager
async def a_line_busy_with_what_others_send(
    detour: Detour, stream: Stream, process: asyncio.subprocess.Process
) -> AsyncIterator[None]:
    """A slow uplink of the peer: its messages arrive 4.5 s late, and so do its answers to pings."""
    held = detour.hold()
    asyncio.get_running_loop().call_later(4.5, held.set)
    await stream.send(Message(b"", b"late"))
    yield
    await hears(stream, b"late")


@pytest.mark.parametrize(
    "silence",
    [a_process_held_up, a_line_busy_with_what_we_sent, a_line_busy_with_what_others_send],
    ids=lambda silence: silence.__name__,
)
def test_a_silent_but_working_connection_stays(
    silence: Silence, p2pd_lab: P2pdLab, protocol: ProtocolSpec, tmp_path: Path
) -> None:
    async def scenario(a: P2pdTransport, b: P2pdTransport) -> None:
        async with echoing_behind_a_detour(a, protocol, tmp_path) as there, silence(*there):
            _, stream, _ = there
            await asyncio.sleep(2 * Timing().alive_s)
            await a._check_alive(stream.peer)

    p2pd_lab.run(scenario)
