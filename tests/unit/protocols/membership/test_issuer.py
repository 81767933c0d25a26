"""Invites and the issuer that redeems them."""

import math
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, OutOfResources
from swarmnet_protocols.membership import certificates, invites, membership
from swarmnet_protocols.membership.certificates import (
    RENEWABLE_S,
    Admittance,
    Certificate,
    issue,
    machine_of,
    open_certificate,
)
from swarmnet_protocols.membership.invites import (
    MAX_BOOTSTRAPS,
    MAX_USES,
    Invite,
    InviteTerms,
    is_invite,
    make_invite,
    read_invite,
    redemption,
)
from swarmnet_protocols.membership.issuer import ISSUED_NAME, IssuedCertificates, Issuer
from swarmnet_protocols.membership.revocations import Revocations, RevokedIds, sign_list
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role
from tests.defences import Patch, defence, nothing, replacing, yes

NOW = 1_800_000_000.0
HOUR_S = 3600
SWARM = bytes(range(32))
AUTHORITY = Identity.from_seed(b"authority")
RULES = Rules(
    SWARM, Admission.CERTIFICATE, {AUTHORITY.public_key: math.inf}, certificate_lifetime_s=24 * HOUR_S
)
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
ALICE, BOB, CAROL = (Identity.from_seed(name).peer_id for name in (b"alice", b"bob", b"carol"))
TERMS = InviteTerms(frozenset({Role.CLIENT, Role.HOST}), int(NOW) + HOUR_S, uses=2)
NO_REVOCATIONS = Revocations()


def invite(terms: InviteTerms = TERMS, *, key: Identity = AUTHORITY, swarm: bytes = SWARM) -> Invite:
    return read_invite(make_invite(terms, swarm=swarm, key=key, bootstrap=[ADDRESS]), now=NOW)


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Issuer]:
    with IssuedCertificates.open(tmp_path) as ledger:
        yield Issuer(AUTHORITY, RULES, ledger, now=NOW)


def renew(sealed: bytes) -> pb.Renew:
    return pb.Renew(certificate=sealed)


def admitted(issuer: Issuer, shown: Invite, peer: PeerId, now: float = NOW) -> Certificate:
    sealed = issuer.redeem(redemption(shown, peer), peer, NO_REVOCATIONS, now)
    return open_certificate(sealed, rules=RULES, now=now)


def test_an_invite_is_one_string_that_survives_a_mail_program() -> None:
    text = make_invite(TERMS, swarm=SWARM, key=AUTHORITY, bootstrap=[ADDRESS] * 20)
    assert is_invite(text)
    assert is_invite(f"  {text}")
    assert not is_invite("lab/swarm.toml")
    folded = "\n".join(text[n : n + 60] for n in range(0, len(text), 60))
    read = read_invite(f" {folded}\n", now=NOW)
    assert read == read_invite(text, now=NOW)
    assert (read.grant.terms, read.grant.swarm, len(read.bootstrap)) == (TERMS, SWARM, MAX_BOOTSTRAPS)


@pytest.mark.parametrize("damage", ["", "swn1", "swn1!", "swn1AAAA", "x" * 10_000])
def test_text_that_is_no_invite_is_refused(damage: str) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        read_invite(damage, now=NOW)


def test_an_invite_that_lost_or_changed_a_character_is_damaged() -> None:
    text = make_invite(TERMS, swarm=SWARM, key=AUTHORITY, bootstrap=[ADDRESS])
    for position in (*range(4, len(text), 7), len(text) - 1):
        other = "A" if text[position] != "A" else "B"
        for damaged in (
            text[:position],
            text[:position] + text[position + 1 :],
            text[:position] + other + text[position + 1 :],
        ):
            if damaged != text:
                with pytest.raises(ConfigError, match="damaged"):
                    read_invite(damaged, now=NOW)


@defence("an invite ends", off=replacing(invites, "_check_expiry", nothing))
def test_an_invite_that_ended_names_the_clock() -> None:
    text = make_invite(TERMS, swarm=SWARM, key=AUTHORITY, bootstrap=[])
    with pytest.raises(NotAuthorised, match="ended") as caught:
        read_invite(text, now=NOW + HOUR_S)
    assert "clock" in caught.value.hint


@pytest.mark.parametrize(
    "terms", [replace(TERMS, roles=frozenset()), replace(TERMS, uses=0), replace(TERMS, uses=MAX_USES + 1)]
)
def test_invites_with_impossible_content_are_not_made(terms: InviteTerms) -> None:
    with pytest.raises(ValueError, match="invite"):
        make_invite(terms, swarm=SWARM, key=AUTHORITY, bootstrap=[])


