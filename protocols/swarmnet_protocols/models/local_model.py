"""Models on disk: loads blocks, local layers or the whole with transformers.

Hashes are checked before a file is read.
"""

import contextlib
import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.fetching.piece_file import PieceFile
from swarmnet_protocols.fetching.pieces import ModelFile, PieceTable, Progress, cut, listing_hash
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.models.checkpoints.checkpoint import (
    ModelCheckpoint,
    OpenedFiles,
    WeightForm,
    WeightSizes,
    hash_pieces,
    sha256_of,
)
from swarmnet_protocols.models.manifest import MAX_BLOCKS, MAX_HIDDEN_SIZE, BlockKey, Manifest
from swarmnet_protocols.models.parts import Parts, Slices
from swarmnet_protocols.models.shared_weights import SharedWeights

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swarmnet_protocols.models.checkpoints.expert_weights import ChosenExperts
    from swarmnet_protocols.quantization.packed_experts import ExpertMatrices
    from swarmnet_protocols.quantization.quantize import Precision

SETTLED_NS = 2_000_000_000
"""Nanoseconds after which a further change of a file surely alters its times.

File systems round times, so two changes within less could look like one.
"""


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
        """``cache_dir``: the folder of files that are derived from models, here and by other
        modules."""
        self.name = name
        self.manifest = manifest
        self.path = path
        self.cache_dir = cache_dir
        self._checkpoint = checkpoint
        self._progress = progress
        self._checked: dict[str, dict[str, int]] = {}
        """By name, the state that each whole file had when its hash was verified."""
        self._checked_pieces: dict[Path, tuple[bool, dict[str, int]]] = {}
        """The state of each partial file when all its pieces were last verified.

        The flag tells whether noted hashes were used.
        """
        self.parts = Parts(manifest.hash, checkpoint, cache_dir, progress)
        """Fetches the pieces of files that are not whole on this machine."""

    @cached_property
    def config(self) -> "PretrainedConfig":
        """The transformers config of the whole model."""
        self._check(self._checkpoint.config_tensors)
        return self._checkpoint.config()

    @property
    def max_positions(self) -> int:
        """Positions that a sequence may have."""
        from swarmnet_protocols.models.partial_model import max_positions

        return max_positions(self.config)

    @property
    def precision(self) -> str:
        """The storage format of most weights of the blocks: ``bf16``, ``q4_k``."""
        return self._checkpoint.precision

    def sizes(self, *blocks: BlockKey) -> WeightSizes:
        """The sizes of the tensors of some blocks, or of the local layers, before any is loaded."""
        return self._checkpoint.sizes(name for block in blocks for name in self.manifest.tensors[block])

    def largest_block(self, start: int, end: int) -> int:
        """The first of blocks [start, end) that takes the most memory as it is computed on a CPU.

        Files that mix formats have larger blocks, and blocks whose format is expanded.
        """
        return max(range(start, end), key=lambda block: self.sizes(block).in_memory(4))

    def fetch(self) -> None:
        """Download every file that is not on this machine as a whole. Raises ``Unreachable``,
        ``OutOfResources`` or ``IntegrityError``."""
        self._check(self._checkpoint.tensor_names)

    @property
    def is_whole(self) -> bool:
        """Whether every file is on this machine as a whole."""
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
        """The weights that are on this machine and verified, to be served to peers."""
        return SharedWeights(self.manifest, self._checkpoint, self.parts, self._is_verified)

    def verify(self, progress: Progress | None = None) -> None:
        """Hash again every file on this machine, or the pieces of it that are here.

        Pieces that have changed are forgotten, and fetched again when needed.
        """
        partial = self._partial_files
        for file in self.present_files:
            if file.name in partial:
                self._verify_pieces(partial[file.name], progress)
            else:
                self._check_file(file, progress, again=True)

    def _verify_pieces(self, partial: PieceFile, progress: Progress | None) -> None:
        tables = self.parts.tables
        told = tables.known(partial.file) or tables.claimed(partial.file)
        table = told or partial.read_notes()
        if table is None:
            return  # only a header, which is verified before a tensor is read
        partial.use(table, self._checkpoint.layout(partial.file.name).edges, notes=told is None)
        if not partial.verify(progress):
            raise IntegrityError(
                f"{partial.path} has pieces that do not have their hash",
                hint="they are downloaded again when needed",
            )

    def _check(self, tensors: Sequence[str], slices: Slices | None = None) -> None:
        """Fetch what is missing of these tensors, or of ``slices`` of them.

        Hash the files that contain them, and the files without tensors, once each.
        """
        slices = slices or {}
        tensors = [name for name in tensors if name not in slices or slices[name][1]]
        fetched = self.parts.fetch(tensors, self._check_pieces, slices)
        partial = {each.file.name for each in fetched}
        # What was downloaded was verified on arrival.
        self._checked_pieces |= {each.path: (each.notes, _stamp(each.path)) for each in fetched}
        wanted = self._checkpoint.holders(tensors) - partial
        unchecked = [file for file in self.manifest.files if file.name not in self._checked]
        weights = self._checkpoint.holders(self._checkpoint.tensor_names) if unchecked else set()
        for file in unchecked:
            if file.name in wanted or file.name not in weights:
                self._check_file(file, self._progress)

    def _check_pieces(self, partial: PieceFile, table: PieceTable) -> None:
        """Hash the pieces that are here, unless they are unchanged since the last time.

        Forget pieces that have changed.
        """
        if self._checked_pieces.get(partial.path) == (partial.notes, _stamp(partial.path)):
            return
        mark = self._mark_of(partial.path, table.hash(partial.file))
        if not _is_marked(mark, partial.path):
            partial.verify(self._progress)
            _mark(mark, partial.path)

    def _check_file(self, file: ModelFile, progress: Progress | None, *, again: bool = False) -> None:
        """Hash a file, unless this machine hashed it before and it is unchanged.

        ``again``: hash it in any case.
        """
        path = self._checkpoint.path_of(file.name)
        mark, stamp = self._mark_of(path, file.sha256), _stamp_if_present(path)
        if again or not _is_marked(mark, path) or self.parts.tables.known(file) is None:
            head_bytes, edges = file.size, [0]
            if file.name in self._checkpoint.holders(self._checkpoint.tensor_names):
                layout = self._checkpoint.layout(file.name)
                head_bytes, edges = layout.head_bytes, layout.edges
            hasher = hash_pieces(path, cut(file.size, edges), progress)
            if hasher.sha256 != file.sha256:
                raise IntegrityError(
                    f"{path} does not have the hash in its manifest",
                    hint="delete it and fetch the model again",
                )
            self.parts.add_whole(file, hasher.table(head_bytes))
            _mark(mark, path)
        if stamp is not None:
            self._checked[file.name] = stamp

    def _is_verified(self, file: ModelFile) -> bool:
        """Whether a file is whole and was hashed, in this process or before, and has not changed
        since."""
        path = self._checkpoint.path_of(file.name)
        stamp = _stamp_if_present(path)
        if stamp is None:
            return False
        if self._checked.get(file.name) == stamp:
            return True
        if not _is_marked(self._mark_of(path, file.sha256), path):
            return False
        self._checked[file.name] = stamp
        return True

    def _mark_of(self, path: Path, content: bytes) -> Path:
        """The path of the mark which says that a file was hashed and has this content."""
        return self.cache_dir / "verified" / hashlib.sha256(os.fsencode(path) + content).hexdigest()[:32]

    def _state_dict(
        self, names: Sequence[str], first_block: int, model: "PreTrainedModel", form: WeightForm
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
        return self._checkpoint.state_dict(names, first_block, model, form)

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
        - ``quantized``: 16 and 32-bit weights of these are rounded to this precision.
        - ``experts``: for each listed block, fetch and load only these routed experts. Computing
          another one raises ``LookupError``.

        Raises ``ConfigError`` if the model has no such blocks.
        """
        from swarmnet_protocols.models.partial_model import build_span
        from swarmnet_protocols.quantization.products import load_products

        if not 0 <= start < end <= self.manifest.blocks:
            raise ConfigError(
                f"{self.name} has no blocks {start}:{end}", hint=f"its blocks are 0:{self.manifest.blocks}"
            )
        names = [name for block in range(start, end) for name in self.manifest.tensors[block]]
        form = WeightForm(device, packed, quantized, experts or {})
        return build_span(self.config, start, end).load(
            lambda model: self._state_dict(names, start, model, form),
            dtype=dtype,
            device=device,
            products=load_products(self.cache_dir) if packed or experts else None,
        )

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
        from swarmnet_protocols.models.partial_model import build_experts
        from swarmnet_protocols.quantization.packed_experts import experts_modules
        from swarmnet_protocols.quantization.products import load_products

        if not 0 <= block < self.manifest.blocks:
            raise ConfigError(
                f"{self.name} has no block {block}", hint=f"its blocks are 0 to {self.manifest.blocks - 1}"
            )
        form = WeightForm(device, packed=True, quantized=quantized, experts={block: experts})
        model: Any = build_experts(self.config, block).load(
            lambda model: self._state_dict(self._experts_tensors(block, model), block, model, form),
            dtype=dtype,
            device=device,
            products=load_products(self.cache_dir),
        )
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

        It is for experts that are read again and again: what does not depend on them is prepared
        here. Raises ``ConfigError`` as ``load_experts``. Reading raises what fetching raises, and
        ``IntegrityError``.
        """
        from swarmnet_protocols.models.partial_model import build_experts

        model: Any = build_experts(self.config, block).empty()
        names = self._experts_tensors(block, model)
        places = self._checkpoint.expert_places(names, block, model)
        opened: OpenedFiles = {}

        def read(experts: "Collection[int]") -> "Mapping[str, ExpertMatrices]":
            own = {name: place for name, place in places.items() if place.has(experts)}
            wanted = list(own)
            form = WeightForm(
                device,
                packed=True,
                quantized=quantized,
                experts={block: experts},
                places=own,
                opened=opened,
            )
            found = self._state_dict(wanted, block, model, form)
            return {name.rpartition(".")[2]: matrices for name, matrices in found.items()}

        return read

    def expert_counts(self) -> dict[int, int]:
        """The number of routed experts of each block that has some."""
        from swarmnet_protocols.models.partial_model import expert_counts

        return expert_counts(self.config)

    def _experts_tensors(self, block: int, model: "PreTrainedModel") -> list[str]:
        """The tensors of the routed experts of a block: their matrices, and biases and norms if
        they have such."""
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
    ) -> "PreTrainedModel":
        """Load the CausalLM with embeddings, norm and head; ``stand_ins`` replaces its layers.

        - ``stand_ins``: called with the model's own layers on the meta device. Returns the layers
          to use.
        - ``labels``: load the architecture's sequence classifier of this many classes instead. A
          head that the checkpoint lacks is initialised.
        - ``packed``: as in ``load_span``. Packed embeddings and heads have no ``weight`` and cannot
          be trained.

        Raises ``ConfigError`` if transformers has no such class.
        """
        from torch import nn

        from swarmnet_protocols.models.partial_model import build_local_layers
        from swarmnet_protocols.quantization.products import load_products

        config = self.config
        if labels is not None:
            config = copy.deepcopy(config)
            config.num_labels = labels
        layers = nn.ModuleList()

        def take(built: nn.ModuleList) -> None:
            nonlocal layers
            layers = built

        model: Any = build_local_layers(config, take, labels=labels).load(
            lambda model: self._state_dict(
                self.manifest.tensors["local_layers"], 0, model, WeightForm(device, packed)
            ),
            dtype=dtype,
            device=device,
            products=load_products(self.cache_dir) if packed else None,
        )
        model.base_model.layers = stand_ins(layers)
        model.config.max_position_embeddings = self.max_positions
        self._set_generation_config(model)
        return model

    def load_whole(self, *, dtype: "torch.dtype", device: "torch.device") -> "PreTrainedModel":
        """The whole CausalLM, as transformers loads it."""
        from swarmnet_protocols.models.partial_model import build_whole

        names = self._checkpoint.tensor_names
        model: Any = build_whole(self.config).load(
            lambda model: self._state_dict(names, 0, model, WeightForm(device)), dtype=dtype, device=device
        )
        self._set_generation_config(model)
        return model

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer with its chat template."""
        self._check(())
        return self._checkpoint.tokenizer()

    def end_ids(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
        """The ids of the tokens that end an answer: one set for every program that generates.
        ``tokenizer`` is the model's own."""
        from swarmnet_protocols.models.end_tokens import end_ids

        generation, config = self._checkpoint.generation_config(), self.config
        stated = [config.eos_token_id, generation and generation.eos_token_id, *self._checkpoint.end_ids]
        return end_ids(tokenizer, stated, config.vocab_size)

    def _set_generation_config(self, model: Any) -> None:
        self._check(())
        stored = self._checkpoint.generation_config()
        if stored is not None:
            model.generation_config = stored


