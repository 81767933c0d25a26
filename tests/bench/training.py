"""All training methods on the same model, data, seeds and churn trace: loss against tokens, bytes
and simulated time.

    python -m tests.bench.training [--methods allreduce diloco:outer_lr=0.5 ...] [--workers 8] [--steps 12000]
                                   [--learning-rate RATE] [--absences 0] [--seed 0] [--out DIR]

A byte-level Llama learns the Python standard library's source. Settings of a method may contain
``optimizer=muon`` and ``learning_rate=RATE``. Every method sees equal tokens:
--steps inner steps of every worker, rounded down to whole rounds. Prints one JSON object a method;
in DIR come curves.json and plots.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from swarmnet_protocols.training.job_settings import Job
from tests.bench.training_plots import write_plots
from tests.bench.training_run import LINKS, Curve, Simulation, absences

METHODS = ("allreduce", "diloco", "streaming", "eager", "co2", "noloco", "sparseloco")
YARDSTICK = "allreduce"
LEARNING_RATE = 6e-3
LEARNING_RATES = {"co2": 2e-2}
"""Learning rates of methods that reach a lower loss with another rate."""

Setting = int | float | str


def standard_job(
    method: str,
    settings: Mapping[str, Setting],
    *,
    seed: int,
    steps: int,
    workers: int,
    learning_rate: float | None = None,
    optimizer: str = "adamw",
) -> Job:
    """The job of a small byte-level Llama, 28,832 parameters, for ``steps`` inner steps, rounded
    down to whole rounds.

    ``learning_rate`` replaces that of the method.
    """
    if learning_rate is None:
        learning_rate = LEARNING_RATES.get(method, LEARNING_RATE)
    document = {
        "job": {"name": method, "seed": seed, "rounds": 1},
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": 256,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            }
        },
        "data": {"path": "python-stdlib", "sequence_length": 64},
        "training": {
            "batch_size": 16,
            "learning_rate": learning_rate,
            "warmup_steps": 50,
            "optimizer": optimizer,
        },
        "method": {"name": method, "settings": dict(settings)},
        "exchange": {"max_workers": workers},
        "eval": {"batches": 16},
    }
    job = Job.model_validate(document)
    rounds = max(1, steps // job.make_method().steps_per_round)
    return job.model_copy(update={"job": job.job.model_copy(update={"rounds": rounds})})


def parse_method(text: str) -> tuple[str, dict[str, Setting]]:
    """``diloco:outer_lr=0.5,sync_every=25`` as a name and settings."""
    name, _, listed = text.partition(":")
    settings: dict[str, Setting] = {}
    for entry in filter(None, listed.split(",")):
        key, _, value = entry.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return name, settings


def report(curve: Curve, yardstick: Curve | None) -> dict[str, object]:
    """The printed summary of a run, with ratios to ``yardstick`` if there is one."""
    last = curve.points[-1]
    line: dict[str, object] = {
        "bench": "training",
        "method": curve.label,
        "parameters": curve.parameters,
        "steps": last.step,
        "tokens": last.tokens,
        "val_loss": round(last.val_loss, 4),
        "bytes_sent_per_worker": round(last.size_bytes),
        "peak_bytes_per_step": round(curve.peak_bytes_per_step),
        "hours": {name: round(hours, 4) for name, hours in last.hours.items()},
    }
    if yardstick is not None:
        other = yardstick.points[-1]
        line["loss_ratio"] = round(last.val_loss / other.val_loss, 4)
        line["fewer_bytes"] = round(other.size_bytes / last.size_bytes, 1)
        line["lower_peak"] = round(yardstick.peak_bytes_per_step / curve.peak_bytes_per_step, 1)
    return line


def compare(methods: Sequence[str], arguments: argparse.Namespace, cache_dir: Path) -> list[Curve]:
    """Run the methods one after another and print a summary of each; the first ``allreduce`` is the
    yardstick of the methods after it."""
    curves: list[Curve] = []
    for label in methods:
        name, settings = parse_method(label)
        training = {key: settings.pop(key) for key in ("learning_rate", "optimizer") if key in settings}
        job = standard_job(
            name,
            settings,
            seed=arguments.seed,
            steps=arguments.steps,
            workers=arguments.workers,
            **{"learning_rate": arguments.learning_rate, **training},  # type: ignore[arg-type]
        )
        trace = absences(
            arguments.seed, workers=arguments.workers, steps=arguments.steps, count=arguments.absences
        )
        started = time.perf_counter()
        curve = Simulation(label, job, arguments.workers, trace, cache_dir).run(
            step_s=arguments.step_s, eval_every=max(1, arguments.steps // 20)
        )
        curves.append(curve)
        yardstick = next((each for each in curves if each.label == YARDSTICK), None)
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps(report(curve, yardstick) | {"seconds": seconds}), flush=True)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="NAME[:SETTING=VALUE,...]")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12000, help="inner steps of every worker")
    parser.add_argument(
        "--learning-rate", type=float, help="the highest, of inner steps; without it, that of each method"
    )
    parser.add_argument("--step-s", type=float, default=0.5, help="simulated seconds of an inner step")
    parser.add_argument("--absences", type=int, default=0, help="workers that leave and come back in mid-run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for curves.json and the plots")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        curves = compare(arguments.methods, arguments, Path(folder))
    if arguments.out is not None:
        write_plots(curves, [link.name for link in LINKS], arguments.out)


if __name__ == "__main__":
    main()
