"""A peer fetches from the hub the pieces of a model that its part needs, and verifies each,
whatever the hub sends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from swarmnet_protocols.errors import IntegrityError, OutOfResources, Unreachable
from swarmnet_protocols.fetching import download, hub_files, hub_ranges, piece_file
from swarmnet_protocols.fetching.peers import SwarmPeers
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import PieceTable
from swarmnet_protocols.machine.aio import run_apart
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.parts import Files, Parts
from swarmnet_protocols.timing import Timing
from tests.defences import defence, nothing, replacing
from tests.support.models import big_model
from tests.support.models.big_model import BLOCKS, FLOAT32, WIDE, make_tables, same_span, save_big, sent
from tests.support.models.model_hub import NAME, ModelHub, model_hub
from tests.support.models.tiny_models import save_tiny, write_gguf
from tests.support.processes.killed_download import kill_while


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_big(tmp_path_factory.mktemp("big") / "model")


@pytest.fixture(scope="module")
def tables(big: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tables(big, tmp_path_factory.mktemp("maker"))[0]


@pytest.fixture(scope="module")
def whole(big: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """The model of a machine that has all files."""
    return resolve(str(big), cache_dir=tmp_path_factory.mktemp("whole"))


@pytest.fixture
def hub(big: Path, tmp_path: Path) -> Iterator[ModelHub]:
    with model_hub(big, tmp_path / "hf") as serving:
        yield serving


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ranges, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(download, "PAUSE_S", 0.01)


def load(tmp_path: Path, tables: Path | None = None, name: str = NAME) -> LocalModel:
    return big_model.load(tmp_path / "cache", tables, name)


def test_a_host_fetches_its_blocks_and_little_more(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    model = load(tmp_path, tables)
    assert model.manifest.hash == whole.manifest.hash
    assert same_span(model, whole, 30, 40)
    assert sent(hub) < 0.13
    before = dict(hub.sent)
    assert same_span(load(tmp_path), whole, 32, 38)
    assert hub.sent == before
    assert model.size_on_disk < 0.2 * sum(file.size for file in model.manifest.files)


def test_a_client_fetches_embeddings_norm_and_head(hub: ModelHub, tables: Path, tmp_path: Path) -> None:
    model = load(tmp_path, tables)
    model.load_local_layers(lambda layers: layers, **FLOAT32)
    assert sent(hub) < 0.04


def test_one_file_is_fetched_in_parts(tmp_path: Path) -> None:
    single = save_tiny("mistral", tmp_path / "model", num_hidden_layers=BLOCKS, **WIDE)
    whole = resolve(str(single), cache_dir=tmp_path / "maker")
    whole.verify()
    with model_hub(single, tmp_path / "hf") as hub:
        model = load(tmp_path, tmp_path / "maker" / "pieces")
        assert model.manifest.hash == whole.manifest.hash
        assert same_span(model, whole, 30, 40)
        assert sent(hub) < 0.2  # the header of such small tensors is a tenth of the file


def test_a_gguf_file_is_fetched_in_parts(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / ".gitattributes").touch()
    file = write_gguf(folder / "model.gguf", "llama", blocks=BLOCKS)
    whole = resolve(str(file), cache_dir=tmp_path / "maker")
    whole.verify()
    with model_hub(folder, tmp_path / "hf") as hub:
        model = load(tmp_path, tmp_path / "maker" / "pieces", f"{NAME}:model.gguf")
        assert model.manifest.hash == whole.manifest.hash
        assert same_span(model, whole, 30, 40)
        assert model.tokenizer()
        assert sent(hub) < 0.6
        hub.is_closed = True
        assert same_span(load(tmp_path, None, f"{NAME}:model.gguf"), whole, 32, 38)


@pytest.fixture(scope="module")
def lone_model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    """The model of one gguf file, alone in its folder."""
    folder = tmp_path_factory.mktemp("lone")
    (folder / ".gitattributes").touch()
    file = write_gguf(folder / "model.gguf", "llama", blocks=BLOCKS)
    return resolve(str(file), cache_dir=tmp_path_factory.mktemp("whole"))


@pytest.fixture
def lone(lone_model: LocalModel, tmp_path: Path) -> Iterator[tuple[ModelHub, LocalModel]]:
    """A hub with one gguf file of which no table is known, and the model of that file."""
    with model_hub(lone_model._checkpoint.root, tmp_path / "hf") as hub:
        yield hub, lone_model


LONE = f"{NAME}:model.gguf"


def test_a_gguf_file_without_a_table_is_fetched_in_parts(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    hub, whole = lone
    model = load(tmp_path, None, LONE)
    assert model.manifest.hash == whole.manifest.hash
    assert same_span(model, whole, 30, 40)
    assert sent(hub) < 0.3  # the header of such small tensors is a tenth of the file
    assert model.pieces_hash is None
    before = dict(hub.sent)
    again = load(tmp_path, None, LONE)
    again.verify()
    assert same_span(again, whole, 32, 38)
    assert hub.sent == before


def test_most_of_a_file_without_a_table_is_fetched_whole(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    _, whole = lone
    model = load(tmp_path, None, LONE)
    assert same_span(model, whole, 0, 3)
    assert same_span(model, whole, 0, 60)
    assert model.pieces_hash is not None
    assert not list((tmp_path / "cache" / "parts").iterdir())


@defence(
    "the hub alone does not vouch for a model that the swarm file names",
    off=replacing(SwarmPeers, "lists", lambda *_: False),
)
def test_a_model_named_by_the_swarm_file_is_fetched_without_a_table(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    """Its hash is checked, not only what the hub sends."""
    _, whole = lone
    model = load(tmp_path, None, LONE)
    model.parts.peers = SwarmPeers({}, Timing(), {model.manifest.hash})
    model.parts.peers.detach()
    assert same_span(model, whole, 0, 3)
    assert model.pieces_hash is not None


_complete = Parts._complete


def giving_all(self: Parts, files: Files, *rest: Any, **options: Any) -> None:
    _complete(self, files, *rest, **options)
    self.in_use |= {partial.file.sha256: partial for partial, _ in files}


@defence("peers get no noted pieces", off=replacing(Parts, "_complete", giving_all))
@pytest.mark.usefixtures("lone")
def test_pieces_that_only_the_hub_confirmed_are_not_given_to_peers(tmp_path: Path) -> None:
    model = load(tmp_path, None, LONE)
    model.load_span(30, 40, **FLOAT32)
    [file] = model.manifest.files
    start, end = model._checkpoint.layout(file.name).spans["blk.35.attn_q.weight"]
    assert model.shared().place(file.sha256, start, end) is None
    model.fetch()
    assert model.shared().place(file.sha256, start, end) is not None


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as changed:
        changed.seek(at)
        byte = changed.read(1)[0]
        changed.seek(at)
        changed.write(bytes([byte ^ 1]))


@defence("a piece has the hash that was noted of it", off=replacing(PieceFile, "_note_hashes", nothing))
def test_a_noted_piece_that_changed_on_disk_is_fetched_again(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    hub, whole = lone
    model = load(tmp_path, None, LONE)
    model.load_span(30, 31, **FLOAT32)
    [file] = model.manifest.files
    start, _ = model._checkpoint.layout(file.name).spans["blk.30.attn_q.weight"]
    flip(model._checkpoint.path_of(file.name), start)
    with pytest.raises(IntegrityError, match="do not have their hash"):
        load(tmp_path, None, LONE).verify()
    hub.flipped[file.name] = start
    with pytest.raises(IntegrityError, match="the hub: it sent wrong bytes"):
        load(tmp_path, None, LONE).load_span(30, 31, **FLOAT32)
    hub.flipped.clear()
    assert same_span(load(tmp_path, None, LONE), whole, 30, 31)


def test_a_table_that_comes_later_is_compared_with_noted_pieces(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    """A piece that the hub sent with a wrong byte, while no table was known, is fetched again once
    a table is known."""
    hub, whole = lone
    whole.verify()
    model = load(tmp_path, None, LONE)
    [file] = model.manifest.files
    hub.flipped[file.name] = model._checkpoint.layout(file.name).spans["blk.30.attn_q.weight"][0]
    assert not same_span(model, whole, 30, 31)
    hub.flipped.clear()
    model.parts.tables.add(file, whole.parts.tables.known(file) or PieceTable(0, b""))
    assert same_span(model, whole, 30, 31)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("shifted", IntegrityError),
        ("compressed", IntegrityError),
        ("silent", Unreachable),
        ("nothing", Unreachable),
        ("half", Unreachable),
    ],
)
def test_wrong_answers_without_a_table_are_clear_errors(
    fault: str, error: type[Exception], lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    hub, _ = lone
    model = load(tmp_path, None, LONE)
    hub.fault = fault
    with pytest.raises(error, match="the hub: "):
        model.load_span(30, 31, **FLOAT32)
    assert model.size_on_disk < 1 << 20


def test_every_answer_brings_the_next_pieces(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    model = load(tmp_path, tables)
    model.config  # noqa: B018 - fetches headers
    hub.fault = "short"
    assert same_span(model, whole, 30, 40)


@pytest.mark.parametrize("fault", ["endless", "short"])
def test_answers_of_another_length_are_cut_off_or_continued(
    fault: str, lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    hub, whole = lone
    hub.fault = fault
    assert same_span(load(tmp_path, None, LONE), whole, 30, 31)


@defence(
    "a header arrives in a bounded number of answers", off=replacing(hub_files, "MAX_HEAD_READS", 1 << 20)
)
def test_a_header_in_answers_of_a_few_bytes_is_given_up(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path
) -> None:
    hub, _ = lone
    hub.fault = "a few bytes"
    with pytest.raises(Unreachable, match="did not bring the header"):
        load(tmp_path, None, LONE)


def test_an_answer_drop_by_drop_is_ended(
    lone: tuple[ModelHub, LocalModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, _ = lone
    model = load(tmp_path, None, LONE)
    hub.fault = "drop by drop"
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    with pytest.raises(Unreachable, match="the hub: it sent less than one piece"):
        model.load_span(30, 31, **FLOAT32)


@defence("a header has a bounded size", off=replacing(hub_files, "_check_head_size", nothing))
def test_a_header_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor of the file begins far behind the others' entries."""
    monkeypatch.setattr(hub_files, "MAX_HEAD_BYTES", 1 << 20)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / ".gitattributes").touch()
    write_far_off(folder / "model.gguf", 8 << 20)
    with model_hub(folder, tmp_path / "hf") as hub:
        with pytest.raises(IntegrityError, match=r"the header of model\.gguf has"):
            load(tmp_path, None, LONE)
        assert hub.sent["model.gguf"] < 2 << 20


