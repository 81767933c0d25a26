"""The inner loop: optimizer steps of one worker on the samples of its slot."""

import time
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from swarmnet_node.training.data.corpus import Corpus, open_corpus
from swarmnet_node.training.data.sampler import Batches, inputs_of, loss_sum, target_count
from swarmnet_node.training.model.building import build_model
from swarmnet_node.training.steps.memory_options import AS_STORED
from swarmnet_node.training.steps.privacy import Privacy
from swarmnet_node.training.steps.probes import Shift, perturbed
from swarmnet_node.training.steps.trained_model import TrainedModel, check_start, start_of
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.training.job_settings import Job, JobError
from swarmnet_protocols.training.pacing import NO_LIMIT, StepLimit


@dataclass(frozen=True)
class StepReport:
    """The work of some inner steps.

    ``loss``: mean in nats over ``tokens`` predicted tokens. ``seconds``: computing time. ``steps``:
    the number that ``Trainer.steps`` took, else 0.
    """

    loss: float
    tokens: int
    seconds: float
    steps: int = 0


class Trainer(TrainedModel):
    """One worker's whole model, its data and its inner optimizer. Not thread-safe."""

    def __init__(self, job: Job, corpus: Corpus, model: PreTrainedModel, machine: TrainingMachine) -> None:
        if job.make_method().kind == "scalars":
            machine = replace(machine, memory=AS_STORED)
        super().__init__(job, model, machine)
        self.batches = Batches.of(job, corpus)
        sampler = self.batches.sampler
        self._private = None if job.privacy is None else Privacy(job.privacy, sampler, self._device)
        if self._private is not None and self._balance.biases(self._flat.values).numel():
            raise JobError(
                "privacy", "", "does not protect the loads of experts", hint="train a model without experts"
            )

    @classmethod
    def open(cls, job: Job, machine: TrainingMachine) -> Self:
        """Return a trainer with the job's initial parameters.

        Raises ``JobError`` for data or a model that this machine cannot train, and ``ConfigError``
        for options about memory that do not fit the job.
        """
        local = start_of(job, machine)
        corpus = open_corpus(job.data, machine.cache_dir, machine.progress)
        check_start(job, machine, local, corpus.vocab_size)
        trainer = cls(job, corpus, build_model(job, machine, local), machine)
        trainer.local = local
        return trainer

    def epsilon(self, rounds: int, repeated: int) -> float | None:
        return None if self._private is None else self._private.epsilon(rounds, repeated)

    def steps(
        self, round: int, slot: int, count: int, *, first: int = 0, limit: StepLimit = NO_LIMIT
    ) -> StepReport:
        """Run the inner steps [first, first + count) of a round, or fewer with a ``limit``."""
        started = time.perf_counter()
        losses, tokens, done = torch.zeros((), device=self._device), 0, 0
        while done < count and (done < limit.least or time.perf_counter() - started < limit.most_s):
            self.report_steps(first + done)
            loss, counted = self._backward(round, first + done, slot)
            self._update(round, first + done)
            losses += loss
            tokens += counted
            done += 1
        self._flat.free_gradients()
        self.report_steps(first + done)
        return StepReport(float(losses) / max(1, done), tokens, time.perf_counter() - started, done)

    def time_step(self) -> None:
        """Measure ``step_s`` with a gradient that is discarded."""
        started = time.perf_counter()
        self._backward(0, 0, 0)
        self._flat.free_gradients()
        self.step_s = time.perf_counter() - started

    def gradient(self, round: int, step: int, slot: int) -> tuple[Tensor, StepReport]:
        """Return the mean unclipped gradient of the slot's batch, ``[n]`` float32 on the CPU."""
        started = time.perf_counter()
        loss, tokens = self._backward(round, step, slot)
        gradient = self._flat.gradients().to("cpu", copy=True)
        return gradient, StepReport(float(loss), tokens, time.perf_counter() - started)

    def loss(self, round: int, step: int, slot: int, shift: Shift) -> float:
        """Return the mean loss of the slot's batch at perturbed weights, in nats per token."""
        self.report_steps(step)
        batch = self.batches.take(round, step, slot)
        with torch.no_grad(), perturbed(self._model, self._flat.parameters, shift):
            total = sum(float(self._loss_sum(part)) for part in self.batches.parts(batch))
        return total / max(1, target_count(batch))

    def evaluate(self, batches: int) -> tuple[float, int]:
        """Return the mean loss of at most ``batches`` validation batches, and its number of tokens.

        The loss of each source counts by its weight. So does its number of batches, if the source
        has enough.
        """
        self._model.eval()
        try:
            with torch.no_grad():
                return self.batches.mean(
                    (source, float(self._loss_sum(part)), target_count(part))
                    for source, part in self.batches.held_out(batches)
                )
        finally:
            self._model.train()

    def _backward(self, round: int, step: int, slot: int) -> tuple[Tensor, int]:
        self._flat.gradients().zero_()
        if self._private is not None:
            return self._private_backward(self._private, round, step, slot)
        batch = self.batches.take(round, step, slot)
        tokens = target_count(batch)
        total = torch.zeros((), device=self._device)
        for part in self.batches.parts(batch):
            loss = self._loss_sum(part) / max(1, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._balance.insert(self._flat.gradients())
        return total, tokens

    def _private_backward(self, private: Privacy, round: int, step: int, slot: int) -> tuple[Tensor, int]:
        """Compute the mean of the rows' clipped gradients, with noise."""
        gradient, total, tokens = self._flat.gradients(), torch.zeros((), device=self._device), 0
        clipped = torch.zeros_like(gradient)
        numbers = np.unique(self.batches.sampler.batch(round, step, slot))  # a row counts once
        for row in torch.split(self.batches.corpus.train.take(numbers), 1):
            gradient.zero_()
            count = target_count(row)
            loss = self._loss_sum(row)
            mean = loss / max(1, count)
            mean.backward()  # type: ignore[no-untyped-call]
            private.add(clipped, gradient)
            total += loss.detach()
            tokens += count
        private.blur(clipped)
        gradient.copy_(clipped).div_(self._training.batch_size)
        return total / max(1, tokens), tokens

    def _loss_sum(self, batch: Tensor) -> Tensor:
        """Return the summed cross-entropy of ``batch``, ``[k, length + 1]``."""
        batch = batch.to(self._device)
        return loss_sum(self._model(input_ids=inputs_of(batch), use_cache=False).logits, batch)
