"""Network addresses: checks of the addresses that users type, and the file in which a peer keeps its own."""

import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.joining.network import ANY_PORT
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import own_interfaces

ADDRESSES_NAME = "addresses"
MAX_ADDRESSES = 64
"""Most addresses read from the `addresses` file of a data directory."""
MAX_ADDRESS_CHARS = 512
PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,128}")
_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PORT = re.compile(r"/ip4/([0-9.]{7,15})/(tcp|udp)/([0-9]{1,5})/(?!.*p2p-circuit)")
_PART = re.compile(r"[A-Za-z0-9._:%-]+")
_EXAMPLE = "an address looks like /ip4/203.0.113.7/tcp/31337"


def parse_hosts(text: str) -> tuple[PeerId, ...]:
    """The peer ids in a comma-separated list. Raises ``ConfigError`` for text that is not a peer id."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not PEER_ID.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a peer id", hint="`swarmnet status --swarm SWARM` lists the hosts' peer ids"
            )
    return tuple(PeerId(name) for name in names)


def write_addresses(data_dir: Path, addresses: Sequence[str]) -> None:
    """Write the addresses of this peer to the file ``addresses`` in its data directory, one a line. Raises ``OSError``."""
    text = "".join(f"{address}\n" for address in addresses)
    write_whole(data_dir / ADDRESSES_NAME, text.encode(), mode=0o644, durable=False)


def read_addresses(data_dir: Path) -> tuple[str, ...]:
    """The addresses in the file of a data directory. Raises ``OSError``, and ``ConfigError`` for a file that is damaged."""
    with (data_dir / ADDRESSES_NAME).open("rb") as file:
        lines = file.read(MAX_ADDRESSES * MAX_ADDRESS_CHARS).decode(errors="replace").splitlines()
    for each in lines[:MAX_ADDRESSES]:
        check_peer_address(each)
    return tuple(lines[:MAX_ADDRESSES])


def usual_listen(data_dir: Path) -> tuple[str, ...]:
    """Default listen addresses of this data directory: the ports of its last run, as far as they are free.

    After a restart, the addresses that other peers know remain valid.
    """
    last = {"tcp": 0, "udp": 0}
    own = {host for host, _ in own_interfaces()}  # relays and routers have other ports
    with suppress(OSError, UnicodeDecodeError):
        for line in (data_dir / ADDRESSES_NAME).read_text().splitlines()[:MAX_ADDRESSES]:
            if (found := _PORT.match(line)) and found[1] in own and int(found[3]) <= 65535:
                last[found[2]] = int(found[3])
    tcp, udp = (port if _is_free(kind, port) else 0 for kind, port in last.items())
    return tuple(
        address.replace("tcp/0", f"tcp/{tcp}").replace("udp/0", f"udp/{udp}") for address in ANY_PORT
    )


def _is_free(kind: str, port: int) -> bool:
    with socket.socket(type=socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as probe:
        if kind == "tcp":  # a port that was closed a moment ago is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - as the peer will
        except OSError:
            return False
    return True


def check_listen_address(address: str) -> None:
    """Raise ``ConfigError`` unless ``address`` is a multiaddr to listen on or to announce."""
    _check(_parts(address), address, hint=_EXAMPLE)


def check_peer_address(address: str) -> None:
    """Raise ``ConfigError`` unless ``address`` is a multiaddr that ends with ``/p2p/PEER_ID``."""
    hint = f"{_EXAMPLE}/p2p/12D3Koo…, as printed by `swarmnet join` on the other machine"
    parts = _parts(address)
    if len(parts) < 2 or parts[-2] != "p2p" or not PEER_ID.fullmatch(parts[-1]):
        raise ConfigError(f"the address {address!r} does not end with /p2p/ and a peer id", hint=hint)
    _check(parts[:-2], address, hint=hint)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; without a host, this machine's own address.

    Raises ``ConfigError`` for anything else.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or not _is_any_host(host):
        raise ConfigError(
            f"{text[:80]!r} is not [HOST:]PORT",
            hint="write a port such as 9400, or 0.0.0.0:9400, or [::1]:9400",
        )
    return host, int(port)


def _is_any_host(host: str) -> bool:
    return any(_is_host(kind, host) for kind in ("ip4", "ip6", "dns"))


def _parts(address: str) -> list[str]:
    if not address.startswith("/") or len(address) > MAX_ADDRESS_CHARS:
        raise ConfigError(f"{address[:80]!r} is not a multiaddr", hint=_EXAMPLE)
    return address[1:].split("/")


def _check(parts: list[str], address: str, *, hint: str) -> None:
    """Check HOST-KIND/HOST/tcp|udp/PORT; what follows (quic-v1, relays) is left to the transport."""
    if len(parts) < 4 or not _is_host(parts[0], parts[1]):
        raise ConfigError(f"the address {address!r} has no valid host", hint=hint)
    if parts[2] not in {"tcp", "udp"} or not re.fullmatch(r"[0-9]{1,5}", parts[3]) or int(parts[3]) > 65535:
        raise ConfigError(f"the address {address!r} has no valid port", hint=hint)
    if not all(_PART.fullmatch(part) for part in parts):
        raise ConfigError(f"the address {address!r} has a part that no multiaddr has", hint=hint)


def _is_host(kind: str, host: str) -> bool:
    if kind in {"ip4", "ip6"}:
        try:
            return ipaddress.ip_address(host).version == int(kind[2])
        except ValueError:
            return False
    return kind in {"dns", "dns4", "dns6"} and _HOST_NAME.fullmatch(host) is not None
