"""Reads a job's documents, one at a time, from local files or a Hugging Face dataset."""

import codecs
import glob
import json
import sysconfig
from collections.abc import Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from swarmnet_protocols.errors import Unreachable, how_to_add
from swarmnet_protocols.fetching.hub_ranges import no_answer
from swarmnet_protocols.training.job_settings import PYTHON_STDLIB, DataSection, JobError

MAX_LINE_BYTES = 16 << 20
TEXT_DOCUMENT_BYTES = 16 << 10
_KINDS = {
    b"\x1f\x8b": ("compressed by gzip", "decompress it: gunzip FILE"),
    b"BZh": ("compressed by bzip2", "decompress it: bunzip2 FILE"),
    b"\xfd7zXZ\0": ("compressed by xz", "decompress it: unxz FILE"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "decompress it: unzstd FILE"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "decompress it: unlz4 FILE"),
    b"PK\x03\x04": ("a zip archive or an office document", "extract its text"),
    b"%PDF-": ("a PDF", "extract its text: pdftotext FILE"),
    codecs.BOM_UTF16_LE: ("in UTF-16 or UTF-32", "save it as UTF-8"),
    codecs.BOM_UTF16_BE: ("in UTF-16", "save it as UTF-8"),
    codecs.BOM_UTF32_BE: ("in UTF-32", "save it as UTF-8"),
}
"""Files that are not UTF-8 text, by their first bytes: what they are, and what to do."""
_SUFFIXES = {"text": "*.txt", "jsonl": "*.jsonl", "parquet": "*.parquet"}
_NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def files_of(data: DataSection) -> tuple[Path, ...]:
    """Return the local files of the data, in the same order on every machine.

    Raises ``JobError`` if there are none. Paths come only from the user of this machine: published
    jobs have none (``Job.check_published``).
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
    """Yield every document as UTF-8 bytes, one in memory at a time.

    The split of a Hugging Face dataset consists of the files whose names begin with it. A text file
    is cut at line ends into documents of about ``TEXT_DOCUMENT_BYTES``.

    Raises ``JobError`` with file and place if a file cannot be read or is not UTF-8 text, and
    ``Unreachable`` if the hub does not answer.
    """
    return islice(_all_documents(data, files), data.max_documents)


def _all_documents(data: DataSection, files: tuple[Path, ...]) -> Iterator[bytes]:
    if data.hub is not None:
        yield from _hub_documents(data, data.hub)
    for path in files:
        try:
            with path.open("rb") as stream:
                yield from _file_documents(stream, str(path), data)
        except OSError as error:
            raise JobError("data", "path", f"is wrong: cannot read {path}: {error.strerror}") from error


def _file_documents(stream: BinaryIO, where: str, data: DataSection) -> Iterator[bytes]:
    if data.format == "text":
        yield from _text_documents(stream, where)
    elif data.format == "jsonl":
        yield from _json_lines(stream, where, data.field)
    else:
        yield from _parquet_rows(stream, where, data.field)


def _text_documents(stream: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the documents of a text file, without a byte order mark.

    No document splits a character, even where a line is longer than a document.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    while part := stream.read(TEXT_DOCUMENT_BYTES):
        part += stream.readline(TEXT_DOCUMENT_BYTES)
        if not done:
            _check_kind(part, name)
        yield from _decoded(decoder, part, name, done, final=False)
        done += len(part)
    yield from _decoded(decoder, b"", name, done, final=True)


def _decoded(
    decoder: codecs.IncrementalDecoder, part: bytes, name: str, done: int, *, final: bool
) -> Iterator[bytes]:
    """Yield the whole characters of ``part`` as one document, or nothing if there are none.

    ``part`` begins at byte ``done`` of the file.
    """
    begun = len(decoder.getstate()[0])
    try:
        text = decoder.decode(part, final)
    except UnicodeDecodeError as error:
        place = done - begun + error.start + 1
        raise _not_text(name, f"is not UTF-8 at byte {place}", "save it as UTF-8") from error
    if "\0" in text:
        place = done - begun + len(text[: text.index("\0")].encode()) + 1
        raise _not_text(name, f"has a zero byte at byte {place}, so it is no text", "save it as UTF-8")
    if done == 0:
        text = text.removeprefix("\ufeff")
    if text:
        yield text.encode()


def _check_kind(start: bytes, name: str) -> None:
    """Raise ``JobError`` if the first bytes of a file show that it is not UTF-8 text."""
    for magic, (kind, hint) in _KINDS.items():
        if start.startswith(magic):
            raise _not_text(name, f"is {kind}", hint)


def _not_text(name: str, what: str, hint: str) -> JobError:
    return JobError("data", "path", f"is wrong: {name} {what}", hint=hint)


def _json_lines(stream: BinaryIO, name: str, field: str) -> Iterator[bytes]:
    for number in range(1, 1 << 62):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if number == 1:
            _check_kind(line, name)
        if not line.strip():
            continue
        where = f"{name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise JobError("data", "path", f"is wrong: {where} is longer than {MAX_LINE_BYTES} bytes")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise JobError("data", "path", f"is wrong: {where} is not JSON") from error
        yield _field_of(row, field, where)


def _parquet_rows(stream: BinaryIO, name: str, field: str) -> Iterator[bytes]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise JobError(
            "data", "format", "needs pyarrow to read parquet", hint=how_to_add("pyarrow")
        ) from error
    try:
        file = parquet.ParquetFile(stream)
        if field not in file.schema_arrow.names:
            raise JobError("data", "field", f"is wrong: {name} has no column {field!r}")
        for batch in file.iter_batches(batch_size=64, columns=[field]):
            for value in batch.column(0).to_pylist():
                yield _field_of({field: value}, field, name)
    except ArrowException as error:
        raise JobError("data", "path", f"is wrong: {name} is not a parquet file") from error


def _hub_documents(data: DataSection, name: str) -> Iterator[bytes]:
    """Stream the documents of a dataset. Ignore scripts and configuration in its repository."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(skip_instance_cache=True, use_listings_cache=False)
    suffix = Path(_SUFFIXES[data.format]).suffix
    try:
        paths = [
            path
            for path in sorted(hub.find(f"datasets/{name}"))
            if PurePosixPath(path).name.startswith(data.split) and path.endswith(suffix)
        ]
        for path in paths:
            # ``BufferedReader.readline`` takes a limit; the hub's file does not.
            with BufferedReader(hub.open(path, "rb")) as stream:
                yield from _file_documents(stream, path, data)
    except FileNotFoundError as error:
        raise JobError("data", "hub", f"is wrong: the hub has no dataset {name}: {error}") from error
    except no_answer() as error:
        raise Unreachable(f"the hub does not answer for {name}: {error}", hint="try again later") from error
    if not paths:
        raise JobError(
            "data",
            "split",
            f"is wrong: {name} has no file whose name begins with {data.split!r} and ends with {suffix!r}",
            hint="set split to the beginning of the file names, and format to their kind",
        )


def _field_of(row: Any, field: str, where: str) -> bytes:
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise JobError("data", "field", f"is wrong: {where} has no text in {field!r}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        what = f"{where} has half a character in {field!r}: \\u{ord(value[error.start]):x}"
        raise JobError("data", "field", f"is wrong: {what}") from error
