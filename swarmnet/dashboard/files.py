"""The page's files. They are few and small: read and compressed once, no answer waits for a disk or a thread."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"
MEDIA_TYPES = {
    ".LICENSE": "text/plain; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Files that end otherwise are not for browsers."""


@dataclass(frozen=True)
class File:
    """A file as it is sent; ``zipped`` is None where compressing makes it no smaller."""

    content: bytes
    zipped: bytes | None
    etag: str
    media_type: str


@cache
def files() -> Mapping[str, File]:
    """All of them, by their paths under ``static/``."""
    return {
        path.relative_to(FOLDER).as_posix(): _read(path)
        for path in FOLDER.rglob("*")
        if path.suffix in MEDIA_TYPES
    }


def _read(path: Path) -> File:
    content = path.read_bytes()
    zipped = gzip.compress(content, mtime=0)
    etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    return File(content, zipped if len(zipped) < len(content) else None, etag, MEDIA_TYPES[path.suffix])
