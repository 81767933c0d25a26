"""Models in a gguf file, or in the parts of a split one: reads tensors, config and tokenizer."""

import hashlib
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

from swarmnet_protocols.errors import ConfigError, IntegrityError, OutOfResources
from swarmnet_protocols.fetching.hub_files import HubFiles, Known
from swarmnet_protocols.fetching.pieces import Layout
from swarmnet_protocols.machine import lean_imports
from swarmnet_protocols.models.checkpoints.checkpoint import (
    CONFIG_FAULTS,
    BlockNaming,
    Builder,
    WeightForm,
    WeightSizes,
    packable_weight,
    sha256_of,
)
from swarmnet_protocols.models.checkpoints.file_kinds import check_kind, unread_type
from swarmnet_protocols.models.checkpoints.gguf.config import (
    ROPE_TENSORS,
    check_keys,
    config_of,
    with_rope,
)
from swarmnet_protocols.models.checkpoints.gguf.header import GgufTensor, layout_of, read_parts
from swarmnet_protocols.models.checkpoints.gguf.rows import Header
from swarmnet_protocols.models.checkpoints.gguf.tensors import Recipe, recipes, tensors_of
from swarmnet_protocols.models.checkpoints.gguf.tokenizer import check_tokenizer, read_tokenizer
from swarmnet_protocols.models.checkpoints.model_folder import json_in
from swarmnet_protocols.models.llama_shape import FAMILIES

if TYPE_CHECKING:
    import numpy as np
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swarmnet_protocols.models.checkpoints.expert_weights import ExpertPlace
    from swarmnet_protocols.models.llama_shape import EmptyModel
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor

_NAMING = BlockNaming(re.compile(r"^(blk\.)(\d+)(\..+)$"))
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:(gate|up|down|gate_up)_exps|(gate|up|down)\.(\d+))\.weight")
"""Tensors of all experts of a block, and of one expert, as in older files."""


_READING = 5
"""Version of the code that reads configs and tokenizers. Copies made by another version are
ignored.
"""
METADATA_BYTES = 32 << 20
"""Most free bytes that saving a config or a tokenizer in Hugging Face layout needs."""


