"""Whole sequences and long prompts through three loopback hops against one local transformers
process; decoding with and without drafts.

    python -m tests.bench.long_inputs [--hops 3] [--rounds 5] [--kinds rows prompt decode]

In turns, with two threads in every process, in float32. ``rows``: a forward of 8 x 128 tokens, with
the logits of the last position of each row; ``prompt``: of 2,048 tokens, with the logits of the
last; ``decode``: 48 tokens of a text without repetition by the swarm, without and with speculation.
``cpu`` are the processor seconds of all processes of one side: other work on the machine hardly
changes them. Prints JSON, a line for each kind; lists have an item for each round.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import psutil
import torch

from swarmnet_client.model.model import SwarmModel
from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from tests.bench.answering_process import AnsweringProcess, answer_all
from tests.support.processes.nodes import Swarm, swarm

BLOCKS = 30
THREADS = 2
SHAPES = {"rows": (8, 128), "prompt": (1, 2048), "decode": (1, 64)}
TOKENS = 48
TEMPERATURE = 1.5
"""High, so that the text hardly repeats itself."""

Figures = dict[str, float]


def work(model: Any, kind: str, seed: int, *, speculate: bool = True) -> Figures:
    """Do one piece of work; returns its ``seconds``, and the ``cpu`` seconds of this process."""
    ids = torch.randint(1000, 20_000, SHAPES[kind], generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    cpu_s, began = time.process_time(), time.perf_counter()
    with torch.inference_mode():
        if kind == "decode":
            options = {"speculate": speculate} if isinstance(model, SwarmModel) else {}
            model.generate(
                ids,
                max_new_tokens=TOKENS,
                do_sample=True,
                temperature=TEMPERATURE,
                eos_token_id=None,
                pad_token_id=0,
                **options,
            )
        else:
            model(input_ids=ids, logits_to_keep=1)
    return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu_s}


class OtherProcesses:
    """The processes of a swarm, and the p2pd of this client."""

    def __init__(self, lab: Swarm) -> None:
        nodes = [psutil.Process(node.process.pid) for node in lab.nodes.values()]
        own = [each for each in psutil.Process().children() if each.name() == "p2pd"]
        self._processes = {each for node in nodes for each in (node, *node.children(recursive=True))} | {*own}

    def cpu_s(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self._processes)


def report(kind: str, one: Callable[[int], Figures], other: Callable[[int], Figures], rounds: int) -> None:
    """Measure in turns, after a round to warm up, and print. Each side is first in every second
    round."""
    rng = random.Random(kind)
    pairs: list[tuple[Figures, Figures]] = []
    for number in range(rounds + 1):
        seed = rng.getrandbits(30)
        if number % 2:
            pairs.append((one(seed), other(seed)))
        else:
            second = other(seed)
            pairs.append((one(seed), second))
    pairs = pairs[1:]
    figures: dict[str, Any] = {"bench": "long_inputs", "kind": kind, "load": round(os.getloadavg()[0], 1)}
    for name in ("seconds", "cpu"):
        figures[f"one_{name}"] = [round(each[name], 2) for each, _ in pairs]
        figures[f"other_{name}"] = [round(each[name], 2) for _, each in pairs]
        figures[f"{name}_ratios"] = [round(each[name] / others[name], 3) for each, others in pairs]
    print(json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(SHAPES))
    parser.add_argument("--local", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.local is not None:
        files = resolve(DEFAULT_MODEL, cache_dir=arguments.local)
        model = files.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        answer_all(partial(work, model))
        return
    cuts = [BLOCKS * hop // arguments.hops for hop in range(arguments.hops + 1)]
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        local = AnsweringProcess(__spec__.name, "--local", str(cache))
        local.wait_until_ready()
        with swarm(Path(folder) / "lab", cache, *pairwise(cuts)) as lab, lab.connect() as model:
            others = OtherProcesses(lab)

            def by_swarm(kind: str, seed: int, *, speculate: bool = True) -> Figures:
                cpu_s = others.cpu_s()
                took = work(model, kind, seed, speculate=speculate)
                return took | {"cpu": took["cpu"] + others.cpu_s() - cpu_s}

            def by_one(kind: str, seed: int) -> Figures:
                return local.ask(kind=kind, seed=seed)

            for kind in arguments.kinds:
                one = partial(by_swarm, kind, speculate=False) if kind == "decode" else partial(by_one, kind)
                report(kind, one, partial(by_swarm, kind), arguments.rounds)
        local.close()


if __name__ == "__main__":
    main()
