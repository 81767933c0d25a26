"""Certificates of the two peers of this machine: its node, and its client.

A data directory has a node, and in its folder ``client`` a client, which is another peer because
both may run at once. One certificate names both. Each has its own folder of the swarm:

1. Whichever enters first redeems the invite for both.
2. The other copies the certificate, so the two spend one use of the invite.
3. A certificate that ended while the machine was away is renewed before the swarm is entered.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet import swarm_file
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.keys import load_key
from swarmnet.swarm_file.stored import cannot_write, store_file, swarm_dir
from swarmnet_protocols.errors import ConfigError, IntegrityError, NotAuthorised
from swarmnet_protocols.machine.aio import run_apart
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.net import PeerId

if TYPE_CHECKING:
    from swarmnet_protocols.joining.own_key import OwnerFiles
    from swarmnet_protocols.membership.certificates import Certificate
    from swarmnet_protocols.membership.invites import Invite
    from swarmnet_protocols.membership.signed import Signer
    from swarmnet_protocols.wire import membership_pb2 as pb

IDENTITY_NAME = "identity.key"
CLIENT_DIR = "client"
REVOCATIONS_NAME = "revocations"
"""Name of the owner's revocation list, next to the swarm file."""


@dataclass(frozen=True)
class LocalPeer:
    """The node of a data directory, or its client."""

    data_dir: Path
    is_client: bool = False

    @property
    def folder(self) -> Path:
        return self.data_dir / CLIENT_DIR if self.is_client else self.data_dir

    @property
    def identity_path(self) -> Path:
        return self.folder / IDENTITY_NAME

    @property
    def peer_id(self) -> PeerId:
        """The peer id. Its key is created if missing."""
        from swarmnet_protocols.net.identity import Identity

        return Identity.load_or_create(self.identity_path).peer_id

    @property
    def other(self) -> "LocalPeer":
        """The other peer of this machine."""
        return LocalPeer(self.data_dir, not self.is_client)

    def machine(self, swarm: bytes) -> "pb.Machine":
        """Return the message that asks for a certificate for both peers."""
        from swarmnet_protocols.membership.certificates import machine_of
        from swarmnet_protocols.net.identity import Identity

        node, client = (self.other, self) if self.is_client else (self, self.other)
        return machine_of(Identity.load_or_create(node.identity_path), client.peer_id, swarm)

    def sealed_certificate(self, swarm: bytes) -> bytes:
        """Return the stored certificate for a swarm; empty without one."""
        from swarmnet_protocols.membership.certificates import MAX_CERTIFICATE_BYTES
        from swarmnet_protocols.membership.membership import CERTIFICATE_NAME

        with suppress(OSError), (swarm_dir(self.folder, swarm) / CERTIFICATE_NAME).open("rb") as stream:
            return stream.read(2 * MAX_CERTIFICATE_BYTES)
        return b""

    def certificate(self, file: SwarmFile) -> "Certificate | None":
        """Return the stored certificate if it is valid now, for any peer."""
        from swarmnet_protocols.membership.certificates import open_certificate

        try:
            sealed = self.sealed_certificate(file.swarm_id)
            return open_certificate(sealed, rules=file.rules(), now=wall_clock())
        except (IntegrityError, NotAuthorised):
            return None


