"""The inner loop: optimizer steps of one worker on the samples of its slot."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from swarmnet_node.training.data.corpus import Corpus, open_corpus
from swarmnet_node.training.data.sampler import BatchSampler, Share, shares_of
from swarmnet_node.training.model import build_model, check_flat, check_model, checkpoint_of, write_model
from swarmnet_node.training.steps.expert_balance import ExpertBalance
from swarmnet_node.training.steps.flat_model import FlatModel
from swarmnet_node.training.steps.inner_optimizer import InnerOptimizer, check_packages
from swarmnet_node.training.steps.memory_options import AS_STORED, AUTOMATIC, MemoryOptions
from swarmnet_node.training.steps.probes import Shift, perturbed
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel, Progress
from swarmnet_protocols.training.job_settings import Job, TrainingSection
from swarmnet_protocols.training.memory_needs import MemoryNeeds
from swarmnet_protocols.training.methods import ZeroOrder

if TYPE_CHECKING:
    from swarmnet_protocols.fetching.peers import SwarmPeers

_FINAL_RATE = 0.1
"""The last learning rate of the cosine schedule, as a fraction of the peak."""


@dataclass(frozen=True)
class StepReport:
    """The work of some inner steps.

    ``loss``: mean in nats over ``tokens`` predicted tokens. ``seconds``: computing time.
    """

    loss: float
    tokens: int
    seconds: float


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


class Trainer:
    """One worker's model, data and inner optimizer. Not thread-safe."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        model: PreTrainedModel,
        *,
        device: torch.device,
        memory: MemoryOptions = AUTOMATIC,
        progress: Progress = lambda *_: None,
    ) -> None:
        """``progress`` is called at every inner step. An exception from it ends the computation."""
        self.corpus = corpus
        self.local: LocalModel | None = None
        """The checkpoint that the job starts from, or None."""
        self.step_s = 0.0
        """Seconds of an inner step on this machine; 0 until ``time_step``."""
        self._progress = progress
        self._training = job.training
        method = job.make_method()
        self._steps_per_round = method.steps_per_round
        self._total_steps = job.job.rounds * self._steps_per_round
        self._device = device
        self._sampler = BatchSampler(
            seed=job.job.seed,
            shares=tuple(
                Share(count, source.weight, source.is_own)
                for count, source in zip(corpus.train.counts, job.data.sources, strict=True)
            ),
            batch_size=job.training.batch_size,
            steps_per_round=self._steps_per_round,
            slots=job.exchange.max_workers,
        )
        self._model = model
        memory = AS_STORED if method.kind == "scalars" else memory
        self._flat = FlatModel(model, device, memory)
        self._balance = ExpertBalance(model, device)
        self._optimizer = InnerOptimizer(
            job.training,
            self._flat.values,
            self._flat.matrices,
            eight_bit=memory.optimizer_states == "8bit",
        )

    @classmethod
    def open(  # noqa: PLR0913 - a job, and the machine that trains it
        cls,
        job: Job,
        *,
        cache_dir: Path,
        available_bytes: int,
        device: torch.device,
        memory: MemoryOptions = AUTOMATIC,
        progress: Progress = lambda *_: None,
        peers: "SwarmPeers | None" = None,
        tell: Callable[[MemoryNeeds], None] = lambda needs: None,
    ) -> Self:
        """Return a trainer with the job's initial parameters.

        ``peers`` provide missing weights. ``tell`` gets the memory needs before a weight is loaded.
        Raises ``JobError`` for data or a model that this machine cannot train, and ``ConfigError``
        for options about memory that do not fit the job.
        """
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
        check_packages(job.training, eight_bit=memory.optimizer_states == "8bit")
        local = checkpoint_of(job.model, cache_dir, progress, peers) if job.model.is_checkpoint else None
        corpus = open_corpus(job.data, cache_dir, progress)
        needs = check_model(
            job,
            vocab_size=corpus.vocab_size,
            available_bytes=available_bytes,
            cache_dir=cache_dir,
            memory=memory,
        )
        tell(needs)
        seed = job.job.seed
        dtype = method.dtype if isinstance(method, ZeroOrder) else torch.float32
        model = build_model(job.model, seed, cache_dir, progress, device=device, local=local, dtype=dtype)
        trainer = cls(job, corpus, model, device=device, memory=memory, progress=progress)
        trainer.local = local
        return trainer

    @property
    def parameter_count(self) -> int:
        return self._flat.values.numel()

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

    def steps(self, round: int, slot: int, count: int, *, first: int = 0) -> StepReport:
        """Run the inner steps [first, first + count) of a round."""
        started = time.perf_counter()
        losses, tokens = torch.zeros((), device=self._device), 0
        for step in range(first, first + count):
            self.report_steps(step)
            loss, counted = self._backward(round, step, slot)
            self._update(round, step)
            losses += loss
            tokens += counted
        self._flat.free_gradients()
        self.report_steps(first + count)
        return StepReport(float(losses) / max(1, count), tokens, time.perf_counter() - started)

    def time_step(self) -> None:
        """Measure ``step_s`` with a gradient that is discarded."""
        started = time.perf_counter()
        self._backward(0, 0, 0)
        self._flat.free_gradients()
        self.step_s = time.perf_counter() - started

    @property
    def blocks(self) -> int:
        """Decoder layers of the model, at least 1."""
        return getattr(self._model.config, "num_hidden_layers", 1)

    @property
    def is_on_accelerator(self) -> bool:
        return self._device.type != "cpu"

    def report_steps(self, step: int) -> None:
        """Report to ``progress`` that the inner steps [0, step) of a round are done."""
        self._progress("inner steps", step, self._steps_per_round)

    def gradient(self, round: int, step: int, slot: int) -> tuple[Tensor, StepReport]:
        """Return the mean unclipped gradient of the slot's batch, ``[n]`` float32 on the CPU."""
        started = time.perf_counter()
        loss, tokens = self._backward(round, step, slot)
        gradient = self._flat.gradients().to("cpu", copy=True)
        return gradient, StepReport(float(loss), tokens, time.perf_counter() - started)

    def apply_gradient(self, round: int, step: int, gradient: Tensor) -> None:
        """Run one inner step with ``gradient`` (``[n]`` float32), clipped like the trainer's own
        gradients."""
        self._flat.gradients().copy_(check_flat(gradient, self.parameter_count))
        self._update(round, step)

    def loss(self, round: int, step: int, slot: int, shift: Shift) -> float:
        """Return the mean loss of the slot's batch at perturbed weights, in nats per token."""
        self.report_steps(step)
        batch = self.corpus.train.take(self._sampler.batch(round, step, slot))
        with torch.no_grad(), perturbed(self._model, self._flat.parameters, shift):
            total = sum(float(self._loss_sum(part)) for part in self._microbatches(batch))
        return total / max(1, _target_count(batch))

    def evaluate(self, batches: int) -> tuple[float, int]:
        """Return the mean loss of at most ``batches`` validation batches, and its number of tokens.

        The loss of each source counts by its weight. So does its number of batches, if the source
        has enough.
        """
        held_out, weights = self.corpus.validation, [share.weight for share in self._sampler.shares]
        wanted = shares_of(batches * self._training.batch_size, weights)
        mean, weighed, tokens, first = 0.0, 0.0, 0, 0
        self._model.eval()
        try:
            with torch.no_grad():
                for weight, count, most in zip(weights, held_out.counts, wanted, strict=True):
                    total, counted = 0.0, 0
                    end = first + min(count, most)
                    for start in range(first, end, self._microbatch_size):
                        numbers = np.arange(start, min(end, start + self._microbatch_size))
                        batch = held_out.take(numbers)
                        total += float(self._loss_sum(batch))
                        counted += _target_count(batch)
                    if counted:  # a source of few rows may hold out none with an answer
                        mean, weighed = mean + weight * total / counted, weighed + weight
                    tokens += counted
                    first += count
        finally:
            self._model.train()
        return mean / weighed if tokens else 0.0, tokens

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return a copy of the inner optimizer's state, as in ``InnerOptimizer.state``."""
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

    @property
    def _microbatch_size(self) -> int:
        return self._training.microbatch or self._training.batch_size

    def _backward(self, round: int, step: int, slot: int) -> tuple[Tensor, int]:
        self._flat.gradients().zero_()
        batch = self.corpus.train.take(self._sampler.batch(round, step, slot))
        tokens = _target_count(batch)
        total = torch.zeros((), device=self._device)
        for part in self._microbatches(batch):
            loss = self._loss_sum(part) / max(1, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._balance.insert(self._flat.gradients())
        return total, tokens

    def _microbatches(self, batch: Tensor) -> tuple[Tensor, ...]:
        size = self._microbatch_size
        return tuple(batch[start : start + size] for start in range(0, len(batch), size))

    def _loss_sum(self, batch: Tensor) -> Tensor:
        """Return the summed cross-entropy of ``batch``, ``[k, length + 1]``.

        Negative tokens do not count.
        """
        batch = batch.to(self._device)
        ids = torch.where(batch < 0, ~batch, batch)
        logits = self._model(input_ids=ids[:, :-1], use_cache=False).logits
        targets = batch[:, 1:].clamp(min=-1).flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum", ignore_index=-1)

    def _update(self, round: int, step: int) -> None:
        gradient = self._flat.gradients()
        loads = self._balance.extract(gradient)
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_((self._training.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        steps_before = round * self._steps_per_round + step
        biases = self._balance.biases(self._flat.values)
        self._optimizer.step(gradient, learning_rate(self._training, steps_before, self._total_steps))
        self._balance.step(self._flat.values, biases, loads)
        self._flat.refresh()


def _target_count(batch: Tensor) -> int:
    """Return the number of tokens of ``batch`` that count in the loss."""
    return int((batch[:, 1:] >= 0).sum())
