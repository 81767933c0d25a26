"""Duration of a forward of few positions by the decode step in C and by torch: one stage in this
process, in turns.

    python -m tests.bench.steps [--model experts] [--blocks 10] [--rounds 9] [--threads 2]
                                [--contexts 64 2048]

``--model``: a model, or ``experts`` for random layers with the widths of a small Qwen3-MoE. It has
32 experts of 512 units, and a token takes 4 of them. Medians in milliseconds. ``sequences``: one new
position of each of this many sequences; ``chunk``: this many positions of one sequence. Before
them, each has a context of a given number of positions. Between two forwards other memory is read,
as nodes that share a machine do. Prints JSON, a line for each context.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from swarmnet_node.engine.kernels.native_backend import NativeBackend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.torch_stage import TORCH
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from tests.support.models.tiny_models import save_tiny

EXPERTS = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "max_position_embeddings": 4096,
}
SEQUENCES = (1, 2, 4, 8, 16, 32)
CHUNKS = (2, 8, 32, 64, 128)
OTHERS_BYTES = 160 << 20


def measure(stages: dict[str, Stage], context: int, rounds: int) -> dict[str, dict[str, float]]:
    others = torch.zeros(OTHERS_BYTES // 4)
    times: dict[str, dict[str, list[float]]] = {}
    filled = {name: [stage.new_sequence() for _ in range(max(SEQUENCES))] for name, stage in stages.items()}
    for name, stage in stages.items():
        for sequence in filled[name]:
            stage.forward([(sequence, torch.randn(context, stage.hidden_size))])
    cases = [(f"sequences {count}", count, 1) for count in SEQUENCES]
    cases += [(f"chunk {count}", 1, count) for count in CHUNKS]
    for _ in range(rounds + 1):
        for case, sequences, positions in cases:
            for name, stage in stages.items():
                inputs = torch.randn(positions, stage.hidden_size)
                rows = [(sequence, inputs) for sequence in filled[name][:sequences]]
                others.sum()
                started = time.perf_counter()
                stage.forward(rows)
                took_s = time.perf_counter() - started
                times.setdefault(case, {}).setdefault(name, []).append(1e3 * took_s)
                for sequence, _ in rows:
                    sequence.truncate(context)
    return {
        case: {name: round(statistics.median(each[1:]), 2) for name, each in by_name.items()}
        for case, by_name in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 2048])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        name = arguments.model
        if name == "experts":
            changes = EXPERTS | {"num_hidden_layers": arguments.blocks, "mlp_only_layers": []}
            name = str(save_tiny("qwen3-moe", Path(folder) / "experts", **changes))
        model = resolve(name, cache_dir=Path(folder))
        native = NativeBackend.load(Path(folder))
        if native is None:
            raise SystemExit("there is no C compiler here, so nothing to compare")
        stages = {
            name: load_stage(
                model, 0, arguments.blocks, dtype=torch.float32, device=torch.device("cpu"), backend=backend
            )
            for name, backend in (("native", native), ("torch", TORCH))
        }
        for context in arguments.contexts:
            about = {
                "bench": "steps",
                "model": arguments.model,
                "blocks": arguments.blocks,
                "threads": arguments.threads,
            }
            figures = measure(stages, context, arguments.rounds)
            print(json.dumps(about | {"context": context, "ms": figures}), flush=True)


if __name__ == "__main__":
    main()