class GgufCheckpoint:
    """``ModelCheckpoint`` of a gguf file, or of all parts of a split one.

    transformers takes seconds to read a config or a tokenizer from gguf. So copies of both are kept
    in Hugging Face layout under ``metadata_dir``. Each version of the file has its own folder. A
    copy that was changed is made again. Raises ``IntegrityError`` if a file is damaged.
    """

    def __init__(self, paths: Sequence[Path], metadata_dir: Path, hub: HubFiles | None = None) -> None:
        """``paths``: the file, or all parts in order. ``hub``: the commit on the hub that has
        missing pieces.
        """
        self.naming = _NAMING
        self.root = paths[0].parent
        self.files = tuple(path.name for path in paths)
        self.hub = hub
        self.known: Known = {name: hub.known[name] for name in self.files} if hub is not None else {}
        self._paths = {path.name: path for path in paths}
        self._metadata_dir = metadata_dir
        self._fields, tensors = read_parts(paths)
        self._tensors = {name: tensor for each in tensors for name, tensor in each.items()}
        self._file_of = {name: file for file, each in zip(self.files, tensors, strict=True) for name in each}
        self._header = Header(self._fields, {name: tensor.shape for name, tensor in self._tensors.items()})
        self._architecture = self._header.architecture
        self._parsed: dict[str, tuple[bytes, Layout]] = {}
        """For each file, the hash of its header and the layout in this header."""
        ahead = self._header.blocks_ahead
        self.tensor_names = tuple(name for name in self._tensors if _NAMING.block_of(name) not in ahead)

    @property
    def path(self) -> Path:
        """The file, or the first part, which has the config and the tokenizer."""
        return self._paths[self.files[0]]

    def path_of(self, file: str) -> Path:
        return self._paths[file]

    def layout(self, file: str) -> Layout:
        """Return where the tensors of a file are.

        Parsing a header takes tenths of a second, because of the vocabulary. So the layout is
        reused while the header stays the same.
        """
        path = self._paths[file]
        if file in self._parsed:
            digest, layout = self._parsed[file]
            if _hash_of_head(path, layout.head_bytes) == digest:
                return layout
        layout = layout_of(path)
        self._parsed[file] = _hash_of_head(path, layout.head_bytes), layout
        return layout

    def fetch(self, files: Iterable[str]) -> None:
        for name in sorted(set(files) & self._paths.keys()):
            if self.hub is not None and self._paths[name] == self.hub.partial(name).path:
                self._paths[name] = self.hub.fetch(name)

    @property
    def precision(self) -> str:
        from gguf import GGMLQuantizationType

        weights: Counter[int] = Counter()
        for name, tensor in self._tensors.items():
            if _NAMING.block_of(name) is not None:
                weights[tensor.type] += math.prod(tensor.shape)
        return GGMLQuantizationType(max(weights, key=weights.__getitem__)).name.lower() if weights else "f32"

    def holders(self, names: Iterable[str]) -> set[str]:
        try:
            return {self._file_of[name] for name in names}
        except KeyError as error:  # the file has changed since its manifest was made
            raise IntegrityError(
                f"{self.path} has no tensor {error.args[0]}", hint="download it again"
            ) from error

    def sizes(self, names: Iterable[str]) -> WeightSizes:
        from gguf import GGMLQuantizationType

        from swarmnet_protocols.quantization.formats import Format

        tensors = {name: self._tensors[name] for name in names}
        unread = {name: tensor for name, tensor in tensors.items() if tensor.type not in {*Format}}
        # The keys and values of latent attention come from tensors of three dimensions.
        made = {name for name in tensors if len(tensors[name].shape) == 3 and not _EXPERTS.fullmatch(name)}
        expanded = [tensor for name, tensor in tensors.items() if name in unread or name in made]
        return WeightSizes(
            sum(tensor.size_bytes for tensor in tensors.values()),
            sum(tensor.size_bytes for tensor in expanded),
            sum(math.prod(tensor.shape) for tensor in expanded),
            tuple(sorted({GGMLQuantizationType(tensor.type).name for tensor in unread.values()})),
        )

    @property
    def config_tensors(self) -> tuple[str, ...]:
        return tuple(name for name in ROPE_TENSORS if name in self._tensors)

    def config(self, *, has_values: bool = True) -> "PretrainedConfig":
        lean_imports.import_transformers_if_used()
        from huggingface_hub.errors import StrictDataclassError
        from transformers.models.auto.configuration_auto import AutoConfig

        try:
            config = AutoConfig.from_pretrained(
                self._cached("config", lambda: config_of(self._header)), local_files_only=True
            )
            if has_values:
                factors = {name: self._numbers(name) for name in self.config_tensors}
                config = with_rope(config, self._header, factors)
                check_keys(config, self._header)
            return config
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}", hint=error.hint) from error
        except (*CONFIG_FAULTS, StrictDataclassError) as error:
            raise ConfigError(
                f"{self.path}: the config of {self._architecture or 'this'} cannot be read from gguf: {error}",
                hint="use the model's Hugging Face layout",
            ) from error

    def settings(self) -> Mapping[str, Any]:
        folder = self._cached("config", lambda: config_of(self._header))
        settings = json_in(folder / "config.json", METADATA_BYTES)
        if settings.get("model_type") not in FAMILIES:  # their rotary embeddings may be of other kinds
            return settings
        factors = {name: self._numbers(name) for name in self.config_tensors}
        config = SimpleNamespace(**settings, is_heterogeneous=False)
        found: dict[str, Any] = vars(with_rope(config, self._header, factors))
        return found

    def _numbers(self, name: str) -> list[float]:
        tensor = self._tensors[name]
        with self._paths[self._file_of[name]].open("rb") as file:
            file.seek(tensor.offset)
            rows = _read_bytes(file, tensor.size_bytes, name).reshape(*tensor.shape[:-1], -1)
        return [float(value) for value in self._dequantized(name, rows).ravel()]

    def check_kind(self) -> None:
        types = {tensor.type: name for name, tensor in self._tensors.items()}
        try:
            check_kind(self._architecture, self._fields, self.tensor_names, types)
        except ConfigError as error:
            raise ConfigError(f"{self.path} {error}", hint=error.hint) from error

    def check_complete(self, whole: Builder) -> None:
        try:
            check_tokenizer(self._fields)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}", hint=error.hint) from error
        model = whole.empty()
        made = self._recipes(model, 0)
        self._check_used(self.tensor_names, {*ROPE_TENSORS, *tensors_of(made)}, model)
        self._check_sizes(made, model)

    def _check_sizes(self, made: Mapping[str, Recipe], model: "PreTrainedModel") -> None:
        """Raise ``IntegrityError`` for a weight whose tensors are missing or have other sizes."""
        tied, shapes = getattr(model, "all_tied_weights_keys", {}), self._header.shapes
        for name, weight in model.state_dict().items():
            recipe = made.get(name)
            tensors = recipe.tensors if recipe is not None else ()
            count = sum(math.prod(shapes[each]) for each in tensors if each in shapes)
            if name not in tied and (recipe is None or count != recipe.count):
                raise IntegrityError(
                    f"{self.path} does not fit {type(model).__name__}: {' and '.join(tensors)[:200] or 'no tensor'} with {count} values for {name} {[*weight.shape]}",
                    hint="download it again, or use the model's Hugging Face layout",
                )

    def _recipes(self, model: "PreTrainedModel", first_block: int) -> dict[str, Recipe]:
        try:
            return recipes(self._header, model, first_block)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}", hint=error.hint) from error

    def _check_used(
        self, names: Iterable[str], used: Collection[str], model: "PreTrainedModel | EmptyModel"
    ) -> None:
        if unused := next((name for name in names if name not in used), None):
            raise ConfigError(
                f"{self.path} has the tensor {unused[:200]!r}, which {type(model).__name__} of transformers does not use",
                hint="use the model's Hugging Face layout",
            )

    def generation_config(self) -> "GenerationConfig | None":
        return None

    @property
    def end_ids(self) -> tuple[int, ...]:
        ends = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        keys = (f"tokenizer.ggml.{end}_token_id" for end in ends)
        return tuple(id for id in map(self._fields.get, keys) if isinstance(id, int))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        from transformers.models.auto.tokenization_auto import AutoTokenizer

        embeddings = self._tensors.get("token_embd.weight")
        rows = None if embeddings is None else embeddings.shape[0]
        return AutoTokenizer.from_pretrained(
            self._cached("tokenizer", lambda: read_tokenizer(self.path, rows)),
            local_files_only=True,
        )

    def _cached(self, part: str, make: Callable[[], Any]) -> Path:
        """Return the directory that caches ``part``, named by its hash.

        It is made on first use, and renamed into place when it is complete.
        """
        prefix = f"{part}-{version('transformers')}-{_READING}-"
        for cached in self._metadata_dir.glob(f"{prefix}*"):
            if cached.name == prefix + _hash_of(cached):
                return cached
            shutil.rmtree(cached)
        self._metadata_dir.mkdir(parents=True, exist_ok=True)
        # The tokenizer is saved by native code, whose error for a full disk cannot be told from
        # others.
        if shutil.disk_usage(self._metadata_dir).free < METADATA_BYTES:
            raise OutOfResources(
                f"{self._metadata_dir} has too little free space for the config and the tokenizer of {self.path.name}",
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
        self, names: Sequence[str], first_block: int, model: "PreTrainedModel | EmptyModel", form: WeightForm
    ) -> dict[str, Any]:
        """Return weights by their recipes.

        They are dequantised, unless they stay packed and the recipe only changes the order of
        rows.
        """
        from swarmnet_protocols.models.checkpoints.expert_weights import ExpertReader

        made = self._recipes(model, first_block)
        places = form.places
        if places is None:
            places = self.expert_places(names, first_block, model) if form.packed or form.experts else {}
        wanted = {*names}.difference(ROPE_TENSORS, places)
        self._check_used(wanted, tensors_of(made), model)
        reader = ExpertReader(places, _NAMING.block_of, form.experts, form.loaded)
        found: dict[str, Any] = {}
        with ExitStack() as stack:
            opened = {each: stack.enter_context(self._paths[each].open("rb")) for each in self.holders(names)}
            for name in names:
                if name in places:
                    file = opened[self._file_of[name]]
                    reader.read(name, partial(self._expert, file, name, places[name].weight, form))
            for name, recipe in made.items():
                if wanted.issuperset(recipe.tensors):
                    own_name, weight = self._weight(name, recipe, model, form, opened)
                    found[own_name] = weight
        return found | reader.finish()

    def _weight(
        self,
        name: str,
        recipe: Recipe,
        model: "PreTrainedModel | EmptyModel",
        form: WeightForm,
        opened: Mapping[str, BinaryIO],
    ) -> tuple[str, Any]:
        """Return the weight by its recipe, packed if possible. ``name``: in ``model``, or in the
        whole model."""
        import numpy as np

        rows = [self._rows(tensor, opened) for tensor in recipe.tensors]
        if form.packed and (own_name := packable_weight(model, name)) is not None:
            packed = [
                _packed(self._tensors[each], own) for each, own in zip(recipe.tensors, rows, strict=True)
            ]
            matrices = [matrix for matrix in packed if matrix is not None]
            if len(matrices) == len(rows) and (matrix := recipe.packed(matrices)):
                return own_name, form.loaded(form.rounded(matrix, own_name))
        values = [self._dequantized(each, own) for each, own in zip(recipe.tensors, rows, strict=True)]
        try:
            made = recipe.make(*values)
        except (*CONFIG_FAULTS, IntegrityError) as error:
            tensors = " or ".join(recipe.tensors)
            raise IntegrityError(f"{self.path}: {tensors} does not fit {name}: {error}") from error
        # Dequantised weights are new arrays; others are views of the bytes that were read.
        own = np.require(made, requirements=["C_CONTIGUOUS", "WRITEABLE"])
        return name, own

    def _rows(self, name: str, opened: Mapping[str, BinaryIO]) -> "np.ndarray[Any, Any]":
        """Return the bytes of a tensor, [rows, bytes of a row]."""
        file, tensor = opened[self._file_of[name]], self._tensors[name]
        file.seek(tensor.offset)
        return _read_bytes(file, tensor.size_bytes, name).reshape(*tensor.shape[:-1], -1)

    def expert_places(
        self, names: Iterable[str], first_block: int, model: "PreTrainedModel | EmptyModel"
    ) -> "dict[str, ExpertPlace]":
        from swarmnet_protocols.models.checkpoints.expert_weights import ExpertPlaces

        places, found = ExpertPlaces(model), {}
        for name in names:
            if (match := _EXPERTS.fullmatch(name)) is None:
                continue
            layer, expert = int(match[1]) - first_block, int(match[4]) if match[4] else None
            place = places.of_gguf(layer, match[2] or match[3], expert)
            if place is not None:
                shape = self._tensors[name].shape
                expected = (place.count,) if expert is None else ()
                if len(shape) != len(expected) + 2 or shape[:-2] != expected:
                    raise IntegrityError(f"{self.path}: {name} is no tensor of {place.count} experts")
                found[name] = place
        return found

    def _expert(
        self, file: BinaryIO, name: str, weight: str, form: WeightForm, index: slice
    ) -> "PackedTensor":
        """Return the matrix of one expert. Formats without a packed product are dequantised to
        float32."""
        import numpy as np

        from swarmnet_protocols.quantization.formats import Format
        from swarmnet_protocols.quantization.packed_tensor import PackedTensor

        tensor = self._tensors[name]
        *counts, height, width = tensor.shape
        size = tensor.size_bytes // math.prod(counts)
        file.seek(tensor.offset + (index.start or 0) * size)
        rows = _read_bytes(file, size, name).reshape(height, -1)
        matrix = _packed(GgufTensor((height, width), tensor.type, 0, size), rows)
        if matrix is None:
            numbers = np.ascontiguousarray(self._dequantized(name, rows))
            matrix = PackedTensor.of(Format.F32, numbers.view(np.uint8))
        return form.rounded(matrix, weight)

    def _dequantized(self, name: str, rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return the weights in float32. Raises ``ConfigError`` for a format that gguf's Python
        code does not read."""
        from gguf import GGMLQuantizationType, dequantize

        try:
            found: np.ndarray[Any, Any] = dequantize(rows, GGMLQuantizationType(self._tensors[name].type))
        except NotImplementedError as error:
            unread = unread_type(name, self._tensors[name].type)
            raise ConfigError(f"{self.path} {unread}", hint=unread.hint) from error
        return found


def _hash_of_head(path: Path, size: int) -> bytes:
    """Return the SHA-256 over the first ``size`` bytes of a file and the size of the file."""
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        return hashlib.sha256(total.to_bytes(8, "little") + file.read(size)).digest()


def _read_bytes(file: BinaryIO, size: int, name: str) -> "np.ndarray[Any, Any]":
    """Return the next bytes of a file, part of the tensor ``name``.

    Raises ``IntegrityError`` if the file ends too early.
    """
    from swarmnet_protocols.machine.platform import fresh_memory

    data = fresh_memory(size)
    if file.readinto(data.data) != size:  # type: ignore[attr-defined]
        raise IntegrityError(f"{file.name} is truncated within tensor {name}")
    return data


def _packed(tensor: GgufTensor, rows: "np.ndarray[Any, Any]") -> "PackedTensor | None":
    """Return a matrix as it is stored, from its bytes [rows, bytes of a row].

    None unless the tensor is a matrix in a packed format.
    """
    from swarmnet_protocols.quantization.formats import Format
    from swarmnet_protocols.quantization.packed_tensor import PackedTensor

    if len(tensor.shape) != 2 or tensor.type not in {*Format}:
        return None
    return PackedTensor.of(Format(tensor.type), rows)


def _hash_of(folder: Path) -> str:
    """Return a hash of the names and contents of a directory's files, as 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(hashlib.sha256(path.name.encode()).digest() + sha256_of(path, None))
    return digest.hexdigest()[:32]
