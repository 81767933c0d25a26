"""The state all workers of a job share between rounds, as bytes with a hash: what newcomers fetch and what is compared."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.training.methods.base import OWN
from swarmnet_protocols.transport import Buffer

AGREED = "agreed"
REVISION = "revision"
OUTER = "outer."
INNER = "inner."

_VECTORS = 4
"""Agreed parameters, and at most this many vectors of their size less one: momentum, or two moments of AdamW."""
_HEADER_BYTES = 1 << 16


@dataclass(frozen=True)
class SharedState:
    """What a round starts from. ``revision`` counts the committed rounds; ``inner`` is the optimizer's where workers share it."""

    revision: int
    agreed: torch.Tensor
    outer: Mapping[str, torch.Tensor]
    inner: Mapping[str, torch.Tensor]

    def pack(self) -> bytes:
        """The same bytes on every worker whose tensors are the same. A worker's own outer state is left out."""
        tensors = {AGREED: self.agreed, REVISION: torch.tensor(self.revision)}
        tensors |= {OUTER + name: values for name, values in self.outer.items() if not name.startswith(OWN)}
        tensors |= {INNER + name: values for name, values in self.inner.items()}
        return save({name: values.contiguous() for name, values in tensors.items()})

    @classmethod
    def unpack(cls, data: Buffer) -> "SharedState":
        """What ``pack`` packed. Raises ``IntegrityError`` for anything else."""
        try:
            tensors = load(bytes(data))
        except (SafetensorError, ValueError, KeyError) as error:
            raise IntegrityError(f"not a state of a job: {error}") from error
        agreed, revision = tensors.pop(AGREED, None), tensors.pop(REVISION, None)
        if agreed is None or revision is None or revision.shape != () or revision.dtype != torch.int64:
            raise IntegrityError("a state without parameters or revision")
        parts: dict[str, dict[str, torch.Tensor]] = {OUTER: {}, INNER: {}}
        for name, values in tensors.items():
            prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
            if prefix is None:
                raise IntegrityError(f"a state with {name[:40]!r}")
            parts[prefix][name.removeprefix(prefix)] = values
        return cls(int(revision), agreed, parts[OUTER], parts[INNER])


def max_state_bytes(parameter_count: int) -> int:
    """What no state of a model of this size exceeds."""
    return _VECTORS * 4 * parameter_count + _HEADER_BYTES
