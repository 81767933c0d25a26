"""A process that generates greedy tokens on request, and reports how long they took.

With only a cache directory it runs plain transformers, the yardstick; with a swarm file and
bootstrap addresses it is a client.
"""

import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.answering_process import AnsweringProcess, answer_all

MODEL = "smollm2-135m-instruct"


def generating(cache_dir: Path, threads: int, *swarm: str, model: str = MODEL) -> AnsweringProcess:
    """A process with plain transformers or, if ``swarm`` has a swarm file and bootstrap addresses,
    a client. Its requests are the arguments of ``timed_generate``."""
    return AnsweringProcess(__name__, str(cache_dir), str(threads), model, *swarm)


def timed_generate(model: Any, ids: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy generation of exactly ``tokens`` tokens: ``seconds`` of the whole, and ``first_s``
    until the first token of each prompt."""
    from tests.support.swarm.generation import greedy

    clock = _Clock()
    started = time.perf_counter()
    answers = greedy(model, ids, tokens, clock)
    ended = time.perf_counter()
    return {"seconds": ended - started, "first_s": clock.times[1] - started, "ids": answers}


class _Clock:
    """A streamer of transformers that notes when the prompts, and then each token, were put into
    it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the interface of streamers has it."""


def main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    cache_dir, name, swarm = Path(sys.argv[1]), sys.argv[3], sys.argv[4:]
    with ExitStack() as stack:
        model: Any
        if swarm:
            from swarmnet import AutoSwarmModelForCausalLM

            model = stack.enter_context(
                AutoSwarmModelForCausalLM.from_pretrained(
                    name, swarm=Path(swarm[0]), bootstrap=swarm[1:], cache_dir=cache_dir
                )
            )
        else:
            from swarmnet_protocols.models import resolve

            local = resolve(name, cache_dir=cache_dir)
            model = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        answer_all(partial(timed_generate, model))


if __name__ == "__main__":
    main()
