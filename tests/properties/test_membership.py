"""No change of a statement that an authority signed is accepted, and no garbage crashes its reader.

Every single bit is flipped, and 100 other changes are tried; with ``--hypothesis-profile thorough``
100,000 of each.
"""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised
from swarmnet_protocols.membership import invites, revocations, signed
from swarmnet_protocols.membership.certificates import Admittance, issue, open_certificate
from swarmnet_protocols.membership.invites import (
    InviteTerms,
    make_invite,
    open_redemption,
    read_invite,
    redemption,
)
from swarmnet_protocols.membership.membership import admit
from swarmnet_protocols.membership.revocations import KEPT_S, Revocations, RevokedIds, open_list, sign_list
from swarmnet_protocols.membership.rules import MAX_LIFETIME_S, Admission, Rules
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire import membership_pb2 as pb
from swarmnet_protocols.wire.roles import Role
from tests.defences import defence, replacing, yes
from tests.support.attacks.mutations import mutations, taken

NOW = 1_800_000_000.0
SWARM = bytes(range(32))
AUTHORITY = Identity.from_seed(b"authority")
ALICE = Identity.from_seed(b"alice").peer_id
RULES = Rules(SWARM, Admission.CERTIFICATE, {AUTHORITY.public_key: math.inf})
ROLES = frozenset({Role.CLIENT, Role.HOST})
INVITE = make_invite(
    InviteTerms(ROLES, int(NOW) + 60), swarm=SWARM, key=AUTHORITY, bootstrap=["/ip4/192.0.2.1/tcp/1/p2p/x"]
)
SHOWN = redemption(read_invite(INVITE, now=NOW), ALICE)

REFUSALS = (IntegrityError, NotAuthorised)
Read = Callable[[bytes], object]


def read_redemption(grant: bytes) -> object:
    return open_redemption(pb.Redeem(grant=grant, proof=SHOWN.proof), ALICE, rules=RULES, now=NOW)


SEALED: dict[str, tuple[bytes, Read]] = {
    "certificate": (
        issue(Admittance(ALICE, ROLES, bytes(16)), swarm=SWARM, key=AUTHORITY, now=NOW, lifetime_s=86_400),
        lambda data: open_certificate(data, rules=RULES, now=NOW),
    ),
    "grant": (SHOWN.grant, read_redemption),
    "revocations": (
        sign_list(
            RevokedIds(frozenset({ALICE}), frozenset({bytes(16)})), serial=7, swarm=SWARM, key=AUTHORITY
        ),
        lambda data: open_list(data, rules=RULES, now=NOW),
    ),
}


@defence("no mutated certificate counts", off=replacing(signed, "verify", yes), kind="certificate")
@defence("no mutated revocations count", off=replacing(signed, "verify", yes), kind="revocations")
@pytest.mark.parametrize("kind", SEALED)
def test_no_mutation_is_accepted(kind: str) -> None:
    sealed, read = SEALED[kind]
    read(sealed)
    assert taken(mutations(sealed, settings().max_examples), read, REFUSALS) == []


@pytest.mark.parametrize("kind", SEALED)
@given(garbage=st.binary(max_size=400))
def test_garbage_is_refused(kind: str, garbage: bytes) -> None:
    with pytest.raises(REFUSALS):
        SEALED[kind][1](garbage)


@pytest.mark.parametrize("kind", SEALED)
def test_a_signed_but_invalid_body_is_refused(kind: str) -> None:
    """A thief of an authority's key may sign any bytes with it."""
    sealed, read = SEALED[kind]

    def read_signed(body: bytes) -> None:
        signature = AUTHORITY.sign(f"swarmnet-{kind}-1".encode() + b"\0" + body)
        forged = pb.Signed(body=body, signer=AUTHORITY.public_key, signature=signature)
        read(forged.SerializeToString(deterministic=True))

    taken(mutations(pb.Signed.FromString(sealed).body, settings().max_examples), read_signed, REFUSALS)


@pytest.mark.parametrize("kind", SEALED)
@pytest.mark.parametrize("other", SEALED)
def test_a_signature_counts_for_one_kind_of_statement_only(kind: str, other: str) -> None:
    sealed, read = SEALED[kind]
    body = pb.Signed.FromString(sealed).body
    signature = AUTHORITY.sign(f"swarmnet-{other}-1".encode() + b"\0" + body)
    signed = pb.Signed(body=body, signer=AUTHORITY.public_key, signature=signature)
    if kind == other:
        read(signed.SerializeToString(deterministic=True))
    else:
        with pytest.raises(IntegrityError, match="signature"):
            read(signed.SerializeToString(deterministic=True))


@defence("no mutated proof redeems an invite", off=replacing(invites, "verify", yes))
def test_no_mutated_proof_redeems_an_invite() -> None:
    def redeem(proof: bytes) -> None:
        open_redemption(pb.Redeem(grant=SHOWN.grant, proof=proof), ALICE, rules=RULES, now=NOW)

    redeem(SHOWN.proof)
    assert taken(mutations(SHOWN.proof, settings().max_examples), redeem, (NotAuthorised,)) == []


def test_no_replay_is_accepted() -> None:
    """Another peer replays what alice sent in a handshake and to an issuer, once for each
    example."""
    bob = Identity.from_seed(b"bob").peer_id
    certificate, _ = SEALED["certificate"]
    for _ in range(settings().max_examples):
        with pytest.raises(NotAuthorised, match="another peer"):
            admit(RULES, open_certificate(certificate, rules=RULES, now=NOW), bob, ROLES, Revocations(), NOW)
        with pytest.raises(NotAuthorised, match="not signed with the key of the invite"):
            open_redemption(SHOWN, bob, rules=RULES, now=NOW)


DAY_S = 24 * 3600


@defence("a revocation is kept for as long as it counts", off=replacing(revocations, "KEPT_S", 0))
@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 5), st.booleans()), max_size=30))
def test_a_bounded_list_names_every_revoked_peer_that_could_enter(
    revocations: list[tuple[int, int, bool]],
) -> None:
    """Each a while after the one before, of one of a few peers or of invites, by a tool that signs
    the list anew each time."""
    named, now, revoked_at = RevokedIds(), int(NOW), dict[object, int]()
    for days, number, is_peer in revocations:
        now += days * DAY_S
        peer, invite = Identity.from_seed(b"%d" % number).peer_id, bytes([number]) * 16
        named = (
            named.adding(peers=frozenset({peer})) if is_peer else named.adding(invites=frozenset({invite}))
        )
        revoked_at[peer if is_peer else invite] = now
        named = named.still_needed(now, peers_for_ever=False)
        sealed = sign_list(named, serial=now, swarm=SWARM, key=AUTHORITY)
        assert open_list(sealed, rules=RULES, now=now).revoked == named
        recent = {each for each, then in revoked_at.items() if now < then + KEPT_S}
        assert set(named.in_order()) == set(named.since) == recent
    for revoked, then in revoked_at.items():
        # The last one that can be issued: by an issuer that learned of the revocation a
        # certificate's lifetime later.
        ends = then + 2 * MAX_LIFETIME_S
        assert now >= ends or revoked in named.in_order()


def test_an_invite_is_read_unchanged_or_refused() -> None:
    def read(text: bytes) -> object:
        return read_invite(text.decode("latin-1"), now=NOW)

    mutated = mutations(INVITE.encode(), settings().max_examples)
    for text in taken(mutated, read, (ConfigError, NotAuthorised)):
        assert read(text) == read(INVITE.encode())
