"""Reduces one slice: from the members' contributions to one result that every member can check.

A result carries the encoded aggregate, or a *bundle*: the contributions themselves, in the order of
members. Each member then aggregates the bundle as the reducer did, and gets the same bits. Results
are bundles in two cases:

1. The codec is sparse: an aggregate of sparse vectors is not sparse.
2. The round is verifiable (:class:`Verification`), because the job has a robust aggregation rule. A
   reducer could otherwise bypass the rule with a false aggregate. Each contribution in the bundle
   is signed by its author.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.identity import verify
from swarmnet_protocols.training.codecs import Codec, result_codec
from swarmnet_protocols.training.rounds.aggregation_rules import weighted_mean
from swarmnet_protocols.training.rounds.messages import below
from swarmnet_protocols.wire import training_pb2 as pb

MAX_REASON = 200
CONTRIBUTION_HASH_BYTES = 16
"""Bytes of a contribution's hash: half a SHA-256. Every result carries one for each contributor.

Finding a second preimage of it is infeasible.
"""


_SIGNATURE_DOMAIN = b"swarmnet-contribution-1"
_SIGNED = struct.Struct(">QId")


def accept_all(rows: torch.Tensor, _weights: torch.Tensor) -> list[str]:
    """Leave out no contribution."""
    return [""] * len(rows)


@dataclass(frozen=True)
class AggregationRules:
    """How contributions are screened and aggregated. Equal at all members of a job."""

    aggregate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weighted_mean
    """Maps contributions [k, n] and weights [k] to the aggregate, float32 [n].

    The contributions are in the order of members. May change the contributions.
    """
    screen: Callable[[torch.Tensor, torch.Tensor], list[str]] = accept_all
    """Returns k reasons for leaving a contribution out; "" to keep it.

    Takes the same arguments as ``aggregate``. It is called again with the kept contributions until
    it keeps all of them.
    """
    max_weight: float = 2.0**64
    """Largest weight of a contribution.

    The default is above any number of tokens, and sums of such weights are still finite.
    """
    verifiable: bool = False
    """Whether every member checks the aggregation of every slice: see :class:`Verification`."""


def contribution_hash(data: Buffer) -> bytes:
    """Return the first 16 bytes of the SHA-256 of an encoded contribution."""
    return hashlib.sha256(data).digest()[:CONTRIBUTION_HASH_BYTES]


@dataclass(frozen=True)
class Contribution:
    """A member's encoded values of one slice, with their weight and hash.

    Results name a contribution by its hash.
    """

    weight: float
    data: Buffer
    hash: bytes
    signature: bytes = b""
    """The author's signature; empty unless the round is verifiable."""

    @classmethod
    def of(cls, weight: float, data: Buffer) -> "Contribution":
        return cls(weight, data, contribution_hash(data))


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


@dataclass(frozen=True)
class Verification:
    """The data of a verifiable round.

    Contributions are signed: a reducer can omit some, but not change any. ``keys`` are the members'
    public keys. A result needs contributions of at least ``quorum`` members, a majority of the
    training members. So a reducer cannot keep only its accomplices' contributions.
    """

    job: bytes
    keys: tuple[bytes, ...]
    quorum: int


@dataclass(frozen=True)
class SliceTerms:
    """A slice of ``count`` values in an exchange, and the codec of its contributions."""

    exchange_number: int
    index: int
    count: int
    codec: Codec
    verification: Verification | None = None

    @property
    def is_bundled(self) -> bool:
        """Whether results carry the contributions instead of their aggregate."""
        return self.codec.sparse or self.verification is not None

    def signed_bytes(self, contribution: "Contribution") -> bytes:
        """Return the bytes that a contribution's author signs in a verifiable round."""
        job = b"" if self.verification is None else self.verification.job
        signed = _SIGNED.pack(self.exchange_number, self.index, contribution.weight)
        return _SIGNATURE_DOMAIN + job + signed + contribution.hash

    @property
    def contribution_bytes(self) -> int:
        """Bytes of an encoded contribution."""
        return self.codec.max_bytes(self.count)

    def result_bytes(self, contributors: int) -> int:
        """Return the size of a result's payload if ``contributors`` members contributed."""
        if self.is_bundled:
            return contributors * self.contribution_bytes
        return result_codec(self.codec).max_bytes(self.count)


def reduce_slice(
    terms: SliceTerms, rules: AggregationRules, contributions: Sequence[tuple[int, Contribution]]
) -> tuple[Result, torch.Tensor] | None:
    """Reduce (member, contribution) pairs to a result and its values [count].

    The pairs are in the order of members. None if no contribution is accepted.
    """
    accepted, values, reasons = _aggregate_valid(terms, rules, contributions)
    if not accepted or not _has_quorum(terms, len(accepted)):
        return None
    if terms.is_bundled:
        encoded: Buffer = b"".join(contribution.data for _, contribution in accepted)
    else:
        codec = result_codec(terms.codec)
        try:
            encoded = codec.encode(values)
        except ValueError:  # the mean of finite contributions is infinite
            return None
        values = codec.decode(encoded, terms.count)
    contributors = [
        pb.Contributor(
            member=member,
            weight=contribution.weight,
            hash=contribution.hash,
            signature=contribution.signature,
        )
        for member, contribution in accepted
    ]
    excluded = [
        pb.Exclusion(member=member, reason=reason[:MAX_REASON]) for member, reason in sorted(reasons.items())
    ]
    summary = pb.Summary(
        exchange_number=terms.exchange_number, slice=terms.index, contributors=contributors, excluded=excluded
    ).SerializeToString(deterministic=True)
    return Result(result_hash(summary, encoded), summary, encoded), values


