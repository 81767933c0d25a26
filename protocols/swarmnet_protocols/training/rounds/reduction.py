"""Reduces one slice: from the members' contributions to one result that every member can check.

A result carries the encoded aggregate, or a *bundle*: the contributions themselves, in the order of
members. Each member then aggregates the bundle as the reducer did, and gets the same bits. Results
are bundles in two cases:

1. The codec is sparse: an aggregate of sparse vectors is not sparse.
2. The round is verifiable, because the job has a robust aggregation rule. A reducer could otherwise
   bypass the rule with a false aggregate. Each contribution in the bundle is signed by its author.
"""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from google.protobuf.message import DecodeError

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.identity import verify
from swarmnet_protocols.training.codecs import Codec
from swarmnet_protocols.training.codecs.floats import FLOAT32
from swarmnet_protocols.training.codecs.values import Difference, DifferenceBytes, Payload, Values, pieces
from swarmnet_protocols.training.rounds.aggregation_rules import COORDINATES_AT_ONCE
from swarmnet_protocols.training.rounds.messages import below
from swarmnet_protocols.training.rounds.terms import RoundTerms
from swarmnet_protocols.wire import training_pb2 as pb

MAX_REASON = 200
CONTRIBUTION_HASH_BYTES = 16
"""Bytes of a contribution's hash: half a SHA-256. Every result carries one for each contributor.

Finding a second preimage of it is infeasible.
"""

_FORGED = "a result names a contribution of this member that it did not make"
_SIGNATURE_DOMAIN = b"swarmnet-contribution-1"
_SIGNED = struct.Struct(">QId")


def contribution_hash(data: Payload) -> bytes:
    """Return the first 16 bytes of the SHA-256 of an encoded contribution."""
    digest = hashlib.sha256()
    for piece in pieces(data):
        digest.update(piece)
    return digest.digest()[:CONTRIBUTION_HASH_BYTES]


@dataclass(frozen=True)
class Contribution:
    """A member's encoded values of one slice, with their weight and hash.

    Results name a contribution by its hash.
    """

    weight: float
    data: Payload
    hash: bytes
    signature: bytes = b""
    """The author's signature; empty unless the round is verifiable."""
    inside: int = 0
    """Between groups: bit i is set if the group's member i contributed to its mean."""

    @classmethod
    def of(cls, weight: float, data: Payload, inside: int = 0) -> "Contribution":
        return cls(weight, data, contribution_hash(data), inside=inside)

    @classmethod
    def encoded(
        cls, weight: float, codec: Codec, values: Values, start: int, end: int, inside: int = 0
    ) -> "Contribution":
        """Encode the values [start, end). A difference in float32 is encoded when it is read.

        Raises ``ValueError`` if a value is not finite.
        """
        if not isinstance(values, Difference) or codec.name != FLOAT32.name:
            return cls.of(weight, codec.encode(values[start:end]), inside)
        later = values.between(start, end)
        for first in range(0, len(later), COORDINATES_AT_ONCE):
            codec.encode(later[first : first + COORDINATES_AT_ONCE])  # checks that they are finite
        return cls.of(weight, DifferenceBytes(later), inside)


@dataclass(frozen=True)
class GroupMean:
    """The mean of a group's contributions to a slice, which the exchange between groups averages.

    - ``values``: float32 [count]; None if the group has no contribution.
    - ``inside``: bit i is set if the group's member i contributed.
    - ``reasons``: member → why its contribution is left out.
    """

    values: torch.Tensor | None = None
    weight: float = 0.0
    inside: int = 0
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a slice, as bytes that every member decodes.

    ``hash`` covers ``summary`` (a ``pb.Summary``) and ``payload``.
    """

    hash: bytes
    summary: bytes
    payload: Buffer


def result_hash(summary: bytes, payload: Buffer) -> bytes:
    """Return the SHA-256 of the size-prefixed summary and the payload."""
    digest = hashlib.sha256(struct.pack(">I", len(summary)))
    digest.update(summary)
    digest.update(payload)
    return digest.digest()


def signed_bytes(terms: RoundTerms, index: int, contribution: Contribution) -> bytes:
    """Return the bytes that the author of a contribution signs in a verifiable round."""
    signed = _SIGNED.pack(terms.exchange_number, index, contribution.weight)
    return _SIGNATURE_DOMAIN + terms.job + signed + contribution.hash


def reduce_slice(
    terms: RoundTerms,
    index: int,
    contributions: Sequence[tuple[int, Contribution]],
    out: torch.Tensor | None = None,
) -> tuple[Result, torch.Tensor] | None:
    """Reduce (member, contribution) pairs to the result of slice ``index`` and its values [count].

    The pairs are in the order of members. None if too few contributions are accepted. The values
    are computed in ``out`` if the rule allows that.
    """
    accepted, values, reasons = _aggregate_valid(terms, index, contributions, out)
    if len(accepted) < terms.quorum:
        return None
    if terms.is_bundled:
        encoded: Buffer = b"".join(piece for _, each in accepted for piece in pieces(each.data))
    else:
        try:
            encoded = terms.result_codec.encode(values)
        except ValueError:  # the mean of finite contributions is infinite
            return None
        values = terms.result_codec.decode(encoded, terms.size(index))
    summary = pb.Summary(exchange_number=terms.exchange_number, slice=index)
    for member, each in accepted:
        summary.contributors.add(
            member=member, weight=each.weight, hash=each.hash, signature=each.signature, inside=each.inside
        )
    return _summed_up(summary, reasons, encoded), values


def group_mean(terms: RoundTerms, index: int, contributions: Sequence[tuple[int, Contribution]]) -> GroupMean:
    """Return the mean of a group's contributions, as in :func:`reduce_slice`."""
    accepted, values, reasons = _aggregate_valid(terms, index, contributions)
    if not accepted:
        return GroupMean(reasons=reasons)
    inside = sum(1 << member for member, _ in accepted)
    return GroupMean(values, math.fsum(each.weight for _, each in accepted), inside, reasons)


