"""Forward and backward of 8 x 128 tokens through three loopback hops, against one local
transformers process.

    python -m tests.bench.tuning [--model smollm2-135m-instruct] [--hops 3] [--rounds 5] [--rows 8]
                                 [--tokens 128]

The parameters that learn are the input embeddings; all other weights are frozen. Both in float32
with two threads, in turn, medians. A format as the model is as in ``decode``. Prints JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from tests.bench.answering_process import AnsweringProcess, answer_all
from tests.bench.decode import model_file
from tests.support.processes.nodes import Swarm

THREADS = 2


def timed_step(model: Any, rows: int, tokens: int) -> dict[str, float]:
    """Seconds of a forward with its loss and a backward; the loss, and the size of the gradients at
    the inputs."""
    ids = torch.randint(0, 10_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    started = time.perf_counter()
    loss = model(inputs_embeds=inputs, labels=ids).loss
    loss.backward()
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "loss": float(loss.detach()), "gradients": float(inputs.grad.norm())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--local", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shape = (arguments.rows, arguments.tokens)
    torch.set_num_threads(THREADS)
    if arguments.local is not None:
        files = resolve(arguments.model, cache_dir=arguments.local)
        model = files.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        answer_all(partial(timed_step, model, *shape))
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cache, name = Path(folder) / "cache", model_file(arguments.model, Path(folder))
        blocks = resolve(name, cache_dir=cache).manifest.blocks
        cuts = [blocks * hop // arguments.hops for hop in range(arguments.hops + 1)]
        size = ("--model", name, "--rows", str(arguments.rows), "--tokens", str(arguments.tokens))
        local = AnsweringProcess(__spec__.name, "--local", str(cache), *size)
        local.wait_until_ready()
        local.ask()
        lab = Swarm(Path(folder) / "lab", cache, name)
        stack.callback(lab.close)
        lab.start(*pairwise(cuts))
        model = stack.enter_context(lab.connect())
        timed_step(model, *shape)
        rounds = [(local.ask(), timed_step(model, *shape)) for _ in range(arguments.rounds)]
        local.close()
    ours = statistics.median(theirs["seconds"] for _, theirs in rounds)
    alone = statistics.median(mine["seconds"] for mine, _ in rounds)
    report = {
        "bench": "tuning",
        "model": arguments.model,
        "hops": arguments.hops,
        "rows": arguments.rows,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "largest_relative_difference": max(
            abs(mine[name] - theirs[name]) / abs(mine[name])
            for mine, theirs in rounds
            for name in ("loss", "gradients")
        ),
        "local_s": round(alone, 3),
        "swarm_s": round(ours, 3),
        "ratio": round(alone / ours, 3),
        "ratio_by_round": [round(mine["seconds"] / theirs["seconds"], 3) for mine, theirs in rounds],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
