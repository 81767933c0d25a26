"""Defences of files and signed statements: signatures, hashes, and one process per identity."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmnet.swarm_file import entry
from swarmnet.swarm_file.content import Authority, SwarmFile
from swarmnet_client.tuning import adapter_dir
from swarmnet_client.tuning import checkpoint as tune_checkpoint
from swarmnet_node.owner import local_channel
from swarmnet_node.training import checkpoint as training_checkpoint
from swarmnet_node.training import data
from swarmnet_protocols.directory import duplicate_identity, records
from swarmnet_protocols.directory.duplicate_identity import Duplicate
from swarmnet_protocols.membership import invites, signed
from swarmnet_protocols.models import resolver
from swarmnet_protocols.models.local_model import LocalModel
from swarmnet_protocols.training import jobs
from tests.defences import Defence, nothing, replacing, yes
from tests.properties import test_membership as mutations
from tests.properties import test_records as record_mutations
from tests.unit.directory import test_duplicate_identity
from tests.unit.hosting import test_control
from tests.unit.machine import test_flipped_bits
from tests.unit.membership import test_swarm_file, test_swarm_keys
from tests.unit.net import test_identity_lock


def refused_bits(name: str) -> Callable[[Path], object]:
    return lambda folder: test_flipped_bits.test_a_file_with_a_flipped_bit_is_refused(name, folder)


def refuses_wrong_tokens(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_channel, "HAS_UNIX_SOCKETS", False)
        test_control.refuses_a_wrong_token(folder)


FILES = (
    Defence(
        "a node answers at a port of its machine only to those who have its token",
        replacing(local_channel.hmac, "compare_digest", yes),
        refuses_wrong_tokens,
    ),
    Defence(
        "a swarm file is signed",
        replacing(SwarmFile, "is_signed_by_authority", yes),
        lambda folder: test_swarm_file.test_a_changed_private_file_is_refused(folder, "bootstrap"),
    ),
    Defence(
        "a swarm file is signed by its own authority",
        replacing(SwarmFile, "is_signed_by_authority", yes),
        test_swarm_file.test_another_key_cannot_sign_for_the_swarm,
    ),
    Defence(
        "new keys of a swarm file are signed by its old ones",
        replacing(Authority, "has_signed_rotations", yes),
        test_swarm_keys.test_a_rotation_that_no_earlier_key_signed_is_refused,
    ),
    Defence(
        "a swarm file older than a known one is refused",
        replacing(entry, "check_update", nothing),
        test_swarm_keys.test_an_older_file_is_refused_once_a_newer_one_was_used,
    ),
    Defence(
        "another swarm file of the same serial is refused",
        replacing(entry, "check_update", nothing),
        test_swarm_keys.test_another_file_with_the_same_serial_is_refused,
    ),
    Defence(
        "a swarm file continues the known keys",
        replacing(Authority, "continues", yes),
        test_swarm_keys.test_keys_that_do_not_follow_from_the_known_ones_are_refused,
    ),
    Defence(
        "one process uses an identity",
        replacing(fcntl, "flock", nothing),
        lambda folder: test_identity_lock.test_a_dialled_peer_shares_its_identity_with_no_other(
            test_identity_lock.made_in(folder), "alone", second=True
        ),
    ),
)
IDENTITY = (
    Defence(
        "a duplicate identity is detected only by proof that it is alive",
        replacing(Duplicate, "look", nothing),
        lambda _: (
            test_duplicate_identity.test_one_announcement_of_a_process_that_may_have_ended_is_no_evidence()
        ),
    ),
    Defence(
        "a duplicate identity proves that it has the key",
        replacing(duplicate_identity, "peer_id_of", lambda _: test_duplicate_identity.ALICE.peer_id),
        lambda _: test_duplicate_identity.test_a_peer_with_another_key_proves_no_duplicate(),
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
        lambda _: record_mutations.test_no_mutation_is_accepted(),
    ),
)
HASHES = (
    Defence(
        "a model's files are hashed before they are read",
        replacing(LocalModel, "_check", nothing),
        refused_bits("the weights of a model"),
    ),
    Defence(
        "a gguf file is hashed before it is read",
        replacing(LocalModel, "_check", nothing),
        refused_bits("a gguf file"),
    ),
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
        "cached tokens are hashed",
        replacing(data, "_digest", lambda _: "0"),
        lambda folder: test_flipped_bits.test_derived_files_are_made_again("tokens", folder),
    ),
    Defence(
        "cached manifests are hashed",
        replacing(resolver, "_digest", lambda *_: "0"),
        lambda folder: test_flipped_bits.test_derived_files_are_made_again("a manifest", folder),
    ),
)
