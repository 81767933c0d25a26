"""First tokens of sessions with a common system prompt, with and without reuse of its KV caches.

    python -m tests.bench.prefix_reuse [--sessions 16] [--prompt-tokens 1000] [--without 5]

A gateway over three nodes, each a process. After the first session, each asks for one token, one
session after another; some of them before that with a salt of their own, which reuses nothing.
Prints JSON.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.bench.gateway import SPANS, body
from tests.support.processes.gateway_process import GatewayProcess
from tests.support.processes.nodes import swarm

OWN_TOKENS = 30


async def first_token(http: httpx.AsyncClient, prompt: list[int], salt: str) -> tuple[float, int]:
    """Seconds until the first token, and the tokens that were reused."""
    started = time.perf_counter()
    fields = body(prompt, 1) | {"cache_salt": salt, "stream": False}
    del fields["stream_options"]
    answer = (await http.post("/v1/completions", json=fields)).raise_for_status().json()
    return time.perf_counter() - started, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def measure(url: str, arguments: Any) -> dict[str, Any]:
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, 20000) for _ in range(count)]

    common = tokens(arguments.prompt_tokens)
    without: list[float] = []
    with_reuse: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await first_token(http, tokens(100), "warm")
        await first_token(http, [*common, *tokens(OWN_TOKENS)], "shared")
        for number in range(1, arguments.sessions):
            prompt = [*common, *tokens(OWN_TOKENS)]
            if number <= arguments.without:
                seconds, cached = await first_token(http, prompt, f"of {number} alone")
                without.append(seconds)
                if cached:
                    raise RuntimeError("the other salt was reused")
            seconds, cached = await first_token(http, prompt, "shared")
            with_reuse.append(seconds)
            if cached < len(common):
                raise RuntimeError(f"{cached} tokens were reused")
    return {
        "bench": "prefix_reuse",
        "load": round(os.getloadavg()[0], 1),
        "sessions": arguments.sessions,
        "prompt_tokens": arguments.prompt_tokens,
        "without_ms": [round(1000 * each) for each in without],
        "with_ms": [round(1000 * each) for each in with_reuse],
        "ratio": round(statistics.median(with_reuse) / statistics.median(without), 3),
        "goal": 0.2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument(
        "--without", type=int, default=5, help="sessions that are also measured without reuse"
    )
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", *SPANS) as lab,
        GatewayProcess(lab) as gateway,
    ):
        print(json.dumps(asyncio.run(measure(gateway.url, arguments))))


if __name__ == "__main__":
    main()
