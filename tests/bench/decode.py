"""One stream of greedy decoding through three loopback hops, and a prompt of 512 tokens, against
one local process and llama.cpp.

    python -m tests.bench.decode [--hops 3] [--rounds 5] [--tokens 64] [--llama-cpp DIRECTORY]

In turns, with two threads in each process: transformers in one process, in float32; the swarm; and,
where ``--llama-cpp`` names the directory of llama.cpp's programs (``llama-bench``,
``ggml-rpc-server``), llama.cpp in one process and through as many RPC servers as there are hops.
All read the same file. Prints JSON; lists have an item for each round.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from swarmnet_protocols.models import DEFAULT_MODEL, resolve
from tests.bench.generating_process import generating, timed_generate
from tests.bench.llama_cpp import LlamaCpp, Rates
from tests.support.processes.nodes import swarm

BLOCKS = 30
PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 512
THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hops", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(
        "--llama-cpp", type=Path, help="directory of llama.cpp's programs; without it no comparison"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    ids, long_ids = ([list(range(100, 100 + count))] for count in (PROMPT_TOKENS, LONG_PROMPT_TOKENS))
    cuts = [BLOCKS * hop // arguments.hops for hop in range(arguments.hops + 1)]
    local_s, swarm_s, mine, one_process, over_rpc = [], [], list[Rates](), list[Rates](), list[Rates]()
    equal = True
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cache = Path(folder) / "cache"
        local = generating(cache, THREADS)
        stack.callback(local.close)
        local.wait_until_ready()
        file = resolve(DEFAULT_MODEL, cache_dir=cache).path
        lab = stack.enter_context(swarm(Path(folder) / "lab", cache, *pairwise(cuts)))
        model = stack.enter_context(lab.connect())
        llama_cpp = LlamaCpp(arguments.llama_cpp, THREADS) if arguments.llama_cpp else None
        servers = stack.enter_context(llama_cpp.servers(arguments.hops)) if llama_cpp else []
        for number in range(arguments.rounds + 1):
            theirs = local.ask(ids=ids, tokens=arguments.tokens)
            answer = timed_generate(model, ids, arguments.tokens)
            prefill = timed_generate(model, long_ids, 1)
            equal = equal and answer["ids"] == theirs["ids"]
            if not number:
                continue  # the first round warms up
            local_s.append(theirs["seconds"])
            swarm_s.append(answer["seconds"])
            mine.append(
                Rates(
                    prompt=LONG_PROMPT_TOKENS / prefill["seconds"],
                    decode=(arguments.tokens - 1) / (answer["seconds"] - answer["first_s"]),
                )
            )
            if llama_cpp:
                sizes = {"prompt": LONG_PROMPT_TOKENS, "tokens": arguments.tokens}
                one_process.append(llama_cpp.measure(file, **sizes))
                over_rpc.append(llama_cpp.measure(file, **sizes, servers=servers))
    report = {
        "bench": "decode",
        "hops": arguments.hops,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "equal_tokens": equal,
        "local_tokens_per_s": round(arguments.tokens / statistics.median(local_s), 2),
        "swarm_tokens_per_s": round(arguments.tokens / statistics.median(swarm_s), 2),
        "ratio": round(statistics.median(local_s) / statistics.median(swarm_s), 3),
        "ratio_by_round": [round(a / b, 3) for a, b in zip(local_s, swarm_s, strict=True)],
        "decode_by_round": [round(rates.decode, 2) for rates in mine],
        "prompt_by_round": [round(rates.prompt, 1) for rates in mine],
        "llama_cpp": "compared"
        if arguments.llama_cpp
        else "skipped: --llama-cpp names no directory of its programs",
    }
    for name, yardstick in (("llama_cpp", one_process), ("llama_cpp_rpc", over_rpc)):
        report |= compared(name, mine, yardstick)
    print(json.dumps(report))


def compared(name: str, mine: list[Rates], yardstick: list[Rates]) -> dict[str, Any]:
    """The rates of a yardstick, and the rates of the swarm divided by them; empty if the yardstick
    was not measured."""
    if not yardstick:
        return {}
    pairs = list(zip(mine, yardstick, strict=True))
    return {
        f"{name}_decode_by_round": [round(rates.decode, 2) for rates in yardstick],
        f"{name}_prompt_by_round": [round(rates.prompt, 1) for rates in yardstick],
        f"decode_over_{name}": [round(own.decode / other.decode, 3) for own, other in pairs],
        f"prompt_over_{name}": [round(own.prompt / other.prompt, 3) for own, other in pairs],
    }


if __name__ == "__main__":
    main()
