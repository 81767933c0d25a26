"""Signed records: every byte is signed, and wrong, old or large ones are refused."""

from dataclasses import replace
from typing import Any

import pytest

from swarmnet_protocols.directory import records
from swarmnet_protocols.directory.records import Record, dht_keys, newest, open_record, open_valid, seal
from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import records_pb2 as pb
from tests.defences import defence, replacing

NOW = 1_800_000_000.0
SWARM = bytes(range(32))
ALICE = Identity.from_seed(b"alice")
MALLORY = Identity.from_seed(b"mallory")
RECORD = Record(SWARM, "hosts/ab", ALICE.public_key, 7, NOW + 60, b"body")


def opened(data: bytes) -> Record:
    return open_record(data, swarm=SWARM, now=NOW)


def test_a_sealed_record_is_opened_unchanged() -> None:
    assert opened(seal(ALICE, RECORD)) == RECORD
    assert RECORD.peer_id == ALICE.peer_id


def test_a_record_of_another_swarm_is_refused() -> None:
    with pytest.raises(NotAuthorised):
        opened(seal(ALICE, replace(RECORD, swarm=bytes(32))))


@pytest.mark.parametrize("age_s", [60.0, 61.0])
def test_an_expired_record_is_refused(age_s: float) -> None:
    with pytest.raises(IntegrityError, match="expired"):
        open_record(seal(ALICE, RECORD), swarm=SWARM, now=NOW + age_s)


def test_a_record_that_is_valid_for_more_than_a_day_is_refused() -> None:
    day_s = 24 * 3600
    assert opened(seal(ALICE, replace(RECORD, expires_at=NOW + day_s)))
    with pytest.raises(IntegrityError, match="day"):
        opened(seal(ALICE, replace(RECORD, expires_at=NOW + day_s + 1)))


@pytest.mark.parametrize(
    "change",
    [
        {"swarm": bytes(32)},
        {"topic": "hosts/ac"},
        {"signer": MALLORY.public_key},
        {"sequence": 8},
        {"expires_at_ms": int(NOW * 1000) + 60_001},
        {"body": b"bodx"},
        {"signature": bytes(64)},
        {"signature": b""},
        {"signer": b""},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_is_signed(change: dict[str, Any]) -> None:
    message = pb.SignedRecord.FromString(seal(ALICE, RECORD))
    for name, value in change.items():
        setattr(message, name, value)
    swarm = message.swarm
    with pytest.raises(IntegrityError, match="signature"):
        open_record(message.SerializeToString(), swarm=swarm, now=NOW)


def test_fields_cannot_be_moved_into_each_other() -> None:
    one = seal(ALICE, replace(RECORD, topic="ab", body=b""))
    two = pb.SignedRecord.FromString(one)
    two.topic, two.body = "a", b"b"
    with pytest.raises(IntegrityError, match="signature"):
        opened(two.SerializeToString())


def test_nothing_can_be_added_around_the_signature() -> None:
    data = seal(ALICE, RECORD)
    unknown_field = b"\x7a\x03abc"
    repeated_field = b"\x10\x00"
    for addition in (unknown_field, repeated_field):
        with pytest.raises(IntegrityError):
            opened(data + addition)
        with pytest.raises(IntegrityError):
            opened(addition + data)


def test_a_record_over_its_size_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_STATEMENTS", ("small",))
    largest = replace(RECORD, body=bytes(16_000))
    assert opened(seal(ALICE, largest)) == largest
    oversized = replace(RECORD, body=bytes(17_000))
    with pytest.raises(ValueError, match="16384"):
        seal(ALICE, oversized)
    with monkeypatch.context() as lax:
        lax.setattr(records, "MAX_RECORD_BYTES", 1 << 20)
        data = seal(ALICE, oversized)
    with pytest.raises(IntegrityError, match="16384"):
        opened(data)


@defence("a signed record is small", off=replacing(records, "_STATEMENTS", ("none",)), topic="hosts/00")
@pytest.mark.parametrize("topic", ["hosts/00", "train/00", "identity/00"])
def test_records_published_together_are_smaller(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = replace(RECORD, topic=topic, body=bytes(3900))
    assert opened(seal(ALICE, largest)) == largest
    oversized = replace(largest, body=bytes(4096))
    with pytest.raises(ValueError, match="4096"):
        seal(ALICE, oversized)
    with monkeypatch.context() as lax:
        lax.setattr(records, "_STATEMENTS", ("else",))
        data = seal(ALICE, oversized)
    with pytest.raises(IntegrityError, match="4096"):
        opened(data)


def test_a_topic_has_a_largest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(seal(ALICE, replace(RECORD, topic="t" * 128)))
    too_long = replace(RECORD, topic="t" * 129)
    with pytest.raises(ValueError, match="128"):
        seal(ALICE, too_long)
    with monkeypatch.context() as lax:
        lax.setattr(records, "MAX_TOPIC_CHARS", 1000)
        data = seal(ALICE, too_long)
    with pytest.raises(IntegrityError, match="128"):
        opened(data)


def test_a_record_is_sealed_only_by_its_signer() -> None:
    with pytest.raises(ValueError, match="signer"):
        seal(MALLORY, RECORD)
    with pytest.raises(ValueError, match="32"):
        seal(ALICE, replace(RECORD, swarm=b"short"))


def test_bytes_that_are_no_record_are_refused() -> None:
    for data in (b"", b"\xff" * 40, b"\x0a\x7fabc"):
        with pytest.raises((IntegrityError, NotAuthorised)):
            opened(data)


def test_open_valid_skips_invalid_records() -> None:
    good = seal(ALICE, RECORD)
    foreign = seal(ALICE, replace(RECORD, swarm=bytes(32)))
    assert list(open_valid([b"junk", good, foreign], swarm=SWARM, now=NOW)) == [RECORD]


def test_only_the_newest_record_of_each_signer_is_kept() -> None:
    older, other = replace(RECORD, sequence=6), replace(RECORD, signer=MALLORY.public_key, sequence=1)
    assert set(newest([RECORD, older, other])) == {RECORD, other}
    assert newest([older, RECORD, other]) == newest([other, RECORD, older])


def test_keys_differ_by_salt_swarm_and_topic() -> None:
    keys = [*dht_keys(SWARM, "a"), *dht_keys(SWARM, "b"), *dht_keys(bytes(32), "a")]
    assert len(set(keys)) == 9
    assert dht_keys(SWARM, "a") == dht_keys(SWARM, "a")
