"""Collects the facts: of this machine, of its place in the swarm, and of how bootstrap peers see
it; all at once, each with a deadline."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from swarmnet.doctor import facts
from swarmnet.doctor.checks import TESTED
from swarmnet.reach import advice, describe
from swarmnet_protocols.errors import ConfigError, NotAuthorised, SwarmnetError, Unreachable
from swarmnet_protocols.joining.network import LOOPBACK, any_port
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.machine.platform import is_ours, mode_for_others

if TYPE_CHECKING:
    from swarmnet.swarm_file.entry import Entry
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.wire.control_pb2 import NodeStatus

T = TypeVar("T")
D = TypeVar("D")

LOCAL_S = 6.0
"""Timeout of each fact about this machine in seconds, because a network disk or a GPU driver may
hang."""
PEERS_S = 9.0
"""Timeout in seconds of starting p2pd and asking all bootstrap peers."""
OPEN_S = 3.0
"""Timeout in seconds of opening a stream to a bootstrap peer."""
GPU_DRIVER_S = 5.0
MAX_PEERS = 8
MAX_KEY_FILES = 100


@dataclass(frozen=True)
class DoctorOptions:
    """The options of ``swarmnet doctor``."""

    data_dir: Path
    cache_dir: Path
    swarm: str | None = None
    model: str | None = None
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()


async def gather(options: DoctorOptions) -> facts.Facts:
    """Return all facts. Those that could not be collected are in ``Facts.not_gathered`` with the
    reason; no error is raised."""
    collector = _Collector()
    node = await collector.call("node", lambda: running_node(options.data_dir), None)
    # While a node runs, its identity is in use, so the doctor takes the client's identity.
    directory = options.data_dir / "client" if node else options.data_dir
    listen = () if node else options.listen
    swarm, entry = await collector.call(
        "swarm", lambda: examine_swarm(options.swarm, directory, options.bootstrap), (None, None)
    )
    target = await collector.call("kernels", lambda: native_code.targets()[0].name, "")
    device, model, disks, listening, (peers, ports), local_peers = await asyncio.gather(
        collector.call("device", examine_device, facts.Device()),
        collector.wait(PEERS_S, "model", asyncio.to_thread(examine_model, options), None),
        collector.call(
            "disk",
            lambda: [
                examine_disk("keys and state", options.data_dir),
                examine_disk("models", options.cache_dir),
            ],
            [],
        ),
        collector.call("listen", lambda: [examine_listen_address(each) for each in listen], []),
        collector.wait(PEERS_S, "peers", ask_peers(entry, listen, node), ([], [])),
        collector.wait(PEERS_S, "local peers", count_local_peers(entry, node), 0),
    )
    return facts.Facts(
        now=wall_clock(),
        data_dir=options.data_dir,
        python=sys.version_info[:2],
        installed={name: installed_version(name) for name in TESTED},
        disks=disks,
        memory=examine_memory(),
        device=device,
        kernels=native_code.provider(),
        target=target,
        model=model,
        secrets=secret_files(options.data_dir),
        node=node.state if node else "",
        node_warning=node.warning if node else "",
        node_reached=describe(node.reach, node.addresses) if node and node.reach.kind != "unknown" else "",
        node_advice=advice(node.reach, node.addresses) if node else "",
        listening=listening,
        swarm=swarm,
        peers=peers,
        local_peers=local_peers,
        ports=ports,
        not_gathered=collector.failures,
    )


class _Collector:
    """Waits for facts, and records the error of each that fails or times out."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}

    async def call(self, name: str, find: Callable[[], T], default: D) -> T | D:
        return await self.wait(LOCAL_S, name, asyncio.to_thread(find), default)

    async def wait(self, deadline_s: float, name: str, fact: Awaitable[T], default: D) -> T | D:
        try:
            async with asyncio.timeout(deadline_s):
                return await fact
        except TimeoutError:
            self.failures[name] = f"it took more than {deadline_s:g} s"
        except (SwarmnetError, OSError) as error:
            self.failures[name] = str(error)
        return default


# ---- this machine ------------------------------------------------------------------------------


