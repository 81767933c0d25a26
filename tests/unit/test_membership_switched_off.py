"""With one defence of an issuer or of a swarm file switched off, the attack that it stops gets through.

So the tests of ``test_issuer.py`` and ``test_swarm_keys.py`` are not vacuous.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnet import swarm_file, swarm_writer
from swarmnet.swarm_content import Authority, SwarmFile
from swarmnet.swarm_folder import remember
from swarmnet.swarm_writer import NewSwarm
from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.identity import Identity
from swarmnet_protocols.membership import invites
from swarmnet_protocols.membership.invites import redemption
from swarmnet_protocols.membership.issuer import Issuer, Ledger
from swarmnet_protocols.membership.revocations import Named, Revocations
from swarmnet_protocols.membership.rules import Rules

from .test_issuer import ALICE, AUTHORITY, BOB, HOUR_S, NOBODY_OUT, NOW, RULES, TERMS, invite, revoked

Patch = pytest.MonkeyPatch
Attack = Callable[[Issuer], object]


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    with Ledger.open(tmp_path) as ledger:
        yield Issuer(AUTHORITY, RULES, ledger, now=NOW)


def yes(*_: Any, **__: Any) -> bool:
    return True


def nothing(*_: Any, **__: Any) -> None:
    pass


def never_count(patch: Patch) -> None:
    count = Ledger.admit
    patch.setattr(Ledger, "admit", lambda ledger, issued, **_: count(ledger, issued, uses=None))


def use_twice(issuer: Issuer) -> object:
    shown = invite(replace(TERMS, uses=1))
    issuer.redeem(redemption(shown, ALICE), ALICE, NOBODY_OUT, NOW)
    return issuer.redeem(redemption(shown, BOB), BOB, NOBODY_OUT, NOW)


def replay(issuer: Issuer) -> object:
    return issuer.redeem(redemption(invite(), ALICE), BOB, NOBODY_OUT, NOW)


def come_late(issuer: Issuer) -> object:
    return issuer.redeem(redemption(invite(), ALICE), ALICE, NOBODY_OUT, NOW + HOUR_S)


def invite_oneself(issuer: Issuer) -> object:
    shown = invite(key=Identity.from_seed(b"stranger"))
    return issuer.redeem(redemption(shown, ALICE), ALICE, NOBODY_OUT, NOW)


def come_back(issuer: Issuer) -> object:
    return issuer.redeem(redemption(invite(), ALICE), ALICE, revoked(Named(frozenset({ALICE}))), NOW)


ISSUER: dict[str, tuple[Attack, Callable[[Patch], None]]] = {
    "uses are counted": (use_twice, never_count),
    "the key of the invite signs the peer id": (replay, lambda patch: patch.setattr(invites, "verify", yes)),
    "invites end": (come_late, lambda patch: patch.setattr(invites, "_check_expiry", nothing)),
    "only authorities and issuers invite": (
        invite_oneself,
        lambda patch: patch.setattr(Rules, "believe", yes),
    ),
    "the revoked are out": (come_back, lambda patch: patch.setattr(Revocations, "why_out", nothing)),
}


@pytest.mark.parametrize("defence", ISSUER)
def test_an_issuer_is_as_good_as_its_defences(defence: str, issuer: Issuer, monkeypatch: Patch) -> None:
    attack, switch_off = ISSUER[defence]
    with pytest.raises(NotAuthorised):
        attack(issuer)
    switch_off(monkeypatch)
    assert attack(issuer)


def edited(directory: Path) -> SwarmFile:
    path = directory / "swarm.toml"
    path.write_text(path.read_text().replace('"7d"', '"9d"'))
    return swarm_file.load(directory)


def rotated_by_a_thief(directory: Path) -> SwarmFile:
    """The first key was stolen and replaced; the thief goes on with it, beside a directory that knows better."""
    first, stolen = swarm_file.read(directory), (directory / "authority.key").read_bytes()
    swarm_writer.rotate_key(directory, now=NOW, overlap_s=0)
    remember(directory / "data", swarm_file.read(directory))
    (directory / "swarm.toml").write_bytes(first)
    (directory / "authority.key").write_bytes(stolen)
    swarm_writer.sign(directory, now=NOW)
    swarm_writer.sign(directory, now=NOW)
    return remember(directory / "data", swarm_file.read(directory))


FILES: dict[str, tuple[Callable[[Path], SwarmFile], Callable[[Patch], None]]] = {
    "the file is signed": (
        edited,
        lambda patch: patch.setattr(SwarmFile, "is_signed_by_authority", yes),
    ),
    "a data directory knows the newest keys": (
        rotated_by_a_thief,
        lambda patch: patch.setattr(Authority, "continues", yes),
    ),
}


@pytest.mark.parametrize("defence", FILES)
def test_a_swarm_file_is_as_good_as_its_defences(defence: str, tmp_path: Path, monkeypatch: Patch) -> None:
    attack, switch_off = FILES[defence]
    for name in ("defended", "open"):
        swarm_writer.create(tmp_path / name, NewSwarm("lab"), now=NOW)
    with pytest.raises(IntegrityError):
        attack(tmp_path / "defended")
    switch_off(monkeypatch)
    assert attack(tmp_path / "open").serial
