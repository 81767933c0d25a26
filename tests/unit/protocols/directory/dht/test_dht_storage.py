"""What a peer of the DHT keeps for others: the newest record of each signer, within limits."""

import random
from collections import Counter
from typing import Any

import pytest

from swarmnet_protocols.directory.dht import storage as dht_storage
from swarmnet_protocols.directory.dht.storage import BoundedStorage, StorageLimits
from swarmnet_protocols.directory.records import MAX_LIFETIME_S
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager
from tests.defences import Patch, defence, replacing
from tests.support.attacks.switched_off import count_only


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


def storage(clock: Time, **limits: int) -> Any:
    """Keys are numbers here: a storage only compares them."""
    return BoundedStorage(StorageLimits(**limits), clock)


def held(store: Any, key: int) -> dict[bytes, bytes]:
    found = store.get(key)
    return {} if found is None else {subkey: item.value for subkey, item in found.value.items()}


@pytest.fixture(autouse=True)
def _hivemind_clock(monkeypatch: pytest.MonkeyPatch, clock: Time) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    monkeypatch.setattr("hivemind.utils.timed_storage.get_dht_time", clock)


def test_keeps_one_record_per_signer_until_it_expires(clock: Time) -> None:
    store = storage(clock)
    assert store.store_subkey(1, b"a", b"first", 1010.0)
    assert store.store_subkey(1, b"b", b"other", 1020.0)
    assert store.store_subkey(1, b"a", b"second", 1015.0)
    assert held(store, 1) == {b"a": b"second", b"b": b"other"}
    assert store.get(1).expiration_time == 1020.0
    clock.now = 1015.0
    assert held(store, 1) == {b"b": b"other"}
    clock.now = 1020.0
    assert store.get(1) is None
    assert store.total_bytes == 0


def test_a_record_is_not_replaced_by_one_that_expires_earlier(clock: Time) -> None:
    store = storage(clock)
    store.store_subkey(1, b"a", b"newer", 1010.0)
    assert not store.store_subkey(1, b"a", b"older", 1009.0)
    assert not store.store_subkey(1, b"a", b"again", 1010.0)
    assert store.store_subkey(1, b"a", b"newer", 1010.0), "its publisher offers it again"
    assert held(store, 1) == {b"a": b"newer"}


@defence(
    "a record stored while a clock was ahead is replaced",
    off=replacing(dht_storage, "MAX_LIFETIME_S", float("inf")),
)
def test_a_record_kept_while_the_clock_was_ahead_yields_to_the_next(
    clock: Time,
) -> None:
    store = storage(clock)
    clock.now = 1000.0 + 2 * MAX_LIFETIME_S
    assert store.store_subkey(1, b"alice", b"ahead", clock.now + 45.0)
    clock.now = 1000.0
    assert store.store_subkey(1, b"alice", b"back", 1045.0)
    assert held(store, 1) == {b"alice": b"back"}


def test_an_expired_record_and_one_without_a_signer_are_not_kept(clock: Time) -> None:
    store = storage(clock)
    assert not store.store_subkey(1, b"a", b"x", 1000.0)
    assert not store.store(1, b"regular value", 1010.0)
    assert store.get(1) is None


