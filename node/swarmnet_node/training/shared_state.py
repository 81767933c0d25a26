"""The state that all workers share between rounds, packed as bytes.

Newcomers download the bytes, and workers compare them by hash. The bytes are a safetensors file in
a canonical form, so equal states have equal bytes. Bytes from another worker are untrusted:
``unpack`` accepts only the canonical form, and downloads stop at ``max_state_bytes``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.training.methods.base import OWN

AGREED = "agreed"
REVISION = "revision"
OUTER = "outer."
INNER = "inner."

_VECTORS = 4
"""Most vectors of the model's size in a state: agreed parameters, and momentum or AdamW's two
moments."""
_HEADER_BYTES = 1 << 16
_LENGTH_BYTES = 8
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64}


@dataclass(frozen=True)
class SharedState:
    """The state at the start of a round, equal on all workers.

    - ``revision``: number of committed rounds.
    - ``agreed``: parameters, ``[n]``; bfloat16 in jobs of forward passes, otherwise float32.
    - ``outer``: the method's state.
    - ``inner``: AdamW's state if workers exchange gradients, otherwise empty.
    """

    revision: int
    agreed: torch.Tensor
    outer: Mapping[str, torch.Tensor]
    inner: Mapping[str, torch.Tensor]

    def pack(self) -> list[Buffer]:
        """Return the canonical bytes as buffers. Outer state that is private to one worker is left
        out."""
        tensors = {AGREED: self.agreed, REVISION: torch.tensor(self.revision)}
        tensors |= {OUTER + name: values for name, values in self.outer.items() if not name.startswith(OWN)}
        tensors |= {INNER + name: values for name, values in self.inner.items()}
        return pack(tensors)

    @classmethod
    def unpack(cls, data: bytearray) -> "SharedState":
        """Return the state that ``pack`` wrote. Its tensors are views of ``data``.

        Raises ``IntegrityError`` for bytes of another form.
        """
        tensors = unpack(data)
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


def pack(tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
    """Return a canonical safetensors file as buffers: its header, then each tensor's memory,
    uncopied."""
    ordered = dict(sorted(tensors.items(), key=lambda each: (-each[1].itemsize, each[0])))
    return [_header(ordered), *(_memory(values) for values in ordered.values())]


def unpack(data: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors that ``pack`` wrote, as views of ``data``.

    Raises ``IntegrityError`` for bytes of another form.
    """
    try:
        return _views(data)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError("not a state of a job") from error


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header, end = {}, 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {
            "dtype": names[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _memory(values: torch.Tensor) -> memoryview:
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


def _views(data: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a packed state.

    A malformed header raises one of the errors that ``unpack`` catches.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > _HEADER_BYTES:
        raise ValueError("the header is too long")
    start = end = _LENGTH_BYTES + length
    tensors = {}
    for name, entry in json.loads(bytes(data[_LENGTH_BYTES:start])).items():
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if len(shape) > 1 or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError("a tensor is neither a number nor a vector")
        count = math.prod(shape)
        tensors[name] = torch.frombuffer(data, dtype=dtype, count=count, offset=end).view(shape)
        end += count * dtype.itemsize
    if end != len(data) or bytes(data[:start]) != _header(tensors):
        raise ValueError("the header is not canonical")
    return tensors


def max_state_bytes(parameter_count: int) -> int:
    """Return an upper bound on the packed state of a model with ``parameter_count`` parameters."""
    return _VECTORS * 4 * parameter_count + _HEADER_BYTES
