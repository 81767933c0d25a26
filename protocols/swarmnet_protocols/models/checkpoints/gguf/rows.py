"""The type of a row of ``ARCHITECTURES``, and values that many rows share."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.gguf.header import Field
from swarmnet_protocols.models.manifest import MAX_BLOCKS

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

HINT = "use the model's Hugging Face layout"
_AHEAD = re.compile(r"blk\.(\d{1,9})\.nextn\.eh_proj\.weight")


@dataclass(frozen=True)
class Header:
    """The header of a gguf file: its metadata, and the shapes of its tensors."""

    fields: Mapping[str, Field]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture", ""))

    @property
    def own(self) -> dict[str, Any]:
        """The values of keys that begin with the architecture's name, by key without that name. A
        list of equal numbers becomes that number."""
        prefix = f"{self.architecture}."
        return {
            key.removeprefix(prefix): _merged(value)
            for key, value in self.fields.items()
            if key.startswith(prefix)
        }

    @property
    def blocks(self) -> range:
        """The blocks of the model. Further blocks, which predict several tokens ahead, are left
        out: answers do not need them.

        Raises ``ValueError`` if the number is out of range.
        """
        count = self.own["block_count"] - self.own.get("nextn_predict_layers", 0)
        if not 0 < count <= MAX_BLOCKS:
            raise ValueError(f"block_count - nextn_predict_layers is {count}, which is out of range")
        return range(count)

    @property
    def blocks_ahead(self) -> set[int]:
        """The blocks that predict several tokens ahead."""
        count, end = self.own.get("nextn_predict_layers", 0), self.own.get("block_count", 0)
        if not count or not isinstance(count, int) or not isinstance(end, int):
            return set()
        found = (_AHEAD.fullmatch(name) for name in self.shapes)
        return {int(match[1]) for match in found if match and end - count <= int(match[1]) < end}

    @property
    def head_size(self) -> int:
        own = self.own
        return int(own.get("attention.key_length", own["embedding_length"] // own["attention.head_count"]))

    def has(self, name: str) -> bool:
        """Return whether any block has a tensor of this name."""
        return any(f"blk.{block}.{name}" in self.shapes for block in self.blocks)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in the first block that has it, or (0,) if none has it."""
        found = (self.shapes.get(f"blk.{block}.{name}") for block in self.blocks)
        return next(filter(None, found), (0,))


def _merged(value: Field) -> Field:
    """Return the number in a list whose numbers are all equal. Return any other value unchanged."""
    same = isinstance(value, tuple) and len({*value}) == 1 and not isinstance(value[0], bool)
    return value[0] if same and isinstance(value, tuple) else value


Setting = Callable[[Header], Any]
LEFT_OUT = object()
"""The value of a setting that a row gives only for some files. For other files, the row counts as
if it did not name the setting."""
_REQUIRED = object()


def key(name: str, default: Any = _REQUIRED) -> Setting:
    """Return a function for the value of a key. Without a default, a file without the key is
    refused."""
    return lambda header: header.own[name] if default is _REQUIRED else header.own.get(name, default)


def needs(tensor: str, setting: Setting) -> Setting:
    """Return a function for a setting of files that have a tensor. Other files are refused."""

    def checked(header: Header) -> Any:
        if tensor not in header.shapes:
            raise ConfigError(f"the file has no tensor {tensor}", hint=HINT)
        return setting(header)

    return checked


@dataclass(frozen=True)
class Weight:
    """The recipe of a weight of transformers from tensors of a block."""

    tensors: tuple[str, ...] = ()
    """Names of tensors within the block, with endings such as ``.weight``. Empty: the usual name in
    llama.cpp."""
    made: "Callable[..., Array] | None" = None
    """Makes the weight. Its arguments are the config, then the values of each tensor. None: the
    values are the weight.

    A matrix stays packed if ``made`` only chooses rows of its tensors, or changes the order of
    columns.
    """


@dataclass(frozen=True)
class Architecture:
    """One architecture of gguf files."""

    model_type: str | Callable[[Header], str]
    """The name of transformers' config class."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config: values, or functions of the header. ``LEFT_OUT``: as in other
    architectures."""
    weights: Mapping[str, Weight] = field(default_factory=dict)
    """Weights that are made in a special way. Keys are regular expressions for transformers' names
    within a layer, without ``.weight`` and ``.bias``; the first that matches applies."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the rotary embedding other than its base; values as in ``settings``."""
    yarn: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of yarn that only this architecture has; values as in ``settings``."""


def _rotated_share(header: Header) -> float:
    """Return the part of each head that rotary embeddings change."""
    size = header.head_size
    return float(header.own.get("rope.dimension_count", size) / size)


ROTATES_PART = {"partial_rotary_factor": _rotated_share}
NORMS_PLUS_ONE = {r".*norm": Weight(made=lambda _, values: values - 1)}
"""transformers adds 1 to the weights of these norms. Files hold the sum."""
BIASES = {
    "attention_bias": lambda header: header.has("attn_output.bias"),
    "mlp_bias": lambda header: header.has("ffn_down.bias"),
}
