"""Membership: certificates, revocations, and the rules of admission."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swarmnet_protocols.errors import IntegrityError, NotAuthorised
from swarmnet_protocols.membership.certificates import (
    CLOCK_SKEW_S,
    Admittance,
    Certificate,
    issue,
    open_certificate,
)
from swarmnet_protocols.membership.membership import admit
from swarmnet_protocols.membership.revocations import (
    KEPT_S,
    MAX_ENTRIES,
    Revocations,
    RevokedIds,
    open_list,
    sign_list,
)
from swarmnet_protocols.membership.rules import MAX_LIFETIME_S, MIN_LIFETIME_S, Admission, Rules
from swarmnet_protocols.membership.signed import seal
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import ANY_ROLE, Role
from tests.defences import defence, replacing

NOW = 1_800_000_000.0
DAY_S = 24 * 3600.0
SWARM = bytes(range(32))
AUTHORITY = Identity.from_seed(b"authority")
ISSUER = Identity.from_seed(b"issuer")
STRANGER = Identity.from_seed(b"stranger")
ALICE = Identity.from_seed(b"alice").peer_id
BOB = Identity.from_seed(b"bob").peer_id
RULES = Rules(
    SWARM, Admission.CERTIFICATE, {AUTHORITY.public_key: math.inf, ISSUER.public_key: NOW + 30 * DAY_S}
)
CLIENT, HOST = frozenset({Role.CLIENT}), frozenset({Role.HOST})
NO_REVOCATIONS = Revocations()


def sealed(
    *,
    peer: PeerId = ALICE,
    roles: frozenset[Role] = CLIENT,
    key: Identity = AUTHORITY,
    swarm: bytes = SWARM,
    now: float = NOW,
    invite: bytes = b"",
) -> bytes:
    return issue(Admittance(peer, roles, invite), swarm=swarm, key=key, now=now, lifetime_s=DAY_S)


def certificate(**how: object) -> Certificate:
    return open_certificate(sealed(**how), rules=RULES, now=NOW)  # type: ignore[arg-type]


def test_a_member_is_let_in_with_its_roles_until_its_certificate_ends() -> None:
    shown = certificate(roles=CLIENT | HOST, invite=bytes(16))
    member = admit(RULES, shown, ALICE, HOST, NO_REVOCATIONS, NOW)
    assert (member.peer, member.roles, member.until) == (ALICE, CLIENT | HOST, NOW + DAY_S)
    assert shown.invite == bytes(16)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "an outsider": (lambda: admit(RULES, None, ALICE, ANY_ROLE, NO_REVOCATIONS, NOW), "no certificate"),
    "another peer's": (
        lambda: admit(RULES, certificate(peer=BOB), ALICE, ANY_ROLE, NO_REVOCATIONS, NOW),
        "for another peer",
    ),
    "the wrong role": (
        lambda: admit(RULES, certificate(), ALICE, HOST, NO_REVOCATIONS, NOW),
        "takes the role host; the peer has client",
    ),
    "expired when it is shown": (
        lambda: open_certificate(sealed(now=NOW - DAY_S), rules=RULES, now=NOW),
        "ended 0 s ago",
    ),
    "expired since it was shown": (
        lambda: admit(RULES, certificate(), ALICE, CLIENT, NO_REVOCATIONS, NOW + DAY_S),
        "ended 0 s ago",
    ),
    "not valid yet": (
        lambda: open_certificate(sealed(now=NOW + CLOCK_SKEW_S + 60), rules=RULES, now=NOW),
        "begins in 60 s",
    ),
    "of another swarm": (
        lambda: open_certificate(sealed(swarm=bytes(32)), rules=RULES, now=NOW),
        "of another swarm",
    ),
    "signed by a stranger": (
        lambda: open_certificate(sealed(key=STRANGER), rules=RULES, now=NOW),
        "signed by a key that the swarm does not trust",
    ),
    "signed by one who counts no more": (
        lambda: admit(
            replace(RULES, keys=RULES.keys | {ISSUER.public_key: NOW}),
            certificate(key=ISSUER),
            ALICE,
            CLIENT,
            NO_REVOCATIONS,
            NOW,
        ),
        "signed by a key that the swarm does not trust",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_every_other_peer_is_refused_with_the_reason(case: str) -> None:
    attempt, why = REFUSED[case]
    with pytest.raises(NotAuthorised, match=why) as caught:
        attempt()
    assert caught.value.hint


@pytest.mark.parametrize("error_s", [-300, 300])
def test_a_clock_five_minutes_off_does_no_harm(error_s: int) -> None:
    fresh = sealed(now=NOW + error_s)
    member = open_certificate(fresh, rules=RULES, now=NOW)
    assert open_certificate(fresh, rules=RULES, now=NOW - error_s).id == member.id
    # Renewed at two thirds of even the shortest life, it has more than the ten minutes left that
    # two clocks may differ.
    shortest = issue(
        Admittance(ALICE, CLIENT), swarm=SWARM, key=AUTHORITY, now=NOW, lifetime_s=MIN_LIFETIME_S
    )
    opened = open_certificate(shortest, rules=RULES, now=NOW)
    assert opened.not_after - opened.renew_at > 600


def test_a_clock_further_off_is_named() -> None:
    with pytest.raises(NotAuthorised) as caught:
        open_certificate(sealed(now=NOW + DAY_S), rules=RULES, now=NOW)
    assert "clock" in caught.value.hint


@pytest.mark.parametrize(
    ("roles", "lifetime_s"),
    [(frozenset(), DAY_S), (CLIENT, MIN_LIFETIME_S - 1), (CLIENT, MAX_LIFETIME_S + 1), (CLIENT, math.nan)],
)
def test_certificates_with_impossible_content_are_not_issued(
    roles: frozenset[Role], lifetime_s: float
) -> None:
    with pytest.raises(ValueError, match="certificate"):
        issue(Admittance(ALICE, roles), swarm=SWARM, key=AUTHORITY, now=NOW, lifetime_s=lifetime_s)


def test_every_peer_of_an_open_swarm_is_a_client_without_certificate() -> None:
    public = replace(RULES, admission=Admission.OPEN, anyone=CLIENT)
    assert admit(public, None, ALICE, CLIENT, NO_REVOCATIONS, NOW).until == math.inf
    with pytest.raises(NotAuthorised, match="takes the role host"):
        admit(public, None, ALICE, HOST, NO_REVOCATIONS, NOW)
    assert admit(public, certificate(roles=HOST), ALICE, HOST, NO_REVOCATIONS, NOW).roles == CLIENT | HOST


def test_an_allow_list_names_its_members() -> None:
    listed = replace(RULES, admission=Admission.ALLOW_LIST, allow={ALICE: HOST})
    assert admit(listed, None, ALICE, HOST, NO_REVOCATIONS, NOW).roles == HOST
    with pytest.raises(NotAuthorised, match="list of members"):
        admit(listed, None, BOB, HOST, NO_REVOCATIONS, NOW)


@pytest.mark.parametrize("admission", [Admission.OPEN, Admission.ALLOW_LIST])
def test_an_ended_certificate_takes_away_no_role_that_needs_none(admission: Admission) -> None:
    rules = replace(RULES, admission=admission, anyone=CLIENT, allow={ALICE: CLIENT})
    ended = certificate(roles=HOST)
    later = ended.not_after + 1.0
    member = admit(rules, ended, ALICE, CLIENT, NO_REVOCATIONS, later)
    assert (member.roles, member.until) == (CLIENT, math.inf)
    with pytest.raises(NotAuthorised, match="takes the role host"):
        admit(rules, ended, ALICE, HOST, NO_REVOCATIONS, later)
    with pytest.raises(NotAuthorised, match="ended"):
        admit(RULES, ended, ALICE, HOST, NO_REVOCATIONS, later)


def learned(*lists: bytes, known: Revocations = NO_REVOCATIONS) -> Revocations:
    return known.updated(lists, rules=RULES, now=NOW)


def revoke(named: RevokedIds, *, serial: int = 1, key: Identity = AUTHORITY, swarm: bytes = SWARM) -> bytes:
    return sign_list(named, serial=serial, swarm=swarm, key=key)


@pytest.mark.parametrize("admission", Admission)
def test_a_revoked_peer_is_refused_under_every_admission_rule(admission: Admission) -> None:
    rules = replace(RULES, admission=admission, anyone=ANY_ROLE, allow={ALICE: ANY_ROLE})
    shown = certificate(invite=bytes(16))
    for named in (
        RevokedIds(peers=frozenset({ALICE})),
        RevokedIds(certificates=frozenset({shown.id})),
        RevokedIds(invites=frozenset({bytes(16)})),
    ):
        with pytest.raises(NotAuthorised, match="revoked"):
            admit(rules, shown, ALICE, CLIENT, learned(revoke(named)), NOW)
    others = learned(revoke(RevokedIds(frozenset({BOB}), frozenset({bytes(16)}), frozenset({shown.id}))))
    assert admit(rules, shown, ALICE, CLIENT, others, NOW)


def test_the_newest_revocation_list_of_each_signer_counts() -> None:
    old, new = (
        revoke(RevokedIds(frozenset({ALICE})), serial=1),
        revoke(RevokedIds(frozenset({BOB})), serial=2),
    )
    other = revoke(RevokedIds(frozenset({ALICE})), key=ISSUER)

    for order in ((old, new), (new, old)):
        known = learned(*order)
        assert (known.find_revocation(ALICE, None), bool(known.find_revocation(BOB, None))) == (None, True)
    assert learned(old, known=known) is known

    both = learned(other, known=known)
    assert both.find_revocation(ALICE, None)
    assert both.find_revocation(BOB, None)
    assert both.serials == {AUTHORITY.public_key: 2, ISSUER.public_key: 1}
    assert both.newer_than({AUTHORITY.public_key: 2}) == (other,)
    assert set(both.newer_than({})) == {new, other}

    later = replace(RULES, keys={AUTHORITY.public_key: math.inf})
    assert both.trusted(rules=later, now=NOW).find_revocation(ALICE, None) is None


def test_invalid_revocation_lists_are_refused() -> None:
    good = revoke(RevokedIds(frozenset({ALICE})))
    with pytest.raises(NotAuthorised, match="another swarm"):
        learned(revoke(RevokedIds(), swarm=bytes(32)))
    with pytest.raises(NotAuthorised, match="key that the swarm does not trust"):
        learned(good, revoke(RevokedIds(), key=STRANGER))
    with pytest.raises(IntegrityError):
        learned(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(IntegrityError):
        learned(sealed())  # a certificate is no list
    with pytest.raises(ValueError, match="at most"):
        revoke(RevokedIds(frozenset(PeerId(f"{n:052}") for n in range(MAX_ENTRIES + 1))))


def test_the_longest_list_there_can_be_fits() -> None:
    named = RevokedIds(frozenset(PeerId(f"{n:052}") for n in range(MAX_ENTRIES)))
    dated = named.still_needed(NOW, peers_for_ever=False)
    assert open_list(revoke(dated), rules=RULES, now=NOW).revoked == dated


@pytest.mark.parametrize(
    "change",
    [
        {"peers": [BOB, ALICE] if ALICE < BOB else [ALICE, BOB]},
        {"peers": [ALICE, ALICE]},
        {"peers": [ALICE], "since": [1, 2]},
        {"since": [1]},
    ],
    ids=["not sorted", "twice", "too many dates", "a date of nothing"],
)
def test_a_revocation_list_with_repetitions_or_no_dates_is_refused(change: dict[str, Any]) -> None:
    message = pb.RevocationList(swarm=SWARM, serial=1, **change)
    with pytest.raises(IntegrityError, match="sorted"):
        learned(seal(b"swarmnet-revocations-1", message, AUTHORITY))


def test_old_revocations_leave_the_list_and_may_be_repeated() -> None:
    old = RevokedIds(frozenset({ALICE}), invites=frozenset({bytes(16)})).still_needed(
        NOW, peers_for_ever=False
    )
    later = NOW + KEPT_S
    assert old.still_needed(later - 1, peers_for_ever=False) == old
    assert not old.still_needed(later, peers_for_ever=False).in_order()
    assert old.still_needed(later, peers_for_ever=True).in_order() == (ALICE,)
    again = old.adding(peers=frozenset({ALICE})).still_needed(later, peers_for_ever=False)
    assert (again.in_order(), again.since[ALICE]) == ((ALICE,), later)


@defence(
    "a certificate pardons no peer that was revoked after it",
    off=replacing(Revocations, "pardoning", lambda *_: Revocations()),
)
def test_a_revocation_before_the_certificate_pardons_this_peer_alone() -> None:
    dated = RevokedIds(frozenset({ALICE, BOB}), since={ALICE: int(NOW), BOB: int(NOW)})
    lists = learned(revoke(dated))
    # In the same second: it may have come later.
    assert lists.pardoning(ALICE, NOW).find_revocation(ALICE, None)
    pardoning = lists.pardoning(ALICE, NOW + 1)
    assert not pardoning.find_revocation(ALICE, None)
    assert pardoning.find_revocation(BOB, None)
    assert pardoning.serials == lists.serials
    undated = learned(revoke(RevokedIds(frozenset({ALICE}))))
    assert undated.pardoning(ALICE, math.inf).find_revocation(ALICE, None)
