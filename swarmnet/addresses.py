"""Network addresses: checks what users type, and keeps a peer's own addresses in a file."""

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.dialling import own_interfaces
from swarmnet_protocols.net.multiaddr import MAX_ADDRESS_CHARS, PEER_ID, Multiaddr, parse_multiaddrs

_log = logging.getLogger(__name__)

ADDRESSES_NAME = "addresses"
FOLLOW_S = 10.0
"""Seconds between two checks of this peer's addresses. The file may be outdated for that long."""
MAX_ADDRESSES = 64
"""Most addresses read from the `addresses` file of a data directory."""


_HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PART = re.compile(r"[A-Za-z0-9._:%-]+")
_EXAMPLE = "an address looks like /ip4/203.0.113.7/tcp/31337"


def parse_hosts(text: str) -> tuple[PeerId, ...]:
    """Return the peer ids in a comma-separated list. Raises ``ConfigError`` for text that is not a
    peer id."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not PEER_ID.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a peer id", hint="`swarmnet status` on a host prints its peer id"
            )
    return tuple(PeerId(name) for name in names)


def write_addresses(data_dir: Path, addresses: Sequence[str]) -> None:
    """Write the addresses of this peer to the file ``addresses`` in its data directory, one a line.
    Raises ``OSError``."""
    text = "".join(f"{address}\n" for address in addresses)
    write_whole(data_dir / ADDRESSES_NAME, text.encode(), mode=0o644, durable=False)


def read_addresses(data_dir: Path) -> tuple[str, ...]:
    """Return the addresses in the file of a data directory; none before its peer has run."""
    found: list[str] = []
    with suppress(OSError, UnicodeDecodeError), (data_dir / ADDRESSES_NAME).open("rb") as file:
        lines = file.read(MAX_ADDRESSES * MAX_ADDRESS_CHARS).decode().splitlines()
        for each in lines[:MAX_ADDRESSES]:
            with suppress(ConfigError):
                check_peer_address(each)
                found.append(each)
    return tuple(found)


async def follow_addresses(data_dir: Path, current: Callable[[], Sequence[str]]) -> None:
    """Write the ``current`` addresses to the file ``addresses`` whenever they change, until
    cancelled."""
    written = None
    while True:
        addresses = list(current())
        if addresses != written:
            try:
                write_addresses(data_dir, addresses)
                written = addresses
            except OSError as error:
                _log.warning("cannot write the file addresses", extra={"reason": str(error)})
        await asyncio.sleep(FOLLOW_S)


def usual_listen(data_dir: Path, listen: Sequence[str] = ()) -> tuple[str, ...]:
    """Return ``listen``, or by default every address of this machine.

    Port 0 becomes the port of the last run in this data directory, if that port is free. So the
    addresses that other peers know stay valid after a restart.
    """
    from swarmnet_protocols.joining.network import any_port

    last: dict[tuple[int, str], int] = {}
    own = {host for host, _ in own_interfaces()}  # ports at relays and routers are not this machine's
    for each in parse_multiaddrs(read_addresses(data_dir)):
        if str(each.ip) in own and not each.is_relayed:
            last[each.ip.version, each.kind] = each.port
    found = list(listen or any_port())
    for number, text in enumerate(found):
        for each in parse_multiaddrs([text]):
            same = replace(each, port=last.get((each.ip.version, each.kind), 0))
            if not each.port and same.port and is_free(same):
                found[number] = str(same)
    return tuple(found)


def is_free(address: Multiaddr) -> bool:
    """Return whether this machine can listen on ``address`` now."""
    family = socket.AF_INET if address.ip.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM if address.kind == "tcp" else socket.SOCK_DGRAM) as probe:
        if address.kind == "tcp":  # a port that was closed a moment ago is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((str(address.ip), address.port))
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
    """Return host and port of ``[HOST:]PORT``. The default host is 127.0.0.1.

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
    """Check HOST-KIND/HOST/tcp|udp/PORT; what follows (quic-v1, relays) is left to the
    transport."""
    if len(parts) < 4 or not _is_host(parts[0], parts[1]):
        raise ConfigError(f"the address {address!r} has no valid host", hint=hint)
    if parts[2] not in {"tcp", "udp"} or not re.fullmatch(r"[0-9]{1,5}", parts[3]) or int(parts[3]) > 65535:
        raise ConfigError(f"the address {address!r} has no valid port", hint=hint)
    if not all(_PART.fullmatch(part) for part in parts):
        raise ConfigError(f"the address {address!r} has an invalid part", hint=hint)


def _is_host(kind: str, host: str) -> bool:
    if kind in {"ip4", "ip6"}:
        try:
            return ipaddress.ip_address(host).version == int(kind[2])
        except ValueError:
            return False
    return kind in {"dns", "dns4", "dns6"} and _HOST_NAME.fullmatch(host) is not None
