"""Files and batches of the gateway's callers, kept on disk for each key."""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarmnet.gateway.errors import ApiError
from swarmnet_protocols.machine.files import make_private, write_whole

MAX_FILE_BYTES = 16 << 20
"""Longest file that a caller may send: about 50,000 short prompts."""
MAX_KEY_BYTES = 256 << 20
"""Most bytes of all files of one key."""
MAX_FILES = 200
"""Most files of one key, with prompts or answers."""
MAX_BATCHES = 100
"""Most batches of one key."""
MAX_UNFINISHED = 8
"""Most unfinished batches of one key."""
KEPT_S = 7 * 86400
"""Seconds for which a file or a batch is kept."""
WINDOW_S = 86400
"""Seconds within which a batch ends, as OpenAI's ``completion_window`` of 24 h."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")


class BatchStore:
    """The files and batches of one key.

    A file is its content and an object about it. A batch is an object.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """Return all objects of a kind, ``file`` or ``batch``, the newest first. Removes objects
        older than ``KEPT_S``."""
        found = []
        for path in self._folder.glob(f"{kind}*.json"):
            fields = json.loads(path.read_bytes())
            if fields["created_at"] + KEPT_S <= self._clock():
                self._remove(fields["id"])
            else:
                found.append(fields)
        return sorted(found, key=lambda fields: (fields["created_at"], fields["id"]), reverse=True)

    def find(self, object_id: str, kind: str) -> dict[str, Any]:
        """Return an object. Raises ``ApiError`` if this key has none with this id."""
        if _ID.fullmatch(object_id) and object_id.startswith(kind):
            for fields in self.objects(kind):
                if fields["id"] == object_id:
                    return fields
        raise ApiError(404, f"this key has no {kind} {object_id[:64]!r}", f"{kind}_not_found")

    def save(self, fields: dict[str, Any]) -> None:
        """Write an object."""
        write_whole(self._folder / f"{fields['id']}.json", json.dumps(fields).encode())

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content. The id comes from an object of this store."""
        return self._folder / f"{file_id}.jsonl"

    @property
    def has_room(self) -> bool:
        """Whether the files of the key may grow."""
        return sum(path.stat().st_size for path in self._folder.glob("*.jsonl")) < MAX_KEY_BYTES

    def add_file(self, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Keep a file; returns its object. Raises ``ApiError`` beyond the limits."""
        make_private(self._folder)
        if len(self.objects("file")) >= MAX_FILES or not self.has_room:
            message = f"this key has {MAX_FILES} files or {MAX_KEY_BYTES >> 20} MiB: delete some first"
            raise ApiError(400, message, "too_many_files")
        fields = self._new("file-", "file")
        fields |= {"bytes": len(content), "filename": name[:256], "purpose": purpose, "status": "processed"}
        write_whole(self.content(fields["id"]), content)
        self.save(fields)
        return fields

    def delete_file(self, file_id: str) -> None:
        """Remove a file. Raises ``ApiError`` if this key has none with this id, or if an unfinished
        batch uses the file."""
        found = self.find(file_id, "file")["id"]
        for batch in self.objects("batch"):
            if batch["status"] in UNFINISHED and found in (batch["input_file_id"], batch["output_file_id"]):
                message = f"the batch {batch['id']} uses this file: cancel the batch first"
                raise ApiError(409, message, "file_in_use")
        self._remove(found)

    def add_batch(self, about: dict[str, Any]) -> dict[str, Any]:
        """Keep a new batch; returns its object. Raises ``ApiError`` beyond the limits."""
        batches = self.objects("batch")
        unfinished = sum(fields["status"] in UNFINISHED for fields in batches)
        if len(batches) >= MAX_BATCHES or unfinished >= MAX_UNFINISHED:
            message = f"this key may have {MAX_UNFINISHED} unfinished batches and {MAX_BATCHES} in all"
            raise ApiError(429, message, "too_many_batches", "rate_limit_error", retry_after_s=60)
        fields = self._new("batch_", "batch") | about
        fields["expires_at"] = fields["created_at"] + WINDOW_S
        self.save(fields)
        return fields

    def _new(self, prefix: str, kind: str) -> dict[str, Any]:
        created = int(self._clock())
        identity = prefix + secrets.token_hex(12)
        return {"id": identity, "object": kind, "created_at": created, "expires_at": created + KEPT_S}

    def _remove(self, object_id: str) -> None:
        for ending in ("jsonl", "json"):
            (self._folder / f"{object_id}.{ending}").unlink(missing_ok=True)


class StoresByKey:
    """The stores of all keys in one folder. A key sees no files or batches of another key."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock

    def of(self, key: str) -> BatchStore:
        """Return the store of a key, by its name."""
        folder = self._folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        if not (folder / "key").exists():
            write_whole(folder / "key", json.dumps(key).encode())
        return BatchStore(folder, self._clock)

    def unfinished(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the key and the object of each unfinished batch."""
        for path in self._folder.glob("*/key"):
            key = json.loads(path.read_text())
            for fields in self.of(key).objects("batch"):
                if fields["status"] in UNFINISHED:
                    yield key, fields
