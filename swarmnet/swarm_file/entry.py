"""Entering a swarm by its file, an invite or its name. Each gives an ``Entry``. Also the swarm
files that a data directory stores.

A data directory stores one folder for each swarm with an authority (``swarm_dir``): the newest
swarm file that was used, the certificate, the revocations, and an issuer's database. ``store_file``
refuses a file older than the stored one, because an old file would readmit removed members
(rollback protection, as in The Update Framework).
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet import swarm_file
from swarmnet.addresses import read_addresses
from swarmnet.paths import TRANSPORT_VARIABLE, default_data_dir
from swarmnet.swarm_file import FILE_NAME
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.keys import KEY_NAME, load_key
from swarmnet.swarm_file.known_peers import KnownPeers, read_known_peers, write_known_peers
from swarmnet_protocols.errors import (
    ConfigError,
    IncompatibleVersion,
    IntegrityError,
    NotAuthorised,
    SwarmnetError,
    Unreachable,
)
from swarmnet_protocols.joining.network import Network, Trust, choose_transport, client_listen
from swarmnet_protocols.machine.aio import run_apart
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.config import P2pdConfig

if TYPE_CHECKING:
    from swarmnet_protocols.membership.invites import Invite
    from swarmnet_protocols.membership.issuer import IssuerConfig
    from swarmnet_protocols.wire.membership_pb2 import Admitted

IDENTITY_NAME = "identity.key"
GUARDS_NAME = "guards"


@dataclass(frozen=True)
class Entry:
    """A swarm that a data directory may enter: the verified swarm file, bootstrap addresses, and
    the peer's identity."""

    file: SwarmFile
    bootstrap: tuple[str, ...]
    """Addresses that the swarm file names, then those that the owner names."""
    identity_path: Path
    folder: Path | None
    """``swarm_dir`` with the certificate and the revocations; None for a swarm without an
    authority."""
    known: KnownPeers = field(default_factory=KnownPeers)
    """Peers of earlier connections."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses at which peers of the swarm may be."""
        return _distinct(self.bootstrap, self.known.named, self.known.seen)

    def check_bootstrap(self) -> None:
        """Raise ``Unreachable`` if no bootstrap peer is known and none may be found in the local
        network."""
        if not self.addresses and not self.file.mdns:
            raise Unreachable(
                "no bootstrap peer is known",
                hint="give the address that a node prints: --bootstrap ADDR",
            )

    def network(
        self, listen: Sequence[str], announce: Sequence[str] = (), issuer: Path | None = None
    ) -> Network:
        """Return the configuration of a connection to the swarm. With the key file ``issuer``, the
        peer also issues certificates.

        The environment variable ``TRANSPORT_VARIABLE`` chooses the transport.
        """
        choose_transport(os.environ.get(TRANSPORT_VARIABLE, "auto"))
        return Network(
            self.file.rules(),
            P2pdConfig(
                self.identity_path,
                listen=tuple(listen),
                announce=tuple(announce),
                bootstrap=self.bootstrap,
                named=self.known.named,
            ),
            known=(*self.known.named, *self.known.seen),
            remember=self._remember if self.folder else None,
            mdns=self.file.mdns,
            membership_folder=self.folder,
            adopt=self._adopt if self.folder else None,
            swarm_file=partial(swarm_file.read, self.folder) if self.folder else None,
            issuer=self._issuer(issuer) if issuer else None,
        )

    def _remember(self, answered: Sequence[str]) -> None:
        """Store the addresses of peers that are in the swarm, for the next connection. Raises
        ``OSError``."""
        if self.folder is not None:
            write_known_peers(self.folder, read_known_peers(self.folder).after(answered))

    def _adopt(self, data: bytes) -> Rules:
        return store_file(self.identity_path.parent, data, source="an issuer's swarm file").rules()

    def _issuer(self, key_path: Path) -> "IssuerConfig":
        from swarmnet_protocols.membership.issuer import IssuerConfig

        if self.folder is None:
            raise ConfigError(
                f"{self.file.name} has no authority and admits everybody", hint="leave out --issuer"
            )
        return IssuerConfig(load_key(key_path), self.folder, swarm_file.read(self.folder))


