"""The training loop: AdamW in plain PyTorch, for any causal language model or classifier of
transformers."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swarmnet_client.tuning.batches import IGNORED, Batch, Dataset
from swarmnet_client.tuning.checkpoint import HISTORY, POINT_FIELDS, TuneCheckpoint
from swarmnet_client.tuning.methods import TuneSettings
from swarmnet_protocols.errors import ConfigError, SwarmnetError

MAX_GRADIENT_NORM = 1.0
_UNKNOWN = math.nan


@dataclass(frozen=True)
class SwarmUsage:
    """Bytes sent to and received from hosts so far, and how many hosts failed in the last batch."""

    bytes_sent: int = 0
    bytes_received: int = 0
    failovers: int = 0


@dataclass(frozen=True)
class Point:
    """A point of the curves after ``step`` steps: the loss of the last batch, or of the held-out
    rows. NaN: not measured."""

    step: int
    loss: float = _UNKNOWN
    val_loss: float = _UNKNOWN
    accuracy: float = _UNKNOWN


class Tuner:
    """Trains those parameters of ``model`` that require gradients, with AdamW.

    ``step`` of ``steps`` are done. ``is_whole`` is False during an update, when ``checkpoint``
    would mix two steps. ``moments``: names of the optimizer's tensors of a parameter.
    """

    moments: tuple[str, ...] = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        model: Any,
        dataset: Dataset,
        settings: TuneSettings,
        usage: Callable[[], SwarmUsage] = SwarmUsage,
    ) -> None:
        self.step = 0
        self.steps = settings.steps or settings.epochs * dataset.steps_per_epoch
        self.is_whole = True
        self.history: list[Point] = []
        self._model = model
        self._dataset = dataset
        self._settings = settings
        self._usage = usage
        self._parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), settings.learning_rate, weight_decay=0.0
        )

    @property
    def trained_parameters(self) -> int:
        return sum(value.numel() for value in self._parameters.values())

    def run(self, *, evaluate_every: int) -> Iterator[dict[str, Any]]:
        """Train until all steps are done. Yields an event after each step, and after each
        evaluation.

        Held-out rows are evaluated at the start, every ``evaluate_every`` steps, and at the end.
        Raises ``SwarmnetError`` if the loss or its gradients are not finite, and what the model
        raises. The parameters then stay as after the last step.
        """
        while True:
            if self._is_due(evaluate_every):
                yield self._evaluate()
            if self.step == self.steps:
                return
            yield self._learn()

    def summary(self) -> dict[str, Any]:
        """Return the curves so far: ``losses`` of the steps from 1 on, and ``evaluations`` of
        held-out rows."""
        evaluations = []
        for point in self.history:
            if not math.isnan(point.val_loss):
                accuracy = {} if math.isnan(point.accuracy) else {"accuracy": point.accuracy}
                evaluations.append({"step": point.step, "val_loss": point.val_loss, **accuracy})
        losses = [point.loss for point in self.history if not math.isnan(point.loss)]
        return {"losses": losses, "evaluations": evaluations}

    def checkpoint(self, about: Mapping[str, Any]) -> TuneCheckpoint:
        """Return a checkpoint of the run. Save it at once: it shares the run's tensors, which the
        next step changes."""
        tensors = {f"parameter/{name}": value for name, value in self._parameters.items()}
        for name, value in self._parameters.items():
            for key, state in self._optimizer.state[value].items():
                tensors[f"optimizer/{name}/{key}"] = state
        points = [(point.step, point.loss, point.val_loss, point.accuracy) for point in self.history]
        tensors[HISTORY] = torch.tensor(points, dtype=torch.float64).reshape(-1, POINT_FIELDS)
        return TuneCheckpoint(self.step, about, tensors)

    def restore(self, checkpoint: TuneCheckpoint) -> None:
        """Resume from ``checkpoint``. Raises ``ConfigError`` if its parameters have other names or
        shapes."""
        self._model.train()
        expected = {f"parameter/{name}": value for name, value in self._parameters.items()}
        if checkpoint.step:
            for name, value in self._parameters.items():
                for key in self.moments:
                    expected[f"optimizer/{name}/{key}"] = torch.zeros(()) if key == "step" else value
        given = {name: value.shape for name, value in checkpoint.tensors.items() if name != HISTORY}
        if given != {name: value.shape for name, value in expected.items()}:
            raise ConfigError(
                "the checkpoint belongs to a run with other parameters", hint="use another --out"
            )
        states: dict[int, dict[str, torch.Tensor]] = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            with torch.no_grad():
                parameter.copy_(checkpoint.tensors[f"parameter/{name}"])
            if checkpoint.step and self.moments:
                states[index] = {key: checkpoint.tensors[f"optimizer/{name}/{key}"] for key in self.moments}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": states, "param_groups": groups})
        self.step = checkpoint.step
        self.history = [Point(int(step), *values) for step, *values in checkpoint.tensors[HISTORY].tolist()]

    def _is_due(self, evaluate_every: int) -> bool:
        if not self._dataset.held_out:
            return False
        last = self.history[-1] if self.history else Point(-1)
        if last.step == self.step and not math.isnan(last.val_loss):
            return False
        return self.step % evaluate_every == 0 or self.step == self.steps

    def _learn(self) -> dict[str, Any]:
        started, before = time.perf_counter(), self._usage()
        batch = self._on_device(self._dataset.batch(self.step))
        self._model.train()
        self._optimizer.zero_grad()
        loss = self._model(**batch).loss
        if not loss.isfinite():
            raise self._diverged("the loss")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), MAX_GRADIENT_NORM)
        if not norm.isfinite():
            raise self._diverged("a gradient")
        rate = self._settings.learning_rate * self._rate_factor()
        self.is_whole = False
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        tokens = int(batch["attention_mask"].sum())
        return self._stepped(float(loss.detach()), rate, tokens, started, before)

    def _stepped(
        self, loss: float, rate: float, tokens: int, started: float, before: SwarmUsage
    ) -> dict[str, Any]:
        """Count a step that began at ``started`` and has changed the parameters. Return its
        event."""
        self.step += 1
        self.history.append(Point(self.step, loss=loss))
        self.is_whole = True
        return {
            "event": "step",
            "step": self.step,
            "loss": loss,
            "learning_rate": rate,
            "tokens": tokens,
            "tokens_per_s": tokens / (time.perf_counter() - started),
            **self._used(before),
        }

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        started, before = time.perf_counter(), self._usage()
        self._model.eval()
        loss, count, right, rows = 0.0, 0, 0, 0
        for cpu_batch in self._dataset.held_out_batches():
            batch = self._on_device(cpu_batch)
            output = self._model(**batch)
            learned = int((batch["labels"] != IGNORED).sum())
            loss += float(output.loss) * learned
            count += learned
            if self._dataset.labels:
                right += int((output.logits.argmax(dim=-1) == batch["labels"]).sum())
                rows += len(batch["labels"])
        if not math.isfinite(loss):
            raise self._diverged("the loss of the held-out rows")
        point = Point(self.step, val_loss=loss / count, accuracy=right / rows if rows else _UNKNOWN)
        self.history.append(point)
        event = {"event": "eval", "step": self.step, "val_loss": point.val_loss}
        if rows:
            event["accuracy"] = point.accuracy
        return event | {"seconds": time.perf_counter() - started, **self._used(before)}

    def _on_device(self, batch: Batch) -> Batch:
        return {name: value.to(self._model.device) for name, value in batch.items()}

    def _rate_factor(self) -> float:
        """Return the factor of the learning rate for the next step: linear warmup, then linear
        decay to zero."""
        warmup = math.ceil(self._settings.warmup * self.steps)
        if self.step < warmup:
            return (self.step + 1) / (warmup + 1)
        return (self.steps - self.step) / (self.steps - warmup)

    def _used(self, before: SwarmUsage) -> dict[str, int]:
        now = self._usage()
        return {
            "bytes_sent": now.bytes_sent - before.bytes_sent,
            "bytes_received": now.bytes_received - before.bytes_received,
            "failovers": now.failovers,
        }

    def _diverged(self, what: str) -> SwarmnetError:
        return SwarmnetError(
            f"{what} is not finite in step {self.step + 1}", hint="try a lower --learning-rate"
        )
