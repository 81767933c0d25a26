"""Announcements of hosts: what a host says of itself in the directory, and what others may read from it."""

import math
from collections.abc import Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.records import open_valid
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.wire import records_pb2 as pb

MAX_ADDRESSES = 16
"""Of these many each is dialled when need be; the rest of a longer list is not looked at."""
MAX_ADDRESSES_BYTES = 2048
"""Of all addresses in one record."""
MAX_STEP_S = 3600.0
PROTOCOL = 1
"""Version of session.proto that this software speaks."""


def listed(addresses: Sequence[str]) -> list[str]:
    """As many of ``addresses`` as a record may hold, the first ones."""
    kept: list[str] = []
    for address in addresses[:MAX_ADDRESSES]:
        if sum(map(len, kept)) + len(address) <= MAX_ADDRESSES_BYTES:
            kept.append(address)
    return kept


def hosts_topic(manifest: bytes) -> str:
    """Where the hosts of a model announce themselves."""
    return f"hosts/{manifest.hex()}"


async def read_records(directory: Directory, manifest: bytes) -> list[tuple[HostInfo, pb.HostRecord]]:
    """Every credible announcement for a model, in the order of peer ids. What makes no sense is left out."""
    return [(info, body) for info, body, _ in await read_numbered(directory, manifest)]


async def read_numbered(directory: Directory, manifest: bytes) -> list[tuple[HostInfo, pb.HostRecord, int]]:
    """The same, each with its sequence: an announcement that is newer has a higher one."""
    found = []
    for record in await directory.lookup(hosts_topic(manifest)):
        try:
            body = pb.HostRecord.FromString(record.body)
        except DecodeError:
            continue
        if (
            body.manifest == manifest
            and body.protocol == PROTOCOL
            and 0 <= body.start < body.end <= MAX_BLOCKS
            and 0 <= body.step_s <= MAX_STEP_S
            and math.isfinite(body.step_s)
        ):
            info = HostInfo(
                peer=peer_id_of(record.signer),
                start=body.start,
                end=body.end,
                step_s=body.step_s,
                addresses=tuple(body.addresses[:MAX_ADDRESSES]),
                online=body.state == pb.HOST_STATE_ONLINE,
                record=record.sealed,
            )
            found.append((info, body, record.sequence))
    return sorted(found, key=lambda each: each[0].peer)


async def read_hosts(directory: Directory, manifest: bytes) -> Sequence[HostInfo]:
    """The hosts of a model that are online."""
    return [info for info, _ in await read_records(directory, manifest) if info.online]


def signed_addresses(
    record: bytes, peer: PeerId, manifest: bytes, *, swarm: bytes, now: float
) -> tuple[str, ...]:
    """Where ``peer`` may be dialled by its own word: the addresses in its sealed announcement as a host of a model.

    None where ``record`` is something else: of another peer, model or swarm, expired, or not signed.
    """
    for opened in open_valid([record], swarm=swarm, now=now):
        with suppress(DecodeError):
            if opened.peer_id == peer and opened.topic == hosts_topic(manifest):
                return tuple(pb.HostRecord.FromString(opened.body).addresses[:MAX_ADDRESSES])
    return ()
