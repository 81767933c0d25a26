"""Models in one gguf file: checks the header, and reads tensors, config and tokenizer."""

import hashlib
import math
import mmap
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, BinaryIO

from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.fetching.hub_files import MAX_HEAD_BYTES, HubFiles, Known
from swarmnet_protocols.fetching.pieces import Layout, slices_of
from swarmnet_protocols.models.checkpoints import gguf_gpt_oss
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS, BlockNaming, WeightForm, sha256_of
from swarmnet_protocols.models.checkpoints.gguf_gpt_oss import Scalar
from swarmnet_protocols.models.checkpoints.model_folder import MAX_SIZE

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swarmnet_protocols.models.checkpoints.expert_weights import ExpertPlace
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor
    from swarmnet_protocols.quantization.quantize import Precision

MAX_TENSORS = 1_000_000
MAX_FIELDS = 10_000
MAX_NAME_BYTES = 1_024
MAX_DIMS = 4
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
_NAMING = BlockNaming(re.compile(r"^(blk\.)(\d+)(\..+)$"))
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight$")


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is: ``offset`` in bytes from the start of the file, dimensions outermost first."""

    shape: tuple[int, ...]
    type: int
    offset: int
    size_bytes: int


class _Cursor:
    """Reads little-endian fields. Raises ``ValueError`` at the end of the file, and of the longest header that is read: the holes of a partial file
    would be empty strings without end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._end = _longest_header(len(data))
        self.position = 0

    def skip(self, size: int) -> int:
        start = self.position
        if size > self._end - start:
            raise ValueError("it ends in the header, or the header is too long")
        self.position = start + size
        return start

    def take(self, size: int) -> bytes:
        start = self.skip(size)
        return self._data[start : start + size]

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def string(self, limit: int) -> str:
        size = self.integer(8)
        if size > limit:
            raise ValueError(f"a name of {size} bytes")
        return self.take(size).decode()

    def value(self, kind: int) -> Scalar:
        """Read a metadata value; of an array nothing."""
        if kind == _STRING:
            return self.take(self.integer(8)).decode(errors="replace")
        if kind == _ARRAY:
            element, count = self.integer(4), self.integer(8)
            if element == _STRING:
                for _ in range(count):
                    self.skip(self.integer(8))
            else:
                self.skip(_scalar(element).size * count)
            return ""
        scalar = _scalar(kind)
        [found] = scalar.unpack(self.take(scalar.size))
        value: Scalar = found
        return value


def _longest_header(file_bytes: int) -> int:
    return min(file_bytes, MAX_HEAD_BYTES)


def _scalar(kind: int) -> Struct:
    if kind not in _SCALARS:
        raise ValueError(f"a value of unknown type {kind}")
    return _SCALARS[kind]


def read_header(path: Path) -> tuple[dict[str, Scalar], dict[str, GgufTensor]]:
    """The metadata without its arrays, and the tensors, all of which are within the file. Raises ``IntegrityError``."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data), len(data))
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise IntegrityError(f"{path} is truncated or corrupt: {error}") from error


def _layout(path: Path) -> Layout:
    _, tensors = read_header(path)
    spans = {name: (each.offset, each.offset + each.size_bytes) for name, each in tensors.items()}
    slices = slices_of((name, each.shape, each.size_bytes) for name, each in tensors.items())
    return Layout(min((start for start, _ in spans.values()), default=path.stat().st_size), spans, slices)


def gguf_head_bytes(path: Path) -> int:
    """The size of the header of a gguf file. Raises ``IntegrityError`` if it is damaged or not complete."""
    return _layout(path).head_bytes


def _parse(cursor: _Cursor, file_bytes: int) -> tuple[dict[str, Scalar], dict[str, GgufTensor]]:
    if cursor.take(4) != b"GGUF" or cursor.integer(4) not in (2, 3):
        raise ValueError("not a gguf file of version 2 or 3")
    tensor_count, field_count = cursor.integer(8), cursor.integer(8)
    if tensor_count > MAX_TENSORS or field_count > MAX_FIELDS:
        raise ValueError(f"{tensor_count} tensors, {field_count} fields")
    fields: dict[str, Scalar] = {}
    for _ in range(field_count):
        key = cursor.string(MAX_NAME_BYTES)
        if key in fields:
            raise ValueError(f"field {key} twice")
        fields[key] = cursor.value(cursor.integer(4))
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
    if tensor.offset + tensor.size_bytes > file_bytes:
        raise ValueError(f"tensor {name} lies beyond the end")


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
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape[-1] % block_elements:
        raise ValueError(f"tensor {name} has rows of {shape[-1]} elements")
    return name, GgufTensor(shape, kind, offset, math.prod(shape) // block_elements * block_bytes)


class _Names:
    """Takes a model's place when transformers maps gguf's tensor names: it has the names of the whole CausalLM and no submodules.

    For families whose checkpoints lack the base model's prefix, transformers would repeat the mapping for each submodule.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self.config = model.config
        prefix = "" if model.base_model is not model else f"{model.base_model_prefix}."
        self._names = [prefix + name for name in model.state_dict()]

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self._names)

    def named_children(self) -> list[tuple[str, Any]]:
        return []


