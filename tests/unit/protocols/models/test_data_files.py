"""Odd data files: each gives the right text, or an error with the line."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import os

import pyarrow
import pytest
from pyarrow import parquet

from swarmnet_protocols.models.text import data_files
from swarmnet_protocols.models.text.data_files import (
    TEXT_DOCUMENT_BYTES,
    DataFileError,
    json_lines,
    opened,
    parquet_rows,
    text_documents,
)
from tests.defences import defence, nothing, replacing

TEXT = "één\nzwei\n三\n"
LONG = "日本語の長い文" * 20_000
LINES = b"".join(b"line %d\n" % number for number in range(30_000))
ROW = json.dumps({"text": "é\r\n"}).encode()


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, "zstd", asbytes=True))


def read_text(content: bytes) -> list[str]:
    return list(text_documents(opened(io.BytesIO(content), "book.txt"), "book.txt"))


def read_rows(content: bytes) -> list[tuple[int, bytes]]:
    return list(json_lines(opened(io.BytesIO(content), "rows.jsonl"), "rows.jsonl"))


READ = {
    "UTF-8": (TEXT.encode(), TEXT),
    "a byte order mark": (codecs.BOM_UTF8 + TEXT.encode(), TEXT),
    "line ends of Windows": (codecs.BOM_UTF8 + TEXT.replace("\n", "\r\n").encode(), TEXT),
    "line ends of old Macs": (TEXT.replace("\n", "\r").encode(), TEXT),
    "a CRLF across documents": (b"x" * (2 * TEXT_DOCUMENT_BYTES - 1) + b"\r\ny", "x" * (2 * TEXT_DOCUMENT_BYTES - 1) + "\ny"),
    "one long line": (codecs.BOM_UTF8 + LONG.encode(), LONG),
    "no text": (b"", ""),
    "gzip": (gzip.compress(TEXT.encode()), TEXT),
    "gzip in two parts": (gzip.compress(b"one\n") + gzip.compress(b"two\n"), "one\ntwo\n"),
    "zstd": (zstd(LINES), LINES.decode()),
    "zstd in two parts": (zstd(b"one\n") + zstd(b"two\n"), "one\ntwo\n"),
    "a small file of one letter": (gzip.compress(b"x" * (1 << 20)), "x" * (1 << 20)),
}  # fmt: skip


@pytest.mark.parametrize(("content", "text"), READ.values(), ids=READ)
def test_a_text_file_has_the_same_text_in_every_form(content: bytes, text: str) -> None:
    documents = read_text(content)
    assert "".join(documents) == text
    assert max(map(len, documents), default=0) <= 2 * TEXT_DOCUMENT_BYTES
    if text == LINES.decode():
        assert all(document.endswith("\n") for document in documents)
        assert len(documents) == -(-len(text) // TEXT_DOCUMENT_BYTES)


def damaged(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


ZIPPED = gzip.compress(LINES)
REFUSED = {
    "UTF-16": ("text".encode("utf-16"), "1: the file is in UTF-16"),
    "UTF-16 big endian": (codecs.BOM_UTF16_BE + "text".encode("utf-16-be"), "1: the file is in UTF-16"),
    "UTF-32": ("text".encode("utf-32"), "1: the file is in UTF-16 or UTF-32"),
    "UTF-16 without a mark": (b"one\n" + "text".encode("utf-16-le"), "2: a zero byte, .* at byte 6"),
    "a zero byte": (b"one\ntwo\nth\0ree", "3: a zero byte, so this is no text, at byte 11 of the file"),
    "Latin-1": ("ja\nein schöner Tag".encode("latin-1"), "2: not UTF-8 at byte 11 of the file"),
    "Latin-1 far behind": (b"x" * 100_000 + b"\n" + b"y" * 40_000 + b"\xf6", "2: not UTF-8 at byte 140002"),
    "half a character at the end": (b"one\n" + "ö".encode()[:1], "2: not UTF-8 at byte 5"),
    "bzip2": (bz2.compress(b"text"), "1: the file is compressed by bzip2"),
    "xz": (lzma.compress(b"text"), "1: the file is compressed by xz"),
    "gzip twice": (gzip.compress(gzip.compress(b"text")), "1: the file is compressed by gzip twice"),
    "parquet": (b"PAR1" + bytes(8), "1: the file is a parquet file"),
    "a gzip file that is cut off": (ZIPPED[: len(ZIPPED) // 2], r"\d{4,}: the gzip file is cut off"),
    "a gzip file with a wrong sum": (damaged(ZIPPED, -5 + len(ZIPPED)), r"\d{4,}: the gzip file is cut off or damaged"),
    "a zstd file that is cut off": (zstd(LINES)[:-3], r"\d+: the zstd file is cut off"),
    "random bytes after a mark of zstd": (b"\x28\xb5\x2f\xfd" + bytes(range(255, 200, -1)), "1: the zstd file is"),
}  # fmt: skip


@defence(
    "a file of another kind is not read as text",
    off=replacing(data_files, "_check_kind", nothing),
    what="1: the file is in UTF-16 or UTF-32",
)
@pytest.mark.parametrize(("content", "what"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_no_text_is_refused_with_its_line(content: bytes, what: str) -> None:
    with pytest.raises(DataFileError, match=rf"^book\.txt:{what}") as caught:
        read_text(content)
    assert caught.value.hint


@defence(
    "a file that grows out of proportion is not read to its end",
    off=replacing(data_files, "MAX_EXPANSION", 10**9),
    kind="gzip",
)
@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_decompression_bomb_is_refused_with_its_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "FREE_EXPANSION_BYTES", 1 << 20)
    content = b"one\n" + b" " * (64 << 20)
    bomb = gzip.compress(content, 1) if kind == "gzip" else zstd(content)
    with pytest.raises(DataFileError, match=rf"^book\.txt:2: the {kind} file grows to more than 200 times"):
        read_text(bomb)


@defence(
    "a row of a parquet file that repeats a text is refused before the text is copied",
    off=replacing(data_files, "_text_bytes", lambda values: 0),
    limit="MAX_LINE_BYTES",
)
@defence(
    "a giant row group of a parquet file is not read",
    off=replacing(data_files, "_check_group", nothing),
    limit="MAX_GROUP_BYTES",
)
@pytest.mark.parametrize(
    ("limit", "what"),
    [("MAX_LINE_BYTES", "2: a row of more"), ("MAX_GROUP_BYTES", "1: a row group of 2 MiB")],
)
def test_a_parquet_file_that_grows_too_large_is_refused(
    limit: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pyarrow.table({"messages": [[{"content": "one"}], [{"content": "x" * 1000}] * 300_000]})
    file = io.BytesIO()
    parquet.write_table(table, file)
    assert len(file.getvalue()) < 1 << 14
    monkeypatch.setattr(data_files, limit, 1 << 20)
    with pytest.raises(DataFileError, match=rf"^rows\.parquet:{what}"):
        list(parquet_rows(file, "rows.parquet", ["messages"]))


def test_a_text_that_a_map_repeats_counts_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    maps = [[("one", "two")], [(str(number), "x" * 1000) for number in range(3000)]]
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"messages": pyarrow.array(maps, kind)}), file)
    assert len(file.getvalue()) < 1 << 16
    monkeypatch.setattr(data_files, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(DataFileError, match=r"^rows\.parquet:2: a row of more"):
        list(parquet_rows(file, "rows.parquet", ["messages"]))


ROWS = {
    "plain": ROW + b"\n" + ROW,
    "a byte order mark": codecs.BOM_UTF8 + ROW + b"\n" + ROW + b"\n",
    "line ends of Windows": ROW + b"\r\n" + ROW + b"\r\n",
    "gzip": gzip.compress(ROW + b"\n" + ROW),
    "zstd": zstd(ROW + b"\n" + ROW),
}


@pytest.mark.parametrize("content", ROWS.values(), ids=ROWS)
def test_a_file_of_rows_has_the_same_rows_in_every_form(content: bytes) -> None:
    rows = [(number, json.loads(line)) for number, line in read_rows(content)]
    assert rows == [(1, {"text": "é\r\n"}), (2, {"text": "é\r\n"})]


BAD_ROWS = {
    "UTF-16": (ROW.decode().encode("utf-16"), "1: the file is in UTF-16"),
    "a zero byte": (ROW + b"\n\n\0", "3: a zero byte"),
    "a gzip file that is cut off": (gzip.compress(ROW + b"\n" + os.urandom(200_000).hex().encode())[:-9], "1: the gzip file is cut off"),
    "a line without an end": (ROW + b"\n" + b"x" * (1 << 20), "2: a line of more than"),
}  # fmt: skip


@defence(
    "a row has a largest size",
    off=replacing(data_files, "MAX_LINE_BYTES", 1 << 30),
    what="2: a line of more than",
)
@pytest.mark.parametrize(("content", "what"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_file_of_rows_that_is_odd_is_refused_with_its_line(
    content: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if data_files.MAX_LINE_BYTES < 1 << 30:
        monkeypatch.setattr(data_files, "MAX_LINE_BYTES", 1 << 19)
    with pytest.raises(DataFileError, match=rf"^rows\.jsonl:{what}"):
        read_rows(content)
