"""The interface of a model's files on disk, and hashing of files.

Safetensors directories and gguf files implement it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.fetching.hub_files import HubFiles, Known
from swarmnet_protocols.fetching.pieces import Hasher, Layout, Progress
from swarmnet_protocols.models.llama_shape import EmptyModel

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swarmnet_protocols.models.checkpoints.expert_weights import ChosenExperts, ExpertPlace
    from swarmnet_protocols.quantization.formats import Precision
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor
    from swarmnet_protocols.quantization.products import Products

_CHUNK_BYTES = 1 << 20

CONFIG_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError)
"""Exceptions that transformers raises for a config that describes no model. RuntimeError includes
NotImplementedError."""


@dataclass(frozen=True)
class BlockNaming:
    """The names of a block's tensors in a checkpoint.

    - ``pattern``: its groups are the text before the block's number, the number, and the rest.
    - ``renames``: maps prefixes of tensor names to transformers' prefixes; the first match applies.
      A tensor without such a prefix does not belong to the language model but, say, to a vision
      tower. None: names stay as they are, and all tensors belong to the language model.
    """

    pattern: re.Pattern[str]
    renames: Mapping[str, str] | None = None

    def is_of_language_model(self, tensor_name: str) -> bool:
        """Return whether the tensor is part of the language model."""
        return self.renames is None or self._prefix_of(tensor_name) is not None

    def block_of(self, tensor_name: str) -> int | None:
        """Return the block that a tensor belongs to; None for the local layers."""
        match = self.pattern.match(tensor_name)
        return int(match[2]) if match else None

    def renumbered(self, tensor_name: str, first_block: int) -> str:
        """Return the name in transformers, with blocks numbered from ``first_block``."""
        name = self.pattern.sub(
            lambda match: f"{match[1]}{int(match[2]) - first_block}{match[3]}", tensor_name
        )
        prefix = self._prefix_of(name)
        return name if prefix is None or self.renames is None else self.renames[prefix] + name[len(prefix) :]

    def _prefix_of(self, tensor_name: str) -> str | None:
        return next((prefix for prefix in self.renames or () if tensor_name.startswith(prefix)), None)


@dataclass(frozen=True)
class WeightForm:
    """The form in which weights are read."""

    device: "torch.device"
    """The device that receives packed weights one by one as they are read.

    An accelerator gets 16-bit weights as ordinary tensors.
    """
    packed: bool = False
    """True if weights stay packed, if transformers does not change their values.

    This holds for quantised and 16-bit weights of linear modules, embeddings and experts.
    """
    quantized: "Precision | None" = None
    """The precision that packed weights of 16 and 32 bits are rounded to, if ``can_be_quantized``
    accepts them."""
    experts: "ChosenExperts" = field(default_factory=dict)
    """The experts to read, by block. Blocks that are not listed are read with all experts.

    If not empty, experts are read one by one, packed or not.
    """
    places: "Mapping[str, ExpertPlace] | None" = None
    """The places of the tensors with weights of experts, or None if unknown.

    Finding them takes longer than reading a small expert.
    """
    products: "Products | None" = None
    """Multiplies with the packed weights. None if torch alone does."""

    def rounded(self, matrix: "PackedTensor", weight: str) -> "PackedTensor":
        """Return ``matrix``, the weight with this name, quantised if ``quantized`` says so and
        ``can_be_quantized`` holds."""
        if self.quantized is None:
            return matrix
        from swarmnet_protocols.quantization.quantize import can_be_quantized, quantize

        if not can_be_quantized(matrix):
            return matrix
        return quantize(matrix, self.quantized.format_of(weight, matrix.shape[1]))

    def loaded(self, matrix: "PackedTensor") -> "PackedTensor | torch.Tensor":
        """Return ``matrix`` on ``device``, in the form that ``products`` multiplies there.

        ``matrix`` must not be used again: its rows may be interleaved where they are.
        """
        from swarmnet_protocols.quantization.products import Products

        return (self.products or Products(None)).loaded(matrix, self.device)


@dataclass(frozen=True)
class WeightSizes:
    """The bytes of some tensors, in the files and in memory."""

    stored_bytes: int = 0
    expanded_bytes: int = 0
    """Bytes, in the files, of tensors without a packed format. Loading expands these tensors."""
    expanded_weights: int = 0
    """The number of weights in these tensors."""
    formats: tuple[str, ...] = ()
    """The names of their formats."""

    def in_memory(self, item_bytes: int) -> int:
        """Return the bytes of all tensors in memory, where an expanded weight has
        ``item_bytes``."""
        return self.stored_bytes - self.expanded_bytes + self.expanded_weights * item_bytes

    def notice(self, of: str, dtype: Any) -> str:
        """Return a sentence on the memory that ``of`` (a plural noun) take. Empty if nothing is
        expanded.

        ``dtype``: what they are computed in, a dtype of torch or an ``ElementType``.
        """
        if not self.formats:
            return ""
        names = f"{', '.join(self.formats)} {'is' if len(self.formats) == 1 else 'are'}"
        took, stored = _size(self.in_memory(dtype.itemsize)), _size(self.stored_bytes)
        kind = str(dtype).removeprefix("torch.")
        return f"{names} computed in {kind}: {of} take {took} of memory instead of {stored}"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


class Builder(Protocol):
    """Builds a model of transformers (``ModelBuilder``)."""

    def empty(self) -> Any:
        """Return the model without values. Raises ``ConfigError`` if it cannot be built."""

    def check(self, shapes: Mapping[str, Sequence[int]], *, are_all: bool) -> None:
        """Raise the error of loading tensors of these names and shapes. ``are_all``: there are no
        others, so that all weights of the model must be among them."""


class ModelCheckpoint(Protocol):
    """Weights, config and tokenizer of a model on disk.

    Headers are checked when it is opened; tensors are read one by one.
    """

    @property
    def root(self) -> Path:
        """The directory that the paths of ``files`` are relative to."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every file of the model, even if it is not on disk yet."""

    @property
    def known(self) -> Known:
        """Files whose size and hash the hub, or a manifest from peers, has listed. They may not be
        on disk yet."""

    @property
    def hub(self) -> "HubFiles | None":
        """The source of the files in ``known``. None if they cannot be fetched."""

    def path_of(self, file: str) -> Path:
        """Return the path of a file. It may be on disk as a whole or in pieces."""

    def layout(self, file: str) -> Layout:
        """Return where the tensors of a file are, from its header. The header must be on disk.
        Raises ``IntegrityError`` if it is damaged."""

    def fetch(self, files: Iterable[str]) -> None:
        """Download the given files unless they are on disk as a whole.

        Raises ``Unreachable``, ``OutOfResources`` or ``IntegrityError``.
        """

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """The tensors of the language model, without towers for images or sound."""

    @property
    def naming(self) -> BlockNaming: ...

    @property
    def precision(self) -> str:
        """The storage format of most weights of the blocks, in lower case: ``bf16``, ``q4_k``."""

    def holders(self, names: Iterable[str]) -> set[str]:
        """Return the files that contain these tensors."""

    def sizes(self, names: Iterable[str]) -> WeightSizes:
        """Return the sizes of these tensors, from headers alone. Empty if all of them stay
        packed."""

    @property
    def config_tensors(self) -> tuple[str, ...]:
        """Tensors whose values are part of the config."""

    def config(self, *, has_values: bool = True) -> "PretrainedConfig":
        """Return the config of the language model.

        ``has_values``: whether ``config_tensors`` are on disk. Without them, only sizes are right.
        """

    def settings(self) -> Mapping[str, Any]:
        """Return the settings of the config, by transformers' names, without transformers.

        Settings that the files leave to transformers are missing. ``config_tensors`` must be on
        disk.
        """

    def check_kind(self) -> None:
        """Raise ``ConfigError`` unless the files are a model for text. The error says what they
        are."""

    def check_complete(self, whole: "Builder") -> None:
        """Raise the error that loading would raise, as far as headers show it.

        Raises ``ConfigError`` for a tensor that the model would not use, or an unsupported
        tokenizer. Raises ``IntegrityError`` for a tensor that is missing or has another shape.
        ``whole`` builds the whole CausalLM.
        """

    def generation_config(self) -> "GenerationConfig | None":
        """Return the generation config of the checkpoint; None if it has none."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that the files name as ends of an answer.

        Ends in the config, the generation config and the tokenizer are left out.
        """

    def tokenizer(self) -> "PreTrainedTokenizerBase": ...

    def state_dict(
        self, names: Sequence[str], first_block: int, model: "PreTrainedModel | EmptyModel", form: WeightForm
    ) -> dict[str, Any]:
        """Return these tensors by transformers' names, with blocks numbered from ``first_block``.

        ``model`` will load them, and may be on the meta device. ``form`` says which weights stay
        packed: linear modules and embeddings become ``PackedTensor``, routed experts become
        ``ExpertMatrices``.
        """

    def expert_places(
        self, names: Iterable[str], first_block: int, model: "PreTrainedModel | EmptyModel"
    ) -> "dict[str, ExpertPlace]":
        """Return the place in ``model`` of each tensor with weights of routed experts. Others are
        left out.
        """


def packable_weight(model: "PreTrainedModel | EmptyModel", name: str) -> str | None:
    """Return the name in ``model`` of a weight that can be packed. None for other tensors.

    ``name`` is transformers' name in the whole model. In ``model`` it may lack the base model's
    prefix.
    """
    own = name.removeprefix(f"{model.base_model_prefix}.") if model.base_model is model else name
    if isinstance(model, EmptyModel):
        return own if model.has_matrix(own) else None
    from swarmnet_protocols.quantization.packed_linear import can_be_packed

    path = own.removesuffix(".weight")
    return own if path != own and can_be_packed(dict(model.named_modules()).get(path)) else None


def sha256_of(path: Path, progress: Progress | None) -> bytes:
    """Return the SHA-256 of a file. Raises ``IntegrityError`` if it cannot be read."""
    return hash_pieces(path, (), progress).sha256


def hash_pieces(path: Path, starts: Sequence[int], progress: Progress | None) -> Hasher:
    """Hash a file as a whole and by the pieces that begin at ``starts``. Raises ``IntegrityError``
    if it cannot be read."""
    hasher = Hasher(starts)
    try:
        total = path.stat().st_size
        done = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                hasher.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(f"checking {path.name}", done, total)
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    return hasher
