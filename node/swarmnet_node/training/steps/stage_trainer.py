"""One stage of a model in training: passes of microbatches, and the gradients that they leave.

1. Stage 0 computes ``begin`` of a microbatch, each later stage ``forward``, and stage 0 ``end``:
   the loss. All return tensors with autograd graphs, and change nothing.
2. ``accumulate`` runs one graph backwards. It adds to the stage's gradient and returns the gradient
   of the graph's inputs, which travels to the stage before.
3. The gradient is a sum over tokens. ``step`` takes an inner step with it. ``apply_gradient`` takes
   a gradient that is divided by the tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Self

import torch
from torch import Tensor

from swarmnet_node.training.data.corpus import open_corpus
from swarmnet_node.training.data.sampler import Batches, inputs_of, loss_sum
from swarmnet_node.training.model.building import trained_parameters
from swarmnet_node.training.model.stage_model import StageModel, build_stage, empty_stage
from swarmnet_node.training.steps.trained_model import TrainedModel, check_start, start_of
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_node.training.steps.training_machine import TrainingMachine
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from swarmnet_protocols.training.job_settings import Job


class StageTrainer(TrainedModel):
    """Stage ``stage`` of a job's model.

    Boundaries are ``[k * L, D]``: k sequences of L tokens. In a subspace, D is its dimension.
    """

    def __init__(
        self,
        job: Job,
        stage: int,
        model: StageModel,
        machine: TrainingMachine,
        batches: Batches | None = None,
    ) -> None:
        """``batches``: the job's data, in stage 0 only."""
        super().__init__(job, model, machine)
        self.stage = stage
        self.block_range = model.block_range
        self.batches = batches
        self._eval_batches = job.eval.batches
        self.report = StepReport(0.0, 0, 0.0)
        """The work behind ``gradients``, as the pipeline reports it."""
        self.size_of: Callable[[int], int] = lambda _: self.parameter_count
        """Returns the number of parameters of any stage, without a subspace."""

    @property
    def width(self) -> int:
        """Values of one position between stages."""
        subspace = self._model.subspace
        return int(self._model.config.get_text_config().hidden_size) if subspace is None else subspace.rank

    @property
    def vocabulary(self) -> int:
        """The model's number of tokens, if stages need their ids; else 0."""
        return 0 if self._model.subspace is None else int(self._model.config.vocab_size)

    def microbatches(self, round: int, step: int, numbers: range) -> Sequence[Tensor]:
        """Return microbatches of an inner step, ``[k, L + 1]`` each. Stage 0 has them.

        ``numbers`` counts the microbatches of all slots, slot after slot.
        """
        if self.batches is None:
            return ()
        count = self.batches.parts_count
        slots = range(numbers.start // count, -(-numbers.stop // count))
        first = slots.start * count
        parts = [part for slot in slots for part in self.batches.parts(self.batches.take(round, step, slot))]
        return parts[numbers.start - first : numbers.stop - first]

    def held_out(self, place: int, origins: int) -> Sequence[tuple[int, Tensor]]:
        """Return the held-out microbatches that a worker of stage 0 evaluates, with their source.

        Workers divide data that they share. A short microbatch gets rows that do not count in the
        loss.
        """
        if self.batches is None:
            return ()
        found = list(self.batches.held_out(self._eval_batches))
        if not any(share.is_own for share in self.batches.sampler.shares):
            found = found[place::origins]
        return [(source, self.batches.filled(part)) for source, part in found]

    def mean_loss(self, losses: Iterable[tuple[int, float, int]]) -> tuple[float, int]:
        """Return the mean of held-out microbatches, as ``Batches.mean``."""
        return (0.0, 0) if self.batches is None else self.batches.mean(losses)

    def gradient(self, round: int, step: int, slot: int) -> tuple[Tensor, StepReport]:
        """Return the mean gradient of the tokens in ``report``, ``[n]`` float32 on the CPU."""
        gradient = self.gradients().to("cpu", copy=True)
        return gradient.div_(max(1, self.report.tokens)), self.report

    @classmethod
    def open(cls, job: Job, stage: int, machine: TrainingMachine) -> Self:
        """Return a trainer with the stage's initial parameters. As ``Trainer.open``.

        Only stage 0 reads the data.
        """
        cache_dir, progress = machine.cache_dir, machine.progress
        local = start_of(job, machine)
        corpus = None if stage else open_corpus(job.data, cache_dir, progress)
        check_start(job, machine, local, 0 if corpus is None else corpus.vocab_size, stage)
        model = build_stage(job, stage, cache_dir, progress, local=local)
        trainer = cls(job, stage, model, machine, None if corpus is None else Batches.of(job, corpus))
        trainer.local = local
        trainer.size_of = cache(
            lambda at: sum(each.numel() for _, each in trained_parameters(empty_stage(job, at, cache_dir)))
        )
        return trainer

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Make passes that leave no graph, and none of the randomness of training."""
        self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._model.train()

    def begin(self, batch: Tensor) -> Tensor:
        """Return the outputs of stage 0 for a microbatch of tokens, ``[k, L + 1]``."""
        hidden: Tensor = self._model.begin(inputs_of(batch.to(self._device)))
        return hidden.flatten(0, 1)

    def forward(self, hidden: Tensor, sequences: int, ids: Tensor | None = None) -> Tensor:
        """Return the outputs of a later stage. ``hidden``: the outputs of the stage before.

        ``ids``: the token ids ``[k, L]``, which only a subspace needs.
        """
        outputs: Tensor = self._model(self._placed(hidden, sequences), ids)
        return outputs.flatten(0, 1)

    def end(self, hidden: Tensor, batch: Tensor) -> Tensor:
        """Return the summed loss of a microbatch from the outputs of the last stage."""
        batch = batch.to(self._device)
        return loss_sum(self._model.end(self._placed(hidden, len(batch)), inputs_of(batch)), batch)

    def accumulate(
        self, outputs: Tensor, grad_outputs: Tensor | None = None, inputs: Tensor | None = None
    ) -> Tensor | None:
        """Run a graph backwards, and add its part to the stage's gradient.

        ``grad_outputs``: the gradient of ``outputs``; None for a loss. ``inputs``: the graph's
        inputs, a leaf that requires a gradient. Returns their gradient; None without ``inputs``.
        """
        self.gradients()
        if grad_outputs is not None:
            grad_outputs = grad_outputs.to(outputs.device, outputs.dtype)
        torch.autograd.backward([outputs], [grad_outputs])
        if inputs is None:
            return None
        gradient, inputs.grad = inputs.grad, None
        return gradient

    def step(self, round: int, step: int, tokens: int) -> None:
        """Run an inner step with the accumulated gradient of ``tokens`` tokens.

        A worker may take more steps than the round has. These have the last step's learning rate.
        """
        self.report_steps(step)
        self.gradients().div_(max(1, tokens))
        self._update(round, min(step, self._steps_per_round - 1))

    def answer(
        self, inputs: Tensor, grad_outputs: Tensor, sequences: int, ids: Tensor | None
    ) -> Sequence[Tensor]:
        """Return the outputs of a later stage and the gradient of its inputs, for an audit.

        Leaves the stage's gradient as it is.
        """
        leaf = inputs.requires_grad_()
        outputs = self.forward(leaf, sequences, ids)
        (gradient,) = torch.autograd.grad(outputs, leaf, grad_outputs.to(outputs.device, outputs.dtype))
        return outputs, gradient

    @property
    def version(self) -> int:
        """Counts the changes of the weights."""
        return self._flat.version

    @property
    def bits(self) -> int:
        """Significant bits of the numbers that the stage computes with."""
        epsilon = torch.finfo(next(self._model.parameters()).dtype).eps
        return 1 - round(math.log2(epsilon))

    @property
    def is_routed(self) -> bool:
        """True if the stage has routed experts."""
        return any(True for _ in experts_modules(self._model))

    def gradients(self) -> Tensor:
        """Return the sum of the accumulated gradients, ``[n]`` float32. Zero after
        ``free_gradients``."""
        return self._flat.gradients()

    def free_gradients(self) -> None:
        """Forget the accumulated gradients."""
        self._flat.free_gradients()

    def _placed(self, hidden: Tensor, sequences: int) -> Tensor:
        """Return a boundary as the blocks take it, ``[k, L, D]``."""
        placed = hidden.to(self._device, next(self._model.parameters()).dtype)
        return placed.view(sequences, -1, hidden.shape[-1])
