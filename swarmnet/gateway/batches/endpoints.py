"""``/v1/files`` and ``/v1/batches``, as OpenAI has them.

1. A caller sends a file of lines, and a batch that names the file.
2. :meth:`BatchEndpoints.running` takes one batch after another, the keys in turn, and answers the
   lines. The file of answers is the record of the batch, so a restarted gateway continues.
3. The caller asks for the batch until it has ended, and reads the file ``output_file_id``.
"""

import asyncio
import email
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from pydantic import Field

from swarmnet.gateway.batches.answering import LineAnswerer, answer_lines
from swarmnet.gateway.batches.journal import Journal
from swarmnet.gateway.batches.lines import checked_ids, read_lines
from swarmnet.gateway.batches.store import MAX_FILE_BYTES, BatchStore, StoresByKey
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.parsing import BodyParser
from swarmnet.gateway.protocols.schemas import StrictModel, at_most
from swarmnet.web.middleware import key_name
from swarmnet_protocols.errors import ConfigError, SwarmnetError
from swarmnet_protocols.machine.aio import in_background, persist, race
from swarmnet_protocols.machine.files import make_private
from swarmnet_protocols.machine.platform import lock

FILES = "/v1/files"
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + (64 << 10)
"""Longest body with a file: the form around the file has a few hundred bytes."""
MAX_PARTS = 8
"""Most parts of a form. Clients send three at most."""
MAX_HEAD_BYTES = 4096
"""Longest headers of a part."""
AT_ONCE = 16
"""Lines that are answered at a time. With fewer, hosts compute small forwards. With more, a batch
that ends early wastes more answers."""
RETRY_S = 30.0
"""Seconds until a batch is tried again after the swarm did not answer."""


class BatchBody(StrictModel):
    """A new batch. ``metadata`` has OpenAI's limits: lists of batches contain it."""

    input_file_id: str = Field(max_length=64)
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"] = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], at_most(16)
        ]
        | None
    ) = None


