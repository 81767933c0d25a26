"""The headers of gguf files, bounded and checked, and the parts of a model that was split."""

import math
import mmap
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.fetching.hub_files import MAX_HEAD_BYTES
from swarmnet_protocols.fetching.pieces import Layout
from swarmnet_protocols.models.checkpoints.file_kinds import HEAD_BYTES, misfit_of, unread_type
from swarmnet_protocols.models.checkpoints.model_folder import MAX_SIZE, file_of

Scalar = int | float | bool | str
Field = Scalar | tuple[Scalar, ...]
"""A value of the metadata. Short arrays of numbers are tuples. Other arrays become the empty tuple
unless they are asked for."""

MAX_TENSORS = 1_000_000
MAX_FIELDS = 10_000
MAX_NAME_BYTES = 1_024
MAX_DIMS = 4
MAX_PARTS = 1_000
MAX_LISTED = 4_096
"""Elements of the longest array that is kept: one number for each block. Vocabularies are longer.
"""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor: ``offset`` in bytes from the start of the file. Dimensions outermost
    first."""

    shape: tuple[int, ...]
    type: int
    offset: int
    size_bytes: int


class _Cursor:
    """Reads little-endian fields. Raises ``EOFError`` at the end of the file, and ``ValueError``
    beyond the longest permitted header. Without that bound, the holes of a partial file would be
    read as endless empty strings."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = _longest_header(len(data))
        self.position = 0

    def skip(self, size: int) -> int:
        start = self.position
        if size > self._end - start:
            if self._end == len(self._data) and size <= MAX_HEAD_BYTES:
                raise EOFError("it ends within its header")
            raise ValueError("its header is too long")
        self.position = start + size
        return start

    def read(self, size: int) -> bytes:
        start = self.skip(size)
        return self._data[start : start + size]

    def integer(self, size: int) -> int:
        return int.from_bytes(self.read(size), "little")

    def string(self, limit: int) -> str:
        size = self.integer(8)
        if size > limit:
            raise ValueError(f"a name of {size} bytes")
        return self.read(size).decode()

    def value(self, kind: int, *, is_whole: bool = False) -> Field:
        """Read a metadata value. ``is_whole``: read all elements of an array, whatever they are."""
        if kind == _STRING:
            return self.read(self.integer(8)).decode(errors="replace")
        if kind == _ARRAY:
            element, count = self.integer(4), self.integer(8)
            if element == _STRING and is_whole:
                return tuple(self.read(self.integer(8)).decode(errors="replace") for _ in range(count))
            if element == _STRING:
                for _ in range(count):
                    self.skip(self.integer(8))
                return ()
            one = _scalar(element)
            if count > MAX_LISTED and not is_whole:
                self.skip(one.size * count)
                return ()
            return tuple(value for (value,) in one.iter_unpack(self.read(one.size * count)))
        scalar = _scalar(kind)
        [found] = scalar.unpack(self.read(scalar.size))
        value: Scalar = found
        return value


def _longest_header(file_bytes: int) -> int:
    return min(file_bytes, MAX_HEAD_BYTES)


def _scalar(kind: int) -> Struct:
    if kind not in _SCALARS:
        raise ValueError(f"a value of unknown type {kind}")
    return _SCALARS[kind]


def read_header(path: Path, arrays: Container[str] = ()) -> tuple[dict[str, Field], dict[str, GgufTensor]]:
    """Return the metadata, and the tensors, all within the file.

    ``arrays``: keys of long arrays to return. Other long arrays are left out.

    Raises ``IntegrityError`` for a damaged file, and ``ConfigError`` for a file of another format
    or with an unknown type of tensors.
    """
    try:
        with path.open("rb") as file:
            misfit = misfit_of(path, file.read(HEAD_BYTES))
            if misfit is None:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _parse(_Cursor(data), len(data), arrays)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    except EOFError as error:
        raise IntegrityError(
            f"{path} is incomplete: {error}", hint="download it again, or let the download finish"
        ) from error
    except ValueError as error:
        raise IntegrityError(f"{path} is damaged: {error}", hint="download it again") from error
    except ConfigError as error:
        raise ConfigError(f"{path} {error}", hint=error.hint) from error
    raise misfit


def layout_of(path: Path) -> Layout:
    _, tensors = read_header(path)
    spans = {name: (each.offset, each.offset + each.size_bytes) for name, each in tensors.items()}
    head_bytes = min((start for start, _ in spans.values()), default=path.stat().st_size)
    return Layout(head_bytes, spans, {name: each.shape for name, each in tensors.items()})


def gguf_head_bytes(path: Path) -> int:
    """Return the size of a gguf file's header. Raises ``IntegrityError`` unless the header is
    complete."""
    return layout_of(path).head_bytes


