"""Multiaddrs: the text form of a peer's address, parsed once into a typed value.

Addresses come from peers, from p2pd and from files. :func:`parse_multiaddr` accepts only addresses
that this project dials or listens on. They have an IP address, a TCP or UDP port, and the rest of
the path, such as ``quic-v1`` or a relay. All other code works on :class:`Multiaddr`, so no other
module splits text that a peer sent.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from swarmnet_protocols.net import PeerId

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_ADDRESS_CHARS = 512
"""Longest multiaddr that is parsed. One with a relay and two peer ids has 200 characters."""
PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,128}")
"""A peer id in base58. Whether it belongs to a key is checked where the peer proves its
identity."""
_PORT = re.compile(r"[0-9]{1,5}")
_PART = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True)
class Multiaddr:
    """An IP address, a port, and the rest of the path."""

    ip: IPAddress
    kind: Literal["tcp", "udp"]
    port: int
    rest: tuple[str, ...] = ()
    """The parts after the port: ``quic-v1``, ``p2p`` and a peer id, ``p2p-circuit``."""

    def __str__(self) -> str:
        return "/".join(["", f"ip{self.ip.version}", str(self.ip), self.kind, str(self.port), *self.rest])

    @property
    def is_relayed(self) -> bool:
        """True if the address leads through a relay. Then ``ip`` and ``port`` are the relay's."""
        return "p2p-circuit" in self.rest

    def without_peer(self) -> "Multiaddr":
        """Return this address without the peer id at its end."""
        ends_in_peer = len(self.rest) > 1 and self.rest[-2] == "p2p"
        return replace(self, rest=self.rest[:-2]) if ends_in_peer else self


def peer_in(address: str) -> PeerId:
    """Return the peer id at the end of a multiaddr; the whole text if there is none."""
    return PeerId(address.rpartition("/p2p/")[2])


def parse_multiaddr(text: str) -> Multiaddr | None:
    """Parse ``text`` as an address; None for any other text."""
    if len(text) > MAX_ADDRESS_CHARS:
        return None
    match text.split("/"):
        case ["", "ip4" | "ip6" as family, host, "tcp" | "udp" as kind, port, *rest]:
            ip = parse_ip(host)
            if ip is None or f"ip{ip.version}" != family or not _PORT.fullmatch(port):
                return None
            if int(port) < 1 << 16 and all(map(_PART.fullmatch, rest)):
                return Multiaddr(ip, "tcp" if kind == "tcp" else "udp", int(port), tuple(rest))
    return None


def parse_multiaddrs(texts: Iterable[str]) -> Iterator[Multiaddr]:
    """Return the addresses among ``texts``, in order. Other texts are left out."""
    return (parsed for text in texts if (parsed := parse_multiaddr(text)) is not None)


def parse_ip(text: str) -> IPAddress | None:
    """Parse ``text`` as an IP address; None for any other text.

    None for an IPv6 address with a zone, too: a zone has a meaning on one machine only.
    """
    if "%" in text:
        return None
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