def running_node(data_dir: Path) -> "NodeStatus | None":
    """Return the status of the node that runs with ``data_dir``, or None."""
    from swarmnet_node.owner import control

    with suppress(Unreachable):
        return control.status(data_dir)
    return None


def installed_version(distribution: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None


def examine_disk(purpose: str, path: Path) -> facts.Disk:
    """Return the disk of ``path``, or of the nearest parent directory that exists."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    error = "" if os.access(existing, os.W_OK | os.X_OK) else "permission denied"
    is_read_only = sys.platform != "win32" and bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
    if is_read_only:
        error = "read-only file system"
    free_bytes = shutil.disk_usage(existing).free
    return facts.Disk(purpose, existing, free_bytes, error, is_read_only=is_read_only)


def examine_memory() -> facts.Memory:
    """Free memory of the machine, and of the control group of this process if that has a limit."""
    limit = None
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    return facts.Memory(psutil.virtual_memory().available, limit)


def examine_model(options: DoctorOptions) -> facts.ModelFiles | None:
    """Return whether the model can be used, from headers and config: weights are not read."""
    if options.model is None:
        return None
    from swarmnet_protocols.machine.lean_imports import import_transformers

    import_transformers()
    import torch

    from swarmnet_protocols.models.resolver import open_checkpoint

    try:
        checkpoint = open_checkpoint(options.model, cache_dir=options.cache_dir)
    except SwarmnetError as error:
        return facts.ModelFiles(options.model, error=str(error), hint=error.hint)
    sizes = checkpoint.sizes(checkpoint.tensor_names)
    notice = sizes.notice("all weights", torch.float32)
    return facts.ModelFiles(options.model, sizes.in_memory(torch.float32.itemsize), notice)


def examine_device() -> facts.Device:
    """Return the GPU, and whether torch can use it. torch is imported only if there is one, because
    the import takes seconds."""
    gpu = _gpu_name()
    if not gpu:
        return facts.Device()
    from swarmnet_protocols.machine.devices import has_accelerator

    return facts.Device(gpu, has_accelerator())


def _gpu_name() -> str:
    if sys.platform == "darwin":
        return "GPU of this Mac"
    if shutil.which("nvidia-smi") is None:
        return "AMD GPU" if Path("/dev/kfd").exists() else ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=GPU_DRIVER_S, check=True)
        return run.stdout.partition("\n")[0].strip()
    return ""


def secret_files(data_dir: Path) -> list[facts.SecretFile]:
    """Return the data directory and the keys in it."""
    if not data_dir.is_dir():
        return []
    found = []
    for path in [data_dir, *sorted(data_dir.rglob("*.key"))[:MAX_KEY_FILES]]:
        with suppress(OSError):
            status = path.stat()
            found.append(
                facts.SecretFile(path, status.st_mode & 0o700 | mode_for_others(status), is_ours(status))
            )
    return found


def examine_listen_address(address: str) -> facts.ListenAddress:
    """Return whether a node could listen on a multiaddr."""
    from swarmnet_protocols.net.p2pd.process import check_free

    try:
        check_free(address)
    except ConfigError as error:
        return facts.ListenAddress(address, str(error), error.hint)
    return facts.ListenAddress(address)


# ---- the swarm ---------------------------------------------------------------------------------


def examine_swarm(
    name: str | None, data_dir: Path, bootstrap: Sequence[str]
) -> "tuple[facts.SwarmFacts | None, Entry | None]":
    """Return the swarm file, and the certificate for it in ``data_dir``. An invite is not
    redeemed."""
    if name is None:
        return None, None
    from swarmnet.swarm_file import entry as entering
    from swarmnet_protocols.membership.invites import is_invite

    if is_invite(name):
        hint = "swarmnet join INVITE redeems it; after that, give the doctor the name of the swarm"
        return facts.SwarmFacts("", "this is an invite, and the doctor does not redeem invites", hint), None
    try:
        entry = entering.enter(name, data_dir, bootstrap)
    except SwarmnetError as error:
        return facts.SwarmFacts(name, str(error), error.hint), None
    file = entry.file
    not_after = file.not_after.timestamp() if file.not_after else None
    if entry.folder is None:
        return facts.SwarmFacts(file.name, not_after=not_after, mdns=file.mdns), entry
    refusal, until = _certificate(entry)
    return facts.SwarmFacts(file.name, "", "", not_after, file.mdns, True, refusal, until), entry


def _certificate(entry: "Entry") -> tuple[str, float | None]:
    """Return why the data directory has no valid certificate, or the Unix time at which its
    certificate expires."""
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity

    if not entry.peer.identity_path.exists():
        return "this machine has no key yet, and so no certificate", None
    peer = Identity.load_or_create(entry.peer.identity_path).peer_id
    try:
        return "", Membership(entry.file.rules(), peer, wall_clock, folder=entry.folder).me.until
    except NotAuthorised as error:
        return str(error), None


# ---- bootstrap peers ---------------------------------------------------------------------------


async def ask_peers(
    entry: "Entry | None", listen: Sequence[str], node: "NodeStatus | None"
) -> tuple[list[facts.BootstrapPeer], list[int]]:
    """Ask each bootstrap peer to dial this machine; returns their answers, and the TCP ports that
    they were asked to dial.

    If no ``node`` runs, the doctor itself listens for these dials. Raises ``SwarmnetError`` if p2pd
    cannot be started.
    """
    if entry is None or not entry.bootstrap:
        return [], []
    from swarmnet_protocols.reachability.dial_back import ports_of

    async with _connected(entry, LOOPBACK if node else listen or any_port()) as transport:
        ports = ports_of((node.addresses if node else ()) or transport.addresses())
        others = [each for each in entry.bootstrap if not each.endswith(f"/p2p/{transport.peer_id}")]
        answers = await asyncio.gather(*(_probe(transport, each, ports) for each in others[:MAX_PEERS]))
        return answers, ports


async def count_local_peers(entry: "Entry | None", node: "NodeStatus | None") -> int:
    """Return the number of other peers of the swarm that mDNS finds; 0 if the swarm file does not
    switch mDNS on."""
    if entry is None or not entry.file.mdns:
        return 0
    from swarmnet_protocols.joining.local_network import FIRST_S, find_addresses
    from swarmnet_protocols.net.multiaddr import peer_in

    found = set(map(peer_in, await find_addresses(entry.file.swarm_id, within_s=FIRST_S)))
    return len(found - set(map(peer_in, node.addresses if node else ())))


@asynccontextmanager
async def _connected(entry: "Entry", listen: Sequence[str]) -> "AsyncIterator[Transport]":
    """Yield a transport with the identity and the membership of ``entry``, without a directory."""
    # In a thread, because libp2p's bindings take seconds to import on a slow machine and would
    # delay the other deadlines.
    await asyncio.to_thread(_import_transport)
    from swarmnet_protocols.membership.guarded_transport import GuardedTransport
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.net.p2pd.config import P2pdConfig
    from swarmnet_protocols.net.p2pd.transport import P2pdTransport
    from swarmnet_protocols.timing import Timing

    peer = Identity.load_or_create(entry.peer.identity_path).peer_id
    membership = Membership(entry.file.rules(), peer, wall_clock, folder=entry.folder)
    # only_dials, because a client of this machine may run at the same time with the same identity.
    config = P2pdConfig(
        entry.peer.identity_path, listen=tuple(listen), named=tuple(entry.bootstrap), only_dials=True
    )
    async with (
        P2pdTransport.create(config) as raw,
        Handshakes(raw, membership, Timing()).running() as handshakes,
    ):
        yield GuardedTransport(raw, handshakes)


def _import_transport() -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    import hivemind.p2p  # noqa: F401


async def _probe(transport: "Transport", address: str, ports: Sequence[int]) -> facts.BootstrapPeer:
    from swarmnet_protocols.reachability.dial_back import probe_at

    try:
        return facts.BootstrapPeer(address, await probe_at(transport, address, ports, OPEN_S))
    except SwarmnetError as error:
        # go-libp2p lists the error of each address that it tried, one per line
        return facts.BootstrapPeer(address, error=str(error).splitlines()[-1].strip())
