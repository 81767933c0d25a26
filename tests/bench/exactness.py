"""Greedy tokens through 1, 2, 3 and 5 hops of real processes against transformers' generate() in
one process.

    python -m tests.bench.exactness [--hops 1 2 3 5] [--prompts 20] [--tokens 64]

Prompts of 1 to 1000 tokens from the standard library's own source, singly and in left-padded
batches. Prints JSON.
"""

import argparse
import json
import random
import sysconfig
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from swarmnet_protocols.models import resolve
from tests.support.processes.nodes import swarm
from tests.support.swarm.generation import greedy

BLOCKS = 30


def pieces(tokenizer: Any, lengths: Sequence[int], rng: random.Random) -> list[list[int]]:
    """Pieces of real text of so many tokens each."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    found = []
    for length in lengths:
        text = ""
        while len(ids := tokenizer(text).input_ids) < length:
            text += rng.choice(files).read_text(encoding="utf-8", errors="replace")
        start = rng.randrange(len(ids) - length + 1)
        found.append(ids[start : start + length])
    return found


def prompts(tokenizer: Any, count: int, rng: random.Random) -> list[list[int]]:
    """Pieces of real text of 1 to 1000 tokens."""
    lengths = [1, 2, 1000] + [rng.randint(3, 999) for _ in range(count - 3)]
    return pieces(tokenizer, lengths[:count], rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hops", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        local = resolve("smollm2-135m-instruct", cache_dir=cache)
        whole = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        batch = prompts(local.tokenizer(), arguments.prompts, random.Random(0))
        groups = [batch[i : i + arguments.batch] for i in range(0, len(batch), arguments.batch)]
        expected = [greedy(whole, [ids], arguments.tokens)[0] for ids in batch]
        del whole
        for hops in arguments.hops:
            cuts = [BLOCKS * hop // hops for hop in range(hops + 1)]
            spans = list(pairwise(cuts))
            with swarm(Path(folder) / f"lab{hops}", cache, *spans) as lab, lab.connect() as model:
                single = [greedy(model, [ids], arguments.tokens)[0] for ids in batch]
                batched = [row for group in groups for row in greedy(model, group, arguments.tokens)]
                route = model.last_run.route
            differing = [len(ids) for ids, a, b in zip(batch, single, expected, strict=True) if a != b]
            differing_batched = [
                len(ids) for ids, a, b in zip(batch, batched, expected, strict=True) if a != b
            ]
            report = {
                "hops": len(route),
                "prompts": len(batch),
                "tokens": arguments.tokens,
                "single_equal": len(batch) - len(differing),
                "batched_equal": len(batch) - len(differing_batched),
                "differing_prompt_lengths": differing,
                "differing_prompt_lengths_batched": differing_batched,
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
