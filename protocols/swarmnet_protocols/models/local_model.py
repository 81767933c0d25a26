"""Models on disk: loads blocks, local layers or the whole with transformers.

Hashes are checked before a file is read.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import ModelFile, Progress, listing_hash
from swarmnet_protocols.machine.devices import CPU
from swarmnet_protocols.machine.lean_imports import import_transformers, import_transformers_if_used
from swarmnet_protocols.models.checkpoints.checkpoint import (
    ModelCheckpoint,
    WeightForm,
    WeightSizes,
    sha256_of,
)
from swarmnet_protocols.models.checkpoints.safetensors_header import StoredTensor
from swarmnet_protocols.models.llama_shape import EmptyModel, LlamaShape
from swarmnet_protocols.models.manifest import MAX_BLOCKS, MAX_HIDDEN_SIZE, BlockKey, Manifest
from swarmnet_protocols.models.parts import Parts, Slices
from swarmnet_protocols.models.shared_weights import SharedWeights
from swarmnet_protocols.models.sizes import LayerWidths, max_positions
from swarmnet_protocols.models.text.vocabulary import Vocabulary, cached_vocabulary

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swarmnet_protocols.arrays import Array
    from swarmnet_protocols.models.checkpoints.expert_weights import ChosenExperts
    from swarmnet_protocols.models.partial_model import ModelBuilder
    from swarmnet_protocols.quantization.formats import Precision
    from swarmnet_protocols.quantization.packed_experts import ExpertMatrices
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor
    from swarmnet_protocols.quantization.products import Products

CHECKS = 1
"""Version of the checks in ``make_manifest``. Raise it with every change that refuses more files.
Files that passed older checks are then checked again."""


class LocalModel:
    """A model whose files are on disk, or are fetched when a part that needs them is loaded.

    Loaded modules are in evaluation mode and require no gradients. A file is hashed before its
    first read, and again only after it has changed. Every method raises ``IntegrityError``, which
    names the file, if a file or a piece does not have its hash.
    """

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        path: Path,
        checkpoint: ModelCheckpoint,
        *,
        cache_dir: Path,
        progress: Progress | None = None,
    ) -> None:
        """``cache_dir``: the folder for files that are derived from models."""
        self.name = name
        self.manifest = manifest
        self.path = path
        self.cache_dir = cache_dir
        self._checkpoint = checkpoint
        self.parts = Parts(manifest.hash, checkpoint, cache_dir, progress)
        """Fetches the pieces of files that are not whole on this machine."""

    @cached_property
    def config(self) -> "PretrainedConfig":
        """The transformers config of the whole model."""
        self._check(self._checkpoint.config_tensors)
        return self._checkpoint.config()

    @cached_property
    def llama_shape(self) -> LlamaShape | None:
        """The sizes of a model of the Llama shape, known without transformers. None for others."""
        self._check(self._checkpoint.config_tensors)
        return LlamaShape.of(self._checkpoint.settings())

    @property
    def max_positions(self) -> int:
        """Positions that a sequence may have."""
        return max_positions(self.llama_shape or self.config)

    @property
    def widths(self) -> LayerWidths:
        """Widths of the layers."""
        return LayerWidths.of(self.llama_shape or self.config)

    @property
    def precision(self) -> str:
        """The storage format of most weights of the blocks: ``bf16``, ``q4_k``."""
        return self._checkpoint.precision

    def sizes(self, *blocks: BlockKey) -> WeightSizes:
        """Return the sizes of the tensors of some blocks, or of the local layers, before any is
        loaded."""
        return self._checkpoint.sizes(name for block in blocks for name in self.manifest.tensors[block])

    def largest_block(self, start: int, end: int) -> int:
        """Return the block of [start, end) that takes the most memory on a CPU; of several, the
        first.

        In files that mix formats, blocks differ in size, and some formats are expanded.
        """
        return max(range(start, end), key=lambda block: self.sizes(block).in_memory(4))

    def fetch(self) -> None:
        """Download every file that is not on this machine as a whole. Raises ``Unreachable``,
        ``OutOfResources`` or ``IntegrityError``."""
        self._check(self._checkpoint.tensor_names)

    @property
    def is_whole(self) -> bool:
        """True if every file is on this machine as a whole."""
        return not self.parts.partial()

    @property
    def present_files(self) -> tuple[ModelFile, ...]:
        """The files that are wholly or partly on this machine, or cannot be fetched from the
        hub."""
        return tuple(
            file
            for file in self.manifest.files
            if file.name not in self._checkpoint.known or self._checkpoint.path_of(file.name).is_file()
        )

    @property
    def size_on_disk(self) -> int:
        """Bytes of the model that are on this machine."""
        partial = self._partial_files
        return sum(
            partial[file.name].size_on_disk if file.name in partial else file.size
            for file in self.present_files
        )

    @property
    def _partial_files(self) -> dict[str, PieceFile]:
        hub = self._checkpoint.hub
        return {name: hub.partial(name) for name in self.parts.partial()} if hub is not None else {}

    @property
    def pieces_hash(self) -> bytes | None:
        """The pieces hash of the model; None while the table of a file is not known here."""
        listing = self.parts.tables.listing(self.manifest.hash, self.manifest.files)
        return listing_hash(listing) if listing else None

    def shared(self) -> "SharedWeights":
        """Return the weights that are on this machine and verified, to be served to peers."""
        return SharedWeights(self.manifest, self._checkpoint, self.parts)

    def verify(self, progress: Progress | None = None) -> None:
        """Hash again every file on this machine, or the pieces of it that are here.

        Pieces that have changed are forgotten, and fetched again when needed.
        """
        partial = self._partial_files
        for file in self.present_files:
            if file.name in partial:
                self.parts.verified.check_pieces_again(partial[file.name], progress)
            else:
                self.parts.verified.check_again(file, progress)

    def _check(self, tensors: Sequence[str], slices: Slices | None = None) -> None:
        """Fetch the missing pieces of these tensors, or only of their ``slices``.

        Hash once each file that contains them, and each file without tensors.
        """
        slices = slices or {}
        tensors = [name for name in tensors if name not in slices or slices[name][1]]
        partial = {each.file.name for each in self.parts.fetch(tensors, slices)}
        wanted = self._checkpoint.holders(tensors) - partial
        for file in self.manifest.files:
            if file.name in wanted or file.name not in self._weight_files:
                self.parts.verified.check(file)

    @cached_property
    def _weight_files(self) -> set[str]:
        return self._checkpoint.holders(self._checkpoint.tensor_names)

    def _state_dict(
        self, names: Sequence[str], first_block: int, model: "PreTrainedModel | EmptyModel", form: WeightForm
    ) -> dict[str, Any]:
        slices: Slices = {}
        if form.experts:
            from swarmnet_protocols.models.checkpoints.expert_weights import wanted_slices

            places = form.places
            if places is None:
                places = self._checkpoint.expert_places(names, first_block, model)
                form = replace(form, places=places)
            slices = wanted_slices(places, self._checkpoint.naming.block_of, form.experts)
        self._check(names, slices)
        form = replace(form, products=self._products(form))
        return self._checkpoint.state_dict(names, first_block, model, form)

    def _products(self, form: WeightForm) -> "Products | None":
        """Return the products for packed weights, or None if ``form`` packs nothing."""
        from swarmnet_protocols.quantization.products import load_products

        return load_products(self.cache_dir) if form.packed or form.experts else None

    def load_ends(self) -> Mapping[str, Any] | None:
        """Load ``embed``, ``norm`` and ``head`` of a model with a ``llama_shape``, without torch.

        These are the embeddings, the final norm and lm_head. Matrices are packed, and the norm is
        float32. None for a model of another shape, or if files and settings disagree on whether
        lm_head is the embeddings. Raises ``IntegrityError`` for a weight that is missing or has
        another shape.
        """
        shape, settings = self.llama_shape, self._checkpoint.settings()
        size = settings.get("vocab_size")
        if shape is None or not isinstance(size, int):
            return None
        ends = EmptyModel.ends(shape, size)
        form = WeightForm(CPU, packed=True)
        weights = self._state_dict(self.manifest.tensors["local_layers"], 0, ends, form)
        found = {name: _for_c(each) for name, each in weights.items()}
        is_tied = "lm_head.weight" not in found
        if not is_tied and settings.get("tie_word_embeddings"):
            return None
        if is_tied:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        ends.check(found, f"the embeddings and the head of {self.name}")
        names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
        return {name: found[f"{own}.weight"] for name, own in names.items()}

    def load_span(  # noqa: PLR0913 - a part, and how to load it
        self,
        start: int,
        end: int,
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        packed: bool = False,
        quantized: "Precision | None" = None,
        experts: "ChosenExperts | None" = None,
    ) -> "nn.Module":
        """Load the decoder stack of blocks [start, end), without embeddings and final norm.

        Layers are numbered from 0. Only tensors of these blocks are read.

        - ``packed``: quantised and 16-bit weights of linear modules and experts stay as they are
          stored, in ``PackedLinear`` and ``PackedExperts``.
        - ``quantized``: weights of 16 and 32 bits in these modules are rounded to this precision.
        - ``experts``: for each listed block, fetch and load only these routed experts. Computing
          another one raises ``LookupError``.

        Raises ``ConfigError`` if the model has no such blocks.
        """
        from swarmnet_protocols.models.partial_model import build_span

        names = self._tensors_of(start, end)
        form = WeightForm(device, packed, quantized, experts or {})
        builder = build_span(self.config, start, end)
        span: nn.Module = self._load(builder, lambda _: names, start, form, dtype)
        return span

    def load_layers(
        self, start: int, end: int, *, device: "torch.device", quantized: "Precision | None" = None
    ) -> "Mapping[str, PackedTensor | Array]":
        """Load the weights of blocks [start, end) of a model with a ``llama_shape``.

        Names are those of transformers' decoder stack, with layers numbered from 0. Matrices are
        packed, as in ``load_span``; norms and biases are float32. Raises ``ConfigError`` if the
        model has no such blocks or a tensor is not used, and ``IntegrityError`` if a weight is
        missing or has another shape.
        """
        shape = self.llama_shape
        if shape is None:
            raise ConfigError(f"the layers of {self.name} have another shape")
        form = WeightForm(device, packed=True, quantized=quantized)
        stack = EmptyModel.stack(shape, end - start)
        weights = self._state_dict(self._tensors_of(start, end), start, stack, form)
        found = {name.removeprefix("model."): _for_c(each) for name, each in weights.items()}
        stack.check(found, f"blocks {start}:{end} of {self.name}")
        return {name: found[name] for name in stack.state_dict().keys() & found.keys()}

    def _tensors_of(self, start: int, end: int) -> list[str]:
        """Return the tensors of blocks [start, end). Raises ``ConfigError`` if the model has no
        such blocks."""
        if not 0 <= start < end <= self.manifest.blocks:
            raise ConfigError(
                f"{self.name} has no blocks {start}:{end}", hint=f"its blocks are 0:{self.manifest.blocks}"
            )
        return [name for block in range(start, end) for name in self.manifest.tensors[block]]

    def load_experts(
        self,
        block: int,
        experts: Collection[int],
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        quantized: "Precision | None" = None,
    ) -> "nn.Module":
        """Load the module of routed experts of one block, with these experts only, for
        ``compute_expert``.

        No other tensor of the block is fetched or loaded. Matrices stay as they are stored, or are
        rounded as in ``load_span``. Raises ``ConfigError`` if the block has no such experts.
        """
        from swarmnet_protocols.models.checkpoints.conversion import experts_modules
        from swarmnet_protocols.models.partial_model import build_experts

        if not 0 <= block < self.manifest.blocks:
            raise ConfigError(
                f"{self.name} has no block {block}", hint=f"its blocks are 0 to {self.manifest.blocks - 1}"
            )
        form = WeightForm(device, packed=True, quantized=quantized, experts={block: experts})
        builder = build_experts(self.config, block)
        model = self._load(builder, lambda model: self._experts_tensors(block, model), block, form, dtype)
        [(_, found)] = experts_modules(model)
        module: nn.Module = found
        if unknown := set(experts) - {*range(found.num_experts)}:
            raise ConfigError(
                f"block {block} of {self.name} has no expert {min(unknown)}",
                hint=f"its experts are 0 to {found.num_experts - 1}",
            )
        return module

    def expert_reader(
        self, block: int, *, device: "torch.device", quantized: "Precision | None" = None
    ) -> "Callable[[Collection[int]], Mapping[str, ExpertMatrices]]":
        """Return a function that reads matrices of routed experts of one block, by weight name
        (``down_proj``).

        For experts that are read again and again: the work that all reads share is done here.
        Raises ``ConfigError`` as ``load_experts`` does. The function raises ``IntegrityError``, and
        the errors of fetching.
        """
        from swarmnet_protocols.models.partial_model import build_experts

        model: Any = build_experts(self.config, block).empty()
        names = self._experts_tensors(block, model)
        places = self._checkpoint.expert_places(names, block, model)

        def read(experts: "Collection[int]") -> "Mapping[str, ExpertMatrices]":
            own = {name: place for name, place in places.items() if place.has(experts)}
            wanted = list(own)
            form = WeightForm(device, packed=True, quantized=quantized, experts={block: experts}, places=own)
            found = self._state_dict(wanted, block, model, form)
            return {name.rpartition(".")[2]: matrices for name, matrices in found.items()}

        return read

    def expert_counts(self) -> dict[int, int]:
        """Return the number of routed experts of each block that has some."""
        if self.llama_shape is not None:
            return {}
        from swarmnet_protocols.models.partial_model import expert_counts

        return expert_counts(self.config)

    def _experts_tensors(self, block: int, model: "PreTrainedModel") -> list[str]:
        """Return the tensors of the routed experts of a block: matrices and, if there are any,
        biases and norms."""
        names = self.manifest.tensors[block]
        places = self._checkpoint.expert_places(names, block, model)
        return [name for name in names if name in places or ".experts." in name or "_exps." in name]

    def load_local_layers(
        self,
        stand_ins: "Callable[[nn.ModuleList], nn.ModuleList]",
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        labels: int | None = None,
        packed: bool = False,
        is_trained: bool = False,
    ) -> "PreTrainedModel":
        """Load the CausalLM with embeddings, norm and head; ``stand_ins`` replaces its layers.

        - ``stand_ins``: called with the model's own layers on the meta device. Returns the layers
          to use.
        - ``labels``: load the architecture's sequence classifier of this many classes instead. A
          head that the checkpoint lacks is initialised.
        - ``packed``: as in ``load_span``. Packed embeddings and heads have no ``weight`` and cannot
          be trained. Otherwise both have dense weights, and in float32 on the CPU lm_head is a
          ``PackedHead`` where possible, unless ``is_trained``.

        Raises ``ConfigError`` if transformers has no such class.
        """
        import torch
        from torch import nn

        from swarmnet_protocols.models.partial_model import build_local_layers
        from swarmnet_protocols.quantization.packed_head import pack_head
        from swarmnet_protocols.quantization.packed_tensor import PackedTensor
        from swarmnet_protocols.quantization.products import load_products

        config = self.config
        if labels is not None:
            config = copy.deepcopy(config)
            config.num_labels = labels
        layers: list[nn.ModuleList] = []
        products = load_products(self.cache_dir)
        stored: dict[str, PackedTensor] = {}
        is_float32 = device.type == "cpu" and dtype == torch.float32 and not is_trained
        form = WeightForm(device, packed or is_float32)

        def weights(model: "PreTrainedModel") -> dict[str, Any]:
            found = self._state_dict(self.manifest.tensors["local_layers"], 0, model, form)
            if not packed:
                stored.update((name, each) for name, each in found.items() if isinstance(each, PackedTensor))
            return found | {name: products.dequantize(each) for name, each in stored.items()}

        builder = build_local_layers(config, layers.append, labels=labels)
        model: Any = builder.load(weights, dtype=dtype, device=device, products=products)
        pack_head(model, stored, products)
        model.base_model.layers = stand_ins(layers[-1])
        model.config.max_position_embeddings = self.max_positions
        self._set_generation_config(model)
        return model

    def load_whole(
        self,
        *,
        dtype: "torch.dtype",
        device: "torch.device",
        packed: bool = False,
        quantized: "Precision | None" = None,
    ) -> "PreTrainedModel":
        """Return the whole CausalLM, as transformers loads it. ``packed`` and ``quantized`` are as
        in ``load_span``."""
        from swarmnet_protocols.models.partial_model import build_whole

        names, form = self._checkpoint.tensor_names, WeightForm(device, packed, quantized)
        model = self._load(build_whole(self.config), lambda _: names, 0, form, dtype)
        self._set_generation_config(model)
        return model

    def whole_bytes(self, quantized: "Precision | None" = None) -> int:
        """Return the bytes of the whole packed model on a CPU, before any weight is read.

        ``quantized`` is as in ``load_span``.
        """
        from swarmnet_protocols.models.partial_model import build_whole

        if quantized is None:
            stored = sum(file.size for file in self.manifest.files if file.name in self._weight_files)
            sizes = self._checkpoint.sizes(self._checkpoint.tensor_names)
            return stored + sizes.in_memory(4) - sizes.stored_bytes
        weights = build_whole(self.config).empty().named_parameters()
        return sum(quantized.bytes_of(name, weight.shape) for name, weight in weights)

    def _load(
        self,
        builder: "ModelBuilder",
        names_for: "Callable[[PreTrainedModel], Sequence[str]]",
        first_block: int,
        form: WeightForm,
        dtype: "torch.dtype",
    ) -> Any:
        """Load a part. ``names_for`` returns the tensors that the empty model needs."""
        return builder.load(
            lambda model: self._state_dict(names_for(model), first_block, model, form),
            dtype=dtype,
            device=form.device,
            products=self._products(form),
        )

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the model's tokenizer with its chat template."""
        self._check(())
        return self._checkpoint.tokenizer()

    def vocabulary(self) -> Vocabulary:
        """Return the model's tokenizer and the tokens that end an answer.

        transformers is imported only the first time: what it makes of the files is cached.
        """

        def make() -> Vocabulary:
            import_transformers()
            tokenizer, stated = self.tokenizer(), self._checkpoint.generation_config()
            is_sampled = stated is not None and stated.do_sample
            found = {name: getattr(stated, name, None) for name in ("temperature", "top_p") if is_sampled}
            sampling = {name: float(value) for name, value in found.items() if value is not None}
            return Vocabulary(tokenizer, self.config.vocab_size, self.end_ids(tokenizer), sampling)

        self._check(())
        name = f"{self.manifest.hash.hex()[:32]}-{version('transformers')}.json"
        return cached_vocabulary(self.cache_dir / "vocabularies" / name, make)

    def end_ids(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer: one set for every program that
        generates. ``tokenizer`` is the model's own."""
        from swarmnet_protocols.models.text.end_tokens import end_ids

        generation, config = self._checkpoint.generation_config(), self.config
        stated = [config.eos_token_id, generation and generation.eos_token_id, *self._checkpoint.end_ids]
        return end_ids(tokenizer, stated, config.vocab_size)

    def _set_generation_config(self, model: Any) -> None:
        self._check(())
        stored = self._checkpoint.generation_config()
        if stored is not None:
            model.generation_config = stored


def make_manifest(
    checkpoint: ModelCheckpoint, progress: Progress | None, hashed: Iterable[ModelFile] = ()
) -> Manifest:
    """Check a checkpoint and make its manifest.

    Hashes every file whose hash is neither in ``hashed`` nor known to the checkpoint. Raises
    ``ConfigError`` or ``IntegrityError`` if the model would not use all of the files, or they do
    not fit together.
    """
    import_transformers_if_used()
    from swarmnet_protocols.models.partial_model import architecture_of, build_whole, decoder_stack

    checkpoint.check_kind()
    config = checkpoint.config(has_values=False)
    decoder_stack(config)
    blocks, hidden_size = config.num_hidden_layers, config.hidden_size
    if not 1 <= blocks <= MAX_BLOCKS or not 1 <= hidden_size <= MAX_HIDDEN_SIZE:
        raise ConfigError(f"{checkpoint.root}: {blocks} blocks of hidden size {hidden_size} are out of range")
    # Before a model is built: a config may claim any number of blocks.
    tensors = _by_block(checkpoint, blocks)
    checkpoint.check_complete(build_whole(config))
    known = {file.name: file for file in hashed}
    return Manifest(
        architecture=architecture_of(config),
        blocks=blocks,
        hidden_size=hidden_size,
        files=tuple(
            known.get(name) or _describe_file(checkpoint, name, progress) for name in checkpoint.files
        ),
        tensors=tensors,
    )


def _for_c(weight: "PackedTensor | Array | StoredTensor") -> "PackedTensor | Array":
    """Return a weight as C reads it: a packed matrix, or a vector of float32."""
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor

    if isinstance(weight, StoredTensor):
        weight = weight.float32()
    if isinstance(weight, PackedTensor) or weight.ndim != 2:
        return weight
    return PackedTensor.of_numbers(weight)


def _describe_file(checkpoint: ModelCheckpoint, name: str, progress: Progress | None) -> ModelFile:
    if name in checkpoint.known:
        return ModelFile(name, *checkpoint.known[name])
    path = checkpoint.path_of(name)
    return ModelFile(name, path.stat().st_size, sha256_of(path, progress))


def _by_block(checkpoint: ModelCheckpoint, blocks: int) -> dict[BlockKey, tuple[str, ...]]:
    tensors: dict[BlockKey, list[str]] = {"local_layers": [], **{block: [] for block in range(blocks)}}
    for name in checkpoint.tensor_names:
        block = checkpoint.naming.block_of(name)
        # Some checkpoints have blocks beyond the last, for multi-token prediction, which generation
        # does not use.
        if block is None or block < blocks:
            tensors["local_layers" if block is None else block].append(name)
    missing: Sequence[BlockKey] = [key for key, names in tensors.items() if not names]
    if missing:
        raise IntegrityError(
            f"{checkpoint.root}: the checkpoint has no tensors of block {missing[0]}, and num_hidden_layers is {blocks}"
        )
    return {key: tuple(names) for key, names in tensors.items()}
