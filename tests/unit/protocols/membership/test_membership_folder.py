"""The stored membership of a peer, and its behaviour when the disk fails."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet_protocols.errors import NotAuthorised, OutOfResources
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.revocations import RevokedIds, sign_list
from swarmnet_protocols.membership.rules import MAX_KEYS, Rules
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire.roles import Role
from tests.defences import Patch, defence
from tests.support.network.private_swarm import AUTHORITY, EPOCH, PrivateSwarm, identity_of

SWARM = PrivateSwarm()
ALICE, MALLORY = identity_of("alice").peer_id, identity_of("mallory").peer_id


def member(folder: Path, rules: Rules = SWARM.rules) -> Membership:
    return Membership(rules, ALICE, lambda: EPOCH, folder=folder)


def test_certificate_and_revocations_outlive_the_process(tmp_path: Path) -> None:
    before = member(tmp_path)
    before.replace_certificate(SWARM.certificate("alice", Role.CLIENT))
    before.add_revocations([SWARM.revocation(MALLORY)])
    after = member(tmp_path)
    after.check()
    with pytest.raises(NotAuthorised, match="revoked"):
        after.admit(MALLORY, None)


def confirm_nothing(patch: Patch) -> None:
    doubted = property(lambda self: frozenset(self._revocations.serials), lambda *_: None)
    patch.setattr(Membership, "_doubted", doubted, raising=False)


@defence("a revocation that a peer shows again counts", off=confirm_nothing)
def test_a_peer_that_was_revoked_once_asks_whether_it_still_is(tmp_path: Path) -> None:
    before = member(tmp_path)
    before.replace_certificate(SWARM.certificate("alice", Role.CLIENT))
    revocation = SWARM.revocation(ALICE)
    before.add_revocations([revocation])
    with pytest.raises(NotAuthorised, match="revoked"):
        before.check()
    after = member(tmp_path)
    after.check()  # the list in the folder may be outdated
    told = list[str]()
    after.listeners.append(lambda: told.append("changed"))
    after.add_revocations([revocation])
    assert told
    with pytest.raises(NotAuthorised, match="revoked"):
        after.check()


def test_a_revocation_counts_though_it_cannot_be_kept(tmp_path: Path) -> None:
    membership, told = member(tmp_path), list[str]()
    (tmp_path / "revocations").write_text("in the way")
    membership.listeners.append(lambda: told.append("changed"))
    membership.add_revocations([SWARM.revocation(MALLORY)])
    assert told
    with pytest.raises(NotAuthorised, match="revoked"):
        membership.admit(MALLORY, None)


def test_a_certificate_counts_though_it_cannot_be_kept(tmp_path: Path) -> None:
    membership = member(tmp_path)
    (tmp_path / "certificate").mkdir()
    with pytest.raises(OutOfResources, match="cannot write the certificate"):
        membership.replace_certificate(SWARM.certificate("alice", Role.CLIENT))
    membership.check()


def test_revocations_of_former_keys_do_not_displace_valid_ones(tmp_path: Path) -> None:
    made = sorted(
        (Identity.from_seed(bytes([number])) for number in range(255)), key=lambda key: key.public_key
    )
    for key in made[: MAX_KEYS + 1]:
        rules = replace(SWARM.rules, keys={key.public_key: math.inf})
        named = RevokedIds(peers=frozenset({ALICE}))
        member(tmp_path, rules).add_revocations([sign_list(named, serial=1, swarm=rules.swarm, key=key)])
    member(tmp_path).add_revocations([SWARM.revocation(MALLORY)])
    assert made[MAX_KEYS].public_key < AUTHORITY.public_key
    assert list(member(tmp_path).revocations.serials) == list(SWARM.rules.keys)
