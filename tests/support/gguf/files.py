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


TEXT = "".join(chr(33 + index) for index in range(80)) + '!!" 1<end><turn>'
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}!{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def tokenizer(size: int) -> dict[str, Key]:
    """Return the keys of a tokenizer of so many tokens, whose ids for ``TEXT`` depend on each of
    them."""
    words = ["!!", '!"', "\u01201", "\u0120", "<end>", "<turn>"]
    tokens = [*(chr(33 + index) for index in range(size - len(words))), *words]
    found: dict[str, Any] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * (size - 2) + [3, 4],
        "merges": ["! !", '! "', "\u0120 1"], "bos_token_id": 3, "eos_token_id": size - 2, "eot_token_id": 5,
        "add_bos_token": True,
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{name}": _key(value) for name, value in found.items()}
    return keys | {"tokenizer.chat_template": _key(_TEMPLATE), "general.name": _key("a model")}


def _key(value: Any) -> Key:
    kinds = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    if isinstance(value, list):
        kind = GGUFValueType.INT32 if isinstance(value[0], int) else kinds[type(value[0])]
        return Key(value, GGUFValueType.ARRAY, kind)
    return Key(value, kinds[type(value)])
