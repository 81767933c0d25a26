"""Chooses the peers to poll when more peers are announced than the observer has slots.

Identities cost nothing, so a flood of them must not displace other peers:

1. Peers that answer come before peers that were only announced.
2. Among peers that answer, the second peer of a subnet comes after the first peer of every other
   subnet.
3. One slot in ``UNKNOWN_SHARE`` is for peers that have not answered yet.
4. Ties are broken by a hash with a secret salt, so that no identity can be generated to win them.
"""

import hashlib
import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId

UNKNOWN_SHARE = 8
"""One slot in this many is for peers that have not answered yet, if there are any."""


@dataclass(frozen=True)
class PollCandidate:
    """A peer that may be polled, with the facts that decide its rank. ``since_s``: Unix time at
    which it was first seen."""

    peer: PeerId
    addresses: tuple[str, ...]
    since_s: float
    answers: bool = False
    polled: bool = False
    """True if it has a slot at present."""
    failures: int = 0
    """Failed polls since the last one that succeeded."""


def select_peers(candidates: Collection[PollCandidate], slots: int, salt: bytes) -> set[PeerId]:
    """Return the peers to poll, at most ``slots``."""
    if len(candidates) <= slots:
        return {each.peer for each in candidates}
    rank = _subnet_ranks(candidates, salt)
    known = sorted(
        (each for each in candidates if each.answers),
        key=lambda each: (rank[each.peer], each.since_s, each.peer),
    )
    unknown = sorted(
        (each for each in candidates if not each.answers),
        key=lambda each: (each.failures, not each.polled, rank[each.peer], _tie_break(each.peer, salt)),
    )
    reserved = min(len(unknown), slots // UNKNOWN_SHARE)
    selected = known[: slots - reserved]
    selected += unknown[: slots - len(selected)]
    return {each.peer for each in selected}


def _subnet_ranks(candidates: Iterable[PollCandidate], salt: bytes) -> Mapping[PeerId, int]:
    """Return each peer's position in its subnet. For a peer with addresses in several subnets, this
    is the worst of its positions."""
    members: dict[str, list[PollCandidate]] = defaultdict(list)
    for each in candidates:
        for subnet in subnets_of(each.addresses):
            members[subnet].append(each)
    ranks: dict[PeerId, int] = defaultdict(int)
    for peers in members.values():
        peers.sort(
            key=lambda each: (
                not each.answers,
                each.since_s if each.answers else 0.0,
                _tie_break(each.peer, salt),
            )
        )
        for position, each in enumerate(peers):
            ranks[each.peer] = max(ranks[each.peer], position)
    return ranks


def subnets_of(addresses: Sequence[str]) -> set[str]:
    """Return the subnets of multiaddrs: /16 (IPv4), /48 (IPv6) or the DNS name. Addresses without
    any of these share the subnet ""."""
    return {_subnet_of(address) for address in addresses} or {""}


def _subnet_of(address: str) -> str:
    _, kind, value, *_ = f"{address}///".split("/")
    try:
        if kind == "ip4":
            return str(ipaddress.ip_network(f"{value}/16", strict=False))
        if kind == "ip6":
            return str(ipaddress.ip_network(f"{value}/48", strict=False))
    except ValueError:
        return ""
    return value if kind.startswith("dns") else ""


def _tie_break(peer: PeerId, salt: bytes) -> bytes:
    return hashlib.blake2b(peer.encode(), key=salt, digest_size=8).digest()
