"""Memory of training rounds: two whole workers in one process, over simulated links.

    python -m tests.support.training.round_memory

Prints the peak memory of two ``diloco`` rounds in float32, above that of Python and its libraries,
in vectors per worker: one vector is as large as the parameters. Slices are so large that malloc
maps each separately, so freed memory returns to the system at once.
"""

import asyncio
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.training.workers import WorkerLab, write_job

NAMES = ("anna", "boris")
LARGE = {"hidden_size": 576, "intermediate_size": 1664, "num_hidden_layers": 4}
"""17 million parameters: half of them are just more than the 32 MiB that malloc may keep."""
ROUNDS = 2


def status_bytes(field: str, process: int | str = "self") -> int:
    """A field of /proc/PROCESS/status: "VmRSS", or "VmHWM", its maximum."""
    status = Path(f"/proc/{process}/status").read_text()
    (found,) = re.findall(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def train(folder: Path, changes: dict[str, int]) -> tuple[int, int]:
    """The parameters of the model, and the peak memory after the first round."""
    toml = write_job(folder, "diloco", "sync_every = 1", "min_workers = 2", rounds=1000)
    for name, value in (changes | {"every_rounds": 1000}).items():
        toml = re.sub(rf"^{name} = .*$", f"{name} = {value}", toml, flags=re.MULTILINE)
    network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.001, bytes_per_s=1e9))
    lab = WorkerLab(folder, toml, network)

    async def live() -> None:
        enough = asyncio.Event()

        def watch(_: str, event: dict[str, Any]) -> None:
            if event["event"] == "round" and event["round"] == 0:
                forget_peak()
            elif event["event"] == "round" and event["round"] == ROUNDS:
                enough.set()

        lab.observer = watch
        for name in NAMES:
            lab.start(name)
        async with asyncio.timeout(3000):
            await enough.wait()
        await lab.close()

    run(live())
    lab.check_equal()
    ready = next(event for event in lab.events[NAMES[0]] if event["event"] == "ready")
    return ready["parameters"], status_bytes("VmHWM")


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name, "small"), Path(name, "large")
        for folder in (small, large):
            folder.mkdir()
        train(small, {})  # loads every library
        base = status_bytes("VmRSS")
        parameters, peak = train(large, LARGE)
    vectors = (peak - base) / 4 / parameters / len(NAMES)
    print(json.dumps({"parameters": parameters, "vectors": round(vectors, 2)}))


if __name__ == "__main__":
    main()
