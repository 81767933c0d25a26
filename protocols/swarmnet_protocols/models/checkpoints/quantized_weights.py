"""Quantised weights in safetensors checkpoints: their tensors, and packing these into matrices.

A weight w has the float32 value that its format defines: w = scale * code in FP8 and MXFP4 (OCP
Microscaling Formats v1.0), w = scale * (code - zero point) in AWQ and GPTQ. Activations are not
quantised, so their scales are not read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor

_FP8_BLOCK, _INT4_BLOCK = 128, 64
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The positions, in a number of 32 bits, of the 4-bit digits of eight neighbouring outputs."""
_NIBBLES = tuple(range(8))

Tensors = Sequence[torch.Tensor]
"""The tensors of one weight, in the order of the parts of its scheme."""
Read = TypeVar("Read")


@dataclass(frozen=True)
class Scheme:
    """A way to store quantised weights.

    The model's weight ``X`` + ``weight`` is stored as one tensor for each of ``parts``, named
    ``X`` + part.
    """

    precision: str
    parts: tuple[str, ...]
    pack: Callable[[Tensors], PackedTensor]
    """Makes the matrix. Raises ``ValueError`` or ``RuntimeError`` for tensors whose shapes or types
    do not fit the format."""
    weight: str = ".weight"
    optional: tuple[str, ...] = ()
    is_expanded: bool = False
    """True if no packed format supports the groups of the scheme. Its weights then become
    float32."""
    is_transposed: bool = False
    """True if files swap the last two dimensions of weights with three dimensions."""

    def weights(self, names: Iterable[str], slice_of: Callable[[str], Any]) -> "list[StoredWeight]":
        """Return the quantised weights among tensors. ``slice_of`` returns a lazy slice: indexing
        it reads the values."""
        known = set(names)
        found = []
        for name in sorted(known):
            stem = name.removesuffix(self.parts[0])
            if stem != name and all(stem + part in known for part in self.parts):
                own = (*self.parts, *(part for part in self.optional if stem + part in known))
                found.append(
                    StoredWeight(
                        self, stem + self.weight, {stem + part: slice_of(stem + part) for part in own}
                    )
                )
        return found

    def dense(self, tensors: Tensors) -> torch.Tensor:
        """Return the weight in the model's layout, float32. Raises the errors of ``pack``."""
        matrix = self.pack(tensors).dequantize()
        if not self.is_transposed:
            return matrix
        count = len(tensors[0])
        return matrix.view(count, -1, matrix.shape[1]).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class StoredWeight:
    """A quantised weight in a file.

    transformers reads it like a lazy slice: ``weight[...]`` reads and dequantises the values.
    """

    scheme: Scheme
    name: str
    tensors: Mapping[str, Any]
    """Slices of its tensors, by name, in the order of the parts of its scheme."""

    def packed(self, index: slice = slice(None)) -> PackedTensor:
        """Return the matrix. For a weight of three dimensions, ``index`` selects along the first.

        Raises ``IntegrityError`` if the tensors are not a weight of the scheme.
        """
        return self._read(self.scheme.pack, index)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Raises as ``packed``."""
        return self._read(self.scheme.dense, slice(None))[index]

    def _read(self, read: Callable[[Tensors], Read], index: slice) -> Read:
        try:
            return read([tensor[index] for tensor in self.tensors.values()])
        except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
            raise IntegrityError(
                f"{self.name} is no {self.scheme.precision} weight: {str(error)[:200]}"
            ) from error


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme that a model's ``quantization_config`` describes. Raises ``ConfigError`` if
    it is not supported."""
    method = str(settings.get("quant_method", ""))[:100]
    match method:
        case "fp8" if settings.get("expert_dtype", "fp8") == "fp8":
            block = _block_of(settings.get("weight_block_size"))
            return Scheme("fp8", (".weight", ".weight_scale_inv"), partial(_pack_fp8, block=block))
        case "compressed-tensors" if settings.get("format") in ("float-quantized", "naive-quantized"):
            return Scheme("fp8", (".weight", ".weight_scale"), partial(_pack_fp8, block=None))
        case "mxfp4":
            return Scheme("mxfp4", ("_blocks", "_scales"), _pack_mxfp4, weight="", is_transposed=True)
        case "awq" if settings.get("bits") == 4 and str(settings.get("version", "gemm")).lower() == "gemm":
            parts = (".qweight", ".qzeros", ".scales")
            return Scheme("awq", parts, _pack_awq, is_expanded=_has_small_groups(settings))
        case "gptq" if settings.get("bits") == 4:
            is_first = settings.get("checkpoint_format", "gptq") == "gptq"
            pack = partial(_pack_gptq, zeros_from=1 if is_first else 0)
            return Scheme(
                *("gptq", (".qweight", ".qzeros", ".scales"), pack),
                optional=(".g_idx",),
                is_expanded=settings.get("desc_act") is True or _has_small_groups(settings),
            )
    named = {key: settings[key] for key in ("format", "bits", "version", "expert_dtype") if key in settings}
    about = ", ".join(f"{key} {str(value)[:100]}" for key, value in named.items())
    raise ConfigError(
        f"the weights are quantised by {method or 'an unnamed method'}{f' ({about})' if about else ''}, which is not read",
        hint="use the original checkpoint, a .gguf file of it, or one in FP8, MXFP4, AWQ or GPTQ of 4 bits",
    )


def _has_small_groups(settings: Mapping[str, Any]) -> bool:
    """Return whether the size of the groups that share a scale is not a multiple of ``INT4``'s
    block."""
    size = settings.get("group_size", settings.get("q_group_size", -1))
    return isinstance(size, int) and size > 0 and size % _INT4_BLOCK > 0


