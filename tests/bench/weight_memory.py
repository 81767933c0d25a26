"""Memory of a process for the weights of all blocks of the default model, relative to their bytes
in the file.

    python -m tests.bench.weight_memory

The process has loaded one block before, so that code and libraries do not count. Prints one JSON
object.
"""

import json

import psutil
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.owner.machine import release_memory
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve
from swarmnet_protocols.models.checkpoints.gguf.header import read_header


def load(model: LocalModel, start: int, end: int) -> Stage:
    backend = load_backend(default_cache_dir())
    cpu = torch.device("cpu")
    return Stage.load(model, start, end, dtype=torch.float32, device=cpu, backend=backend, packed=True)


def resident_bytes() -> int:
    release_memory()
    resident: int = psutil.Process().memory_info().rss
    return resident


def main() -> None:
    model = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    _, tensors = read_header(model.path)
    file_bytes = sum(tensor.size_bytes for name, tensor in tensors.items() if name.startswith("blk."))
    load(model, 0, 1)
    before = resident_bytes()
    stage = load(model, 0, model.manifest.blocks)
    grown = resident_bytes() - before
    about = {"bench": "weight_memory", "file_bytes": file_bytes, "weight_bytes": stage.weight_bytes}
    print(json.dumps(about | {"grown_bytes": grown, "ratio": round(grown / file_bytes, 3)}))


if __name__ == "__main__":
    main()
