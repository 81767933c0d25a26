"""The terms of an averaging round: its members, the slices of the vector, and their reducers.

Every member derives the terms from the roster, and sends their hash in the first message of each
stream. So a round runs only among members that agree on them. Slices are contiguous and sized by
measured bandwidth.

A round of more than ``MAX_MEMBERS`` workers has several *groups*. Each group averages as in a round
of its own, with the same slices. Before the reducer of a slice sends its result, it averages the
slice with the reducers of the other groups. This exchange *between groups* has terms like any
other (:meth:`RoundTerms.between`).
"""

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import public_key_of
from swarmnet_protocols.training import MAX_MEMBERS
from swarmnet_protocols.training.codecs import ALIGNMENT, Codec, get_codec, result_codec
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules, outliers
from swarmnet_protocols.training.rounds.messages import RoundShape
from swarmnet_protocols.wire import training_pb2 as pb

MAX_VALUES = 1 << 40
AGREEMENT_BYTES = 16
UNMEASURED_BYTES_PER_S = 1e6
"""Assumed bandwidth of a member that nobody has measured."""
MAX_FRACTION = 0.5
"""Largest fraction of the vector that one of three or more members reduces.

It limits a member for which others report a false bandwidth.
"""

MAX_GROUPS = 64
"""Most groups of a round. Their reducers of a slice form one exchange."""
LEAST_SLICES = MAX_MEMBERS // 2
"""Least slices of a round with several groups, if the vector is long enough. With fewer, a member
of a small group has less work, and a member of a full group more."""
LEAST_DELEGATES = 8
"""Least members of an exchange between groups. With fewer, a few deaths leave no majority in it,
and the round is lost. With more, every member opens more streams."""

Slice = tuple[int, int]
"""[start, end) of a slice in the vector."""

