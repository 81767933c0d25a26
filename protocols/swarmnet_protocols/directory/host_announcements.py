"""Announcements of hosts in the directory: their blocks, speed, state and addresses, and which of these are plausible."""

import math
import re
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
"""Most addresses that are read from one record. Each may be dialled."""
MAX_ADDRESSES_BYTES = 2048
"""Most bytes of all addresses in one record."""
MAX_STEP_S = 3600.0
PRECISION = re.compile(r"[a-z0-9_]{1,16}(/[a-z0-9]{1,8})?")
"""Precisions that a host may announce."""
PROTOCOL = 1
"""Version of session.proto that this release implements."""


def listed(addresses: Sequence[str]) -> list[str]:
    """The first of ``addresses``, as many as fit into a record."""
    kept: list[str] = []
    for address in addresses[:MAX_ADDRESSES]:
        if sum(map(len, kept)) + len(address) <= MAX_ADDRESSES_BYTES:
            kept.append(address)
    return kept


def hosts_topic(manifest: bytes) -> str:
    """The topic of the announcements of a model's hosts."""
    return f"hosts/{manifest.hex()}"


async def read_records(directory: Directory, manifest: bytes) -> list[tuple[HostInfo, pb.HostRecord]]:
    """Every plausible announcement for a model, in the order of peer ids."""
    return [(info, body) for info, body, _ in await read_numbered(directory, manifest)]


async def read_numbered(directory: Directory, manifest: bytes) -> list[tuple[HostInfo, pb.HostRecord, int]]:
    """As :func:`read_records`, each with its sequence number, which grows with every announcement of a host."""
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
                is_open=body.nat in (pb.NAT_UNKNOWN, pb.NAT_NONE),
                is_symmetric=body.nat == pb.NAT_SYMMETRIC,
                precision=body.precision if PRECISION.fullmatch(body.precision) else "",
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
    """The addresses that ``peer`` announced, from ``record``, its sealed announcement as a host of a model.

    Empty if ``record`` is of another peer, model or swarm, expired, or not signed by ``peer``.
    """
    for opened in open_valid([record], swarm=swarm, now=now):
        with suppress(DecodeError):
            if opened.peer_id == peer and opened.topic == hosts_topic(manifest):
                return tuple(pb.HostRecord.FromString(opened.body).addresses[:MAX_ADDRESSES])
    return ()
