"""Into a swarm: from what a person typed (a file, an invite, a name) to where the swarm is and what we are in it."""

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarmnet import swarm_file
from swarmnet.paths import default_data_dir
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.folder import find, folder_of, remember
from swarmnet.swarm_file.keys import KEY_NAME, load_key
from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised, Unreachable
from swarmnet_protocols.joining.network import LOOPBACK, Network, Trust
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId

if TYPE_CHECKING:
    from swarmnet_protocols.membership.invites import Invite
    from swarmnet_protocols.membership.issuer import IssuerConfig
    from swarmnet_protocols.wire.membership_pb2 import Admitted

T = TypeVar("T")

IDENTITY_NAME = "identity.key"
GUARDS_NAME = "guards"


@dataclass(frozen=True)
class Entry:
    """A swarm, and what a data directory has for it."""

    file: SwarmFile
    bootstrap: tuple[str, ...]
    identity_path: Path
    folder: Path | None
    """With our certificate and what is revoked. None for a swarm that needs none."""

    def check_bootstrap(self) -> None:
        """Raises ``Unreachable`` where no peer is known to start from."""
        if not self.bootstrap:
            raise Unreachable(
                "no bootstrap peer is known",
                hint="give the address that a node prints: --bootstrap ADDR",
            )

    def network(
        self, listen: Sequence[str], announce: Sequence[str] = (), issuer: Path | None = None
    ) -> Network:
        """Our place in it; with the key in ``issuer``, one that lets others in."""
        return Network(
            self.file.rules(),
            self.identity_path,
            self.bootstrap,
            listen=tuple(listen),
            announce=tuple(announce),
            membership_folder=self.folder,
            adopt=self._adopt if self.folder else None,
            swarm_file=partial(swarm_file.read, self.folder) if self.folder else None,
            issuer=self._issuer(issuer) if issuer else None,
        )

    def _adopt(self, data: bytes) -> Rules:
        return remember(self.identity_path.parent, data, source="an issuer's swarm file").rules()

    def _issuer(self, key_path: Path) -> "IssuerConfig":
        from swarmnet_protocols.membership.issuer import IssuerConfig

        if self.folder is None:
            raise ConfigError(
                f"{self.file.name} needs no issuer", hint="it has no authority: leave --issuer out"
            )
        return IssuerConfig(load_key(key_path), self.folder, swarm_file.read(self.folder))


def enter(swarm: str, data_dir: Path, bootstrap: Sequence[str] = ()) -> Entry:
    """The swarm of a file, of an invite, or, once entered, of this name, for the identity that ``data_dir`` keeps.

    An invite may also stand in a file of its own: what is typed, every user of a machine can see. It is redeemed the first time;
    afterwards certificate and swarm file are in ``data_dir``. Beside the authority's key a swarm file needs no invite.

    Raises ``ConfigError`` or ``IntegrityError`` for a file that is wrong, changed or older than one used before, ``NotAuthorised`` for
    an invite that will not do, and ``Unreachable`` when no issuer is reached.
    """
    from swarmnet_protocols.membership.invites import is_invite

    if is_invite(swarm):
        return _enter_by_invite(swarm, data_dir, bootstrap)
    path = Path(swarm)
    known = None if path.exists() else find(data_dir, swarm)
    if known is not None:
        file = known
    else:
        data = swarm_file.read(path)
        if is_invite(text := data.decode(errors="replace")):
            return _enter_by_invite(text, data_dir, bootstrap)
        source = str(swarm_file.file_in(path))
        file = swarm_file.parse(data, source=source)
        if file.authority is not None:
            file = remember(data_dir, data, source=source)
            _certify_owner(file, swarm_file.file_in(path).with_name(KEY_NAME), data_dir)
    file.check_not_expired(wall_clock())
    return _entry(file, bootstrap, data_dir)


def client_network(
    swarm: str, bootstrap: Sequence[str], data_dir: Path | None = None, hosts: Sequence[PeerId] = ()
) -> Network:
    """The network of a client, which dials and is never dialled. Its identity is not that of a node of the same data directory, which may run.

    With ``hosts`` only these are used, in place of those that the swarm file trusts.

    In a swarm without members it has a new identity each time. Raises what ``enter`` raises, and ``Unreachable``
    where no peer is known to start from.
    """
    folder = (data_dir or default_data_dir()) / "client"
    entry = enter(swarm, folder, bootstrap)
    entry.check_bootstrap()
    trust = Trust(
        frozenset(hosts or entry.file.hosts), frozenset(entry.file.first_and_last), folder / GUARDS_NAME
    )
    network = replace(entry.network(LOOPBACK), trust=trust)
    return network if entry.folder else replace(network, identity_path=None)


