"""The router of the lab for far links: a packet waits in the queue of its own sender only. Socket
pairs replace network interfaces."""

import asyncio
import contextlib
import random
import socket
from dataclasses import replace

import pytest

from tests.support.processes.wan import NETWORK, Router, Uplink, WanHost

PACKET_BYTES = 1000
SLOW, FAST = Uplink(delay_s=0.0, bytes_per_s=100_000.0), Uplink(delay_s=0.0)


def packet(source: int, target: int) -> bytes:
    """An IPv4 header with what the router reads of it, padded."""
    addresses = bytes(int(part) for number in (source, target) for part in f"{NETWORK}.{number}".split("."))
    return (bytes([0x45]) + bytes(11) + addresses).ljust(PACKET_BYTES, b"\0")


async def arrivals(sink: Uplink, count: int) -> list[int]:
    """Return the sources of the packets that come to host 2. Host 1 sends it ``count`` packets over
    a slow uplink, and then host 3 sends it one."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
        for one, other in pairs:
            one.setblocking(False)
            other.setblocking(False)
            stack.enter_context(one)
            stack.enter_context(other)
        uplinks = (SLOW, sink, FAST)
        hosts = [
            WanHost(number, "", router.fileno(), uplink)
            for number, (uplink, (router, _)) in enumerate(zip(uplinks, pairs, strict=True), start=1)
        ]
        Router(hosts, random.Random(0))
        for _ in range(count):
            pairs[0][1].send(packet(1, 2))
        await asyncio.sleep(0.02)
        pairs[2][1].send(packet(3, 2))
        loop, found = asyncio.get_running_loop(), list[int]()
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.5):
                    found.append((await loop.sock_recv(pairs[1][1], 2 * PACKET_BYTES))[15])
        for host in hosts:
            loop.remove_reader(host.tun)
        return found


@pytest.mark.parametrize("down_bytes_per_s", [FAST.down_bytes_per_s, 1e6])
def test_a_packet_does_not_wait_for_the_queue_of_another_uplink(down_bytes_per_s: float) -> None:
    found = asyncio.run(arrivals(replace(FAST, down_bytes_per_s=down_bytes_per_s), 20))
    assert found.count(1) == 20
    assert found.count(3) == 1, "it was dropped"
    if down_bytes_per_s == FAST.down_bytes_per_s:
        assert found.index(3) < 15
