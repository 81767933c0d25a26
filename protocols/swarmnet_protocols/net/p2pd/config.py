"""The options of a libp2p peer, whichever program runs it."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.timing import Timing

MAX_MEMORY_BYTES = 256 << 20
"""Bytes of memory that trigger a restart of p2pd. It uses 40 to 60 MB. It keeps data of
disconnected peers for up to an hour, and nothing else limits that."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The most connections.

    All machines of a home or campus share one host address. 512 connections take about 60 MB in
    p2pd.
    """

    per_host: int = 64
    per_subnet: int = 256
    total: int = 512


@dataclass(frozen=True)
class P2pdConfig:
    """The options of a libp2p peer."""

    identity_path: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...] = ()
    """Addresses to publish instead of the addresses that p2pd finds."""
    bootstrap: tuple[str, ...] = ()
    """Peers to connect to at the start."""
    named: tuple[str, ...] = ()
    """Other addresses that the owner gave. They are dialled without a check, as ``bootstrap``
    is."""
    require_bootstrap: bool = False
    """Fail with ``Unreachable`` if no bootstrap peer answers."""
    link: LinkLimiter = field(default_factory=LinkLimiter)
    """Counts the bytes on the network link and limits their rate."""
    only_dials: bool = False
    """This peer is never dialled. Several processes may then use one identity."""
    timing: Timing = field(default_factory=Timing)
    max_daemon_bytes: int = MAX_MEMORY_BYTES
    """Limit on p2pd's memory in bytes. Above it, unknown peers are disconnected. If that does not
    help, p2pd is restarted."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    step_aside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    """Context around a restart of p2pd. On entry, sessions move to other hosts."""
