"""Peers that let a data directory return to a swarm: a small file in the swarm's folder.

A swarm file may name no address, and an invite may name machines that are gone. So every connection
writes down which peers answered, and the next connection starts from them.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnet.addresses import check_peer_address
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.net.multiaddr import peer_in

PEERS_NAME = "peers"
MAX_PEERS = 16
"""Addresses kept of each kind. Enough that a few still answer after months, when most hosts have
come and gone."""
_MAX_BYTES = 64 << 10


@dataclass(frozen=True)
class KnownPeers:
    """Multiaddrs with peer ids."""

    named: tuple[str, ...] = ()
    """Addresses that the owner gave, in an invite or by ``--bootstrap``. They are dialled as they
    are."""
    seen: tuple[str, ...] = ()
    """Addresses that peers announced. They are dialled as far as ``net/dialling.py`` allows."""

    def named_too(self, addresses: Iterable[str]) -> "KnownPeers":
        """Return these peers and, before them, ``addresses``, which the owner has just given."""
        return KnownPeers(tuple(dict.fromkeys((*addresses, *self.named)))[:MAX_PEERS], self.seen)

    def after(self, answered: Sequence[str]) -> "KnownPeers":
        """Return the peers to keep when the peers at ``answered`` are in the swarm."""
        there = {peer_in(each) for each in answered}
        named = tuple(each for each in self.named if peer_in(each) in there)
        return KnownPeers(named or self.named, tuple(dict.fromkeys(answered))[:MAX_PEERS])


def read_known_peers(folder: Path) -> KnownPeers:
    """Return the peers in the folder of a swarm; none if the file is missing or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        with (folder / PEERS_NAME).open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        return KnownPeers(_checked(content["named"]), _checked(content["seen"]))
    return KnownPeers()


def write_known_peers(folder: Path, known: KnownPeers) -> None:
    """Replace the file in the folder of a swarm. Raises ``OSError``."""
    content = {"named": known.named, "seen": known.seen}
    write_whole(folder / PEERS_NAME, json.dumps(content, indent=1).encode(), mode=0o600, durable=False)


def _checked(addresses: Iterable[str]) -> tuple[str, ...]:
    found = []
    for each in addresses:
        with suppress(ConfigError):
            check_peer_address(each)
            found.append(each)
    return tuple(found[:MAX_PEERS])
