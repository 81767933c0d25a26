"""Defences against records of what does not exist: hosts and relays that do not answer, and signers
that are no members."""

from collections.abc import Callable
from pathlib import Path

from swarmnet_node.host_checks import HostChecker, Trial
from swarmnet_node.node import Node
from swarmnet_protocols.directory import relay_announcements
from swarmnet_protocols.directory.dht.storage import BoundedStorage
from swarmnet_protocols.directory.signers import Signers
from swarmnet_protocols.net import Stream
from swarmnet_protocols.routing import sightings
from swarmnet_protocols.routing.sightings import ModelClaims, Sighting, Sightings
from swarmnet_protocols.routing.throughput import Claim
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.sim import test_invented_hosts, test_resilience
from tests.support.swarm_lab import Reference, load_reference
from tests.unit.directory import test_dht_storage, test_relay_announcements, test_signers
from tests.unit.hosting import test_host_checks
from tests.unit.routing import test_sightings


def with_model(test: Callable[[Reference], None]) -> Callable[[Path], None]:
    return lambda folder: test(load_reference(folder / "model", folder / "cache"))


def with_two_models(test: Callable[[Reference, Reference], None]) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        other = load_reference(folder / "beta" / "model", folder / "beta" / "cache", blocks=4)
        test(load_reference(folder / "model", folder / "cache"), other)

    return run


def believe_all(patch: Patch) -> None:
    """Count every announced host."""

    def counted(_: Sightings, model: ModelClaims, *, now: float) -> list[Claim]:
        return list(model.claims)

    patch.setattr(Sightings, "counted", counted)


def ask_no_host(patch: Patch) -> None:
    """Leave blocks to hosts that answer, and count every announced host."""
    believe_all(patch)

    async def computing(_: HostChecker, claims: dict[Claim, object], *__: object) -> list[Claim]:
        return list(claims)

    patch.setattr(HostChecker, "computing", computing)


def leave_pings_unanswered(patch: Patch) -> None:
    """Answer no ping before the blocks are loaded."""

    async def close(_: Node, stream: Stream) -> None:
        stream.close()

    patch.setattr(Node, "_answer_pings", close)


def count_identities(patch: Patch) -> None:
    patch.setattr(Sighting, "place", property(lambda _: "", lambda *_: None))


def in_any_order(patch: Patch) -> None:
    patch.setattr(sightings, "in_turn", lambda claims, _, rng: rng.sample(list(claims), len(claims)))


def draw_alike(patch: Patch) -> None:
    stored_by = BoundedStorage.stored_by
    patch.setattr(BoundedStorage, "stored_by", lambda self, scope, _: stored_by(self, scope, "everywhere"))


def of_a_storage(test: Callable[[test_dht_storage.Time], None]) -> Callable[[Path], None]:
    return lambda _: test(test_dht_storage.Time())


SIGHTINGS = (
    Defence(
        "blocks are not left to hosts that do not exist",
        ask_no_host,
        with_model(
            lambda reference: test_invented_hosts.test_hosts_leave_no_blocks_to_invented_hosts(
                reference, answers=False
            )
        ),
    ),
    Defence(
        "blocks are left only to hosts that compute them",
        replacing(Trial, "agrees", yes),
        with_model(
            lambda reference: test_invented_hosts.test_hosts_leave_no_blocks_to_invented_hosts(
                reference, answers=True
            )
        ),
    ),
    Defence(
        "a model is not left to hosts that do not exist",
        ask_no_host,
        with_two_models(test_invented_hosts.test_hosts_do_not_leave_their_model_to_invented_hosts),
    ),
    Defence(
        "blocks that no host has are filled, whatever is announced",
        believe_all,
        with_model(test_invented_hosts.test_blocks_that_only_invented_hosts_have_are_filled),
    ),
    Defence(
        "a joining host takes blocks that no host has, whatever is announced",
        believe_all,
        with_model(test_invented_hosts.test_a_joining_host_takes_the_blocks_that_only_invented_hosts_have),
    ),
    Defence(
        "a node that loads its blocks counts",
        leave_pings_unanswered,
        with_model(
            lambda reference: test_resilience.test_a_loading_node_counts_in_placement(reference, "n1")
        ),
    ),
    Defence(
        "hosts that were not called do not count among invented ones",
        replacing(sightings, "DOUBTS", 1 << 20),
        lambda _: test_sightings.test_many_identities_at_one_place_do_not_speak_for_others(),
    ),
    Defence(
        "the identities of one machine count once",
        count_identities,
        lambda _: test_host_checks.test_hosts_of_one_subnet_are_one_place(),
    ),
    Defence(
        "many hosts of one place attract and repel no more hosts than one",
        replacing(test_sightings, "sharing", list),
        lambda _: test_sightings.test_hosts_of_one_place_have_the_speed_of_one_host(),
    ),
    Defence(
        "announcements cost a bounded number of calls",
        replacing(Sightings.to_call, "__kwdefaults__", {"most": 1 << 20, "extra": 1}),
        lambda _: test_sightings.test_the_number_of_calls_is_bounded_however_many_hosts_are_announced(2_000),
    ),
    Defence(
        "hosts announced in one subnet do not hide one of another subnet",
        in_any_order,
        lambda _: (
            test_sightings.test_a_live_host_is_called_at_once_among_hundreds_that_are_announced_in_one_subnet(
                0
            )
        ),
    ),
    Defence(
        "a peer remembers a bounded number of hosts",
        replacing(sightings, "MAX_KNOWN", 1 << 20),
        lambda _: test_sightings.test_a_bounded_number_of_hosts_is_remembered(),
    ),
    Defence(
        "a host that computes something else does not count",
        replacing(Sightings, "refuted", nothing),
        lambda _: test_sightings.test_a_host_that_computed_wrong_outputs_does_not_count_even_if_it_answers(),
    ),
    Defence(
        "a subnet that stores many records does not keep those of others out of samples",
        draw_alike,
        of_a_storage(test_dht_storage.test_a_subnet_with_many_records_keeps_those_of_others_out_of_no_sample),
    ),
    Defence(
        "relays of one subnet are counted, and drawn, as one",
        replacing(relay_announcements, "subnet_of", str),
        lambda _: test_relay_announcements.test_relays_are_drawn_from_different_subnets(),
    ),
    Defence(
        "a relay is silent only where others answer",
        replacing(relay_announcements, "CHECKED", 0),
        lambda _: test_relay_announcements.test_a_relay_is_silent_only_where_enough_others_answer(
            relay_announcements.ENOUGH, answer=False, announces=True
        ),
    ),
    Defence(
        "relays that have held a reservation come first",
        replacing(relay_announcements, "MAX_ANSWERED", 0),
        lambda _: (
            test_relay_announcements.test_relays_that_have_held_a_reservation_come_before_announced_ones()
        ),
    ),
    Defence(
        "records of a private swarm are of members",
        replacing(Signers, "check", nothing),
        lambda _: test_signers.test_a_record_without_a_valid_certificate_of_its_signer_is_not_read(b""),
    ),
)
