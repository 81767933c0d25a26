"""The file with the answers of a batch, which is also the record of what is done.

1. :meth:`Journal.open` locks the file, reads its answers, and cuts off a torn last line. It refuses
   answers of another batch.
2. Each answer is appended as one whole line. A killed process loses no appended answer. A loss of
   power may cost the answers of the last second.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.platform import lock

MAX_ANSWER_BYTES = 64 << 20
"""Longest line that is read."""
SYNC_S = 1.0
"""Seconds between two waits for the disk. With less, slow disks delay answers."""
GOOD = 200
BEGIN = b'{"id":"'
"""The first bytes of each line."""


class Journal:
    """An open file of answers."""

    def __init__(self, descriptor: int, clock: Callable[[], float]) -> None:
        self.ids: dict[str, str] = {}
        """The id of each answered line by its custom_id."""
        self.completed = 0
        self.failed = 0
        self.bytes = 0
        self._descriptor = descriptor
        self._clock = clock
        self._synced_s = clock()

    @classmethod
    @contextmanager
    def open(
        cls, path: Path, ids: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> Iterator["Journal"]:
        """Open a file of answers, which may be absent.

        ``ids``: the ids of a batch's lines by their custom_ids. Raises ``ConfigError`` for a file
        of another kind or of another batch, or if another process writes the file.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            message = f"cannot write {path}: {error.strerror}"
            raise ConfigError(message, hint="give another --out, in a folder that exists") from error
        try:
            try:
                lock(descriptor)
            except BlockingIOError as error:
                hint = "wait until it ends, or give another --out"
                raise ConfigError(f"another command writes {path}", hint=hint) from error
            journal = cls(descriptor, clock)
            journal._read(path)
            if any(ids.get(custom_id) != line_id for custom_id, line_id in journal.ids.items()):
                message = f"{path} has answers to other prompts, or of another model"
                raise ConfigError(message, hint="give another --out")
            yield journal
            journal.sync()
        finally:
            os.close(descriptor)

    def append(self, answer: Mapping[str, Any]) -> None:
        """Add one answer."""
        line = memoryview(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
        while line:  # a write to a nearly full disk may be a part
            written = os.write(self._descriptor, line)
            self.bytes += written
            line = line[written:]
        self._count(answer)

    @property
    def is_sync_due(self) -> bool:
        return self._clock() - self._synced_s >= SYNC_S

    def sync(self) -> None:
        """Wait until the disk has all answers."""
        self._synced_s = self._clock()
        os.fsync(self._descriptor)

    def _count(self, answer: Mapping[str, Any]) -> None:
        self.ids[answer["custom_id"]] = answer["id"]
        is_good = answer["response"]["status_code"] == GOOD
        self.completed += is_good
        self.failed += not is_good

    def _read(self, path: Path) -> None:
        other = ConfigError(f"{path} is not a file of answers", hint="give another --out")
        with path.open("rb") as file:
            while (raw := file.readline(MAX_ANSWER_BYTES)).endswith(b"\n"):
                try:
                    self._count(json.loads(raw))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise other from error
                self.bytes += len(raw)
            # a torn answer is cut off, but nothing of a file that somebody else wrote
            if len(raw) == MAX_ANSWER_BYTES or raw[: len(BEGIN)] != BEGIN[: len(raw)]:
                raise other
        os.ftruncate(self._descriptor, self.bytes)