_READING = 2
"""The version of the code by which configs and tokenizers are read: copies that another one has made are not used."""
METADATA_BYTES = 32 << 20
"""Free bytes that saving a config or a tokenizer in Hugging Face layout needs, at most."""


class GgufCheckpoint:
    """``ModelCheckpoint`` of one gguf file. Raises ``IntegrityError`` if the file is damaged.

    transformers takes seconds to read a config or a tokenizer from gguf, so both are cached in Hugging Face layout under
    ``metadata_dir``, which is for this version of the file only. A cached copy that has changed is made again.
    """

    def __init__(self, path: Path, metadata_dir: Path, hub: HubFiles | None = None) -> None:
        """``hub``: the commit on the hub from which missing parts of the file are fetched when they are needed."""
        self.path = path
        self.naming = _NAMING
        self.root = path.parent
        self.files = (path.name,)
        self.hub = hub
        self.known: Known = {path.name: hub.known[path.name]} if hub is not None else {}
        self._metadata_dir = metadata_dir
        self._fields, self._tensors = read_header(path)
        self._architecture = str(self._fields.get("general.architecture", ""))
        self._parsed: tuple[bytes, Layout] | None = None
        """The hash of a header, and the layout that it describes."""
        self.tensor_names = tuple(self._tensors)

    @property
    def _source(self) -> dict[str, Any]:
        return {
            "pretrained_model_name_or_path": self.path.parent,
            "gguf_file": self.path.name,
            "local_files_only": True,
        }

    def path_of(self, file: str) -> Path:
        return self.path

    def layout(self, file: str) -> Layout:
        """Parsing the vocabulary in a header takes tenths of a second, so the layout is kept as long as the header stays the same."""
        if self._parsed is not None:
            digest, layout = self._parsed
            if self._hash_of_head(layout.head_bytes) == digest:
                return layout
        layout = _layout(self.path)
        self._parsed = self._hash_of_head(layout.head_bytes), layout
        return layout

    def _hash_of_head(self, size: int) -> bytes:
        """The SHA-256 of the first ``size`` bytes, and of the size of the file."""
        with self.path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            return hashlib.sha256(total.to_bytes(8, "little") + file.read(size)).digest()

    def fetch(self, files: Iterable[str]) -> None:
        name = self.path.name
        if self.hub is not None and name in set(files) and self.path == self.hub.partial(name).path:
            self.path = self.hub.fetch(name)

    @property
    def precision(self) -> str:
        from gguf import GGMLQuantizationType

        weights: Counter[int] = Counter()
        for name, tensor in self._tensors.items():
            if _NAMING.block_of(name) is not None:
                weights[tensor.type] += math.prod(tensor.shape)
        return GGMLQuantizationType(max(weights, key=weights.__getitem__)).name.lower() if weights else "f32"

    def holders(self, names: Iterable[str]) -> set[str]:
        return set(self.files)

    def config(self) -> "PretrainedConfig":
        from huggingface_hub.errors import StrictDataclassError
        from transformers.models.auto.configuration_auto import AutoConfig

        try:
            return AutoConfig.from_pretrained(
                self._cached("config", self._read_config),
                local_files_only=True,
            )
        except (*CONFIG_FAULTS, StrictDataclassError) as error:
            raise ConfigError(
                f"{self.path}: the config of {self._architecture or 'this'} cannot be read from gguf: {error}",
                hint="use the model in Hugging Face layout",
            ) from error

    def _read_config(self) -> "PretrainedConfig":
        """The config as transformers reads it, and the width of experts, which it does not read, from the shapes of their tensors."""
        from transformers.models.auto.configuration_auto import AutoConfig

        widths = {
            tensor.shape[1]
            for name, tensor in self._tensors.items()
            if (match := _EXPERTS.match(name)) and match[2] == "up" and len(tensor.shape) == 3
        }
        if self._architecture == gguf_gpt_oss.ARCHITECTURE:
            vocabulary, *_ = self._tensors["token_embd.weight"].shape
            [width] = widths
            is_tied = "output.weight" not in self._tensors
            return gguf_gpt_oss.config_of(self._fields, vocabulary=vocabulary, width=width, is_tied=is_tied)
        config: PretrainedConfig = AutoConfig.from_pretrained(**self._source)
        if len(widths) == 1 and hasattr(config, "moe_intermediate_size"):
            [config.moe_intermediate_size] = widths
        return config

    def generation_config(self) -> "GenerationConfig | None":
        return None

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers import PreTrainedTokenizerFast
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        # AutoTokenizer would read the config too, which transformers cannot of gpt-oss.
        reader = PreTrainedTokenizerFast if self._architecture == gguf_gpt_oss.ARCHITECTURE else AutoTokenizer
        return AutoTokenizer.from_pretrained(
            self._cached("tokenizer", lambda: reader.from_pretrained(**self._source)),
            local_files_only=True,
        )

    def _cached(self, part: str, make: Callable[[], Any]) -> Path:
        """The directory in which ``part`` is cached, named by its hash. It is made on first use, and renamed into place when it is complete."""
        from transformers import __version__

        prefix = f"{part}-{__version__}-{_READING}-"
        for cached in self._metadata_dir.glob(f"{prefix}*"):
            if cached.name == prefix + _hash_of(cached):
                return cached
            shutil.rmtree(cached)
        self._metadata_dir.mkdir(parents=True, exist_ok=True)
        # The tokenizer is saved by native code, whose error for a full disk cannot be told from others.
        if shutil.disk_usage(self._metadata_dir).free < METADATA_BYTES:
            raise OutOfResources(
                f"{self._metadata_dir} has too little free space for the config and tokenizer of {self.path.name}",
                hint="free some space, or choose another --cache-dir",
            )
        with tempfile.TemporaryDirectory(dir=self._metadata_dir, prefix=".new-") as scratch:
            fresh = Path(scratch, part)
            make().save_pretrained(fresh)
            cached = self._metadata_dir / (prefix + _hash_of(fresh))
            try:
                os.rename(fresh, cached)
            except OSError:
                if not cached.is_dir():  # otherwise another process was faster
                    raise
                shutil.rmtree(fresh)
        return cached

    def state_dict(
        self, names: Sequence[str], first_block: int, model: "PreTrainedModel", form: WeightForm
    ) -> dict[str, Any]:
        """Tensors that transformers converts from gguf's layout. They are dequantised, unless they stay packed and only the order of their rows changes."""
        import numpy as np
        import torch
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        from swarmnet_protocols.models.checkpoints.expert_weights import ExpertReader
        from swarmnet_protocols.quantization.packed_linear import packable_weight
        from swarmnet_protocols.quantization.quantize import quantize_if_wanted

        quantized = form.quantized
        if self._architecture == gguf_gpt_oss.ARCHITECTURE:
            processor: Any = gguf_gpt_oss.GptOssTensors()
        else:
            make = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)
            processor = make(config=model.config.to_dict())
        hf_names = get_gguf_hf_weights_map(_Names(model), processor)
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        places = form.places
        if places is None:
            places = self.expert_places(names, first_block, model) if form.packed or form.experts else {}
        reader = ExpertReader(places, _NAMING.block_of, form.experts, form.device)
        with self.path.open("rb") as file:
            for name in names:
                tensor = self._tensors[name]
                if name in places:
                    reader.read(name, partial(self._expert, file, name, places[name].weight, quantized))
                    continue
                file.seek(tensor.offset)
                raw = _read_bytes(file, tensor.size_bytes, name)
                rows = raw.reshape(*tensor.shape[:-1], -1)
                if form.packed and (matrix := _packed(tensor, rows)) is not None:
                    hf_name, order = _row_order(processor, name, len(rows), first_block, hf_names)
                    if order is not None and (own_name := packable_weight(model, hf_name)) is not None:
                        rounded = quantize_if_wanted(matrix.select(order), quantized, own_name)
                        parsed["tensors"][own_name] = rounded.loaded(form.device)
                        continue
                result = processor.process(
                    weights=self._dequantized(name, rows),
                    name=_NAMING.renumbered(name, first_block),
                    tensor_key_mapping=hf_names,
                    parsed_parameters=parsed,
                )
                if result.name in hf_names:
                    # Dequantised weights are new arrays; others are read-only views of the bytes that were read.
                    own = np.require(result.weights, requirements=["C_CONTIGUOUS", "WRITEABLE"])
                    parsed["tensors"][hf_names[result.name]] = torch.from_numpy(own)
        return parsed["tensors"] | reader.finish()

    def expert_places(
        self, names: Iterable[str], first_block: int, model: "PreTrainedModel"
    ) -> "dict[str, ExpertPlace]":
        from swarmnet_protocols.models.checkpoints.expert_weights import ExpertPlaces

        places, found = ExpertPlaces(model), {}
        for name in names:
            match = _EXPERTS.match(name)
            if match and (place := places.of_gguf(int(match[1]) - first_block, match[2])) is not None:
                shape = self._tensors[name].shape
                if len(shape) != 3 or shape[0] != place.count:
                    raise IntegrityError(f"{self.path}: {name} is no tensor of {place.count} experts")
                found[name] = place
        return found

    def _expert(
        self, file: BinaryIO, name: str, weight: str, quantized: "Precision | None", index: slice
    ) -> "PackedTensor":
        """The matrix of one expert in a merged tensor. Formats without a packed product are dequantised to float32."""
        import torch

        from swarmnet_protocols.quantization.formats import Format
        from swarmnet_protocols.quantization.packed_tensor import PackedTensor
        from swarmnet_protocols.quantization.quantize import quantize_if_wanted

        tensor = self._tensors[name]
        size = tensor.size_bytes // tensor.shape[0]
        file.seek(tensor.offset + index.start * size)
        rows = _read_bytes(file, size, name).reshape(tensor.shape[1], -1)
        matrix = _packed(GgufTensor(tensor.shape[1:], tensor.type, 0, size), rows)
        if matrix is None:
            numbers = torch.from_numpy(self._dequantized(name, rows)).contiguous()
            matrix = PackedTensor.of(Format.F32, numbers.view(torch.uint8))
        return quantize_if_wanted(matrix, quantized, weight)

    def _dequantized(self, name: str, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """The weights in float32. Raises ``ConfigError`` for a format that gguf's Python code does not read."""
        from gguf import GGMLQuantizationType, dequantize

        try:
            found: np.ndarray[Any, Any] = dequantize(rows, GGMLQuantizationType(self._tensors[name].type))
        except NotImplementedError as error:
            raise ConfigError(f"{self.path}: tensor {name} has a quantisation that is not read") from error
        return found


def _read_bytes(file: BinaryIO, size: int, name: str) -> "np.ndarray[Any, Any]":
    """The next bytes of a file, part of the tensor ``name``. Raises ``IntegrityError`` if it ends before."""
    import numpy as np

    data = np.empty(size, np.uint8)
    if file.readinto(data.data) != size:  # type: ignore[attr-defined]
        raise IntegrityError(f"{file.name} is truncated within tensor {name}")
    return data


def _packed(tensor: GgufTensor, rows: "np.ndarray[Any, Any]") -> "PackedTensor | None":
    """A matrix as it is stored, from its bytes [rows, bytes of a row]; None for a tensor that is no matrix of a packed format."""
    import numpy as np
    import torch

    from swarmnet_protocols.quantization.formats import Format
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor

    if len(tensor.shape) != 2 or tensor.type not in {*Format}:
        return None
    return PackedTensor.of(Format(tensor.type), torch.from_numpy(np.require(rows, requirements=["W"])))


def _row_order(
    processor: Any, name: str, rows: int, first_block: int, hf_names: dict[str, str]
) -> "tuple[str, torch.Tensor | None]":
    """transformers' name of a matrix, and for each of its rows the row in the file; None if transformers changes more than the order of rows.

    The order is found by converting a matrix of one column whose values are the numbers of its rows.
    """
    import numpy as np
    import torch

    numbers = np.arange(rows, dtype=np.float64)[:, None]
    parsed: dict[str, dict[str, Any]] = {"tensors": {}}
    try:
        result = processor.process(
            weights=numbers,
            name=_NAMING.renumbered(name, first_block),
            tensor_key_mapping=hf_names,
            parsed_parameters=parsed,
        )
    except CONFIG_FAULTS:  # the conversion needs the real values
        return "", None
    order = np.asarray(result.weights)
    if result.name not in hf_names or order.shape != numbers.shape or parsed["tensors"]:
        return "", None
    if not np.array_equal(np.sort(order, 0), numbers):
        return "", None
    return hf_names[result.name], torch.from_numpy(order[:, 0].astype(np.int64))


def _hash_of(folder: Path) -> str:
    """32 hexadecimal digits: a hash of the names and contents of a directory's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(hashlib.sha256(path.name.encode()).digest() + sha256_of(path, None))
    return digest.hexdigest()[:32]
