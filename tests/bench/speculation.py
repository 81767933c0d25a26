"""Tokens per trip that speculation reaches on real answers, at a given time of a trip.

    python -m tests.bench.speculation [--trip-s 0.43] [--position-s 0.005] [--tokens 128]

Greedy answers of the real model, computed in one process; then drafts are made and checked against
them as ``generate`` does, with step times that follow from the options. Prints one JSON object for
each kind of prompt: editing code and summarising repeat their prompt, chat does not.
"""

import argparse
import copy
import csv
import doctest
import heapq
import inspect
import json
import sched
import shlex
import statistics
import subprocess
import tempfile
import textwrap
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from swarmnet_client.model.drafts.speculation import Speculator, StepTimes
from swarmnet_protocols.models import resolve
from tests.support.swarm.generation import greedy

CODE = [
    inspect.getsource(each)
    for each in (shlex.join, shlex.quote, textwrap.dedent, textwrap.indent, json.loads)
]
PROMPTS: dict[str, list[str]] = {
    "edit code": [
        f"Rename the argument of this function and print the whole function again:\n\n{code}" for code in CODE
    ],
    "summarise": [
        f"Summarise in three sentences:\n\n{(each.__doc__ or '').strip()}"
        for each in (argparse, copy, csv, doctest, heapq, json, sched, statistics, subprocess, timeit)
    ],
    "chat": [
        "What is the capital of France?",
        "Write a short poem about the sea.",
        "Explain how a bicycle stays upright.",
        "Give me five ideas for a birthday party.",
        "Why is the sky blue?",
        "Write a letter to a friend about your holidays.",
        "What should I cook tonight?",
        "Tell me about the history of Rome.",
        "How do I learn to play the guitar?",
        "Who was Marie Curie?",
        "Write a short story about a dragon.",
        "What are the benefits of exercise?",
        "Explain photosynthesis to a child.",
        "Plan a weekend in Paris for me.",
        "How does a computer work?",
        "What is the difference between weather and climate?",
        "Give me tips for a job interview.",
        "Write an email to my landlord about a broken heater.",
        "What is machine learning?",
        "Recommend three books and say why.",
    ],
}


def trips(prompt: Sequence[int], answer: Sequence[int], trip_s: float, position_s: float) -> int:
    """Trips that bring ``answer``, with drafts as ``generate`` makes them."""
    speculator, times = Speculator(prompt), StepTimes()
    speculator.choose(answer[:1], 0)
    count, held = 1, 1
    while held < len(answer):
        draft = speculator.draft(times, most=len(answer) - held - 1)
        times.add(1 + len(draft), trip_s + position_s * len(draft))
        chosen = []
        for at, token in enumerate(answer[held : held + 1 + len(draft)]):
            chosen.append(token)
            if at < len(draft) and token != draft[at]:
                break
        held += speculator.choose(chosen, len(draft))
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trip-s", type=float, default=0.43)
    parser.add_argument("--position-s", type=float, default=0.005)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        local = resolve("smollm2-135m-instruct", cache_dir=Path(folder))
        tokenizer = local.tokenizer()
        model = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
        for kind, prompts in PROMPTS.items():
            tokens = steps = 0
            encoded = [encode(tokenizer, prompt) for prompt in prompts]
            for ids, answer in zip(encoded, greedy(model, encoded, arguments.tokens), strict=True):
                end = (
                    answer.index(tokenizer.eos_token_id) + 1
                    if tokenizer.eos_token_id in answer
                    else len(answer)
                )
                tokens += end
                steps += trips(ids, answer[:end], arguments.trip_s, arguments.position_s)
            print(
                json.dumps(
                    {
                        "bench": "speculation",
                        "kind": kind,
                        "tokens": tokens,
                        "trips": steps,
                        "tokens_per_trip": round(tokens / steps, 2),
                    }
                ),
                flush=True,
            )


def encode(tokenizer: Any, prompt: str) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    return ids


if __name__ == "__main__":
    main()
