"""The header of a safetensors file, and its tensors, whose values are read when needed."""

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.fetching.pieces import Layout
from swarmnet_protocols.models.checkpoints.file_kinds import HEAD_BYTES, failed_download
from swarmnet_protocols.models.checkpoints.model_folder import MAX_SIZE, json_object

if TYPE_CHECKING:
    import torch

    from swarmnet_protocols.arrays import Array

MAX_DIMS = 8
MAX_HEADER_BYTES = 100 << 20
_TYPES = {
    "BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "U16": (2, "uint16"), "I16": (2, "int16"),
    "U32": (4, "uint32"), "I32": (4, "int32"), "U64": (8, "uint64"), "I64": (8, "int64"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu"),
    "F16": (2, "float16"), "BF16": (2, "bfloat16"), "F32": (4, "float32"), "F64": (8, "float64"),
}  # fmt: skip
"""Bytes of one element, and torch's name of the type."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``tensor[...]`` reads its values, as slices of
    safetensors do.
    """

    path: Path
    span: tuple[int, int]
    """Its bytes [start, end) in the file."""
    kind: str
    """The type of its elements: ``BF16``."""
    shape: tuple[int, ...]
    is_mapped: bool = True
    """True if values stay in the file, mapped into memory, until they are changed.

    Mapping reads faster, and processes share the memory. But mapped pages count as memory of the
    process while values are kept. So otherwise values are copied into memory of their own.
    """

    @property
    def dtype(self) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, _TYPES[self.kind][1])
        return found

    def __getitem__(self, index: Any) -> "torch.Tensor":
        """Read a slice of the first dimension, or everything for ``...``. Raises as ``rows``."""
        import torch

        data = self.rows(index)
        return (
            torch.from_numpy(data)
            .view(-1)
            .view(self.dtype)
            .view((len(data), *self.shape[1:]) if self.shape else ())
        )

    def float32(self) -> "Array":
        """Read the numbers, of 16 or 32 bits, as float32. Raises as ``rows``."""
        import numpy as np

        from swarmnet_protocols.arrays import as_float32

        data = self.rows().reshape(-1)
        match self.kind:
            case "BF16":
                return as_float32(data.view(np.uint16)).reshape(self.shape)
            case "F16" | "F32":
                numbers = data.view(np.float16 if self.kind == "F16" else np.float32)
                return numbers.astype(np.float32).reshape(self.shape)
        raise IntegrityError(f"{self.path} has numbers of the type {self.kind}")

    def rows(self, index: Any = ...) -> "Array":
        """Read the bytes of a slice of the first dimension, or of everything: uint8 [rows, bytes of
        a row].

        Raises ``IntegrityError`` if the file cannot be read, or ends too early.
        """
        import numpy as np

        from swarmnet_protocols.machine.platform import fresh_memory

        rows, *_ = self.shape or (1,)
        first, end, _ = (slice(None) if index is ... else index).indices(rows)
        row_bytes = (self.span[1] - self.span[0]) // max(rows, 1)
        start, size = self.span[0] + first * row_bytes, (end - first) * row_bytes
        try:
            with self.path.open("rb") as file:
                if self.is_mapped and size:
                    skipped = start % mmap.ALLOCATIONGRANULARITY
                    mapped = mmap.mmap(
                        file.fileno(), skipped + size, access=mmap.ACCESS_COPY, offset=start - skipped
                    )
                    data = np.frombuffer(mapped, np.uint8, offset=skipped)
                else:
                    data = fresh_memory(size)
                    file.seek(start)
                    if file.readinto(data.data) != size:
                        raise ValueError("the file ends before")
        except OSError as error:
            raise IntegrityError(f"{self.path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise IntegrityError(f"{self.path} is truncated") from error
        return data.reshape(end - first, row_bytes)


def read_header(path: Path) -> Layout:
    """Return where the tensors of a safetensors file are. Raises the errors of ``read_tensors``."""
    head_bytes, tensors = read_tensors(path)
    spans = {name: each.span for name, each in tensors.items()}
    return Layout(head_bytes, spans, {name: each.shape for name, each in tensors.items()})


def read_tensors(path: Path) -> tuple[int, dict[str, StoredTensor]]:
    """Return the size of a safetensors file's header, and its tensors.

    Raises ``IntegrityError`` unless the header is valid and matches the file's size.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(HEAD_BYTES)
            header_bytes = int.from_bytes(prefix[:8], "little")
            if len(prefix) < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise failed_download(path, prefix) or IntegrityError(
                    f"{path} is truncated or is not a safetensors file", hint="download it again"
                )
            file.seek(8)
            header = json_object(file.read(header_bytes), path)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    head_bytes = 8 + header_bytes
    tensors = {name: _tensor(name, entry, path, head_bytes) for name, entry in header.items()}
    end = head_bytes
    for start, stop in sorted(each.span for each in tensors.values()):
        if start != end:
            raise IntegrityError(f"{path}: its tensors leave a gap or overlap")
        end = stop
    if end != size:
        raise IntegrityError(
            f"{path} has {size} bytes, its header describes {end}",
            hint="download it again, or let the download finish",
        )
    return head_bytes, tensors


def _tensor(name: str, entry: object, path: Path, head_bytes: int) -> StoredTensor:
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
            kind in _TYPES
            and len(shape) <= MAX_DIMS
            and all(type(size) is int and 0 <= size <= MAX_SIZE for size in shape)
            and 0 <= start <= stop
            and stop - start == math.prod(shape) * _TYPES[kind][0]
        ):
            return StoredTensor(path, (head_bytes + start, head_bytes + stop), kind, tuple(shape))
    raise IntegrityError(f"{path}: the header entry of tensor {name[:200]!r} is not valid")