def _parse(
    cursor: _Cursor, file_bytes: int, arrays: Container[str]
) -> tuple[dict[str, Field], dict[str, GgufTensor]]:
    cursor.skip(8)  # the magic number and the version
    tensor_count, field_count = cursor.integer(8), cursor.integer(8)
    if tensor_count > MAX_TENSORS or field_count > MAX_FIELDS:
        raise ValueError(f"{tensor_count} tensors, {field_count} fields")
    fields: dict[str, Field] = {}
    for _ in range(field_count):
        key = cursor.string(MAX_NAME_BYTES)
        if key in fields:
            raise ValueError(f"field {key} twice")
        fields[key] = cursor.value(cursor.integer(4), is_whole=key in arrays)
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"alignment {alignment}")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} twice")
        tensors[name] = GgufTensor(tensor.shape, tensor.type, data_start + tensor.offset, tensor.size_bytes)
        _check_within(name, tensors[name], file_bytes)
    _check_overlap(tensors)
    return fields, tensors


def _check_within(name: str, tensor: GgufTensor, file_bytes: int) -> None:
    end = tensor.offset + tensor.size_bytes
    if end > file_bytes:
        raise EOFError(
            f"it has {file_bytes:,} bytes, and tensor {name} lies beyond the end, up to byte {end:,}"
        )


def _check_overlap(tensors: dict[str, GgufTensor]) -> None:
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda each: each[1].offset):
        if tensor.offset < end:
            raise ValueError(f"tensor {name} overlaps another one")
        end = tensor.offset + tensor.size_bytes


def _entry(cursor: _Cursor) -> tuple[str, GgufTensor]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.string(MAX_NAME_BYTES)
    dims = cursor.integer(4)
    if not 1 <= dims <= MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions")
    shape = tuple(cursor.integer(8) for _ in range(dims))[::-1]
    if not all(1 <= size <= MAX_SIZE for size in shape):
        raise ValueError(f"tensor {name} has the shape {shape}")
    kind, offset = cursor.integer(4), cursor.integer(8)
    if kind not in {*GGMLQuantizationType}:
        raise unread_type(name, kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block_elements:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} elements")
    return name, GgufTensor(shape, kind, offset, math.prod(shape) // block_elements * block_bytes)


_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the split model that has a file called ``name``.

    If ``name`` is not the name of a part, it is the only result.
    """
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def parts_beside(path: Path) -> list[Path]:
    """Return the paths of all parts of the split model that ``path`` is a part of.

    A whole model is its own only part. Raises ``ConfigError`` if a part is missing in its folder,
    and the errors of ``file_of`` and ``read_header``.
    """
    names = part_names(path.name)
    if len(names) == 1 or read_header(path)[0].get("split.count", 1) in (0, 1):
        return [path]
    found = {
        name: path if name == path.name else file_of(path.parent, name, has_weights=True) for name in names
    }
    if missing := [name for name, part in found.items() if part is None]:
        raise ConfigError(
            f"{path} is part {names.index(path.name) + 1} of {len(names)} of a split gguf file, and {missing[0]} is not in its folder",
            hint="put all parts into one folder, or join them: llama-gguf-split --merge",
        )
    return [part for part in found.values() if part is not None]


def read_parts(paths: Sequence[Path]) -> tuple[dict[str, Field], list[dict[str, GgufTensor]]]:
    """Return the metadata of a model, and the tensors of each of its files.

    Raises ``IntegrityError``, or ``ConfigError`` for a lone part.
    """
    fields: dict[str, Field] = {}
    tensors: list[dict[str, GgufTensor]] = []
    for number, path in enumerate(paths):
        own_fields, own_tensors = read_header(path)
        count, place = own_fields.get("split.count", 1), own_fields.get("split.no", number)
        if count not in (0, 1) and len(paths) == 1:
            raise ConfigError(
                f"{path} is one of {count} parts of a split gguf file, and its name does not tell the names of the others",
                hint=f"name them {path.stem}-00001-of-{count:05}.gguf and so on, or join them: llama-gguf-split --merge",
            )
        if len(paths) > 1 and (count != len(paths) or place != number):
            raise IntegrityError(
                f"the name of {path} says that it is part {number + 1} of {len(paths)}, but its header contradicts that"
            )
        fields = fields or own_fields
        tensors.append(own_tensors)
    if len(paths) > 1:
        _check_parts(paths[0], fields, [name for each in tensors for name in each])
    return fields, tensors


def _check_parts(first: Path, fields: dict[str, Field], names: Sequence[str]) -> None:
    if not len(names) == len(set(names)) == fields.get("split.tensors.count", len(names)):
        raise IntegrityError(
            f"the parts of {first} do not belong together: their tensors differ from the list in its header"
        )
