"""Fine-tuning SmolLM2-135M-Instruct with LoRA on a small real task, through a swarm of three hops
and on one machine.

    python -m tests.bench.tune_task [--rows 400] [--steps 60] [--batch 8] [--churn SECONDS] [--seed 0]

The task: the first line of a docstring, given the function's name and arguments, from the Python
standard library. Both runs have the same rows, seed and settings. With ``--churn``, every so often
another node joins and one with the same blocks is killed. At the end plain PEFT on the plain model
and the swarm with the saved adapter answer the same prompts greedily. Prints JSON.
"""

import argparse
import ast
import json
import os
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "300")  # as `swarmnet run` does

import torch

from swarmnet_client.tuning.adapter_dir import load_adapter
from swarmnet_client.tuning.batches import Dataset
from swarmnet_client.tuning.methods import LEARNING_RATES, TuneMethod, TuneSettings, attach
from swarmnet_client.tuning.trainer import Tuner
from swarmnet_protocols.models import resolve
from tests.support.processes.commands import RunningCommand
from tests.support.processes.nodes import Swarm, swarm
from tests.support.swarm.generation import greedy
from tests.support.training.tuning_rows import write_rows

MODEL = "smollm2-135m-instruct"
SPANS = ((0, 10), (10, 20), (20, 30))
ANSWERED = 8
"""Held-out prompts that both answer."""
ANSWER_TOKENS = 24
MAX_LENGTH = 96
MAX_PROMPT_CHARS = 160
"""Limit that leaves room within ``MAX_LENGTH`` for the text to learn."""
TIMEOUT_S = 3600.0


def docstrings(count: int) -> list[dict[str, str]]:
    """The first ``count`` functions of the standard library, by file, that say in a line what they
    do."""
    rows = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                prompt = f'def {node.name}({ast.unparse(node.args)}):\n    """'
                if len(prompt) <= MAX_PROMPT_CHARS:
                    rows.append({"prompt": prompt, "completion": text.splitlines()[0] + '"""'})
    step = len(rows) // count
    return rows[: step * count : step]


def whole_model(cache: Path) -> Any:
    return resolve(MODEL, cache_dir=cache).load_whole(dtype=torch.float32, device=torch.device("cpu"))


def tune_locally(dataset: Dataset, settings: TuneSettings, cache: Path) -> list[dict[str, Any]]:
    """Plain PEFT on the plain model: the events of a run."""
    tuner = Tuner(attach(whole_model(cache), MODEL, settings), dataset, settings)
    return list(tuner.run(evaluate_every=dataset.steps_per_epoch))


def tune_through(lab: Swarm, data: Path, out: Path, settings: TuneSettings) -> list[dict[str, Any]]:
    """``swarmnet tune``: its events."""
    options = {
        "--data": data,
        "--out": out,
        "--method": settings.method,
        "--steps": settings.steps,
        "--batch-size": settings.batch_size,
        "--max-length": settings.max_length,
        "--seed": settings.seed,
    }
    where = ("--swarm", str(lab.file), "--cache-dir", str(lab.cache_dir), *lab.bootstrap_options)
    chosen = [str(word) for option in options.items() for word in option]
    with RunningCommand(("tune", "--model", lab.model, *chosen, *where), lab.directory / "tune.log") as run:
        run.wait("done", timeout_s=TIMEOUT_S)
        return list(run.events)


class Churn:
    """Replaces one node after another. ``kills`` counts."""

    def __init__(self, lab: Swarm, every_s: float) -> None:
        self.kills = 0
        self._lab = lab
        self._every_s = every_s
        self._over = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        thread = threading.Thread(target=self._disturb)
        if self._every_s:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            if self._every_s:
                thread.join()

    def _disturb(self) -> None:
        names = list(self._lab.nodes)
        while not self._over.wait(self._every_s):
            name = names[self.kills % len(names)]
            start, end, _ = name.split("-")
            (replacement,) = self._lab.start((int(start), int(end)))
            self._lab.nodes[name].kill()
            names[names.index(name)] = replacement.name
            self.kills += 1


def answers(model: Any, dataset: Dataset) -> list[list[int]]:
    prompts = [row.ids[~row.learned].tolist() for row in dataset.held_out[:ANSWERED]]
    return [greedy(model, [prompt], ANSWER_TOKENS)[0] for prompt in prompts]


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [event for event in events if event["event"] == "step"]
    seconds = sum(event["tokens"] / event["tokens_per_s"] for event in steps)
    return {
        "val_loss": [round(event["val_loss"], 5) for event in events if event["event"] == "eval"],
        "tokens_per_s": round(sum(event["tokens"] for event in steps) / seconds, 1),
        "sent_mb": round(sum(event["bytes_sent"] for event in steps) / 1e6, 1),
        "received_mb": round(sum(event["bytes_received"] for event in steps) / 1e6, 1),
        "failovers": sum(event["failovers"] for event in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--churn", type=float, default=0.0, help="seconds between kills; 0: none")
    arguments = parser.parse_args()
    settings = TuneSettings(
        TuneMethod.LORA,
        LEARNING_RATES[TuneMethod.LORA],
        steps=arguments.steps,
        batch_size=arguments.batch,
        max_length=MAX_LENGTH,
        seed=arguments.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cache, out = place / "cache", place / "adapter"
        data = write_rows(place / "rows.jsonl", docstrings(arguments.rows))
        dataset = Dataset.read(resolve(MODEL, cache_dir=cache).tokenizer(), data, None, settings)
        local = summarize(tune_locally(dataset, settings, cache))
        with swarm(place / "lab", cache, *SPANS) as lab:
            churn = Churn(lab, arguments.churn)
            began = time.monotonic()
            with churn.going_on():
                remote = summarize(tune_through(lab, data, out, settings))
            wall_s = time.monotonic() - began
            with lab.connect() as model:
                through_swarm = answers(load_adapter(model, out), dataset)
        plain = answers(load_adapter(whole_model(cache), out), dataset)
        untuned = answers(whole_model(cache), dataset)
    report = {
        "bench": "tune_task",
        **{name: getattr(arguments, name) for name in ("rows", "steps", "batch", "seed")},
        "churn_s": arguments.churn,
        "kills": churn.kills,
        "wall_s": round(wall_s, 1),
        "local": local,
        "swarm": remote,
        "loss_ratio": round(remote["val_loss"][-1] / local["val_loss"][-1], 6),
        "same_answers": through_swarm == plain,
        "answers_changed_by_tuning": sum(a != b for a, b in zip(plain, untuned, strict=True)),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
