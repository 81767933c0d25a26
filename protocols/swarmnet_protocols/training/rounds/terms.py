"""The terms of an averaging round: its members, the slices of the vector, and their reducers.

Every member derives the terms from the roster, and sends their hash in the first message of each
stream. So a round runs only among members that agree on them. Slices are contiguous and sized by
measured bandwidth.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import public_key_of
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.codecs import ALIGNMENT, Codec, result_codec
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.messages import RoundShape

MAX_VALUES = 1 << 40
AGREEMENT_BYTES = 16
UNMEASURED_BYTES_PER_S = 1e6
"""Assumed bandwidth of a member that nobody has measured."""
MAX_FRACTION = 0.5
"""Largest fraction of the vector that one of three or more members reduces.

It limits a member for which others report a false bandwidth.
"""

Slice = tuple[int, int]
"""[start, end) of a slice in the vector."""

_RULES = AggregationRules()


@dataclass(frozen=True)
class RoundMember:
    """A worker that takes part in a round, or wants to."""

    peer: PeerId
    addresses: tuple[str, ...] = ()
    bytes_per_s: float = UNMEASURED_BYTES_PER_S
    """Its bandwidth, as the other members measured it. The roster has it."""
    weight: float = 0.0
    """The weight of the contribution in the average: the tokens that the worker trained on.

    0 for a newcomer, which only receives in its first round.
    """
    last_exchange: int = 0
    """Number of the last exchange that the worker took part in."""
    round_s: float = 0.0
    """Seconds that all inner steps of a round take the worker, as it measured; 0 if unknown."""


@dataclass(frozen=True)
class RoundTerms:
    """The terms of one averaging round, on which all members agree. :meth:`of` makes them.

    Members are numbered in the order of their peer ids, slices in the order of the vector.
    ``reducers[i]`` is the member that reduces ``slices[i]``. Members with an empty slice reduce
    none.
    """

    job: bytes
    exchange_number: int
    members: tuple[RoundMember, ...]
    slices: tuple[Slice, ...]
    reducers: tuple[int, ...]
    codec: Codec
    keys: tuple[bytes, ...]
    """The members' public keys."""
    rules: AggregationRules = _RULES
    state: bytes = b""
    """The id of the state that all members start from; empty if their states differ."""

    @classmethod
    def of(  # noqa: PLR0913 - all that members agree on
        cls,
        job: bytes,
        exchange_number: int,
        members: Sequence[RoundMember],
        count: int,
        codec: Codec,
        rules: AggregationRules = _RULES,
        *,
        state: bytes = b"",
    ) -> "RoundTerms":
        """Make the terms for averaging ``count`` values among ``members``, given in any order.

        Raises ``ConfigError`` for a number out of range, and for a roster that is empty, too long,
        names a peer twice or has a member without an Ed25519 key in its peer id.
        """
        ordered = tuple(sorted(members, key=lambda member: member.peer))
        if not 1 <= len({member.peer for member in ordered}) == len(ordered) <= MAX_MEMBERS:
            raise ConfigError(f"a round has 1 to {MAX_MEMBERS} members, each once; not {len(ordered)}")
        if not (0 <= exchange_number < 1 << 63 and 0 < count <= MAX_VALUES):
            raise ConfigError(f"exchange {exchange_number} of {count} values is out of range")
        training = _reducing(ordered)
        parts = partition(count, [ordered[index].bytes_per_s for index in training])
        assigned = [pair for pair in zip(training, parts, strict=True) if pair[1][0] < pair[1][1]]
        reducers, slices = zip(*assigned, strict=True)
        return cls(job, exchange_number, ordered, slices, reducers, codec, _keys(ordered), rules, state)

    @property
    def count(self) -> int:
        """Number of values in the vector."""
        return self.slices[-1][1]

    @property
    def shape(self) -> RoundShape:
        """Bounds for the numbers in this round's messages."""
        return RoundShape(len(self.members), len(self.slices))

    @property
    def quorum(self) -> int:
        """The least number of contributors of a result: a majority if the round is verifiable."""
        return len(_reducing(self.members)) // 2 + 1 if self.rules.verifiable else 1

    @property
    def is_bundled(self) -> bool:
        """Whether results carry the contributions instead of their aggregate."""
        return self.codec.sparse or self.rules.verifiable

    @property
    def contribution_fraction(self) -> float:
        """Contributions' share of all bytes sent in the round. The rest are results."""
        contribution_bytes = self.codec.max_bytes(self.count)
        return contribution_bytes / (contribution_bytes + self.result_bytes(self.count, len(self.members)))

    def result_bytes(self, count: int, contributors: int) -> int:
        """Return the size of a result's payload: ``count`` values of ``contributors`` members."""
        if self.is_bundled:
            return contributors * self.codec.max_bytes(count)
        return result_codec(self.codec).max_bytes(count)

    def size(self, index: int) -> int:
        """Return the number of values in a slice."""
        start, end = self.slices[index]
        return end - start

    def find(self, peer: PeerId) -> int | None:
        """Return the number of the member with this peer id; None if it is not in the roster."""
        return next((index for index, member in enumerate(self.members) if member.peer == peer), None)

    def coordinators(self) -> tuple[int, ...]:
        """Return the members in the order in which they coordinate attempts.

        The order is pseudo-random, and different for each exchange.
        """
        return tuple(sorted(range(len(self.members)), key=self._order_key))

    def digest(self) -> bytes:
        """Return the SHA-256 of all terms. It must be equal at all members."""
        peers = " ".join(member.peer for member in self.members)
        text = f"{self.exchange_number} {self.state.hex()} {peers} {self.slices} {self.reducers} {self.codec.name}"
        if self.rules.verifiable:
            text += " verifiable"
        return hashlib.sha256(self.job + text.encode()).digest()

    def agreement(self) -> bytes:
        """Return the beginning of the digest. Each member sends it in its first message."""
        return self.digest()[:AGREEMENT_BYTES]

    def _order_key(self, member: int) -> bytes:
        number = self.exchange_number.to_bytes(8, "big")
        return hashlib.sha256(self.job + number + self.members[member].peer.encode()).digest()


