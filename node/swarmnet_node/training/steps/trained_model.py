"""A model in training: its parameters as one vector, and its inner optimizer."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet_node.training.model.building import check_flat, trained_parameters, write_model
from swarmnet_node.training.model.checks import check_model
from swarmnet_node.training.model.config import checkpoint_of
from swarmnet_node.training.model.expert_balance import ExpertBalance
from swarmnet_node.training.steps.flat_model import FlatModel
from swarmnet_node.training.steps.inner_optimizer import InnerOptimizer, check_packages
from swarmnet_node.training.steps.memory_options import AUTOMATIC, MemoryOptions
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.training.job_settings import Job, StagesSection, TrainingSection
from swarmnet_protocols.training.pipeline.stages import block_of

_FINAL_RATE = 0.1
"""The last learning rate of the cosine schedule, as a fraction of the peak."""


def check_options(job: Job, memory: MemoryOptions) -> None:
    """Raise ``ConfigError`` for options about memory that do not fit the job, and for missing
    packages."""
    method = job.make_method()
    if memory.optimizer_states == "8bit" and method.kind == "gradients":
        raise ConfigError(
            f"with {method.name}, all workers keep the same optimizer states, in float32",
            hint="leave out --optimizer-states 8bit",
        )
    if memory != AUTOMATIC and method.kind == "scalars":
        raise ConfigError(
            f"{method.name} takes forward passes only, in the format that the job names",
            hint="leave out --precision, --recompute and --optimizer-states",
        )
    if memory.precision != "auto" and job.model.is_lora:
        raise ConfigError(
            "the frozen weights of a job with an adapter decide the format of its passes",
            hint="leave out --precision",
        )
    check_packages(job.training, eight_bit=memory.optimizer_states == "8bit")


def start_of(job: Job, machine: TrainingMachine) -> LocalModel | None:
    """Return the checkpoint that a job starts from, or None. No weight is loaded.

    Raises ``ConfigError`` for options about memory that do not fit the job.
    """
    check_options(job, machine.memory)
    if not job.model.is_checkpoint:
        return None
    return checkpoint_of(job.model, machine.cache_dir, machine.progress, machine.peers)


def check_start(
    job: Job, machine: TrainingMachine, local: LocalModel | None, vocab_size: int, stage: int | None = None
) -> None:
    """Tell the machine what the job needs, and limit the weights of ``local`` on its disk.

    Raises ``JobError`` for a model that this machine cannot train.
    """
    disk_bytes = machine.tell(check_model(job, machine, vocab_size=vocab_size, stage=stage))
    if local is not None:
        local.parts.max_disk_bytes = disk_bytes


def learning_rate(training: TrainingSection, step: int, total_steps: int) -> float:
    """Return the learning rate of inner step ``step``, counted from the start of the job.

    Warm-up is linear; then the rate is constant or follows a cosine.
    """
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    if training.schedule == "constant":
        return training.learning_rate
    done = min(1.0, (step - training.warmup_steps) / max(1, total_steps - training.warmup_steps))
    return training.learning_rate * (_FINAL_RATE + (1 - _FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2)


class TrainedModel:
    """The parameters of a model or of a stage, and their optimizer. Not thread-safe."""

    def __init__(self, job: Job, model: Any, machine: TrainingMachine) -> None:
        self.local: LocalModel | None = None
        """The checkpoint that the job starts from, or None."""
        self.step_s = 0.0
        """Seconds of an inner step on this machine; 0 until it is measured."""
        self._progress = machine.progress
        self._training = job.training
        self._steps_per_round = job.make_method().steps_per_round
        self._total_steps = job.job.rounds * self._steps_per_round
        self._device = device = machine.device
        self._model = model
        self._flat = FlatModel(model, device, machine.memory)
        self._balance = ExpertBalance(model, device)
        self._stages = 1 if job.stages is None else job.stages.count
        self._clipped = _parts_by_stage(job.stages, trained_parameters(model))
        """The parts [start, end) of the vector whose gradients are clipped together."""
        self._optimizer = InnerOptimizer(
            job.training,
            self._flat.values,
            self._flat.matrices,
            eight_bit=machine.memory.optimizer_states == "8bit",
        )

    @property
    def parameter_count(self) -> int:
        return self._flat.values.numel()

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the trained tensors, by their names in the whole model, in the order of the
        vectors."""
        return {name: each.shape for name, each in trained_parameters(self._model)}

    def view(self) -> Tensor:
        """Return the parameters, ``[n]`` on the CPU, valid until the next step or ``load``.

        They are float32, except in jobs with forward passes only.
        """
        return self._flat.values.to("cpu")

    def parameters(self) -> Tensor:
        """Return a copy of the parameters, ``[n]`` on the CPU, ordered like
        ``named_parameters()``."""
        return self._flat.values.to("cpu", copy=True)

    def storage(self) -> Tensor:
        """Return the parameters' own memory, ``[n]``, for changes in place without gradients."""
        return self._flat.values

    def load(self, parameters: Tensor) -> None:
        """Replace the parameters by ``[n]`` of the same type. The inner optimizer keeps its state.

        Raises ``IntegrityError`` for other shapes and types.
        """
        values = self._flat.values
        values.copy_(check_flat(parameters, self.parameter_count, values.dtype))
        self._flat.refresh()

    @property
    def blocks(self) -> int:
        """Decoder layers of the model, at least 1."""
        return getattr(self._model.config, "num_hidden_layers", 1)

    @property
    def is_on_accelerator(self) -> bool:
        return self._device.type != "cpu"

    def epsilon(self, rounds: int, repeated: int) -> float | None:
        """Return the epsilon of a row after ``rounds``, or None without privacy.

        ``repeated``: rounds trained again.
        """
        return None

    def report_steps(self, step: int) -> None:
        """Report to ``progress`` that the inner steps [0, step) of a round are done."""
        self._progress("inner steps", step, self._steps_per_round)

    def apply_gradient(self, round: int, step: int, gradient: Tensor) -> None:
        """Run one inner step with ``gradient`` (``[n]`` float32), clipped like the trainer's own
        gradients."""
        self._flat.gradients().copy_(check_flat(gradient, self.parameter_count))
        self._update(round, step)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the inner optimizer's state, valid until its next step, as in
        ``InnerOptimizer.state``."""
        return self._optimizer.state()

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the inner optimizer's state by a result of ``optimizer_state``.

        Raises ``IntegrityError`` for other names or shapes, and for values that are not finite.
        """
        self._optimizer.load(state)

    def write(self, folder: Path, parameters: Tensor) -> None:
        """Write the model with ``parameters`` into ``folder``, in Hugging Face layout."""
        write_model(
            self._model, check_flat(parameters, self.parameter_count, self._flat.values.dtype), folder
        )

    def _update(self, round: int, step: int) -> None:
        gradient = self._flat.gradients()
        loads = self._balance.extract(gradient)
        self._clip(gradient)
        steps_before = round * self._steps_per_round + step
        biases = self._balance.biases(self._flat.values)
        self._optimizer.step(gradient, learning_rate(self._training, steps_before, self._total_steps))
        self._balance.step(self._flat.values, biases, loads)
        self._flat.refresh()

    def _clip(self, gradient: Tensor) -> None:
        """Limit the norm of each stage's part of ``gradient``. Without stages, limit all of it."""
        most = self._training.clip_norm / math.sqrt(self._stages)
        for stage in self._clipped:
            parts = [gradient[start:end] for start, end in stage]
            norms = [torch.linalg.vector_norm(part) for part in parts]
            norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
            for part in parts:
                part.mul_((most / (norm + 1e-6)).clamp(max=1.0))


def _parts_by_stage(
    stages: StagesSection | None, named: Sequence[tuple[str, nn.Parameter]]
) -> list[list[tuple[int, int]]]:
    """Return the parts [start, end) of a vector of the parameters ``named`` that belong to each
    stage. A stage without a part is left out."""
    parts: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for name, parameter in named:
        block, end = block_of(name), start + parameter.numel()
        stage = 0 if stages is None or block is None else stages.stage_of(block)
        found = parts.setdefault(stage, [])
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
        start = end
    return list(parts.values())
