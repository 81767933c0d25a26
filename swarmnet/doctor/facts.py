"""What ``swarmnet doctor`` looks at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet_protocols.net.probes import Probed


@dataclass(frozen=True)
class Disk:
    purpose: str
    path: Path
    free_bytes: int
    error: str = ""
    """Why it cannot be written; empty if it can."""


@dataclass(frozen=True)
class Memory:
    available_bytes: int
    limit_bytes: int | None = None
    """Memory limit of the container or unit this runs in."""


@dataclass(frozen=True)
class Device:
    gpu: str = ""
    """As its driver calls it; empty if there is none."""
    usable: bool = False
    """Whether torch can compute on it."""


@dataclass(frozen=True)
class SecretFile:
    path: Path
    mode: int
    is_ours: bool


@dataclass(frozen=True)
class Listening:
    """An address to listen on, and why that is not possible; empty if it is."""

    address: str
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Swarm:
    """What is known here of a swarm, or, in ``error`` and ``hint``, why nothing is."""

    name: str
    error: str = ""
    hint: str = ""
    not_after: float | None = None
    """Unix time at which the swarm file ends."""
    needs_certificate: bool = False
    certificate_error: str = ""
    certificate_until: float | None = None


@dataclass(frozen=True)
class Peer:
    """A bootstrap peer, and what it saw of this machine, or why it did not answer."""

    address: str
    probed: Probed | None = None
    error: str = ""


@dataclass(frozen=True)
class Facts:
    now: float
    """Unix time by this machine's clock."""
    data_dir: Path
    python: tuple[int, int]
    installed: Mapping[str, str | None]
    """Version of each distribution that matters; None if it is not there."""
    disks: Sequence[Disk]
    memory: Memory
    device: Device
    compiler: str
    """Path of the C compiler; empty if there is none."""
    secrets: Sequence[SecretFile] = ()
    node: str = ""
    """What the node of this data directory is doing; empty if none runs."""
    node_warning: str = ""
    """What it says should be seen to."""
    listening: Sequence[Listening] = ()
    swarm: Swarm | None = None
    peers: Sequence[Peer] = ()
    ports: Sequence[int] = ()
    """The TCP ports that peers were asked to dial."""
    not_gathered: Mapping[str, str] = field(default_factory=dict)
    """What could not be found out, and why."""
