"""Reads a job's documents, one at a time, from local files or a Hugging Face dataset."""

import glob
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.fetching.hub_ranges import no_answer
from swarmnet_protocols.models.text.data_files import DataFileError, opened, text_documents
from swarmnet_protocols.models.text.rows import (
    ROW_FIELDS,
    BadRow,
    DataRow,
    fields_of,
    raw_rows,
    row_of,
    text_of,
)
from swarmnet_protocols.training.job_settings import PYTHON_STDLIB, DataSource, JobError

_SUFFIXES = {"text": ".txt", "jsonl": ".jsonl", "parquet": ".parquet"}
_COMPRESSED = ("", ".gz", ".zst")
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def files_of(source: DataSource) -> tuple[Path, ...]:
    """Return the local files of the data, in the same order on every machine.

    Raises ``JobError`` if there are none. Paths come only from the user of this machine: published
    jobs have none (``Job.check_published``).
    """
    if source.path is None:
        return ()
    if source.path == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = [path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts)]
    else:
        root = Path(source.path).expanduser()
        if root.is_dir():
            suffix = _SUFFIXES[source.format]
            found = [path for end in _COMPRESSED for path in root.rglob(f"*{suffix}{end}")]
        else:
            found = [Path(name) for name in glob.glob(str(root), recursive=True)]
    files = tuple(sorted((path for path in found if path.is_file()), key=Path.as_posix))
    if not files:
        raise JobError(
            "data",
            "path",
            f"is wrong: there is no {source.format} file {source.path}",
            hint=f"name a file, a glob, or a directory with *{_SUFFIXES[source.format]} files",
        )
    return files


@dataclass(frozen=True)
class Document:
    """A row of the data, and its place: file and line, or the file alone."""

    row: DataRow
    place: str


def documents(source: DataSource, files: tuple[Path, ...]) -> Iterator[Document]:
    """Yield every document, one in memory at a time.

    The split of a Hugging Face dataset consists of the files whose names begin with it. A text file
    is cut at line ends into documents of about ``TEXT_DOCUMENT_BYTES``.

    Raises ``JobError`` with file and line for a file that cannot be read or is not UTF-8 text, and
    for a bad row. Raises ``Unreachable`` if the hub does not answer.
    """
    return islice(_all_documents(source, files), source.max_documents)


def _all_documents(source: DataSource, files: tuple[Path, ...]) -> Iterator[Document]:
    if source.hub is not None:
        yield from _hub_documents(source, source.hub)
    for path in files:
        try:
            with path.open("rb") as stream:
                yield from _file_documents(stream, str(path), source)
        except OSError as error:
            raise JobError("data", "path", f"is wrong: cannot read {path}: {error.strerror}") from error


def _file_documents(stream: BinaryIO, name: str, source: DataSource) -> Iterator[Document]:
    try:
        if source.format == "text":
            for text in text_documents(opened(stream, name), name):
                yield Document(DataRow(text), name)
            return
        columns = ROW_FIELDS if source.field is None else (source.field,)
        is_parquet = source.format == "parquet"
        for number, raw in raw_rows(stream, name, is_parquet=is_parquet, columns=columns):
            place = f"{name}:{number}"
            try:
                row = _row(fields_of(raw), source.field)
            except BadRow as error:
                raise JobError(
                    "data",
                    "path" if source.field is None else "field",
                    f"is wrong: {place}: {error}",
                    hint="correct or remove the row, or name the field that holds its text",
                ) from error
            yield Document(row, place)
    except DataFileError as error:
        raise JobError("data", "path", f"is wrong: {error}", hint=error.hint) from error


def _row(fields: dict[str, Any], field: str | None) -> DataRow:
    if field is None:
        return row_of(fields, labelled=False)
    if field not in fields:
        raise BadRow(f"no field {field!r}")
    return DataRow(text_of(fields, field, may_be_empty=True))


def _hub_documents(source: DataSource, name: str) -> Iterator[Document]:
    """Stream the documents of a dataset. Ignore scripts and configuration in its repository."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(skip_instance_cache=True, use_listings_cache=False)
    suffix = _SUFFIXES[source.format]
    suffixes = tuple(f"{suffix}{end}" for end in _COMPRESSED)
    try:
        paths = [
            path
            for path in sorted(hub.find(f"datasets/{name}"))
            if PurePosixPath(path).name.startswith(source.split) and path.endswith(suffixes)
        ]
        for path in paths:
            # ``BufferedReader.readline`` takes a limit; the hub's file does not.
            with BufferedReader(hub.open(path, "rb")) as stream:
                yield from _file_documents(stream, path, source)
    except FileNotFoundError as error:
        raise JobError("data", "hub", f"is wrong: the hub has no dataset {name}: {error}") from error
    except no_answer() as error:
        raise Unreachable(f"the hub does not answer for {name}: {error}", hint="try again later") from error
    if not paths:
        raise JobError(
            "data",
            "split",
            f"is wrong: {name} has no file whose name begins with {source.split!r} and ends with {suffix!r}",
            hint="set split to the beginning of the file names, and format to their kind",
        )
