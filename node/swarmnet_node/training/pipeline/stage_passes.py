"""The computation of one worker for microbatches, and the buffers that it keeps.

Until all stages have committed a round, a worker keeps the inputs and outputs of each microbatch,
and the gradients of both. When another worker fails, a microbatch comes again. This worker then
answers from memory.

All methods run on the computing thread.
"""

import asyncio
import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import torch

from swarmnet_node.training.data.sampler import inputs_of
from swarmnet_node.training.steps.stage_trainer import StageTrainer
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Buffer, PeerId
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.training.codecs.boundary import (
    BoundaryCodec,
    decode_ids,
    encode_ids,
    fitting,
    id_bytes,
    rounding_seed,
)
from swarmnet_protocols.training.pipeline.audits import Tolerance
from swarmnet_protocols.training.pipeline.microbatches import EVALUATED, Microbatch, MicrobatchId
from swarmnet_protocols.training.pipeline.norms import UsualNorms
from swarmnet_protocols.training.pipeline.receipts import Receipt, tensor_hash
from swarmnet_protocols.wire import refusal_pb2


@dataclass(frozen=True)
class Graph:
    """A forward pass that waits for the gradient of its outputs."""

    outputs: Buffer
    values: torch.Tensor
    """The outputs, with the graph that computed them."""
    leaf: torch.Tensor | None = None
    """The inputs. None at stage 0."""
    state: bytes = b""
    """The state that computed the outputs, as in a receipt."""


@dataclass(frozen=True)
class MicrobatchAnswer:
    """The tensors of a microbatch whose passes have ended. A loss has no outputs, and stage 0 has
    no inputs."""

    outputs: Buffer = b""
    grad_outputs: Buffer = b""
    grad_inputs: Buffer = b""
    state: bytes = b""
    """As in ``Graph``."""


@dataclass(eq=False)
class KeptMicrobatch:
    """One microbatch as a worker keeps it. Buffers are encoded tensors."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    inputs: Buffer | None = None
    inputs_hash: bytes = b""
    """The hash of the inputs, in jobs with receipts."""
    sent: int = 0
    """The number of the origin's last sending with these inputs."""
    passed: Graph | MicrobatchAnswer | None = None
    """The last pass that the weights here have computed from ``inputs``."""
    tokens: int = 0
    """Predicted tokens, as the origin says."""
    rest: tuple[PeerId, ...] | None = None
    """The later workers that have computed the microbatch."""
    receipts: tuple[Receipt, ...] = ()
    """Receipts of this worker and of the later workers that have computed the microbatch."""
    codec: BoundaryCodec | None = None
    """The codec of the outputs. None for the job's least exact codec."""

    @property
    def outputs(self) -> Buffer | None:
        return None if self.passed is None else self.passed.outputs

    @property
    def answer(self) -> MicrobatchAnswer | None:
        return self.passed if isinstance(self.passed, MicrobatchAnswer) else None

    def knows(self, inputs_hash: bytes, sent: int) -> bool:
        """Return whether the inputs with this hash are here. All inputs match an empty hash.

        Raises ``Refusal`` as ``take`` does.
        """
        is_known = self.inputs is not None and inputs_hash in {b"", self.inputs_hash}
        self._check(sent, is_same=is_known)
        return is_known

    def take(self, inputs: Buffer | None, inputs_hash: bytes, sent: int) -> None:
        """Go on with these inputs, or with the present ones if None.

        If other inputs are here, forget all that came from them. Raises ``Refusal`` if a later
        sending has replaced this one, or if this one has brought other inputs before.
        """
        is_same = inputs is None or inputs == self.inputs
        self._check(sent, is_same=is_same)
        self.sent = sent
        if not is_same:
            self.inputs, self.inputs_hash, self.rest, self.passed = inputs, b"", None, None
        self.inputs_hash = inputs_hash or self.inputs_hash

    def _check(self, sent: int, *, is_same: bool) -> None:
        if self.inputs is not None and (sent < self.sent or (sent == self.sent and not is_same)):
            raise Refusal(refusal_pb2.REASON_OVERLOADED, "this microbatch goes another way now", 1.0)

    def drop_graph(self) -> None:
        """Drop a graph that no backward pass has used, because the weights may change."""
        if isinstance(self.passed, Graph):
            self.passed = None


