"""The documents of a job: bytes of UTF-8 text from local files or a dataset of the hub, one after the other."""

import glob
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.training.jobs import PYTHON_STDLIB, DataSection, JobError

MAX_LINE_BYTES = 16 << 20
TEXT_DOCUMENT_BYTES = 16 << 10
_SUFFIXES = {"text": "*.txt", "jsonl": "*.jsonl", "parquet": "*.parquet"}
_HUB = "hf://datasets/"
_INSTALL = "pip install 'swarmnet-p2p[data]'"
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def files_of(data: DataSection) -> tuple[Path, ...]:
    """The local files the data names, in an order that is the same on every machine. Raises ``JobError`` if there are none.

    A path comes from the user of this machine: no job of another peer has one (``Job.check_published``).
    """
    if data.path is None:
        return ()
    if data.path == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = [path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts)]
    else:
        root = Path(data.path).expanduser()
        if root.is_dir():
            found = list(root.rglob(_SUFFIXES[data.format]))
        else:
            found = [Path(name) for name in glob.glob(str(root), recursive=True)]
    files = tuple(sorted((path for path in found if path.is_file()), key=Path.as_posix))
    if not files:
        raise JobError(
            "data",
            "path",
            f"is wrong: there is no {data.format} file {data.path}",
            hint=f"name a file, a glob, or a directory with {_SUFFIXES[data.format]} files",
        )
    return files


def documents(data: DataSection, files: tuple[Path, ...]) -> Iterator[bytes]:
    """Every document, never more than one in memory. Of a dataset of the hub, those in the files whose names begin with the split's.

    A text file longer than ``TEXT_DOCUMENT_BYTES`` is several documents, cut at ends of lines. Raises ``JobError`` naming
    what cannot be read.
    """
    return islice(_all_documents(data, files), data.max_documents)


def _all_documents(data: DataSection, files: tuple[Path, ...]) -> Iterator[bytes]:
    if data.hub is not None:
        yield from _hub_rows(data, data.hub)
    for path in files:
        try:
            if data.format == "text":
                yield from _text(path)
            elif data.format == "jsonl":
                yield from _json_lines(path, data.field)
            else:
                yield from _parquet_rows(path, data.field)
        except OSError as error:
            raise JobError("data", "path", f"is wrong: cannot read {path}: {error.strerror}") from error


def _text(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while part := stream.read(TEXT_DOCUMENT_BYTES):
            yield part + stream.readline(TEXT_DOCUMENT_BYTES)


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    with path.open("rb") as stream:
        for number in range(1, 1 << 62):
            line = stream.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if not line.strip():
                continue
            where = f"{path}:{number}"
            if len(line) > MAX_LINE_BYTES:
                raise JobError("data", "path", f"is wrong: {where} is longer than {MAX_LINE_BYTES} bytes")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise JobError("data", "path", f"is wrong: {where} is not JSON") from error
            yield _field_of(row, field, where)


def _parquet_rows(path: Path, field: str) -> Iterator[bytes]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise JobError("data", "format", "needs pyarrow to read parquet", hint=_INSTALL) from error
    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise JobError("data", "field", f"is wrong: {path} has no column {field!r}")
        for batch in file.iter_batches(batch_size=64, columns=[field]):
            for value in batch.column(0).to_pylist():
                yield _field_of({field: value}, field, str(path))
    except ArrowException as error:
        raise JobError("data", "path", f"is wrong: {path} is not a parquet file") from error


def _hub_rows(data: DataSection, name: str) -> Iterator[bytes]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise JobError(
            "data", "hub", "needs the datasets package to stream from the hub", hint=_INSTALL
        ) from error
    try:
        # By the name alone, a folder of that name would be read instead; and what a repository says of itself may name files of this machine.
        files = f"{_HUB}{name}/**/{data.split}*{Path(_SUFFIXES[data.format]).suffix}"
        kind = {"jsonl": "json"}.get(data.format, data.format)
        by_document = {"sample_by": "document"} if data.format == "text" else {}
        for row in load_dataset(kind, data_files=files, split="train", streaming=True, **by_document):
            yield _field_of(row, data.field, name)
    except (DatasetsError, FileNotFoundError, ValueError) as error:
        raise JobError("data", "hub", f"is wrong: cannot stream {name!r}: {error}") from error
    except JobError:
        raise
    except Exception as error:
        raise Unreachable(f"the hub does not answer for {name}: {error}", hint="try again later") from error


def _field_of(row: Any, field: str, where: str) -> bytes:
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise JobError("data", "field", f"is wrong: {where} has no text in {field!r}")
    return value.encode("utf-8", "replace")
