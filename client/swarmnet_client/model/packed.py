"""A packed lm_head: a copy of its float32 weight in 16 or 8 bits a value, as the checkpoint stores
it. So a multiplication reads a half or a quarter of the memory, with the same result.

Multiplying one hidden state by lm_head is most of a client's work for a token. It takes as long as
reading the weight from memory.
"""

import ctypes
from ctypes import Structure, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmnet_protocols.machine import native_code

SOURCE = Path(__file__).with_name("packed.c")
BLOCK = 32
MAX_ROWS = 4
"""Most hidden states that are multiplied by the packed weight. With more, arithmetic takes longer
than reading, and torch is faster."""


class _WeightLayout(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("blocks", "scales", "halves")),
        *((name, c_int64) for name in ("outputs", "inputs")),
    )


class Native:
    """The functions of ``packed.c``, compiled for this machine."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.pack_blocks = library.pack_blocks
        self.pack_blocks.argtypes = [c_void_p, c_int64, c_void_p, c_void_p]
        self.pack_halves = library.pack_halves
        self.pack_halves.argtypes = [c_void_p, c_int64, c_void_p]
        self.times = library.times
        self.times.restype = None
        self.times.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p]

    @classmethod
    def load(cls, cache_dir: Path) -> "Native | None":
        """Return the code compiled for this machine, kept in ``cache_dir``; None if it cannot be
        compiled."""
        library = native_code.load(SOURCE, cache_dir)
        return None if library is None else cls(library)


class PackedWeight:
    """A copy of a float32 weight in fewer bytes, with the same values."""

    def __init__(self, native: Native, **parts: torch.Tensor) -> None:
        self._native = native
        self._parts = parts
        self._outputs, inputs = next(iter(parts.values())).shape
        addresses = {name: part.data_ptr() for name, part in parts.items()}
        self._layout = _WeightLayout(outputs=self._outputs, inputs=inputs, **addresses)

    @classmethod
    def of(cls, weight: torch.Tensor, native: Native) -> "PackedWeight | None":
        """Pack ``weight`` [outputs, inputs]: contiguous float32 on the CPU, with ``inputs`` a
        multiple of ``BLOCK``.

        None if its values need all bits of float32.
        """
        outputs, inputs = weight.shape
        blocks = torch.empty(outputs, inputs, dtype=torch.int8)
        scales = torch.empty(outputs, inputs // BLOCK)
        if native.pack_blocks(weight.data_ptr(), scales.numel(), blocks.data_ptr(), scales.data_ptr()):
            return cls(native, blocks=blocks, scales=scales)
        halves = torch.empty(outputs, inputs, dtype=torch.int16)
        if native.pack_halves(weight.data_ptr(), halves.numel(), halves.data_ptr()):
            return cls(native, halves=halves)
        return None

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product [N, outputs] of ``rows`` [N, inputs], float32, with the weight."""
        rows = rows.contiguous()
        output = torch.empty(len(rows), self._outputs)
        threads = torch.get_num_threads()
        self._native.times(ctypes.byref(self._layout), rows.data_ptr(), len(rows), threads, output.data_ptr())
        return output


class TrackedWeight(nn.Parameter):
    """A weight that records whether ``data`` was used. A change through ``data`` does not raise
    autograd's version of the weight, so it would not be noticed otherwise."""

    is_touched = False

    @property
    def data(self) -> torch.Tensor:
        self.is_touched = True
        values: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return values

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.is_touched = True
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class PackedHead(nn.Linear):
    """A linear layer that multiplies few rows by a packed weight, until the weight is changed."""

    def __init__(self, weight: nn.Parameter, packed: PackedWeight) -> None:
        """``packed`` has the values of ``weight`` [outputs, inputs], which becomes a
        ``TrackedWeight`` in every module that has it."""
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        weight.__class__ = TrackedWeight
        self.weight = weight
        self._packed = packed
        self._seen = weight, weight._version
        """The weight and its version when they were last compared. In a tuple, because a module
        would register the weight as a parameter once more."""

    @property
    def is_packed(self) -> bool:
        """Whether the weight still has the values that were packed."""
        seen, version = self._seen
        return (
            self.weight is seen
            and isinstance(seen, TrackedWeight)
            and not seen.is_touched
            and seen._version == version
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        rows = input.numel() // self.in_features
        learns = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if learns or not 1 <= rows <= MAX_ROWS or input.dtype != torch.float32 or not self.is_packed:
            return super().forward(input)
        return self._packed.times(input.reshape(rows, -1)).view(*input.shape[:-1], -1)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        """Return a plain layer, because whoever copies the layer may change the copy."""
        copy = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        copy.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=self.weight.requires_grad)
        return copy.train(self.training)


def pack_head(model: Any, cache_dir: Path) -> None:
    """Replace the lm_head of a CausalLM by a ``PackedHead``; the compiled code is kept in
    ``cache_dir``.

    Nothing is replaced unless lm_head is a plain linear layer in float32 on the CPU, without a
    bias, whose values can be packed by code that this machine compiles. The dense weight stays:
    embeddings may share it, and many rows and training use it.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return
    weight = head.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or weight.shape[1] % BLOCK:
        return
    if weight.is_inference():  # it has no version, so changes could not be noticed
        return
    native = Native.load(cache_dir)
    packed = None if native is None else PackedWeight.of(weight, native)
    if packed is not None:
        model.set_output_embeddings(PackedHead(weight, packed).train(head.training))