def result_of_groups(
    terms: RoundTerms,
    index: int,
    values: torch.Tensor,
    inside: Mapping[PeerId, int],
    reasons: Mapping[int, str],
) -> tuple[Result, torch.Tensor]:
    """Return the result of a slice whose ``values`` the groups have averaged, and its values.

    ``inside``: the peers that contributed between the groups, with the contributors of their
    groups.
    """
    summary = pb.Summary(exchange_number=terms.exchange_number, slice=index)
    for group in terms.groups:
        masks = [inside[member.peer] for member in group if member.peer in inside]
        summary.inside.append((masks[0] if masks else 0) & (1 << len(group)) - 1)
    encoded = terms.result_codec.encode(values)
    return _summed_up(summary, reasons, encoded), terms.result_codec.decode(encoded, terms.size(index))


def _summed_up(summary: pb.Summary, reasons: Mapping[int, str], encoded: Buffer) -> Result:
    for member, reason in sorted(reasons.items()):
        summary.excluded.add(member=member, reason=reason[:MAX_REASON])
    serialized = summary.SerializeToString(deterministic=True)
    return Result(result_hash(serialized, encoded), serialized, encoded)


def contributors(terms: RoundTerms, summary: pb.Summary) -> tuple[PeerId, ...]:
    """Return the contributors to a slice in all groups, ordered by group and peer id."""
    if not terms.groups:
        return tuple(terms.members[each.member].peer for each in summary.contributors)
    return tuple(
        member.peer
        for group, inside in zip(terms.groups, summary.inside, strict=True)
        for number, member in enumerate(group)
        if inside >> number & 1
    )


def _aggregate_valid(
    terms: RoundTerms,
    index: int,
    contributions: Sequence[tuple[int, Contribution]],
    out: torch.Tensor | None = None,
) -> tuple[list[tuple[int, Contribution]], torch.Tensor, dict[int, str]]:
    """Return the accepted contributions, their aggregate, and why the others are left out.

    The aggregate has the shape [count]; if no contribution is accepted, it is empty, [0, count].
    The reasons are by member.
    """
    accepted: list[tuple[int, Contribution]] = []
    excluded: dict[int, str] = {}
    rows: list[Values] = []
    for member, contribution in contributions:
        try:
            rows.append(_decode(terms, index, member, contribution))
            accepted.append((member, contribution))
        except ProtocolViolation as error:
            excluded[member] = str(error)
    rules = terms.rules
    while accepted:
        weights = _weights([contribution for _, contribution in accepted])
        whole: Any = rows if rules.reads_parts else torch.stack([row[:] for row in rows])
        reasons = rules.screen(whole, weights)
        if not any(reasons):
            more = (out,) if rules.reads_parts else ()
            return accepted, rules.aggregate(whole, weights, *more), excluded
        excluded |= {member: reason for (member, _), reason in zip(accepted, reasons, strict=True) if reason}
        kept = [row for row, reason in enumerate(reasons) if not reason]
        accepted, rows = [accepted[row] for row in kept], [rows[row] for row in kept]
    return [], torch.empty(0, terms.size(index)), excluded


def _weights(contributions: Sequence[Contribution]) -> torch.Tensor:
    return torch.tensor([each.weight for each in contributions], dtype=torch.float64)


