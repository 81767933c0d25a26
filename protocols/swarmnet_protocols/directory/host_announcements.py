"""Announcements of hosts: blocks, speed, state and addresses, and checks of what is plausible.

Clients read them to build chains, and joining nodes to choose their blocks. A node announces each
of its states:

1. ``choosing``: the blocks that it intends to take, so that nodes that join at the same time take
   others.
2. ``joining``: the blocks that it is loading.
3. ``online``: clients may open sessions.
4. ``leaving`` and ``paused``: clients must not choose this host.
"""

import hashlib
import math
import random
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.records import Record, open_valid
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import PeerId, ReachKind, Transport
from swarmnet_protocols.routing.coordinates import read_coordinate
from swarmnet_protocols.routing.host_info import INCOMPATIBLE, HostInfo
from swarmnet_protocols.wire import records_pb2 as pb
from swarmnet_protocols.wire.report_pb2 import Reach

MAX_ADDRESSES = 16
"""Most addresses that are read from one record. A peer may dial each of them."""
MAX_ADDRESSES_BYTES = 2048
"""Most bytes of all addresses in one record."""
MAX_STEP_S = 3600.0
PRECISION = re.compile(r"[a-z0-9_]{1,16}(/[a-z0-9]{1,8})?")
"""Pattern of the precisions that a host may announce."""
ARITHMETIC = re.compile(r"[a-z0-9-]{1,16}")
"""Pattern of the names of arithmetic that a host may announce."""
MISSING_EXPERTS = re.compile(r"[0-9,:;-]{1,127}…?")
"""Pattern of the lists of experts that a host may announce."""
MAX_EXPERTS_CHARS = 100
"""Most characters of the missing experts in an announcement. Longer lists are cut."""
PROTOCOL = 2
"""Version of session.proto that this release implements."""
SHARDS = 16
"""Number of topics that share the announcements of a model's hosts.

The keys of each topic have room for about 4,000 announcements.
"""
WANTED = 96
"""Number of announcements that a refresh reads, approximately."""
FIRST_SHARDS = 2
"""Number of shards that are read first. Their content decides how many more are needed."""
MIN_PER_SHARD = 16
"""Fewest announcements that are requested from each shard.

In a small swarm the shards hold unequal numbers of announcements.
"""
MAX_KNOWN = 1024
"""Announcements that are kept; the ones read last stay."""
REDRAW_S = 60.0
"""Seconds until a refresh draws a new order of shards."""
MAX_TEXT_CHARS = 128
MAX_NAME_CHARS = 64
"""Most characters of a peer's public name."""
MAX_NUMBER = 1 << 53
"""Largest number in a peer's announcement.

Above it a double, as JSON readers use it, skips integers.
"""
_TOPIC = "hosts/"
_STATES = {
    number: name.removeprefix("HOST_STATE_").lower() for name, number in pb.HostState.items() if number
}


def listed(addresses: Sequence[str]) -> list[str]:
    """Return the first of ``addresses``, as many as fit into a record."""
    kept: list[str] = []
    for address in addresses[:MAX_ADDRESSES]:
        if sum(map(len, kept)) + len(address) <= MAX_ADDRESSES_BYTES:
            kept.append(address)
    return kept


def host_announcement(record: pb.HostRecord, transport: Transport, lifetime_s: float) -> Announcement:
    """Return the announcement of this peer as a host.

    ``record`` describes the host. The addresses come from ``transport``.
    """
    record.protocol = PROTOCOL
    # Readers take the first addresses. Loopback addresses help only peers on the same machine.
    record.addresses[:] = listed(sorted(transport.addresses(), key=_is_loopback))
    record.nat = _nat(transport.reach())
    topic = hosts_topic(record.manifest, transport.peer_id)
    return Announcement(topic, record.SerializeToString(), lifetime_s)


def _is_loopback(address: str) -> bool:
    return "/127." in address or "/::1/" in address


def _nat(reach: Reach) -> pb.Nat:
    if reach.kind in (ReachKind.OPEN, ReachKind.FORWARDED):
        return pb.NAT_NONE
    return {"cone": pb.NAT_CONE, "symmetric": pb.NAT_SYMMETRIC}.get(reach.nat, pb.NAT_UNKNOWN)


