"""Files of rows for the tiny model, in its words w0 to w96.

No word begins with w1: the tokenizer would find the special token w1 in w10.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def counting_rows(count: int, *, length: int = 8) -> list[dict[str, Any]]:
    """Texts in which each word is followed by the next number: a pattern to learn."""
    rng = random.Random(5)
    starts = [rng.randrange(20, 80) for _ in range(count)]
    return [{"text": " ".join(f"w{start + offset}" for offset in range(length))} for start in starts]


def labelled_rows(count: int) -> list[dict[str, Any]]:
    """Texts labelled by whether their words are low or high numbers."""
    rng = random.Random(6)
    rows = []
    for number in range(count):
        low = number % 2 == 0
        words = [rng.randrange(20, 55) if low else rng.randrange(55, 90) for _ in range(6)]
        rows.append({"text": " ".join(f"w{word}" for word in words), "label": "low" if low else "high"})
    return rows
