"""A checkpoint with the structure of Llama-70B and small dimensions: 80 blocks in files of about
three blocks each."""

import shutil
from pathlib import Path
from typing import Any

import torch

from swarmnet_protocols.models import LocalModel, resolve
from tests.support.models.model_hub import NAME, ModelHub
from tests.support.models.tiny_models import save_tiny

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
BLOCKS = 80
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
"""Width of the model: with it, headers are as small a share of the files as in real models."""


def save_big(folder: Path, shard: str = "330KB") -> Path:
    """Save the model, whose head is not tied to its embeddings."""
    return save_tiny("mistral", folder, num_hidden_layers=BLOCKS, max_shard_size=shard, **WIDE)


def make_tables(model: Path, cache: Path) -> tuple[Path, bytes]:
    """The tables of the pieces of a model, as a machine with whole files makes them, and its pieces
    hash."""
    whole = resolve(str(model), cache_dir=cache)
    whole.verify()
    assert whole.pieces_hash is not None
    return cache / "pieces", whole.pieces_hash


def load(cache: Path, tables: Path | None = None, name: str = NAME) -> LocalModel:
    """The model of the hub, on a machine that has these tables."""
    if tables is not None and not (cache / "pieces").exists():
        shutil.copytree(tables, cache / "pieces")
    return resolve(name, cache_dir=cache)


def same_span(mine: LocalModel, other: LocalModel, start: int, end: int) -> bool:
    """Whether both models have the same weights in these blocks."""
    ours, theirs = (each.load_span(start, end, **FLOAT32).state_dict() for each in (mine, other))
    return all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def weight_bytes(hub: ModelHub) -> int:
    """The size of the weights on the hub."""
    return sum(path.stat().st_size for path in hub.folder.iterdir() if path.suffix in _WEIGHTS)


def sent(hub: ModelHub) -> float:
    """The share of the weights that the hub has sent."""
    return sum(size for name, size in hub.sent.items() if Path(name).suffix in _WEIGHTS) / weight_bytes(hub)


_WEIGHTS = {".safetensors", ".gguf"}
