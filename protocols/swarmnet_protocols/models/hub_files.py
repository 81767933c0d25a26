"""Weight files of a model on the hub, which are downloaded when their tensors are needed.

The hub lists the size and the SHA-256 of every large file. They are enough for the model's manifest, so a host or a client knows the model's
identity before it has the weights, and downloads only the files that contain its part. Each file is hashed before it is read.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from swarmnet_protocols.errors import IntegrityError, OutOfResources, Unreachable
from swarmnet_protocols.machine.files import write_whole

MAX_LISTED = 10_000
"""Files of a repository that are looked at."""
MAX_FILE_BYTES = 1 << 50
_SHA256_BYTES = hashlib.sha256().digest_size
Known = Mapping[str, tuple[int, bytes]]
"""Size in bytes and SHA-256 of files, by name."""


@dataclass(frozen=True)
class HubFiles:
    """The large files of one commit of a repository."""

    repository: str
    commit: str
    known: Known

    def fetch(self, name: str) -> None:
        """Download one file into the hub's cache, where the files of its commit are; an interrupted download is continued.

        Raises ``Unreachable`` if the hub does not send it, and ``OutOfResources`` if the disk has no room.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import LocalEntryNotFoundError

        failures: tuple[type[Exception], ...] = (*_no_answer(), LocalEntryNotFoundError, OSError)
        if isinstance(try_to_load_from_cache(self.repository, name, revision=self.commit), str):
            return
        _check_free_space(name, self.known[name][0])
        try:
            hf_hub_download(self.repository, name, revision=self.commit)
        except failures as error:
            raise Unreachable(
                f"{name} of {self.repository} is not on this machine and could not be fetched: {error}",
                hint="check the connection, and start again: the download goes on where it stopped",
            ) from error


def _check_free_space(name: str, size_bytes: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    free = free_bytes(cache)
    if free < size_bytes:
        raise OutOfResources(
            f"{name} has {size_bytes >> 20} MiB, and {cache} has room for {free >> 20} MiB",
            hint="free some space, host fewer blocks, or set HF_HUB_CACHE to a folder on another disk",
        )


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def list_hub_files(repository: str, commit: str, cache_dir: Path) -> HubFiles | None:
    """The large files of a commit, as the hub lists them; what it said is kept in ``cache_dir``, for a commit never changes.

    None if the hub cannot be asked. Raises ``IntegrityError`` for a list that is out of bounds.
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
    return HubFiles(repository, commit, _read_listed(listed, repository))


def _ask_hub(repository: str, commit: str) -> object | None:
    """Name to [size, SHA-256] of each file that the hub stores by its hash; None if the hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile

    failures: tuple[type[Exception], ...] = (*_no_answer(), OfflineModeIsEnabled, OSError)
    try:
        entries = islice(HfApi().list_repo_tree(repository, revision=commit, recursive=True), MAX_LISTED)
        return {
            entry.path: [entry.lfs.size, entry.lfs.sha256]
            for entry in entries
            if isinstance(entry, RepoFile) and entry.lfs is not None
        }
    except failures:
        return None


def _no_answer() -> tuple[type[Exception], ...]:
    """Errors of a hub that cannot be reached or does not answer: the bases of its own error, which depend on its HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


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