def _decode(terms: RoundTerms, index: int, member: int, contribution: Contribution) -> Values:
    """Decode the contribution of ``member`` to values [count].

    Raises ``ProtocolViolation`` for an invalid one.
    """
    data = contribution.data
    if contribution.weight > terms.rules.max_weight:
        raise ProtocolViolation(f"weight {contribution.weight:g} is above {terms.rules.max_weight:g}")
    if isinstance(data, DifferenceBytes):  # this member's own
        return data.values
    if contribution_hash(data) != contribution.hash:
        raise ProtocolViolation("the contribution does not have its hash")
    if terms.rules.verifiable:
        signed = signed_bytes(terms, index, contribution)
        if not verify(terms.keys[member], contribution.signature, signed):
            raise ProtocolViolation("the contribution is not signed by its author")
    return terms.codec.decode(data, terms.size(index))


def read_result(
    terms: RoundTerms, index: int, result: Result, me: int, own: Contribution | None
) -> torch.Tensor:
    """Return the values [count] of another member's result of slice ``index``.

    ``own``: the contribution of ``me``, which is this member; None if it made none.

    Raises ``ProtocolViolation`` for a result that does not belong to this slice. Also for one with
    a forged contribution, which this member did not make but which has its number. Without
    signatures, only this member can notice that.
    """
    if result_hash(result.summary, result.payload) != result.hash:
        raise ProtocolViolation(f"a result of slice {index} does not have its hash")
    summary = read_summary(terms, index, result.summary)
    if terms.groups:
        if own is None and terms.members[me].peer in contributors(terms, summary):
            raise ProtocolViolation(_FORGED)
        if len(result.payload) > terms.result_bytes(terms.size(index), 1):
            raise ProtocolViolation(f"a result of {len(result.payload)} bytes")
        return terms.result_codec.decode(result.payload, terms.size(index))
    for each in summary.contributors:
        if each.member == me and (own is None or (each.weight, each.hash) != (own.weight, own.hash)):
            raise ProtocolViolation(_FORGED)
    count = len(summary.contributors)
    limit = terms.result_bytes(terms.size(index), count)
    if len(result.payload) > limit or (terms.is_bundled and len(result.payload) < limit):
        raise ProtocolViolation(f"a result of {len(result.payload)} bytes from {count} contributors")
    if count < terms.quorum:
        raise ProtocolViolation(f"a result of {count} contributors, too few to be robust")
    if terms.is_bundled:
        return _read_bundle(terms, index, summary.contributors, memoryview(result.payload))
    return terms.result_codec.decode(result.payload, terms.size(index))


def _read_bundle(
    terms: RoundTerms, index: int, contributors: Sequence[pb.Contributor], bundle: memoryview
) -> torch.Tensor:
    size = terms.codec.max_bytes(terms.size(index))
    contributions = [
        (each.member, Contribution(each.weight, bundle[start : start + size], each.hash, each.signature))
        for each, start in zip(contributors, range(0, len(bundle), size), strict=True)
    ]
    accepted, values, reasons = _aggregate_valid(terms, index, contributions)
    if len(accepted) < len(contributions):
        member, reason = min(reasons.items())
        raise ProtocolViolation(f"member {member} is in a bundle, but {reason}")
    return values


def read_summary(terms: RoundTerms, index: int, serialized: bytes) -> pb.Summary:
    """Parse and check the summary of a result. Raises ``ProtocolViolation``."""
    try:
        summary = pb.Summary.FromString(serialized)
    except DecodeError as error:
        raise ProtocolViolation("not a summary") from error
    if (summary.exchange_number, summary.slice) != (terms.exchange_number, index):
        raise ProtocolViolation(f"a summary of slice {summary.slice} in exchange {summary.exchange_number}")
    members = len(terms.members)
    if terms.groups:
        sizes = [len(group) for group in terms.groups]
        if len(summary.inside) != len(sizes) or not any(summary.inside) or summary.contributors:
            raise ProtocolViolation("a result that does not name the contributors of each group")
        for inside, size in zip(summary.inside, sizes, strict=True):
            below(inside, 1 << size, "contributors")
    named = [below(each.member, members, "member") for each in summary.contributors]
    if (not terms.groups and not named) or len(summary.excluded) > members:
        raise ProtocolViolation("a result without contributors, or with too many exclusions")
    if named != sorted(set(named)):
        raise ProtocolViolation("a result with contributors twice or out of order")
    if not all(math.isfinite(each.weight) and each.weight > 0 for each in summary.contributors):
        raise ProtocolViolation("a contributor's weight is not positive and finite")
    for exclusion in summary.excluded:
        below(exclusion.member, members, "member")
    return summary
