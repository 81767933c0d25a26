"""``swarmnet tune``: fine-tunes an adapter for a model that runs on the swarm."""

import importlib.util
import math
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnet.cli.options import (
    DtypeOption,
    JsonFlag,
    ModelOption,
    SwarmOption,
    device_option,
)
from swarmnet.cli.peer_options import ClientOptions
from swarmnet.cli.training.displays import Bar, Fields, Telling, display
from swarmnet.cli.training.trackers import TensorboardOption, WandbOption, trackers
from swarmnet.units import counted, show_size
from swarmnet_client.tuning.methods import (
    FORWARD_ONLY,
    LEARNING_RATES,
    SPREADS,
    TuneMethod,
    TuneSettings,
    attach,
)
from swarmnet_protocols.errors import ConfigError, how_to_add
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.models import DEFAULT_MODEL
from swarmnet_protocols.models.peft_adapters import require_peft

if TYPE_CHECKING:
    from swarmnet_client.model.model import SwarmModel
    from swarmnet_client.tuning.batches import Dataset
    from swarmnet_client.tuning.run_dir import RunDir
    from swarmnet_client.tuning.trainer import SwarmUsage, Tuner
    from swarmnet_protocols.models import LocalModel


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """The options of ``TuneSettings``: the kind of adapter, the rows and the steps."""

    method: Annotated[TuneMethod, typer.Option("--method", help="What to train.")] = TuneMethod.LORA
    eval_data: Annotated[
        Path | None,
        typer.Option(
            "--eval-data",
            metavar="FILE.jsonl",
            help="Evaluate on the rows of this file, instead of on a share of --data.",
        ),
    ] = None
    held_out: Annotated[
        float, typer.Option("--held-out", metavar="SHARE", help="Share of --data to keep for evaluation.")
    ] = 0.1
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", min=1, help="Passes over the rows.")] = 3
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Number of steps, instead of --epochs.")
    ] = None
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", min=1, max=256, help="Rows per step.")
    ] = 8
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            metavar="R",
            help="Highest learning rate. It warms up to this value and then decays.",
            show_default="by method",
        ),
    ] = None
    max_length: Annotated[
        int,
        typer.Option("--max-length", metavar="N", min=2, help="Cut rows after this many tokens."),
    ] = 256
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=1, help="Rank of the LoRA matrices.")] = 8
    alpha: Annotated[
        int,
        typer.Option(
            "--alpha", metavar="N", min=1, help="LoRA's scale: updates are multiplied by alpha / rank."
        ),
    ] = 16
    target_modules: Annotated[
        str,
        typer.Option(
            "--target-modules",
            metavar="A,B",
            help="Linear modules that get LoRA.",
            show_default="PEFT's choice",
        ),
    ] = ""
    virtual_tokens: Annotated[
        int,
        typer.Option("--virtual-tokens", metavar="N", min=1, help="Tokens of a trained prompt or prefix."),
    ] = 16
    reward: Annotated[
        Path | None,
        typer.Option(
            "--reward",
            metavar="FILE.py",
            help="With --method es: a file with reward(prompt, answer, expected), which rates answers "
            "with a number up to 1. It runs on this machine, and may do whatever you may.",
        ),
    ] = None
    population: Annotated[
        int,
        typer.Option("--population", metavar="N", min=2, max=256, help="Candidates per step of zo and es."),
    ] = 8
    spread: Annotated[
        float | None,
        typer.Option(
            "--spread",
            metavar="R",
            help="Distance of the candidates of zo and es from the adapter.",
            show_default="by method",
        ),
    ] = None
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Longest answer that es rates.")
    ] = 64
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="S", min=0, help="Seed for the order of rows and for the initial weights."
        ),
    ] = 0

    def settings(self) -> TuneSettings:
        """Return the settings, without the hash of the reward. Raises ``typer.BadParameter`` for
        options that do not fit together."""
        rate = LEARNING_RATES[self.method] if self.learning_rate is None else self.learning_rate
        if not 0 < rate < math.inf:
            raise typer.BadParameter(f"{rate} is not a learning rate", param_hint="'--learning-rate'")
        if not 0 <= self.held_out < 1:
            raise typer.BadParameter(f"{self.held_out} is not a share from 0 to 1", param_hint="'--held-out'")
        spread = SPREADS.get(self.method, 1.0) if self.spread is None else self.spread
        if not 0 < spread < math.inf:
            raise typer.BadParameter(f"{spread} is not a distance", param_hint="'--spread'")
        if self.population % 2:
            raise typer.BadParameter(
                "give an even number: candidates come in pairs", param_hint="'--population'"
            )
        if (self.method is TuneMethod.ES) != (self.reward is not None):
            raise typer.BadParameter("give it with --method es, and only then", param_hint="'--reward'")
        modules = tuple(name.strip() for name in self.target_modules.split(",") if name.strip())
        known = {each.name for each in fields(TuneSettings)}
        given = {name: value for name, value in vars(self).items() if name in known}
        read: dict[str, Any] = {
            "learning_rate": rate,
            "spread": spread,
            "target_modules": modules,
            "reward": "",
        }
        return TuneSettings(**given | read)