def _entry(file: SwarmFile, bootstrap: Sequence[str], data_dir: Path) -> Entry:
    folder = folder_of(data_dir, file.swarm_id) if file.authority is not None else None
    known = tuple(dict.fromkeys((*file.bootstrap, *bootstrap)))
    return Entry(file, known, data_dir / IDENTITY_NAME, folder)


def _certify_owner(file: SwarmFile, key_path: Path, data_dir: Path) -> None:
    """With the authority's key beside the swarm file, this peer is a member in all roles, without an invite."""
    if not key_path.exists():
        return
    from swarmnet_protocols.membership.issuer import IssuerConfig
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity

    key = load_key(key_path)
    if not file.rules().believe(key.public_key, wall_clock()):
        return  # it was replaced since
    folder = folder_of(data_dir, file.swarm_id)
    peer = Identity.load_or_create(data_dir / IDENTITY_NAME).peer_id
    membership = Membership(file.rules(), peer, wall_clock, folder=folder)
    IssuerConfig(key, folder, swarm_file.read(folder)).certify(membership)


def _enter_by_invite(text: str, data_dir: Path, bootstrap: Sequence[str]) -> Entry:
    from swarmnet_protocols.membership.invites import read_invite

    now = wall_clock()
    invite = read_invite(text, now=0.0)
    folder = folder_of(data_dir, invite.grant.swarm)
    known = (*invite.bootstrap, *bootstrap)
    if (folder / swarm_file.FILE_NAME).exists():
        file = swarm_file.load(folder)
        if _has_certificate_of(invite.grant.id, file, folder, now):
            file.check_not_expired(now)
            return _entry(file, known, data_dir)
    read_invite(text, now=now)
    if not known:
        raise ConfigError(
            "the invite holds no address", hint="add one of a peer in the swarm: --bootstrap ADDR"
        )
    return _redeem(text, data_dir, known)


def _redeem(text: str, data_dir: Path, bootstrap: tuple[str, ...]) -> Entry:
    from swarmnet_protocols.joining.network import redeem
    from swarmnet_protocols.membership.invites import read_invite

    invite = replace(read_invite(text, now=wall_clock()), bootstrap=bootstrap)
    identity_path = data_dir / IDENTITY_NAME
    return _run(redeem(invite, identity_path, lambda admitted: _take(admitted, invite, data_dir)))


def _take(admitted: "Admitted", invite: "Invite", data_dir: Path) -> Entry:
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity

    source = "the swarm file that came with the certificate"
    file = swarm_file.parse(admitted.swarm_file, source=source)
    if file.swarm_id != invite.grant.swarm:
        raise IntegrityError(f"{source} is of another swarm", hint="ask for a new invite")
    if not file.rules().believe(invite.grant.signer, wall_clock()):
        raise NotAuthorised("the invite was not signed by an authorised key", hint="ask for a new invite")
    file = remember(data_dir, admitted.swarm_file, source=source)
    file.check_not_expired(wall_clock())
    folder = folder_of(data_dir, file.swarm_id)
    peer = Identity.load_or_create(data_dir / IDENTITY_NAME).peer_id
    Membership(file.rules(), peer, wall_clock, folder=folder).take_certificate(admitted.certificate)
    return _entry(file, invite.bootstrap, data_dir)


def _run(conversation: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(conversation)
    with ThreadPoolExecutor(max_workers=1) as elsewhere:  # a notebook has a loop of its own in this thread
        return elsewhere.submit(asyncio.run, conversation).result()


def _has_certificate_of(invite: bytes, file: SwarmFile, folder: Path, now: float) -> bool:
    from swarmnet_protocols.membership.certificates import MAX_CERTIFICATE_BYTES, open_certificate
    from swarmnet_protocols.membership.membership import CERTIFICATE_NAME

    try:
        with (folder / CERTIFICATE_NAME).open("rb") as stream:
            sealed = stream.read(2 * MAX_CERTIFICATE_BYTES)
        return open_certificate(sealed, rules=file.rules(), now=now).invite == invite
    except (OSError, IntegrityError, NotAuthorised):
        return False
