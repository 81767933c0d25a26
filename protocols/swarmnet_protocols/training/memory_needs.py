"""The memory that a worker of a job needs, known before anything is loaded. Pure."""

from dataclasses import dataclass
from typing import Any

from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.codecs.floats import FLOAT32
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.methods import ZeroOrder
from swarmnet_protocols.training.methods.base import OuterMethod
from swarmnet_protocols.training.pipeline.chains import OPEN_HERE, OPEN_PER_WORKER

_KEPT_BYTES = 4 * 4
"""Bytes of memory per trained parameter: the parameter in float32, AdamW's two moments, and the
agreed parameter. If workers exchange gradients, the gradient takes the place of the last."""
_ROUND_BYTES = 4
"""Bytes of memory per trained parameter that a round adds: the gradients of inner steps, and then
the average of an exchange that computes contributions where it reads them."""
_EXCHANGE_BYTES = 4 * 4
"""Bytes of memory per trained parameter that any other exchange adds: this worker's contribution,
contributions of other workers, the average, and an outer step."""
_FORWARDS_COPIES = 1.5
"""Copies of a trained parameter if slopes are exchanged: the parameter, and a perturbed copy of the
largest layer. Embeddings are a third of a small model."""


@dataclass(frozen=True)
class MemoryNeeds:
    """The memory of a worker, without Python and its libraries.

    - ``parameters``: number of weights of the model.
    - ``trained``: number of parameters that are trained: all weights, or an adapter.
    - ``frozen_bytes``: bytes of weights that are not trained.
    - ``trained_bytes``: bytes of trained parameters, with what optimizers and exchanges keep.
    - ``activation_bytes``: bytes that a forward pass keeps for the backward pass, estimated.
    - ``boundary_bytes``: bytes of the inputs, outputs and gradients of two batches. A worker of a
      stage keeps a batch until all stages have committed it, and the next one begins before. A
      worker that is faster than the others of its stage keeps up to ``MOST_BATCHES`` times as much.
      A subspace adds its basis and its table of tokens.

    A worker of a stage also takes memory to fetch a copy of the next stage, within its owner's
    limit. The event "copy" has the bytes of the copy.
    """

    parameters: int
    trained: int
    frozen_bytes: int
    trained_bytes: int
    activation_bytes: int
    boundary_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.frozen_bytes + self.trained_bytes + self.activation_bytes + self.boundary_bytes

    def __str__(self) -> str:
        trained = f"{self.trained:,} parameters: training takes"
        if self.frozen_bytes:
            trained = f"{self.parameters:,} frozen weights and an adapter of {trained}"
        elif self.trained < self.parameters:
            trained = f"{self.parameters:,} parameters, and a stage of {trained}"
        return f"{trained} {self.total_bytes / 2**30:.1f} GiB of memory"


def bytes_per_parameter(job: Job, *, eight_bit: bool = False) -> float:
    """Return the bytes of memory that a worker needs for each trained parameter. ``eight_bit``:
    each of AdamW's moments takes a byte."""
    method = job.make_method()
    if isinstance(method, ZeroOrder):
        return _FORWARDS_COPIES * (4 if job.model.is_lora else method.dtype.itemsize)
    kept = _KEPT_BYTES - (6 if eight_bit else 0)
    if method.kind == "parameters":
        kept += 4 * len(method.state_names) if isinstance(method, OuterMethod) else 4
    codec = get_codec(job.exchange.codec or method.codec)
    in_parts = isinstance(method, OuterMethod) and method.contributes_difference
    in_parts = in_parts and not method.overlap_steps and codec.name == FLOAT32.name
    # A checkpoint has 8-bit moments in float32 until they are on the disk.
    return kept + max(_ROUND_BYTES if in_parts else _EXCHANGE_BYTES, 8 if eight_bit else 0)


def activation_bytes(
    job: Job, config: Any, *, recompute: bool = False, blocks: int | None = None, has_head: bool = True
) -> int:
    """Return the bytes of a model's activations in float32, for the sequences that it takes at
    once.

    As counted for a Llama, a token keeps 10 vectors of the hidden width and 4 of the MLP's in each
    block, and its logits; the gradient of the logits needs twice as much again. ``recompute``: only
    one block keeps them, and the others keep their inputs. ``blocks``: the blocks of a stage. Its
    worker keeps the activations of as many microbatches as an origin has under way, if all stages
    have equally many workers: at most those of a batch, and at least one for each stage.
    """
    if not isinstance(getattr(config, "hidden_size", None), int):
        return 0
    widths = LayerWidths.of(config)
    blocks = int(getattr(config, "num_hidden_layers", 1)) if blocks is None else blocks
    block = 10 * widths.hidden + 4 * widths.intermediate
    if isinstance(job.make_method(), ZeroOrder):
        kept = block
    else:
        kept = blocks * widths.hidden + block if recompute else blocks * block
    sequences = job.training.microbatch or job.training.batch_size
    if job.stages is not None:
        under_way = OPEN_HERE + OPEN_PER_WORKER * job.stages.count
        kept *= max(job.stages.count, min(job.training.batch_size // sequences, under_way))
    logits = 3 * int(config.vocab_size) if has_head else 0
    return 4 * sequences * job.data.sequence_length * (kept + logits)


def boundary_bytes(job: Job, config: Any) -> int:
    """Return the bytes of what a stage's worker keeps of two batches: their inputs, their outputs,
    and the gradients of both, in float32.

    When a round begins, other stages may still need the batch of the round before. A subspace adds
    its frozen tensors: the basis, and the table with a row for each token.
    """
    positions = 2 * job.training.batch_size * job.data.sequence_length
    hidden_size = int(config.hidden_size)
    if job.stages is None or job.stages.subspace is None:
        return 4 * 4 * positions * hidden_size
    rank = job.stages.subspace
    return 4 * (4 * positions * rank + hidden_size * (rank + int(config.vocab_size)))
