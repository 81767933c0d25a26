"""``/v1/files`` and ``/v1/batches``, as OpenAI has them.

1. A caller sends a file of lines, and a batch that names the file.
2. The queue answers the lines (``queue.py``).
3. The caller asks for the batch until it has ended, and reads the file ``output_file_id``.
"""

import asyncio
import email
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from pydantic import Field

from swarmnet.gateway.accounts import KeyAccounts
from swarmnet.gateway.batches.queue import BatchQueue
from swarmnet.gateway.batches.store import MAX_FILE_BYTES, UNFINISHED, BatchStore
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.parsing import BodyParser
from swarmnet.gateway.protocols.schemas import StrictModel, at_most
from swarmnet.web.middleware import key_name

FILES = "/v1/files"
MAX_UPLOAD_BYTES = MAX_FILE_BYTES + (64 << 10)
"""Longest body with a file: the form around the file has a few hundred bytes."""
MAX_PARTS = 8
"""Most parts of a form. Clients send three at most."""
MAX_HEAD_BYTES = 4096
"""Longest headers of a part."""
STATUSES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""The statuses after the first one. A batch has the time of each."""


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


@dataclass(frozen=True)
class BatchEndpoints:
    """The endpoints of files and batches. ``queue`` answers the batches."""

    accounts: KeyAccounts
    parser: BodyParser
    queue: BatchQueue

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
        return await store.add_file(name, purpose, content)

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
        body = self.parser.parse(await request.body(), BatchBody)
        store.find(body.input_file_id, "file")
        about: dict[str, Any] = {
            **dict.fromkeys(f"{status}_at" for status in STATUSES),
            **body.model_dump(),
            "status": "validating",
            "errors": None,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        batch = store.add_batch(about)
        self.queue.start(self.accounts[key_name(request)])
        return batch

    async def batches(self, request: Request) -> dict[str, Any]:
        return _page(request, self._store(request).objects("batch"))

    async def batch(self, batch_id: str, request: Request) -> dict[str, Any]:
        return self._store(request).find(batch_id, "batch")

    async def cancel(self, batch_id: str, request: Request) -> dict[str, Any]:
        store = self._store(request)
        batch = store.find(batch_id, "batch")
        if batch["status"] not in UNFINISHED:
            raise ApiError(409, f"this batch is {batch['status']}", "invalid_value")
        store.set_status(batch, "cancelled")
        await self.queue.cancelled.tell()
        return batch

    def _store(self, request: Request) -> BatchStore:
        return self.accounts[key_name(request)].files


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
