"""Slices on their way: parts of a payload, what an owner makes of the contributions to its slice, and how a result is checked.

A result carries the encoded average, or a *bundle*: the contributions themselves, in the order of members. Every member then aggregates
a bundle as its owner did, and gets the same bits. Results are bundles in two cases:

1. The codec is sparse, and an average of sparse vectors is not.
2. The round is verifiable (:class:`Verification`): the job has a robust aggregation rule, which would be worth nothing if the owner of a
   slice could send any average it likes. Each contribution in the bundle is signed by its author.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer, Message
from swarmnet_protocols.net.identity import verify
from swarmnet_protocols.training.codecs import Codec, result_codec
from swarmnet_protocols.training.rounds.aggregate import weighted_mean
from swarmnet_protocols.training.rounds.deadlines import MIN_WAIT_S, Pace
from swarmnet_protocols.training.rounds.messages import below
from swarmnet_protocols.wire import training_pb2 as pb

MAX_SUMMARY_BYTES = 32 << 10
MAX_REASON = 200
NAME_BYTES = 16

_SIGNATURE_DOMAIN = b"swarmnet-contribution-1"
_SIGNED = struct.Struct(">QId")


def all_fit(rows: torch.Tensor, _weights: torch.Tensor) -> list[str]:
    return [""] * len(rows)


@dataclass(frozen=True)
class Rules:
    """What an owner does with contributions. The same at all members of a job."""

    aggregate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weighted_mean
    """Of contributions [k, n] in the order of peer ids, with weights [k]: float32 [n]. May change the contributions."""
    screen: Callable[[torch.Tensor, torch.Tensor], list[str]] = all_fit
    """Of the same: for each why it must be left out, or "". Those that stay are screened again."""
    max_weight: float = 2.0**64
    """Enough for any number of tokens; what is finite and near the end of floats sums to infinity."""
    verifiable: bool = False
    """Every member checks the aggregation of every slice: see :class:`Verification`."""


def contribution_hash(data: Buffer) -> bytes:
    """Half a SHA-256: nobody finds other bytes that have it, and every result carries that of every contributor."""
    return hashlib.sha256(data).digest()[:NAME_BYTES]


@dataclass(frozen=True)
class Payload:
    """An encoded contribution with its weight. ``hash`` is the part of the SHA-256 of its bytes by which results name it."""

    weight: float
    data: Buffer
    hash: bytes
    signature: bytes = b""
    """By the author, in a verifiable round."""

    @classmethod
    def of(cls, weight: float, data: Buffer) -> "Payload":
        return cls(weight, data, contribution_hash(data))


@dataclass(frozen=True)
class Result:
    """What a slice became: the very bytes everybody decodes. ``hash`` is over ``summary`` (a ``pb.Summary``) and ``payload``."""

    hash: bytes
    summary: bytes
    payload: Buffer


def result_hash(summary: bytes, payload: Buffer) -> bytes:
    digest = hashlib.sha256(struct.pack(">I", len(summary)))
    digest.update(summary)
    digest.update(payload)
    return digest.digest()


@dataclass(frozen=True)
class Part:
    """``data`` of a payload at ``offset``. ``paced``: it was held back, so when it comes says nothing of the link."""

    offset: int
    data: memoryview
    paced: bool


def parts(payload: Buffer, pace: Pace, clock: Callable[[], float]) -> Iterator[Part | float]:
    """``payload`` in pieces, at least one even if it is empty; while the next is not due yet, when it will be."""
    view = memoryview(payload)
    for offset in range(0, max(len(view), 1), pace.part_bytes):
        paced = False
        while (due_s := pace.due_s(offset)) > clock() + MIN_WAIT_S:
            paced = True
            yield due_s
        yield Part(offset, view[offset : offset + pace.part_bytes], paced)


def contribution_messages(
    index: int, payload: Payload, parts: Iterator[Part | float], wanted: Callable[[], bool]
) -> Iterator[Message | float]:
    """The parts of a contribution to slice ``index`` as they travel, while it is ``wanted``; floats as in ``parts``."""
    for part in parts:
        if not wanted():
            return
        if isinstance(part, float):
            yield part
            continue
        header = pb.Contribution(
            slice=index,
            weight=payload.weight,
            size_bytes=len(payload.data),
            offset=part.offset,
            hash=payload.hash,
            paced=part.paced,
            signature=payload.signature,
        )
        yield Message(pb.ExchangeRequest(contribution=header).SerializeToString(), part.data)


def result_messages(index: int, result: Result, parts: Iterator[Part | float]) -> Iterator[Message | float]:
    """The parts of the result of slice ``index`` as they travel; floats as in ``parts``."""
    for part in parts:
        if isinstance(part, float):
            yield part
            continue
        header = pb.Result(
            slice=index,
            size_bytes=len(result.payload),
            offset=part.offset,
            hash=result.hash,
            summary=b"" if part.offset else result.summary,
            paced=part.paced,
        )
        yield Message(pb.ExchangeRequest(result=header).SerializeToString(), part.data)


class Assembly:
    """A payload of announced size that comes in parts. Grows with what came, never with what was announced.

    ``timed_bytes`` came in ``timed_s`` seconds: parts that left when the one before was gone, not the first nor paced ones.
    """

    def __init__(self, size_bytes: int, hash: bytes, summary: bytes = b"") -> None:
        self.size_bytes = size_bytes
        self.hash = hash
        self.summary = summary
        self.data = bytearray()
        self.timed_bytes = 0
        self.timed_s = 0.0
        self._last_s = 0.0

    def add(self, offset: int, part: Buffer, now: float, *, paced: bool) -> bool:
        """Whether the payload is complete now. Raises ``ProtocolViolation`` for a part out of place or too much."""
        if offset != len(self.data) or offset + len(part) > self.size_bytes:
            raise ProtocolViolation(
                f"a part of {len(part)} bytes at {offset} of a payload of which {len(self.data)} of {self.size_bytes} came"
            )
        if offset and not paced:
            self.timed_bytes += len(part)
            self.timed_s += now - self._last_s
        self._last_s = now
        self.data += part
        return len(self.data) == self.size_bytes


@dataclass(frozen=True)
class Verification:
    """What makes a round verifiable: its owners can leave contributions out, and change nothing else.

    ``keys`` are the members' public keys; a result needs contributions of at least ``quorum`` members, a majority of those who
    train, so that an owner cannot leave out all but its accomplices'.
    """

    job: bytes
    keys: tuple[bytes, ...]
    quorum: int


@dataclass(frozen=True)
class SliceTerms:
    """A slice of ``count`` values in a round, and how it travels."""

    round: int
    index: int
    count: int
    codec: Codec
    verification: Verification | None = None

    @property
    def is_bundled(self) -> bool:
        """Whether results carry the contributions in place of their average."""
        return self.codec.sparse or self.verification is not None

    def signed_bytes(self, payload: Payload) -> bytes:
        """What the author of a contribution to this slice signs in a verifiable round."""
        job = b"" if self.verification is None else self.verification.job
        return _SIGNATURE_DOMAIN + job + _SIGNED.pack(self.round, self.index, payload.weight) + payload.hash

    @property
    def contribution_bytes(self) -> int:
        return self.codec.max_bytes(self.count)

    def result_bytes(self, contributors: int) -> int:
        """The size of the payload of a result that has so many contributors."""
        if self.is_bundled:
            return contributors * self.contribution_bytes
        return result_codec(self.codec).max_bytes(self.count)


def reduce_slice(
    terms: SliceTerms, rules: Rules, payloads: Sequence[tuple[int, Payload]]
) -> tuple[Result, torch.Tensor] | None:
    """The result of a slice and its values [count], from contributions in the order of members; None if none counts."""
    accepted, values, reasons = _aggregated(terms, rules, payloads)
    if not accepted or not _has_quorum(terms, len(accepted)):
        return None
    if terms.is_bundled:
        encoded: Buffer = b"".join(payload.data for _, payload in accepted)
    else:
        codec = result_codec(terms.codec)
        try:
            encoded = codec.encode(values)
        except ValueError:  # finite contributions with an infinite mean
            return None
        values = codec.decode(encoded, terms.count)
    contributors = [
        pb.Contributor(member=member, weight=payload.weight, hash=payload.hash, signature=payload.signature)
        for member, payload in accepted
    ]
    excluded = [
        pb.Exclusion(member=member, reason=reason[:MAX_REASON]) for member, reason in sorted(reasons.items())
    ]
    summary = pb.Summary(
        round=terms.round, slice=terms.index, contributors=contributors, excluded=excluded
    ).SerializeToString(deterministic=True)
    return Result(result_hash(summary, encoded), summary, encoded), values


def _aggregated(
    terms: SliceTerms, rules: Rules, payloads: Sequence[tuple[int, Payload]]
) -> tuple[list[tuple[int, Payload]], torch.Tensor, dict[int, str]]:
    """The contributions that count, their aggregate [count], and why members are left out. Without any the aggregate is empty."""
    accepted: list[tuple[int, Payload]] = []
    excluded: dict[int, str] = {}
    rows = torch.empty(len(payloads), terms.count)
    for member, payload in payloads:
        try:
            rows[len(accepted)] = _read(terms, rules, member, payload)
            accepted.append((member, payload))
        except ProtocolViolation as error:
            excluded[member] = str(error)
    rows = rows[: len(accepted)]
    while accepted:
        weights = _weights(payload.weight for _, payload in accepted)
        reasons = rules.screen(rows, weights)
        if not any(reasons):
            return accepted, rules.aggregate(rows, weights), excluded
        excluded |= {member: reason for (member, _), reason in zip(accepted, reasons, strict=True) if reason}
        fine = [number for number, reason in enumerate(reasons) if not reason]
        accepted, rows = [accepted[number] for number in fine], rows[fine]
    return [], rows, excluded


def _weights(weights: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(weights), dtype=torch.float64)


def _has_quorum(terms: SliceTerms, contributors: int) -> bool:
    return terms.verification is None or contributors >= terms.verification.quorum


def _read(terms: SliceTerms, rules: Rules, member: int, payload: Payload) -> torch.Tensor:
    """The values [count] of the contribution of ``member``. Raises ``ProtocolViolation`` for one that cannot count."""
    if payload.weight > rules.max_weight:
        raise ProtocolViolation(f"weight {payload.weight:g} is above {rules.max_weight:g}")
    if contribution_hash(payload.data) != payload.hash:
        raise ProtocolViolation("the contribution does not have its hash")
    if terms.verification is not None:
        key = terms.verification.keys[member]
        if not verify(key, payload.signature, terms.signed_bytes(payload)):
            raise ProtocolViolation("the contribution is not signed by its author")
    return terms.codec.decode(payload.data, terms.count)


@dataclass(frozen=True)
class Reader:
    """How member ``me`` of ``members`` reads results of a slice. ``own`` is what it contributes, None for nothing."""

    terms: SliceTerms
    rules: Rules
    members: int
    me: int
    own: Payload | None

    def read(self, result: Result) -> torch.Tensor:
        """The values [count] of a result from another member. Raises ``ProtocolViolation`` unless it is one of this slice.

        No owner can say that this member contributed anything but what it did. Only the author of a contribution can tell.
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
            return self._open_bundle(contributors, memoryview(result.payload))
        return result_codec(self.terms.codec).decode(result.payload, self.terms.count)

    def _is_own(self, named: pb.Contributor) -> bool:
        return self.own is not None and (named.weight, named.hash) == (self.own.weight, self.own.hash)

    def _open_bundle(self, contributors: Sequence[pb.Contributor], bundle: memoryview) -> torch.Tensor:
        size = self.terms.contribution_bytes
        payloads = [
            Payload(each.weight, bundle[number * size : (number + 1) * size], each.hash, each.signature)
            for number, each in enumerate(contributors)
        ]
        values = []
        for each, payload in zip(contributors, payloads, strict=True):
            try:
                values.append(_read(self.terms, self.rules, each.member, payload))
            except ProtocolViolation as error:
                raise ProtocolViolation(f"member {each.member} is in a bundle, but {error}") from error
        rows = torch.stack(values)
        weights = _weights(payload.weight for payload in payloads)
        for each, reason in zip(contributors, self.rules.screen(rows, weights), strict=True):
            if reason:
                raise ProtocolViolation(f"member {each.member} is in a bundle, but {reason}")
        return self.rules.aggregate(rows, weights)


def read_summary(terms: SliceTerms, members: int, serialized: bytes) -> pb.Summary:
    """The checked summary of a result."""
    try:
        summary = pb.Summary.FromString(serialized)
    except DecodeError as error:
        raise ProtocolViolation("not a summary") from error
    if (summary.round, summary.slice) != (terms.round, terms.index):
        raise ProtocolViolation(f"a summary of slice {summary.slice} in round {summary.round}")
    named = [below(each.member, members, "member") for each in summary.contributors]
    if not named or named != sorted(set(named)) or len(summary.excluded) > members:
        raise ProtocolViolation("a result names its contributors twice, out of order, or not at all")
    if not all(math.isfinite(each.weight) and each.weight > 0 for each in summary.contributors):
        raise ProtocolViolation("a contributor's weight is not positive and finite")
    for exclusion in summary.excluded:
        below(exclusion.member, members, "member")
    return summary
