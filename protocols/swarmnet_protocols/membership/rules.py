"""The swarm file's rules of membership: admission mode, trusted keys, roles, models and quotas."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import ANY_ROLE, Role

MIN_LIFETIME_S = 3600
"""Shortest lifetime of a certificate, in seconds."""
MAX_LIFETIME_S = 90 * 24 * 3600
"""Longest lifetime of a certificate, in seconds."""
MAX_KEYS = 16
"""Most signing keys that a swarm file may trust, of its authority and issuers together."""


class Admission(StrEnum):
    """The rule by which peers are members."""

    OPEN = "open"
    """Every peer."""
    CERTIFICATE = "certificate"
    """Peers with a certificate."""
    ALLOW_LIST = "allow-list"
    """Peers that the swarm file lists, and peers with a certificate."""


@dataclass(frozen=True)
class Quotas:
    """Limits for each peer on each host. None lets the host decide."""

    sessions: int | None = None
    passes: int | None = None
    cache_bytes: int | None = None
    """Bytes of keys and values in the caches of its sessions."""
    adapter_bytes: int | None = None
    positions_per_s: int | None = None
    """Average positions per second, for each block of a host."""
    bytes_per_s: int | None = None
    """Average bytes per second, in each direction."""

    def to_dict(self) -> dict[str, int | None]:
        return asdict(self)


@dataclass(frozen=True)
class Rules:
    """The membership rules of a swarm."""

    swarm: bytes
    """Id of the swarm, 32 bytes."""
    admission: Admission
    keys: Mapping[bytes, float] = field(default_factory=dict)
    """Public keys that may sign certificates, grants and revocations → Unix time of their end."""
    anyone: frozenset[Role] = ANY_ROLE
    """With ``OPEN``: the roles of a peer without a certificate."""
    allow: Mapping[PeerId, frozenset[Role]] = field(default_factory=dict)
    """With ``ALLOW_LIST``: the members and their roles."""
    certificate_lifetime_s: float = 7 * 24 * 3600.0
    revocation_refresh_s: float = 30.0
    """Seconds between two comparisons of revocation lists by connected members."""
    quotas: Quotas = field(default_factory=Quotas)
    serial: int = 0
    """Serial of the swarm file; a newer file has a higher one."""
    models: frozenset[bytes] = frozenset()
    """Manifest hashes of the models that the swarm serves; empty: any model."""

    names: Mapping[str, bytes] = field(default_factory=dict)
    """Name of a model in the swarm file → manifest hash."""
    pieces_hashes: Mapping[bytes, bytes] = field(default_factory=dict)
    """Manifest hash → pieces hash (``fetching/pieces.py``)."""

    def check_model(self, name: str, manifest: bytes) -> None:
        """Raise ``NotAuthorised`` for a model that the swarm does not serve."""
        if self.models and manifest not in self.models:
            raise NotAuthorised(
                f"the swarm is not for {name}, or not for these files of it (manifest {manifest.hex()[:16]}…)",
                hint="`swarmnet swarm show` lists its models, `swarmnet model show` what is here",
            )

    @property
    def needs_certificate(self) -> bool:
        """True if every member needs a certificate."""
        return self.admission is Admission.CERTIFICATE

    def trusts(self, key: bytes, now: float) -> bool:
        """Tell whether a signature of ``key`` is valid at Unix time ``now``.

        A listed key is valid until its end. A key that is not listed was never valid, since it may
        have been stolen.
        """
        return now < self.keys.get(key, -math.inf)