class BatchEndpoints:
    """The files and batches of all keys, and the batch that is being answered."""

    def __init__(
        self,
        folder: Path,
        answerer: Callable[[str], LineAnswerer],
        parser: BodyParser,
        clock: Callable[[], float],
    ) -> None:
        """``answerer`` returns the answerer of a key's lines."""
        self._folder = folder
        self._stores = StoresByKey(folder, clock)
        self._answerer = answerer
        self._parser = parser
        self._clock = clock
        self._served: Counter[str] = Counter()
        """Batches of each key that were taken so far."""
        self._present: dict[str, Any] | None = None
        """The batch that is being answered."""
        self._ended = asyncio.Event()
        """Set when the present batch is cancelled, or its key has no room for more answers."""
        self._news = asyncio.Event()
        """Set when a batch is new or cancelled."""
        self._is_ours = False
        """Whether this process answers the batches of the folder."""

    def add_routes(self, app: FastAPI) -> None:
        for path, endpoint, method in (
            (FILES, self.add_file, "POST"),
            (FILES, self.files, "GET"),
            (f"{FILES}/{{file_id}}", self.file, "GET"),
            (f"{FILES}/{{file_id}}", self.delete_file, "DELETE"),
            (f"{FILES}/{{file_id}}/content", self.content, "GET"),
            ("/v1/batches", self.add_batch, "POST"),
            ("/v1/batches", self.batches, "GET"),
            ("/v1/batches/{batch_id}", self.batch, "GET"),
            ("/v1/batches/{batch_id}/cancel", self.cancel, "POST"),
        ):
            app.add_api_route(path, endpoint, methods=[method], response_model=None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer batches while the context is open, unless another process has the folder. Then
        requests about batches are refused."""
        with self._locked() as self._is_ours:
            if not self._is_ours:
                yield
                return
            async with in_background(persist("the batches", self._answer_all)):
                yield

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        make_private(self._folder)
        with ExitStack() as stack:
            descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, descriptor)
            try:
                lock(descriptor)
            except BlockingIOError:
                yield False
                return
            yield True

    # ---- endpoints ------------------------------------------------------------------------------

    async def add_file(self, request: Request) -> dict[str, Any]:
        store = self._store(request)
        kind = request.headers.get("content-type", "")
        body = await request.body()
        try:
            name, purpose, content = await asyncio.to_thread(_form, kind, body)
        except ValueError as error:  # a header names an encoding that does not exist
            raise ApiError(400, "the headers of the form are invalid", "invalid_form") from error
        if purpose != "batch":
            raise ApiError(400, "the purpose of a file is batch", "invalid_value", param="purpose")
        return await asyncio.to_thread(store.add_file, name, purpose, content)

    async def files(self, request: Request) -> dict[str, Any]:
        return _page(request, self._store(request).objects("file"))

    async def file(self, file_id: str, request: Request) -> dict[str, Any]:
        return self._store(request).find(file_id, "file")

    async def delete_file(self, file_id: str, request: Request) -> dict[str, Any]:
        self._store(request).delete_file(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    async def content(self, file_id: str, request: Request) -> FileResponse:
        store = self._store(request)
        path = store.content(store.find(file_id, "file")["id"])
        return FileResponse(path, media_type="application/jsonl")

    async def add_batch(self, request: Request) -> dict[str, Any]:
        store = self._store(request)
        body = self._parser.parse(await request.body(), BatchBody)
        store.find(body.input_file_id, "file")
        times = dict.fromkeys(
            f"{what}_at"
            for what in (
                "in_progress",
                "finalizing",
                "completed",
                "failed",
                "expired",
                "cancelling",
                "cancelled",
            )
        )
        about: dict[str, Any] = {
            **body.model_dump(),
            "status": "validating",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        batch = store.add_batch(times | about)
        self._news.set()
        return batch

    async def batches(self, request: Request) -> dict[str, Any]:
        return _page(request, self._store(request).objects("batch"))

    async def batch(self, batch_id: str, request: Request) -> dict[str, Any]:
        return self._known(self._store(request).find(batch_id, "batch"))

    async def cancel(self, batch_id: str, request: Request) -> dict[str, Any]:
        store = self._store(request)
        batch = self._known(store.find(batch_id, "batch"))
        if batch["status"] not in {"validating", "in_progress"}:
            raise ApiError(409, f"this batch is {batch['status']}", "invalid_value")
        self._set(store, batch, "cancelling")
        if batch is self._present:
            self._ended.set()
        self._news.set()
        return batch

    def _known(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the present batch itself, whose counts change, in place of its copy on disk."""
        present = self._present
        return present if present is not None and present["id"] == batch["id"] else batch

    def _store(self, request: Request) -> BatchStore:
        if not self._is_ours:
            message = "another endpoint of this user has the batches of this model"
            raise ApiError(503, message, "batches_elsewhere", "server_error")
        return self._stores.of(key_name(request))

    # ---- answering ------------------------------------------------------------------------------

    async def _answer_all(self) -> None:
        while True:
            self._news.clear()
            left = sorted(
                self._stores.unfinished(), key=lambda each: (self._served[each[0]], each[1]["created_at"])
            )
            if not left:
                await self._news.wait()
                continue
            key, batch = left[0]
            self._served[key] += 1
            self._present = batch
            self._ended.clear()
            try:
                await self._answer(key, self._stores.of(key), batch)
            except (SwarmnetError, ApiError):
                await asyncio.sleep(RETRY_S)
            finally:
                self._present = None

    async def _answer(self, key: str, store: BatchStore, batch: dict[str, Any]) -> None:
        """Answer one batch to its end. Raises ``Unreachable`` if the swarm does not answer."""
        source = store.content(batch["input_file_id"])
        try:
            if batch["status"] != "cancelling":
                ids = await asyncio.to_thread(lambda: checked_ids(read_lines(source, "")))
                batch["request_counts"]["total"] = len(ids)
            if (output := batch["output_file_id"]) is None:
                made = store.add_file(f"{batch['id']}_output.jsonl", "batch_output", b"")
                output = batch["output_file_id"] = made["id"]
        except (ApiError, ConfigError) as error:
            code = error.code if isinstance(error, ApiError) else "invalid_line"
            message = error.message if isinstance(error, ApiError) else str(error)
            batch["errors"] = _errors(code, message.replace(str(source), "the file"))
            self._set(store, batch, "failed")
            return
        with Journal.open(store.content(output)) as journal:

            def count() -> None:
                batch["request_counts"] |= {"completed": journal.completed, "failed": journal.failed}
                if not store.has_room:
                    self._ended.set()

            status = "cancelled"
            if batch["status"] != "cancelling":
                self._set(store, batch, "in_progress")
                work = answer_lines(read_lines(source, ""), journal, self._answerer(key), AT_ONCE, count)
                status = await self._until_expired(work, batch)
            count()
        made = store.find(output, "file")
        store.save(made | {"bytes": store.content(output).stat().st_size})
        self._set(store, batch, status)

    async def _until_expired(self, work: Awaitable[None], batch: dict[str, Any]) -> str:
        """Await ``work``, or an earlier end of the batch. Return the batch's last status."""

        async def answered() -> str:
            await work
            return "completed"

        async def ended() -> str:
            await self._ended.wait()
            if batch["status"] == "cancelling":
                return "cancelled"
            batch["errors"] = _errors("too_many_files", "the files of this key leave no room for answers")
            return "failed"

        async def expired() -> str:
            await asyncio.sleep(max(0.0, batch["expires_at"] - self._clock()))
            return "expired"

        return await race(answered(), ended(), expired())

    def _set(self, store: BatchStore, batch: dict[str, Any], status: str) -> None:
        batch["status"] = status
        batch[f"{status}_at"] = batch.get(f"{status}_at") or int(self._clock())
        store.save(batch)


def _errors(code: str, message: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"code": code, "message": message}]}


def _page(request: Request, objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the objects after ``after``, at most ``limit``, as a page of a list."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "100")
    if after is not None:
        ids = [fields["id"] for fields in objects]
        objects = objects[ids.index(after) + 1 :] if after in ids else []
    most = int(limit) if limit.isdecimal() and len(limit) <= 4 else 100
    page = objects[: max(1, most)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(objects) > len(page)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


def _form(content_type: str, body: bytes) -> tuple[str, str, bytes]:
    """Return the name, the purpose and the content of a file in a multipart form (RFC 7578). Raises
    ``ApiError``."""
    message = email.message_from_string(f"Content-Type: {content_type[:MAX_HEAD_BYTES]}\n\n")
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary:
        raise ApiError(400, "a file comes as multipart/form-data", "invalid_form")
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    name, purpose, content = "", "", None
    for part in (b"\r\n" + body).split(mark, MAX_PARTS)[1:]:
        head, found, data = part.partition(b"\r\n\r\n")
        if not found or len(head) > MAX_HEAD_BYTES:
            continue
        fields = email.message_from_bytes(head.strip() + b"\n\n")
        field = fields.get_param("name", header="content-disposition")
        if field == "purpose":
            purpose = data[:64].decode(errors="replace")
        elif field == "file":
            name, content = fields.get_filename() or "file.jsonl", data
    if content is None:
        raise ApiError(400, "the form has no field file", "missing_required_parameter", param="file")
    if len(content) > MAX_FILE_BYTES:
        raise ApiError(413, f"a file has at most {MAX_FILE_BYTES} bytes", "body_too_large")
    return name, purpose, content
