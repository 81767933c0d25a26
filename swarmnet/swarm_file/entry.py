"""Entering a swarm by its file, an invite or its name. Each gives an ``Entry``.

A data directory stores one folder for each swarm with an authority (``swarm_dir``). It has the
newest swarm file that was used, the certificate, the revocations, the addresses of known peers, and
an issuer's database.
"""

import os
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
from swarmnet.swarm_file.keys import KEY_NAME
from swarmnet.swarm_file.known_peers import KnownPeers, read_known_peers, write_known_peers
from swarmnet.swarm_file.local_peer import (
    LocalPeer,
    certify_owner,
    owner_files,
    redeem_invite,
    renew_ended,
    share_certificate,
)
from swarmnet.swarm_file.stored import cannot_write, find_swarm, store_file, stored_names, swarm_dir
from swarmnet_protocols.errors import ConfigError, NotAuthorised, Unreachable
from swarmnet_protocols.joining.network import Network, Trust, choose_transport, client_listen
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.rules import Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.p2pd.config import P2pdConfig

if TYPE_CHECKING:
    from swarmnet_protocols.joining.own_key import OwnerFiles

GUARDS_NAME = "guards"


@dataclass(frozen=True)
class Entry:
    """A swarm that a data directory may enter: the verified swarm file, bootstrap addresses, and
    the peer's identity."""

    file: SwarmFile
    bootstrap: tuple[str, ...]
    """Addresses in the swarm file, then addresses that the owner names."""
    peer: LocalPeer
    source: Path | None = None
    """The swarm file that was given. It is read again when it changes; None for an invite or a
    name."""
    known: KnownPeers = field(default_factory=KnownPeers)
    """Peers of earlier connections."""

    @property
    def folder(self) -> Path | None:
        """``swarm_dir`` with the certificate and the revocations; None for a swarm without an
        authority."""
        return swarm_dir(self.peer.folder, self.file.swarm_id) if self.file.authority else None

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
        folder = self.folder
        return Network(
            self.file.rules(),
            P2pdConfig(
                self.peer.identity_path,
                listen=tuple(listen),
                announce=tuple(announce),
                bootstrap=self.bootstrap,
                named=self.known.named,
            ),
            known=(*self.known.named, *self.known.seen),
            remember=self._remember if folder else None,
            mdns=self.file.mdns,
            membership_folder=folder,
            adopt=self._adopt if folder else None,
            swarm_file=partial(swarm_file.read, folder) if folder else None,
            owner=self._owner(issuer),
            machine=partial(self.peer.machine, self.file.swarm_id) if folder else None,
        )

    def _remember(self, answered: Sequence[str]) -> None:
        """Store the addresses of peers that are in the swarm, for the next connection. Raises
        ``OSError``."""
        if self.folder is not None:
            write_known_peers(self.folder, read_known_peers(self.folder).after(answered))

    def _adopt(self, data: bytes) -> Rules:
        return store_file(self.peer.folder, data, source="a newer swarm file").rules()

    def _owner(self, issuer: Path | None) -> "OwnerFiles | None":
        if issuer is None:
            if self.folder is None or self.source is None:
                return None
            return owner_files(self.source, self.source.with_name(KEY_NAME), self.peer)
        if self.folder is None:
            raise ConfigError(
                f"{self.file.name} has no authority and admits everybody", hint="leave out --issuer"
            )
        source = self.source or issuer.with_name(FILE_NAME)
        source = source if source.exists() else self.folder / FILE_NAME
        return owner_files(source, issuer, self.peer, issued=self.folder)


def enter(swarm: str, data_dir: Path, bootstrap: Sequence[str] = (), *, as_client: bool = False) -> Entry:
    """Return the entry to a swarm, for the node in ``data_dir``, or for its client. ``swarm`` is
    one of:

    1. the path of a swarm file. If the authority's key lies next to it, this peer certifies itself;
    2. an invite, or the path of a file that holds an invite, because all users of a machine can
       read command lines. The first use redeems it and stores the certificate and the swarm file;
    3. the name or the id of a swarm that a peer of this machine has entered before.

    The node and the client share a certificate, so an invite of one use admits both. A certificate
    that ended while this machine was away is renewed.

    Raises ``ConfigError`` or ``IntegrityError`` for a file that is invalid, changed, expired or
    older than the stored file, ``NotAuthorised`` for an invalid invite, and ``Unreachable`` if no
    issuer can be reached to redeem it.
    """
    from swarmnet_protocols.membership.invites import is_invite

    peer = LocalPeer(data_dir, as_client)
    if is_invite(swarm):
        return _enter_by_invite(swarm, peer, bootstrap)
    path = Path(swarm)
    if not swarm_file.file_in(path).exists():  # a folder may have the name of a swarm
        return _enter_by_name(swarm, peer, bootstrap)
    data = swarm_file.read(path)
    if is_invite(text := data.decode(errors="replace")):
        return _enter_by_invite(text, peer, bootstrap)
    source = swarm_file.file_in(path).absolute()
    file = swarm_file.parse(data, source=str(source))
    if file.authority is not None:
        file = store_file(peer.folder, data, source=str(source))
        certify_owner(file, owner_files(source, source.with_name(KEY_NAME), peer), peer)
    return _returning(file, bootstrap, peer, source)


