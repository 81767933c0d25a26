"""Announcements of routed experts: which peers compute which experts of a model for other hosts.

An announcement is a claim: any peer may sign one that names every expert. It tells where to ask,
and proves nothing. Hosts and peers with experts count an expert only if the peer has named it to
them on a stream, and has computed it (``swarmnet_node/experts/``). Reading many claims has to be
cheap, so :class:`ExpertSample` reads a bounded number, parses each once, and keeps one bit for each
expert.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.announcer import Announcement
from swarmnet_protocols.directory.host_announcements import (
    MAX_ADDRESSES,
    MAX_STEP_S,
    PRECISION,
    PROTOCOL,
    listed,
)
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.manifest import MAX_BLOCKS
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire import records_pb2 as pb

MAX_EXPERTS = 1024
"""Most routed experts of one block."""
MAX_EXPERT_BLOCKS = 1024
"""Most blocks with experts in one announcement."""
SAMPLE = 96
"""Most announcements that one read takes from one peer of the directory.

A host has streams to ``MAX_LINKS`` peers, fewer than this.
"""
COPIES = 2
"""Peers of the directory that are asked. One alone may lack announcements."""
MAX_KNOWN = 256
"""Announcements that are kept; the ones read last stay. Each has up to 40 kB.

With fewer, honest peers would hide each other where there are many.
"""
_PART = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


class ExpertBits(AbstractSet[int]):
    """A set of experts of one block, stored as one bit for each expert."""

    __slots__ = ("_bits",)

    def __init__(self, bits: int = 0) -> None:
        """Make a set from ``bits``: bit n stands for expert n."""
        self._bits = bits

    @classmethod
    def of(cls, experts: Iterable[int]) -> "ExpertBits":
        """Make the set of ``experts``."""
        if isinstance(experts, ExpertBits):
            return experts
        bits = 0
        for expert in experts:
            bits |= 1 << expert
        return cls(bits)

    def __contains__(self, expert: object) -> bool:
        return isinstance(expert, int) and expert >= 0 and bool(self._bits >> expert & 1)

    def __iter__(self) -> Iterator[int]:
        bits = self._bits
        while bits:
            lowest = bits & -bits
            yield lowest.bit_length() - 1
            bits ^= lowest

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __and__(self, other: AbstractSet[Any]) -> "ExpertBits":
        return ExpertBits(self._bits & ExpertBits.of(other)._bits)

    def __or__(self, other: AbstractSet[Any]) -> "ExpertBits":
        return ExpertBits(self._bits | ExpertBits.of(other)._bits)

    def __sub__(self, other: AbstractSet[Any]) -> "ExpertBits":
        return ExpertBits(self._bits & ~ExpertBits.of(other)._bits)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"ExpertBits({self._bits:#x})"

    def to_bytes(self) -> bytes:
        """Return the bits as bytes without zeros at the end. Expert 0 is the lowest bit."""
        return self._bits.to_bytes(-(-self._bits.bit_length() // 8), "little")


BlockExperts = Mapping[int, AbstractSet[int]]
"""Block → the numbers of some of its experts."""


@dataclass(frozen=True)
class ExpertHost:
    """A peer with experts, as it announced itself."""

    peer: PeerId
    addresses: tuple[str, ...]
    experts: BlockExperts
    is_online: bool
    row_s: float = 0.0
    """Seconds for one row through one expert, as the peer measured it; 0 if not measured."""
    precision: str = ""
    public_name: str = ""
    is_compatible: bool = True
    """True if the peer has this version of the protocol."""
    capacity: int = 0
    """Most experts that the peer holds if hosts may choose them; 0 if its owner has chosen."""
    sequence: int = 0
    """Counter that grows with every announcement of the peer."""
    expires_at: float = math.inf
    """Unix time at which the announcement expires."""


def experts_topic(manifest: bytes) -> str:
    """Return the topic for announcements of a model's experts."""
    return f"experts/{manifest.hex()}"


def expert_announcement(
    host: ExpertHost,
    manifest: bytes,
    *,
    state: "pb.HostState",
    version: str,
    lifetime_s: float,
) -> Announcement:
    """Return the announcement of this peer, described by ``host``."""
    record = pb.ExpertsRecord(
        manifest=manifest,
        state=state,
        protocol=PROTOCOL,
        blocks=[
            pb.BlockExperts(block=block, experts=to_bits(host.experts[block]))
            for block in sorted(host.experts)
        ],
        addresses=listed(host.addresses),
        version=version,
        public_name=host.public_name,
        precision=host.precision,
        row_s=host.row_s,
        capacity=host.capacity,
    )
    return Announcement(experts_topic(manifest), record.SerializeToString(), lifetime_s)


