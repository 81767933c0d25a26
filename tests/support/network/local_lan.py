"""Computers of one local network: network namespaces on one bridge."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

from tests.support.processes.commands import Place


def why_not() -> str:
    """Return why this machine cannot run the lab, or an empty text if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "the ip command is not installed"


@contextlib.contextmanager
def lan(count: int) -> Iterator[list[Place]]:
    """``count`` hosts, 192.168.77.1 and so on. Their names are unique, so that several labs may run
    at once."""
    name = f"lan{uuid.uuid4().hex[:6]}"
    with contextlib.ExitStack() as stack:
        bridge = f"{name}B"
        _run(f"ip netns add {bridge}")
        stack.callback(_run, f"ip netns del {bridge}")
        _run(f"ip -n {bridge} link add br0 type bridge mcast_snooping 0")
        _run(f"ip -n {bridge} link set br0 up")
        places = []
        for number in range(1, count + 1):
            host = f"{name}A{number}"
            _run(f"ip netns add {host}")
            stack.callback(_run, f"ip netns del {host}")
            _run(f"ip -n {host} link set lo up")
            _run(f"ip link add eth0 netns {host} type veth peer name p{number} netns {bridge}")
            _run(f"ip -n {bridge} link set p{number} master br0 up")
            _run(f"ip -n {host} addr add 192.168.77.{number}/24 broadcast + dev eth0")
            _run(f"ip -n {host} link set eth0 up")
            places.append(Place(f"192.168.77.{number}", ("ip", "netns", "exec", host)))
        yield places


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
