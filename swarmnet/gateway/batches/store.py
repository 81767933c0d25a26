"""Files and batches of one key, kept in memory and on disk."""

import asyncio
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarmnet.gateway.errors import ApiError
from swarmnet_protocols.machine.files import write_whole

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
UNFINISHED = ("validating", "in_progress")


class BatchStore:
    """The files and batches of one key.

    A file is its content and an object about it. A batch is an object. No other process may write
    the folder.
    """

    def __init__(self, folder: Path, key: str, clock: Callable[[], float]) -> None:
        """``key``: the name of the key. ``clock``: seconds since the epoch."""
        self._folder = folder
        self._key = key
        self._clock = clock
        read = [json.loads(path.read_bytes()) for path in folder.glob("*.json")]
        read.sort(key=lambda fields: (fields["created_at"], fields["id"]))
        self._objects: dict[str, dict[str, Any]] = {fields["id"]: fields for fields in read}
        """Files and batches by id, the oldest first."""
        self._newest = 0
        """Unix time of the newest id, in milliseconds. Each id has a later one."""
        for path in folder.glob("*.jsonl"):
            if path.stem in self._objects:
                self._objects[path.stem]["bytes"] = path.stat().st_size
            else:  # a process was killed before it wrote the object
                path.unlink()

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """Return all objects of a kind, ``file`` or ``batch``, the newest first. Removes objects
        older than ``KEPT_S``."""
        for fields in [*self._objects.values()]:
            if fields["created_at"] + KEPT_S <= self._clock():
                self._remove(fields["id"])
        return [fields for fields in reversed(self._objects.values()) if fields["object"] == kind]

    def unfinished(self) -> list[dict[str, Any]]:
        """Return the unfinished batches, the oldest first."""
        return [batch for batch in self.objects("batch")[::-1] if batch["status"] in UNFINISHED]

    def find(self, object_id: str, kind: str) -> dict[str, Any]:
        """Return an object. Raises ``ApiError`` if this key has none with this id."""
        for fields in self.objects(kind):
            if fields["id"] == object_id:
                return fields
        raise ApiError(404, f"this key has no {kind} {object_id[:64]!r}", f"{kind}_not_found")

    def save(self, fields: dict[str, Any]) -> None:
        """Write an object of this store."""
        write_whole(self._folder / f"{fields['id']}.json", json.dumps(fields).encode())

    def set_status(self, batch: dict[str, Any], status: str) -> None:
        """Give a batch another status, and write it."""
        batch["status"] = status
        batch[f"{status}_at"] = batch.get(f"{status}_at") or int(self._clock())
        self.save(batch)

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content. The id comes from an object of this store."""
        return self._folder / f"{file_id}.jsonl"

    def check_room(self, more_bytes: int = 0) -> None:
        """Raise ``ApiError`` if the files of the key cannot grow by ``more_bytes``."""
        if sum(file["bytes"] for file in self.objects("file")) + more_bytes > MAX_KEY_BYTES:
            message = f"the files of this key have {MAX_KEY_BYTES >> 20} MiB: delete some first"
            raise ApiError(400, message, "too_many_files")

    async def add_file(self, name: str, purpose: str, content: bytes) -> dict[str, Any]:
        """Keep a file; returns its object. Raises ``ApiError`` beyond the limits."""
        if len(self.objects("file")) >= MAX_FILES:
            raise ApiError(400, f"this key has {MAX_FILES} files: delete some first", "too_many_files")
        self.check_room(len(content))
        fields = self._add("file-", "file")
        fields |= {"bytes": len(content), "filename": name[:256], "purpose": purpose, "status": "processed"}

        def write() -> None:
            write_whole(self._folder / "key", json.dumps(self._key).encode())
            write_whole(self.content(fields["id"]), content)
            self.save(fields)

        try:
            await asyncio.to_thread(write)
        except OSError:
            self._remove(fields["id"])
            raise
        return fields

    def delete_file(self, file_id: str) -> None:
        """Remove a file. Raises ``ApiError`` if this key has none with this id, or if an unfinished
        batch uses the file."""
        found = self.find(file_id, "file")["id"]
        for batch in self.unfinished():
            if found in (batch["input_file_id"], batch["output_file_id"]):
                message = f"the batch {batch['id']} uses this file: cancel the batch first"
                raise ApiError(409, message, "file_in_use")
        self._remove(found)

    def add_batch(self, about: dict[str, Any]) -> dict[str, Any]:
        """Keep a new batch; returns its object. Raises ``ApiError`` beyond the limits."""
        if len(self.objects("batch")) >= MAX_BATCHES or len(self.unfinished()) >= MAX_UNFINISHED:
            message = f"this key may have {MAX_UNFINISHED} unfinished batches and {MAX_BATCHES} in all"
            raise ApiError(429, message, "too_many_batches", "rate_limit_error", retry_after_s=60)
        fields = self._add("batch_", "batch")
        fields |= about | {"expires_at": fields["created_at"] + WINDOW_S}
        self.save(fields)
        return fields

    def _add(self, prefix: str, kind: str) -> dict[str, Any]:
        created = int(self._clock())
        # Ids ascend, so that a restarted gateway knows the order of objects of one second.
        self._newest = max(self._newest + 1, int(1000 * self._clock()))
        identity = f"{prefix}{self._newest:012x}{secrets.token_hex(6)}"
        self._objects[identity] = fields = {
            "id": identity,
            "object": kind,
            "created_at": created,
            "expires_at": created + KEPT_S,
        }
        return fields

    def _remove(self, object_id: str) -> None:
        del self._objects[object_id]
        for ending in ("jsonl", "json"):
            (self._folder / f"{object_id}.{ending}").unlink(missing_ok=True)
