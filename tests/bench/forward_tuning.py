"""Tuning with forward passes only, of SmolLM2-135M-Instruct through three hosts in processes.

    python -m tests.bench.forward_tuning [--steps 6] [--population 16] [--max-tokens 16] [--seed 0]

First, forwards a second: the losses of 8 new adapters on 4 rows of 64 tokens, against one batch of 32
rows without adapters, in turn. Then `es` raises the share of greedy answers that are valid JSON. The
model wraps most of them in a code block. `valid` of "eval" is about words that `es` does not learn
from. Prints JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from swarmnet_client.model.client_adapter import adapter_of
from swarmnet_client.tuning.batches import Dataset
from swarmnet_client.tuning.candidates import losses
from swarmnet_client.tuning.forward_tuner import ForwardTuner
from swarmnet_client.tuning.methods import LEARNING_RATES, SPREADS, TuneMethod, TuneSettings, attach
from swarmnet_client.tuning.rewards import Reward
from tests.support.processes.nodes import swarm
from tests.support.training.tuning_rows import write_rows

MODEL = "smollm2-135m-instruct"
SPANS = ((0, 10), (10, 20), (20, 30))
CANDIDATES, ROWS, TOKENS, ROUNDS = 8, 4, 64, 5
THINGS = ("dog", "cat", "car", "chair", "spider", "bicycle", "table", "river")
OTHERS = ("horse", "bird", "house", "door", "tree", "apple", "train", "cloud")
ASKED = 'Write {{"word": "{}"}} as JSON.'
REWARD = """import json


def reward(prompt, answer, expected):
    try:
        json.loads(answer)
    except ValueError:
        return 0
    return 1
"""


def ids_of(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 10_000, (rows, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def row_of(word: str) -> dict[str, Any]:
    asked = {"role": "user", "content": ASKED.format(word)}
    return {"messages": [asked, {"role": "assistant", "content": "{}"}]}


def forwards(model: Any, tuned: Any) -> list[float]:
    """Forwards a second with adapters, as a share of those without, by round."""
    whole, part, ratios = ids_of(CANDIDATES * ROWS), ids_of(ROWS), []
    for number in range(-1, ROUNDS):
        adapters = []
        for _ in range(CANDIDATES):
            for value in tuned.parameters():
                if value.requires_grad:
                    value.data.normal_(std=0.01)
            adapters.append(adapter_of(model))
        times = []
        for batch, candidates in ((whole, [None]), (part, adapters)):
            started = time.perf_counter()
            losses(model, batch, candidates)
            times.append(time.perf_counter() - started)
        ratios += [times[0] / times[1]] if number >= 0 else []
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--population", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATES[TuneMethod.ES])
    parser.add_argument("--spread", type=float, default=SPREADS[TuneMethod.ES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache-dir", type=Path)
    given = parser.parse_args()
    chosen = TuneSettings(
        TuneMethod.ES,
        given.learning_rate,
        steps=given.steps,
        batch_size=len(THINGS),
        seed=given.seed,
        population=given.population,
        spread=given.spread,
        max_tokens=given.max_tokens,
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data, others = (
            write_rows(folder / f"{words[0]}.jsonl", [row_of(word) for word in words])
            for words in (THINGS, OTHERS)
        )
        (folder / "reward.py").write_text(REWARD)
        with (
            swarm(folder / "lab", given.cache_dir or folder / "cache", *SPANS) as lab,
            lab.connect() as model,
        ):
            tuned = attach(model, MODEL, chosen)
            ratios = forwards(model, tuned)
            print(
                json.dumps(
                    {"bench": "forward_tuning", "forwards": statistics.median(ratios), "by_round": ratios}
                ),
                flush=True,
            )
            for value in tuned.parameters():
                if value.requires_grad:
                    value.data.zero_()
            dataset = Dataset.read(model.tokenizer, data, others, chosen)
            run = ForwardTuner(tuned, dataset, chosen, reward=Reward.load(folder / "reward.py"))
            for event in run.run(evaluate_every=2):
                share = 1 - event.get("val_loss", event.get("loss", 0.0))
                line = {"bench": "forward_tuning", "event": event["event"], "step": event["step"]}
                answers = event["step"] * given.population * len(THINGS)
                print(json.dumps(line | {"valid": share, "rated_answers": answers}), flush=True)


if __name__ == "__main__":
    main()
