"""The memory that a worker of a job needs, known before anything is loaded. Pure."""

from dataclasses import dataclass

from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.methods import ZeroOrder

_KEPT_BYTES = 5 * 4
"""Bytes of memory per trained parameter: the parameter in float32, AdamW's two moments, the agreed
parameter and the outer momentum."""
_EXCHANGE_BYTES = 5 * 4
"""Bytes of memory per trained parameter that an exchange adds, as measured. The gradients of the
inner steps are freed before."""
_FORWARDS_COPIES = 1.5
"""Copies of a trained parameter if slopes are exchanged: the parameter, and a perturbed copy of the
largest layer. Embeddings are a third of a small model."""


@dataclass(frozen=True)
class MemoryNeeds:
    """The memory of a worker, without activations, Python and its libraries.

    - ``parameters``: number of weights of the model.
    - ``trained``: number of parameters that are trained: all weights, or an adapter.
    - ``frozen_bytes``: bytes of weights that are not trained.
    - ``trained_bytes``: bytes of trained parameters, with what optimizers and exchanges keep.
    """

    parameters: int
    trained: int
    frozen_bytes: int
    trained_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.frozen_bytes + self.trained_bytes

    @classmethod
    def of(cls, job: Job, parameters: int, trained: int, frozen_bytes: int = 0) -> "MemoryNeeds":
        """Return the needs of a job that trains ``trained`` of a model's ``parameters``."""
        return cls(parameters, trained, frozen_bytes, round(trained * bytes_per_parameter(job)))

    def __str__(self) -> str:
        trained = f"{self.trained:,} parameters: training takes"
        if self.frozen_bytes:
            trained = f"{self.parameters:,} frozen weights and an adapter of {trained}"
        return f"{trained} {self.total_bytes / 2**30:.1f} GiB of memory besides activations"


def bytes_per_parameter(job: Job) -> float:
    """Return the bytes of memory that a worker needs for each trained parameter."""
    method = job.make_method()
    if isinstance(method, ZeroOrder):
        return _FORWARDS_COPIES * (4 if job.model.is_lora else method.dtype.itemsize)
    return _KEPT_BYTES + _EXCHANGE_BYTES
