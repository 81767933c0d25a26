"""Weight files of a model on the hub, downloaded when their tensors are needed.

The hub lists the size and SHA-256 of every large file. The model's manifest needs no more, so a
host or client knows the model's identity before it has the weights. ``models/parts.py`` decides
whether pieces of a file are downloaded or the whole file.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from swarmnet_protocols.errors import IntegrityError, OutOfResources, Unreachable
from swarmnet_protocols.fetching.hub_ranges import HubRanges, no_answer
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import ModelFile
from swarmnet_protocols.machine.files import write_whole

MAX_LISTED = 10_000
"""Most files of a repository that are read from its listing. Further ones are ignored."""
MAX_FILE_BYTES = 1 << 50
MAX_HEAD_READS = 64
"""Most requests for the header of one file. Each may bring only a part of what it asked for."""
HEAD_BYTES = 128 << 10
"""Bytes of the first read of a file's header. If the header is longer, each further read is eight
times as long."""
MAX_HEAD_BYTES = 64 << 20
_SHA256_BYTES = hashlib.sha256().digest_size
Known = Mapping[str, tuple[int, bytes]]
"""Size in bytes and SHA-256 of files, by name."""


@dataclass(frozen=True)
class HubFiles:
    """The large files of one commit of a repository, or of a model that only peers have."""

    repository: str
    """Empty for a model that only peers have."""
    commit: str
    known: Known
    parts: Path
    """The folder of partial files."""

    @property
    def ranges(self) -> HubRanges:
        """Return the files as a source of their bytes."""
        return HubRanges(self.repository, self.commit)

    def file(self, name: str) -> ModelFile:
        """Return name, size and hash of one file."""
        return ModelFile(name, *self.known[name])

    def partial(self, name: str) -> PieceFile:
        """Return the partial file for the pieces of a file. It may not exist yet."""
        file = self.file(name)
        return PieceFile(self.parts / file.sha256.hex(), file)

    def read_head(self, name: str, head_bytes: Callable[[Path], int]) -> None:
        """Download the header of a file into its partial file, unless it is on disk.

        The header is verified later, before a tensor is read. ``head_bytes`` returns the size of
        the header of the file at a path, and raises ``IntegrityError`` while the header is
        incomplete.

        Raises ``IntegrityError`` if the file has no header within ``MAX_HEAD_BYTES``. Raises
        ``Unreachable`` if the hub does not answer, or sends only a few bytes at a time.
        """
        partial, file, size = self.partial(name), self.file(name), HEAD_BYTES
        if partial.exists:
            with contextlib.suppress(IntegrityError):
                head_bytes(partial.path)
                return
        data = b""
        for _ in range(MAX_HEAD_READS):
            data += self.ranges.read_now(file, len(data), min(size, file.size))
            if len(data) < min(size, file.size):  # the connection broke
                continue
            partial.write_head(data)
            try:
                found = head_bytes(partial.path)
            except IntegrityError:
                if size >= min(file.size, MAX_HEAD_BYTES):
                    raise
            else:
                _check_head_size(name, found)
                if found <= len(data):
                    return
            size *= 8
        raise Unreachable(f"{MAX_HEAD_READS} answers of the hub did not bring the header of {name}")

    def fetch(self, name: str) -> Path:
        """Download one whole file into the cache of huggingface_hub, and return its path.

        An interrupted download continues. Raises ``Unreachable`` if the hub does not send the file,
        and ``OutOfResources`` if the disk has no room.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import LocalEntryNotFoundError

        if not self.repository:
            raise Unreachable(
                f"no peer has the pieces of {name}", hint="try again when a host of this model is online"
            )
        failures: tuple[type[Exception], ...] = (*no_answer(), LocalEntryNotFoundError, OSError)
        cached = try_to_load_from_cache(self.repository, name, revision=self.commit)
        if isinstance(cached, str):
            return Path(cached)
        from huggingface_hub import constants

        check_free_space(name, self.known[name][0], Path(constants.HF_HUB_CACHE))
        try:
            return Path(hf_hub_download(self.repository, name, revision=self.commit))
        except failures as error:
            raise Unreachable(
                f"{name} of {self.repository} is not on this machine and could not be fetched: {error}",
                hint="check the connection, and start again: the download continues where it stopped",
            ) from error


def _check_head_size(name: str, size: int) -> None:
    if size > MAX_HEAD_BYTES:
        raise IntegrityError(f"the header of {name} has {size} bytes, more than {MAX_HEAD_BYTES}")


def check_free_space(what: str, size_bytes: int, folder: Path) -> None:
    """Raise ``OutOfResources`` if ``folder`` has no room for ``size_bytes``."""
    free = free_bytes(folder)
    if free < size_bytes:
        raise OutOfResources(
            f"{what} has {size_bytes >> 20} MiB, and {folder} has room for {free >> 20} MiB",
            hint="free some space, host fewer blocks, or choose another disk with --cache-dir and HF_HUB_CACHE",
        )


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def list_hub_files(repository: str, commit: str, cache_dir: Path) -> HubFiles | None:
    """Return the large files of a commit, as the hub lists them; None if the hub cannot be asked.

    The list is cached in ``cache_dir``, since a commit never changes. Raises ``IntegrityError`` for
    an entry without a valid size and SHA-256.
    """
    key = hashlib.sha256(f"{repository}@{commit}".encode()).hexdigest()[:32]
    kept = cache_dir / "hub" / f"{key}.json"
    try:
        listed = json.loads(kept.read_bytes())
    except (OSError, ValueError):
        listed = _ask_hub(repository, commit)
        if listed is None:
            return None
        write_whole(kept, json.dumps(listed).encode())
    return HubFiles(repository, commit, _read_listed(listed, repository), parts_folder(cache_dir))


def parts_folder(cache_dir: Path) -> Path:
    """Return the folder of partial files in ``cache_dir``."""
    return cache_dir / "parts"


def _ask_hub(repository: str, commit: str) -> object | None:
    """Return name → [size, SHA-256] of each file that the hub stores by hash; None without an
    answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile

    failures: tuple[type[Exception], ...] = (*no_answer(), OfflineModeIsEnabled, OSError)
    try:
        entries = islice(HfApi().list_repo_tree(repository, revision=commit, recursive=True), MAX_LISTED)
        return {
            entry.path: [entry.lfs.size, entry.lfs.sha256]
            for entry in entries
            if isinstance(entry, RepoFile) and entry.lfs is not None
        }
    except failures:
        return None


def _read_listed(listed: object, repository: str) -> Known:
    found: dict[str, tuple[int, bytes]] = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        match entry:
            case [int(size), str(digest)] if 0 <= size <= MAX_FILE_BYTES:
                try:
                    sha256 = bytes.fromhex(digest)
                except ValueError:
                    sha256 = b""
                if len(sha256) == _SHA256_BYTES:
                    found[str(name)] = size, sha256
                    continue
        raise IntegrityError(f"the hub lists {str(name)[:200]!r} of {repository} without size and SHA-256")
    return found