def test_a_newcomer_gets_the_roles_and_lifetime_of_its_invite(issuer: Issuer) -> None:
    shown = invite()
    certificate = admitted(issuer, shown, ALICE)
    assert (certificate.peer, certificate.roles, certificate.invite) == (ALICE, TERMS.roles, shown.grant.id)
    assert certificate.not_after == NOW + 24 * HOUR_S


def never_count(patch: Patch) -> None:
    record = IssuedCertificates.record
    patch.setattr(IssuedCertificates, "record", lambda self, issued, **_: record(self, issued, uses=None))


@defence("uses of an invite are counted", off=never_count)
def test_an_invite_admits_its_number_of_peers_at_any_time(issuer: Issuer) -> None:
    shown = invite()
    for peer in (ALICE, BOB, ALICE, BOB, ALICE):
        assert admitted(issuer, shown, peer).peer == peer
    with pytest.raises(NotAuthorised, match="used up"):
        admitted(issuer, shown, CAROL)
    assert admitted(issuer, shown, BOB, NOW + HOUR_S - 1)


def test_uses_are_counted_across_restarts(tmp_path: Path) -> None:
    shown = invite()
    for peer in (ALICE, BOB):
        with IssuedCertificates.open(tmp_path) as ledger:
            admitted(Issuer(AUTHORITY, RULES, ledger, now=NOW), shown, peer)
    with IssuedCertificates.open(tmp_path) as ledger, pytest.raises(NotAuthorised, match="used up"):
        admitted(Issuer(AUTHORITY, RULES, ledger, now=NOW), shown, CAROL)
    assert (tmp_path / ISSUED_NAME).stat().st_mode & 0o777 == 0o600


def test_a_member_with_an_expired_certificate_uses_up_no_invite(tmp_path: Path) -> None:
    rules = replace(RULES, certificate_lifetime_s=HOUR_S)
    shown = invite(replace(TERMS, uses=1, not_after=int(NOW) + 24 * HOUR_S))
    with IssuedCertificates.open(tmp_path) as ledger:
        issuer = Issuer(AUTHORITY, rules, ledger, now=NOW)
        first = admitted(issuer, shown, ALICE)
        second = admitted(issuer, shown, ALICE, NOW + 2 * HOUR_S)
        assert second.id != first.id
        with pytest.raises(NotAuthorised, match="used up"):
            admitted(issuer, shown, BOB, NOW + 2 * HOUR_S)


def test_a_certificate_is_answered_after_it_is_on_disk(tmp_path: Path, issuer: Issuer) -> None:
    admitted(issuer, invite(), ALICE)
    with sqlite3.connect(tmp_path / ISSUED_NAME) as other:
        assert other.execute("SELECT peer FROM issued").fetchall() == [(ALICE,)]
    other.close()


@defence("only the holder of an invite redeems it", off=replacing(invites, "verify", yes))
def test_a_replayed_redemption_costs_no_use_and_admits_no_other_peer(issuer: Issuer) -> None:
    shown = invite()
    heard = redemption(shown, ALICE)
    first = issuer.redeem(heard, ALICE, NO_REVOCATIONS, NOW)
    for _ in range(100):
        assert issuer.redeem(heard, ALICE, NO_REVOCATIONS, NOW) == first
        with pytest.raises(NotAuthorised, match="not signed with the key of the invite"):
            issuer.redeem(heard, BOB, NO_REVOCATIONS, NOW)
    assert admitted(issuer, shown, BOB)


def test_an_invite_for_one_peer_admits_no_other(issuer: Issuer) -> None:
    shown = invite(replace(TERMS, peer=ALICE))
    with pytest.raises(NotAuthorised, match="for another peer"):
        admitted(issuer, shown, BOB)
    assert admitted(issuer, shown, ALICE)


