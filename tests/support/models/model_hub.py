"""A model hub on this machine that answers the requests of huggingface_hub for one repository."""

import functools
import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

from tests.support.models.dataset_hub import stand_in

COMMIT = "0123456789" * 4
NAME = "org/model"
_SHORT: Mapping[str, Callable[[int], int]] = {
    "nothing": lambda size: 0,
    "short": lambda size: min(size, 40_000),
    "half": lambda size: -(-size // 2),
    "a few bytes": lambda size: min(size, 1024),
}
"""The bytes that answers have, of those that were asked for."""
CHUNK_BYTES = 64 << 10


@dataclass
class ModelHub:
    """The hub of repository ``NAME``, whose files are those of ``folder``."""

    folder: Path
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by file."""
    stop_after: dict[str, int] = field(default_factory=dict)
    """Bytes after which the next answer with a file breaks off."""
    damaged: set[str] = field(default_factory=set)
    """Files whose last byte is sent with one bit flipped."""
    flipped: dict[str, int] = field(default_factory=dict)
    """Files of which the byte at this offset is sent with one bit flipped."""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    """The ranges [start, end) that were asked for."""
    fault: str = ""
    """The fault of all answers to requests for a range: ``whole`` (the whole file), ``shifted``,
    ``endless``, ``silent``, ``compressed``, ``drop by drop``, or a part of the range that
    ``_SHORT`` names; empty: none."""
    is_closed: bool = False
    """Whether every request is refused."""
    bytes_per_s: float = math.inf
    """The rate of all answers with files together."""
    address: str = ""
    closing: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._line = threading.Lock()

    def send(self, name: str, data: bytes, write: Callable[[bytes], object]) -> None:
        """Write a part of a file at the rate of the hub: one chunk after another, of all
        connections in turn."""
        for first in range(0, len(data), CHUNK_BYTES):
            chunk = data[first : first + CHUNK_BYTES]
            with self._line:
                write(chunk)
                self.sent[name] = self.sent.get(name, 0) + len(chunk)
                time.sleep(len(chunk) / self.bytes_per_s)

    @property
    def weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def tree(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for path in sorted(self.folder.iterdir()):
            size = path.stat().st_size
            entry: dict[str, object] = {"type": "file", "oid": "0" * 40, "size": size, "path": path.name}
            if path.suffix in {".safetensors", ".gguf"}:
                entry["lfs"] = {"oid": _sha256(path), "size": size, "pointerSize": 134}
            found.append(entry)
        return found


def _sha256(path: Path) -> str:
    return _sha256_of(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256_of(path: Path, modified_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _handler(hub: ModelHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            api = f"/api/models/{NAME}"
            if hub.is_closed:
                self._send(403, b"", {"x-error-message": "closed"})
            elif path.startswith(f"{api}/tree/"):
                self._send(200, json.dumps(hub.tree()).encode())
            elif path.startswith(f"{api}/revision/") or path == api:
                self._send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": [], "tags": []}).encode())
            elif (file := hub.folder / path.rpartition("/")[2]).is_file() and "/resolve/" in path:
                self._send_file(file, with_body=with_body)
            else:
                self._send(404, b"", {"x-error-code": "EntryNotFound"})

        def _send_file(self, file: Path, *, with_body: bool) -> None:
            content = bytearray(file.read_bytes())
            headers = {"x-repo-commit": COMMIT, "etag": f'"{_sha256(file)}"', "accept-ranges": "bytes"}
            if not with_body:
                self._send(200, b"", {**headers, "content-length": str(len(content))})
                return
            if file.name in hub.damaged:
                content[-1] ^= 1
            if file.name in hub.flipped:
                content[hub.flipped[file.name]] ^= 1
            asked = self.headers.get("range")
            begin, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or len(content) - 1), len(content) - 1)
            if asked and end:
                hub.ranges.append((file.name, first, last + 1))
            is_part = bool(asked) and hub.fault != "whole"
            part = bytes(content[first : last + 1]) if is_part else bytes(content)
            if is_part:
                shift = hub.fault == "shifted"
                headers["content-range"] = f"bytes {first + shift}-{last + shift}/{len(content)}"
            if asked and hub.fault == "compressed":
                headers["content-encoding"] = "gzip"
            if asked and hub.fault == "endless":
                part += bytes(1 << 20)
            if asked and hub.fault == "silent":
                hub.closing.wait(60)
                self.close_connection = True
                return
            stop = hub.stop_after.pop(file.name, len(part))
            if asked and hub.fault in _SHORT:
                stop = _SHORT[hub.fault](len(part))
            self.send_response(206 if is_part else 200)
            for name, value in {**headers, "content-length": str(len(part))}.items():
                self.send_header(name, value)
            self.end_headers()
            if asked and hub.fault == "drop by drop":
                while not hub.closing.wait(0.02):
                    hub.send(file.name, part[:1], self.wfile.write)
            hub.send(file.name, part[:stop], self.wfile.write)
            self.close_connection = stop < len(part)

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            own = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
            for name, value in own.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def model_hub(model: Path, folder: Path) -> Iterator[ModelHub]:
    """Serve the files of ``model``; huggingface_hub keeps its cache in ``folder``."""
    hub = ModelHub(model)
    with stand_in(_handler(hub), folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
        hub.address = huggingface_hub.constants.ENDPOINT
        yield hub
        hub.closing.set()
