"""``swarmnet swarm invite``, ``members``, ``approve`` and ``revoke``: the members of a swarm."""

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet import swarm_file
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import (
    BootstrapOption,
    InviteBootstrapOption,
    JsonFlag,
    OwnSwarm,
    check_peer_id,
)
from swarmnet.cli.output import note, print_folded, print_json, print_result, print_text
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.keys import KEY_NAME, load_key
from swarmnet.swarm_file.members import (
    find_members,
    invite_row,
    iso_time,
    note_invite,
    open_invites,
    read_revocations,
    revocations_path,
)
from swarmnet.units import counted, parse_duration_s, show_time
from swarmnet_protocols.errors import ConfigError, OutOfResources, Unreachable
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.membership.rules import Admission
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import Role, name_roles

if TYPE_CHECKING:
    from swarmnet_protocols.membership.invites import InviteTerms
    from swarmnet_protocols.membership.revocations import RevocationList, RevokedIds
    from swarmnet_protocols.net.identity import Identity

RoleOption = Annotated[
    list[Role],
    typer.Option(
        "--role",
        metavar="ROLE",
        help="Role of the new members: client, host, trainer, observer or bootstrap; repeatable.",
        show_default="client",
    ),
]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", help="The authority's key, or an issuer's.", show_default="next to the file"
    ),
]
LabelOption = Annotated[
    str,
    typer.Option(
        "--label",
        metavar="TEXT",
        help="Your note on whom the invite is for, at most 64 characters. `swarm members` shows it, and the newcomer can read it.",
        show_default="none",
    ),
]
ExpiresOption = Annotated[
    int,
    typer.Option(
        "--expires", metavar="TIME", help="How long the invite can be redeemed, up to 90d: 90s, 12h, 7d."
    ),
    From(str, parse_duration_s, "7d"),
]