def write_far_off(path: Path, offset: int) -> None:
    """Write a gguf file of one tensor that begins ``offset`` bytes behind the header."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.zeros((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    content = path.read_bytes()
    path.write_bytes(content[:-8] + offset.to_bytes(8, "little") + bytes(offset + 1024))


def test_a_flipped_bit_is_refused_and_its_source_named(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    model = load(tmp_path, tables)
    name = model.manifest.tensors[40][0]
    [file] = model._checkpoint.holders([name])
    hub.flipped[file] = whole._checkpoint.layout(file).spans[name][0]
    with pytest.raises(IntegrityError, match=f"the hub: it sent wrong bytes.*{file}"):
        model.load_span(40, 41, **FLOAT32)
    hub.flipped.clear()
    assert same_span(model, whole, 40, 41)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("shifted", IntegrityError),
        ("compressed", IntegrityError),
        ("whole", Unreachable),
        ("silent", Unreachable),
    ],
)
def test_a_hub_that_answers_wrongly_is_a_clear_error(
    fault: str, error: type[Exception], hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    model = load(tmp_path, tables)
    hub.fault = fault
    with pytest.raises(error, match="the hub: "):
        model.load_span(40, 41, **FLOAT32)
    assert model.size_on_disk < 1 << 20


def test_an_endless_answer_is_cut_off(whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path) -> None:
    model = load(tmp_path, tables)
    hub.fault = "endless"
    assert same_span(model, whole, 40, 41)


def test_a_broken_connection_goes_on_where_it_broke(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    model = load(tmp_path, tables)
    [file, *_] = sorted(model._checkpoint.holders(model.manifest.tensors[40]))
    hub.stop_after[file] = 100
    assert same_span(model, whole, 40, 41)


def test_a_killed_download_is_resumed(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path, tables)
    already = kill_while("model.load_span(30, 40, **options)", NAME, hub, tmp_path, 9)
    assert already > 0
    write, pieces = piece_file.PieceFile.write, list[int]()

    def counted(self: piece_file.PieceFile, first: int, data: bytes | memoryview) -> int:
        pieces.append(write(self, first, data))
        return pieces[-1]

    monkeypatch.setattr(piece_file.PieceFile, "write", counted)
    assert same_span(load(tmp_path), whole, 30, 40)
    resumed = sum(pieces)
    pieces.clear()
    load(tmp_path / "whole", tables).load_span(30, 40, **FLOAT32)
    assert resumed <= sum(pieces) - already, "pieces that were marked are not fetched again"


def test_a_disk_without_room_is_refused_before_anything_is_written(
    hub: ModelHub, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tmp_path, tables)
    monkeypatch.setattr(hub_files, "free_bytes", lambda _: 100)
    with pytest.raises(OutOfResources, match="room") as caught:
        model.load_span(0, 10, **FLOAT32)
    assert "--cache-dir" in caught.value.hint
    assert sent(hub) == 0


def test_a_disk_that_fills_up_is_a_clear_error(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, offset: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    model = load(tmp_path, tables)
    with monkeypatch.context() as patch:
        patch.setattr(piece_file, "_write_all", full)
        with pytest.raises(OutOfResources, match="no space is left") as caught:
            model.load_span(0, 10, **FLOAT32)
        assert "model rm" in caught.value.hint
    assert same_span(model, whole, 0, 10)


def test_a_piece_that_changed_on_disk_is_fetched_again(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    model = load(tmp_path, tables)
    model.load_span(40, 41, **FLOAT32)
    name = model.manifest.tensors[40][0]
    [file] = model._checkpoint.holders([name])
    flip(model._checkpoint.path_of(file), model._checkpoint.layout(file).spans[name][0])
    with pytest.raises(IntegrityError, match="do not have their hash"):
        load(tmp_path).verify()
    assert same_span(load(tmp_path), whole, 40, 41)


def test_a_claim_confirms_what_the_hub_sends(
    whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    claim(tables, tmp_path)
    model = load(tmp_path)
    assert same_span(model, whole, 30, 40)
    assert sent(hub) < 0.13
    assert model.pieces_hash is None


def test_a_false_claim_costs_the_whole_file_and_is_forgotten(
    big: Path, whole: LocalModel, hub: ModelHub, tables: Path, tmp_path: Path
) -> None:
    claim(tables, tmp_path, flip=True)
    model = load(tmp_path)
    assert same_span(model, whole, 40, 41)
    [file] = model._checkpoint.holders(model.manifest.tensors[40][:1])
    assert (model._checkpoint.root / file).is_file()
    assert hub.sent[file] >= (big / file).stat().st_size


def claim(tables: Path, tmp_path: Path, *, flip: bool = False) -> None:
    """Tables that a peer claims; with ``flip`` each last hash is wrong."""
    folder = tmp_path / "cache" / "pieces"
    folder.mkdir(parents=True)
    for table in tables.iterdir():
        data = bytearray(table.read_bytes())
        for at in range(8, len(data), 32):
            data[at] ^= flip
        (folder / table.with_suffix(".claimed").name).write_bytes(data)


def test_a_loop_that_runs_does_not_stop_a_download() -> None:
    import asyncio

    async def answer() -> int:
        return 7

    async def outer() -> int:
        return run_apart(answer)

    assert asyncio.run(outer()) == 7
    assert run_apart(answer) == 7