def _is_marked(mark: Path, path: Path) -> bool:
    """Whether the file was verified and has not changed since."""
    try:
        return bool(json.loads(mark.read_bytes()) == _stamp(path))
    except (OSError, ValueError):
        return False


def _mark(mark: Path, path: Path) -> None:
    """Mark the file as verified, unless it changed very recently.

    A further change might then leave its times as they are.
    """
    stamp = _stamp(path)
    if time.time_ns() - max(stamp["modified_ns"], stamp["changed_ns"]) > SETTLED_NS:
        with contextlib.suppress(
            OSError
        ):  # a full disk or a read-only one: the file is hashed again next time
            write_whole(mark, json.dumps(stamp).encode(), durable=False)


def _stamp(path: Path) -> dict[str, int]:
    """Return size, times and inode of the file. At least one changes with its content.

    No program can set ``st_ctime``.
    """
    stat = path.stat()
    return {
        "size": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "changed_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }


def _stamp_if_present(path: Path) -> dict[str, int] | None:
    try:
        return _stamp(path)
    except OSError:
        return None


def make_manifest(checkpoint: ModelCheckpoint, progress: Progress | None) -> Manifest:
    """The manifest of a checkpoint. Hashes every file whose hash the checkpoint does not know."""
    from swarmnet_protocols.models.partial_model import architecture_of, build_whole, decoder_stack

    checkpoint.check_kind()
    config = checkpoint.config(has_values=False)
    decoder_stack(config)
    blocks, hidden_size = config.num_hidden_layers, config.hidden_size
    if not 1 <= blocks <= MAX_BLOCKS or not 1 <= hidden_size <= MAX_HIDDEN_SIZE:
        raise ConfigError(f"{checkpoint.root}: {blocks} blocks of hidden size {hidden_size} are out of range")
    # Before a model is built: a config may claim any number of blocks.
    tensors = _by_block(checkpoint, blocks)
    checkpoint.check_complete(build_whole(config).empty)
    return Manifest(
        architecture=architecture_of(config),
        blocks=blocks,
        hidden_size=hidden_size,
        files=tuple(_describe_file(checkpoint, name, progress) for name in checkpoint.files),
        tensors=tensors,
    )


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