def shortened(experts: str) -> str:
    """Cut a list of experts to the length that fits into an announcement."""
    return experts if len(experts) <= MAX_EXPERTS_CHARS else experts[:MAX_EXPERTS_CHARS] + "…"


def hosts_topic(manifest: bytes, peer: PeerId) -> str:
    """Return the topic for a host's announcement. The peer id picks the shard of the model."""
    return _shard_topic(manifest, hashlib.sha256(peer.encode()).digest()[0] % SHARDS)


def _shard_topic(manifest: bytes, shard: int) -> str:
    return f"{_TOPIC}{manifest.hex()}/{shard:x}"


class HostSample:
    """The announcements of a model's hosts that this peer has read.

    In a small swarm these are all of them, in a large swarm a random sample. A host's peer id
    hashes to one of ``SHARDS`` topics. A refresh reads random shards, and a random sample of each,
    until it has about ``WANTED`` announcements. Announcements stay known until they expire.

    So no peer decides what others read of the swarm, as a peer that made summaries would. No peer
    id and no announcement attracts more readers than others.
    """

    def __init__(
        self, directory: Directory, manifest: bytes, rng: random.Random, *, wanted: int = WANTED
    ) -> None:
        """``wanted``: after this many announcements a refresh reads no further shard."""
        self._directory = directory
        self._manifest = manifest
        self._rng = rng
        self._wanted = wanted
        self._known: dict[PeerId, HostInfo] = {}
        self._order: list[int] = []
        """The shards in reading order."""
        self._until = -math.inf

    @property
    def known(self) -> list[HostInfo]:
        """The newest announcement of each known host that has not expired, ordered by peer id."""
        now = self._directory.clock()
        self._known = {peer: each for peer, each in self._known.items() if each.expires_at > now}
        return [self._known[peer] for peer in sorted(self._known)]

    async def refresh(self, *, blocks: tuple[int, int] | None = None) -> list[HostInfo]:
        """Read the directory and return ``known``.

        ``blocks`` [start, end): read every shard, for hosts with one of these blocks. One peer may
        lack records. So two peers are asked for each shard if ``blocks`` is given. The same holds
        for the first refresh of a small swarm.
        """
        now = self._directory.clock()
        if now >= self._until:
            # Not at every refresh: finding the peers that store a shard costs more than reading it.
            self._until = now + REDRAW_S
            self._order = self._rng.sample(range(SHARDS), SHARDS)
        copies, is_first = 2 if blocks else 1, not self._known
        left, read = list(self._order), 0
        batch = SHARDS if blocks else FIRST_SHARDS
        while left and read < self._wanted:
            shards, left = left[:batch], left[batch:]
            topics = [_shard_topic(self._manifest, shard) for shard in shards]
            most = math.ceil((self._wanted - read) / len(shards))
            if blocks is None:
                most = max(MIN_PER_SHARD, most)
            found = await self._directory.sample(topics, most, blocks=blocks, copies=copies)
            self._learn(found)
            read += len(found)
            copies = 2 if blocks or is_first else 1
            usual = read / (SHARDS - len(left))
            batch = max(1, math.ceil((self._wanted - read) / usual)) if usual else SHARDS
        return self.known

    def _learn(self, records: Iterable[Record]) -> None:
        for record in records:
            each = read_announcement(record, self._manifest)
            if each is not None:
                peer = each.peer
                before = self._known.pop(peer, each)
                self._known[peer] = each if each.sequence >= before.sequence else before
        while len(self._known) > MAX_KNOWN:  # drop what was read longest ago
            del self._known[next(iter(self._known))]


def read_announcement(record: Record, manifest: bytes) -> HostInfo | None:
    """Return the host that ``record`` announces; None if no host of the model can have made it."""
    try:
        body = pb.HostRecord.FromString(record.body)
    except DecodeError:
        return None
    is_named = record.topic == hosts_topic(manifest, record.peer_id) and body.manifest == manifest
    if not (is_named and body.start < body.end and is_possible(body)):
        return None
    return host_info(body, record.peer_id, record)


