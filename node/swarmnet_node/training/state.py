"""The state all workers of a job share between rounds, as bytes with a hash: what newcomers fetch and what is compared."""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.training.methods.base import OWN
from swarmnet_protocols.transport import Buffer

AGREED = "agreed"
OUTER = "outer."
INNER = "inner."

_VECTORS = 4
"""Agreed parameters and at most this many vectors of their size, less one: momentum, or two moments of AdamW."""
_HEADER_BYTES = 1 << 16


def max_state_bytes(parameter_count: int) -> int:
    """What no state of a model of this size exceeds."""
    return _VECTORS * 4 * parameter_count + _HEADER_BYTES


def pack_state(
    agreed: torch.Tensor, outer: Mapping[str, torch.Tensor], inner: Mapping[str, torch.Tensor]
) -> bytes:
    """The same bytes on every worker whose tensors are the same. A worker's own outer state is left out."""
    tensors = {AGREED: agreed.contiguous()}
    tensors |= {
        OUTER + name: values.contiguous() for name, values in outer.items() if not name.startswith(OWN)
    }
    tensors |= {INNER + name: values.contiguous() for name, values in inner.items()}
    return save(tensors)


def unpack_state(
    data: Buffer,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Agreed parameters, outer state, inner optimizer state, as ``pack_state`` had them. Raises ``IntegrityError``."""
    try:
        tensors = load(bytes(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"not a state of a job: {error}") from error
    if AGREED not in tensors:
        raise IntegrityError("a state without parameters")
    agreed = tensors.pop(AGREED)
    parts: dict[str, dict[str, torch.Tensor]] = {OUTER: {}, INNER: {}}
    for name, values in tensors.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if prefix is None:
            raise IntegrityError(f"a state with {name[:40]!r}")
        parts[prefix][name.removeprefix(prefix)] = values
    return agreed, parts[OUTER], parts[INNER]
