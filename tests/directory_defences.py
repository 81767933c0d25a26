"""Defences of the directory: limits of a key and of a record, and stores that a full peer refuses."""

from collections.abc import Callable
from pathlib import Path

from swarmnet_protocols.directory import records
from swarmnet_protocols.directory.dht_storage import BoundedStorage
from tests.defences import Defence, Patch, nothing, replacing
from tests.unit import test_dht_replication, test_dht_rpc, test_dht_storage


def one_origin(patch: Patch) -> None:
    """Count all records as records of one subnet."""
    stored_by = BoundedStorage.stored_by
    patch.setattr(BoundedStorage, "stored_by", lambda self, scope, _: stored_by(self, scope, "everywhere"))


def of_a_storage(test: Callable[[test_dht_storage.Time], None]) -> Callable[[Path], None]:
    return lambda _: test(test_dht_storage.Time())


def check_nothing(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory import dht_rpc

    patch.setattr(dht_rpc, "_check_found", nothing)


def count_all_as_stored(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht_replication import Replicator

    call = Replicator._call

    async def kept(self: Replicator, peer: object, keys: list[object], *rest: object) -> list[bool]:
        await call(self, peer, keys, *rest)  # type: ignore[arg-type]
        return [True] * len(keys)

    patch.setattr(Replicator, "_call", kept)


DIRECTORY = (
    Defence(
        "one subnet does not fill a key",
        one_origin,
        of_a_storage(test_dht_storage.test_a_key_that_one_subnet_has_filled_has_room_for_others),
    ),
    Defence(
        "one subnet does not fill the storage of a node",
        one_origin,
        of_a_storage(test_dht_storage.test_records_that_live_long_do_not_drive_out_those_of_other_subnets),
    ),
    Defence(
        "a signed record is small",
        replacing(records, "_STATEMENTS", ("none",)),
        lambda _: a_small_record_of("hosts/00"),
    ),
    Defence(
        "answers with too much to check are refused",
        check_nothing,
        lambda _: test_dht_rpc.test_an_answer_that_would_keep_us_busy_is_refused([21]),
    ),
    Defence(
        "another peer stores what a full one refused",
        count_all_as_stored,
        lambda _: test_dht_replication.test_a_full_peer_is_replaced_by_the_next_nearest(),
    ),
)


def a_small_record_of(topic: str) -> None:
    import pytest

    from tests.unit import test_records

    with pytest.MonkeyPatch.context() as patch:
        test_records.test_records_published_together_are_smaller(topic, patch)