def enter(swarm: str, data_dir: Path, bootstrap: Sequence[str] = (), *, beside: Path | None = None) -> Entry:
    """Return the entry to a swarm, for the identity in ``data_dir``. ``swarm`` is one of:

    1. the path of a swarm file. If the authority's key lies next to it, this peer certifies itself;
    2. an invite, or the path of a file that holds an invite, because all users of a machine can
       read command lines. The first use redeems it and stores the certificate and the swarm file in
       ``data_dir``;
    3. the name or the id of a swarm that ``data_dir`` has entered before, or that the node with the
       data directory ``beside`` has entered. That node is another peer: this peer copies its swarm
       file and the addresses it knows, but not its membership.

    Raises ``ConfigError`` or ``IntegrityError`` for a file that is invalid, changed, expired or
    older than the stored file, ``NotAuthorised`` for an invalid invite, and ``Unreachable`` if no
    issuer can be reached to redeem it.
    """
    from swarmnet_protocols.membership.invites import is_invite

    if is_invite(swarm):
        return _enter_by_invite(swarm, data_dir, bootstrap)
    path = Path(swarm)
    stored = None if path.exists() else find_swarm(data_dir, swarm)
    if stored is None and beside is not None and not path.exists():
        stored = find_swarm(beside, swarm)
        if stored is not None:
            return _enter_beside(stored, beside, data_dir, bootstrap)
    if stored is not None:
        file = stored
    elif not path.exists() and len(path.parts) == 1 and not path.suffix:
        raise ConfigError(
            f"{swarm} is neither a swarm file, nor its directory, nor a swarm that this machine has joined",
            hint="create a swarm with `swarmnet swarm create NAME --out DIR`, or get the file from the person who runs it",
        )
    else:
        data = swarm_file.read(path)
        if is_invite(text := data.decode(errors="replace")):
            return _enter_by_invite(text, data_dir, bootstrap)
        source = str(swarm_file.file_in(path))
        file = swarm_file.parse(data, source=source)
        if file.authority is not None:
            file = store_file(data_dir, data, source=source)
            _certify_owner(file, swarm_file.file_in(path).with_name(KEY_NAME), data_dir)
    file.check_not_expired(wall_clock())
    return _entry(file, bootstrap, data_dir)


def client_network(
    swarm: str, bootstrap: Sequence[str], data_dir: Path | None = None, hosts: Sequence[PeerId] = ()
) -> Network:
    """Return the configuration of a client's connection. A client dials and is not dialled.

    The client's identity is in the folder ``client`` of the data directory, because a node may use
    the directory's own identity at the same time. In a swarm without an authority the identity is
    new each time. ``hosts``: the only hosts to use, instead of the hosts that the swarm file
    trusts. Raises the errors of ``enter``, and ``Unreachable`` if no bootstrap peer is known.
    """
    folder = (data_dir or default_data_dir()) / "client"
    entry = enter(swarm, folder, bootstrap, beside=data_dir or default_data_dir())
    entry.check_bootstrap()
    trust = Trust(
        frozenset(hosts or entry.file.hosts), frozenset(entry.file.first_and_last), folder / GUARDS_NAME
    )
    network = entry.network(client_listen(entry.addresses))
    return replace(network, trust=trust, is_anonymous=entry.folder is None)


def _entry(file: SwarmFile, bootstrap: Sequence[str], data_dir: Path) -> Entry:
    if file.authority is None:
        return Entry(file, _distinct(file.bootstrap, bootstrap), data_dir / IDENTITY_NAME, None)
    folder = swarm_dir(data_dir, file.swarm_id)
    known = read_known_peers(folder)
    if not set(bootstrap) <= set(known.named):
        known = known.named_too(bootstrap)
        try:
            write_known_peers(folder, known)
        except OSError as error:
            raise _cannot_write(folder, error) from error
    return Entry(file, _distinct(file.bootstrap, bootstrap), data_dir / IDENTITY_NAME, folder, known)


