"""Consent shows what a node will use, before the model is read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet.cli.consent import estimate, weight_bytes
from swarmnet_protocols.models.public_names import DEFAULT_MODEL


def _config(model: str, **changes: Any) -> Any:
    usual = {"dtype": "auto", "blocks": None, "num_blocks": None, "max_cache_bytes": 1 << 30}
    return SimpleNamespace(model=model, cache_dir=Path("nowhere"), **(usual | changes))


def test_all_files_of_a_model_count(tmp_path: Path) -> None:
    for name, size in (("a-00001-of-00002.gguf", 3), ("a-00002-of-00002.gguf", 4), ("b.gguf", 5)):
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "README.md").write_text("no weights")
    assert weight_bytes(str(tmp_path / "b.gguf"), tmp_path) == 5
    assert weight_bytes(str(tmp_path / "a-00002-of-00002.gguf"), tmp_path) == 7
    assert weight_bytes(str(tmp_path), tmp_path) == 12
    assert weight_bytes("org/never-read-here", tmp_path) is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (_config(DEFAULT_MODEL), "about 578 MB of memory, 98.4 MB of disk, 0.3% of a core when idle; "),
        (_config(DEFAULT_MODEL, num_blocks=3), "at most 578 MB of memory"),
        (
            _config(DEFAULT_MODEL, dtype="float32"),
            "about 480 MB of memory and the weights as float32, 98.4 MB of disk",
        ),
        (
            _config("org/never-read-here"),
            "about 480 MB of memory, and memory and disk for the weights of its blocks; ",
        ),
    ],
)
def test_an_estimate_says_only_what_is_known(config: Any, told: str) -> None:
    assert estimate(config).startswith(told)
    assert estimate(config).endswith("clients' sessions take up to 1 GiB more")