def check_known(swarm: str, data_dir: Path) -> None:
    """Raise ``ConfigError`` unless ``swarm`` is a swarm file, its directory, or the name of a swarm
    that a peer of this machine has entered."""
    peer = LocalPeer(data_dir, False)
    is_given = swarm_file.file_in(Path(swarm)).exists()
    if not is_given and not any(find_swarm(each.folder, swarm) for each in (peer, peer.other)):
        raise _unknown(swarm, peer)


def _unknown(swarm: str, peer: LocalPeer) -> ConfigError:
    names = sorted({*stored_names(peer.folder), *stored_names(peer.other.folder)})
    known = f"name one that this machine has joined ({', '.join(names)}), " if names else ""
    return ConfigError(
        f"{swarm} is neither a swarm file, nor its directory, nor a swarm that this machine has joined",
        hint=f"{known}create a swarm with `swarmnet swarm create NAME --out DIR`, or get the file from the person who runs it",
    )


def client_network(
    swarm: str, bootstrap: Sequence[str], data_dir: Path | None = None, hosts: Sequence[PeerId] = ()
) -> Network:
    """Return the configuration of a client's connection. A client dials and is not dialled.

    In a swarm without an authority its identity is new each time. ``hosts``: the only hosts to use,
    instead of the hosts that the swarm file trusts. Raises the errors of ``enter``, and
    ``Unreachable`` if no bootstrap peer is known.
    """
    entry = enter(swarm, data_dir or default_data_dir(), bootstrap, as_client=True)
    entry.check_bootstrap()
    trust = Trust(
        frozenset(hosts or entry.file.hosts),
        frozenset(entry.file.first_and_last),
        entry.peer.folder / GUARDS_NAME,
    )
    network = entry.network(client_listen(entry.addresses))
    return replace(network, trust=trust, is_anonymous=entry.folder is None)


def client_of(node: Entry, addresses: Sequence[str]) -> Network:
    """Return the configuration of the client on the machine of a running node, which listens at
    ``addresses``. Raises the errors of ``enter``."""
    swarm = str(node.source) if node.source is not None else node.file.swarm_id.hex()
    return client_network(swarm, [*node.bootstrap, *addresses], node.peer.data_dir)


def _entry(file: SwarmFile, bootstrap: Sequence[str], peer: LocalPeer, source: Path | None = None) -> Entry:
    """Return the entry, and store the addresses in ``bootstrap`` for the next one."""
    entry = Entry(file, _distinct(file.bootstrap, bootstrap), peer, source)
    if (folder := entry.folder) is None:
        return entry
    known = read_known_peers(folder)
    if not set(bootstrap) <= set(known.named):
        known = known.named_too(bootstrap)
        _store_known(folder, known)
    return replace(entry, known=known)


def _store_known(folder: Path, known: KnownPeers) -> None:
    try:
        write_known_peers(folder, known)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _returning(
    file: SwarmFile, bootstrap: Sequence[str], peer: LocalPeer, source: Path | None = None
) -> Entry:
    """Return the entry of a peer that may have been away: its certificate may have ended."""
    file.check_not_expired(wall_clock())
    entry = _entry(file, bootstrap, peer, source)
    if file.authority is None or share_certificate(file, peer):
        return entry
    renew_ended(file, peer, _distinct(entry.bootstrap, entry.known.named), entry.known.seen)
    return entry


def _distinct(*lists: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(lists)))


def _enter_by_name(name: str, peer: LocalPeer, bootstrap: Sequence[str]) -> Entry:
    """Return the entry to a swarm that this peer, or the other peer of this machine, has
    entered."""
    if (file := find_swarm(peer.folder, name)) is not None:
        return _returning(file, bootstrap, peer)
    if (file := find_swarm(peer.other.folder, name)) is None:
        if len(Path(name).parts) > 1 or Path(name).suffix:
            swarm_file.read(Path(name))  # raises: there is no such file
        raise _unknown(name, peer)
    folder = swarm_dir(peer.other.folder, file.swarm_id)
    known = read_known_peers(folder).named_too(read_addresses(peer.data_dir))
    file = store_file(peer.folder, swarm_file.read(folder))
    _store_known(swarm_dir(peer.folder, file.swarm_id), known)
    entry = _returning(file, bootstrap, peer)
    if file.rules().needs_certificate and not share_certificate(file, peer):
        raise NotAuthorised(
            f"another peer of this machine is a member of {file.name}, but its certificate does not name this one",
            hint=f"give this command an invite too: --swarm INVITE. An invite that only this peer can use: swarmnet swarm approve {peer.peer_id}",
        )
    return entry


def _enter_by_invite(text: str, peer: LocalPeer, bootstrap: Sequence[str]) -> Entry:
    from swarmnet_protocols.membership.invites import read_invite

    invite = read_invite(text, now=0.0)
    grant, known = invite.grant, (*invite.bootstrap, *bootstrap)
    folders = [swarm_dir(each.folder, grant.swarm) for each in (peer, peer.other)]
    entered = next((each for each in folders if (each / FILE_NAME).exists()), None)
    if entered is not None:
        file = store_file(peer.folder, swarm_file.read(entered))
        has_ended = wall_clock() >= grant.terms.not_after
        if share_certificate(file, peer, grant.id) or (has_ended and peer.sealed_certificate(file.swarm_id)):
            return _returning(file, known, peer)
    return _entry(redeem_invite(text, peer, known), known, peer)
