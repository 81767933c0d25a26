"""What a client's head takes for some hidden states: by its packed weight, and by torch, in turn.

    python -m tests.bench.head [--threads 1] [--rounds 30]

Before each product other data goes through the caches, as the blocks' would. Prints JSON.
"""

import argparse
import json
import statistics
import time

import torch

from swarmnet.paths import default_cache_dir
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.local_layers import load_local_layers
from swarmnet_protocols.models import resolve
from swarmnet_protocols.quantization.packed_head import PackedHead

MODEL = "smollm2-135m-instruct"
STATES = (1, 2, 4, 8, 16)
OTHER_DATA_FLOATS = 40_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    local = resolve(MODEL, cache_dir=default_cache_dir())
    model = load_local_layers(local, LoadOptions())
    head = model.get_output_embeddings()
    if not isinstance(head, PackedHead):
        raise SystemExit("this machine has no compiler, so there is nothing to compare")
    ways = {"packed": head, "torch": lambda states: torch.nn.functional.linear(states, head.weight)}
    other = torch.zeros(OTHER_DATA_FLOATS)
    torch.set_grad_enabled(False)
    for rows in STATES:
        states = torch.randn(rows, head.in_features)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                other.add_(1)
                started = time.perf_counter()
                way(states)
                times[name].append(time.perf_counter() - started)
        ms = {name: round(1e3 * statistics.median(seconds), 2) for name, seconds in times.items()}
        print(json.dumps({"bench": "head", "threads": arguments.threads, "states": rows, "ms": ms}))


if __name__ == "__main__":
    main()
