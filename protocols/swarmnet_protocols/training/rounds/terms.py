"""What the members of a round must mean by it: who they are, what is averaged, who reduces which slice."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import public_key_of
from swarmnet_protocols.training.codecs import Codec
from swarmnet_protocols.training.rounds.messages import Shape
from swarmnet_protocols.training.rounds.shares import Share, shares
from swarmnet_protocols.training.rounds.transfers import SliceTerms, Verification

MAX_MEMBERS = 64
MAX_VALUES = 1 << 40
AGREEMENT_BYTES = 16
UNMEASURED_BYTES_PER_S = 1e6
"""Of a link that nobody has measured."""


@dataclass(frozen=True)
class Member:
    """A worker in a round, as the roster describes it, and so the same at all members."""

    peer: PeerId
    addresses: tuple[str, ...]
    bytes_per_s: float = UNMEASURED_BYTES_PER_S
    weight: float = 0.0
    """Tokens behind its contribution; 0 for a newcomer, who listens in its first round."""


@dataclass(frozen=True)
class Terms:
    """Made by :meth:`of`. ``slices`` and ``owners`` leave out members that own nothing."""

    job: bytes
    round: int
    members: tuple[Member, ...]
    slices: tuple[Share, ...]
    owners: tuple[int, ...]
    codec: Codec
    verification: Verification | None = None

    @classmethod
    def of(
        cls,
        job: bytes,
        round: int,
        members: Sequence[Member],
        count: int,
        codec: Codec,
        *,
        verifiable: bool = False,
    ) -> "Terms":
        """The terms of averaging ``count`` values.

        Raises ``ConfigError`` for a roster that is empty, too long or names a peer twice, and for a number out of range.
        """
        ordered = tuple(sorted(members, key=lambda member: member.peer))
        if not 1 <= len({member.peer for member in ordered}) == len(ordered) <= MAX_MEMBERS:
            raise ConfigError(f"a round has 1 to {MAX_MEMBERS} members, each once; not {len(ordered)}")
        if not (0 <= round < 1 << 63 and 0 < count <= MAX_VALUES):
            raise ConfigError(f"round {round} of {count} values is out of range")
        # A newcomer has enough to fetch. If nobody is said to contribute, all own.
        may_own = [index for index, member in enumerate(ordered) if member.weight] or range(len(ordered))
        parts = shares(count, [ordered[index].bytes_per_s for index in may_own])
        owned = [(owner, part) for owner, part in zip(may_own, parts, strict=True) if part[0] < part[1]]
        owners, slices = zip(*owned, strict=True)
        verification = None
        if verifiable:
            verification = Verification(job, _keys(ordered), quorum=len(may_own) // 2 + 1)
        return cls(job, round, ordered, slices, owners, codec, verification)

    @property
    def count(self) -> int:
        return self.slices[-1][1]

    @property
    def shape(self) -> Shape:
        return Shape(len(self.members), len(self.slices))

    @property
    def contributions(self) -> float:
        """What part contributions are of all bytes that are exchanged; the rest are results."""
        whole = SliceTerms(self.round, 0, self.count, self.codec, self.verification)
        result_bytes = whole.result_bytes(len(self.members))
        return whole.contribution_bytes / (whole.contribution_bytes + result_bytes)

    def slice(self, index: int) -> SliceTerms:
        start, end = self.slices[index]
        return SliceTerms(self.round, index, end - start, self.codec, self.verification)

    def find(self, peer: PeerId) -> int | None:
        """The number of a member."""
        return next((index for index, member in enumerate(self.members) if member.peer == peer), None)

    def coordinators(self) -> tuple[int, ...]:
        """Members in the order in which they lead attempts: another one every round."""
        return tuple(sorted(range(len(self.members)), key=self._lot))

    def digest(self) -> bytes:
        """Of the SHA-256 of all that must be equal: enough to see that it is."""
        peers = " ".join(member.peer for member in self.members)
        text = f"{self.round} {peers} {self.slices} {self.owners} {self.codec.name}"
        if self.verification is not None:
            text += " verifiable"
        return hashlib.sha256(self.job + text.encode()).digest()[:AGREEMENT_BYTES]

    def _lot(self, member: int) -> bytes:
        return hashlib.sha256(
            self.job + self.round.to_bytes(8, "big") + self.members[member].peer.encode()
        ).digest()


def _keys(members: Sequence[Member]) -> tuple[bytes, ...]:
    try:
        return tuple(public_key_of(member.peer) for member in members)
    except ValueError as error:
        raise ConfigError(f"a member of the round cannot sign: {error}") from error
