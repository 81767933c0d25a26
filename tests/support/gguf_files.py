"""A gguf file in memory, to be changed and written again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType


@dataclass
class Key:
    """A value of the metadata; ``sub``: the type of an array's elements."""

    value: Any
    kind: GGUFValueType
    sub: GGUFValueType | None = None


@dataclass
class Tensor:
    """The bytes or numbers of a tensor, outermost dimension first."""

    data: Any
    kind: GGMLQuantizationType = GGMLQuantizationType.F32


@dataclass
class GgufFile:
    """The keys and tensors of a file, in their order."""

    architecture: str
    keys: dict[str, Key]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        reader = gguf.GGUFReader(path)
        keys = {}
        for name, field in reader.fields.items():
            if not name.startswith("GGUF."):
                sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                keys[name] = Key(field.contents(), field.types[0], sub)
        architecture = keys.pop("general.architecture").value
        tensors = {each.name: Tensor(np.array(each.data), each.tensor_type) for each in reader.tensors}
        return cls(architecture, keys, tensors)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for name, key in self.keys.items():
            writer.add_key_value(name, key.value, key.kind, sub_type=key.sub)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
