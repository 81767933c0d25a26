"""Files of rows for the tiny model. Its words are w0 to w96; the special w1 would be seen in w10 as well, so none begins so."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counting_rows(count: int, *, length: int = 8) -> list[dict[str, Any]]:
    """Texts in which every word is followed by the next number: there is something to learn."""
    rng = random.Random(5)
    starts = [rng.randrange(20, 80) for _ in range(count)]
    return [{"text": " ".join(f"w{start + offset}" for offset in range(length))} for start in starts]


def labelled_rows(count: int) -> list[dict[str, Any]]:
    """Texts whose label tells whether their words are low or high numbers."""
    rng = random.Random(6)
    rows = []
    for number in range(count):
        low = number % 2 == 0
        words = [rng.randrange(20, 55) if low else rng.randrange(55, 90) for _ in range(6)]
        rows.append({"text": " ".join(f"w{word}" for word in words), "label": "low" if low else "high"})
    return rows
