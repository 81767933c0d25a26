"""The defences of the door and of issuers: who is let in, and who gets a certificate."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from swarmnet_protocols.membership import certificates, invites, membership, rules, signed
from swarmnet_protocols.membership import handshake as door
from swarmnet_protocols.membership.admitted import AdmittedPeer
from swarmnet_protocols.membership.handshake import Handshakes
from swarmnet_protocols.membership.issuer import Issuer, Ledger
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.rules import Member, Rules
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.wire.roles import ANY_ROLE
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.sim import test_door, test_door_leaving
from tests.unit import test_issuer


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

    patch.setattr(Handshakes, "admitting", admitting)


def review_nobody(patch: Patch) -> None:
    patch.setattr(Handshakes, "_review", nothing)


def end_without_a_word(patch: Patch) -> None:
    end = AdmittedPeer.end
    patch.setattr(AdmittedPeer, "end", lambda guest, *_: end(guest))


def never_look_at_the_clock(patch: Patch) -> None:
    async def keep_quiet(_: Handshakes) -> None:
        """Say nothing that would make the other side look again."""

    patch.setattr(Handshakes, "_arm", nothing)
    patch.setattr(Handshakes, "_keep_comparing", keep_quiet)


def never_count(patch: Patch) -> None:
    admit = Ledger.admit
    patch.setattr(Ledger, "admit", lambda ledger, issued, **_: admit(ledger, issued, uses=None))


def intruder(name: str) -> Callable[[Path], object]:
    return lambda _: test_door.test_an_intruder_is_refused_under_every_protocol(name, SESSION)


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
        "and say so",
        end_without_a_word,
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