@defence("only the authority and issuers invite", off=replacing(Rules, "trusts", yes))
def test_an_invite_of_another_key_or_swarm_or_time_is_refused(issuer: Issuer) -> None:
    with pytest.raises(NotAuthorised, match="key that the swarm does not trust"):
        admitted(issuer, invite(key=Identity.from_seed(b"stranger")), ALICE)
    with pytest.raises(NotAuthorised, match="another swarm"):
        admitted(issuer, invite(swarm=bytes(32)), ALICE)
    with pytest.raises(NotAuthorised, match="ended"):
        admitted(issuer, invite(), ALICE, NOW + HOUR_S)
    with pytest.raises(IntegrityError):
        issuer.redeem(pb.Redeem(), ALICE, NO_REVOCATIONS, NOW)
    shown = invite()
    more = pb.Signed.FromString(shown.sealed_grant)
    grant = pb.Grant.FromString(more.body)
    grant.uses = 100
    more.body = grant.SerializeToString(deterministic=True)
    forged = replace(shown, sealed_grant=more.SerializeToString(deterministic=True))
    with pytest.raises(IntegrityError, match="signature"):
        issuer.redeem(redemption(forged, ALICE), ALICE, NO_REVOCATIONS, NOW)


def revoked(named: RevokedIds) -> Revocations:
    return NO_REVOCATIONS.updated(
        [sign_list(named, serial=1, swarm=SWARM, key=AUTHORITY)], rules=RULES, now=NOW
    )


@defence("a revoked peer gets no certificate", off=replacing(Revocations, "find_revocation", nothing))
def test_revoked_peers_get_no_certificate(issuer: Issuer) -> None:
    shown = invite()
    sealed = issuer.redeem(redemption(shown, ALICE), ALICE, NO_REVOCATIONS, NOW)
    for out in (RevokedIds(frozenset({ALICE})), RevokedIds(invites=frozenset({shown.grant.id}))):
        with pytest.raises(NotAuthorised, match="revoked"):
            issuer.redeem(redemption(shown, ALICE), ALICE, revoked(out), NOW)
        with pytest.raises(NotAuthorised, match="revoked"):
            issuer.renew(renew(sealed), ALICE, revoked(out), NOW)


def test_a_certificate_is_renewed_when_two_thirds_are_over(issuer: Issuer) -> None:
    certificate = admitted(issuer, invite(), ALICE)
    redeemed = issuer.redeem(redemption(invite(), BOB), BOB, NO_REVOCATIONS, NOW)
    sealed = issuer.renew(renew(redeemed), BOB, NO_REVOCATIONS, NOW)
    first = open_certificate(sealed, rules=RULES, now=NOW)
    assert issuer.renew(renew(sealed), BOB, NO_REVOCATIONS, first.renew_at - 1) == sealed
    again = issuer.renew(renew(sealed), BOB, NO_REVOCATIONS, first.renew_at)
    second = open_certificate(again, rules=RULES, now=first.renew_at)
    assert second.not_after > first.not_after
    assert (second.peer, second.roles, second.invite) == (BOB, first.roles, first.invite)
    assert certificate.id != second.id


@defence("a certificate is renewed for its peers alone", off=replacing(membership, "check_bearer", nothing))
def test_a_certificate_of_another_peer_is_not_renewed(issuer: Issuer) -> None:
    sealed = issuer.redeem(redemption(invite(), ALICE), ALICE, NO_REVOCATIONS, NOW)
    with pytest.raises(NotAuthorised, match="for another peer"):
        issuer.renew(renew(sealed), BOB, NO_REVOCATIONS, NOW)


@defence(
    "a revoked member does not return from an absence", off=replacing(Revocations, "find_revocation", nothing)
)
def test_a_member_returns_within_a_month_of_its_certificates_end(issuer: Issuer) -> None:
    sealed = issuer.redeem(redemption(invite(), ALICE), ALICE, NO_REVOCATIONS, NOW)
    ended = NOW + 24 * HOUR_S
    with pytest.raises(NotAuthorised, match="ended"):
        open_certificate(sealed, rules=RULES, now=ended)
    with pytest.raises(NotAuthorised, match="revoked"):
        issuer.renew(renew(sealed), ALICE, revoked(RevokedIds(frozenset({ALICE}))), ended)
    renewed = issuer.renew(renew(sealed), ALICE, NO_REVOCATIONS, ended + RENEWABLE_S - 1)
    assert open_certificate(renewed, rules=RULES, now=ended + RENEWABLE_S).peer == ALICE


@defence("an absence has an end", off=lambda patch: patch.setattr(membership, "RENEWABLE_S", math.inf))
def test_a_certificate_that_ended_long_ago_is_not_renewed(issuer: Issuer) -> None:
    sealed = issuer.redeem(redemption(invite(), ALICE), ALICE, NO_REVOCATIONS, NOW)
    with pytest.raises(NotAuthorised, match="ended"):
        issuer.renew(renew(sealed), ALICE, NO_REVOCATIONS, NOW + 24 * HOUR_S + RENEWABLE_S)