def _distinct(*lists: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


def _enter_beside(file: SwarmFile, beside: Path, data_dir: Path, bootstrap: Sequence[str]) -> Entry:
    """Return the entry of a second peer on this machine to a swarm that ``beside`` has entered.

    Raises the errors of :func:`enter`.
    """
    from swarmnet_protocols.membership.membership import CERTIFICATE_NAME
    from swarmnet_protocols.net.identity import Identity

    folder = swarm_dir(beside, file.swarm_id)
    known = read_known_peers(folder)
    file.check_not_expired(wall_clock())
    if (
        file.rules().needs_certificate
        and not (swarm_dir(data_dir, file.swarm_id) / CERTIFICATE_NAME).exists()
    ):
        peer = Identity.load_or_create(data_dir / IDENTITY_NAME).peer_id
        raise NotAuthorised(
            f"the node of this machine is a member of {file.name}, but this command is another peer, and no member yet",
            hint=f"give this command an invite too: --swarm INVITE. An invite that only this peer can use: swarmnet swarm approve {peer}",
        )
    entry = _entry(store_file(data_dir, swarm_file.read(folder)), (), data_dir)
    return replace(entry, known=known.named_too(read_addresses(beside)).named_too(bootstrap))


def _certify_owner(file: SwarmFile, key_path: Path, data_dir: Path) -> None:
    """Certify this peer in all roles if the authority's key lies next to the swarm file."""
    if not key_path.exists():
        return
    from swarmnet_protocols.membership.issuer import IssuerConfig
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity

    key = load_key(key_path)
    if not file.rules().trusts(key.public_key, wall_clock()):
        return  # another key has replaced it
    folder = swarm_dir(data_dir, file.swarm_id)
    peer = Identity.load_or_create(data_dir / IDENTITY_NAME).peer_id
    membership = Membership(file.rules(), peer, wall_clock, folder=folder)
    IssuerConfig(key, folder, swarm_file.read(folder)).certify(membership)


# ---- invites -----------------------------------------------------------------------------------


def _enter_by_invite(text: str, data_dir: Path, bootstrap: Sequence[str]) -> Entry:
    from swarmnet_protocols.membership.invites import read_invite

    now = wall_clock()
    invite = read_invite(text, now=0.0)
    folder = swarm_dir(data_dir, invite.grant.swarm)
    known = (*invite.bootstrap, *bootstrap)
    if (folder / FILE_NAME).exists():
        file = swarm_file.load(folder)
        if _has_certificate_of(invite.grant.id, file, folder, now):
            file.check_not_expired(now)
            return _entry(file, known, data_dir)
    read_invite(text, now=now)
    return _redeem(text, data_dir, known)


def _redeem(text: str, data_dir: Path, bootstrap: tuple[str, ...]) -> Entry:
    from swarmnet_protocols.joining.network import redeem
    from swarmnet_protocols.membership.invites import read_invite

    invite = replace(read_invite(text, now=wall_clock()), bootstrap=bootstrap)
    identity_path = data_dir / IDENTITY_NAME
    accept = partial(_store_admission, invite=invite, data_dir=data_dir)
    return run_apart(lambda: redeem(invite, identity_path, accept))


def _store_admission(admitted: "Admitted", invite: "Invite", data_dir: Path) -> Entry:
    """Verify and store the swarm file and the certificate that an issuer returned for
    ``invite``."""
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity

    source = "the swarm file that came with the certificate"
    file = swarm_file.parse(admitted.swarm_file, source=source)
    if file.swarm_id != invite.grant.swarm:
        raise IntegrityError(f"{source} belongs to another swarm", hint="ask for a new invite")
    if not file.rules().trusts(invite.grant.signer, wall_clock()):
        raise NotAuthorised("the invite was not signed by an authorised key", hint="ask for a new invite")
    file = store_file(data_dir, admitted.swarm_file, source=source)
    file.check_not_expired(wall_clock())
    folder = swarm_dir(data_dir, file.swarm_id)
    peer = Identity.load_or_create(data_dir / IDENTITY_NAME).peer_id
    Membership(file.rules(), peer, wall_clock, folder=folder).replace_certificate(admitted.certificate)
    return _entry(file, invite.bootstrap, data_dir)


def _has_certificate_of(invite: bytes, file: SwarmFile, folder: Path, now: float) -> bool:
    """Return whether ``folder`` has a valid certificate that was issued for ``invite``."""
    from swarmnet_protocols.membership.certificates import MAX_CERTIFICATE_BYTES, open_certificate
    from swarmnet_protocols.membership.membership import CERTIFICATE_NAME

    try:
        with (folder / CERTIFICATE_NAME).open("rb") as stream:
            sealed = stream.read(2 * MAX_CERTIFICATE_BYTES)
        return open_certificate(sealed, rules=file.rules(), now=now).invite == invite
    except (OSError, IntegrityError, NotAuthorised):
        return False


# ---- stored swarm files ------------------------------------------------------------------------


def swarm_dir(data_dir: Path, swarm_id: bytes) -> Path:
    """Return the folder of one swarm in ``data_dir``."""
    return data_dir / "swarms" / swarm_id.hex()


def store_file(data_dir: Path, data: bytes, *, source: str = FILE_NAME) -> SwarmFile:
    """Verify the swarm file ``data`` and store it in place of an older one of the same swarm.

    Raises what ``swarm_file.load`` and ``check_update`` raise, and ``ConfigError`` if the data
    directory cannot be written.
    """
    file = swarm_file.parse(data, source=source)
    folder = swarm_dir(data_dir, file.swarm_id)
    path = folder / FILE_NAME
    if path.exists():
        stored = swarm_file.load(path)
        check_update(file, stored, source)
        if file.serial == stored.serial:
            return stored
    try:
        write_whole(path, data, mode=0o600)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return file


def _cannot_write(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write into {folder}: {error.strerror}", hint="choose another --data-dir")


def check_update(file: SwarmFile, stored: SwarmFile, source: str) -> None:
    """Raise ``IntegrityError`` unless ``file`` is ``stored`` or a newer file.

    A lower serial is refused, and so is another file with the same serial. A file whose keys do not
    continue the stored rotations is refused, because a replaced key may be stolen.
    """
    if file.serial < stored.serial:
        raise IntegrityError(
            f"{source} is older than the one used before: serial {file.serial} after {stored.serial}",
            hint=f"get the current file from the person who runs the swarm, or name the swarm: {stored.name}",
        )
    if file.serial == stored.serial and file != stored:
        raise IntegrityError(
            f"{source} differs from the file used before, but has the same serial {file.serial}",
            hint="ask the person who runs the swarm to sign the right file again: swarmnet swarm sign",
        )
    if stored.authority and file.authority and not file.authority.continues(stored.authority):
        raise IntegrityError(
            f"{source} does not continue the authority keys of the file used before",
            hint="an old key of the authority may be stolen: ask the person who runs the swarm",
        )


def find_swarm(data_dir: Path, name: str) -> SwarmFile | None:
    """Return the stored swarm file with this name, or with this id in hexadecimal; None if there is
    none.

    Raises ``ConfigError`` if several swarms have the name. If no file matches and a file is
    damaged, its error is raised, because that file may have the name.
    """
    matches: list[SwarmFile] = []
    damage: SwarmnetError | None = None
    for path in sorted((data_dir / "swarms").glob(f"*/{FILE_NAME}")):
        if not re.fullmatch("[0-9a-f]{64}", path.parent.name):
            continue
        try:
            file = swarm_file.load(path)
        except (ConfigError, IncompatibleVersion, IntegrityError) as error:
            damage = damage or error
            continue
        if name in {file.name, file.swarm_id.hex()}:
            matches.append(file)
    if len(matches) > 1:
        ids = ", ".join(file.swarm_id.hex()[:16] for file in matches)
        raise ConfigError(
            f"{data_dir} has several swarms named {name!r}", hint=f"give the whole id; they begin with {ids}"
        )
    if not matches and damage is not None:
        raise damage
    return matches[0] if matches else None
