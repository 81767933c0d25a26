"""Defences of the directory: limits of a key and of a record, and stores that a full peer refuses."""

import logging
from collections.abc import Callable
from pathlib import Path

from swarmnet_protocols.directory import host_announcements, records
from swarmnet_protocols.directory.dht.storage import BoundedStorage
from tests.defences import Defence, Patch, nothing, replacing
from tests.unit.directory import (
    test_dht_replication,
    test_dht_rpc,
    test_dht_sampling,
    test_dht_storage,
    test_host_announcements,
    test_host_sample,
)


def one_origin(patch: Patch) -> None:
    """Count all records as records of one subnet."""
    stored_by = BoundedStorage.stored_by
    patch.setattr(BoundedStorage, "stored_by", lambda self, scope, _: stored_by(self, scope, "everywhere"))


def of_a_storage(test: Callable[[test_dht_storage.Time], None]) -> Callable[[Path], None]:
    return lambda _: test(test_dht_storage.Time())


def check_nothing(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import rpc as dht_rpc

    patch.setattr(dht_rpc, "_check_found", nothing)


def call_no_lost_peer(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import node as dht_node

    patch.setattr(dht_node, "_LOST_AT_ONCE", 0)


def parts_meet_again(directory: Path) -> None:
    import pytest

    from tests.conformance import test_dht

    with pytest.MonkeyPatch.context() as patch, test_dht.running_five(directory, test_dht.OPEN) as five:
        test_dht.test_two_halves_that_forgot_each_other_become_one_when_the_network_heals(five, patch)


def count_all_as_stored(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht.replication import Replicator

    call = Replicator._call

    async def kept(self: Replicator, peer: object, keys: list[object], *rest: object) -> list[bool]:
        await call(self, peer, keys, *rest)  # type: ignore[arg-type]
        return [True] * len(keys)

    patch.setattr(Replicator, "_call", kept)


def sample_all_keys(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import sampling as dht_sampling

    patch.setattr(
        dht_sampling.random.SystemRandom,
        "sample",
        lambda _, found, count: list(found)[:count],
    )


def sample_without(limit: str) -> Callable[[Patch], None]:
    def switch_off(patch: Patch) -> None:
        from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

        prepare_hivemind()
        from swarmnet_protocols.directory.dht import node as dht_node

        patch.setattr(dht_node, limit, 1 << 30)

    return switch_off


def check_no_sample(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht import sampling as dht_sampling

    patch.setattr(
        dht_sampling,
        "_checked",
        lambda reply, *_: [record for sample in reply.samples for record in sample.records],
    )


def count_no_refusals(patch: Patch) -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    from swarmnet_protocols.directory.dht.replication import Replicator

    patch.setattr(Replicator, "_log_shortage", nothing)


def a_test_with_logs(test: Callable[[object], None]) -> Callable[[Path], None]:
    def fails(_: Path) -> None:
        class Logs(logging.Handler):
            def __init__(self) -> None:
                super().__init__()
                self.records: list[logging.LogRecord] = []

            def emit(self, record: logging.LogRecord) -> None:
                record.message = record.getMessage()
                self.records.append(record)

        logs = Logs()
        logging.getLogger().addHandler(logs)
        try:
            test(logs)
        finally:
            logging.getLogger().removeHandler(logs)

    return fails


def any_topic(patch: Patch) -> None:
    patch.setattr(host_announcements, "hosts_topic", lambda *_: ANY)


class _Any(str):
    __slots__ = ()

    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = str.__hash__


ANY = _Any()

DIRECTORY = (
    Defence(
        "a host announces itself in one shard only",
        any_topic,
        lambda _: test_host_announcements.test_an_announcement_under_the_topic_of_another_shard_is_left_out(),
    ),
    Defence(
        "no peer hides a record from many reads: the key is drawn at random",
        sample_all_keys,
        lambda _: test_dht_sampling.test_the_replica_and_the_key_are_drawn_at_random(),
    ),
    Defence(
        "a sample has no more records than were asked for",
        check_no_sample,
        lambda _: test_dht_sampling.test_an_answer_with_more_than_was_asked_for_is_dropped(),
    ),
    Defence(
        "a peer sends a bounded number of records",
        sample_without("MAX_SAMPLE"),
        lambda _: test_dht_sampling.test_a_peer_sends_a_bounded_number_of_records(),
    ),
    Defence(
        "a peer sends records of a bounded size",
        sample_without("MAX_SAMPLE_BYTES"),
        lambda _: test_dht_sampling.test_a_peer_sends_records_of_a_bounded_size(),
    ),
    Defence(
        "a peer learns that its records are refused",
        count_no_refusals,
        a_test_with_logs(
            test_dht_replication.test_a_publisher_whose_records_few_peers_store_counts_the_refusals_and_tries_again  # type: ignore[arg-type]
        ),
    ),
    Defence(
        "a reader knows a bounded number of hosts",
        replacing(host_announcements, "MAX_KNOWN", 1 << 20),
        lambda _: test_host_sample.test_a_bounded_number_of_hosts_is_known(),
    ),
    Defence(
        "a refresh reads a bounded number of announcements",
        replacing(host_announcements.HostSample.__init__, "__kwdefaults__", {"wanted": 1 << 20}),
        lambda _: (
            test_host_sample.test_a_refresh_in_a_large_swarm_reads_few_topics_and_a_bounded_number_of_records()
        ),
    ),
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
    Defence("the parts of a split network find each other again", call_no_lost_peer, parts_meet_again),
)


def a_small_record_of(topic: str) -> None:
    import pytest

    from tests.unit.directory import test_records

    with pytest.MonkeyPatch.context() as patch:
        test_records.test_records_published_together_are_smaller(topic, patch)
