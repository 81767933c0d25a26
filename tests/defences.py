"""The defences, how each is switched off, and the test that then fails. ``test_defences.py`` shows that it does."""

import contextlib
import fcntl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarmnet import swarm_folder
from swarmnet.swarm_content import Authority, SwarmFile
from swarmnet_client import patience
from swarmnet_client.tuning import adapter_dir
from swarmnet_client.tuning import checkpoint as tune_checkpoint
from swarmnet_node.training import checkpoint as training_checkpoint
from swarmnet_node.training import data
from swarmnet_protocols import records
from swarmnet_protocols.membership import certificates, door, invites, membership, rules, signed
from swarmnet_protocols.membership.door import Door
from swarmnet_protocols.membership.issuer import Issuer, Ledger
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.roles import ANY_ROLE
from swarmnet_protocols.membership.rules import Member, Rules
from swarmnet_protocols.models import sources
from swarmnet_protocols.models.local import LocalModel
from swarmnet_protocols.protocol_ids import LINK, SESSION
from swarmnet_protocols.resources import Scope, Stock
from swarmnet_protocols.session import steps
from swarmnet_protocols.training import jobs
from swarmnet_protocols.transport import Message, framing
from swarmnet_protocols.transport.meter import Meter
from swarmnet_protocols.wire import session_pb2 as pb
from tests.properties import test_framing
from tests.properties import test_membership as mutations
from tests.properties import test_records as record_mutations
from tests.sim import test_door, test_door_leaving, test_door_limits, test_host_defences, test_pass_defences
from tests.support.swarm_lab import Reference, load_reference
from tests.unit import (
    test_dht_storage,
    test_flipped_bits,
    test_identity_lock,
    test_issuer,
    test_patience,
    test_resources,
    test_steps,
    test_swarm_file,
    test_swarm_keys,
)

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Defence:
    """``fails`` is the test, with whatever it is parametrised by; it may write into the folder it is given."""

    name: str
    switch_off: Callable[[Patch], None]
    fails: Callable[[Path], object]


def nothing(*_: Any, **__: Any) -> None:
    pass


def yes(*_: Any, **__: Any) -> bool:
    return True


