"""A host of some experts fetches only the pieces that hold them, because files are cut into pieces
at the edges of experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.fetching import download, hub_ranges, pieces
from swarmnet_protocols.fetching.pieces import Layout, cut
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.quantization.packed_experts import compute_expert
from tests.defences import defence, nothing, replacing
from tests.support.models import big_model
from tests.support.models.big_model import FLOAT32
from tests.support.models.model_hub import NAME, ModelHub, model_hub
from tests.support.models.tiny_models import save_tiny, write_gguf
from tests.support.processes.killed_download import kill_while

MERGED = "merged tensors"
LAYOUTS = ("a tensor for each expert", MERGED, "gguf")
EXPERTS = 128
CHOSEN = [0, 5, 6, 40, 77, 99, 126, 127]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    name: str
    whole: LocalModel
    tables: Path


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """One block of 128 experts of 200 kB."""
    made = tmp_path_factory.mktemp("experts")
    folder, name = made / "model", NAME
    if request.param == "gguf":
        folder.mkdir()
        (folder / ".gitattributes").touch()
        write_gguf(folder / "model.gguf", "qwen3moe", blocks=1, experts=EXPERTS, expert_width=1024)
        name = f"{NAME}:model.gguf"
    elif request.param == MERGED:
        layers = {"num_local_experts": EXPERTS, "layer_types": ["full_attention"]}
        save_tiny("gpt-oss", folder, **SIZES, **layers)
    else:
        save_tiny(
            "qwen3-moe",
            folder,
            **SIZES,
            num_experts=EXPERTS,
            moe_intermediate_size=128,
            mlp_only_layers=[],
        )
    source = folder / "model.gguf" if request.param == "gguf" else folder
    tables, _ = big_model.make_tables(source, made / "maker")
    return Checkpoint(folder, name, resolve(str(source), cache_dir=made / "maker"), tables)


@pytest.fixture
def hub(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[ModelHub]:
    with model_hub(checkpoint.folder, tmp_path / "hf") as serving:
        yield serving


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_ranges, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(download, "PAUSE_S", 0.01)


def load(checkpoint: Checkpoint, tmp_path: Path, *, has_tables: bool) -> LocalModel:
    """The model, of which this machine has the headers."""
    model = big_model.load(tmp_path / "cache", checkpoint.tables if has_tables else None, checkpoint.name)
    model.load_experts(0, [], **FLOAT32)
    return model


def expert_spans(model: LocalModel) -> dict[str, tuple[int, int]]:
    """The bytes of the tensors with matrices of experts."""
    [weights] = model._checkpoint.holders(model._checkpoint.tensor_names)
    spans = model._checkpoint.layout(weights).spans
    return {name: span for name, span in spans.items() if "exps.weight" in name or ".experts." in name}


def bytes_of_all(model: LocalModel) -> int:
    return sum(end - start for start, end in expert_spans(model).values())


@pytest.mark.parametrize("has_tables", [True, False])
def test_a_host_of_8_of_128_experts_fetches_a_sixteenth(
    has_tables: bool, checkpoint: Checkpoint, hub: ModelHub, tmp_path: Path
) -> None:
    model = load(checkpoint, tmp_path, has_tables=has_tables)
    before = sum(hub.sent.values())
    mine: Any = model.load_experts(0, CHOSEN, **FLOAT32)
    fetched = sum(hub.sent.values()) - before
    biases = sum(each.nbytes for each in mine.parameters())
    share = bytes_of_all(checkpoint.whole) * len(CHOSEN) // EXPERTS
    assert 0.98 * share <= fetched <= share + biases
    whole: Any = checkpoint.whole.load_experts(0, CHOSEN, **FLOAT32)
    rows = torch.randn(3, mine.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for expert in CHOSEN:
        assert torch.equal(compute_expert(mine, expert, rows), compute_expert(whole, expert, rows))


def start_of(checkpoint: Checkpoint, expert: int) -> int:
    """Where the first matrix of an expert is in its file."""
    spans = expert_spans(checkpoint.whole)
    own = [span for name, span in spans.items() if f".experts.{expert}." in name]
    if own:
        return min(own)[0]
    start, end = min(span for name, span in spans.items() if "bias" not in name)
    return start + (end - start) * expert // EXPERTS


def test_a_flipped_bit_in_an_expert_is_refused_and_its_source_named(
    checkpoint: Checkpoint, hub: ModelHub, tmp_path: Path
) -> None:
    model = load(checkpoint, tmp_path, has_tables=True)
    [file] = model._checkpoint.holders(model._checkpoint.tensor_names)
    hub.flipped[file] = start_of(checkpoint, 77)
    model.load_experts(0, [76, 78], **FLOAT32)
    with pytest.raises(IntegrityError, match=f"the hub: it sent wrong bytes.*{file}"):
        model.load_experts(0, [77], **FLOAT32)
    hub.flipped.clear()
    model.load_experts(0, [77], **FLOAT32)


@pytest.mark.parametrize("has_tables", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "checkpoint",
    [MERGED, *(pytest.param(each, marks=pytest.mark.thorough) for each in LAYOUTS if each != MERGED)],
    indirect=True,
)
def test_a_killed_download_of_experts_is_resumed(
    has_tables: bool, checkpoint: Checkpoint, hub: ModelHub, tmp_path: Path
) -> None:
    """Other tests cover what a host fetches from a layout. A download resumes the same pieces."""
    load(checkpoint, tmp_path, has_tables=has_tables)
    written = kill_while(f"model.load_experts(0, {CHOSEN}, **options)", checkpoint.name, hub, tmp_path, 5)
    assert written >= 5
    # Another hub, because the first one may still be sending to the killed process.
    with model_hub(checkpoint.folder, tmp_path / "hf") as again:
        mine: Any = load(checkpoint, tmp_path, has_tables=has_tables).load_experts(0, CHOSEN, **FLOAT32)
    resumed = sum(again.sent.values())
    biases = sum(each.nbytes for each in mine.parameters())
    share = bytes_of_all(checkpoint.whole) * len(CHOSEN) // EXPERTS
    assert resumed <= share + biases - written * pieces.MIN_SLICE_BYTES


def test_tensors_of_many_small_parts_are_not_cut() -> None:
    least = pieces.MIN_SLICE_BYTES
    sizes = {"experts": 8 * least, "filters": 8 * least - 8, "matrix": 8 * least, "empty": 0}
    shapes = {"experts": (8, 4, 4), "filters": (8, 1, 4), "matrix": (8, 4), "empty": (0, 4, 4)}
    layout = Layout(10, {name: (10, 10 + size) for name, size in sizes.items()}, shapes)
    assert layout.slices == {"experts": 8}
    assert {*layout.edges} >= {*range(10, 10 + 8 * least, least)}


@defence("a file has a bounded number of pieces", off=replacing(pieces, "_check_count", nothing))
def test_a_file_of_too_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECES", 100)
    cut(100 * pieces.PIECE_BYTES, ())
    with pytest.raises(IntegrityError, match="more than 100 pieces"):
        cut(101 * pieces.PIECE_BYTES, ())
    with pytest.raises(IntegrityError, match="more than 100 pieces"):
        Layout(0, {"experts": (0, 100 * pieces.MIN_SLICE_BYTES)}, {"experts": (100, 1, 1)}).edges  # noqa: B018 - it raises
