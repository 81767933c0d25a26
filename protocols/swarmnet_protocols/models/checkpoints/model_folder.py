"""The files of a model's folder: only what is part of the model is opened, and given to peers."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import ConfigError, IntegrityError

MAX_METADATA_BYTES = 64 << 20
"""Most bytes of a file without weights. The largest tokenizers of the hub have 40 MB; these files
are read and sent as a whole."""
MAX_CONFIG_BYTES = 16 << 20
"""Most bytes of a file with settings, which is parsed as JSON."""
MAX_SIZE = 1 << 24
"""Most elements of one dimension of a tensor: 64 times the largest vocabulary. Products of two
dimensions fit 64-bit integers easily."""
_OUR_MODELS = Path(__file__).resolve().parents[1]


def file_of(root: Path, name: str, *, has_weights: bool = False) -> Path | None:
    """Return the path of a file of the model in folder ``root``, or None if the folder has no such
    file.

    The members of a swarm get these files on request. So a file must be part of the model. It is an
    ordinary file in the folder, or a link to one there. In a snapshot of the hub's cache, it may
    link to a blob of the same repository. A file without weights, whose content nothing else
    checks, must have no other name on the disk (a hard link) and at most ``MAX_METADATA_BYTES``.
    Raises ``ConfigError``, or ``IntegrityError`` for a file that cannot be read or is too large.
    """
    path = root / name
    try:
        info, real = path.stat(), path.resolve(strict=True)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
        raise IntegrityError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(
            f"{path} is not an ordinary file", hint="remove it, and fetch the model again from where it came"
        )
    if not is_part_of(root.resolve(), real):
        raise ConfigError(
            f"{path} is a link to a file outside the model's folder, and peers would get that file",
            hint="replace the link by a copy of the file if it belongs to the model; otherwise do not use this folder",
        )
    if not has_weights:
        _check_metadata(path, real, info)
    return path


def is_part_of(folder: Path, real: Path) -> bool:
    """Return whether a file is in a model's folder or, if the folder is a snapshot in the hub's
    cache, a blob of the same repository.

    Both arguments are paths without links.
    """
    if real.is_relative_to(folder):
        return True
    # The folder of blobs is compared by name, not resolved: if it is a link to another place, it is
    # not part of the repository.
    return folder.parent.name == "snapshots" and real.parent == folder.parent.parent / "blobs"


def _check_metadata(path: Path, real: Path, info: os.stat_result) -> None:
    # Installers may make the files of this package as hard links to their cache.
    if info.st_nlink > 1 and not real.is_relative_to(_OUR_MODELS):
        raise ConfigError(
            f"{path} is also a file elsewhere on this machine (a hard link), and peers would get that file",
            hint=f"replace it by a copy: cp {path.name} copy && mv copy {path.name}",
        )
    if info.st_size > MAX_METADATA_BYTES:
        raise IntegrityError(f"{path} is larger than {MAX_METADATA_BYTES} bytes")


def json_in(path: Path, limit_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ``IntegrityError`` if there is none, or if the file
    is larger than ``limit_bytes``."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit_bytes + 1)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > limit_bytes:
        raise IntegrityError(f"{path} is larger than {limit_bytes} bytes")
    return json_object(raw, path)


def json_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Return the JSON object in bytes of the file at ``path``."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise IntegrityError(f"{path} does not contain a JSON object")
    return value


def stamp_of(path: Path) -> dict[str, int]:
    """Return size, times and inode of the file. At least one changes with its content.

    No program can set ``st_ctime``.
    """
    stat = path.stat()
    return {
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "changed_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }
