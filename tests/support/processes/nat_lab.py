"""Hosts behind routers of several kinds, in network namespaces of this machine. Needs root, `ip`
and `nft`.

The internet between them is a bridge in a namespace of its own. Its addresses, 25.0.0.K, look
public, because peers dial and announce public addresses only; nothing leaves the machine. Host K
behind a router is 192.168.K.2, and its router is 25.0.0.K.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.processes.commands import Place

KINDS = ("open", "full", "cone", "symmetric", "tcponly", "upnp", "natpmp")
"""``open``: no router. ``full``: the router forwards every port. ``cone``: one mapping for all
destinations, which lets in only those the host has sent to. ``symmetric``: another random port for
each destination. ``tcponly``: as ``cone``, without UDP. ``upnp``, ``natpmp``: as ``cone``, and the
router forwards ports when it is asked so in that protocol, by miniupnpd."""


def why_not() -> str:
    """Why this machine cannot run the lab; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def nat_lab(kinds: Sequence[str]) -> Iterator[list[Place]]:
    """One host behind a router of each kind. Processes that still run there at the end are
    killed."""
    _remove(len(kinds))
    try:
        _run("ip netns add lab-net")
        _run("ip -n lab-net link add br0 type bridge")
        _run("ip -n lab-net link set br0 up")
        yield [_host(number, kind) for number, kind in enumerate(kinds, 1)]
    finally:
        _remove(len(kinds))


def forget_mappings(number: int) -> None:
    """The router of host ``number`` loses its table, as after a restart."""
    _run(f"ip netns exec lab-r{number} nft flush ruleset")
    kind = _kinds[number]
    _run(f"ip netns exec lab-r{number} conntrack -F", check=False)
    _run(f"ip netns exec lab-r{number} nft -f -", text=_rules(number, kind))


def move(number: int, address: str) -> None:
    """The router of host ``number`` gets another address, and loses its table."""
    _run(f"ip -n lab-r{number} addr flush dev wan")
    _run(f"ip -n lab-r{number} addr add {address}/24 dev wan")
    forget_mappings(number)


_kinds: dict[int, str] = {}


def _host(number: int, kind: str) -> Place:
    _kinds[number] = kind
    host = f"lab-h{number}"
    edge = host if kind == "open" else f"lab-r{number}"
    for namespace in {host, edge}:
        _run(f"ip netns add {namespace}")
        _run(f"ip -n {namespace} link set lo up")
    _run(f"ip link add wan netns {edge} type veth peer name p{number} netns lab-net")
    _run(f"ip -n lab-net link set p{number} master br0 up")
    _run(f"ip -n {edge} addr add 25.0.0.{number}/24 dev wan")
    _run(f"ip -n {edge} link set wan up")
    if kind == "open":
        return Place(f"25.0.0.{number}", ("ip", "netns", "exec", host))
    _run(f"ip link add lan netns {edge} type veth peer name eth0 netns {host}")
    _run(f"ip -n {edge} addr add 192.168.{number}.1/24 dev lan")
    _run(f"ip -n {edge} link set lan up")
    _run(f"ip -n {host} addr add 192.168.{number}.2/24 dev eth0")
    _run(f"ip -n {host} link set eth0 up")
    _run(f"ip -n {host} route add default via 192.168.{number}.1")
    _run(f"ip netns exec {edge} sysctl -qw net.ipv4.ip_forward=1")
    _run(f"ip netns exec {edge} nft -f -", text=_rules(number, kind))
    if kind in ("upnp", "natpmp"):
        _forward_on_request(edge, kind)
    return Place(f"192.168.{number}.2", ("ip", "netns", "exec", host))


def _forward_on_request(router: str, kind: str) -> None:
    """Start miniupnpd on a router. It ends with the other processes there."""
    settings = {
        "ext_ifname": "wan",
        "listening_ip": "lan",
        "enable_upnp": "yes" if kind == "upnp" else "no",
        "enable_natpmp": "yes" if kind == "natpmp" else "no",
        "uuid": "00000000-0000-0000-0000-000000000000",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("".join(f"{name}={value}\n" for name, value in settings.items()))
        file.flush()
        pid = Path(file.name).with_suffix(".pid")
        _run(f"ip netns exec {router} miniupnpd -f {file.name} -P {pid}")
        pid.unlink(missing_ok=True)


def _rules(number: int, kind: str) -> str:
    masquerade = "masquerade random,fully-random" if kind == "symmetric" else "masquerade"
    forward = f'iif "wan" dnat to 192.168.{number}.2' if kind == "full" else ""
    no_udp = 'iif "lan" meta l4proto udp drop' if kind == "tcponly" else ""
    no_new = "" if kind == "full" else 'iif "wan" ct state new drop'
    if kind in ("upnp", "natpmp"):
        return _FORWARDED_ON_REQUEST
    return f"""
table ip nat {{
  chain before {{ type nat hook prerouting priority -100; {forward}
  }}
  chain after {{ type nat hook postrouting priority 100; oif "wan" {masquerade}
  }}
}}
table ip filter {{
  chain forward {{ type filter hook forward priority 0; {no_udp}
    {no_new}
  }}
  chain input {{ type filter hook input priority 0; iif "wan" ct state new drop
  }}
}}
"""


_FORWARDED_ON_REQUEST = """
table inet filter {
  chain miniupnpd {
  }
  chain prerouting_miniupnpd {
  }
  chain postrouting_miniupnpd {
  }
  chain before { type nat hook prerouting priority -100; jump prerouting_miniupnpd
  }
  chain after { type nat hook postrouting priority 100; jump postrouting_miniupnpd
    oifname "wan" masquerade
  }
  chain forward { type filter hook forward priority 0; jump miniupnpd
    iifname "wan" ct state new drop
  }
  chain input { type filter hook input priority 0; iifname "wan" ct state new drop
  }
}
"""
"""The rules of a cone router, in the tables and chains that miniupnpd fills."""


def _remove(count: int) -> None:
    for namespace in ["lab-net", *(f"lab-{side}{number}" for side in "hr" for number in range(1, count + 1))]:
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run(f"ip netns del {namespace}", check=False)


def _run(command: str, *, check: bool = True, text: str | None = None) -> None:
    subprocess.run(command.split(), check=check, input=text, text=True, capture_output=True)
