"""The estimate of what a node will use, for its owner's consent.

The size of the weights is that of the model's files. The other numbers were measured with the
default model on two cores. ``tests/e2e/test_light_host.py`` measures the memory again.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.units import show_memory, show_size
from swarmnet_protocols.models.public_names import DEFAULT_MODEL, DEFAULT_MODEL_BYTES

if TYPE_CHECKING:
    from swarmnet_node.config import NodeConfig

PROGRAM_BYTES = 480_000_000
"""Resident memory of a node and p2pd without weights and sessions, with torch in the process.
Later starts with a model whose blocks need no torch take 170 MB."""
IDLE_CORE_SHARE = 0.003
"""Share of one core that a node and p2pd take while nobody asks."""


def estimate(config: "NodeConfig") -> str:
    """Return what the node will use, as far as it is known before the model is read."""
    rest = f"{IDLE_CORE_SHARE:.1%} of a core when idle; clients' sessions take up to {show_memory(config.max_cache_bytes)} more"
    files = weight_bytes(config.model, config.cache_dir)
    if files is None:
        return f"about {show_size(PROGRAM_BYTES)} of memory, and memory and disk for the weights of its blocks; {rest}"
    if config.dtype != "auto":
        return f"about {show_size(PROGRAM_BYTES)} of memory and the weights as {config.dtype}, {show_size(files)} of disk, {rest}"
    part = "at most" if config.blocks or config.num_blocks else "about"
    return f"{part} {show_size(PROGRAM_BYTES + files)} of memory, {show_size(files)} of disk, {rest}"


def weight_bytes(model: str, cache_dir: Path) -> int | None:
    """Return the bytes of all weight files of a model. None if it was never read here."""
    if model == DEFAULT_MODEL:
        return DEFAULT_MODEL_BYTES
    path = Path(model).expanduser()
    if path.is_dir():
        files = [each for each in path.iterdir() if each.suffix in {".safetensors", ".gguf"}]
    elif path.is_file():
        split = re.sub(r"-[0-9]{5}-of-([0-9]{5})\.gguf$", r"-[0-9][0-9][0-9][0-9][0-9]-of-\1.gguf", path.name)
        files = [path] if split == path.name else list(path.parent.glob(split))
    else:
        from swarmnet_protocols.models.inventory import stored_models

        return next((each.total_bytes for each in stored_models(cache_dir) if each.name == model), None)
    return sum(each.stat().st_size for each in files)
