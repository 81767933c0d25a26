"""Starting p2pd: flags and environment, ports, memory."""

import asyncio
import contextlib
import errno
import importlib.resources
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.machine.platform import APART, reclaim_port
from swarmnet_protocols.net.limits.resource_limits import SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.p2pd.config import P2pdConfig

_log = logging.getLogger(__name__)

OPEN_FILES = 2 * SYSTEM_LIMITS[Resource.INBOUND_STREAMS]
"""Open files that this process and p2pd may have each. Each stream takes one in both, and the usual
limit of 1024 is below ``SYSTEM_LIMITS``."""

_STARTUP_S = 20.0
_IDLE_TIMEOUT = "60s"
MIN_MEMORY_BYTES = 128 << 20
_GO_SHARE = 3 / 8
"""GOMEMLIMIT of p2pd, as a share of the memory limit. Above GOMEMLIMIT, Go collects garbage more
often, so only memory in use, not garbage, makes p2pd reach the limit."""
FLAGS: dict[str, object] = {
    "relay": 0,
    "relayService": 0,
    "relayDiscovery": 0,
    "autonat": 0,
    "autoRelay": 0,
    "idleTimeout": _IDLE_TIMEOUT,
}
"""The flags of p2pd. Two are left out:

- ``dht``, because libp2p's Kademlia stores records of any peer.
- ``connManager``, because it closes connections in use (``connection_limits.py`` replaces it).

Relays, AutoNAT and hole punching are off, because ``swarmnet_protocols.reachability`` replaces
them. A relay starts anyway: see ``REFUSED`` in ``daemon.py``."""


def check_free(address: str) -> None:
    """Raise ``ConfigError`` if the port of ``address`` is in use.

    p2pd would share the port with another p2pd (SO_REUSEPORT), and connections would reach either
    of them.
    """
    match address.split("/"):
        case ["", ("ip4" | "ip6") as family, host, ("tcp" | "udp") as kind, port, *_] if (
            port.isascii() and port.isdigit() and port != "0"
        ):
            pass
        case _:
            return
    with socket.socket(
        socket.AF_INET if family == "ip4" else socket.AF_INET6,
        socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM,
    ) as probe:
        if kind == "tcp":
            reclaim_port(probe)
        if family == "ip6":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, OverflowError) as error:
            in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            hint = f"is another node running? choose another port: --listen /{family}/{host}/{kind}/0"
            raise ConfigError(
                f"cannot listen on {address}: {'port ' + port + ' is in use' if in_use else error}", hint=hint
            ) from error


def binary() -> Path:
    """Return the p2pd binary of hivemind's wheel, which may be missing."""
    import hivemind.hivemind_cli

    return Path(str(importlib.resources.files(hivemind.hivemind_cli) / "p2pd"))


async def spawn(config: P2pdConfig, control_path: Path) -> asyncio.subprocess.Process:
    """Start p2pd and wait until it is ready. Raises ``ConfigError`` if it cannot start as
    configured.
    """
    loopback = all("/127.0.0.1/" in address or "/::1/" in address for address in config.listen)
    arguments = FLAGS | {
        "listen": f"/unix{control_path}",
        "id": config.identity_path,
        "hostAddrs": ",".join(config.listen),
        "announceAddrs": ",".join(config.announce),
        "natPortMap": int(not (config.only_dials or loopback)),
    }
    path = binary()
    try:
        process = await asyncio.create_subprocess_exec(
            str(path),
            *(f"-{name}={value}" for name, value in arguments.items() if value != ""),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ
            | {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": str(int(config.max_daemon_bytes * _GO_SHARE))},
            **APART,  # Ctrl-C would reach p2pd before this process has closed its streams
        )
    except OSError as error:
        raise SwarmnetError(
            f"cannot start {path}: {error.strerror}", hint="pip install --force-reinstall hivemind"
        ) from error
    try:
        async with asyncio.timeout(_STARTUP_S):
            await _wait_ready(process)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return process


async def _wait_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    reason = ""
    while line := await process.stdout.readline():
        text = line.decode(errors="replace").strip()
        if text.startswith("Peer ID:"):
            return
        if not reason.startswith("panic:"):
            reason = text[:500]
    raise ConfigError(f"p2pd did not start: {reason}", hint="check --listen and --announce")


async def log_output(process: asyncio.subprocess.Process) -> None:
    """Log what p2pd prints until it ends, so that it never blocks on a full pipe."""
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    while chunk := await process.stdout.read(1 << 16):
        _log.debug("p2pd: %s", chunk.decode(errors="replace").rstrip())


def listening_at(listen: str, addresses: Sequence[str]) -> str:
    """Return ``listen`` with the chosen port instead of 0, from the ``addresses`` p2pd listens
    on."""
    match listen.split("/"):
        case ["", family, host, kind, "0", *rest]:
            for address in addresses:
                match address.split("/"):
                    case ["", other_family, _, other_kind, port, *others] if (
                        (family, kind) == (other_family, other_kind)
                        and "p2p-circuit" not in others
                        and others[: len(rest)] == rest
                    ):
                        return "/".join(["", family, host, kind, port, *rest])
    return listen
