"""Lists the members of a swarm, and the invites that are still open, for its owner.

Members are in the records of an issuer, or in the swarm file. Invites are in the file ``invites``
next to the swarm file, one JSON object a line, without their secrets.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet import swarm_file
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.local_peer import REVOCATIONS_NAME
from swarmnet.swarm_file.stored import swarm_dir
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.rules import Admission

if TYPE_CHECKING:
    from swarmnet_protocols.membership.invites import InviteTerms
    from swarmnet_protocols.membership.revocations import RevocationList

INVITES_NAME = "invites"
Row = dict[str, Any]
"""A member or an open invite, with the keys of `swarm members --json`."""
_MAX_BYTES = 4 << 20
"""Bytes of the list of invites that are read: more than ten thousand invites."""


def invite_row(identity: bytes, terms: "InviteTerms") -> Row:
    """Return an invite for the list, without its secret. ``expires`` is a Unix time."""
    return {
        "id": identity.hex(),
        "roles": sorted(terms.roles),
        "uses": terms.uses,
        "peer_id": terms.peer,
        "label": terms.label,
        "expires": terms.not_after,
    }


def note_invite(swarm: Path, made: Row) -> None:
    """Add an invite to the list next to the swarm file. Raises ``OSError``."""
    path = swarm_file.file_in(swarm).with_name(INVITES_NAME)
    path.touch(mode=0o600)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(made) + "\n")


def open_invites(file: SwarmFile, swarm: Path, members: list[Row]) -> list[Row]:
    """Return the invites that somebody may still redeem: not expired, revoked or used up by
    ``members``."""
    now, path = wall_clock(), revocations_path(swarm)
    used = Counter(row["invite"] for row in members)
    revoked = read_revocations(path, file, now).revoked.invites if path.exists() else frozenset()
    found = []
    for made in _made(swarm_file.file_in(swarm).with_name(INVITES_NAME)):
        with suppress(KeyError, TypeError, ValueError):
            left = int(made["uses"]) - used[made["id"]]
            if left > 0 and now < made["expires"] and bytes.fromhex(made["id"]) not in revoked:
                found.append(made | {"used": used[made["id"]], "expires": iso_time(made["expires"])})
    return found


def _made(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(_MAX_BYTES).splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        with suppress(ValueError, RecursionError):
            if isinstance(made := json.loads(line), dict):
                yield made


def lists_for_owner(file: SwarmFile, swarm: Path, data_dir: Path) -> dict[str, object]:
    """Return the members and the open invites. Without an issuer's records in ``data_dir`` there
    are no members."""
    try:
        members = find_members(file, swarm, data_dir)
    except ConfigError:
        members = []
    return {"members": members, "invites": open_invites(file, swarm, members)}


def find_members(file: SwarmFile, swarm: Path, data_dir: Path) -> list[Row]:
    """Return the members that the swarm file lists, or that the issuer in ``data_dir`` admitted.
    Raises ``ConfigError`` if it admitted none."""
    if file.admission is not Admission.ALLOW_LIST:
        return _issued_members(file, swarm, data_dir)
    unknown = {"until": None, "invite": None, "label": "", "name": "", "client": None, "last_seen": None}
    return [
        {"peer_id": peer, "roles": sorted(roles), "state": "member", **unknown}
        for peer, roles in file.allow.items()
    ]


def _issued_members(file: SwarmFile, swarm: Path, data_dir: Path) -> list[Row]:
    from swarmnet_protocols.errors import NotAuthorised
    from swarmnet_protocols.membership.certificates import open_certificate
    from swarmnet_protocols.membership.issuer import ISSUED_NAME, IssuedCertificates
    from swarmnet_protocols.membership.revocations import Revocations

    now, rules = wall_clock(), file.rules()
    folder = swarm_dir(data_dir, file.swarm_id)
    if not (folder / ISSUED_NAME).exists():
        raise ConfigError(
            f"no issuer has admitted peers with {folder}",
            hint="give the --data-dir of the node that runs with --issuer",
        )
    path = revocations_path(swarm)
    revoked = Revocations([read_revocations(path, file, now)] if path.exists() else [])
    rows: list[Row] = []
    with IssuedCertificates.open(folder) as ledger:
        for issued in ledger.members():
            until, state = None, "ended"
            try:
                certificate = open_certificate(issued.certificate, rules=rules, now=now)
            except NotAuthorised:
                certificate = None
            if certificate is not None:
                until = iso_time(certificate.not_after)
                state = "revoked" if revoked.find_revocation(issued.peer, certificate) else "member"
            rows.append(
                {
                    "peer_id": issued.peer,
                    "roles": sorted(issued.roles),
                    "state": state,
                    "until": until,
                    "invite": issued.invite.hex() or None,
                    "label": issued.label,
                    "name": issued.name,
                    "client": issued.client or None,
                    "last_seen": iso_time(issued.seen_at) if issued.seen_at else None,
                }
            )
    return rows


def revocations_path(swarm: Path) -> Path:
    """Return the path of the owner's revocation list, next to the swarm file."""
    return swarm_file.file_in(swarm).with_name(REVOCATIONS_NAME)


def read_revocations(path: Path, file: SwarmFile, now: float) -> "RevocationList":
    """Return the revocation list in ``path``. Its key need not be trusted any more."""
    from swarmnet_protocols.membership.revocations import MAX_LIST_BYTES, open_list

    rules = file.rules()
    with path.open("rb") as stream:
        data = stream.read(MAX_LIST_BYTES + 1024)
    try:
        return open_list(data, rules=replace(rules, keys=dict.fromkeys(rules.keys, math.inf)), now=now)
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error}", hint="restore it from a backup") from error


def iso_time(time: float) -> str:
    """Return a Unix time as text."""
    return datetime.fromtimestamp(time, UTC).isoformat()
