"""A router of two models, fitted to answers that can be scored: what it answers at which cost.

    python -m tests.bench.router [--questions 400] [--lesson 320] [--steps 40] [--threads 2]

The large model is SmolLM2-135M-Instruct. In the small one, the weights of ``ROUNDED`` blocks have 3
bits. Then its last blocks are trained on prose: the documentation that Python carries. Costs are the
bytes that a token reads, if all other weights are int8. A question is the beginning of a passage of
that documentation, or of a module of the standard library, which the small model was not trained
on. The score of an answer is the mean log probability of the tokens that really follow. The model
with the higher score wins; closer than ``TIE`` is a tie.

The comparisons are written as ``swarmnet router fit`` reads them. One question in five is held out.
On these, prices of the router are compared with each model alone, and with drawing one of them at
random at the same mean cost. Prints one JSON object; progress goes to stderr.

- ``accuracy``, ``baseline``: as ``router fit`` reports them.
- ``curve``: for each price the mean cost, the share of comparisons won, and the same at random.
- ``large_score``, ``small_score``: mean log probability of a token for each model alone.
- ``router_score``, ``router_cost``: the same for the router at its best price, and its mean cost;
  ``random_score`` for a random choice at this cost, ``best_score`` for the better answer of each.
- ``area``: mean of the share won above random, over all prices.
- ``kinds``: by kind of question, the share that the small model wins.
"""

import argparse
import json
import random
import statistics
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from swarmnet.gateway.routing.fitting import fit, measured, read_comparisons
from swarmnet.gateway.routing.router import features
from swarmnet.paths import default_cache_dir
from swarmnet_protocols.models import DEFAULT_MODEL, resolve