def read_expert_host(record: Record, manifest: bytes) -> ExpertHost | None:
    """Return the peer that ``record`` announces; None if it is malformed or names another model."""
    try:
        body = pb.ExpertsRecord.FromString(record.body)
    except DecodeError:
        return None
    numbers = [each.block for each in body.blocks]
    if not (
        record.topic == experts_topic(manifest)
        and body.manifest == manifest
        and 0 < len(numbers) <= MAX_EXPERT_BLOCKS
        and numbers == sorted({*numbers})
        and numbers[-1] < MAX_BLOCKS
        and all(is_bits(each.experts) for each in body.blocks)
        and 0 <= body.row_s <= MAX_STEP_S
        and math.isfinite(body.row_s)
    ):
        return None
    return ExpertHost(
        peer=record.peer_id,
        addresses=tuple(body.addresses[:MAX_ADDRESSES]),
        experts={each.block: from_bits(each.experts) for each in body.blocks},
        is_online=body.state == pb.HOST_STATE_ONLINE and body.protocol == PROTOCOL,
        row_s=body.row_s,
        precision=body.precision if PRECISION.fullmatch(body.precision) else "",
        capacity=min(body.capacity, MAX_BLOCKS * MAX_EXPERTS),
        public_name=body.public_name[:64] if body.public_name.isprintable() else "",
        is_compatible=body.protocol == PROTOCOL,
        sequence=record.sequence,
        expires_at=record.expires_at,
    )


class ExpertSample:
    """The announcements of a model's experts that this peer has read.

    In a small swarm these are all of them, in a large swarm a random sample.
    """

    def __init__(self, directory: Directory, manifest: bytes) -> None:
        self._directory = directory
        self._manifest = manifest
        self._known: dict[PeerId, ExpertHost] = {}

    @property
    def known(self) -> list[ExpertHost]:
        """The newest announcement of each known peer, ordered by peer id.

        Includes every state. Leaves out expired announcements.
        """
        now = self._directory.clock()
        self._known = {peer: each for peer, each in self._known.items() if each.expires_at > now}
        return [self._known[peer] for peer in sorted(self._known)]

    async def refresh(self) -> list[ExpertHost]:
        """Read the directory and return ``known``. Raises ``SwarmnetError`` without an answer."""
        topic = experts_topic(self._manifest)
        for record in await self._directory.sample([topic], SAMPLE, copies=COPIES):
            self._learn(record)
        while len(self._known) > MAX_KNOWN:  # drop what was read longest ago
            del self._known[next(iter(self._known))]
        return self.known

    def _learn(self, record: Record) -> None:
        before = self._known.pop(record.peer_id, None)
        if before is None or record.sequence > before.sequence:
            before = read_expert_host(record, self._manifest)
        if before is not None:
            self._known[record.peer_id] = before


def is_bits(bits: bytes) -> bool:
    """Return whether ``bits`` can be a set of experts of a block."""
    return 0 < len(bits) <= MAX_EXPERTS // 8


def to_bits(experts: Collection[int]) -> bytes:
    """Encode experts as one bit each. Expert 0 is the lowest bit of the first byte."""
    return ExpertBits.of(experts).to_bytes()


def from_bits(bits: bytes) -> ExpertBits:
    """Invert ``to_bits``."""
    return ExpertBits(int.from_bytes(bits, "little"))


def parse_experts(text: str, counts: Mapping[int, int]) -> BlockExperts:
    """Parse a list of experts: ``3:0-15`` or ``0-7:0-3,12;8:5``. ``all``: all blocks or experts.

    ``counts``: block → number of its experts. Raises ``ConfigError`` for another form, or an expert
    that the model does not have.
    """
    found: dict[int, frozenset[int]] = {}
    for part in text.split(";"):
        blocks, colon, experts = part.strip().partition(":")
        if not colon:
            raise ConfigError(
                f"{part.strip()!r} names no experts", hint="name blocks and their experts: 3:0-15, or all:0-7"
            )
        for block in counts if blocks == "all" else _numbers(blocks):
            if block not in counts:
                raise ConfigError(
                    f"block {block} has no routed experts", hint=f"blocks with experts: {ranges(counts)}"
                )
            chosen = range(counts[block]) if experts == "all" else _numbers(experts)
            if unknown := {*chosen} - {*range(counts[block])}:
                raise ConfigError(
                    f"block {block} has no expert {min(unknown)}",
                    hint=f"its experts are 0-{counts[block] - 1}",
                )
            found[block] = found.get(block, frozenset()) | {*chosen}
    return found


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise ConfigError(f"{part.strip()!r} is not a number or range", hint="write 0-7 or 0,2,5")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def format_experts(experts: BlockExperts) -> str:
    """Invert ``parse_experts``. Blocks with the same experts are written together."""
    blocks: dict[AbstractSet[int], list[int]] = {}
    for block in sorted(experts):
        blocks.setdefault(experts[block], []).append(block)
    return ";".join(f"{ranges(numbers)}:{ranges(chosen)}" for chosen, numbers in blocks.items())


def ranges(numbers: Collection[int]) -> str:
    """Write numbers as ranges: ``0-3,7``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
