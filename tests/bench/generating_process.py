"""Generation in a process of its own, which reads JSON commands on stdin and answers on stdout.

With a cache directory alone it is plain transformers, the yardstick; with a swarm's file and bootstraps it is a client.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"


class GeneratingProcess:
    """A child that generates, float32."""

    def __init__(self, cache_dir: Path, threads: int, *swarm: str) -> None:
        """Plain transformers with default OpenMP settings, or a client of ``swarm``: its file, then bootstraps."""
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(cache_dir), str(threads), *swarm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def wait_until_ready(self) -> None:
        """To be called once, before the first ``generate``."""
        self._answer()

    def generate(self, ids: list[list[int]], tokens: int) -> dict[str, Any]:
        """New greedy tokens for prompts of one length, and the seconds that took."""
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        self._process.stdin.write(json.dumps({"ids": ids, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


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
        print("{}", flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(timed_generate(model, command["ids"], command["tokens"])), flush=True)


if __name__ == "__main__":
    main()
