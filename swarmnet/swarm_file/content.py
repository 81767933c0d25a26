"""The content of a swarm file, the id of its swarm, and the bytes that its authority signs.

1. The id of a swarm with an authority is a hash of its name and of its first keys (the founders).
   So the file may change, with a higher ``serial``, and its keys may be replaced: each ``Rotation``
   is signed by a key that was valid before it.
2. A swarm without an authority has a random nonce. Its id is a hash of all fields but the bootstrap
   list, so no other field may change.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.membership.rules import Admission, Quotas, Rules
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.canonical_json import canonical_json
from swarmnet_protocols.wire.roles import ANY_ROLE, Role

FORMAT = 2
_ID_DOMAIN = b"swarmnet-swarm-id-2\0"
_FILE_DOMAIN = b"swarmnet-swarm-file-2\0"
_ROTATION_DOMAIN = b"swarmnet-key-rotation-1\0"


@dataclass(frozen=True)
class Rotation:
    """New authority keys, signed by one of the keys before them."""

    keys: tuple[bytes, ...]
    previous_until: datetime
    """Time until which the previous keys are valid for certificates, invites and revocations. Unix
    time 0 means that they were stolen and are not valid any more."""
    signature: bytes


@dataclass(frozen=True)
class Authority:
    """The keys that may sign for a swarm, as raw Ed25519 public keys. Issuers sign certificates,
    not the file."""

    founders: tuple[bytes, ...]
    issuers: tuple[bytes, ...] = ()
    rotations: tuple[Rotation, ...] = ()

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The public keys of the last rotation, or the founders' keys. Any one of them may sign the
        file."""
        return self.rotations[-1].keys if self.rotations else self.founders

    def has_signed_rotations(self, swarm_id: bytes) -> bool:
        """Return whether every rotation was signed by one of the keys before it."""
        from swarmnet_protocols.net.identity import verify

        keys = self.founders
        for number, rotation in enumerate(self.rotations):
            signed = rotation_bytes(swarm_id, number, rotation)
            if not any(verify(key, rotation.signature, signed) for key in keys):
                return False
            keys = rotation.keys
        return True

    def continues(self, other: "Authority") -> bool:
        """Return whether the keys equal ``other``, or continue ``other`` with more rotations."""
        return self.founders == other.founders and self.rotations[: len(other.rotations)] == other.rotations

    def trusted_keys(self) -> dict[bytes, float]:
        """Return each key that may sign certificates, with the Unix time at which this ends."""
        until: dict[bytes, float] = {}
        keys = self.founders
        for rotation in self.rotations:
            end = rotation.previous_until.timestamp()
            until |= dict.fromkeys(keys, end)
            keys = rotation.keys
        return until | dict.fromkeys((*keys, *self.issuers), math.inf)


@dataclass(frozen=True)
class ListedModel:
    """A model that the swarm serves."""

    name: str
    manifest: bytes
    """SHA-256 of the manifest, as ``swarmnet model show`` prints it."""
    pieces: bytes | None = None
    """The pieces hash of the model. Newcomers verify weights from any member with it."""


@dataclass(frozen=True)
class Policy:
    """The numbers in [policy]."""

    certificate_lifetime_s: int = 7 * 24 * 3600
    revocation_refresh_s: int = 30
    quotas: Quotas = field(default_factory=Quotas)


