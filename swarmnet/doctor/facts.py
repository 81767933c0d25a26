"""The facts that the doctor collects and judges. Absent ones are empty text or None."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet_protocols.reachability.dial_back import Probed


@dataclass(frozen=True)
class Disk:
    """The disk that holds ``path``."""

    purpose: str
    path: Path
    free_bytes: int
    error: str = ""
    """The reason why ``path`` cannot be written; empty if it can."""
    is_read_only: bool = False
    """True if its file system is mounted read-only, so that no permission helps."""


@dataclass(frozen=True)
class Memory:
    """Free memory in bytes."""

    available_bytes: int
    limit_bytes: int | None = None
    """Free memory below the limit of this container or systemd unit; None without a limit."""


@dataclass(frozen=True)
class Device:
    """The GPU of this machine."""

    gpu: str = ""
    """The name that the driver gives; empty without a GPU."""
    usable: bool = False
    """True if torch can compute on it."""


@dataclass(frozen=True)
class SecretFile:
    """A key file, or the data directory that holds the keys."""

    path: Path
    mode: int
    is_ours: bool


@dataclass(frozen=True)
class ListenAddress:
    """A multiaddr, and why a node cannot listen on it; ``error`` is empty if it can."""

    address: str
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class SwarmFacts:
    """The swarm file and the certificate of this machine. ``error`` and ``hint`` say why the file
    cannot be used."""

    name: str
    error: str = ""
    hint: str = ""
    not_after: float | None = None
    """Unix time at which the swarm file expires."""
    mdns: bool = False
    """True if peers find each other in local networks."""
    needs_certificate: bool = False
    certificate_error: str = ""
    """The reason why this machine has no valid certificate. Empty if it has one, or needs none."""
    certificate_until: float | None = None
    """Unix time at which the certificate expires."""


@dataclass(frozen=True)
class BootstrapPeer:
    """A bootstrap peer: what it answered about this machine, or in ``error`` why it did not
    answer."""

    address: str
    probed: Probed | None = None
    error: str = ""


@dataclass(frozen=True)
class ModelFiles:
    """A model, and the memory that its weights take on a CPU."""

    name: str
    memory_bytes: int = 0
    """Bytes of all weights; 0 if the headers do not say."""
    notice: str = ""
    """The reason why the weights take more memory than their files; empty if they do not."""
    error: str = ""
    """The reason why the model cannot be used; empty if it can."""
    hint: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that was collected."""

    now: float
    """Unix time by this machine's clock."""
    data_dir: Path
    python: tuple[int, int]
    installed: Mapping[str, str | None]
    """Version of each package in ``checks.TESTED``; None if it is not installed."""
    disks: Sequence[Disk]
    memory: Memory
    device: Device
    kernels: str
    """The source of compiled code: ``wheel``, the path of a C compiler, or empty."""
    target: str = ""
    """The best set of instructions that this processor has for compiled code."""
    model: ModelFiles | None = None
    """None unless the user asks about one."""
    secrets: Sequence[SecretFile] = ()
    node: str = ""
    """State of the node that uses this data directory; empty if none runs."""
    node_warning: str = ""
    """A warning in the status of that node."""
    node_reached: str = ""
    """The way in which other peers reach that node; empty if none runs or it does not know."""
    node_advice: str = ""
    """A change by the owner that lets other peers reach the node directly; empty if they do."""
    listening: Sequence[ListenAddress] = ()
    swarm: SwarmFacts | None = None
    peers: Sequence[BootstrapPeer] = ()
    local_peers: int = 0
    """Peers of the swarm that mDNS found in the local network, without this machine's node."""
    ports: Sequence[int] = ()
    """The TCP ports that peers were asked to dial."""
    not_gathered: Mapping[str, str] = field(default_factory=dict)
    """The facts that could not be collected, with the reason."""