def test_records_of_one_signer_are_limited(clock: Time) -> None:
    store = storage(clock, signer_records=3)
    assert [store.store_subkey(key, b"a", b"x", 1010.0) for key in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert store.store_subkey(0, b"a", b"y", 1011.0), "an update is not a further record"
    assert store.store_subkey(9, b"b", b"x", 1010.0)
    clock.now = 1010.0
    assert store.store_subkey(4, b"a", b"x", 1020.0)


def test_bytes_under_one_key_are_limited(clock: Time) -> None:
    store = storage(clock, key_bytes=100)
    assert store.store_subkey(1, b"a", bytes(60), 1010.0)
    assert not store.store_subkey(1, b"b", bytes(60), 1020.0)
    assert store.store_subkey(1, b"b", bytes(40), 1020.0)
    assert not store.store_subkey(1, b"b", bytes(41), 1030.0)
    assert store.store_subkey(2, b"b", bytes(60), 1020.0)


def test_the_record_that_expires_first_makes_room(clock: Time) -> None:
    store = storage(clock, total_bytes=100)
    assert store.store_subkey(1, b"a", bytes(40), 1030.0)
    assert store.store_subkey(2, b"b", bytes(40), 1010.0)
    assert store.store_subkey(3, b"c", bytes(40), 1020.0)
    assert 2 not in store
    assert not store.store_subkey(4, b"d", bytes(40), 1005.0), "it would be the first to go"
    assert 1 in store
    assert 3 in store
    assert store.total_bytes == 80


def test_replacing_many_times_does_not_leak(clock: Time) -> None:
    store = storage(clock)
    for turn in range(10_000):
        assert store.store_subkey(1, b"a", bytes(10), 1010.0 + turn)
    assert store.total_bytes == 10
    assert len(store._expiries) < 100
    clock.now = 1010.0 + 10_000
    assert store.get(1) is None


def test_a_reader_that_changes_its_answer_does_not_change_the_storage(clock: Time) -> None:
    store = storage(clock)
    store.store_subkey(1, b"a", b"x", 1010.0)
    store.get(1).value.store(b"b", b"smuggled", 1010.0)
    assert held(store, 1) == {b"a": b"x"}
    assert [(key, [subkey for subkey, _ in item.value.items()]) for key, item in store.items()] == [
        (1, [b"a"])
    ]


@defence("records of one peer are bounded", off=count_only)
def test_records_that_one_peer_stores_are_bounded_for_any_signer(clock: Time) -> None:
    resources = ResourceManager()
    resources.limit(Resource.RECORDS, per_peer=3)
    resources.limit(Resource.RECORD_BYTES, per_peer=10)
    store, mallory, bob = storage(clock), resources.peer("mallory", 0.0), resources.peer("bob", 0.0)
    with store.stored_by(mallory, "here"):
        assert all(store.store_subkey(1, bytes([signer]), b"abc", 1010.0) for signer in range(3))
        assert not store.store_subkey(1, b"another", b"a", 1010.0)
    with store.stored_by(bob, "there"):
        assert store.store_subkey(1, b"bob", b"0123456789", 1020.0)
        assert not store.store_subkey(1, b"more", b"a", 1020.0)
    assert store.store_subkey(1, b"our own", bytes(100), 1020.0)
    clock.now = 1010.0
    assert store.get(1) is not None
    assert (mallory.used[Resource.RECORDS], mallory.used[Resource.RECORD_BYTES]) == (0, 0)
    assert (bob.used[Resource.RECORDS], bob.used[Resource.RECORD_BYTES]) == (1, 10)


def from_origin(
    store: Any, origin: str, signers: range, *, size: int, key: int = 1, expires_at: float = 1010.0
) -> int:
    """The number of kept records of these signers."""
    scope = ResourceManager().peer(origin, 0.0)
    with store.stored_by(scope, origin):
        return sum(
            store.store_subkey(key, b"%s %d" % (origin.encode(), signer), bytes(size), expires_at)
            for signer in signers
        )


def by_origin(store: Any, key: int = 1) -> dict[str, int]:
    return Counter(signer.decode().partition(" ")[0] for signer in held(store, key))


def one_origin(patch: Patch) -> None:
    """Count all records as records of one subnet."""
    stored_by = BoundedStorage.stored_by
    patch.setattr(BoundedStorage, "stored_by", lambda self, scope, _: stored_by(self, scope, "everywhere"))


@defence("one subnet does not fill a key", off=one_origin)
def test_a_key_that_one_subnet_has_filled_has_room_for_others(clock: Time) -> None:
    store = storage(clock, key_bytes=1000)
    assert from_origin(store, "mallory", range(200), size=10, expires_at=9000.0) == 100
    assert from_origin(store, "alice", range(5), size=50) == 5
    assert by_origin(store) == {"mallory": 75, "alice": 5}
    assert from_origin(store, "mallory", range(200, 300), size=10, expires_at=9000.0) == 0
    assert from_origin(store, "bob", range(60), size=10) == 37
    assert by_origin(store) == {"mallory": 38, "alice": 5, "bob": 37}
    assert store.key_bytes(1) == 1000


def test_a_record_is_replaced_also_where_its_key_is_full(clock: Time) -> None:
    store = storage(clock, key_bytes=100)
    from_origin(store, "mallory", range(10), size=10)
    clock.now = 1001.0
    assert from_origin(store, "mallory", range(10), size=10, expires_at=1011.0) == 10


@defence("one subnet does not fill the storage of a node", off=one_origin)
def test_long_lived_records_do_not_drive_out_those_of_other_subnets(clock: Time) -> None:
    store = storage(clock, total_bytes=1000)
    assert from_origin(store, "alice", range(5), size=20, key=1) == 5
    for key in range(2, 30):
        from_origin(store, "mallory", range(10), size=10, key=key, expires_at=9000.0)
    assert by_origin(store) == {"alice": 5}
    assert store.total_bytes <= 1000


def test_a_storage_that_shows_some_keys_finds_only_those(clock: Time) -> None:
    store = storage(clock)
    for key in (1, 2):
        store.store_subkey(key, b"alice", b"x", 1010.0)
    with store.showing({2}):
        assert (held(store, 1), held(store, 2)) == ({}, {b"alice": b"x"})
    assert held(store, 1) == {b"alice": b"x"}


def test_replacing_records_does_not_grow_the_queues(clock: Time) -> None:
    store = storage(clock)
    for number in range(1000):
        from_origin(store, "alice", range(1), size=10, expires_at=1010.0 + number)
    assert len(store._expiries) < 100
    assert len(store._expiries_of["alice"]) < 100


def draw_alike(patch: Patch) -> None:
    stored_by = BoundedStorage.stored_by
    patch.setattr(BoundedStorage, "stored_by", lambda self, scope, _: stored_by(self, scope, "everywhere"))


@defence("a subnet that stores many records does not keep those of others out of samples", off=draw_alike)
def test_a_subnet_with_many_records_keeps_no_others_out_of_samples(clock: Time) -> None:
    store = storage(clock)
    resources = ResourceManager()
    for number in range(300):
        scope = resources.peer(PeerId(f"mallory-{number % 3}"), 0.0)
        with store.stored_by(scope, "203.0.113.0/24"):
            assert store.store_subkey(1, b"%d" % number, b"invented", 1010.0)
    for number in range(3):
        with store.stored_by(resources.peer(PeerId("alice"), 0.0), f"198.51.{number}.0/24"):
            assert store.store_subkey(1, b"alice-%d" % number, b"true", 1010.0)
    for seed in range(20):
        assert store.draw(1, 16, random.Random(seed)).count(b"true") == 3


def test_records_are_drawn_at_random_from_hosts_of_the_wanted_blocks(clock: Time) -> None:
    store = BoundedStorage(StorageLimits(), clock, lambda value: (value[0], value[0] + 2))
    for number in range(40):
        assert store.store_subkey(1, b"%d" % number, bytes([number]), 1010.0)  # type: ignore[arg-type]
    drawn = [set(store.draw(1, 10, random.Random(seed))) for seed in range(20)]  # type: ignore[arg-type]
    assert {len(each) for each in drawn} == {10}
    assert len(set.union(*drawn)) == 40
    chosen = store.draw(1, 10, random.Random(0), (5, 7))  # type: ignore[arg-type]
    assert sorted(chosen) == [bytes([number]) for number in (4, 5, 6)]
    assert store.draw(2, 10, random.Random(0)) == []  # type: ignore[arg-type]
    clock.now = 1010.0
    assert store.draw(1, 10, random.Random(0)) == []  # type: ignore[arg-type]
