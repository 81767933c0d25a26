"""A small internet on this machine: hosts with delay, loss and rate between them, and silent cuts.

    python -m tests.support.processes.wan [--hosts 3] [--delay-ms 25] [--loss 0.01]
        [--rate-mbit 100] [-- COMMAND ...]

Each host is a network namespace with one TUN interface; a router in this process carries the
packets between them, so TCP and QUIC are treated alike. Needs root and /dev/net/tun; the kernel's
netem is not needed.
"""

import argparse
import asyncio
import contextlib
import fcntl
import heapq
import itertools
import math
import os
import random
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.commands import Place
from tests.support.processes.nodes import Swarm

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
NETWORK = "10.77.0"
MTU_BYTES = 9000
QUEUE_BYTES = 4 << 20
"""Bytes that an uplink buffers before it drops packets, like a home router."""


@dataclass(frozen=True)
class Uplink:
    """The connection of a host. Between two hosts the delays add up, and the worse loss and the
    lower rate count."""

    delay_s: float = 0.0125
    """One way, to the middle of the Internet: the round trip between two such hosts takes four
    times this."""
    loss: float = 0.0
    bytes_per_s: float = 12_500_000.0
    down_bytes_per_s: float = math.inf


class WanHost:
    """One host: run a command at its ``place``; ``cut`` it off, ``heal`` it. Packets pass between
    hosts of the same ``side``."""

    def __init__(self, number: int, namespace: str, tun: int, uplink: Uplink) -> None:
        self.number = number
        self.place = Place(f"{NETWORK}.{number}", ("ip", "netns", "exec", namespace))
        self.tun = tun
        self.uplink = uplink
        self.side = 0
        self.free_at = 0.0
        self.down_free_at = 0.0

    def cut(self) -> None:
        """Drop its packets from here on, without a notice to any host."""
        self.side = -self.number

    def heal(self) -> None:
        self.side = 0


class Router:
    """Carries packets between hosts with their delay and loss."""

    def __init__(self, hosts: Sequence[WanHost], rng: random.Random) -> None:
        self._hosts = {host.number: host for host in hosts}
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._order = itertools.count()
        self._on_the_way: list[tuple[float, int, int, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        for host in hosts:
            self._loop.add_reader(host.tun, self._take, host)

    def _take(self, source: WanHost) -> None:
        for _ in range(64):
            try:
                packet = os.read(source.tun, 1 << 16)
            except BlockingIOError:
                break
            self._accept(source, packet)
        self._set_timer()

    def _accept(self, source: WanHost, packet: bytes) -> None:
        if packet[0] >> 4 != 4 or packet[16:19] != bytes(map(int, NETWORK.split("."))):
            return
        sink = self._hosts.get(packet[19])
        if sink is None or source.side != sink.side:
            return
        if self._rng.random() < max(source.uplink.loss, sink.uplink.loss):
            return
        now = self._loop.time()
        begins = max(now, source.free_at)
        if (begins - now) * source.uplink.bytes_per_s > QUEUE_BYTES:
            return
        source.free_at = begins + len(packet) / source.uplink.bytes_per_s
        arrives = source.free_at + source.uplink.delay_s + sink.uplink.delay_s
        if math.isfinite(sink.uplink.down_bytes_per_s):
            waits_s = max(0.0, sink.down_free_at - arrives)
            if waits_s * sink.uplink.down_bytes_per_s > QUEUE_BYTES:
                return
            arrives += waits_s + len(packet) / sink.uplink.down_bytes_per_s
            sink.down_free_at = arrives
        heapq.heappush(self._on_the_way, (arrives, next(self._order), sink.tun, packet))

    def _set_timer(self) -> None:
        if not self._on_the_way:
            return
        due = self._on_the_way[0][0]
        if self._timer is None or due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        while self._on_the_way and self._on_the_way[0][0] <= self._loop.time() + 2e-4:
            _, _, tun, packet = heapq.heappop(self._on_the_way)
            with contextlib.suppress(BlockingIOError):  # a full interface drops, as real ones do
                os.write(tun, packet)
        self._set_timer()


def why_not() -> str:
    """The reason why namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not TUN.exists():
        return f"there is no {TUN}"
    return "" if shutil.which("ip") else "the ip command is not installed"


@contextmanager
def wan(*uplinks: Uplink, seed: int = 0) -> Iterator[list[WanHost]]:
    """Hosts 10.77.0.1, 10.77.0.2, ... with these uplinks, for as long as the context."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(number, uplink)) for number, uplink in enumerate(uplinks, start=1)]
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        thread = threading.Thread(target=_route, args=(loop, hosts, random.Random(seed)), name="wan")
        thread.start()
        stack.callback(thread.join)
        stack.callback(lambda: loop.call_soon_threadsafe(loop.stop))
        yield hosts


@dataclass(frozen=True)
class WanSwarm:
    """A swarm with each node on its own host, and one more host for a client."""

    swarm: Swarm
    hosts: dict[str, WanHost]
    client: Place


@contextmanager
def wan_swarm(
    directory: Path, cache_dir: Path, uplink: Uplink, *spans: tuple[int, int]
) -> Iterator[WanSwarm]:
    """A swarm of nodes with these spans behind these uplinks, ready to answer."""
    lab = Swarm(directory, cache_dir)
    with wan(*[uplink] * (len(spans) + 1)) as (client, *places):
        try:
            hosts: dict[str, WanHost] = {}
            for number, ((start, end), host) in enumerate(zip(spans, places, strict=True)):
                name = f"{start}-{end}-{number}"
                node = lab.launch(name, "--blocks", f"{start}:{end}", place=host.place)
                if number == 0:
                    _ = node.ready
                hosts[name] = host
            for node in lab.nodes.values():
                _ = node.ready
            yield WanSwarm(lab, hosts, client.place)
        finally:
            lab.close()


def _route(loop: asyncio.AbstractEventLoop, hosts: Sequence[WanHost], rng: random.Random) -> None:
    async def start() -> Router:
        return Router(hosts, rng)

    _router = loop.run_until_complete(start())
    loop.run_forever()


@contextmanager
def _host(number: int, uplink: Uplink) -> Iterator[WanHost]:
    namespace = f"swarmnet-{os.getpid()}-{number}"
    _ip("netns", "add", namespace)
    try:
        tun = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        try:
            request = fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"swarmnet%d", IFF_TUN | IFF_NO_PI))
            name = request[:16].rstrip(b"\0").decode()
            _ip("link", "set", name, "netns", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", name, "mtu", str(MTU_BYTES), "txqueuelen", "2000")
            _ip("-n", namespace, "addr", "add", f"{NETWORK}.{number}/24", "dev", name)
            _ip("-n", namespace, "link", "set", name, "up")
            # What nearly all home machines use; it fills the queue of an uplink, where BBR keeps it
            # short.
            _ip("-n", namespace, "route", "change", f"{NETWORK}.0/24", "dev", name, "congctl", "cubic")
            yield WanHost(number, namespace, tun, uplink)
        finally:
            os.close(tun)
    finally:
        _ip("netns", "del", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way, between any two hosts")
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs="*", help="run while the lab is there; default: a shell")
    arguments = parser.parse_args()
    uplink = Uplink(arguments.delay_ms / 2000, arguments.loss, arguments.rate_mbit * 125_000)
    with wan(*[uplink] * arguments.hosts, seed=arguments.seed) as hosts:
        for host in hosts:
            print(*host.place.prefix, f"COMMAND   # {host.place.ip}", flush=True)
        subprocess.run(arguments.command or [os.environ.get("SHELL", "/bin/sh")], check=False)


if __name__ == "__main__":
    main()
