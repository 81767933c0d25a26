"""`swarmnet run` finds an endpoint of the same user on this machine: `serve` or `join --serve`.

1. The endpoint writes its address and a secret into a file that only this user reads, and locks
   the file while it runs.
2. ``run`` takes the newest locked file of the same swarm and model, and asks there. It neither
   joins the swarm nor loads the model.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from swarmnet.paths import default_state_dir
from swarmnet_protocols.machine.files import make_private
from swarmnet_protocols.machine.platform import is_ours, lock, mode_for_others

PATH = "/swarmnet/answer"
"""The path at which an endpoint answers this user's commands."""
KEY_NAME = "this-user"
"""Name of the secret among the API keys of an endpoint."""
MAX_FILE_BYTES = 1 << 14
MAX_FILES = 64
"""Most files that are looked at. Files of processes that have ended are removed."""


@dataclass(frozen=True)
class Resident:
    """A running endpoint: its URL and secret, its swarm's id in hexadecimal, and its model."""

    url: str
    key: str
    swarm: str
    model: str


def model_id(name: str) -> str:
    """Return the name of a model as it counts in every folder: paths become absolute."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def new_key() -> str:
    """Return a secret for this user's commands."""
    return secrets.token_urlsafe(32)


@contextmanager
def announced(resident: Resident) -> Iterator[None]:
    """Let this user's commands find an endpoint while the context is open. If the folder cannot be
    written, they do not find it."""
    folder = default_state_dir() / "endpoints"
    path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
    try:
        make_private(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            lock(descriptor)
        os.write(descriptor, json.dumps(asdict(resident)).encode())
        yield
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def find(swarm: str = "", model: str = "", *, url: str = "") -> Resident | None:
    """Return the newest running endpoint of this user. None if there is none.

    ``swarm``, ``model``, ``url``: if given, the endpoint must have these.
    """
    wanted = {"swarm": swarm, "model": model, "url": url}
    folder = default_state_dir() / "endpoints"
    with suppress(OSError):
        status = folder.stat()
        if not is_ours(status) or mode_for_others(status):
            return None
        paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in paths[:MAX_FILES]:
            resident = _running(path)
            if resident is not None and all(
                value in ("", getattr(resident, name)) for name, value in wanted.items()
            ):
                return resident
    return None


def _running(path: Path) -> Resident | None:
    """Return the endpoint of a file. None, and the file is removed, if its process has ended."""
    try:
        with path.open("rb+") as file:
            with suppress(BlockingIOError):
                lock(file.fileno())
                path.unlink(missing_ok=True)
                return None
            return Resident(**json.loads(file.read(MAX_FILE_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
