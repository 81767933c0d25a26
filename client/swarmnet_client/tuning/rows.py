"""Reads the data file of a tuning run: checks every row and tokenizes it, before anything is sent.

``swarmnet_protocols.models.text.rows`` lists the kinds of rows.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.text.rows import BadRow, Encoder, Example, fields_of, raw_rows, row_of

MAX_ROWS = 1_000_000
MAX_SHOWN = 5
"""The most bad rows that an error lists."""
T = TypeVar("T")


@dataclass(frozen=True)
class RowFile:
    """The rows of a file without bad rows, and their SHA-256 in hexadecimal.

    ``has_chats``: some rows are conversations in the model's chat template.
    """

    path: Path
    rows: list[Example]
    sha256: str
    has_chats: bool = False

    @property
    def cut(self) -> int:
        """The number of rows that were longer than ``max_length`` and lost their end."""
        return sum(row.cut for row in self.rows)


def check_rows(path: Path, *, labelled: bool) -> None:
    """Check the fields of all rows of ``path``, which needs no model. Raises the errors of
    ``read_rows``."""

    def check(number: int, fields: dict[str, Any]) -> None:
        row_of(fields, labelled=labelled)

    _each_row(path, check)


def read_rows(path: Path, encoder: Encoder) -> RowFile:
    """Return all rows of ``path``. Raises ``ConfigError`` if the file has no rows or has bad rows;
    the message lists the first bad rows."""
    rows, sha256 = _each_row(path, encoder.encode)
    return RowFile(path, rows, sha256, encoder.has_chats)


def _each_row(path: Path, take: Callable[[int, dict[str, Any]], T]) -> tuple[list[T], str]:
    """Return what ``take`` makes of each row from its line number and fields, and the SHA-256 of
    the rows."""
    taken: list[T] = []
    shown: list[str] = []
    bad = 0
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for number, row in raw_rows(file, str(path), is_parquet=path.suffix == ".parquet"):
                digest.update(row if isinstance(row, bytes) else json.dumps(row, default=str).encode())
                try:
                    taken.append(take(number, fields_of(row)))
                except BadRow as error:
                    bad += 1
                    if bad <= MAX_SHOWN:
                        shown.append(f"{path}:{number}: {error}")
                if len(taken) > MAX_ROWS:
                    raise ConfigError(f"{path} has more than {MAX_ROWS} rows", hint="split the file")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="name a file of rows") from error
    if bad:
        more = f"\nand {bad - MAX_SHOWN} more" if bad > MAX_SHOWN else ""
        raise ConfigError(
            "\n".join(shown) + more, hint="correct or remove these lines; nothing was sent anywhere"
        )
    if not taken:
        raise ConfigError(f"{path} has no rows", hint='write one JSON object a line, such as {"text": "..."}')
    return taken, digest.hexdigest()
