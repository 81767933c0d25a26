"""Starting p2pd: its flags and environment, its ports, its memory."""

import asyncio
import contextlib
import errno
import importlib.resources
import logging
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.net.resources import SYSTEM_LIMITS, Resource

_log = logging.getLogger(__name__)

OPEN_FILES = 2 * SYSTEM_LIMITS[Resource.INBOUND_STREAMS]
"""Every stream is a descriptor, here and in p2pd; the usual limit of 1024 is less than what peers may open."""

_STARTUP_S = 20.0
_IDLE_TIMEOUT = "60s"
MAX_MEMORY_BYTES = 256 << 20
"""p2pd takes 40 to 60 MB at work. What it keeps of peers that have left, up to an hour, has no other bound than a restart."""
MIN_MEMORY_BYTES = 128 << 20
_GO_SHARE = 3 / 8
"""Of the limit, from which on Go's garbage collector works harder, so that only what is really held reaches the limit."""
RELAY_RESERVATIONS, RELAY_CIRCUITS, RELAY_BUFFER_BYTES = 64, 8, 16 << 10
"""A relay buffers so much each way of a circuit, and each peer takes part in so many: 16 MiB in all. p2pd's own defaults add up to 64 GiB."""
FLAGS: dict[str, object] = {
    "relay": 1,
    "relayMaxReservations": RELAY_RESERVATIONS,
    "relayMaxCircuits": RELAY_CIRCUITS,
    "relayBufferSize": RELAY_BUFFER_BYTES,
    "relayDiscovery": 0,  # it would ask the Kademlia
    "idleTimeout": _IDLE_TIMEOUT,
}
"""No ``dht`` but as a client: libp2p's own Kademlia keeps whatever an outsider stores. No ``connManager``: it ends connections at work (``p2pd_guard.py``)."""


@dataclass(frozen=True)
class DaemonConfig:
    identity_path: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    relays: tuple[str, ...]
    max_memory_bytes: int = MAX_MEMORY_BYTES


def allow_open_files() -> None:
    """Have this process, and what it starts, open as many files as peers may open streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_free(address: str) -> None:
    """Raise ``ConfigError`` unless p2pd could listen on ``address`` alone.

    p2pd itself would share a port with another p2pd (SO_REUSEPORT), and connections would reach either.
    """
    match address.split("/"):
        case ["", ("ip4" | "ip6") as family, host, ("tcp" | "udp") as kind, port, *_] if (
            port.isdigit() and port != "0"
        ):
            pass
        case _:
            return
    with socket.socket(
        socket.AF_INET if family == "ip4" else socket.AF_INET6,
        socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM,
    ) as probe:
        if kind == "tcp":
            # Connections in TIME_WAIT do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


async def spawn(config: DaemonConfig, control_path: Path) -> asyncio.subprocess.Process:
    """A p2pd that has started. Raises ``ConfigError`` when it cannot as configured."""
    import hivemind.hivemind_cli

    loopback = all("/127.0.0.1/" in address or "/::1/" in address for address in config.listen)
    relays = () if loopback else config.relays
    arguments = FLAGS | {
        "listen": f"/unix{control_path}",
        "id": config.identity_path,
        "hostAddrs": ",".join(config.listen),
        "announceAddrs": ",".join(config.announce),
        "trustedRelays": ",".join(relays),
        "autonat": int(not loopback),
        "autoRelay": int(bool(relays)),
        "dhtClient": int(
            bool(relays)
        ),  # p2pd has no autoRelay without it. A client of the Kademlia stores nothing
        "natPortMap": int(not loopback),
    }
    binary = importlib.resources.files(hivemind.hivemind_cli) / "p2pd"
    try:
        process = await asyncio.create_subprocess_exec(
            str(binary),
            *(f"-{name}={value}" for name, value in arguments.items() if value != ""),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ
            | {"GOLOG_LOG_LEVEL": "error", "GOMEMLIMIT": str(int(config.max_memory_bytes * _GO_SHARE))},
            start_new_session=True,  # Ctrl-C is for us: we close streams first, then p2pd
        )
    except OSError as error:
        raise SwarmnetError(
            f"cannot start {binary}: {error.strerror}", hint="pip install --force-reinstall hivemind"
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
    """Until it ends: it never waits for a reader."""
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    while chunk := await process.stdout.read(1 << 16):
        _log.debug("p2pd: %s", chunk.decode(errors="replace").rstrip())


def listening_at(listen: str, addresses: Sequence[str]) -> str:
    """``listen`` with the port that was chosen where it leaves that open, as ``addresses`` tell."""
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