def _aggregate_valid(
    terms: SliceTerms, rules: AggregationRules, contributions: Sequence[tuple[int, Contribution]]
) -> tuple[list[tuple[int, Contribution]], torch.Tensor, dict[int, str]]:
    """Return the accepted contributions, their aggregate, and why the others are left out.

    The aggregate has the shape [count]; if no contribution is accepted, it is empty, [0, count].
    The reasons are by member.
    """
    accepted: list[tuple[int, Contribution]] = []
    excluded: dict[int, str] = {}
    rows = torch.empty(len(contributions), terms.count)
    for member, contribution in contributions:
        try:
            rows[len(accepted)] = _decode(terms, rules, member, contribution)
            accepted.append((member, contribution))
        except ProtocolViolation as error:
            excluded[member] = str(error)
    rows = rows[: len(accepted)]
    while accepted:
        weights = _weights(contribution.weight for _, contribution in accepted)
        reasons = rules.screen(rows, weights)
        if not any(reasons):
            return accepted, rules.aggregate(rows, weights), excluded
        excluded |= {member: reason for (member, _), reason in zip(accepted, reasons, strict=True) if reason}
        kept = [row for row, reason in enumerate(reasons) if not reason]
        accepted, rows = [accepted[row] for row in kept], rows[kept]
    return [], rows, excluded


def _weights(weights: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(weights), dtype=torch.float64)


def _has_quorum(terms: SliceTerms, contributors: int) -> bool:
    return terms.verification is None or contributors >= terms.verification.quorum


def _decode(
    terms: SliceTerms, rules: AggregationRules, member: int, contribution: Contribution
) -> torch.Tensor:
    """Decode the contribution of ``member`` to values [count].

    Raises ``ProtocolViolation`` for an invalid one.
    """
    if contribution.weight > rules.max_weight:
        raise ProtocolViolation(f"weight {contribution.weight:g} is above {rules.max_weight:g}")
    if contribution_hash(contribution.data) != contribution.hash:
        raise ProtocolViolation("the contribution does not have its hash")
    if terms.verification is not None:
        key = terms.verification.keys[member]
        if not verify(key, contribution.signature, terms.signed_bytes(contribution)):
            raise ProtocolViolation("the contribution is not signed by its author")
    return terms.codec.decode(contribution.data, terms.count)


@dataclass(frozen=True)
class ResultReader:
    """Verifies and decodes results of a slice at member ``me`` of ``members``.

    ``own``: this member's own contribution; None if it made none.
    """

    terms: SliceTerms
    rules: AggregationRules
    members: int
    me: int
    own: Contribution | None

    def read(self, result: Result) -> torch.Tensor:
        """Return the values [count] of a result from another member.

        Raises ``ProtocolViolation`` for a result that does not belong to this slice. Also for one
        with a forged contribution, which this member did not make but which has its number. Without
        signatures, only this member can notice that.
        """
        if result_hash(result.summary, result.payload) != result.hash:
            raise ProtocolViolation(f"a result of slice {self.terms.index} does not have its hash")
        contributors = read_summary(self.terms, self.members, result.summary).contributors
        for each in contributors:
            if each.member == self.me and not self._is_own(each):
                raise ProtocolViolation("a result names a contribution of this member that it did not make")
        if len(result.payload) != self.terms.result_bytes(len(contributors)):
            raise ProtocolViolation(
                f"a result of {len(result.payload)} bytes from {len(contributors)} contributors"
            )
        if not _has_quorum(self.terms, len(contributors)):
            raise ProtocolViolation(f"a result of {len(contributors)} contributors, too few to be robust")
        if self.terms.is_bundled:
            return self._read_bundle(contributors, memoryview(result.payload))
        return result_codec(self.terms.codec).decode(result.payload, self.terms.count)

    def _is_own(self, named: pb.Contributor) -> bool:
        return self.own is not None and (named.weight, named.hash) == (self.own.weight, self.own.hash)

    def _read_bundle(self, contributors: Sequence[pb.Contributor], bundle: memoryview) -> torch.Tensor:
        size = self.terms.contribution_bytes
        contributions = [
            Contribution(each.weight, bundle[place * size : (place + 1) * size], each.hash, each.signature)
            for place, each in enumerate(contributors)
        ]
        values = []
        for each, contribution in zip(contributors, contributions, strict=True):
            try:
                values.append(_decode(self.terms, self.rules, each.member, contribution))
            except ProtocolViolation as error:
                raise ProtocolViolation(f"member {each.member} is in a bundle, but {error}") from error
        rows = torch.stack(values)
        weights = _weights(contribution.weight for contribution in contributions)
        for each, reason in zip(contributors, self.rules.screen(rows, weights), strict=True):
            if reason:
                raise ProtocolViolation(f"member {each.member} is in a bundle, but {reason}")
        return self.rules.aggregate(rows, weights)


def read_summary(terms: SliceTerms, members: int, serialized: bytes) -> pb.Summary:
    """Parse and check the summary of a result. Raises ``ProtocolViolation``."""
    try:
        summary = pb.Summary.FromString(serialized)
    except DecodeError as error:
        raise ProtocolViolation("not a summary") from error
    if (summary.exchange_number, summary.slice) != (terms.exchange_number, terms.index):
        raise ProtocolViolation(f"a summary of slice {summary.slice} in exchange {summary.exchange_number}")
    named = [below(each.member, members, "member") for each in summary.contributors]
    if not named or named != sorted(set(named)) or len(summary.excluded) > members:
        raise ProtocolViolation("a result without contributors, or with contributors twice or out of order")
    if not all(math.isfinite(each.weight) and each.weight > 0 for each in summary.contributors):
        raise ProtocolViolation("a contributor's weight is not positive and finite")
    for exclusion in summary.excluded:
        below(exclusion.member, members, "member")
    return summary
