"""Keep partial files within a limit of disk space by removing the least recently used ones."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.fetching.piece_file import PieceFile, folder_bytes, is_held


@dataclass(frozen=True)
class StoredFile:
    """A partial file. ``used_at`` is in seconds since the epoch."""

    folder: Path
    size: int
    used_at: float


def stored_files(parts: Path) -> list[StoredFile]:
    """Return the partial files in ``parts``, the least recently used first."""
    return sorted(_found(parts), key=lambda each: each.used_at)


def _found(parts: Path) -> Iterator[StoredFile]:
    for folder in parts.iterdir() if parts.is_dir() else ():
        with suppress(FileNotFoundError):  # another process has removed it meanwhile
            if folder.is_dir():
                yield StoredFile(folder, folder_bytes(folder), folder.stat().st_mtime)


def make_room(parts: Path, size: int, max_bytes: int) -> None:
    """Remove the least recently used partial files until ``size`` more bytes fit into
    ``max_bytes``.

    Files that a process uses stay. Raises ``OutOfResources``, and removes nothing, if that is not
    enough.
    """
    files = stored_files(parts)
    excess = sum(each.size for each in files) + size - max_bytes
    chosen: list[StoredFile] = []
    for each in files:
        if sum(one.size for one in chosen) >= excess:
            break
        if not is_held(each.folder):
            chosen.append(each)
    if sum(each.size for each in chosen) < excess:
        raise OutOfResources(
            f"{size >> 20} MiB of weights are missing, and with --max-disk {max_bytes >> 20}MiB there is no room for them",
            hint="allow more with --max-disk, or host fewer blocks",
        )
    for each in chosen:
        PieceFile.remove_folder(each.folder)