def test_another_issuer_renews_what_the_first_one_issued(tmp_path: Path, issuer: Issuer) -> None:
    sealed = issuer.redeem(redemption(invite(), ALICE), ALICE, NO_REVOCATIONS, NOW)
    (tmp_path / "other").mkdir()
    other = Identity.from_seed(b"other")
    rules = replace(RULES, keys={**RULES.keys, other.public_key: math.inf})
    with IssuedCertificates.open(tmp_path / "other") as ledger:
        renewed = Issuer(other, rules, ledger, now=NOW).renew(renew(sealed), ALICE, NO_REVOCATIONS, NOW)
    assert open_certificate(renewed, rules=rules, now=NOW).issuer == other.public_key


STOLEN = Identity.from_seed(b"stolen")
HONEST = Identity.from_seed(b"honest")
BOTH = replace(RULES, keys={STOLEN.public_key: math.inf, HONEST.public_key: math.inf})


def certificate_by(key: Identity, peer: PeerId = ALICE) -> bytes:
    admittance = Admittance(peer, TERMS.roles)
    return issue(admittance, swarm=SWARM, key=key, now=NOW, lifetime_s=24 * HOUR_S)


def renewed_by(key: Identity, sealed: bytes, folder: Path, *, rules: Rules = BOTH, now: float = NOW) -> bytes:
    (home := folder / f"{key.public_key.hex()}-{now}").mkdir()
    with IssuedCertificates.open(home) as ledger:
        return Issuer(key, rules, ledger, now=now).renew(renew(sealed), ALICE, NO_REVOCATIONS, now)


def forget_who_admitted(patch: Patch) -> None:
    read = certificates._open
    patch.setattr(certificates, "_open", lambda data: replace(read(data), admitted_by=()))


@defence("a membership made with a stolen key ends with the key", off=forget_who_admitted)
def test_a_membership_made_with_a_stolen_key_ends_with_the_key(tmp_path: Path) -> None:
    renewed = certificate_by(STOLEN)
    for week in range(5):
        renewed = renewed_by(HONEST, renewed, tmp_path, now=NOW + week * HOUR_S)
    assert open_certificate(renewed, rules=BOTH, now=NOW + 5 * HOUR_S).peer == ALICE
    without = replace(RULES, keys={HONEST.public_key: math.inf})
    with pytest.raises(NotAuthorised, match="does not trust any more"):
        open_certificate(renewed, rules=without, now=NOW + 5 * HOUR_S)
    with pytest.raises(NotAuthorised, match="does not trust any more"):
        renewed_by(HONEST, renewed, tmp_path, rules=without, now=NOW + 5 * HOUR_S)


@defence("a membership by an invite of a stolen key ends with the key", off=forget_who_admitted)
def test_a_membership_by_an_invite_of_a_stolen_key_ends_with_the_key(tmp_path: Path) -> None:
    with IssuedCertificates.open(tmp_path) as ledger:
        issuer = Issuer(HONEST, BOTH, ledger, now=NOW)
        sealed = issuer.redeem(redemption(invite(key=STOLEN), ALICE), ALICE, NO_REVOCATIONS, NOW)
    assert open_certificate(sealed, rules=BOTH, now=NOW).issuer == HONEST.public_key
    with pytest.raises(NotAuthorised, match="does not trust any more"):
        open_certificate(sealed, rules=replace(RULES, keys={HONEST.public_key: math.inf}), now=NOW)


def test_members_of_another_key_stay_though_a_stolen_one_renewed_them(tmp_path: Path) -> None:
    renewed = renewed_by(STOLEN, certificate_by(HONEST), tmp_path)
    renewed = renewed_by(HONEST, renewed, tmp_path)
    without = replace(RULES, keys={HONEST.public_key: math.inf})
    assert open_certificate(renewed, rules=without, now=NOW).issuer == HONEST.public_key


def test_a_key_that_ended_as_planned_leaves_its_members_in(tmp_path: Path) -> None:
    overlap = replace(RULES, keys={STOLEN.public_key: NOW + HOUR_S, HONEST.public_key: math.inf})
    renewed = renewed_by(HONEST, certificate_by(STOLEN), tmp_path, rules=overlap)
    assert open_certificate(renewed, rules=overlap, now=NOW + 2 * HOUR_S).peer == ALICE


def renewal_by_hand() -> bytes:
    admittance = Admittance(ALICE, TERMS.roles, first=certificate_by(HONEST))
    return issue(admittance, swarm=SWARM, key=HONEST, now=NOW, lifetime_s=24 * HOUR_S)


@pytest.mark.parametrize(
    "changed",
    [
        {"peer": BOB},
        {"invite": bytes(16)},
        {"roles": frozenset(Role)},
        {"grant_signer": HONEST.public_key},
        {"first": renewal_by_hand()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_renewal_that_differs_from_the_first_certificate_is_refused(changed: dict[str, object]) -> None:
    honest = Admittance(ALICE, TERMS.roles, first=certificate_by(HONEST))
    sealed = issue(
        replace(honest, **changed),  # type: ignore[arg-type]
        swarm=SWARM,
        key=HONEST,
        now=NOW,
        lifetime_s=24 * HOUR_S,
    )
    with pytest.raises(IntegrityError, match="does not renew"):
        open_certificate(sealed, rules=BOTH, now=NOW)


def test_a_certificate_made_by_hand_is_renewed_too(issuer: Issuer) -> None:
    sealed = issue(
        Admittance(ALICE, TERMS.roles), swarm=SWARM, key=AUTHORITY, now=NOW, lifetime_s=24 * HOUR_S
    )
    assert issuer.renew(renew(sealed), ALICE, NO_REVOCATIONS, NOW)


def test_a_key_that_the_file_does_not_name_makes_no_issuer(tmp_path: Path) -> None:
    with (
        IssuedCertificates.open(tmp_path) as ledger,
        pytest.raises(ConfigError, match="may not issue") as caught,
    ):
        Issuer(Identity.from_seed(b"stranger"), RULES, ledger, now=NOW)
    assert "issuers" in caught.value.hint


def test_no_peer_is_admitted_that_the_ledger_cannot_record(tmp_path: Path, issuer: Issuer) -> None:
    shown = invite(replace(TERMS, uses=1))
    with sqlite3.connect(tmp_path / ISSUED_NAME) as other:
        other.execute(
            "CREATE TRIGGER full BEFORE INSERT ON issued BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
    with pytest.raises(OutOfResources, match="disk full"):
        admitted(issuer, shown, ALICE)
    other.execute("DROP TRIGGER full")
    other.close()
    assert admitted(issuer, shown, BOB), "nothing of the failed attempt was counted"


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    (tmp_path / ISSUED_NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=ISSUED_NAME), IssuedCertificates.open(tmp_path):
        pass


NODE, CLIENT = Identity.from_seed(b"node"), Identity.from_seed(b"client")


def test_one_use_admits_the_node_and_the_client_of_a_machine(tmp_path: Path, issuer: Issuer) -> None:
    shown, machine = invite(replace(TERMS, uses=1)), machine_of(NODE, CLIENT.peer_id, SWARM)
    sealed = {
        issuer.redeem(redemption(shown, peer, machine), peer, NO_REVOCATIONS, NOW)
        for peer in (CLIENT.peer_id, NODE.peer_id)
    }
    certificate = open_certificate(sealed.pop(), rules=RULES, now=NOW)
    assert not sealed
    assert certificate.roles_of(NODE.peer_id) == TERMS.roles
    assert certificate.roles_of(CLIENT.peer_id) == {Role.CLIENT}
    assert not certificate.roles_of(BOB)
    with pytest.raises(NotAuthorised, match="used up"):
        admitted(issuer, shown, BOB)


def test_a_host_alone_gives_the_client_of_its_machine_a_clients_role(issuer: Issuer) -> None:
    shown, machine = invite(replace(TERMS, roles=frozenset({Role.HOST}))), machine_of(NODE, BOB, SWARM)
    sealed = issuer.redeem(redemption(shown, NODE.peer_id, machine), NODE.peer_id, NO_REVOCATIONS, NOW)
    certificate = open_certificate(sealed, rules=RULES, now=NOW)
    assert (certificate.roles_of(NODE.peer_id), certificate.roles_of(BOB)) == ({Role.HOST}, {Role.CLIENT})


@defence("no peer is named as a node without its consent", off=replacing(certificates, "verify", yes))
def test_no_newcomer_names_another_peer_as_its_node(issuer: Issuer) -> None:
    machine = machine_of(NODE, CLIENT.peer_id, SWARM)
    stolen = pb.Machine(node=NODE.peer_id, client=BOB, consent=machine.consent)
    with pytest.raises(NotAuthorised, match="did not sign"):
        issuer.redeem(redemption(invite(), BOB, stolen), BOB, NO_REVOCATIONS, NOW)


def test_no_peer_asks_for_two_others(issuer: Issuer) -> None:
    machine = machine_of(NODE, CLIENT.peer_id, SWARM)
    with pytest.raises(NotAuthorised, match="two other peers"):
        issuer.redeem(redemption(invite(), BOB, machine), BOB, NO_REVOCATIONS, NOW)


def look_at_the_bearer_alone(patch: Patch) -> None:
    find = Revocations.find_revocation
    patch.setattr(
        Revocations,
        "find_revocation",
        lambda self, peer, certificate: find(self, peer, certificate and replace(certificate, peer=peer)),
    )


@defence("a revoked node takes its client along", off=look_at_the_bearer_alone)
def test_a_revoked_node_takes_its_client_along(issuer: Issuer) -> None:
    machine = machine_of(NODE, CLIENT.peer_id, SWARM)
    shown = invite()
    sealed = issuer.redeem(redemption(shown, NODE.peer_id, machine), NODE.peer_id, NO_REVOCATIONS, NOW)
    certificate = open_certificate(sealed, rules=RULES, now=NOW)
    without_node = revoked(RevokedIds(frozenset({NODE.peer_id})))
    assert without_node.find_revocation(CLIENT.peer_id, certificate)
    with pytest.raises(NotAuthorised, match="revoked"):
        issuer.redeem(redemption(shown, CLIENT.peer_id, machine), CLIENT.peer_id, without_node, NOW)


def test_a_renewal_adds_the_client_to_an_older_certificate(issuer: Issuer) -> None:
    sealed = issuer.redeem(redemption(invite(), NODE.peer_id), NODE.peer_id, NO_REVOCATIONS, NOW)
    request = pb.Renew(certificate=sealed, machine=machine_of(NODE, CLIENT.peer_id, SWARM))
    with pytest.raises(NotAuthorised, match="another peer"):
        issuer.renew(request, CLIENT.peer_id, NO_REVOCATIONS, NOW)
    renewed = issuer.renew(request, NODE.peer_id, NO_REVOCATIONS, NOW)
    assert open_certificate(renewed, rules=RULES, now=NOW).client == CLIENT.peer_id
    assert issuer.renew(pb.Renew(certificate=renewed), CLIENT.peer_id, NO_REVOCATIONS, NOW) == renewed


def test_members_are_listed_with_names_and_last_seen(tmp_path: Path) -> None:
    shown = invite(replace(TERMS, label="Anna's laptop"))
    with IssuedCertificates.open(tmp_path) as ledger:
        machine = machine_of(NODE, CLIENT.peer_id, SWARM)
        issuer = Issuer(AUTHORITY, RULES, ledger, now=NOW)
        issuer.redeem(redemption(shown, NODE.peer_id, machine), NODE.peer_id, NO_REVOCATIONS, NOW)
        ledger.see({NODE.peer_id: "kitchen"}, NOW + 4)
        ledger.see({CLIENT.peer_id: "", BOB: "mallory"}, NOW + 5)
        (member,) = ledger.members()
    assert (member.label, member.client, member.seen_at) == ("Anna's laptop", CLIENT.peer_id, NOW + 5)
    assert member.name == "kitchen"


def test_the_ledger_of_an_older_version_is_used(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / ISSUED_NAME) as older:
        older.execute(
            "CREATE TABLE issued (peer TEXT NOT NULL, invite BLOB NOT NULL, roles TEXT NOT NULL,"
            " first_at INTEGER NOT NULL, certificate BLOB NOT NULL, PRIMARY KEY (invite, peer))"
            " STRICT, WITHOUT ROWID"
        )
        older.execute("INSERT INTO issued VALUES (?, ?, 'client', 7, x'')", (ALICE, bytes(16)))
    older.close()
    with IssuedCertificates.open(tmp_path) as ledger:
        assert [(each.peer, each.label) for each in ledger.members()] == [(ALICE, "")]
        assert admitted(Issuer(AUTHORITY, RULES, ledger, now=NOW), invite(), BOB)


def test_a_label_that_would_break_a_terminal_is_refused() -> None:
    for label in ("x" * 65, "two\nlines", "\x1b[2J"):
        with pytest.raises(ConfigError, match="damaged"):
            invite(replace(TERMS, label=label))
