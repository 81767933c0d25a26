"""The TXT record by which a peer announces its swarm in the local network.

The record has a salted hash of the swarm id, and the peer's private addresses in libp2p's
``dnsaddr=`` format. Outsiders see that swarmnet runs, but not which swarm. The hash covers the
addresses. So only a peer with the swarm file can make a record, and somebody who copies a record
cannot change whom it names.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Sequence

from swarmnet_protocols.net.dialling import Network, dialable, ip_of
from swarmnet_protocols.net.multiaddr import peer_in

MAX_RECORD_BYTES = 1200
"""Largest TXT record in bytes, sent or read. It fits into one packet."""
MAX_ANNOUNCED = 6
"""Most addresses of this peer that are announced. More do not fit into a record."""

_DOMAIN = b"swarmnet-mdns-1\0"
_SALT_BYTES = 16
_SWARM, _ADDRESS = "swarm=", "dnsaddr="


def make_record(swarm: bytes, addresses: Sequence[str]) -> bytes:
    """Return the TXT record by which a peer of ``swarm`` announces ``addresses``.

    They are multiaddrs that end with its peer id.
    """
    salt = secrets.token_bytes(_SALT_BYTES)
    kept = [each for each in addresses if len(_ADDRESS + each) < 256][:MAX_ANNOUNCED]
    strings = [f"{_SWARM}{salt.hex()}{_hash(swarm, salt, kept)}", *(_ADDRESS + each for each in kept)]
    return b"".join(bytes([len(each)]) + each.encode() for each in strings)


def read_record(swarm: bytes, record: bytes, networks: Sequence[Network]) -> tuple[str, ...]:
    """Return the multiaddrs in a TXT record that are in ``networks`` and may be dialled.

    Empty for a record that is not of ``swarm``, malformed or too large.
    """
    if len(record) > MAX_RECORD_BYTES:
        return ()
    try:
        strings = [each.decode("ascii") for each in _strings(record)]
    except ValueError:
        return ()
    hashes = [each.removeprefix(_SWARM) for each in strings if each.startswith(_SWARM)]
    addresses = [each.removeprefix(_ADDRESS) for each in strings if each.startswith(_ADDRESS)]
    peers = {peer_in(each) for each in addresses}
    if len(hashes) != 1 or len(peers) != 1 or not _is_of(swarm, hashes[0], addresses):
        return ()
    peer = peers.pop()
    found = dialable(peer, addresses, networks)
    return tuple(f"{each}/p2p/{peer}" for each in found if is_local(each, networks))


def _hash(swarm: bytes, salt: bytes, addresses: Sequence[str]) -> str:
    """Return a hash that only peers with the swarm id can make or recognise."""
    data = b"\0".join((salt, *(each.encode() for each in addresses)))
    return hmac.new(swarm, _DOMAIN + data, hashlib.sha256).hexdigest()


def _is_of(swarm: bytes, salted: str, addresses: Sequence[str]) -> bool:
    digits = 2 * _SALT_BYTES
    try:
        salt = bytes.fromhex(salted[:digits])
    except ValueError:
        return False
    return hmac.compare_digest(salted, salt.hex() + _hash(swarm, salt, addresses))


def _strings(record: bytes) -> Iterator[bytes]:
    """Yield the strings of a TXT record. Raises ``ValueError`` if the last one is cut short."""
    start = 0
    while start < len(record):
        end = start + 1 + record[start]
        if end > len(record):
            raise ValueError("a string of a TXT record is cut short")
        yield record[start + 1 : end]
        start = end


def is_local(address: str, networks: Sequence[Network]) -> bool:
    """Tell whether an address is in one of ``networks`` and leads there without a relay."""
    ip = ip_of(address)
    return "/p2p-circuit" not in address and ip is not None and any(ip in each for each in networks)
