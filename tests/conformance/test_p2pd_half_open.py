"""Connections at a real p2pd that never become peers, and those that do."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from swarmnet_protocols.net import Message, ProtocolSpec, Stream
from swarmnet_protocols.net.p2pd.transport import P2pdConfig, P2pdTransport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.support.conversations import DEADLINE_S, dial, echo
from tests.support.half_open import drip, say_nothing

from .conftest import LOOPBACK

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="p2pd's own 15 s hold elsewhere"),
]

BEFORE_P2PD_S = 10.0
"""p2pd would end them itself after 15 s."""
HANDSHAKE_S = 1.0
ECHO = ProtocolSpec("/test/echo", max_header_bytes=1 << 10, roles=ANY_ROLE, served_by=ANY_ROLE)


def test_whoever_finishes_no_handshake_is_gone_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        async with peer(tmp_path / "a") as a:
            address = a.addresses()[0]
            async with asyncio.timeout(BEFORE_P2PD_S):
                lasted_s = await asyncio.gather(
                    say_nothing(address),
                    drip(address, every_s=0.1),
                    drip(address, every_s=0.0),  # and then nothing
                )
            assert min(lasted_s) >= HANDSHAKE_S

    run(main)


def test_whoever_is_a_peer_stays_whichever_side_dialled(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            peer(tmp_path / "a") as a,
            peer(tmp_path / "b") as b,
            peer(tmp_path / "c") as c,
            echoing(b, a) as accepted,
            echoing(a, c) as dialled,
        ):
            for _ in range(3):
                await say_nothing(a.addresses()[0])  # until all that came before it is looked at
                for stream in accepted, dialled:
                    await stream.send(Message(b"still"))
                    assert (await stream.receive()).header == b"still"

    run(main)


def test_of_two_connections_of_one_peer_both_are_known(tmp_path: Path) -> None:
    async def main() -> None:
        twin = P2pdConfig(tmp_path / "b", listen=LOOPBACK, only_dials=True, named=LOOPBACK)
        async with (
            peer(tmp_path / "a") as a,
            P2pdTransport.create(twin) as b,
            P2pdTransport.create(twin) as also_b,
            echoing(b, a) as first,
            echoing(also_b, a) as second,
        ):
            assert len(await a.addresses_of(b.peer_id)) == 2
            await say_nothing(a.addresses()[0])
            for stream in first, second:
                await stream.send(Message(b"still"))
                assert (await stream.receive()).header == b"still"

    run(main)


def test_where_the_system_forbids_it_that_is_said_and_all_else_works(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.half_open", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("whoever connects and says nothing is gone after 15 s") == 1
    assert "pidfd_getfd: Operation not permitted" in found.stderr
    assert found.stdout == "it stays\n"


def peer(identity_path: Path) -> contextlib.AbstractAsyncContextManager[P2pdTransport]:
    return P2pdTransport.create(
        P2pdConfig(identity_path, listen=LOOPBACK, timing=Timing(handshake_s=HANDSHAKE_S))
    )


@contextlib.asynccontextmanager
async def echoing(opener: P2pdTransport, server: P2pdTransport) -> AsyncIterator[Stream]:
    """A stream that is in use."""
    await server.serve(ECHO, echo)
    stream = await dial(opener, server, ECHO)
    await stream.send(Message(b"first"))
    assert (await stream.receive()).header == b"first"
    try:
        yield stream
    finally:
        stream.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as nodes do
        runner.run(main())