def _reducing(members: Sequence[RoundMember]) -> Sequence[int]:
    """Return the members that reduce slices: all but newcomers, whose links fetch the state.

    If no member contributes, all reduce.
    """
    return [index for index, member in enumerate(members) if member.weight] or range(len(members))


def _keys(members: Sequence[RoundMember]) -> tuple[bytes, ...]:
    try:
        return tuple(public_key_of(member.peer) for member in members)
    except ValueError as error:
        raise ConfigError(f"a member of the round cannot sign its vote: {error}") from error


def partition(count: int, bytes_per_s: Sequence[float]) -> tuple[Slice, ...]:
    """Cut ``count`` values into one slice per member, in the order of members.

    A member too slow to reduce a slice gets an empty one. Cuts are at multiples of ``ALIGNMENT``.
    Raises ``ConfigError`` for a bandwidth that is not positive and finite, and for no values or no
    members.
    """
    if count < 1 or not bytes_per_s:
        raise ConfigError(f"{count} values cannot be divided among {len(bytes_per_s)} members")
    if any(not (math.isfinite(each) and each > 0) for each in bytes_per_s):
        raise ConfigError("a member's bandwidth must be positive and finite")
    blocks = math.ceil(count / ALIGNMENT)
    bounds = [0]
    so_far = 0.0
    for fraction in _fractions(bytes_per_s):
        so_far += fraction
        bounds.append(min(round(so_far * blocks) * ALIGNMENT, count))
    bounds[-1] = count
    return tuple(itertools.pairwise(bounds))


def _fractions(bytes_per_s: Sequence[float]) -> list[float]:
    """Return the fraction w_i of the vector that each of m members reduces.

    The fractions minimise max_i (1 + (m - 2) w_i) / b_i subject to w_i >= 0, sum w_i = 1 and w_i <=
    ``MAX_FRACTION``. Member i sends all of its vector except its own slice, and the result of its
    slice to m - 1 members. That is 1 + (m - 2) w_i vectors over bandwidth b_i (hivemind,
    ``averaging/load_balancing.py``; the cap is ours). For two members the traffic does not depend
    on w.
    """
    members = len(bytes_per_s)
    if members <= 2:
        return [1.0 / members] * members
    fractions = _filled(bytes_per_s, members - 2, 1.0)
    largest = max(range(members), key=fractions.__getitem__)
    if fractions[largest] > MAX_FRACTION:
        others = [*bytes_per_s[:largest], *bytes_per_s[largest + 1 :]]
        fractions = _filled(others, members - 2, 1.0 - MAX_FRACTION)
        fractions.insert(largest, MAX_FRACTION)
    return fractions


def _filled(bytes_per_s: Sequence[float], spare: int, total: float) -> list[float]:
    """Return the w_i >= 0 with sum ``total`` that minimise max_i (1 + spare w_i) / b_i.

    Water-filling: slower members join one after another, while that lowers the maximum.
    """
    busiest_s = math.inf
    used = 0.0
    for reducers, rate in enumerate(sorted(bytes_per_s, reverse=True), start=1):
        if rate * busiest_s <= 1.0:
            break
        used += rate
        busiest_s = (spare * total + reducers) / used
    return [max(0.0, (busiest_s * each - 1.0) / spare) for each in bytes_per_s]
