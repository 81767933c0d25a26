"""Generation in a process of its own: it is asked for greedy tokens, and says how long they took.

With a cache directory alone it is plain transformers, the yardstick; with a swarm's file and bootstraps it is a client.
"""

import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.answering_process import AnsweringProcess, answer_all

MODEL = "smollm2-135m-instruct"


def generating(cache_dir: Path, threads: int, *swarm: str) -> AnsweringProcess:
    """Plain transformers, or a client of ``swarm``: its file, then bootstraps. Asked for what ``timed_generate`` takes."""
    return AnsweringProcess(__name__, str(cache_dir), str(threads), *swarm)


def timed_generate(model: Any, ids: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy generation of exactly ``tokens`` tokens: ``seconds`` of the whole, and ``first_s`` until the first token of each prompt."""
    from tests.support.generation import greedy

    clock = _Clock()
    started = time.perf_counter()
    answers = greedy(model, ids, tokens, clock)
    ended = time.perf_counter()
    return {"seconds": ended - started, "first_s": clock.times[1] - started, "ids": answers}


class _Clock:
    """A streamer of transformers: notes when the prompts and each token after them came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    cache_dir, swarm = Path(sys.argv[1]), sys.argv[3:]
    with ExitStack() as stack:
        model: Any
        if swarm:
            from swarmnet import AutoSwarmModelForCausalLM

            model = stack.enter_context(
                AutoSwarmModelForCausalLM.from_pretrained(
                    MODEL, swarm=Path(swarm[0]), bootstrap=swarm[1:], cache_dir=cache_dir
                )
            )
        else:
            from swarmnet_protocols.models import resolve

            local = resolve(MODEL, cache_dir=cache_dir)
            model = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        answer_all(partial(timed_generate, model))


if __name__ == "__main__":
    main()
