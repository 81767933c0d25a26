"""The memory that a worker of a job needs, known before anything is loaded. Pure."""

from dataclasses import dataclass
from typing import Any

from swarmnet_protocols.models.sizes import LayerWidths
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.methods import ZeroOrder

_KEPT_BYTES = 5 * 4
"""Bytes of memory per trained parameter: the parameter in float32, AdamW's two moments, the agreed
parameter and the outer momentum."""
_EXCHANGE_BYTES = 4 * 4
"""Bytes of memory per trained parameter that an exchange adds, as measured. The gradients of the
inner steps are freed before."""
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
    """

    parameters: int
    trained: int
    frozen_bytes: int
    trained_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.frozen_bytes + self.trained_bytes + self.activation_bytes

    def __str__(self) -> str:
        trained = f"{self.trained:,} parameters: training takes"
        if self.frozen_bytes:
            trained = f"{self.parameters:,} frozen weights and an adapter of {trained}"
        return f"{trained} {self.total_bytes / 2**30:.1f} GiB of memory"


def bytes_per_parameter(job: Job, *, eight_bit: bool = False) -> float:
    """Return the bytes of memory that a worker needs for each trained parameter. ``eight_bit``:
    each of AdamW's moments takes a byte."""
    method = job.make_method()
    if isinstance(method, ZeroOrder):
        return _FORWARDS_COPIES * (4 if job.model.is_lora else method.dtype.itemsize)
    return _KEPT_BYTES + _EXCHANGE_BYTES - (6 if eight_bit else 0)


def activation_bytes(job: Job, config: Any, *, recompute: bool = False) -> int:
    """Return the bytes of a model's activations in float32, for the sequences that it takes at
    once.

    As counted for a Llama, a token keeps 10 vectors of the hidden width and 4 of the MLP's in each
    block, and its logits; the gradient of the logits needs twice as much again. ``recompute``: only
    one block keeps them, and the others keep their inputs.
    """
    if not isinstance(getattr(config, "hidden_size", None), int):
        return 0
    widths, blocks = LayerWidths.of(config), int(getattr(config, "num_hidden_layers", 1))
    block = 10 * widths.hidden + 4 * widths.intermediate
    if isinstance(job.make_method(), ZeroOrder):
        kept = block
    else:
        kept = blocks * widths.hidden + block if recompute else blocks * block
    sequences = job.training.microbatch or job.training.batch_size
    return 4 * sequences * job.data.sequence_length * (kept + 3 * int(config.vocab_size))
