"""One stream of greedy decoding, and a longer prompt, through three loopback hosts and through
one host, against one local process and llama.cpp.

    python -m tests.bench.decode [--models smollm2-135m-instruct Q4_1 Q4_K Q8_0] [--hops 3] [--rounds 5]
                                 [--tokens 64] [--prompt 512] [--threads 2]
                                 [--llama-cpp DIRECTORY] [--without local one_host]

A format names a model with the structure of Llama 3.2 1B, random weights in this format, and a
quarter of its vocabulary.

In turns: transformers in one process, in float32; the swarm; a swarm of one host; and llama.cpp in
one process and through as many RPC servers as there are hops. All read the same file. llama.cpp
takes part where ``--llama-cpp`` names the directory of its programs (``make llama-bench`` builds
them).

Prints one JSON object a model. Lists have an item for each round. ``swarm_ready_s`` and
``swarm_mib`` are of the first host of the swarm, p2pd included.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from swarmnet_protocols.quantization.formats import Format
from tests.bench.generating_process import generating, timed_generate
from tests.bench.llama_cpp import LlamaCpp, Rates
from tests.support.gguf.random_llama import write_random_llama
from tests.support.processes.nodes import NodeProcess, Swarm

PROMPT_TOKENS = 32
OURS = {"swarm", "one_host"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=[DEFAULT_MODEL], help="names of models or formats")
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="threads of each process")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument(
        "--llama-cpp", type=Path, help="directory of llama.cpp's programs; without it no comparison"
    )
    parser.add_argument("--without", nargs="+", default=[], choices=["local", "one_host", "llama_cpp_rpc"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            report = measure(model_file(name, Path(folder)), Path(folder), arguments, stack)
        print(json.dumps({"bench": "decode", "model": name} | report), flush=True)


def model_file(name: str, folder: Path) -> str:
    """Return the name of a model. Write a random model to ``folder`` if ``name`` is a format."""
    if name not in Format.__members__:
        return name
    return str(write_random_llama(folder / f"{name}.gguf", Format[name]))


def measure(name: str, folder: Path, arguments: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """The figures of one model. ``stack`` ends the processes."""
    cache, threads = folder / "cache", arguments.threads
    model = resolve(name, cache_dir=cache)
    blocks = model.manifest.blocks
    ways: dict[str, Callable[..., dict[str, Any]]] = {}
    if "local" not in arguments.without:
        local = generating(cache, threads, model=name)
        stack.callback(local.close)
        local.wait_until_ready()
        ways["local"] = local.ask
    hosts: dict[str, tuple[NodeProcess, float]] = {}
    for each, hops in (("one_host", 1), ("swarm", arguments.hops)):
        if each in arguments.without:
            continue
        lab = Swarm(folder / each, cache, name)
        stack.callback(lab.close)
        spans = list(pairwise(blocks * hop // hops for hop in range(hops + 1)))
        launched = time.perf_counter()
        nodes: list[NodeProcess] = []
        for start, end in spans:
            options = ("--blocks", f"{start}:{end}", "--threads", str(threads))
            nodes.append(lab.launch(f"{start}-{end}", *options))
            if len(nodes) == 1:  # the bootstrap peer of the others
                _ = nodes[0].ready
                ready_s = time.perf_counter() - launched
        for node in nodes:
            _ = node.ready
        hosts[each] = nodes[0], ready_s
        ways[each] = partial(timed_generate, stack.enter_context(lab.connect()))
    llama_cpp = LlamaCpp(arguments.llama_cpp, threads) if arguments.llama_cpp else None
    count = 0 if "llama_cpp_rpc" in arguments.without else arguments.hops
    servers = stack.enter_context(llama_cpp.servers(count)) if llama_cpp else []

    answers: dict[str, list[dict[str, Any]]] = {}
    rates: dict[str, list[Rates]] = {}
    for number in range(arguments.rounds + 1):
        for each, generate in ways.items():
            # the first round warms up
            answer = generate(ids=prompt(number, PROMPT_TOKENS), tokens=arguments.tokens if number else 2)
            prefill = generate(ids=prompt(number, arguments.prompt), tokens=1)
            if not number:
                continue
            answers.setdefault(each, []).append(answer)
            rates.setdefault(each, []).append(
                Rates(
                    prompt=arguments.prompt / prefill["seconds"],
                    decode=(arguments.tokens - 1) / (answer["seconds"] - answer["first_s"]),
                )
            )
        if llama_cpp and number:  # it warms up by itself
            sizes = {"prompt": arguments.prompt, "tokens": arguments.tokens}
            rates.setdefault("llama_cpp", []).append(llama_cpp.measure(model.path, **sizes))
            if servers:
                over_rpc = llama_cpp.measure(model.path, **sizes, servers=servers)
                rates.setdefault("llama_cpp_rpc", []).append(over_rpc)
    return {
        "hops": arguments.hops,
        "tokens": arguments.tokens,
        "prompt": arguments.prompt,
        "threads": threads,
        "rounds": arguments.rounds,
        "file_mib": mib(model.path.stat().st_size),
        **{f"{each}_ready_s": round(ready_s, 2) for each, (_, ready_s) in hosts.items()},
        **{
            f"{each}_mib": mib(sum(process.memory_info().rss for process in host.family))
            for each, (host, _) in hosts.items()
        },
        "llama_cpp": "compared" if llama_cpp else "skipped: --llama-cpp names no directory of its programs",
        **compared_answers(answers, arguments.tokens),
        **compared_rates(rates),
    }


def prompt(number: int, count: int) -> list[list[int]]:
    """A batch of one prompt, which begins like no other, so that no host reuses a prefix."""
    first = 100 + number + count
    return [list(range(first, first + count))]


def mib(count: float) -> int:
    return round(count / 2**20)


def compared_answers(answers: dict[str, list[dict[str, Any]]], tokens: int) -> dict[str, Any]:
    """Compare whole answers of the swarm and of one process. Their time includes the short prompt."""
    texts = [[each["ids"] for each in found] for found in answers.values()]
    seconds = {name: [each["seconds"] for each in found] for name, found in answers.items()}
    report = {
        f"{name}_tokens_per_s": round(tokens / statistics.median(each), 2) for name, each in seconds.items()
    }
    return {
        "equal_tokens": all(each == texts[0] for each in texts),
        **report,
        "ratio_by_round": [
            round(a / b, 3) for a, b in zip(seconds.get("local", []), seconds["swarm"], strict=False)
        ],
    }


def compared_rates(rates: dict[str, list[Rates]]) -> dict[str, Any]:
    """The rates of each, and those of ours divided by those of each yardstick."""
    report: dict[str, Any] = {}
    for name, found in rates.items():
        report[f"{name}_decode"] = [round(each.decode, 2) for each in found]
        report[f"{name}_prompt"] = [round(each.prompt, 1) for each in found]
    for ours in OURS & rates.keys():
        for other in rates.keys() - OURS:
            decode, prompt = ratios(rates[ours], rates[other])
            report[f"{ours}_decode_over_{other}"] = decode
            report[f"{ours}_prompt_over_{other}"] = prompt
    return report


def ratios(mine: Sequence[Rates], others: Sequence[Rates]) -> tuple[list[float], list[float]]:
    """Decode and prompt, a ratio for each round."""
    pairs = list(zip(mine, others, strict=True))
    return (
        [round(own.decode / other.decode, 3) for own, other in pairs],
        [round(own.prompt / other.prompt, 3) for own, other in pairs],
    )


if __name__ == "__main__":
    main()
