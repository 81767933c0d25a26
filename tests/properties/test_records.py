"""No change to a sealed record is accepted."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet_protocols.directory import records as records_module
from swarmnet_protocols.directory.records import Record, open_record, seal
from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.net.identity import Identity
from tests.defences import defence, replacing, yes
from tests.support.attacks.mutations import mutations, taken

NOW = 1_800_000_000.0
SWARM = bytes(range(32))
ALICE = Identity.from_seed(b"alice")
REFUSALS = (IntegrityError, NotAuthorised)

records = st.builds(
    Record,
    swarm=st.just(SWARM),
    topic=st.text(st.characters(codec="utf-8"), max_size=128),
    signer=st.just(ALICE.public_key),
    sequence=st.integers(0, 2**64 - 1),
    expires_at=st.integers(1, 24 * 3600 * 1000).map(lambda ms: (NOW * 1000 + ms) / 1000),
    body=st.binary(max_size=200),
)
SEALED = seal(ALICE, Record(SWARM, "hosts/ab", ALICE.public_key, 7, NOW + 60, b"body"))


@given(records)
def test_a_sealed_record_is_opened_unchanged(record: Record) -> None:
    assert open_record(seal(ALICE, record), swarm=SWARM, now=NOW) == record


@defence("no mutated record counts", off=replacing(records_module, "verify", yes))
def test_no_mutation_is_accepted() -> None:
    mutated = mutations(SEALED, settings().max_examples)
    assert taken(mutated, lambda data: open_record(data, swarm=SWARM, now=NOW), REFUSALS) == []


@given(st.binary(max_size=400))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(REFUSALS):
        open_record(garbage, swarm=SWARM, now=NOW)


def test_no_signature_of_another_record_fits() -> None:
    first = seal(ALICE, Record(SWARM, "a", ALICE.public_key, 1, NOW + 60, b""))
    second = seal(ALICE, replace(open_record(first, swarm=SWARM, now=NOW), sequence=2))
    with pytest.raises(IntegrityError):
        open_record(first[:-64] + second[-64:], swarm=SWARM, now=NOW)
