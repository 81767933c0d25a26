"""What LoRA costs a host: one stage of SmolLM2-135M in this process, with adapters and without, in
turn.

    python -m tests.bench.adapters [--blocks 10] [--rounds 15] [--rank 8] [--threads 2]

Prints JSON: medians of a forward in milliseconds. With one thread they are CPU time, so that other
programs of the machine do not count. Forwards have one new position of 1 or 8 sequences, of which
all, one or none have an adapter of their own; or a prompt of 128 positions. ``native`` computes few
positions by native code, ``fused`` by layers of torch.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.models import resolve
from tests.support.models.peft_oracle import random_tensors

CONTEXT = 64
PROMPT = 128
STEPS = 8
"""Number of forwards of single positions that are timed together."""


Clock = Callable[[], float]


def timed(
    stage: Stage, sequences: int, count: int, adapted: list[dict[str, torch.Tensor]]
) -> Callable[[Clock], float]:
    """A function that gives the seconds of one forward with ``count`` positions of each sequence.
    The first sequences have one adapter of ``adapted`` each, the others none."""
    adapters = [stage.load_adapter(tensors, 0) for tensors in adapted] + [None] * (sequences - len(adapted))
    inputs = torch.randn(count, stage.hidden_size)
    filled = [stage.new_sequence(adapter) for adapter in adapters]
    if count == 1:
        stage.forward([(sequence, torch.randn(CONTEXT, stage.hidden_size)) for sequence in filled])
    start, steps = filled[0].length, STEPS if count == 1 else 1

    def measure(clock: Clock) -> float:
        for sequence in filled:
            sequence.truncate(start)
        started = clock()
        for _ in range(steps):
            stage.forward([(sequence, inputs) for sequence in filled])
        return (clock() - started) / steps

    return measure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        model = resolve("smollm2-135m-instruct", cache_dir=Path(folder))
        options = {"dtype": torch.float32, "device": torch.device("cpu")}
        native = load_stage(model, 0, arguments.blocks, backend=load_backend(Path(folder)), **options)
        fused = load_stage(model, 0, arguments.blocks, **options)
        size = native.hidden_size
        modules = [("self_attn.q_proj", size, size), ("self_attn.v_proj", size // 3, size)]
        pairs = [
            random_tensors(range(arguments.blocks), modules=modules, rank=arguments.rank, seed=seed)
            for seed in range(8)
        ]
        cases = {
            f"decode of {sequences}, {adapted} loras, {name}": timed(stage, sequences, 1, pairs[:adapted])
            for sequences, adapted in ((1, 0), (1, 1), (8, 0), (8, 1), (8, 8))
            for name, stage in (("native", native), ("fused", fused))
        }
        cases |= {
            "prompt": timed(native, 1, PROMPT, []),
            "prompt, lora": timed(native, 1, PROMPT, pairs[:1]),
        }
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.rounds + 1):
            for name, measure in cases.items():
                times[name].append(1e3 * measure(clock))
    medians = {name: round(statistics.median(each[1:]), 2) for name, each in times.items()}
    print(
        json.dumps(
            {
                "bench": "adapters",
                "native": native.method.decode_step is not None,
                **vars(arguments),
                "ms": medians,
            }
        )
    )


if __name__ == "__main__":
    main()