def _block_of(size: Any) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale. None if the config does not say. Raises
    ``ConfigError`` for invalid sizes."""
    match size:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise ConfigError(f"the weight_block_size of the weights is {str(size)[:100]}, not two sizes")


def _pack_fp8(tensors: Tensors, *, block: tuple[int, int] | None) -> PackedTensor:
    """Pack codes [rows, columns] and one scale for the matrix, one for each row, or one for each
    ``block`` of rows and columns."""
    codes, scales = tensors
    rows, columns = codes.shape
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes of {codes.dtype}, expected float8_e4m3fn")
    scales = scales.float()
    if scales.dim() < 2 or block is None:
        scales = scales.reshape(-1, 1)
        block = (rows // len(scales), columns)
    if scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise ValueError(f"scales {tuple(scales.shape)} for codes {tuple(codes.shape)} in blocks of {block}")
    of_rows = scales[torch.arange(rows) // block[0]]
    if columns % _FP8_BLOCK or (block[1] % _FP8_BLOCK and scales.shape[1] > 1):
        return _plain(codes.float() * of_rows[:, torch.arange(columns) // block[1]])
    of_blocks = of_rows[:, torch.arange(0, columns, _FP8_BLOCK) // block[1]]
    parts = [_bytes(of_blocks), codes.contiguous().view(torch.uint8).view(rows, -1, _FP8_BLOCK)]
    return PackedTensor.of(Format.FP8, torch.cat(parts, 2).view(rows, -1))


def _pack_mxfp4(tensors: Tensors) -> PackedTensor:
    """Pack codes [experts, rows, blocks, 16] and exponents [experts, rows, blocks] as one matrix
    with the rows of all experts. A byte has two codes, the first in the low four bits."""
    codes, exponents = tensors
    if codes.dtype != torch.uint8 or exponents.dtype != torch.uint8 or codes.shape != (*exponents.shape, 16):
        raise ValueError(f"codes {tuple(codes.shape)} and exponents {tuple(exponents.shape)}")
    digits = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    packed = torch.cat([exponents[..., None], digits[..., :16] | digits[..., 16:] << 4], -1)
    return PackedTensor.of(Format.MXFP4, packed.view(packed.shape[0] * packed.shape[1], -1))


def _pack_awq(tensors: Tensors) -> PackedTensor:
    """Pack codes [columns, rows / 8], zero points [groups, rows / 8] and scales [groups, rows]:
    AWQ's layout for GEMM."""
    codes, zeros, scales = tensors
    return _pack_int4(_digits(codes, _AWQ_NIBBLES).T, _digits(zeros, _AWQ_NIBBLES).T, scales.T)


def _pack_gptq(tensors: Tensors, *, zeros_from: int) -> PackedTensor:
    """Pack codes [columns / 8, rows], zero points less ``zeros_from`` [groups, rows / 8], scales
    [groups, rows], and the group of each column."""
    codes, zeros, scales, *rest = tensors
    matrix = _digits(codes.T, _NIBBLES)
    zeros, scales = (_digits(zeros, _NIBBLES) + zeros_from).T, scales.T
    group = matrix.shape[1] // max(1, scales.shape[1])
    if rest and not torch.equal(rest[0].long(), torch.arange(matrix.shape[1]) // max(1, group)):
        of_columns = rest[0].long()
        return _plain((matrix.float() - zeros.float()[:, of_columns]) * scales.float()[:, of_columns])
    return _pack_int4(matrix, zeros, scales)


def _pack_int4(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> PackedTensor:
    """Pack codes [rows, columns], and zero points and scales [rows, groups], where a group is
    ``columns / groups`` neighbouring columns."""
    rows, columns = codes.shape
    if zeros.shape != scales.shape or len(scales) != rows or columns % max(1, scales.shape[1]):
        raise ValueError(
            f"scales {tuple(scales.shape)}, zero points {tuple(zeros.shape)} for {rows} x {columns}"
        )
    group = columns // scales.shape[1]
    if group % _INT4_BLOCK:
        of_columns = torch.arange(columns) // group
        return _plain((codes.float() - zeros.float()[:, of_columns]) * scales.float()[:, of_columns])
    of_blocks = torch.arange(0, columns, _INT4_BLOCK) // group
    halves = codes.reshape(rows, -1, 2, _INT4_BLOCK // 2)
    parts = [
        *(_bytes(scales.float()[:, of_blocks]), zeros[:, of_blocks, None]),
        halves[:, :, 0] | halves[:, :, 1] << 4,
    ]
    return PackedTensor.of(Format.INT4, torch.cat(parts, 2).view(rows, -1))


def _digits(data: torch.Tensor, places: tuple[int, ...]) -> torch.Tensor:
    """Return the 4-bit digits of numbers of 32 bits [n, m], in the order of ``places``: uint8 [n, 8
    m]."""
    if data.dtype != torch.int32 or data.dim() != 2:
        raise ValueError(f"codes of {data.dtype} {tuple(data.shape)}, expected int32 of two dimensions")
    shifts = torch.tensor([4 * place for place in places], dtype=torch.int32)
    return (data[..., None] >> shifts & 15).to(torch.uint8).flatten(1)


def _plain(weights: torch.Tensor) -> PackedTensor:
    """Return weights that no packed format represents exactly, as float32."""
    return PackedTensor.of(Format.F32, weights.contiguous().view(torch.uint8))


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """View float32 [rows, n] as uint8 [rows, n, 4]."""
    return values.contiguous()[..., None].view(torch.uint8)
