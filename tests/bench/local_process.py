"""transformers alone in a process of its own, as the yardstick: reads JSON commands on stdin, answers on stdout."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

THREADS = 2


class LocalProcess:
    """A child that runs the whole model with plain transformers, float32, two threads, default OpenMP settings."""

    def __init__(self, cache_dir: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(cache_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
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

    from swarmnet_protocols.models import resolve

    torch.set_num_threads(THREADS)
    local = resolve("smollm2-135m-instruct", cache_dir=Path(sys.argv[1]))
    model = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    print("{}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(timed_generate(model, command["ids"], command["tokens"])), flush=True)


if __name__ == "__main__":
    main()