def tune(  # noqa: PLR0913 - a command line, not an interface
    *,
    model: ModelOption = DEFAULT_MODEL,
    swarm: SwarmOption,
    data: Annotated[Path, typer.Option("--data", metavar="FILE.jsonl", help="File with the training rows.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write the adapter to this folder.")],
    tuning: TuningOptions,
    eval_every: Annotated[
        int | None,
        typer.Option(
            "--eval-every",
            metavar="N",
            min=1,
            help="Steps between evaluations.",
            show_default="once an epoch",
        ),
    ] = None,
    save_every: Annotated[
        int, typer.Option("--save-every", metavar="N", min=1, help="Steps between checkpoints.")
    ] = 20,
    force: Annotated[
        bool, typer.Option("--force", help="Start over, in a DIR that already has a run.")
    ] = False,
    device: Annotated[str, device_option("Device of embeddings, head and adapter.")] = "auto",
    dtype: DtypeOption = "auto",
    tensorboard: TensorboardOption = None,
    wandb: WandbOption = None,
    client: ClientOptions,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune a model that runs on the swarm. Its weights stay frozen, and this machine trains an
    adapter. With --method zo or es, hosts compute forward passes only.

    Rows are {"text"}, {"prompt", "completion"}, {"messages"}, Alpaca's {"instruction", "input",
    "output"}, ShareGPT's {"conversations"}, or for a classifier {"text", "label"}. An interrupted
    run continues when you repeat the command.
    """
    settings = tuning.settings()
    _check_files(data, tuning)
    require_peft()
    rewarding = None
    if tuning.reward is not None:
        from swarmnet_client.tuning.rewards import Reward

        rewarding = Reward.load(tuning.reward)
        settings = replace(settings, reward=rewarding.sha256)
    with display(as_json=as_json) as shown, ExitStack() as stack:
        import_transformers()
        from swarmnet_client.model.load_options import LoadOptions
        from swarmnet_client.model.model import load
        from swarmnet_client.tuning.batches import Dataset
        from swarmnet_client.tuning.run_dir import RunDir, locked
        from swarmnet_client.tuning.trainer import Tuner
        from swarmnet_protocols.joining.without_hub import resolve_in_swarm

        files: dict[str, Any] = {"cache_dir": client.cache_dir, "max_disk_bytes": client.max_disk_bytes}
        local = resolve_in_swarm(model, lambda: client.network(swarm), progress=shown.progress, **files)
        _check_sizes(local, settings)
        dataset = Dataset.read(local.tokenizer(), data, tuning.eval_data, settings)
        about = {"model": model, "manifest": local.manifest.hash.hex(), "data": list(dataset.sha256)}
        stack.enter_context(locked(out))
        folder = RunDir(out, about | settings.to_json(), force=force)
        shown.progress("finding the swarm", 0, None)
        options = LoadOptions.picked(dtype, device, len(dataset.labels) or None)
        opened = stack.enter_context(load(model, network=client.network(swarm), options=options, **files))
        tuned = attach(opened, model, settings)
        if settings.method in FORWARD_ONLY:
            from swarmnet_client.tuning.forward_tuner import ForwardTuner

            tuner: Tuner = ForwardTuner(tuned, dataset, settings, lambda: _usage(opened), rewarding)
        else:
            tuner = Tuner(tuned, dataset, settings, lambda: _usage(opened))
        if folder.unfinished is not None:
            tuner.restore(folder.unfinished)
        if force:
            # Else, after a crash, the next start would continue the run that this one replaces.
            folder.save(tuner)
        words = Words()
        log = stack.enter_context(trackers(out.resolve().name, settings.to_json(), tensorboard, wandb))

        def show(event: Fields) -> None:
            log(event)
            shown.show(event, words.tell(event))

        show(_beginning(model, dataset, settings, tuner))
        often = eval_every or dataset.steps_per_epoch
        _train(tuner, folder, show, evaluate_every=often, save_every=save_every)
        show(_finish(tuned, tuner, dataset, folder, _run_command(model, swarm, out, dataset)))


def _check_files(data: Path, tuning: TuningOptions) -> None:
    """Check the rows before a model is loaded. Raises ``ConfigError``."""
    from swarmnet_client.tuning.rows import check_rows

    for path in filter(None, (data, tuning.eval_data)):
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", hint="name a file with one JSON object a line")
        check_rows(path, labelled=tuning.method is TuneMethod.CLASSIFIER)


def _check_sizes(local: "LocalModel", settings: TuneSettings) -> None:
    from swarmnet_protocols.session import MAX_RANK
    from swarmnet_protocols.session.adapters import MAX_PREFIX_POSITIONS
    from swarmnet_protocols.session.passes import MAX_POSITIONS

    if settings.rank > MAX_RANK:
        raise typer.BadParameter(f"hosts take {MAX_RANK} at most", param_hint="'--rank'")
    if settings.method == TuneMethod.DEEP_PROMPT and settings.virtual_tokens > MAX_PREFIX_POSITIONS:
        raise typer.BadParameter(
            f"hosts take {MAX_PREFIX_POSITIONS} at most", param_hint="'--virtual-tokens'"
        )
    longest = min(MAX_POSITIONS, local.max_positions) - settings.prefix_length
    if settings.max_length > longest:
        raise typer.BadParameter(
            f"hosts take rows of {longest} tokens at most with this model and method",
            param_hint="'--max-length'",
        )


def _usage(model: "SwarmModel") -> "SwarmUsage":
    from swarmnet_client.tuning.trainer import SwarmUsage

    return SwarmUsage(model.traffic.sent, model.traffic.received, model.last_run.failovers)


def _beginning(model: str, dataset: "Dataset", settings: TuneSettings, tuner: "Tuner") -> dict[str, Any]:
    return {
        "event": "begin",
        "model": model,
        "method": str(settings.method),
        "rows": len(dataset.train),
        "held_out": len(dataset.held_out),
        "cut": dataset.cut,
        "trained_parameters": tuner.trained_parameters,
        "step": tuner.step,
        "steps": tuner.steps,
    }


def _train(
    tuner: "Tuner",
    folder: "RunDir",
    show: Callable[[Fields], None],
    *,
    evaluate_every: int,
    save_every: int,
) -> None:
    """Train to the last step. A run that is interrupted or fails is saved first."""
    saved, points = None, 0
    try:
        for event in tuner.run(evaluate_every=evaluate_every):
            show(event)
            if event["event"] == "step" and tuner.step % save_every == 0:
                saved, points = _save(tuner, folder), len(tuner.history)
                show(saved)
    except BaseException:
        if tuner.is_whole and tuner.step and len(tuner.history) > points:
            again = _save(tuner, folder)
            if again != saved:  # else only an evaluation came after the last checkpoint
                show(again)
            saved = again
        if saved is not None:
            show(saved | {"event": "stopped"})
        raise


def _save(tuner: "Tuner", folder: "RunDir") -> dict[str, Any]:
    return {"event": "saved", "step": tuner.step, "path": str(folder.save(tuner))}


def _run_command(model: str, swarm: str, out: Path, dataset: "Dataset") -> str:
    """Return the command that asks the tuned model a question. For a classifier, return the Python
    that loads it."""
    if dataset.labels:
        return (
            f"AutoSwarmModelForSequenceClassification.from_pretrained({model!r}, "
            f"num_labels={len(dataset.labels)}, swarm={swarm!r}), then PeftModel.from_pretrained(model, {str(out)!r})"
        )
    # Rows without the chat template are also asked without it.
    raw = [] if dataset.has_chats else ["--raw"]
    words = ["swarmnet", "run", model, "YOUR QUESTION", *raw, "--swarm", swarm, "--adapter", str(out)]
    return shlex.join(words)


def _finish(tuned: Any, tuner: "Tuner", dataset: "Dataset", folder: "RunDir", run: str) -> dict[str, Any]:
    from swarmnet.cli.training.plots import plot_tuning
    from swarmnet_client.tuning.run_dir import CURVE_FILE
    from swarmnet_protocols.models.public_names import name_for_peers

    summary = tuner.summary() | {"labels": list(dataset.labels), "has_chats": dataset.has_chats}
    summary |= {"rows": len(dataset.train), "held_out_rows": len(dataset.held_out)}
    folder.finish(tuned, summary)
    has_curve = importlib.util.find_spec("matplotlib") is not None
    if has_curve:
        name = name_for_peers(folder.about["model"])
        title = f"{folder.about['method']} for {name}: loss by step"
        plot_tuning(title, summary["losses"], summary["evaluations"], folder.path / CURVE_FILE)
    last = summary["evaluations"][-1:] or [{}]
    about = {"path": str(folder.path), "curve": CURVE_FILE if has_curve else None, "run": run}
    return {"event": "done", "step": tuner.step, **last[0], **about}


class Words:
    """The events of one run as sentences, with the total of bytes so far."""

    def __init__(self) -> None:
        self._steps = 0
        self._sent = 0
        self._received = 0

    def tell(self, event: Fields) -> Telling:
        """Return the sentence of an event. Call it with every event of a run, in order."""
        sentence, kind = self._sentence(event), event["event"]
        bar = Bar("steps", event["step"], self._steps) if kind in {"begin", "step"} else None
        summary = sentence if kind == "step" else None
        return Telling(sentence, kind not in {"step", "saved"}, summary, bar)

    def _sentence(self, event: Fields) -> str:
        self._sent += event.get("bytes_sent", 0)
        self._received += event.get("bytes_received", 0)
        match event["event"]:
            case "begin":
                return self._beginning(event)
            case "step":
                text = (
                    f"step {event['step']} of {self._steps}: loss {event['loss']:.4f}, "
                    f"{event['tokens_per_s']:.0f} tokens/s, "
                    f"{show_size(self._sent)} sent, {show_size(self._received)} received"
                )
                lost = event["failovers"]
                return text + (f", {counted(lost, 'host')} replaced" if lost else "")
            case "eval":
                return f"step {event['step']}: held-out {_scores(event)}"
            case "saved":
                return f"saved after step {event['step']}"
            case "stopped":
                return f"stopped; the same command continues after step {event['step']}, which is saved"
            case "done":
                scores = f" Held-out {_scores(event)}." if "val_loss" in event else ""
                curve = "" if event["curve"] else f" No loss.png: {how_to_add('matplotlib')}."
                return f"done: the adapter is in {event['path']}.{scores}{curve}\nrun it: {event['run']}"
            case kind:
                raise ValueError(kind)

    def _beginning(self, event: Fields) -> str:
        self._steps = event["steps"]
        parts = [
            f"{event['method']}: {event['trained_parameters']:,} parameters, {counted(event['rows'], 'row')}, "
            f"{counted(event['steps'], 'step')}; held out for evaluation: {counted(event['held_out'], 'row')}"
        ]
        if event["cut"]:
            parts.append(f"cut off at --max-length: {counted(event['cut'], 'row')}")
        if event["step"]:
            parts.append(f"continuing after step {event['step']}")
        return "\n".join(parts)


def _scores(event: Fields) -> str:
    accuracy = f", accuracy {event['accuracy']:.1%}" if "accuracy" in event else ""
    return f"loss {event['val_loss']:.4f}{accuracy}"
