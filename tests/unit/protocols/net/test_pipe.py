"""A pipe that is cancelled while it is connected leaves no socket open."""

import asyncio
import gc
import socket
import warnings

import uvloop

from swarmnet_protocols.net import pipe
from tests.defences import Patch, defence


def wait_only(patch: Patch) -> None:
    async def connected(connecting):  # type: ignore[no-untyped-def]
        return (await connecting)[1]

    patch.setattr(pipe, "connected", connected)


@defence("a pipe that is cancelled while it is connected is closed", off=wait_only)
def test_a_pipe_cancelled_while_it_is_connected_is_closed() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always")
            adopting = asyncio.get_running_loop().create_task(pipe.adopt(ours))
            await asyncio.sleep(0)
            adopting.cancel()
            await asyncio.wait([adopting])
            assert adopting.cancelled()
            gc.collect()
            assert not unclosed

    uvloop.run(main())
