"""Signed records: what a peer publishes in the directory. Nobody else can make or change them.

Nobody else can prolong a record, either: the signature covers its expiry.
"""

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity, peer_id_of, verify
from swarmnet_protocols.wire import records_pb2 as pb

MAX_RECORD_BYTES = 16 << 10
MAX_STATEMENT_BYTES = 4 << 10
"""Most bytes of a record under a topic that begins like one of ``_STATEMENTS``.

Many peers publish under these topics, and readers read all the records together.
"""
_STATEMENTS = ("hosts/", "train/", "identity/")
MAX_TOPIC_CHARS = 128
MAX_LIFETIME_S = 24 * 3600.0
SWARM_BYTES = 32

_SIGNATURE_CONTEXT = b"swarmnet-record-1"
_KEY_CONTEXT = b"swarmnet-key-1"
KEY_SALTS = 3
"""Number of DHT keys of a topic."""


@dataclass(frozen=True)
class Record:
    """One publication by one signer."""

    swarm: bytes
    topic: str
    signer: bytes
    """Raw Ed25519 public key."""
    sequence: int
    """Counter that grows with every publication of this topic by this signer."""
    expires_at: float
    """Unix time, kept to the millisecond."""
    body: bytes
    certificate: bytes = b""
    """The sealed certificate of the signer; empty in swarms without certificates.

    ``signers.py`` checks it.
    """
    sealed: bytes = field(default=b"", compare=False, repr=False)
    """The encoded record with its signature, as received; empty for a record made here."""

    @property
    def peer_id(self) -> PeerId:
        return peer_id_of(self.signer)


Check = Callable[[Record], None]
"""Raises ``IntegrityError`` or ``NotAuthorised`` if the signer may not publish the record.

See ``signers.py``.
"""


def seal(identity: Identity, record: Record) -> bytes:
    """Encode and sign ``record``.

    Raises ``ValueError`` if it is over the limits or its signer is not ``identity``.
    """
    if record.signer != identity.public_key:
        raise ValueError("a record can only be sealed by its signer")
    if len(record.swarm) != SWARM_BYTES:
        raise ValueError(f"a swarm has {SWARM_BYTES} bytes, not {len(record.swarm)}")
    if len(record.topic) > MAX_TOPIC_CHARS:
        raise ValueError(f"the topic has more than {MAX_TOPIC_CHARS} characters")
    message = pb.SignedRecord(
        swarm=record.swarm,
        topic=record.topic,
        signer=record.signer,
        sequence=record.sequence,
        expires_at_ms=round(record.expires_at * 1000),
        body=record.body,
        certificate=record.certificate,
    )
    message.signature = identity.sign(_signed_bytes(message))
    data = message.SerializeToString(deterministic=True)
    if len(data) > max_bytes(record.topic):
        raise ValueError(f"the record has {len(data)} bytes, {max_bytes(record.topic)} are allowed")
    return data


class Publisher:
    """Seals the records of one peer.

    Sequence numbers grow with every record. So do expiries, unless the clock was set back by more
    than a day.
    """

    max_lifetime_s = MAX_LIFETIME_S
    """Longest lifetime that replicas accept, in seconds."""

    def __init__(
        self, identity: Identity, swarm: bytes, clock: Clock, certificate: Callable[[], bytes] = bytes
    ) -> None:
        """``certificate`` returns this peer's sealed certificate; empty where members need none."""
        self.certificate = certificate
        self._identity = identity
        self.swarm = swarm
        self.clock = clock
        self._last: dict[str, Record] = {}

    def seal(self, topic: str, body: bytes, *, lifetime_s: float) -> tuple[Record, bytes]:
        """Make the next record under ``topic``. Returns it with its sealed form."""
        now = self.clock()
        sequence, expires_at = int(now * 1000), now + lifetime_s
        if last := self._last.get(topic):
            sequence = max(sequence, last.sequence + 1)
            # A replica replaces a record only by a record that expires later, so the next one has
            # to outlive the last. There is one exception: the clock was ahead when the last record
            # was sealed. Replicas refused that record, because it was valid for too long, and would
            # refuse a longer one.
            if last.expires_at < now + self.max_lifetime_s:
                expires_at = max(expires_at, last.expires_at + 0.001)
        record = Record(
            self.swarm,
            topic,
            self._identity.public_key,
            sequence,
            round(expires_at, 3),
            body,
            self.certificate(),
        )
        sealed = seal(self._identity, record)
        self._last[topic] = record
        return record, sealed


