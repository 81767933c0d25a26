"""What this machine knows by itself: disks, memory, devices, keys, ports, and what it has of a swarm."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from swarmnet.doctor import facts
from swarmnet_protocols.errors import ConfigError, NotAuthorised, SwarmnetError, Unreachable
from swarmnet_protocols.machine.clock import wall_clock

if TYPE_CHECKING:
    from swarmnet.swarm_file.entry import Entry
    from swarmnet_node.owner.control import NodeStatus

DRIVER_S = 5.0
"""The driver of a GPU may hang."""
MAX_KEY_FILES = 100


def node_in(data_dir: Path) -> "NodeStatus | None":
    """The node that runs there now."""
    from swarmnet_node.owner import control

    with suppress(Unreachable):
        return control.status(data_dir)
    return None


def version_of(distribution: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None


def disk(purpose: str, path: Path) -> facts.Disk:
    """Where ``path`` is or would be made: the first directory on the way up that exists."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    error = "" if os.access(existing, os.W_OK | os.X_OK) else "permission denied"
    return facts.Disk(purpose, existing, shutil.disk_usage(existing).free, error)


def memory() -> facts.Memory:
    """What is free, and what the control group of this process leaves it, where it is limited."""
    limit = None
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    return facts.Memory(psutil.virtual_memory().available, limit)


def device() -> facts.Device:
    """torch, slow to import, is asked only where there is something it could use."""
    gpu = _gpu()
    if not gpu:
        return facts.Device()
    import torch

    return facts.Device(gpu, torch.cuda.is_available() or torch.backends.mps.is_available())


def _gpu() -> str:
    if sys.platform == "darwin":
        return "GPU of this Mac"
    if shutil.which("nvidia-smi") is None:
        return "AMD GPU" if Path("/dev/kfd").exists() else ""
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(subprocess.SubprocessError):
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=DRIVER_S, check=True)
        return asked.stdout.partition("\n")[0].strip()
    return ""


def secrets(data_dir: Path) -> list[facts.SecretFile]:
    """The data directory and the keys in it."""
    if not data_dir.is_dir():
        return []
    found = []
    for path in [data_dir, *sorted(data_dir.rglob("*.key"))[:MAX_KEY_FILES]]:
        with suppress(OSError):
            status = path.stat()
            found.append(facts.SecretFile(path, status.st_mode & 0o777, status.st_uid == os.getuid()))
    return found


def listening(addresses: Sequence[str]) -> list[facts.Listening]:
    """Whether a node could listen on each of the addresses."""
    from swarmnet_protocols.net.p2pd.process import check_free

    found = []
    for address in addresses:
        try:
            check_free(address)
            found.append(facts.Listening(address))
        except ConfigError as error:
            found.append(facts.Listening(address, str(error), error.hint))
    return found


def enter(
    name: str | None, data_dir: Path, bootstrap: Sequence[str]
) -> "tuple[facts.Swarm | None, Entry | None]":
    """The swarm as the identity of ``data_dir`` would enter it, and what of that is in order."""
    if name is None:
        return None, None
    from swarmnet.swarm_file import entry as entering
    from swarmnet_protocols.membership.invites import is_invite

    if is_invite(name):
        hint = "swarmnet join INVITE redeems it; afterwards the name of the swarm will do"
        return facts.Swarm("", "an invite is nothing to examine", hint), None
    try:
        entry = entering.enter(name, data_dir, bootstrap)
    except SwarmnetError as error:
        return facts.Swarm(name, str(error), error.hint), None
    file = entry.file
    not_after = file.not_after.timestamp() if file.not_after else None
    if entry.folder is None:
        return facts.Swarm(file.name, not_after=not_after), entry
    refusal, until = _certificate(entry)
    return facts.Swarm(file.name, "", "", not_after, True, refusal, until), entry


def _certificate(entry: "Entry") -> tuple[str, float | None]:
    """Why we are no member, or until when we are."""
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity

    if not entry.identity_path.exists():
        return "this machine has no key yet, and so no certificate", None
    peer = Identity.load_or_create(entry.identity_path).peer_id
    try:
        return "", Membership(entry.file.rules(), peer, wall_clock, folder=entry.folder).me.until
    except NotAuthorised as error:
        return str(error), None