def replacing(where: object, name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(where, name, value)


def ignore_the_calendar(patch: Patch) -> None:
    for module in (certificates, rules):
        patch.setattr(module, "check_current", nothing)


def admit_anybody(patch: Patch) -> None:
    patch.setattr(membership, "admit", lambda _, certificate, peer, *__: Member(peer, ANY_ROLE))


def admit_without_looking(patch: Patch) -> None:
    patch.setattr(
        membership,
        "admit",
        lambda _, certificate, peer, *__: Member(peer, certificate.roles, certificate.not_after),
    )


def check_no_stream(patch: Patch) -> None:
    @contextlib.asynccontextmanager
    async def admitting(*_: Any) -> AsyncIterator[None]:
        yield

    patch.setattr(Door, "admitting", admitting)


def review_nobody(patch: Patch) -> None:
    patch.setattr(Door, "_review", nothing)


def never_look_at_the_clock(patch: Patch) -> None:
    async def keep_quiet(_: Door) -> None:
        """Say nothing that would make the other side look again."""

    patch.setattr(Door, "_arm", nothing)
    patch.setattr(Door, "_keep_comparing", keep_quiet)


def never_count(patch: Patch) -> None:
    admit = Ledger.admit
    patch.setattr(Ledger, "admit", lambda ledger, issued, **_: admit(ledger, issued, uses=None))


def wait_for_ever(patch: Patch) -> None:
    """For the first word on a stream, and for what is said at the door."""
    of_theirs, hear = Meter.of_theirs, door.hear

    def patient(*arguments: Any) -> Meter:
        meter = of_theirs(*arguments)
        meter._opening_until = None
        return meter

    patch.setattr(Meter, "of_theirs", patient)
    patch.setattr(door, "hear", lambda stream, _: hear(stream, None))


def count_only(patch: Patch) -> None:
    """Everybody gets whatever they want; it is noted."""

    def change(scope: Scope, stock: Stock, amount: int) -> None:
        for each in scope._path:
            each.used[stock] += amount

    patch.setattr(Scope, "change", change)


def of_all_peers(_: Path) -> None:
    test_resources.test_what_one_scope_refuses_is_held_in_none_and_says_where_and_for_how_long("all peers")


def of_a_host(test: Callable[[Reference], object]) -> Callable[[Path], object]:
    return lambda folder: test(load_reference(folder / "model", folder / "cache"))


def intruder(name: str) -> Callable[[Path], object]:
    return lambda _: test_door.test_an_intruder_is_refused_under_every_protocol(name, SESSION)


def refused_bits(name: str) -> Callable[[Path], object]:
    return lambda folder: test_flipped_bits.test_a_file_with_a_flipped_bit_is_refused(name, folder)


def of_an_issuer(test: Callable[[Issuer], object]) -> Callable[[Path], object]:
    def fails(folder: Path) -> None:
        with Ledger.open(folder) as ledger:
            test(Issuer(test_issuer.AUTHORITY, test_issuer.RULES, ledger, now=test_issuer.NOW))

    return fails


def shown_twice(issuer: Issuer) -> None:
    test_issuer.test_replays_cost_no_use_and_give_nobody_else_anything(issuer)


DOOR = (
    Defence("an outsider stays out", admit_anybody, intruder("outsider")),
    Defence("certificates end", ignore_the_calendar, intruder("expired")),
    Defence("certificates begin", ignore_the_calendar, intruder("not yet")),
    Defence("the revoked are out", replacing(Revocations, "why_out", nothing), intruder("revoked")),
    Defence("a certificate is of one swarm", ignore_the_calendar, intruder("certificate of another swarm")),
    Defence("a certificate is of one peer", admit_without_looking, intruder("certificate of another peer")),
    Defence("certificates are signed", replacing(signed, "verify", yes), intruder("changed certificate")),
    Defence(
        "a handshake cannot be replayed",
        admit_without_looking,
        lambda _: test_door.test_a_replayed_handshake_is_refused_under_every_protocol(SESSION),
    ),
    Defence(
        "every stream is checked",
        check_no_stream,
        lambda _: test_door.test_who_did_not_come_through_the_door_is_refused_under_every_protocol(SESSION),
    ),
    Defence(
        "openers have the role",
        replacing(door, "check_role", nothing),
        lambda _: test_door.test_the_wrong_role_is_refused_under_every_protocol(LINK),
    ),
    Defence(
        "servers have the role",
        replacing(door, "check_role", nothing),
        lambda _: test_door.test_a_member_who_may_not_serve_it_is_not_asked(LINK),
    ),
    Defence(
        "streams end with a revocation",
        review_nobody,
        lambda _: test_door_leaving.test_the_streams_of_a_revoked_member_end_at_once(),
    ),
    Defence(
        "streams end with the certificate",
        never_look_at_the_clock,
        lambda _: test_door_leaving.test_streams_end_with_the_certificate(),
    ),
    Defence(
        "removed signers revoke nobody",
        replacing(Revocations, "believed", lambda revocations, **_: revocations),
        lambda _: test_door_leaving.test_nobody_is_out_by_the_word_of_a_signer_who_was_removed(),
    ),
)
ISSUER = (
    Defence(
        "uses of an invite are counted",
        never_count,
        of_an_issuer(
            test_issuer.test_an_invite_lets_in_as_many_peers_as_it_says_and_each_as_often_as_it_asks
        ),
    ),
    Defence(
        "only who has the invite redeems it", replacing(invites, "verify", yes), of_an_issuer(shown_twice)
    ),
    Defence(
        "invites end",
        replacing(invites, "_check_expiry", nothing),
        lambda _: test_issuer.test_an_invite_that_ended_names_the_clock(),
    ),
    Defence(
        "only authorities and issuers invite",
        replacing(Rules, "believe", yes),
        of_an_issuer(test_issuer.test_invites_that_do_not_count),
    ),
    Defence(
        "the revoked get no certificate",
        replacing(Revocations, "why_out", nothing),
        of_an_issuer(test_issuer.test_who_is_revoked_gets_no_certificate),
    ),
)
FILES = (
    Defence(
        "a swarm file is signed",
        replacing(SwarmFile, "is_signed_by_authority", yes),
        lambda folder: test_swarm_file.test_a_changed_private_file_is_refused(folder, "bootstrap"),
    ),
    Defence(
        "by nobody else",
        replacing(SwarmFile, "is_signed_by_authority", yes),
        test_swarm_file.test_another_key_cannot_sign_for_the_swarm,
    ),
    Defence(
        "its new keys are signed by the old",
        replacing(Authority, "is_continuous", yes),
        test_swarm_keys.test_a_key_that_no_key_before_it_named_is_nobody,
    ),
    Defence(
        "an older file is refused",
        replacing(swarm_folder, "check_follows", nothing),
        test_swarm_keys.test_an_older_file_is_refused_once_a_newer_one_was_used,
    ),
    Defence(
        "another file of the same serial is refused",
        replacing(swarm_folder, "check_follows", nothing),
        test_swarm_keys.test_another_file_with_the_same_serial_is_refused,
    ),
    Defence(
        "known keys are not forgotten",
        replacing(Authority, "continues", yes),
        test_swarm_keys.test_keys_that_do_not_follow_from_the_known_ones_are_refused,
    ),
    Defence(
        "an identity is on the network once",
        replacing(fcntl, "flock", nothing),
        lambda folder: test_identity_lock.test_who_is_dialled_has_an_identity_alone(
            test_identity_lock.made_in(folder), "alone", second=True
        ),
    ),
)
STATEMENTS = (
    Defence(
        "no mutated certificate counts",
        replacing(signed, "verify", yes),
        lambda _: mutations.test_no_mutation_is_accepted("certificate"),
    ),
    Defence(
        "no mutated revocations count",
        replacing(signed, "verify", yes),
        lambda _: mutations.test_no_mutation_is_accepted("revocations"),
    ),
    Defence(
        "no mutated proof redeems an invite",
        replacing(invites, "verify", yes),
        lambda _: mutations.test_no_mutated_proof_redeems_an_invite(),
    ),
    Defence(
        "no mutated record counts",
        replacing(records, "verify", yes),
        lambda _: record_mutations.test_no_flipped_bit_is_accepted(),
    ),
)
HASHES = (
    Defence(
        "a model's files are hashed before they are read",
        replacing(LocalModel, "_check", nothing),
        refused_bits("the weights of a model"),
    ),
    Defence("a gguf file too", replacing(LocalModel, "_check", nothing), refused_bits("a gguf file")),
    Defence(
        "the progress of a checkpoint is hashed",
        replacing(training_checkpoint, "_hash_of", lambda _: "0"),
        refused_bits("the progress of a training checkpoint"),
    ),
    Defence(
        "every other file of a checkpoint is hashed",
        replacing(training_checkpoint, "sha256_of", lambda *_: bytes(32)),
        refused_bits("the optimizer of a training checkpoint"),
    ),
    Defence(
        "the checkpoint of tune is hashed",
        replacing(tune_checkpoint, "_hash_of", lambda *_: "0"),
        refused_bits("the checkpoint of tune"),
    ),
    Defence(
        "adapters of tune are hashed",
        replacing(adapter_dir, "_check_hashes", nothing),
        refused_bits("the weights of an adapter"),
    ),
    Defence("jobs are signed", replacing(jobs, "verify", yes), refused_bits("a job")),
    Defence(
        "kept tokens are hashed",
        replacing(data, "_digest", lambda _: "0"),
        lambda folder: test_flipped_bits.test_what_we_made_ourselves_is_made_anew("tokens", folder),
    ),
    Defence(
        "kept manifests are hashed",
        replacing(sources, "_digest", lambda *_: "0"),
        lambda folder: test_flipped_bits.test_what_we_made_ourselves_is_made_anew("a manifest", folder),
    ),
)
LIMITS = (
    Defence(
        "the silent are gone in time",
        wait_for_ever,
        lambda _: test_door_limits.test_who_says_nothing_at_the_door_is_gone_in_time(),
    ),
    Defence(
        "messages have a largest size",
        replacing(framing, "check_sizes", nothing),
        lambda _: test_framing.test_oversized_messages_are_not_encoded(Message(bytes(51))),
    ),
    Defence(
        "positions of a step are bounded",
        replacing(steps, "MAX_POSITION", 1 << 40),
        lambda _: test_steps.test_numbers_from_the_wire_are_bounded({"start": test_steps.MAX_POSITION}),
    ),
    Defence(
        "rows of a step are bounded",
        replacing(steps, "MAX_ROWS", 1 << 40),
        lambda _: test_steps.test_the_number_of_rows_is_bounded(test_steps.MAX_ROWS + 1),
    ),
    Defence("every scope has its limit", count_only, of_all_peers),
    Defence(
        "a client has its share of sessions",
        count_only,
        of_a_host(test_host_defences.test_no_client_has_more_sessions_than_its_share),
    ),
    Defence(
        "a client has its share of passes",
        count_only,
        of_a_host(test_pass_defences.test_no_client_has_more_passes_at_once_than_its_share),
    ),
    Defence(
        "caches have a budget",
        count_only,
        of_a_host(test_host_defences.test_a_cache_over_its_budget_is_refused_before_it_is_allocated),
    ),
    Defence(
        "logs have a budget",
        count_only,
        of_a_host(test_host_defences.test_who_never_acknowledges_fills_no_more_than_the_log_may_take),
    ),
    Defence(
        "positions come at a rate",
        replacing(Scope, "use", lambda *_: 0.0),
        of_a_host(test_host_defences.test_positions_come_at_the_rate_of_the_client),
    ),
    Defence(
        "records of one peer are bounded",
        count_only,
        lambda _: (
            test_dht_storage.test_what_one_peer_stores_is_bounded_whoever_signed_it_and_counts_until_it_is_gone(
                test_dht_storage.Time()
            )
        ),
    ),
    Defence(
        "one host that blames its client is not believed",
        replacing(patience, "BELIEVED", 1),
        lambda _: test_patience.test_one_host_is_not_believed_while_there_is_another(pb.REASON_PROTOCOL),
    ),
)
DEFENCES = (*DOOR, *ISSUER, *FILES, *STATEMENTS, *HASHES, *LIMITS)
