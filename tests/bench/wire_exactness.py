"""Greedy answers that stay the same when activations travel in a wire format: one process, with its
rounding at the edges of three hops.

    python -m tests.bench.wire_exactness [--prompts 200] [--tokens 64] [--wires float32 bfloat16 int8]

Each prompt is computed together with its answer in float32, in one forward. The first position
whose best token is not that of the answer is the one at which decoding through such hops would
depart from it. Prints one JSON object for each format.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from swarmnet_protocols.arrays import as_array, as_float32, as_tensor
from swarmnet_protocols.models import resolve
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.wire_tensors import as_received, position_bytes
from tests.bench.exactness import pieces
from tests.support.swarm.generation import are_greedy, greedy

EDGES = (0, 10, 20)
"""First blocks of three hops: what each of them receives has travelled."""
LENGTHS = (24, 64, 128, 256, 400)
"""Lengths of the prompts, as many of each."""
BATCH = 10
WIRES = {str(each): each for each in (ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.INT8)}


@contextmanager
def received_as(model: Any, wire: ElementType) -> Iterator[None]:
    """While the context is open, the hidden states that come to ``EDGES`` have been sent as
    ``wire``."""

    def receive(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values, *others = arguments
        received = as_received(as_array(values.flatten(0, 1)), wire)
        return as_tensor(as_float32(received)).view_as(values), *others

    hooks = [model.model.layers[edge].register_forward_pre_hook(receive) for edge in EDGES]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--wires", nargs="+", default=list(WIRES), choices=list(WIRES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        local = resolve("smollm2-135m-instruct", cache_dir=Path(folder))
        model = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        hidden_size = local.manifest.hidden_size
        lengths = sorted(LENGTHS[index % len(LENGTHS)] for index in range(arguments.prompts))
        prompts = pieces(local.tokenizer(), lengths, random.Random(0))
        batches = [
            batch[start : start + BATCH]
            for batch in ([ids for ids in prompts if len(ids) == length] for length in LENGTHS)
            for start in range(0, len(batch), BATCH)
        ]
        expected = [greedy(model, batch, arguments.tokens) for batch in batches]
        for name in arguments.wires:
            wire = WIRES[name]
            with received_as(model, wire):
                same = sum(
                    sum(are_greedy(model, batch, answers))
                    for batch, answers in zip(batches, expected, strict=True)
                )
            report = {
                "bench": "wire_exactness",
                "wire": name,
                "bytes": round(
                    position_bytes(wire, hidden_size) / position_bytes(ElementType.FLOAT32, hidden_size), 3
                ),
                "prompts": len(prompts),
                "tokens": arguments.tokens,
                "equal": same,
                "equal_percent": round(100 * same / len(prompts), 1),
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
