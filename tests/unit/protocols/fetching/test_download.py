"""Pieces from several sources: verified, bounded, shared out; a source that is wrong is named, one
that is slow is replaced."""

import asyncio
import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet_protocols.errors import (
    IntegrityError,
    OutOfResources,
    ProtocolViolation,
    StreamEnded,
    Unreachable,
)
from swarmnet_protocols.fetching import hub_ranges, peers, piece_file, server
from swarmnet_protocols.fetching.download import PieceSource, download
from swarmnet_protocols.fetching.peers import SwarmPeers, fetch_document
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import (
    HASH_BYTES,
    PIECE_BYTES,
    UNKNOWN,
    Hasher,
    ModelFile,
    PieceTable,
    Tables,
    cut,
    listing_hash,
    listing_of,
    pieces_between,
)
from swarmnet_protocols.fetching.server import WeightServer
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import weights_pb2 as pb
from tests.defences import defence, nothing, replacing, yes
from tests.support.network.virtual_time import run

DATA = random.Random(0).randbytes(5 * PIECE_BYTES + 1234)
HEAD_BYTES = 100
EDGES = [HEAD_BYTES, 5000, 2_000_000]
KEY = ModelFile("weights", len(DATA), hashlib.sha256(DATA).digest())


def table() -> PieceTable:
    hasher = Hasher(cut(len(DATA), EDGES))
    hasher.update(DATA)
    return hasher.table(HEAD_BYTES)


def new_file(folder: Path) -> PieceFile:
    file = PieceFile(folder / "file", KEY)
    file.create()
    file.use(table(), EDGES)
    return file


@dataclass
class Memory:
    """A source that has ``data`` and takes ``delay_s`` for each read."""

    name: str
    data: bytes = DATA
    delay_s: float = 0.01
    is_last: bool = False
    connections: int = 1
    max_bytes: int = PIECE_BYTES
    pieces: Sequence[int] = range(100)
    reads: list[tuple[int, int]] = field(default_factory=list)

    async def prepare(self) -> None:
        pass

    def has(self, file: ModelFile, piece: int) -> bool:
        return piece in self.pieces

    async def read(self, file: ModelFile, start: int, end: int) -> bytes:
        self.reads.append((start, end))
        await asyncio.sleep(self.delay_s)
        return self.data[start:end]


def fetch(file: PieceFile, *sources: PieceSource) -> dict[str, int]:
    return run(download([(file, range(len(file.starts) - 1))], sources))


def flipped() -> bytes:
    return DATA[:5000] + bytes([DATA[5000] ^ 1]) + DATA[5001:]


def test_pieces_cover_a_file_and_have_a_largest_size() -> None:
    starts = cut(len(DATA), EDGES)
    assert starts[0] == 0
    assert starts[-1] == len(DATA)
    assert set(EDGES) <= set(starts)
    assert all(0 < end - start <= PIECE_BYTES for start, end in itertools.pairwise(starts))
    assert pieces_between(starts, 0, 1) == range(1)
    assert pieces_between(starts, 100, 5000) == range(1, 2)
    assert pieces_between(starts, 4999, 5001) == range(1, 3)
    assert pieces_between(starts, 7, 7) == range(0)
    with pytest.raises(IntegrityError):
        cut(10, [11])


