"""Which peers are watched, when there are more than can be. Pure.

Identities are free, so many of them must not displace others. Peers that answer come before those that were only announced. Among those that
answer, the second of a subnet comes after the first of every other subnet. Some places are kept for peers that were not asked yet. Ties
are broken by a secret salt, so identities cannot be made to win.
"""

import hashlib
import ipaddress
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmnet_protocols.net import PeerId

UNKNOWN_SHARE = 8
"""One place of so many is for peers that have not answered yet, if there are such."""


@dataclass(frozen=True)
class Candidate:
    """A peer that may be watched, and what speaks for it. ``since_s``: when it was first seen (Unix time)."""

    peer: PeerId
    addresses: tuple[str, ...]
    since_s: float
    answers: bool = False
    asked: bool = False
    """It is being asked now."""
    failures: int = 0
    """How often it did not answer, since it last did."""


def seated(candidates: Collection[Candidate], seats: int, salt: bytes) -> set[PeerId]:
    """Those of the candidates that are to be watched, ``seats`` at most."""
    if len(candidates) <= seats:
        return {each.peer for each in candidates}
    rank = _subnet_ranks(candidates, salt)
    known = sorted(
        (each for each in candidates if each.answers),
        key=lambda each: (rank[each.peer], each.since_s, each.peer),
    )
    unknown = sorted(
        (each for each in candidates if not each.answers),
        key=lambda each: (each.failures, not each.asked, rank[each.peer], _lot(each.peer, salt)),
    )
    reserved = min(len(unknown), seats // UNKNOWN_SHARE)
    chosen = known[: seats - reserved]
    chosen += unknown[: seats - len(chosen)]
    return {each.peer for each in chosen}


def _subnet_ranks(candidates: Iterable[Candidate], salt: bytes) -> Mapping[PeerId, int]:
    """How many in its network come before each peer: in the fullest of those that it names, so naming more wins nothing."""
    networks: dict[str, list[Candidate]] = defaultdict(list)
    for each in candidates:
        for network in networks_of(each.addresses):
            networks[network].append(each)
    before: dict[PeerId, int] = defaultdict(int)
    for members in networks.values():
        members.sort(
            key=lambda each: (not each.answers, each.since_s if each.answers else 0.0, _lot(each.peer, salt))
        )
        for place, each in enumerate(members):
            before[each.peer] = max(before[each.peer], place)
    return before


def networks_of(addresses: Sequence[str]) -> set[str]:
    """The networks of multiaddresses, as large as one holder usually has them; those that name none share one."""
    return {_network_of(address) for address in addresses} or {""}


def _network_of(address: str) -> str:
    _, kind, value, *_ = f"{address}///".split("/")
    try:
        if kind == "ip4":
            return str(ipaddress.ip_network(f"{value}/16", strict=False))
        if kind == "ip6":
            return str(ipaddress.ip_network(f"{value}/48", strict=False))
    except ValueError:
        return ""
    return value if kind.startswith("dns") else ""


def _lot(peer: PeerId, salt: bytes) -> bytes:
    return hashlib.blake2b(peer.encode(), key=salt, digest_size=8).digest()
