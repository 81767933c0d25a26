"""Reads files of text and of rows for training, one piece in memory at a time.

1. ``opened`` decompresses gzip and zstd, which the first bytes of a file show.
2. ``text_documents`` cuts a text file into documents, ``json_lines`` a file of JSON Lines into
   lines, ``parquet_rows`` a parquet file into rows.

Text is UTF-8, with or without a byte order mark, and with the line ends of any system. Other files
are refused with their name and the line.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from swarmnet_protocols.errors import ConfigError, how_to_add

MAX_LINE_BYTES = 16 << 20
"""Most bytes of a row. A larger limit lets one line fill the memory; a smaller one refuses books in
one row."""
TEXT_DOCUMENT_BYTES = 16 << 10
"""Bytes after which a document of a text file ends at the next line end."""
MAX_EXPANSION = 200
"""Most bytes that a byte of a compressed file may become. Text becomes 3 to 20, and logs that
repeat themselves up to a hundred. gzip can reach 1032, zstd thousands."""
FREE_EXPANSION_BYTES = 64 << 20
"""Decompressed bytes up to which any expansion is accepted."""
MAX_GROUP_BYTES = 2 << 30
"""Most bytes of a parquet file's row group. A larger limit lets one group fill the memory. A
smaller one refuses the files of large datasets."""

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_KINDS = {
    _GZIP: ("compressed by gzip twice", "decompress it: gunzip FILE"),
    _ZSTD: ("compressed by zstd twice", "decompress it: unzstd FILE"),
    b"BZh": ("compressed by bzip2", "decompress it: bunzip2 FILE"),
    b"\xfd7zXZ\0": ("compressed by xz", "decompress it: unxz FILE"),
    b"\x04\x22\x4d\x18": ("compressed by lz4", "decompress it: unlz4 FILE"),
    b"PK\x03\x04": ("a zip archive or an office document", "extract its text"),
    b"%PDF-": ("a PDF", "extract its text: pdftotext FILE"),
    b"PAR1": ("a parquet file", 'set the format "parquet"'),
    codecs.BOM_UTF16_LE: ("in UTF-16 or UTF-32", "save it as UTF-8"),
    codecs.BOM_UTF16_BE: ("in UTF-16", "save it as UTF-8"),
    codecs.BOM_UTF32_BE: ("in UTF-32", "save it as UTF-8"),
}
"""Files that are not UTF-8 text, by their first bytes: what they are, and what to do."""
_ROWS_AT_ONCE = 64
_VALUE_BYTES = 8
"""Bytes of a value of a parquet file in memory, without its text: its levels and its index."""


class DataFileError(ConfigError):
    """A file of data that cannot be read, with its name and the line."""

    def __init__(self, name: str, line: int, what: str, hint: str) -> None:
        super().__init__(f"{name}:{line}: {what}", hint=hint)


class _Broken(Exception):
    """A compressed file that cannot be decompressed, or should not be."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.hint = hint


class _Decompressed(io.RawIOBase):
    """The content of the gzip or zstd file ``stream``.

    Reading raises ``_Broken`` if the file is damaged or grows out of proportion.
    """

    def __init__(self, stream: BinaryIO, kind: str) -> None:
        self._stream = stream
        self._kind = kind
        self._done = 0
        self._content: Any
        if kind == "gzip":
            self._content = gzip.GzipFile(fileobj=stream)
        else:
            try:
                import pyarrow
            except ImportError as error:
                raise _Broken("is compressed by zstd, which needs pyarrow", how_to_add("pyarrow")) from error
            self._content = pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            read = self._content.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            if not _is_damage(error):
                raise
            raise _Broken(
                f"the {self._kind} file is cut off or damaged after this line: {error}", "get the file again"
            ) from error
        self._done += len(read)
        if self._done > max(FREE_EXPANSION_BYTES, MAX_EXPANSION * self._stream.tell()):
            raise _Broken(
                f"the {self._kind} file grows to more than {MAX_EXPANSION} times its size",
                "decompress it yourself if this is meant",
            )
        buffer[: len(read)] = read
        return len(read)


def opened(stream: BinaryIO, name: str) -> BinaryIO:
    """Return the content of a file, decompressed if its first bytes are those of gzip or zstd.

    ``stream`` must be at its beginning, and seekable.
    """
    start = stream.read(4)
    stream.seek(0)
    for magic, kind in ((_GZIP, "gzip"), (_ZSTD, "zstd")):
        if start.startswith(magic):
            try:
                return io.BufferedReader(_Decompressed(stream, kind), 1 << 16)
            except _Broken as error:
                raise DataFileError(name, 1, str(error), error.hint) from error
    return stream


