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
    """Greedy generation of exactly ``tokens`` tokens, timed as a whole."""
    from tests.support.generation import greedy

    started = time.perf_counter()
    answers = greedy(model, ids, tokens)
    return {"seconds": time.perf_counter() - started, "ids": answers}


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
