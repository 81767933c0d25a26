"""Defences of the handshake and of issuers: which peers are admitted, and which get a certificate."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from swarmnet_protocols.joining import admission
from swarmnet_protocols.membership import (
    certificates,
    handshake,
    invites,
    membership,
    signed,
)
from swarmnet_protocols.membership.handshake import AdmittedPeer, Handshakes
from swarmnet_protocols.membership.issuer import IssuedCertificates, Issuer
from swarmnet_protocols.membership.membership import Member, Membership
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.defences import Defence, Patch, no, nothing, replacing, yes
from tests.sim import test_admission, test_handshake, test_handshake_end
from tests.unit.membership import test_issuer, test_membership


def ignore_validity(patch: Patch) -> None:
    for module in (certificates, membership):
        patch.setattr(module, "check_current", nothing)


def admit_any_peer(patch: Patch) -> None:
    patch.setattr(membership, "admit", lambda _, certificate, peer, *__: Member(peer, ANY_ROLE))


def skip_admission_checks(patch: Patch) -> None:
    patch.setattr(
        membership,
        "admit",
        lambda _, certificate, peer, *__: Member(peer, certificate.roles, certificate.not_after),
    )


def check_no_stream(patch: Patch) -> None:
    @contextlib.asynccontextmanager
    async def admitting(*_: Any) -> AsyncIterator[None]:
        yield

    patch.setattr(Handshakes, "admitting", admitting)


def keep_admitted(patch: Patch) -> None:
    patch.setattr(Handshakes, "_on_membership_change", nothing)


def end_without_a_reason(patch: Patch) -> None:
    end = AdmittedPeer.end
    patch.setattr(AdmittedPeer, "end", lambda peer, *_: end(peer))


def never_check_again(patch: Patch) -> None:
    async def keep_quiet(_: Handshakes) -> None:
        """Send no message that would make the other side check again."""

    patch.setattr(Handshakes, "_schedule_check", nothing)
    patch.setattr(Handshakes, "_send_hellos_periodically", keep_quiet)


def never_count(patch: Patch) -> None:
    record = IssuedCertificates.record
    patch.setattr(IssuedCertificates, "record", lambda self, issued, **_: record(self, issued, uses=None))


def intruder(name: str) -> Callable[[Path], object]:
    return lambda _: test_handshake.test_an_intruder_is_refused_under_every_protocol(name, SESSION)


def of_an_issuer(test: Callable[[Issuer], object]) -> Callable[[Path], object]:
    def fails(folder: Path) -> None:
        with IssuedCertificates.open(folder) as ledger:
            test(Issuer(test_issuer.AUTHORITY, test_issuer.RULES, ledger, now=test_issuer.NOW))

    return fails


def redeemed_by_two_peers(issuer: Issuer) -> None:
    test_issuer.test_a_replayed_redemption_costs_no_use_and_admits_no_other_peer(issuer)


def always_want_the_file(patch: Patch) -> None:
    patch.setattr(
        Handshakes,
        "_is_file_wanted",
        lambda self, _, hello: hello.file_serial > self.membership.rules.serial,
    )


def asking(role: str) -> Callable[[Path], None]:
    return lambda folder: test_admission.test_a_peer_that_proves_nothing_learns_nothing_of_the_swarm(
        role, folder
    )


HANDSHAKE = (
    Defence(
        "a member with a newer swarm file brings it to those that know only the former key",
        replacing(Handshakes, "_is_file_wanted", no),
        lambda _: (
            test_handshake.test_a_member_with_a_newer_file_brings_it_to_those_that_know_only_the_former_key(
                "opener"
            )
        ),
    ),
    Defence(
        "the swarm file is handed to members only",
        admit_any_peer,
        lambda _: test_handshake.test_an_outsider_is_given_no_swarm_file(),
    ),
    Defence(
        "a peer that claims a newer swarm file is asked once",
        always_want_the_file,
        lambda _: test_handshake.test_a_peer_that_claims_a_newer_file_and_has_none_is_asked_once(),
    ),
    Defence(
        "a certificate pardons no peer that was revoked after it",
        replacing(Revocations, "pardoning", lambda *_: Revocations()),
        lambda _: test_membership.test_a_revocation_before_the_certificate_pardons_this_peer_alone(),
    ),
    Defence("an outsider is refused", admit_any_peer, intruder("outsider")),
    Defence("a certificate ends", ignore_validity, intruder("expired")),
    Defence("a certificate does not count before it begins", ignore_validity, intruder("not yet")),
    Defence(
        "a revoked peer is refused", replacing(Revocations, "find_revocation", nothing), intruder("revoked")
    ),
    Defence("a certificate counts in one swarm", ignore_validity, intruder("certificate of another swarm")),
    Defence(
        "a certificate counts for one peer", skip_admission_checks, intruder("certificate of another peer")
    ),
    Defence("a certificate is signed", replacing(signed, "verify", yes), intruder("changed certificate")),
    Defence(
        "a handshake cannot be replayed",
        skip_admission_checks,
        lambda _: test_handshake.test_a_replayed_handshake_is_refused_under_every_protocol(SESSION),
    ),
    Defence(
        "every stream needs a handshake",
        check_no_stream,
        lambda _: test_handshake.test_a_peer_without_a_handshake_is_refused_under_every_protocol(SESSION),
    ),
    Defence(
        "the opener of a stream has the role",
        replacing(handshake, "check_role", nothing),
        lambda _: test_handshake.test_the_wrong_role_is_refused_under_every_protocol(LINK),
    ),
    Defence(
        "the server of a stream has the role",
        replacing(handshake, "check_role", nothing),
        lambda _: test_handshake.test_a_member_without_the_role_of_a_server_is_not_asked(LINK),
    ),
    Defence(
        "streams of a revoked peer end",
        keep_admitted,
        lambda _: test_handshake_end.test_the_streams_of_a_revoked_member_end_at_once(),
    ),
    Defence(
        "a revoked peer gets the reason",
        end_without_a_reason,
        lambda _: test_handshake_end.test_the_streams_of_a_revoked_member_end_at_once(),
    ),
    Defence(
        "streams end with their certificate",
        never_check_again,
        lambda _: test_handshake_end.test_streams_end_with_the_certificate(),
    ),
    Defence(
        "a removed signer cannot revoke",
        replacing(Revocations, "trusted", lambda revocations, **_: revocations),
        lambda _: test_handshake_end.test_revocations_of_a_removed_signer_do_not_count(),
    ),
)
ISSUER = (
    Defence(
        "a peer that proves nothing gets no swarm file",
        replacing(Membership, "admit", nothing),
        asking("member"),
    ),
    Defence(
        "a peer that proves nothing gets no addresses of issuers",
        replacing(admission, "check_redemption", nothing),
        asking("member"),
    ),
    Defence(
        "uses of an invite are counted",
        never_count,
        of_an_issuer(
            test_issuer.test_an_invite_admits_its_number_of_peers_and_each_of_them_again_at_any_time
        ),
    ),
    Defence(
        "only the holder of an invite redeems it",
        replacing(invites, "verify", yes),
        of_an_issuer(redeemed_by_two_peers),
    ),
    Defence(
        "an invite ends",
        replacing(invites, "_check_expiry", nothing),
        lambda _: test_issuer.test_an_invite_that_ended_names_the_clock(),
    ),
    Defence(
        "only the authority and issuers invite",
        replacing(Rules, "trusts", yes),
        of_an_issuer(test_issuer.test_an_invite_of_another_key_or_swarm_or_after_its_end_is_refused),
    ),
    Defence(
        "a revoked peer gets no certificate",
        replacing(Revocations, "find_revocation", nothing),
        of_an_issuer(test_issuer.test_revoked_peers_get_no_certificate),
    ),
)
