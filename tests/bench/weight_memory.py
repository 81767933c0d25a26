"""Memory of a process for the weights of all blocks of a gguf model, relative to their bytes in the
file.

    python -m tests.bench.weight_memory [MODEL.gguf]

The process has loaded one block before, so that code and libraries do not count. Prints one JSON
object. ``peak_ratio`` is the most memory while the blocks are loaded, relative to what stays.
"""

import argparse
import json
import time
from pathlib import Path

import psutil
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.owner.machine import release_memory
from swarmnet_protocols.models import DEFAULT_MODEL, LocalModel, resolve
from swarmnet_protocols.models.checkpoints.gguf.header import read_header


def load(model: LocalModel, start: int, end: int) -> Stage:
    backend = load_backend(default_cache_dir())
    cpu = torch.device("cpu")
    return load_stage(model, start, end, dtype=torch.float32, device=cpu, backend=backend, packed=True)


def resident_bytes() -> int:
    release_memory()
    resident: int = psutil.Process().memory_info().rss
    return resident


def peak_bytes() -> int:
    """The most resident memory since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    model = resolve(parser.parse_args().model, cache_dir=default_cache_dir())
    _, tensors = read_header(model.path)
    file_bytes = sum(tensor.size_bytes for name, tensor in tensors.items() if name.startswith("blk."))
    load(model, 0, 1)
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    began = time.perf_counter()
    stage = load(model, 0, model.manifest.blocks)
    seconds, peak = time.perf_counter() - began, peak_bytes() - before
    grown = resident_bytes() - before
    about = {"bench": "weight_memory", "file_bytes": file_bytes, "weight_bytes": stage.weight_bytes}
    about |= {"grown_bytes": grown, "ratio": round(grown / file_bytes, 3)}
    print(json.dumps(about | {"peak_ratio": round(peak / grown, 3), "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