def text_documents(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yield the documents of a text file: at least ``TEXT_DOCUMENT_BYTES``, up to a line end.

    Line ends become ``\\n``. No document splits a character, even where a line is longer than a
    document. Raises ``DataFileError``.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    done, lines = 0, 1
    part = b"-"
    while part:
        try:
            part = stream.read(TEXT_DOCUMENT_BYTES)
            part += stream.readline(TEXT_DOCUMENT_BYTES) if part else b""
        except _Broken as error:
            raise DataFileError(name, lines, str(error), error.hint) from error
        if not done:
            _check_kind(part, name)
        try:
            text = decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            # The character may have begun in the part before.
            at = len(part) - (len(error.object) - error.start)
            raise _no_text(name, lines, part, done, at, "not UTF-8") from error
        if (at := part.find(b"\0")) >= 0:
            raise _no_text(name, lines, part, done, at, "a zero byte, so this is no text,")
        if text:
            yield text
        done += len(part)
        lines += part.count(b"\n")


def _no_text(name: str, lines: int, part: bytes, done: int, at: int, what: str) -> DataFileError:
    line = lines + part.count(b"\n", 0, max(0, at))
    return DataFileError(name, line, f"{what} at byte {done + at + 1} of the file", "save it as UTF-8")


def _too_long(name: str, line: int, what: str) -> DataFileError:
    return DataFileError(name, line, f"a {what} of more than {MAX_LINE_BYTES >> 20} MiB", "split the row")


def json_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty with its number, from 1. Raises ``DataFileError``."""
    number = 0
    while True:
        try:
            line = stream.readline(MAX_LINE_BYTES + 1)
        except _Broken as error:
            raise DataFileError(name, max(1, number), str(error), error.hint) from error
        if not line:
            return
        number += 1
        if number == 1:
            _check_kind(line, name)
            line = line.removeprefix(codecs.BOM_UTF8)
        if len(line) > MAX_LINE_BYTES:
            raise _too_long(name, number, "line")
        if b"\0" in line:
            raise DataFileError(name, number, "a zero byte, so this is no text", "save it as UTF-8")
        if line.strip():
            yield number, line


def parquet_rows(stream: BinaryIO, name: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number of each row, from 1, and its values in ``columns``.

    Columns that the file lacks are left out. Raises ``DataFileError``, whose line is the number of
    the row.
    """
    number = 0
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataFileError(name, 1, "parquet needs pyarrow", how_to_add("pyarrow")) from error
    try:
        footer = parquet.read_metadata(stream)
        leaves = [footer.schema.column(leaf) for leaf in range(footer.num_columns)]
        # Texts stay in dictionaries, so that a text that many rows share is in memory once.
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        file = parquet.ParquetFile(
            stream, metadata=footer, buffer_size=1 << 20, pre_buffer=False, read_dictionary=texts
        )
        found = [column for column in columns if column in file.schema_arrow.names]
        if not found:
            have = ", ".join(file.schema_arrow.names[:8])
            raise DataFileError(
                name, 1, f"no column {' or '.join(map(repr, columns))}", f"the file has the columns {have}"
            )
        read = [leaf for leaf, each in enumerate(leaves) if each.path.partition(".")[0] in found]
        for group in range(footer.num_row_groups):
            _check_group(footer.row_group(group), read, name, number + 1)
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=found):
                fits = _text_bytes(batch) <= MAX_LINE_BYTES
                for at in range(len(batch)):
                    number += 1
                    row = batch.slice(at, 1)
                    if not fits and _text_bytes(row) > MAX_LINE_BYTES:
                        raise _too_long(name, number, "row")
                    yield number, row.to_pylist()[0]
    except (ArrowException, OSError) as error:
        if not _is_damage(error):
            raise
        raise DataFileError(
            name, number + 1, f"the parquet file is cut off or damaged: {error}", "get the file again"
        ) from error


def _check_group(group: Any, columns: Sequence[int], name: str, line: int) -> None:
    """Raise ``DataFileError`` for a row group whose ``columns`` may take too much memory."""
    chunks = [group.column(column) for column in columns]
    size = sum(chunk.total_uncompressed_size + _VALUE_BYTES * chunk.num_values for chunk in chunks)
    if size > MAX_GROUP_BYTES:
        raise DataFileError(
            name,
            line,
            f"a row group of {size >> 20} MiB, more than {MAX_GROUP_BYTES >> 20} MiB",
            "write the file again with smaller row groups",
        )


def _text_bytes(values: Any) -> int:
    """Return the bytes that a pyarrow batch or array takes as Python values, without making any."""
    from pyarrow import RecordBatch, compute, types

    if isinstance(values, RecordBatch):
        return sum(map(_text_bytes, values.columns))
    if types.is_map(values.type):
        start, end = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return sum(_text_bytes(each.slice(start, end - start)) for each in (values.keys, values.items))
    if types.is_nested(values.type):  # structs, and lists of every kind
        inner = values.flatten()
        return sum(map(_text_bytes, inner)) if isinstance(inner, list) else _text_bytes(inner)
    if types.is_dictionary(values.type):
        lengths = compute.cast(compute.binary_length(values.dictionary), "int64")
        return compute.sum(lengths.take(values.indices)).as_py() or 0
    if types.is_string(values.type) or types.is_binary(values.type):
        return compute.sum(compute.binary_length(values)).as_py() or 0
    return int(values.nbytes)


def _is_damage(error: Exception) -> bool:
    """Return whether ``error`` is about the content of a file.

    pyarrow then raises a plain ``OSError`` without a number. Errors of a disk have a number, and
    errors of a connection have another class.
    """
    return (
        not isinstance(error, OSError)
        or type(error) is gzip.BadGzipFile
        or (type(error) is OSError and error.errno is None)
    )


def _check_kind(start: bytes, name: str) -> None:
    for magic, (kind, hint) in _KINDS.items():
        if start.startswith(magic):
            raise DataFileError(name, 1, f"the file is {kind}", hint)