@dataclass(frozen=True)
class Boundary:
    """The form of the tensors between stages."""

    codecs: Mapping[int, BoundaryCodec]
    """The codecs of the job by the bytes of a tensor, as ``codecs_by_size`` returns them."""
    sequences: int
    positions: int
    width: int
    seed: int
    vocabulary: int = 0
    """The model's number of tokens, if their ids cross with activations (``Subspace``); else 0."""

    @property
    def ids_bytes(self) -> int:
        return self.positions * id_bytes(self.vocabulary) if self.vocabulary else 0

    @property
    def inputs_sizes(self) -> set[int]:
        return {size + self.ids_bytes for size in self.codecs}

    def answer_sizes(self, microbatch: Microbatch) -> Container[int]:
        """Return the sizes that the answer to a microbatch may have."""
        return {len(EVALUATED)} if microbatch.is_forward_only else self.codecs

    def codec_of(self, data: Buffer) -> BoundaryCodec:
        """Return the codec of a stage's inputs, or of a gradient. Raises ``ProtocolViolation``."""
        codec = self.codecs.get(len(data)) or self.codecs.get(len(data) - self.ids_bytes)
        if codec is None:
            raise ProtocolViolation(f"a tensor of {len(data)} bytes")
        return codec

    def decode(self, data: Buffer) -> torch.Tensor:
        """Decode a stage's inputs, or a gradient. Raises ``ProtocolViolation``."""
        codec = self.codec_of(data)
        view = memoryview(data)[: codec.size_bytes(self.positions, self.width)]
        return codec.decode(view, self.positions, self.width)

    def ids(self, inputs: Buffer) -> torch.Tensor | None:
        """Return the ids of the inputs' tokens, [k, L]; None if they do not cross.

        Raises ``ProtocolViolation`` for a token that the model does not have.
        """
        if not self.vocabulary:
            return None
        view = memoryview(inputs)[-self.ids_bytes :]
        return decode_ids(view, self.vocabulary).view(self.sequences, -1)

    def outputs(
        self, values: torch.Tensor, ids: torch.Tensor | None, codec: BoundaryCodec | None = None
    ) -> Buffer:
        """Encode outputs, with the least exact codec unless another is given.

        Raises ``Refusal`` if a value is not finite.
        """
        encoded = self._encoded(codec or [*self.codecs.values()][-1], values, None)
        if not self.vocabulary or ids is None:
            return encoded
        return b"".join([encoded, encode_ids(ids, self.vocabulary)])

    def gradient(self, values: torch.Tensor | None, id: MicrobatchId, stage: int, inputs: Buffer) -> Buffer:
        """Encode the gradient of a stage's inputs with their codec.

        Raises ``Refusal`` if a value is not finite.
        """
        if values is None:
            raise Refusal(refusal_pb2.REASON_INTERNAL, "this stage does not depend on its inputs")
        origin = int.from_bytes(sha256(id.origin.encode()).digest()[:8])
        seed = rounding_seed(self.seed, (id.round, origin, id.number), stage)
        return self._encoded(self.codec_of(inputs), values, seed)

    def _encoded(self, codec: BoundaryCodec, values: torch.Tensor, seed: int | None) -> Buffer:
        try:
            return codec.encode(values, seed)
        except ValueError as error:
            raise Refusal(refusal_pb2.REASON_NOT_FINITE, str(error)) from error


