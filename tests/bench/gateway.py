"""The cost of the gateway.

- one stream, and sixteen callers, against the Python client
- sixteen callers of four adapters against callers of the plain model
- answers within a grammar
- an overload of ten times
- a thousand silent connections

    python -m tests.bench.gateway [--tokens 32] [--rounds 5] [--overload-s 30]

Gateway and client are processes of their own over the same three nodes, and take turns. Prints
JSON, a line for each part.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from swarmnet_protocols.models import resolve
from tests.bench.answering_process import AnsweringProcess
from tests.bench.generating_process import MODEL, generating
from tests.support.models.peft_oracle import with_lora
from tests.support.processes.gateway_process import GatewayProcess
from tests.support.processes.nodes import swarm

SPANS = ((0, 10), (10, 20), (20, 30))
CALLERS = 16
PROMPT_TOKENS = 32
ACTIVE = 8
"""Sequences of the overloaded gateway; as many requests may wait."""
IDLE = 1000
ADAPTERS = ("one", "two", "three", "four")
RANK = 8


def body(prompt: list[int], tokens: int, model: str = MODEL) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(
    http: httpx.AsyncClient, prompt: list[int], tokens: int, model: str = MODEL
) -> tuple[int, float, int]:
    """Status, seconds and tokens of one streamed answer."""
    started = time.perf_counter()
    used = 0
    async with http.stream("POST", "/v1/completions", json=body(prompt, tokens, model)) as response:
        async for line in response.aiter_lines():
            if '"usage":{' in line:
                used = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return response.status_code, time.perf_counter() - started, used


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(1000, 20000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def client_of(gateway: GatewayProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    return httpx.AsyncClient(base_url=gateway.url, timeout=300, limits=limits)


async def together(
    http: httpx.AsyncClient, prompts: list[list[int]], tokens: int, models: Sequence[str] = (MODEL,)
) -> float:
    """Seconds until all of these prompts, sent at once to ``models`` in turn, are answered."""
    started = time.perf_counter()
    asked = zip(prompts, cycle(models), strict=False)
    answers = await asyncio.gather(*(ask(http, prompt, tokens, model) for prompt, model in asked))
    if {(status, used) for status, _, used in answers} != {(200, tokens)}:
        raise RuntimeError(f"not all were answered: {answers}")
    return time.perf_counter() - started


async def compare(gateway: GatewayProcess, python: AnsweringProcess, arguments: Any) -> dict[str, Any]:
    """One stream, and sixteen callers, against the Python client, in turns."""
    rng = random.Random(0)
    tokens = arguments.tokens
    alone: list[tuple[float, float]] = []
    batch: list[tuple[float, float]] = []
    async with client_of(gateway) as http:
        await together(http, [[5] * 4] * CALLERS, 2)
        for _ in range(arguments.rounds):
            prompts = random_prompts(rng, CALLERS)
            theirs = await asyncio.to_thread(python.ask, ids=prompts[:1], tokens=tokens)
            alone.append((await together(http, prompts[:1], tokens), theirs["seconds"]))
            theirs = await asyncio.to_thread(python.ask, ids=prompts, tokens=tokens)
            batch.append((await together(http, prompts, tokens), theirs["seconds"]))
    return {
        "one_stream_ms_per_token": [round(1000 * ours / tokens, 2) for ours, _ in alone],
        "python_ms_per_token": [round(1000 * theirs / tokens, 2) for _, theirs in alone],
        "overhead_ms_per_token": round(
            1000 * statistics.median(ours - theirs for ours, theirs in alone) / tokens, 2
        ),
        "overhead_goal_ms": 3,
        "callers_tokens_per_s": [round(CALLERS * tokens / ours, 1) for ours, _ in batch],
        "python_batch_tokens_per_s": [round(CALLERS * tokens / theirs, 1) for _, theirs in batch],
        "callers_ratio": round(statistics.median(theirs / ours for ours, theirs in batch), 2),
        "callers_goal": 0.8,
    }


def write_adapters(folder: Path, cache_dir: Path) -> list[str]:
    """Four random adapters in ``folder``; returns the options that serve them."""
    model = resolve(MODEL, cache_dir=cache_dir).load_whole(dtype=torch.float32, device=torch.device("cpu"))
    options = []
    for name in ADAPTERS:
        tuned = with_lora(model, ["q_proj", "v_proj"], rank=RANK, seed=len(options))
        tuned.save_pretrained(folder / name)
        model = tuned.unload()
        options += ["--adapter", f"{name}={folder / name}"]
    return options


async def adapters(gateway: GatewayProcess, arguments: Any) -> dict[str, Any]:
    """Sixteen callers of four adapters, and sixteen of the plain model, in turns."""
    rng = random.Random(3)
    models = [f"{MODEL}:{name}" for name in ADAPTERS]
    taken_s: list[tuple[float, float]] = []
    async with client_of(gateway) as http:
        for _ in range(arguments.rounds + 1):
            prompts = random_prompts(rng, CALLERS)
            plain_s = await together(http, prompts, arguments.tokens)
            taken_s.append((plain_s, await together(http, prompts, arguments.tokens, models)))
    del taken_s[0]  # opened the chains and uploaded the adapters
    tokens = CALLERS * arguments.tokens
    return {
        "plain_tokens_per_s": [round(tokens / plain_s, 1) for plain_s, _ in taken_s],
        "adapters_tokens_per_s": [round(tokens / adapted_s, 1) for _, adapted_s in taken_s],
        "adapters_ratio": round(statistics.median(plain / adapted for plain, adapted in taken_s), 2),
        "adapters_goal": 0.8,
    }


SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 200},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
        "text": {"type": "string", "minLength": 400, "maxLength": 2000},
    },
    "required": ["title", "year", "text"],
    "additionalProperties": False,
}


async def constrained(gateway: GatewayProcess, arguments: Any) -> dict[str, Any]:
    """Answers within a grammar against free ones of as many tokens, in turns.

    A pattern that every text matches costs its masks, and changes no token. A schema adds forced
    tokens, which take no trip.
    """
    tokens = 4 * arguments.tokens
    forms = {
        "free": {},
        "pattern": {"guided_regex": "(.|\n)*"},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    }
    rates: dict[str, list[float]] = {name: [] for name in forms}
    async with client_of(gateway) as http:
        for turn in range(arguments.rounds + 1):
            for name, form in forms.items():
                asked = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **form}
                question = f"Tell a story of {turn + 2} lighthouses as JSON."
                asked["messages"] = [{"role": "user", "content": question}]
                started = time.perf_counter()
                answer = await http.post("/v1/chat/completions", json=asked)
                used = answer.json()["usage"]["completion_tokens"]
                if turn:  # the first one warms up
                    rates[name].append(used / (time.perf_counter() - started))
    ratios = {
        f"{name}_rate_ratio": [
            round(ours / free, 3) for ours, free in zip(rates[name], rates["free"], strict=True)
        ]
        for name in ("pattern", "schema")
    }
    return {
        "free_tokens_per_s": [round(rate, 1) for rate in rates["free"]],
        **ratios,
        "pattern_ratio": statistics.median(ratios["pattern_rate_ratio"]),
        "pattern_goal": 0.95,
    }


async def offer(gateway: GatewayProcess, rate: float, seconds: float, tokens: int) -> dict[str, Any]:
    """Send requests at a fixed rate, whether the earlier ones were answered or not; returns the
    tokens served and the requests refused within ``seconds``."""
    rng = random.Random(1)
    served, refused_s = 0, []
    started = time.perf_counter()
    async with client_of(gateway) as http, asyncio.TaskGroup() as tasks:

        async def one() -> None:
            nonlocal served
            (prompt,) = random_prompts(rng, 1)
            status, took_s, used = await ask(http, prompt, tokens)
            if status == 200:
                within = min(1.0, max(0.0, (started + seconds - (time.perf_counter() - took_s)) / took_s))
                served += round(used * within)
            else:
                refused_s.append(took_s)

        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            tasks.create_task(one())
    refused_s.sort()
    return {
        "offered_per_s": round(rate, 2),
        "goodput_tokens_per_s": round(served / seconds, 1),
        "refused": len(refused_s),
        "refused_ms_p50_p95_max": [
            round(1000 * refused_s[int(part * (len(refused_s) - 1))], 1) for part in (0.5, 0.95, 1.0)
        ]
        if refused_s
        else [],
    }


async def overload(gateway: GatewayProcess, arguments: Any) -> dict[str, Any]:
    """Goodput with as many callers as sequences, and with ten times that load.

    No prompt is sent twice, because its cached positions would not be computed again.
    """
    rng = random.Random(2)
    tokens = arguments.tokens
    async with client_of(gateway) as http:
        await together(http, random_prompts(rng, ACTIVE), 2)
        peak_s = statistics.median(
            [await together(http, random_prompts(rng, ACTIVE), tokens) for _ in range(arguments.rounds)]
        )
    peak = ACTIVE * tokens / peak_s
    over = await offer(gateway, 10 * peak / tokens, arguments.overload_s, tokens)
    return {
        "peak_tokens_per_s": round(peak, 1),
        "overload": over,
        "overload_ratio": round(over["goodput_tokens_per_s"] / peak, 2),
        "overload_goal": 0.8,
        "refusal_goal_ms": 100,
    }


async def idle(gateway: GatewayProcess, arguments: Any) -> dict[str, Any]:
    """One stream with and without a thousand silent connections."""
    address = httpx.URL(gateway.url)
    process = psutil.Process(gateway.pid)
    prompt = [11] * PROMPT_TOKENS
    ratios = []
    async with client_of(gateway) as http:
        await together(http, [prompt], 4)
        before = process.memory_info().rss
        grown = 0
        for _ in range(arguments.rounds):
            without_s = await together(http, [prompt], arguments.tokens)
            async with AsyncExitStack() as stack:
                for _ in range(IDLE):
                    _, writer = await asyncio.open_connection(address.host, address.port)
                    stack.callback(writer.close)
                ratios.append(await together(http, [prompt], arguments.tokens) / without_s)
                grown = max(grown, process.memory_info().rss - before)
    return {
        "idle_connections": IDLE,
        "idle_time_ratio": round(statistics.median(ratios), 3),
        "idle_memory_mb": round(grown / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--overload-s", type=float, default=30.0)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        swarm(Path(folder) / "lab", Path(folder) / "cache", *SPANS) as lab,
    ):
        python = generating(lab.cache_dir, 1, str(lab.file), *lab.bootstrap)
        python.wait_until_ready()
        with GatewayProcess(lab, *write_adapters(Path(folder), lab.cache_dir)) as gateway:
            show(asyncio.run(compare(gateway, python, arguments)), arguments)
            show(asyncio.run(adapters(gateway, arguments)), arguments)
            show(asyncio.run(constrained(gateway, arguments)), arguments)
            show(asyncio.run(idle(gateway, arguments)), arguments)
        python.close()
        with GatewayProcess(lab, "--max-concurrent", str(ACTIVE)) as small:
            show(asyncio.run(overload(small, arguments)), arguments)


def show(figures: dict[str, Any], arguments: Any) -> None:
    about = {"bench": "gateway", "tokens": arguments.tokens, "load": round(os.getloadavg()[0], 1)}
    print(json.dumps(about | figures), flush=True)


if __name__ == "__main__":
    main()
