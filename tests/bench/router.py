"""A router of two models, fitted to answers that can be scored: what it answers at which cost.

    python -m tests.bench.router [--questions 400] [--lesson 240] [--steps 60] [--speed 2] [--threads 2]

Both models are SmolLM2-135M-Instruct with last blocks of their own: those of ``prose`` were trained
on the documentation that Python carries, those of ``code`` on modules of the standard library. Both
cost the same to compute. In a swarm their costs differ by their hosts: here those of ``prose`` are
``--speed`` times as fast. A question is the beginning of another passage of either kind. The score
of an answer is the mean log probability of the tokens that really follow. The model with the higher
score wins; closer than ``TIE`` is a tie.

The comparisons are written as ``swarmnet router fit`` reads them. One question in five is held out.
On these, prices of the router are compared with each model alone, and with drawing one of them at
random at the same mean cost. Prints one JSON object; progress goes to stderr.

- ``accuracy``, ``baseline``: as ``router fit`` reports them.
- ``curve``: for each price the mean cost, the share of comparisons won, and the same at random.
- ``code_score``, ``prose_score``: mean log probability of a token for each model alone.
- ``router_score``, ``router_cost``: the same for the router at its best price, and its mean cost;
  ``random_score`` for a random choice at this cost, ``best_score`` for the better answer of each.
- ``area``: mean of the share won above random, over all prices.
- ``kinds``: by kind of question, the share that ``prose`` wins.
"""

import argparse
import copy
import json
import random
import statistics
import sys
import sysconfig
import tempfile
from collections import Counter
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
TRAINED = 2
"""The last blocks, which are trained. The states before them are computed once."""
CODE, PROSE = "code", "prose"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--lesson", type=int, default=240, help="passages that each model learns from")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    local = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    tokenizer: Any = local.tokenizer()
    model: Any = local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    rng = random.Random(0)
    modules = [
        path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    lessons: dict[str, torch.Tensor] = {}
    asked: list[tuple[str, list[int]]] = []
    for kind, texts in ((CODE, modules), (PROSE, list(topics.values()))):
        taught, others = (passages(tokenizer, each, rng) for each in halves(texts, rng))
        lessons[kind] = torch.tensor(taught[: options.lesson])
        asked += [(kind, each) for each in others[: options.questions // 2]]
    rng.shuffle(asked)
    rows = torch.tensor([ids for _, ids in asked])
    scores: dict[str, list[float]] = {}
    # without a cache: the weights change while the context is open
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        asked_states, *states = last_blocks_only(model, rows, *lessons.values())
        blocks = model.model.layers
        for (kind, lesson), before in zip(lessons.items(), states, strict=True):
            model.model.layers = copy.deepcopy(blocks)
            train(model, lesson, before, options.steps, rng)
            scores[kind] = answers(model, rows, asked_states)
    questions = [tokenizer.decode(ids[:QUESTION]) for _, ids in asked]
    print(json.dumps({"bench": "router", **vars(options), **report(asked, questions, scores, options.speed)}))


def report(
    asked: list[tuple[str, list[int]]],
    questions: list[str],
    scores: dict[str, list[float]],
    speed: float,
) -> dict[str, Any]:
    """The figures of a router that is fitted to these scores."""
    lines = [
        {"prompt": question, "model_a": CODE, "model_b": PROSE, "winner": winner(one - other)}
        for question, one, other in zip(questions, scores[CODE], scores[PROSE], strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "comparisons.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = read_comparisons(path)
    found = measured(data, {CODE: 1.0, PROSE: speed})
    unseen = np.flatnonzero(data.held_out)
    router = fit(data.part(~data.held_out))
    by_code, by_prose = (np.array(scores[name])[unseen] for name in (CODE, PROSE))
    gain = np.stack([features(questions[row]) for row in unseen]) @ (
        router.weights[router.names.index(CODE)] - router.weights[router.names.index(PROSE)]
    )
    least = found.costs[PROSE]
    extra = 1 - least
    routed = [
        (point, float(np.where(gain > point.price * extra, by_code, by_prose).mean()))
        for point in found.curve
    ]
    best, best_score = max(routed, key=lambda each: each[1])
    share = (best.cost - least) / extra
    won: dict[str, list[bool]] = {PROSE: [], CODE: []}
    for (kind, _), one, other in zip(asked, scores[CODE], scores[PROSE], strict=True):
        won[kind].append(other > one)
    return {
        "comparisons": found.comparisons,
        "held_out": found.held_out,
        "ties": Counter(line["winner"] for line in lines)["tie"],
        "accuracy": found.accuracy,
        "baseline": found.baseline,
        "curve": [asdict(point) for point in found.curve],
        "area": round(statistics.fmean(point.quality - point.mixed for point in found.curve), 4),
        "code_score": round(float(by_code.mean()), 4),
        "prose_score": round(float(by_prose.mean()), 4),
        "router_score": round(best_score, 4),
        "router_cost": best.cost,
        "random_score": round(float(share * by_code.mean() + (1 - share) * by_prose.mean()), 4),
        "best_score": round(float(np.maximum(by_code, by_prose).mean()), 4),
        "kinds": {kind: round(statistics.fmean(each), 4) for kind, each in won.items()},
    }


def winner(lead: float) -> str:
    """The winner of a comparison of ``code`` (a) and ``prose``."""
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


@torch.no_grad()
def last_blocks_only(model: Any, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Leave a model its last blocks only, and return the states of passages before these blocks."""
    blocks, norm = model.model.layers, model.model.norm
    use_blocks(model, blocks[:-TRAINED], torch.nn.Identity())
    found = []
    for passages in rows:
        states = []
        for part in passages.split(ROWS):
            states.append(model.model(part[:, :-1], use_cache=False).last_hidden_state.float())
            print(f"read {len(states) * ROWS} of {len(passages)} passages", file=sys.stderr, flush=True)
        found.append(torch.cat(states))
    use_blocks(model, blocks[-TRAINED:], norm)
    return found


def use_blocks(model: Any, blocks: Any, norm: Any) -> None:
    """Make a model of these blocks, with this norm after them."""
    model.model.layers, model.model.norm = blocks, norm
    model.config.num_hidden_layers = len(blocks)


@torch.no_grad()
def answers(model: Any, rows: torch.Tensor, states: torch.Tensor) -> list[float]:
    """The mean log probability of the tokens after each question."""
    found: list[float] = []
    for part, before in zip(rows.split(ROWS), states.split(ROWS), strict=True):
        found += (-losses(model, part, before).view(len(part), ANSWER).mean(1)).tolist()
    return found


def losses(model: Any, rows: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Minus the log probability of each token after the questions."""
    hidden = model.model(inputs_embeds=states, use_cache=False).last_hidden_state[:, QUESTION - 1 :]
    logits = model.lm_head(hidden).flatten(0, 1).float()
    return functional.cross_entropy(logits, rows[:, QUESTION:].flatten(), reduction="none")


def train(model: Any, rows: torch.Tensor, states: torch.Tensor, steps: int, rng: random.Random) -> None:
    """Train the last blocks on passages. The head stays as it is."""
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.model.layers.parameters(), lr=RATE, weight_decay=0)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, steps)
    for step in range(steps):
        chosen = torch.tensor(rng.sample(range(len(rows)), ROWS))
        loss = losses(model, rows[chosen], states[chosen]).mean()
        loss.backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