class StagePasses:
    """Forward and backward passes of one stage, for one round after another."""

    def __init__(
        self, trainer: StageTrainer, boundary: Boundary, sign: Callable[[bytes], bytes] | None = None
    ) -> None:
        """``sign`` signs receipts, if the job has them."""
        self.trainer = trainer
        self.boundary = boundary
        self.sign = sign
        self._state, self._version = b"", -1
        self.losses: dict[int, float] = {}
        """The summed losses of this worker's own microbatches, by number."""
        self._accumulated: list[MicrobatchId] = []
        """The microbatches in the trainer's gradient, once for each time that they were added."""
        self.is_outdated = False
        """True if the gradient has a microbatch of this worker that others computed again since."""
        self._seconds = 0.0
        self._tokens = 0
        self._usual_inputs, self._usual_gradients = UsualNorms(), UsualNorms()
        self._sizes: dict[PeerId, int] = {}
        """The bytes of a tensor on the link to each measured worker, in this round."""

    def choose_codecs(self, rates: Mapping[PeerId, float], compute_s: float) -> None:
        """Choose the codec of each link for a round, as ``fitting`` says."""
        sizes = list(self.boundary.codecs)
        self._sizes = {
            peer: fitting(sizes, rate, compute_s, self._sizes.get(peer)) for peer, rate in rates.items()
        }

    def _codec_to(self, receiver: PeerId | None) -> BoundaryCodec | None:
        return None if receiver not in self._sizes else self.boundary.codecs[self._sizes[receiver]]

    @property
    def count(self) -> int:
        """The microbatches in the trainer's gradient."""
        return len(self._accumulated)

    @property
    def state(self) -> bytes:
        """The hash of the state that the weights belong to; empty if they have changed since."""
        return self._state if self.trainer.version == self._version else b""

    def restart(self, state: bytes | None = None) -> None:
        """Forget the gradient, because a round or an inner step begins.

        ``state``: the hash of the state from which a round begins.
        """
        if state is not None:
            self._state, self._version = state, self.trainer.version
        self.trainer.free_gradients()
        self._accumulated, self.losses, self._seconds, self._tokens = [], {}, 0.0, 0
        self.is_outdated = False

    def rehearse(self) -> None:
        """Compute a microbatch that nobody counts, because its time tells this worker's speed."""
        kept, id, boundary = KeptMicrobatch(), MicrobatchId(0, PeerId(""), 0), self.boundary
        if self.trainer.stage:
            shape = boundary.positions, boundary.width
            values = torch.linspace(-1.0, 1.0, math.prod(shape)).view(shape)
            ids = torch.zeros(boundary.sequences, boundary.positions // boundary.sequences, dtype=torch.int64)
            kept.inputs = boundary.outputs(values, ids)
            self.forward(kept)
            self.backward(kept, boundary.gradient(values, id, self.trainer.stage, kept.inputs), id)
        else:
            batch = self.trainer.microbatches(0, 0, range(1))[0]
            self.begin(kept, batch)
            home = KeptMicrobatch(inputs=kept.outputs)
            self.end(home, batch, id)
            self.finish(kept, b"" if home.answer is None else home.answer.grad_inputs)
        self.restart()

    def begin_evaluation(self, batch: torch.Tensor, receiver: PeerId) -> Buffer:
        """Return the outputs of stage 0 in an evaluation."""
        with self.trainer.evaluating():
            outputs = self.trainer.begin(batch)
            return self.boundary.outputs(outputs, inputs_of(batch), self._codec_to(receiver))

    def begin(self, kept: KeptMicrobatch, batch: torch.Tensor, receiver: PeerId | None = None) -> None:
        """Compute the outputs of stage 0, for the worker ``receiver``."""
        started = time.perf_counter()
        values = self.trainer.begin(batch)
        kept.codec = kept.codec or self._codec_to(receiver)
        kept.passed = Graph(self.boundary.outputs(values, inputs_of(batch), kept.codec), values)
        self._seconds += time.perf_counter() - started

    def finish(self, kept: KeptMicrobatch, gradient: Buffer, sender: PeerId | None = None) -> None:
        """Run the graph of ``begin`` backwards, because the microbatch is home.

        If the microbatch was home before with another gradient, only note the new gradient:
        ``settle_own`` then computes all again. ``sender``: as in ``forward``, of ``gradient``.
        """
        started = time.perf_counter()
        if isinstance(passed := kept.passed, Graph):
            self.trainer.accumulate(passed.values, self._decoded(gradient, self._usual_gradients, sender))
            kept.passed = MicrobatchAnswer(passed.outputs, gradient)
        elif passed is not None and gradient != passed.grad_outputs:
            kept.passed, self.is_outdated = replace(passed, grad_outputs=gradient), True
        self._seconds += time.perf_counter() - started

    def end(
        self, kept: KeptMicrobatch, batch: torch.Tensor, id: MicrobatchId, sender: PeerId | None = None
    ) -> None:
        """Compute the loss of a microbatch, and the gradient of the last stage's outputs.

        ``sender``: as in ``forward``.
        """
        if kept.passed is None and kept.inputs is not None:
            started = time.perf_counter()
            leaf = self._decoded(kept.inputs, self._usual_inputs, sender).requires_grad_()
            loss = self.trainer.end(leaf, batch)
            gradient = self.trainer.accumulate(loss, None, leaf)
            self.is_outdated |= id.number in self.losses
            self.losses[id.number] = float(loss.detach())
            grad_inputs = self.boundary.gradient(gradient, id, 0, kept.inputs)
            kept.passed = MicrobatchAnswer(grad_inputs=grad_inputs)
            self._seconds += time.perf_counter() - started

    def forward(
        self, kept: KeptMicrobatch, sender: PeerId | None = None, receiver: PeerId | None = None
    ) -> None:
        """Compute the outputs of a later stage, unless they are known.

        ``sender``: the worker that sent the inputs. None if they were admitted before.
        ``receiver``: the worker that gets the outputs. None if they have a codec already.
        """
        if kept.passed is None and kept.inputs is not None:
            started = time.perf_counter()
            leaf = self._decoded(kept.inputs, self._usual_inputs, sender).requires_grad_()
            ids = self.boundary.ids(kept.inputs)
            values = self.trainer.forward(leaf, self.boundary.sequences, ids)
            kept.codec = kept.codec or self._codec_to(receiver)
            outputs = self.boundary.outputs(values, ids, kept.codec)
            kept.passed = Graph(outputs, values, leaf, self.state)
            self._seconds += time.perf_counter() - started

    def backward(
        self, kept: KeptMicrobatch, gradient: Buffer, id: MicrobatchId, sender: PeerId | None = None
    ) -> None:
        """Compute the gradient of a later stage's inputs, unless it is known.

        ``sender``: as in ``forward``, of ``gradient``.
        """
        if kept.answer is not None and gradient != kept.answer.grad_outputs:
            kept.passed = None  # a later worker was replaced
            self.forward(kept)
        if isinstance(graph := kept.passed, Graph):
            started = time.perf_counter()
            decoded = self._decoded(gradient, self._usual_gradients, sender)
            kept.passed = None  # without a gradient, all is computed again
            self._accumulated.append(id)
            self._tokens += kept.tokens
            values = self.trainer.accumulate(graph.values, decoded, graph.leaf)
            grad_inputs = self.boundary.gradient(values, id, self.trainer.stage, kept.inputs or b"")
            kept.passed = MicrobatchAnswer(graph.outputs, gradient, grad_inputs, graph.state)
            self._seconds += time.perf_counter() - started

    def evaluated(self, inputs: Buffer, sender: PeerId, receiver: PeerId) -> Buffer:
        """Return the outputs of a later stage in an evaluation."""
        with self.trainer.evaluating():
            ids = self.boundary.ids(inputs)
            leaf = self._decoded(inputs, self._usual_inputs, sender)
            outputs = self.trainer.forward(leaf, self.boundary.sequences, ids)
            return self.boundary.outputs(outputs, ids, self._codec_to(receiver))

    def evaluate(self, batch: torch.Tensor, inputs: Buffer, sender: PeerId) -> float:
        """Return the summed loss of a microbatch that comes home in an evaluation."""
        with self.trainer.evaluating():
            return float(self.trainer.end(self._decoded(inputs, self._usual_inputs, sender), batch))

    def sign_receipt(self, kept: KeptMicrobatch, subject: bytes, later: tuple[Receipt, ...]) -> None:
        """Put a receipt of this worker before the ``later`` ones, unless the job has none."""
        if self.sign is not None and (answer := kept.answer) is not None:
            state = answer.state if answer.state == self.state else b""
            tensors = (kept.inputs, answer.outputs, answer.grad_outputs, answer.grad_inputs)
            inputs, outputs, grad_outputs, grad_inputs = (tensor_hash(each or b"") for each in tensors)
            receipt = Receipt(state, inputs, outputs, grad_outputs, grad_inputs, self.trainer.bits)
            signed = replace(receipt, signature=self.sign(receipt.signed_bytes(subject)))
            kept.receipts = (signed, *later)

    def answer(
        self, state: bytes, inputs: Buffer, grad_outputs: Buffer, id: MicrobatchId
    ) -> tuple[Buffer, Buffer] | None:
        """Return the outputs and the gradient of the inputs of a microbatch of another worker.

        None unless the weights belong to ``state``. A gradient has the codec of the activations
        that crossed the same boundary before. So the received tensors say the codecs of the answer.
        """
        if not state or state != self.state:
            return None
        leaf, gradient = self.boundary.decode(inputs), self.boundary.decode(grad_outputs)
        ids = self.boundary.ids(inputs)
        outputs, grad_inputs = self.trainer.answer(leaf, gradient, self.boundary.sequences, ids)
        encoded = self.boundary.gradient(grad_inputs, id, self.trainer.stage, inputs)
        return self.boundary.outputs(outputs, ids, self.boundary.codec_of(grad_outputs)), encoded

    def agree(self, mine: Sequence[Buffer], theirs: Sequence[Buffer], bits: int) -> bool | None:
        """Return whether two answers differ by no more than the arithmetic explains.

        None if that is uncertain. ``bits``: precision of the other worker, as its receipt says.
        """
        trainer, boundary = self.trainer, self.boundary

        def compared(one: Buffer, other: Buffer) -> bool | None:
            level = max(boundary.codec_of(one).level, boundary.codec_of(other).level)
            precision = min(bits, trainer.bits)
            tolerance = Tolerance.of(
                precision, trainer.blocks, level, boundary.width, routed=trainer.is_routed
            )
            return tolerance.agree(boundary.decode(one), boundary.decode(other))

        found = list(map(compared, mine, theirs))
        return False if False in found else None if None in found else True

    def settle(
        self, counted: Mapping[MicrobatchId, int], kept: Mapping[MicrobatchId, KeptMicrobatch]
    ) -> None:
        """Leave in the trainer the gradient of exactly the ``counted`` microbatches.

        ``counted``: their tokens. Usually the trainer has this gradient already. Otherwise all
        microbatches are computed again, because a sum cannot be undone exactly.
        """
        if sorted(self._accumulated) != sorted(counted):
            self.trainer.free_gradients()
            self._accumulated = []
            for id in sorted(counted):
                if (answer := kept[id].answer) is not None:
                    again = KeptMicrobatch(inputs=kept[id].inputs)
                    self.forward(again)
                    self.backward(again, answer.grad_outputs, id)
        self.trainer.report = StepReport(0.0, sum(counted.values()), self._seconds)

    def settle_own(
        self,
        tokens: int,
        own: Iterable[tuple[MicrobatchId, torch.Tensor, KeptMicrobatch, KeptMicrobatch]] = (),
    ) -> None:
        """Report the gradient of this worker's own microbatches, which are all home.

        ``own``: their data, and what is kept of each on its way out and home. They are computed
        again if the gradient is outdated.
        """
        if self.is_outdated:
            self.trainer.free_gradients()
            self.losses = {}
            for id, batch, begun, home in own:
                again = KeptMicrobatch()
                self.begin(again, batch)
                self.end(KeptMicrobatch(inputs=home.inputs), batch, id)
                self.finish(again, b"" if begun.answer is None else begun.answer.grad_outputs)
        self._tokens = tokens
        self.trainer.report = StepReport(sum(self.losses.values()) / max(1, tokens), tokens, self._seconds)

    def step(self, round: int, step: int) -> StepReport:
        """Take an inner step with the gradient, and forget it."""
        report = StepReport(sum(self.losses.values()) / max(1, self._tokens), self._tokens, self._seconds)
        self.trainer.step(round, step, self._tokens)
        self.restart()
        return report

    def _decoded(self, data: Buffer, usual: UsualNorms, sender: PeerId | None) -> torch.Tensor:
        """Decode a received tensor.

        Raises ``ProtocolViolation`` with the sender's name if it is too large or not finite.
        """
        values = self.boundary.decode(data)
        norm = float(torch.linalg.vector_norm(values))
        if sender is not None and not usual.admit(sender, norm):
            raise ProtocolViolation(f"{sender} sent a tensor of norm {norm:.3g}, far above the usual")
        return values