def is_possible(body: pb.HostRecord) -> bool:
    """Return whether a host can have described itself like this."""
    is_span = 0 <= body.start <= body.end <= MAX_BLOCKS
    return is_span and 0 <= body.step_s <= MAX_STEP_S and math.isfinite(body.step_s)


def host_info(body: pb.HostRecord, peer: PeerId, record: Record | None = None) -> HostInfo:
    """Return the host that describes itself in ``body``.

    The caller has checked ``is_possible(body)``. Other facts out of range are cut to their bounds,
    or left out.
    """
    moves = body.next_start < body.next_end <= MAX_BLOCKS
    return HostInfo(
        peer=peer,
        start=body.start,
        end=body.end,
        step_s=body.step_s,
        addresses=tuple(body.addresses[:MAX_ADDRESSES]),
        state=state_name(body.state) if body.protocol == PROTOCOL else INCOMPATIBLE,
        manifest=body.manifest,
        is_open=body.nat in (pb.NAT_UNKNOWN, pb.NAT_NONE),
        is_symmetric=body.nat == pb.NAT_SYMMETRIC,
        precision=body.precision if PRECISION.fullmatch(body.precision) else "",
        arithmetic=body.arithmetic if ARITHMETIC.fullmatch(body.arithmetic) else "",
        coordinate=read_coordinate(body.coordinate),
        room=body.room or math.inf,
        version=clean(body.version)[:MAX_NAME_CHARS],
        public_name=clean(body.public_name)[:MAX_NAME_CHARS],
        sessions=body.sessions,
        cache_bytes_free=min(body.cache_bytes_free, MAX_NUMBER),
        next_span=(body.next_start, body.next_end) if moves else None,
        stays=body.stays,
        may_switch=body.may_switch,
        load=load_of(body),
        missing_experts=body.missing_experts if MISSING_EXPERTS.fullmatch(body.missing_experts) else "",
        sequence=record.sequence if record else 0,
        expires_at=record.expires_at if record else math.inf,
        record=record.sealed if record else b"",
    )


def state_name(state: int) -> str:
    """Return the name of a host's state. A state that this release does not know is ``joining``."""
    return _STATES.get(state, "joining")


def load_of(body: pb.HostRecord) -> float:
    """Return the announced load of a host; 0 if it is out of range.

    At most n / (n + 1) with n open sessions. One client that waits for each of its tokens keeps a
    host busy, and another host would not make it faster.
    """
    return min(body.load, body.sessions / (body.sessions + 1)) if 0 <= body.load <= 1 else 0.0


def clean(text: str) -> str:
    """Return the printable characters of ``text``, at most the last ``MAX_TEXT_CHARS``."""
    return "".join(filter(str.isprintable, text))[-MAX_TEXT_CHARS:]


def announced_blocks(sealed: bytes) -> tuple[int, int]:
    """Return the blocks [start, end) in a host's sealed announcement, which was verified before.

    (0, 0) for other records.
    """
    with suppress(DecodeError):
        record = pb.SignedRecord.FromString(sealed)
        if record.topic.startswith(_TOPIC):
            body = pb.HostRecord.FromString(record.body)
            return body.start, body.end
    return 0, 0


async def read_hosts(directory: Directory, manifest: bytes) -> Sequence[HostInfo]:
    """Return the online hosts of a model: all, or a random sample in a large swarm."""
    found = await HostSample(directory, manifest, random.SystemRandom()).refresh()
    return [each for each in found if each.online]


def signed_addresses(
    record: bytes, peer: PeerId, manifest: bytes, *, swarm: bytes, now: float
) -> tuple[str, ...]:
    """Return the addresses in ``record``, the sealed announcement of ``peer`` as a host of a model.

    Empty if ``record`` is expired, belongs to another peer, model or swarm, or is not signed by
    ``peer``.
    """
    for opened in open_valid([record], swarm=swarm, now=now):
        with suppress(DecodeError):
            if opened.peer_id == peer and opened.topic == hosts_topic(manifest, peer):
                return tuple(pb.HostRecord.FromString(opened.body).addresses[:MAX_ADDRESSES])
    return ()