def invite(  # noqa: PLR0913 - a command line, not an interface
    *,
    which: OwnSwarm,
    role: RoleOption = [],  # noqa: B006 - typer copies it
    expires_s: ExpiresOption,
    uses: Annotated[
        int, typer.Option("--uses", metavar="N", min=1, max=10_000, help="How many peers the invite admits.")
    ] = 1,
    label: LabelOption = "",
    bootstrap: InviteBootstrapOption = [],  # noqa: B006
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Print an invite. Whoever passes it to `swarmnet join` or `run --swarm` becomes a member.

    \b
    Examples:
      swarmnet swarm invite lab --role host --label "Anna's laptop" > invite.txt
      swarmnet join invite.txt        on the other machine
    """
    swarm = which.path
    file = swarm_file.load_valid(swarm, wall_clock())
    if file.admission is Admission.ALLOW_LIST:
        raise ConfigError(
            f"{file.name} has no invites: its file lists the peers it admits",
            hint="add the peer to the list instead: swarmnet swarm approve PEER --role ROLE",
        )
    terms = _terms(role, expires_s, label, uses=uses)
    _print_invite(swarm, file, _key_for(swarm, file, key), terms, bootstrap, as_json=as_json)


def approve(  # noqa: PLR0913 - a command line, not an interface
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A peer id.", show_default=False)],
    *,
    which: OwnSwarm,
    role: RoleOption = [],  # noqa: B006 - typer copies it
    expires_s: ExpiresOption,
    label: LabelOption = "",
    bootstrap: InviteBootstrapOption = [],  # noqa: B006
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Admit one peer, even a revoked one: list it in the swarm file, or print an invite that only
    this peer can redeem."""
    who, swarm = check_peer_id(peer), which.path
    file = swarm_file.load_valid(swarm, wall_clock())
    signer = _key_for(swarm, file, key)
    own = _own_list(swarm, file, signer)
    if own is not None and who in own.revoked.peers:
        _sign_list(swarm, file, signer, replace(own.revoked, peers=own.revoked.peers - {who}))
        try:
            _spread(swarm, file, signer, bootstrap)
        except Unreachable as error:  # the peer is admitted nevertheless, once the list has arrived
            note(f"the peer is no longer revoked, but {error}: {error.hint}")
    if file.admission is not Admission.ALLOW_LIST:
        terms = _terms(role, expires_s, label, peer=who)
        _print_invite(swarm, file, signer, terms, bootstrap, as_json=as_json)
        return
    from swarmnet.swarm_file import writer as swarm_writer

    file = swarm_writer.allow(swarm, who, role or [Role.CLIENT], now=wall_clock())
    roles, serial = file.allow[who], file.serial
    text = f"{who} is listed as {name_roles(roles)}: distribute the file again, serial {serial}"
    print_result({"peer_id": who, "roles": sorted(roles), "serial": serial}, text, as_json=as_json)


def revoke(
    who: Annotated[
        str,
        typer.Argument(metavar="PEER|INVITE", help="A peer id, an invite or its id.", show_default=False),
    ],
    *,
    which: OwnSwarm,
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Revoke a peer, or all peers that an invite admitted, before their certificates end."""
    from swarmnet_protocols.membership.revocations import RevokedIds

    swarm, now = which.path, wall_clock()
    file = swarm_file.load_valid(swarm, now)
    signer = _key_for(swarm, file, key)
    own = _own_list(swarm, file, signer)
    revoked = own.revoked if own is not None else RevokedIds()
    if (identity := _invite_id(who)) is not None:
        revoked = revoked.adding(invites=frozenset({identity}))
    else:
        peer = check_peer_id(who)
        revoked = revoked.adding(peers=frozenset({peer}))
        if peer in file.allow and file.authority and signer.public_key in file.authority.keys:
            from swarmnet.swarm_file import writer as swarm_writer

            file = swarm_writer.disallow(swarm, peer, now=now)
            note(f"the file no longer lists this member: distribute the file again, serial {file.serial}")
    serial = _sign_list(swarm, file, signer, revoked)
    told = _spread(swarm, file, signer, bootstrap)
    if as_json:
        print_json({"revoked": identity.hex() if identity else who, "serial": serial, "told": told})
        return
    print_text(f"revoked: sent revocation list {serial} to {counted(len(told), 'peer')}")
    note("these peers pass the list on, until every connected peer has it")


def _spread(swarm: Path, file: SwarmFile, signer: "Identity", bootstrap: list[str]) -> list[PeerId]:
    """Send the revocation list to the swarm; returns the peers that have received it. Raises
    ``Unreachable`` if there are none."""
    import asyncio

    from swarmnet_protocols.joining.errands import push_revocations

    addresses = list(dict.fromkeys((*file.bootstrap, *bootstrap)))
    sealed = revocations_path(swarm).read_bytes()
    told = asyncio.run(push_revocations(sealed, addresses, rules=file.rules(), key=signer, clock=wall_clock))
    if not told:
        raise Unreachable(
            "no peer of the swarm received the new revocation list",
            hint="the list is stored: repeat this when a bootstrap peer of the file is online, or add --bootstrap ADDR",
        )
    return told


def members(*, which: OwnSwarm, as_json: JsonFlag = False) -> None:
    """List the members that the swarm file names, or that the issuer in this --data-dir admitted,
    and the invites that are still open."""
    swarm = which.path
    file = swarm_file.load(swarm)
    rows = find_members(file, swarm, which.data_dir)
    invites = open_invites(file, swarm, rows)
    if as_json:
        print_json({"members": rows, "invites": invites})
        return
    for row in rows:
        facts = {
            "last seen": _when(row["last_seen"]),
            "until": _when(row["until"]),
            "invite": row["invite"],
            "with its client": row["client"],
        }
        known = [f"{name} {value}" for name, value in facts.items() if value]
        who = (row["name"], row["label"], row["peer_id"])
        print_folded(_line(*dict.fromkeys(who), row["state"], ", ".join(row["roles"]), *known))
    if not rows:
        note("none yet")
    for each in invites:
        used = f"used {each['used']} of {each['uses']}"
        parts = (each["label"], each["id"], ", ".join(each["roles"]), used, f"until {_when(each['expires'])}")
        note(f"open invite: {_line(*parts)}")


def _when(iso: str | None) -> str:
    return show_time(datetime.fromisoformat(iso).timestamp()) if iso else ""


def _line(*parts: str) -> str:
    return "  ".join(filter(None, parts))


def sign_revocations_anew(swarm: Path, file: SwarmFile, key: "Identity", now: float) -> None:
    """Sign the authority's revocation list with its new ``key``, so its entries stay in force."""
    path = revocations_path(swarm)
    if path.exists():
        _sign_list(swarm, file, key, read_revocations(path, file, now).revoked)


def _terms(
    role: list[Role], expires_s: int, label: str, *, uses: int = 1, peer: PeerId | None = None
) -> "InviteTerms":
    from swarmnet_protocols.membership.invites import MAX_LABEL_CHARS, MAX_VALID_S, InviteTerms

    if len(label) > MAX_LABEL_CHARS or not label.isprintable():
        raise typer.BadParameter(
            f"use at most {MAX_LABEL_CHARS} printable characters", param_hint="'--label'"
        )

    if expires_s > MAX_VALID_S:
        raise typer.BadParameter(
            f"an invite is valid for {MAX_VALID_S // 86_400}d at most", param_hint="'--expires'"
        )
    not_after = int(wall_clock()) + expires_s
    return InviteTerms(frozenset(role) or frozenset({Role.CLIENT}), not_after, uses, peer, label)


def _print_invite(
    swarm: Path,
    file: SwarmFile,
    signer: "Identity",
    terms: "InviteTerms",
    bootstrap: list[str],
    *,
    as_json: bool,
) -> None:
    from swarmnet_protocols.membership.invites import make_invite, read_invite

    known = (*bootstrap, *file.bootstrap)
    text = make_invite(terms, swarm=file.swarm_id, key=signer, bootstrap=known)
    made = invite_row(read_invite(text, now=0.0).grant.id, terms)
    try:
        note_invite(swarm, made)
    except OSError as error:
        note(f"`swarm members` will not list this invite: {error.strerror}")
    if as_json:
        print_json({"invite": text, **made, "expires": iso_time(terms.not_after)})
        return
    print_text(text)
    whom = f"peer {terms.peer}" if terms.peer else counted(terms.uses, "peer")
    secret = "no other peer can use it" if terms.peer else "keep it secret: it admits any peer"
    note(f"admits {whom} as {name_roles(terms.roles)} until {show_time(terms.not_after)}; {secret}")
    if not known:
        where = " outside the local network of a node" if file.mdns else ""
        note(f"the invite holds no address, so a newcomer{where} has to add --bootstrap ADDR")


def _key_for(swarm: Path, file: SwarmFile, path: Path | None) -> "Identity":
    if file.authority is None:
        raise ConfigError(
            f"{file.name} has no authority: every peer that has its file is a member",
            hint="for a swarm with members: swarmnet swarm create NAME --out DIR",
        )
    key = load_key(path or swarm_file.file_in(swarm).parent / KEY_NAME)
    if not file.rules().trusts(key.public_key, wall_clock()):
        raise ConfigError(
            "the key belongs neither to the authority nor to an issuer of this swarm",
            hint="use authority.key, or list the key under issuers and sign the file",
        )
    return key


def _invite_id(text: str) -> bytes | None:
    from swarmnet_protocols.membership.invites import is_invite, read_invite

    if re.fullmatch("[0-9a-f]{32}", text):
        return bytes.fromhex(text)
    # An expired invite can be revoked too, because the certificates that it granted may still be
    # valid.
    return read_invite(text, now=0.0).grant.id if is_invite(text) else None


def _own_list(swarm: Path, file: SwarmFile, key: "Identity") -> "RevocationList | None":
    path = revocations_path(swarm)
    if not path.exists():
        return None
    own = read_revocations(path, file, wall_clock())
    if own.signer != key.public_key and file.rules().trusts(own.signer, wall_clock()):
        raise ConfigError(
            f"{path} was signed with another key",
            hint="use that key, or revoke from another copy of the swarm's directory",
        )
    return own


def _sign_list(swarm: Path, file: SwarmFile, key: "Identity", revoked: "RevokedIds") -> int:
    """Sign and write the revocation list without expired entries; returns its serial, higher than
    the last."""
    from swarmnet_protocols.membership.revocations import sign_list

    path, now = revocations_path(swarm), wall_clock()
    # Serials begin at the present time in seconds. So if the list is lost, the next list still gets
    # a higher serial.
    serial = int(now)
    if path.exists():
        serial = max(serial, read_revocations(path, file, now).serial + 1)
    revoked = revoked.still_needed(now, peers_for_ever=not file.rules().needs_certificate)
    try:
        sealed = sign_list(revoked, serial=serial, swarm=file.swarm_id, key=key)
    except ValueError as error:
        raise OutOfResources(
            str(error),
            hint="revoke invites rather than peers, or rotate the key: that ends every certificate",
        ) from error
    write_whole(path, sealed, mode=0o644)
    return serial
