"""Serves the files of pages from memory: the files of one page, and the files that all pages share
(``static/``)."""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response

SHARED = Path(__file__).parent / "static"
PAGE = "index.html"
MEDIA_TYPES = {
    ".LICENSE": "text/plain; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
"""Media types by file ending. Files with other endings are not served."""
CSP = (
    "default-src 'self'; img-src 'self' data:; style-src 'self'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of pages: they load files from their own server only, and run no inline
script."""


@dataclass(frozen=True)
class Content:
    """Content with a hash. ``zipped`` is None if compression does not make it smaller."""

    content: bytes
    zipped: bytes | None
    etag: str
    media_type: str


@cache
def static_files(folder: Path) -> Mapping[str, Content]:
    """Return the files of ``folder`` and the shared files, by path.

    They are read and compressed once per process, so no request waits for the disk.
    """
    return {
        path.relative_to(root).as_posix(): _read_static(path)
        for root in (SHARED, folder)
        for path in root.rglob("*")
        if path.suffix in MEDIA_TYPES
    }


def page_paths(folder: Path) -> list[str]:
    """Return the URL paths of the page in ``folder`` and of its files."""
    return ["/", *(f"/static/{path}" for path in static_files(folder))]


def add_page(app: FastAPI, folder: Path, *further_paths: str) -> None:
    """Serve the page in ``folder`` at ``/`` and ``further_paths``, and its files below
    ``/static/``. The responses have ``CSP``."""
    files = static_files(folder)

    async def page(request: Request) -> Response:
        return conditional_response(request, files[PAGE], {"content-security-policy": CSP})

    async def static(request: Request, path: str) -> Response:
        if path not in files:
            raise HTTPException(404)
        return conditional_response(request, files[path], {"content-security-policy": CSP})

    for path in ("/", *further_paths):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/static/{path:path}", static, include_in_schema=False)


def _read_static(path: Path) -> Content:
    content = path.read_bytes()
    zipped = gzip.compress(content, mtime=0)
    etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    return Content(content, zipped if len(zipped) < len(content) else None, etag, MEDIA_TYPES[path.suffix])


def conditional_response(
    request: Request, content: Content, more: Mapping[str, str] | None = None
) -> Response:
    """Return the content, or 304 if the browser has it. ``more``: further headers.

    With ``no-cache`` browsers ask each time, because content changes under its URL.
    """
    headers = {"etag": content.etag, "cache-control": "no-cache", "vary": "accept-encoding", **(more or {})}
    if content.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", "") and content.zipped is not None:
        zipped = {"content-encoding": "gzip"}
        return Response(content.zipped, media_type=content.media_type, headers=headers | zipped)
    return Response(content.content, media_type=content.media_type, headers=headers)