def owner_files(source: Path, key_path: Path, peer: LocalPeer, *, issued: Path | None = None) -> "OwnerFiles":
    """Return the files of an owner: the swarm file ``source``, the revocations next to it, and the
    key, if it exists. With a folder ``issued`` the key must exist."""
    from swarmnet_protocols.joining.own_key import OwnerFiles
    from swarmnet_protocols.membership.revocations import MAX_LIST_BYTES

    def key() -> "Signer | None":
        return load_key(key_path) if issued is not None or key_path.exists() else None

    def revocations() -> bytes:
        try:
            with source.with_name(REVOCATIONS_NAME).open("rb") as stream:
                return stream.read(2 * MAX_LIST_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ConfigError(
                f"cannot read the revocations next to {source}: {error.strerror}", hint="check its mode"
            ) from error

    client = PeerId("") if peer.is_client else peer.other.peer_id
    paths = (source, source.with_name(REVOCATIONS_NAME), key_path)
    return OwnerFiles(partial(swarm_file.read, source), revocations, key, client, issued, paths)


def certify_owner(file: SwarmFile, owner: "OwnerFiles", peer: LocalPeer) -> None:
    """Certify ``peer`` in all roles if the owner's key is on this machine."""
    from swarmnet_protocols.membership.membership import Membership

    if owner.key() is not None:
        folder = swarm_dir(peer.folder, file.swarm_id)
        owner.certify(Membership(file.rules(), peer.peer_id, wall_clock, folder=folder))


def share_certificate(file: SwarmFile, peer: LocalPeer, invite: bytes | None = None) -> bool:
    """Return whether ``peer`` has a valid certificate, if need be after copying that of the other
    peer of this machine. With ``invite``, only a certificate for that invite counts."""
    from swarmnet_protocols.membership.membership import CERTIFICATE_NAME

    for holder in (peer, peer.other):
        certificate = holder.certificate(file)
        if certificate is None or not certificate.roles_of(peer.peer_id):
            continue
        if invite is not None and certificate.invite != invite:
            continue
        if holder is not peer:
            folder = swarm_dir(peer.folder, file.swarm_id)
            try:
                write_whole(folder / CERTIFICATE_NAME, holder.sealed_certificate(file.swarm_id))
            except OSError as error:
                raise cannot_write(folder, error) from error
        return True
    return False


def redeem_invite(text: str, peer: LocalPeer, addresses: Sequence[str]) -> SwarmFile:
    """Exchange an invite for a certificate and the swarm file, store both, and return the file."""
    from swarmnet_protocols.joining.errands import redeem
    from swarmnet_protocols.membership.invites import read_invite

    invite = replace(read_invite(text, now=wall_clock()), bootstrap=tuple(addresses))
    swarm = invite.grant.swarm
    accept = partial(_store_admission, peer=peer, swarm=swarm, check=partial(_check_signer, invite))
    return run_apart(lambda: redeem(invite, peer.identity_path, peer.machine(swarm), accept))


def renew_ended(file: SwarmFile, peer: LocalPeer, named: Sequence[str], seen: Sequence[str]) -> None:
    """Renew the certificate of ``peer`` if it ended not too long ago, at the addresses that the
    owner ``named`` and those of peers ``seen``. Raises what ``request_admission`` raises."""
    from swarmnet_protocols.joining.admission import renewal
    from swarmnet_protocols.joining.errands import Whereabouts, ask_issuers
    from swarmnet_protocols.membership.certificates import RENEWABLE_S, open_certificate

    sealed = peer.sealed_certificate(file.swarm_id)
    try:
        certificate = open_certificate(sealed, rules=file.rules(), now=wall_clock(), ended_s=RENEWABLE_S)
    except (IntegrityError, NotAuthorised):
        return
    if wall_clock() < certificate.not_after:
        return
    request = renewal(sealed, peer.machine(file.swarm_id))
    accept = partial(_store_admission, peer=peer, swarm=file.swarm_id)
    where = Whereabouts(file.swarm_id, tuple(named), tuple(seen), mdns=file.mdns)
    run_apart(lambda: ask_issuers(request, where, peer.identity_path, accept))


def _check_signer(invite: "Invite", file: SwarmFile) -> None:
    if not file.rules().trusts(invite.grant.signer, wall_clock()):
        raise NotAuthorised("the invite was not signed by an authorised key", hint="ask for a new invite")


def _store_admission(
    admitted: "pb.Admitted",
    peer: LocalPeer,
    swarm: bytes,
    check: Callable[[SwarmFile], None] = lambda _: None,
) -> SwarmFile:
    """Verify and store the swarm file and the certificate that an issuer returned."""
    from swarmnet_protocols.membership.membership import Membership

    source = "the swarm file that came with the certificate"
    file = swarm_file.parse(admitted.swarm_file, source=source)
    if file.swarm_id != swarm:
        raise IntegrityError(f"{source} belongs to another swarm", hint="ask for a new invite")
    check(file)
    file = store_file(peer.folder, admitted.swarm_file, source=source)
    file.check_not_expired(wall_clock())
    folder = swarm_dir(peer.folder, file.swarm_id)
    Membership(file.rules(), peer.peer_id, wall_clock, folder=folder).replace_certificate(
        admitted.certificate
    )
    return file