_RULES = AggregationRules()
_BETWEEN = AggregationRules(screen=outliers)
_DENSE = get_codec("bfloat16")


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
    """Seconds that all inner steps of a round take the worker, or in a stage the microbatches of a
    batch, as it measured; 0 if unknown."""


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
    groups: tuple[tuple[RoundMember, ...], ...] = ()
    """All groups of the round, with this one; empty if this one is the only one."""
    slice_number: int = 0
    """Between groups: the number of the slice, from 1. 0 within a group."""

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
        groups: Sequence[Sequence[RoundMember]] = (),
        slices: int = 0,
    ) -> "RoundTerms":
        """Make the terms for averaging ``count`` values among ``members``, given in any order.

        - ``groups``: the groups of the round, if there are several.
        - ``slices``: cut the vector into so many equal slices; 0 for one slice a member.

        Raises ``ConfigError`` for a number out of range, and for a roster that is empty, too long,
        names a peer twice or has a member without an Ed25519 key in its peer id. Raises it also for
        rules that members cannot verify across groups.
        """
        ordered = _ordered(members)
        if not 1 <= len({member.peer for member in ordered}) == len(ordered) <= MAX_MEMBERS:
            raise ConfigError(f"a round has 1 to {MAX_MEMBERS} members, each once; not {len(ordered)}")
        if not (0 <= exchange_number < 1 << 63 and 0 < count <= MAX_VALUES):
            raise ConfigError(f"exchange {exchange_number} of {count} values is out of range")
        if groups:
            _check_groups(groups, ordered, rules)
            slices = max(LEAST_SLICES, min(len(_reducing(group)) for group in groups))
        if slices:
            parts = equal_slices(count, slices)
            reducers = owners(ordered, len(parts))
        else:
            training = _reducing(ordered)
            sized = partition(count, [ordered[index].bytes_per_s for index in training])
            assigned = [pair for pair in zip(training, sized, strict=True) if pair[1][0] < pair[1][1]]
            reducers, parts = zip(*assigned, strict=True)
        return cls(
            job,
            exchange_number,
            ordered,
            parts,
            reducers,
            codec,
            _keys(ordered),
            rules,
            state,
            tuple(map(_ordered, groups)),
        )

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
        """True if results carry the contributions instead of their aggregate."""
        return not self.groups and (self.codec.sparse or self.rules.verifiable)

    @property
    def result_codec(self) -> Codec:
        """The codec of results, unless they are bundled. The mean of several groups is dense."""
        return _DENSE if self.codec.sparse else result_codec(self.codec)

    @property
    def contribution_fraction(self) -> float:
        """Contributions' share of all bytes sent in the round. The rest are results."""
        contribution_bytes = self.codec.max_bytes(self.count)
        return contribution_bytes / (contribution_bytes + self.result_bytes(self.count, len(self.members)))

    def result_bytes(self, count: int, contributors: int) -> int:
        """Return the size of a result's payload: ``count`` values of ``contributors`` members."""
        if self.is_bundled:
            return contributors * self.codec.max_bytes(count)
        return self.result_codec.max_bytes(count)

    def between(self, index: int) -> "RoundTerms":
        """Return the terms of the exchange that averages slice ``index`` between the groups.

        Each group sends the reducer of the slice, which contributes the group's mean. In a round of
        few groups more members take part. They contribute nothing, but vote and hold the result. So
        the exchange has a majority when a reducer fails.
        """
        count = -(-LEAST_DELEGATES // len(self.groups))
        delegates = [
            each for group in self.groups for each in _delegates(group, index, len(self.slices), count)
        ]
        key = hashlib.sha256(self.job + f"between groups {index}".encode()).digest()
        rules = replace(_BETWEEN, max_weight=self.rules.max_weight * MAX_MEMBERS)
        terms = RoundTerms.of(
            key,
            self.exchange_number,
            delegates,
            self.size(index),
            self.result_codec,
            rules,
            state=self.state,
            slices=1,
        )
        return replace(terms, slice_number=index + 1)

    def seconded(self, me: int) -> tuple[int, ...]:
        """Return the slices that ``me`` does not reduce, but whose exchange between groups it
        joins."""
        if len(self.groups) >= LEAST_DELEGATES or not self.groups:
            return ()
        peer = self.members[me].peer
        delegates = [self.between(index).find(peer) for index in range(len(self.slices))]
        return tuple(
            index for index, found in enumerate(delegates) if found is not None and self.reducers[index] != me
        )

    @property
    def everybody(self) -> tuple[tuple[RoundMember, ...], ...]:
        """The members of all groups."""
        return self.groups or (self.members,)

    def hello(self) -> pb.Hello:
        """Return the first message of each stream of this round."""
        return pb.Hello(
            exchange_number=self.exchange_number, agreement=self.agreement(), between=self.slice_number
        )

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
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        peers = " ".join(member.peer for member in self.members)
        text = f"{self.exchange_number} {self.state.hex()} {peers} {self.slices} {self.reducers} {self.codec.name}"
        if self.rules.verifiable:
            text += " verifiable"
        for group in self.groups:
            text += " group " + " ".join(member.peer for member in group)
        return hashlib.sha256(self.job + text.encode()).digest()

    def agreement(self) -> bytes:
        """Return the beginning of the digest. Each member sends it in its first message."""
        return self.digest()[:AGREEMENT_BYTES]

    def _order_key(self, member: int) -> bytes:
        number = self.exchange_number.to_bytes(8, "big")
        return hashlib.sha256(self.job + number + self.members[member].peer.encode()).digest()


def _ordered(members: Sequence[RoundMember]) -> tuple[RoundMember, ...]:
    return tuple(sorted(members, key=lambda member: member.peer))


def _check_groups(
    groups: Sequence[Sequence[RoundMember]], members: Sequence[RoundMember], rules: AggregationRules
) -> None:
    peers = [member.peer for group in groups for member in group]
    if not 2 <= len(groups) <= MAX_GROUPS or len(set(peers)) < len(peers):
        raise ConfigError(f"a round has 2 to {MAX_GROUPS} groups without common members")
    if not all(1 <= len(group) <= MAX_MEMBERS for group in groups) or tuple(members) not in map(
        _ordered, groups
    ):
        raise ConfigError(f"a group has 1 to {MAX_MEMBERS} members, and this worker is in one")
    if rules.verifiable:
        raise ConfigError(
            f"robust rules work with at most {MAX_MEMBERS} workers: nobody can verify the mean of another group"
        )


def _delegates(group: Sequence[RoundMember], index: int, slices: int, count: int) -> list[RoundMember]:
    """Return the members that a group sends to the exchange of a slice: first its reducer, then
    members without a weight."""
    reducing = _reducing(group)
    first = reducing.index(owners(group, slices)[index])
    chosen = [reducing[(first + place) % len(reducing)] for place in range(min(count, len(reducing)))]
    return [replace(group[member], weight=0.0 if place else 1.0) for place, member in enumerate(chosen)]


def equal_slices(count: int, slices: int) -> tuple[Slice, ...]:
    """Cut ``count`` values into ``slices`` equal ones, or into fewer if the vector is short."""
    blocks = math.ceil(count / ALIGNMENT)
    slices = min(slices, blocks)
    bounds = [min(blocks * number // slices * ALIGNMENT, count) for number in range(slices + 1)]
    return tuple(itertools.pairwise(bounds))


def owners(members: Sequence[RoundMember], slices: int) -> tuple[int, ...]:
    """Return the member that reduces each of ``slices`` equal slices, by bandwidth."""
    reducing = _reducing(members)
    shares = itertools.accumulate(_fractions([members[index].bytes_per_s for index in reducing]))
    ends = [round(share * slices) for share in shares]
    ends[-1] = slices
    return tuple(reducing[bisect_right(ends, number)] for number in range(slices))


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