def test_pieces_come_from_several_sources_by_their_speed(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    taken = fetch(file, Memory("fast"), Memory("slow", delay_s=0.025))
    assert taken["fast"] > taken["slow"] > 0
    assert file.path.read_bytes() == DATA
    again = new_file(tmp_path)
    assert again.present_bytes() == len(DATA)
    assert fetch(again, Memory("none")) == {}


def test_the_hub_waits_for_peers_and_brings_what_they_lack(tmp_path: Path) -> None:
    peer, hub = Memory("peer", pieces=range(3)), Memory("hub", is_last=True, max_bytes=16 << 20)
    taken = fetch(new_file(tmp_path), peer, hub)
    assert sum(taken.values()) == len(DATA)
    assert taken["peer"] == cut(len(DATA), EDGES)[3]
    assert fetch(new_file(tmp_path / "slow"), Memory("peer", delay_s=10.0), hub)["hub"] > 0


@defence("a piece is hashed before it is kept", off=replacing(PieceFile, "_matches", yes))
def test_wrong_bytes_are_not_kept_and_their_source_is_named(tmp_path: Path) -> None:
    file, liar, honest = new_file(tmp_path), Memory("liar", flipped()), Memory("honest", delay_s=0.05)
    taken = fetch(file, liar, honest)
    assert file.path.read_bytes() == DATA
    assert taken["honest"] > 0
    with pytest.raises(IntegrityError, match="liar: it sent wrong bytes"):
        fetch(new_file(tmp_path / "alone"), liar)


def test_what_a_slow_source_does_not_bring_is_fetched_from_another(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    assert fetch(file, Memory("silent", delay_s=1e6), Memory("quick")) == {"quick": len(DATA)}
    assert file.path.read_bytes() == DATA


def test_a_download_without_a_source_fails_and_keeps_what_is_here(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    with pytest.raises(Unreachable, match="weights could not be fetched"):
        fetch(file, Memory("half", pieces=range(3)))
    assert new_file(tmp_path).present_bytes() == cut(len(DATA), EDGES)[3]


def test_a_full_disk_ends_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swarmnet_protocols.fetching import piece_file

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = new_file(tmp_path)
    monkeypatch.setattr(piece_file, "_write_all", full)
    with pytest.raises(OutOfResources, match="no space"):
        fetch(file, Memory("peer"))
    assert new_file(tmp_path).present_bytes() == 0


@defence("a partial file is marked when it has reached the disk", off=replacing(piece_file, "SYNC_BYTES", 0))
def test_only_pieces_that_reached_the_disk_are_marked(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    file.write(0, DATA[:5000])
    assert new_file(tmp_path).present_bytes() == 0
    file.sync()
    assert new_file(tmp_path).present_bytes() == 5000


@defence(
    "a table of pieces fits its file",
    off=replacing(PieceTable, "decode", classmethod(lambda cls, data, size: cls(1, data[8:]))),
    encoded=b"",
)
@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        table().encode()[:-1],
        table().encode()[: 8 + 32 * 2],
        (len(DATA) + 1).to_bytes(8, "big") + table().hashes,
        bytes(8) + table().hashes,
        (1).to_bytes(8, "big") + bytes(PieceTable.max_bytes(len(DATA))),
    ],
    ids=["empty", "cut", "too few", "long header", "no header", "too many"],
)
def test_a_table_that_does_not_fit_its_file_is_refused(encoded: bytes) -> None:
    assert PieceTable.decode(table().encode(), len(DATA)) == table()
    with pytest.raises(IntegrityError):
        PieceTable.decode(encoded, len(DATA))


def test_a_table_of_other_tensors_is_refused(tmp_path: Path) -> None:
    file = PieceFile(tmp_path / "file", KEY)
    file.create()
    with pytest.raises(IntegrityError, match="pieces"):
        file.use(table(), [*EDGES, 7777])


def test_hashes_are_noted_when_pieces_arrive(tmp_path: Path) -> None:
    count = len(table().hashes) // HASH_BYTES
    empty = PieceTable.of_head(DATA[:HEAD_BYTES], count)
    file = PieceFile(tmp_path / "file", KEY)
    file.create()
    assert file.read_notes() is None
    file.use(empty, EDGES, notes=True)
    file.write(1, DATA[HEAD_BYTES:5000])
    with pytest.raises(IntegrityError, match="do not have their hash"):
        file.write(1, bytes(5000 - HEAD_BYTES))
    file.sync()
    noted = file.read_notes()
    assert noted is not None
    assert [noted.hash_of(piece) for piece in range(2)] == [table().hash_of(piece) for piece in range(2)]
    assert {noted.hash_of(piece) for piece in range(2, count)} == {UNKNOWN}
    again = PieceFile(tmp_path / "file", KEY)
    again.use(noted, EDGES, notes=True)
    assert again.has(1)
    again.use(empty, EDGES, notes=True)
    assert not again.has(1), "a piece without a hash is not here"


def test_processes_note_hashes_in_one_file(tmp_path: Path) -> None:
    files = [PieceFile(tmp_path / "file", KEY) for _ in range(2)]
    for file in files:
        file.create()
        file.use(PieceTable.of_head(DATA[:HEAD_BYTES], len(table().hashes) // HASH_BYTES), EDGES, notes=True)
    files[0].write(1, DATA[HEAD_BYTES:5000])
    files[1].write(2, DATA[5000 : cut(len(DATA), EDGES)[3]])
    for file in files:
        file.sync()
    noted = files[0].read_notes()
    assert noted is not None
    assert [noted.hash_of(piece) for piece in (1, 2)] == [table().hash_of(piece) for piece in (1, 2)]


_use = PieceFile.use


def always_noting(self: PieceFile, table: PieceTable, edges: Any, **_: Any) -> None:
    _use(self, table, edges, notes=True)


@defence("hashes are noted only where no table tells them", off=replacing(PieceFile, "use", always_noting))
def test_zeros_in_a_table_of_others_are_the_hash_of_no_piece(tmp_path: Path) -> None:
    file = PieceFile(tmp_path / "file", KEY)
    file.create()
    file.use(PieceTable(HEAD_BYTES, UNKNOWN * (len(table().hashes) // HASH_BYTES)), EDGES)
    with pytest.raises(IntegrityError, match="do not have their hash"):
        file.write(1, DATA[HEAD_BYTES:5000])


def answer(status: int, content_range: str, **headers: str) -> Any:
    return SimpleNamespace(status_code=status, headers={"content-range": content_range, **headers})


@defence(
    "the hub sends the range that was asked for",
    off=replacing(hub_ranges, "_check_range", nothing),
    sent=answer(206, "bytes 10-19/5"),
)
@pytest.mark.parametrize(
    "sent",
    [
        answer(200, ""),
        answer(206, f"bytes 11-20/{len(DATA)}"),
        answer(206, f"bytes 10-20/{len(DATA)}"),
        answer(206, "bytes 10-19/5"),
        answer(206, ""),
        answer(206, f"bytes 10-19/{len(DATA)}", **{"content-encoding": "gzip"}),
        answer(404, ""),
    ],
)
def test_an_answer_with_another_range_is_refused(sent: Any) -> None:
    hub_ranges._check_range(answer(206, f"bytes 10-19/{len(DATA)}"), KEY, 10, 20)
    hub_ranges._check_range(answer(200, ""), KEY, 0, len(DATA))
    with pytest.raises((IntegrityError, Unreachable)):
        hub_ranges._check_range(sent, KEY, 10, 20)


@defence("a redirect away from TLS is refused", off=replacing(hub_ranges, "_check_secure", nothing))
def test_a_redirect_to_an_address_without_tls_is_refused() -> None:
    def sent(*addresses: str) -> Any:
        *history, last = [SimpleNamespace(url=address) for address in addresses]
        return SimpleNamespace(url=last.url, history=history)

    hub_ranges._check_secure(sent("https://hub/file", "https://store/file"))
    hub_ranges._check_secure(sent("http://localhost/file"))
    with pytest.raises(IntegrityError, match="not encrypted"):
        hub_ranges._check_secure(sent("https://hub/file", "http://store/file"))


class Replies:
    """A stream whose other side sends these replies."""

    def __init__(self, *replies: tuple[int, bytes]) -> None:
        self._replies = list(replies)

    async def send(self, message: pb.WeightsRequest, payload: bytes = b"") -> None:
        pass

    async def receive(self) -> tuple[pb.WeightsReply, bytes]:
        if not self._replies:
            raise StreamEnded("the other side closed the stream")
        total, payload = self._replies.pop(0)
        return pb.WeightsReply(total_bytes=total), payload


@defence(
    "a document of a peer is bounded",
    off=replacing(peers, "_check_size", nothing),
    replies=[(1 << 40, bytes(10))],
)
@pytest.mark.parametrize(
    "replies",
    [
        [(1 << 40, bytes(10))],
        [(100, bytes(10)), (100, b"")],
        [(10, bytes(PIECE_BYTES + 1))],
    ],
    ids=["endless", "cut", "more than asked"],
)
def test_a_document_is_bounded(replies: list[tuple[int, bytes]]) -> None:
    stream: Any = Replies((10, bytes(6)), (10, bytes(4)))
    assert run(fetch_document(stream, bytes(32), pb.WHAT_TABLE, max_bytes=1000)) == bytes(10)
    wrong: Any = Replies(*replies)
    with pytest.raises(IntegrityError):
        run(fetch_document(wrong, bytes(32), pb.WHAT_TABLE, max_bytes=1000))


class Documents:
    """A library of one model."""

    model = bytes(32)

    def document(self, what: pb.What, file: bytes) -> bytes:
        return bytes(3 * PIECE_BYTES)

    def place(self, file: bytes, start: int, end: int) -> None:
        return None


@defence(
    "a request for weights is bounded",
    off=replacing(server, "PIECE_BYTES", 1 << 40),
    request_=pb.WeightsRequest(manifest=bytes(32), what=pb.WHAT_TABLE, length=PIECE_BYTES + 1),
)
@pytest.mark.parametrize(
    "request_",
    [
        pb.WeightsRequest(manifest=bytes(32), what=pb.WHAT_TABLE, length=PIECE_BYTES + 1),
        pb.WeightsRequest(manifest=bytes(32), what=pb.WHAT_TABLE),
        pb.WeightsRequest(manifest=bytes(32), length=10),
    ],
)
def test_a_request_for_too_much_is_refused(request_: pb.WeightsRequest) -> None:
    server = WeightServer(Documents(), lambda: False)
    good = pb.WeightsRequest(manifest=bytes(32), what=pb.WHAT_TABLE, length=PIECE_BYTES, offset=5)
    total, payload = run(server._answer(good))
    assert (total, len(payload)) == (3 * PIECE_BYTES, PIECE_BYTES)
    with pytest.raises(ProtocolViolation):
        run(server._answer(request_))


@defence(
    "a listing counts only with the pieces hash of the swarm file",
    off=replacing(peers, "listing_hash", lambda _: bytes(32)),
)
def test_a_listing_counts_only_if_the_swarm_file_has_its_hash(tmp_path: Path) -> None:
    model, tables = bytes(32), Tables(tmp_path)
    listing = listing_of({KEY.sha256: table().hash(KEY)})
    stream: Any = Replies((len(listing), listing))
    honest = SwarmPeers({model: listing_hash(listing)}, Timing())
    assert run(honest._vouched(stream, model, tables)) == {KEY.sha256: table().hash(KEY)}
    other: Any = Replies((len(listing), listing))
    assert run(SwarmPeers({model: bytes(32)}, Timing())._vouched(other, model, tables)) == {}