QUESTION, ANSWER = 48, 24
"""Tokens of a question, and of what follows it."""
TIE = 0.02
"""Scores closer than this count as equal."""
ROWS = 16
RATE = 3e-4
ROUNDED = range(8, 20)
"""Blocks whose weights the small model has in 3 bits. Rounding all of them leaves no model."""
TRAINED = 2
"""The last blocks of the small model, which are trained."""
BITS = {8: 8.5, 3: 4.0}
"""Bits of a weight with its scale, and at 3 bits its offset, for each group of 32."""
LARGE, SMALL = "large", "small"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--lesson", type=int, default=320, help="passages that the small model learns from")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    local = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    tokenizer: Any = local.tokenizer()
    model: Any = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    rng = random.Random(0)
    lesson, prose = (passages(tokenizer, each, rng) for each in halves(list(topics.values()), rng))
    modules = [
        path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    code = passages(tokenizer, modules, rng)
    half = options.questions // 2
    asked = [*(("prose", each) for each in prose[:half]), *(("code", each) for each in code[:half])]
    rng.shuffle(asked)
    rows = torch.tensor([ids for _, ids in asked])
    with torch.autocast("cpu", torch.bfloat16):
        scores = {LARGE: answers(model, rows, LARGE)}
        costs = {LARGE: bytes_read(model, rounded=())}
        round_blocks(model)
        train(model, torch.tensor(lesson[: options.lesson]), options.steps, rng)
        scores[SMALL] = answers(model, rows, SMALL)
    costs[SMALL] = bytes_read(model, rounded=ROUNDED)
    questions = [tokenizer.decode(ids[:QUESTION]) for _, ids in asked]
    print(json.dumps({"bench": "router", **vars(options), **report(asked, questions, scores, costs)}))


def report(
    asked: list[tuple[str, list[int]]],
    questions: list[str],
    scores: dict[str, list[float]],
    costs: dict[str, float],
) -> dict[str, Any]:
    """The figures of a router that is fitted to these scores."""
    lines = [
        {"prompt": question, "model_a": LARGE, "model_b": SMALL, "winner": winner(large - small)}
        for question, large, small in zip(questions, scores[LARGE], scores[SMALL], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "comparisons.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = read_comparisons(path)
    found = measured(data, {name: 1 / cost for name, cost in costs.items()})
    unseen = np.flatnonzero(data.held_out)
    router = fit(data.part(~data.held_out))
    large, small = (np.array(scores[name])[unseen] for name in (LARGE, SMALL))
    gain = np.stack([features(questions[row]) for row in unseen]) @ (
        router.weights[router.names.index(LARGE)] - router.weights[router.names.index(SMALL)]
    )
    extra = 1 - found.costs[SMALL]
    routed = [
        (point, float(np.where(gain > point.price * extra, large, small).mean())) for point in found.curve
    ]
    best, best_score = max(routed, key=lambda each: each[1])
    share = (best.cost - found.costs[SMALL]) / extra
    won: dict[str, list[bool]] = {"prose": [], "code": []}
    for (kind, _), one, other in zip(asked, scores[LARGE], scores[SMALL], strict=True):
        won[kind].append(other > one)
    return {
        "comparisons": found.comparisons,
        "held_out": found.held_out,
        "ties": Counter(line["winner"] for line in lines)["tie"],
        "accuracy": found.accuracy,
        "baseline": found.baseline,
        "small_cost": round(found.costs[SMALL], 4),
        "curve": [asdict(point) for point in found.curve],
        "area": round(statistics.fmean(point.quality - point.mixed for point in found.curve), 4),
        "large_score": round(float(large.mean()), 4),
        "small_score": round(float(small.mean()), 4),
        "router_score": round(best_score, 4),
        "router_cost": best.cost,
        "random_score": round(float(share * large.mean() + (1 - share) * small.mean()), 4),
        "best_score": round(float(np.maximum(large, small).mean()), 4),
        "kinds": {kind: round(statistics.fmean(each), 4) for kind, each in won.items()},
    }


def winner(lead: float) -> str:
    """The winner of a comparison of the large model (a) and the small one."""
    return "tie" if abs(lead) < TIE else "a" if lead > 0 else "b"


def halves(texts: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Two parts of texts, in a random order."""
    shuffled = rng.sample(texts, len(texts))
    return shuffled[::2], shuffled[1::2]


def passages(tokenizer: Any, texts: list[str], rng: random.Random) -> list[list[int]]:
    """Passages of texts, as token ids, in a random order."""
    length = QUESTION + ANSWER
    found = []
    for ids in tokenizer(texts).input_ids:
        found += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    rng.shuffle(found)
    return found


def bytes_read(model: Any, rounded: Sequence[int]) -> float:
    """The bytes that a token reads of all blocks and the head."""
    bits = BITS[8] * model.lm_head.weight.numel()
    for number, block in enumerate(model.model.layers):
        bits += BITS[3 if number in rounded else 8] * sum(each.numel() for each in block.parameters())
    return bits / 8


@torch.no_grad()
def round_blocks(model: Any) -> None:
    """Round the matrices of blocks to 3 bits, in groups of 32 weights."""
    for number in ROUNDED:
        for matrix in model.model.layers[number].parameters():
            if matrix.dim() == 2:
                groups = matrix.view(-1, 32)
                least = groups.amin(1, keepdim=True)
                step = ((groups.amax(1, keepdim=True) - least) / 7).clamp_min(1e-9)
                matrix.copy_((((groups - least) / step).round() * step + least).view_as(matrix))


@torch.inference_mode()
def answers(model: Any, rows: torch.Tensor, name: str) -> list[float]:
    """The mean log probability of the tokens after each question."""
    found: list[float] = []
    for part in rows.split(ROWS):
        found += (-losses(model, part, QUESTION).view(len(part), ANSWER).mean(1)).tolist()
        print(f"{name}: {len(found)} of {len(rows)} questions", file=sys.stderr, flush=True)
    return found


def losses(model: Any, rows: torch.Tensor, start: int, **inputs: torch.Tensor) -> torch.Tensor:
    """Minus the log probability of each token from position ``start`` on."""
    inputs = inputs or {"input_ids": rows[:, :-1]}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, start - 1 :]
    logits = model.lm_head(hidden).flatten(0, 1).float()
    return functional.cross_entropy(logits, rows[:, start:].flatten(), reduction="none")


def train(model: Any, lesson: torch.Tensor, steps: int, rng: random.Random) -> None:
    """Train the last blocks on passages, whose states before these blocks are computed once."""
    blocks, norm = model.model.layers, model.model.norm
    use_blocks(model, blocks[:-TRAINED], torch.nn.Identity())
    states = []
    with torch.no_grad():
        for part in lesson.split(ROWS):
            states.append(model.model(part[:, :-1], use_cache=False).last_hidden_state.float())
            print(f"read {len(states) * ROWS} passages", file=sys.stderr, flush=True)
    inputs = torch.cat(states)
    use_blocks(model, blocks[-TRAINED:], norm)
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.model.layers.parameters(), lr=RATE, weight_decay=0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, steps)
    for step in range(steps):
        chosen = torch.tensor(rng.sample(range(len(lesson)), ROWS))
        loss = losses(model, lesson[chosen], QUESTION, inputs_embeds=inputs[chosen]).mean()
        loss.backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    use_blocks(model, blocks, norm)


def use_blocks(model: Any, blocks: Any, norm: Any) -> None:
    """Make a model of these blocks, with this norm after them."""
    model.model.layers, model.model.norm = blocks, norm
    model.config.num_hidden_layers = len(blocks)


if __name__ == "__main__":
    main()
