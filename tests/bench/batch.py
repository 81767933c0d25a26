"""A batch of prompts: next to the same prompts sent by 16 threads, and next to an interactive
caller.

    python -m tests.bench.batch [--prompts 1000] [--tokens 16] [--answer 200]

Batch, gateway and two nodes are processes of their own. Prints a line of JSON: prompts/s of both
ways, and the caller's p95 of the seconds from token to token, alone and next to the batch.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarmnet.paths import default_cache_dir
from tests.support.processes.commands import RunningCommand
from tests.support.processes.gateway_process import GatewayProcess
from tests.support.processes.nodes import Swarm, swarm

MODEL = "smollm2-135m-instruct"
SPANS = ((0, 15), (15, 30))
THREADS = 16


def prompts(kind: str, count: int) -> list[str]:
    """Prompts without a common beginning."""
    return [
        f"{number * 7919} is the number of this {kind}, which tells of the sea:" for number in range(count)
    ]


@contextmanager
def running_batch(lab: Swarm, texts: Sequence[str], tokens: int, kind: str) -> Iterator[RunningCommand]:
    """``swarmnet batch`` from its first look at the prompts on."""
    where = lab.directory / kind
    asked = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    where.with_suffix(".jsonl").write_text(
        "".join(json.dumps({"prompt": text} | asked) + "\n" for text in texts)
    )
    files = (str(where.with_suffix(".jsonl")), "--out", str(where.with_suffix(".out")))
    swarm_options = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
    with RunningCommand(("batch", *files, *swarm_options), where.with_suffix(".log")) as running:
        running.wait("answers", done=0)
        yield running


def gaps(client: Any, tokens: int) -> list[float]:
    """Seconds from token to token of one interactive answer."""
    times = [
        time.perf_counter()
        for _ in client.completions.create(
            model=MODEL,
            prompt="The sea",
            max_tokens=tokens,
            temperature=0.8,
            seed=0,  # drafts make texts of different speed
            stream=True,
            extra_body={"ignore_eos": True},
        )
    ]
    return [after - before for before, after in itertools.pairwise(times[2:])]


def p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--answer", type=int, default=200)
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as place,
        swarm(Path(place, "lab"), default_cache_dir(), *SPANS) as lab,
        GatewayProcess(lab) as gateway,
        gateway.openai() as client,
    ):
        asked = {"max_tokens": given.tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
        gaps(client, 20)
        alone = gaps(client, given.answer)
        texts = prompts("letter", given.prompts)
        with running_batch(lab, texts, given.tokens, "alone") as running:
            started = time.perf_counter()
            running.wait("answers", done=given.prompts)
            batch_s = time.perf_counter() - started
        with ThreadPoolExecutor(THREADS) as threads:
            started = time.perf_counter()
            list(
                threads.map(
                    lambda text: client.completions.create(model=MODEL, prompt=text, **asked),
                    prompts("page", given.prompts),
                )
            )
            threads_s = time.perf_counter() - started
        with running_batch(lab, prompts("song", given.prompts), given.tokens, "together") as running:
            together = gaps(client, given.answer)
            done = max(event["done"] for event in list(running.events) if event["event"] == "answers")
    found = {
        "bench": "batch",
        "batch_prompts_per_s": given.prompts / batch_s,
        "threads_prompts_per_s": given.prompts / threads_s,
        "throughput_ratio": threads_s / batch_s,
        "alone_p95_s": p95(alone),
        "together_p95_s": p95(together),
        "p95_ratio": p95(together) / p95(alone),
        "mean_ratio": statistics.mean(together) / statistics.mean(alone),
        "answered_meanwhile": done,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