def max_bytes(topic: str) -> int:
    """Return the most bytes of a sealed record under ``topic``."""
    return MAX_STATEMENT_BYTES if topic.startswith(_STATEMENTS) else MAX_RECORD_BYTES


def open_record(data: bytes, *, swarm: bytes, now: float) -> Record:
    """Verify and decode a sealed record.

    Raises ``NotAuthorised`` for a record of another swarm. Raises ``IntegrityError`` for a record
    that is too large, not in canonical form, not signed by its signer, expired, or valid for too
    long.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise IntegrityError(f"the record has {len(data)} bytes, {MAX_RECORD_BYTES} are allowed")
    message = pb.SignedRecord()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise IntegrityError("the record cannot be decoded") from error
    # Protobuf has many encodings of one message. Accepting only one keeps unsigned bytes out.
    if _canonical(message) != data:
        raise IntegrityError("the record is not in canonical form")
    if message.swarm != swarm:
        raise NotAuthorised("the record belongs to another swarm")
    if len(message.topic) > MAX_TOPIC_CHARS:
        raise IntegrityError(f"the topic has more than {MAX_TOPIC_CHARS} characters")
    if len(data) > max_bytes(message.topic):
        raise IntegrityError(f"the record has {len(data)} bytes, {max_bytes(message.topic)} are allowed here")
    expires_at = message.expires_at_ms / 1000
    if expires_at <= now:
        raise IntegrityError("the record has expired")
    if expires_at > now + MAX_LIFETIME_S:
        raise IntegrityError("the record is valid for longer than a day")
    if not verify(message.signer, message.signature, _signed_bytes(message)):
        raise IntegrityError("the signature is wrong")
    return Record(
        message.swarm,
        message.topic,
        message.signer,
        message.sequence,
        expires_at,
        message.body,
        message.certificate,
        data,
    )


def open_valid(
    sealed: Iterable[bytes], *, swarm: bytes, now: float, check: Check = lambda _: None
) -> Iterator[Record]:
    """Yield the records in ``sealed`` that :func:`open_record` and ``check`` accept."""
    for data in sealed:
        with contextlib.suppress(IntegrityError, NotAuthorised):
            record = open_record(data, swarm=swarm, now=now)
            check(record)
            yield record


def newest(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the record with the highest sequence of each signer, ordered by signer key."""
    best: dict[bytes, Record] = {}
    for record in records:
        if record.signer not in best or best[record.signer].sequence < record.sequence:
            best[record.signer] = record
    return tuple(best[signer] for signer in sorted(best))


def dht_keys(swarm: bytes, topic: str) -> tuple[bytes, ...]:
    """Return the DHT keys of ``topic``.

    There are several, so peers that surround one key cannot hide a record.
    """
    return tuple(
        hashlib.sha256(_with_sizes(_KEY_CONTEXT, bytes([salt]), swarm, topic.encode())).digest()
        for salt in range(KEY_SALTS)
    )


def _signed_bytes(message: pb.SignedRecord) -> bytes:
    certificate = [message.certificate] if message.certificate else []
    return _SIGNATURE_CONTEXT + _with_sizes(
        message.swarm,
        message.topic.encode(),
        message.signer,
        message.sequence.to_bytes(8, "big"),
        message.expires_at_ms.to_bytes(8, "big"),
        message.body,
        *certificate,
    )


def _with_sizes(*parts: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def _canonical(message: pb.SignedRecord) -> bytes:
    known = pb.SignedRecord(
        swarm=message.swarm,
        topic=message.topic,
        signer=message.signer,
        sequence=message.sequence,
        expires_at_ms=message.expires_at_ms,
        body=message.body,
        signature=message.signature,
        certificate=message.certificate,
    )
    return known.SerializeToString(deterministic=True)
