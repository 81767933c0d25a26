"""One worker's replica of a job, and all computation with it.

A replica has a model, an inner optimizer, the outer state and a residual. It is synchronous and not
thread-safe: ``Worker`` calls it on its computing thread.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch

from swarmnet_node.training.checkpoint import WorkerCheckpoint, params_hash
from swarmnet_node.training.shared_state import SharedState
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import StepReport, Trainer
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.training.codecs import ErrorFeedback, get_codec
from swarmnet_protocols.training.codecs.values import Difference, Values
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.methods import OWN, Average, ZeroOrder
from swarmnet_protocols.training.methods.arithmetic import add_scaled
from swarmnet_protocols.training.methods.base import OuterMethod
from swarmnet_protocols.training.pacing import NO_LIMIT, StepLimit
from swarmnet_protocols.training.rounds.terms import Slice

NO_STEPS = StepReport(0.0, 0, 0.0)
RESIDUAL = f"{OWN}error"
"""Key of the residual of error feedback in a checkpoint, ``[n]``."""


class Replica:
    """The replica after ``revision`` committed rounds. ``codec`` encodes its contributions.

    A biased codec loses a part of each contribution: the residual. Later contributions include it
    (error feedback). A replica that loads another worker's state discards its residual if it does
    not know whether its last contribution was committed.
    """

    def __init__(self, job: Job, trainer: Trainer | StageTrainer) -> None:
        self.revision = 0
        self.trainer = trainer
        self.method = job.make_method()
        self.codec = get_codec(job.exchange.codec or self.method.codec)
        self._job = job
        self._begin(trainer.parameters() if self.method.kind == "parameters" else trainer.view())
        self._feedback = self._new_feedback()

    def steps(self, round: int, slot: int, first: int, end: int, limit: StepLimit = NO_LIMIT) -> StepReport:
        """Run the inner steps [first, end) of a round on the slot's share of the data, or fewer
        with a ``limit``."""
        return self._whole.steps(round, slot, end - first, first=first, limit=limit)

    def contribution(self, round: int, slot: int) -> tuple[Values, StepReport]:
        """Return the contribution to a round, and the work done for it after the inner steps.

        The contribution is ``[end - start]`` of ``method.range(round)``, and valid until the next
        inner step.
        """
        method = self.method
        is_difference = isinstance(method, OuterMethod) and method.contributes_difference
        if is_difference and self._feedback is None and not method.overlap_steps:
            return Difference(method.agreed(), self.trainer.view()), NO_STEPS
        values, report = self._own_contribution(round, slot)
        if self._feedback is not None:
            values = self._feedback.send(round, self.method.range(round)[0], values)
        return values, report

    def _own_contribution(self, round: int, slot: int) -> tuple[torch.Tensor, StepReport]:
        method = self.method
        if isinstance(method, ZeroOrder):
            slopes, report = self._slopes(method, round, slot)
            return method.contribution(round, slopes), report
        if method.kind == "gradients":
            gradient, report = self.trainer.gradient(round, 0, slot)
            return method.contribution(round, gradient), report
        return method.contribution(round, self.trainer.view()), NO_STEPS

    def apply(self, round: int, average: Average | None, delivered: Sequence[Slice] = ()) -> None:
        """Apply the outcome of a round: ``average``, or None if the round was discarded.

        ``delivered``: the slices that contain this worker's contribution. The others stay in the
        residual.
        """
        if self._feedback is not None:
            self._feedback.acknowledge(round, delivered)
        if average is not None:
            self.revision += 1
        if self.method.kind == "gradients":
            zeros = torch.zeros(1).expand(self.trainer.parameter_count)
            gradient = self.method.apply(round, zeros, average)
            if average is not None:
                self.trainer.apply_gradient(round, 0, gradient)
            return
        self.trainer.load(self.method.apply(round, self.trainer.view(), average))

    def merge(self, parameters: torch.Tensor) -> None:
        """Replace the parameters by ``[n]`` and reset the outer state.

        At the end of a job, ``parameters`` is the average of all replicas.
        """
        self.method.begin(parameters)
        self.trainer.load(parameters)

    def evaluate(self) -> tuple[float, int]:
        """Return the validation loss of the agreed parameters, and its number of tokens."""
        if self.method.kind != "parameters":  # the only weights are the agreed ones
            return self._whole.evaluate(self._job.eval.batches)
        own = self.trainer.parameters()
        self.trainer.load(self.method.agreed())
        try:
            return self._whole.evaluate(self._job.eval.batches)
        finally:
            self.trainer.load(own)

    def params_hash(self) -> str:
        """Return the SHA-256 of the agreed parameters."""
        return params_hash(self.method.agreed())

    def pack_shared(self) -> list[Buffer]:
        """Return the shared state as buffers, which only ``apply`` changes."""
        inner = self.trainer.optimizer_state() if self.method.kind == "gradients" else {}
        agreed = self.method.agreed().to("cpu")
        return SharedState(self.revision, agreed, self.method.state(), inner).pack()

    @property
    def keeps_progress(self) -> bool:
        """True if ``load_shared`` can keep the inner steps of a late contribution."""
        return isinstance(self.method, OuterMethod)

    def load_shared(self, data: bytearray, keep: float = 0.0) -> None:
        """Replace the state by a packed one. ``data`` must not change afterwards.

        ``keep``: the share of this worker's inner steps since its last round that the parameters
        keep, with its residual. The next contribution then contains it. Raises ``IntegrityError``
        if ``data`` is not a state of this job.
        """
        state = SharedState.unpack(data)
        late, residual = None, None
        if keep and isinstance(self.method, OuterMethod):
            late = self.method.progress(self.trainer.view())
            residual = None if self._feedback is None else self._feedback.residual()
        self.trainer.load(state.agreed if late is None else add_scaled(state.agreed, keep, late))
        if state.inner:
            self.trainer.load_optimizer_state(state.inner)
        self._begin(state.agreed)
        self.method.restore(state.outer)
        self.revision = state.revision
        self._feedback = self._new_feedback()
        if self._feedback is not None and residual is not None:
            self._feedback.restore(residual)

    def checkpoint(self, job_id: str, round: int, excluded: tuple[PeerId, ...] = ()) -> WorkerCheckpoint:
        """Return a checkpoint of the replica.

        The next inner step changes its optimizer's state, and ``apply`` the rest.
        """
        return WorkerCheckpoint(
            job_id=job_id,
            round=round,
            revision=self.revision,
            parameters=self.method.agreed(),
            optimizer=self.trainer.optimizer_state(),
            outer=self.method.state() | self._residual(),
            excluded=excluded,
        )

    def restore(self, saved: WorkerCheckpoint) -> None:
        """Replace the whole state, with the residual, by a checkpoint's."""
        self.revision = saved.revision
        self.trainer.load(saved.parameters)
        self.trainer.load_optimizer_state(saved.optimizer)
        self._begin(saved.parameters)
        self.method.restore({name: values for name, values in saved.outer.items() if name != RESIDUAL})
        self._feedback = self._new_feedback()
        if self._feedback is not None and RESIDUAL in saved.outer:
            self._feedback.restore(saved.outer[RESIDUAL])

    @property
    def _whole(self) -> Trainer:
        """The trainer of a whole model, which has data and a loss."""
        if isinstance(self.trainer, StageTrainer):
            raise ConfigError("a worker with one stage of a model has no loss of its own")
        return self.trainer

    def _begin(self, parameters: torch.Tensor) -> None:
        """Begin from ``parameters``, which are the trainer's."""
        if self.method.kind == "parameters":
            self.method.begin(parameters)
        else:
            self.method.begin(self.trainer.storage())  # one copy of the weights for both

    def _new_feedback(self) -> ErrorFeedback | None:
        if not self.codec.biased or self.method.kind == "scalars":
            return None
        return ErrorFeedback(self.codec, self.trainer.parameter_count, self.method.feedback_decay)

    def _residual(self) -> dict[str, torch.Tensor]:
        return {} if self._feedback is None else {RESIDUAL: self._feedback.residual()}

    def _slopes(self, method: ZeroOrder, round: int, slot: int) -> tuple[torch.Tensor, StepReport]:
        """Return the slopes along the slot's directions, with zeros in other slots' places."""
        start_s = time.perf_counter()
        slopes, losses = torch.zeros(method.range(round)[1]), []
        for step in range(method.steps_per_round):
            place = method.place(step, slot)
            plus, minus = (
                self._whole.loss(
                    round, step, slot, partial(method.shift, round=round, place=place, sign=sign)
                )
                for sign in (1, -1)
            )
            slopes[place] = method.slope(plus, minus)
            losses.append((plus + minus) / 2)
        self.trainer.report_steps(method.steps_per_round)
        seconds = time.perf_counter() - start_s
        return slopes, StepReport(sum(losses) / len(losses), self._job.round_tokens, seconds)


def combined(one: StepReport, other: StepReport) -> StepReport:
    """Return the sum of two reports, with the loss weighted by tokens."""
    tokens = one.tokens + other.tokens
    loss = (one.loss * one.tokens + other.loss * other.tokens) / max(1, tokens)
    return StepReport(loss, tokens, one.seconds + other.seconds, one.steps + other.steps)
