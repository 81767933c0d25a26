"""A dataset hub on this machine that answers the requests of ``HfFileSystem``."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import close_session

REVISION = "0123456789" * 4
NAME = f"org/name@{REVISION}"


@dataclass
class DatasetHub:
    """A hub with one dataset, ``NAME``, that has these ``files``, and a model of the same name
    with a tag ``v1``. The newest commit of both is ``REVISION``."""

    files: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by file."""

    def answer(self, path: str, wanted: str | None) -> bytes | None:
        """The answer to a GET of ``path`` with this byte range; None if there is no such file."""
        api, tree, file = (
            f"/api/datasets/org/name/revision/{REVISION}",
            f"/api/datasets/org/name/tree/{REVISION}",
            f"/datasets/org/name/resolve/{REVISION}/",
        )
        if path in {api, api.replace(REVISION, "main"), "/api/models/org/name/revision/v1"}:
            return json.dumps({"id": "org/name", "sha": REVISION, "siblings": [], "tags": []}).encode()
        if path == tree:
            entries = [
                {"type": "file", "oid": "0" * 40, "size": len(content), "path": name}
                for name, content in self.files.items()
            ]
            return json.dumps(entries).encode()
        content = self.files.get(name := path.removeprefix(file)) if path.startswith(file) else None
        if content is None or wanted is None:
            return None
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        part = content[first : last + 1]
        self.sent[name] = self.sent.get(name, 0) + len(part)
        return part


@contextmanager
def serving(hub: DatasetHub, folder: Path) -> Iterator[None]:
    """Serve ``hub`` to huggingface_hub, which keeps its own files in ``folder``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = hub.answer(unquote(urlsplit(self.path).path), self.headers.get("range"))
            self.send_response(404 if body is None else 200)
            if body is None:
                self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: object) -> None:
            pass

    with stand_in(Handler, folder):
        yield


@contextmanager
def stand_in(handler: type[BaseHTTPRequestHandler], folder: Path) -> Iterator[None]:
    """A server on this machine that huggingface_hub takes for the hub; its own files are in
    ``folder``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    constants = huggingface_hub.constants
    here = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, here)
        patch.setattr(constants, "ENDPOINT", here)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "AGENT_HARNESSES_PATH", str(folder / "agents.json"))
        try:
            yield
        finally:
            close_session()
            server.shutdown()
            server.server_close()
            thread.join()