@dataclass(frozen=True)
class SwarmFile:
    """The content of a swarm file, without its signature. It has either an ``authority`` or a
    ``nonce`` of 16 bytes."""

    name: str
    serial: int
    created: datetime
    not_after: datetime | None
    bootstrap: tuple[str, ...]
    mdns: bool = False
    """True if peers announce themselves in their local networks, and find others there."""
    nonce: bytes | None = None
    authority: Authority | None = None
    admission: Admission = Admission.OPEN
    anyone: frozenset[Role] = ANY_ROLE
    """Roles of a peer without a certificate, with open admission."""
    allow: Mapping[PeerId, frozenset[Role]] = field(default_factory=dict)
    models: tuple[ListedModel, ...] = ()
    policy: Policy = Policy()
    hosts: tuple[PeerId, ...] = ()
    """The only hosts that clients use; empty: all hosts."""
    first_and_last: tuple[PeerId, ...] = ()
    """Hosts that clients prefer as first and last hop; empty: each client chooses entry guards
    itself."""

    @property
    def is_open(self) -> bool:
        """True if peers without a certificate may take part."""
        return self.admission is Admission.OPEN

    @property
    def swarm_id(self) -> bytes:
        """The id of the swarm, 32 bytes."""
        if self.authority is None:
            fields = self._fields()
            del fields["bootstrap"]
        else:
            fields = {"name": self.name, "founders": [key.hex() for key in self.authority.founders]}
        return hashlib.sha256(_ID_DOMAIN + canonical_json(fields)).digest()

    def signed_bytes(self) -> bytes:
        """Return the bytes that the authority signs: all fields."""
        return _FILE_DOMAIN + canonical_json(self._fields())

    def is_signed_by_authority(self, signature: bytes) -> bool:
        from swarmnet_protocols.net.identity import verify

        keys = self.authority.keys if self.authority else ()
        return any(verify(key, signature, self.signed_bytes()) for key in keys)

    def check_not_expired(self, now: float) -> None:
        """Raise ``ConfigError`` if the file has expired at ``now`` (Unix time)."""
        if self.not_after is not None and now >= self.not_after.timestamp():
            raise ConfigError(
                f"the swarm file of {self.name!r} expired on {self.not_after:%Y-%m-%d}",
                hint="get the current swarm.toml from the person who runs the swarm, or check the clock of this machine",
            )

    def rules(self) -> Rules:
        """Return the membership rules of the swarm."""
        return Rules(
            swarm=self.swarm_id,
            admission=self.admission,
            keys=self.authority.trusted_keys() if self.authority else {},
            anyone=self.anyone,
            allow=self.allow,
            certificate_lifetime_s=self.policy.certificate_lifetime_s,
            revocation_refresh_s=self.policy.revocation_refresh_s,
            quotas=self.policy.quotas,
            serial=self.serial,
            models=frozenset(model.manifest for model in self.models),
            names={model.name: model.manifest for model in self.models},
            pieces_hashes={model.manifest: model.pieces for model in self.models if model.pieces is not None},
        )

    def _fields(self) -> dict[str, object]:
        authority = self.authority
        trust = {"hosts": list(self.hosts), "first_and_last": list(self.first_and_last)}
        return {
            **({"trust": trust} if any(trust.values()) else {}),
            **({"mdns": True} if self.mdns else {}),
            "format": FORMAT,
            "name": self.name,
            "serial": self.serial,
            "created": self.created.isoformat(),
            "not_after": self.not_after.isoformat() if self.not_after else None,
            "bootstrap": list(self.bootstrap),
            "nonce": self.nonce.hex() if self.nonce else None,
            "founders": [key.hex() for key in authority.founders] if authority else [],
            "issuers": [key.hex() for key in authority.issuers] if authority else [],
            "rotations": [_rotation_fields(each) for each in authority.rotations] if authority else [],
            "admission": self.admission,
            "anyone": sorted(self.anyone),
            "allow": {peer: sorted(roles) for peer, roles in self.allow.items()},
            "models": [
                [model.name, model.manifest.hex(), *([] if model.pieces is None else [model.pieces.hex()])]
                for model in self.models
            ],
            "certificate_lifetime_s": self.policy.certificate_lifetime_s,
            "revocation_refresh_s": self.policy.revocation_refresh_s,
            "quotas": self.policy.quotas.to_dict(),
        }


def rotation_bytes(swarm_id: bytes, number: int, rotation: Rotation) -> bytes:
    """Return the bytes that an old key signs to make a rotation valid. ``number`` counts rotations
    from 0."""
    fields = {"swarm": swarm_id.hex(), "number": number} | _rotation_fields(rotation)
    del fields["signature"]
    return _ROTATION_DOMAIN + canonical_json(fields)


def _rotation_fields(rotation: Rotation) -> dict[str, object]:
    return {
        "keys": [key.hex() for key in rotation.keys],
        "previous_until": rotation.previous_until.isoformat(),
        "signature": rotation.signature.hex(),
    }
