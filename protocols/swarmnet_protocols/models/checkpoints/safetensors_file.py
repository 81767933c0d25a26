"""Models in Hugging Face layout: config.json and safetensors files in a directory.

Headers are checked when a checkpoint is opened, tensors are read when they are loaded.
"""

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError, IntegrityError
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
)
from swarmnet_protocols.models.checkpoints.language_model import language_config, language_settings
from swarmnet_protocols.models.checkpoints.model_folder import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    file_of,
    json_in,
    stamp_of,
)
from swarmnet_protocols.models.checkpoints.safetensors_header import StoredTensor, read_header, read_tensors
from swarmnet_protocols.models.checkpoints.saved_tokenizer import tokenizer_in
from swarmnet_protocols.models.checkpoints.unread import check_blocks, check_settings, check_tensors

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from swarmnet_protocols.models.checkpoints.expert_weights import ExpertPlace
    from swarmnet_protocols.models.checkpoints.quantized_weights import Scheme
    from swarmnet_protocols.models.llama_shape import EmptyModel

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
METADATA_PATTERNS = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_NAMES,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
_METADATA = frozenset({*METADATA_PATTERNS, INDEX_NAME})
HUB_PATTERNS = (*METADATA_PATTERNS, INDEX_NAME, SINGLE_NAME, "model-*.safetensors")

_SAME_TYPES = {"kimi_k2": "deepseek_v3"}
"""Names that published files have for a ``model_type`` of transformers (MLX LM knows the same)."""
MAX_BLAMED = 200
"""Most settings that are left out, one at a time, to find the setting that transformers cannot
read."""
_SHORT_NAMES = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
_STACKS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "model.": "model.",
    "backbone.": "backbone.",
}
"""Prefixes of a decoder stack's tensors in files → their prefixes in the language model.

Prefixes of multimodal models come first.
"""
_HEADS = {"language_model.lm_head.": "lm_head.", "lm_head.": "lm_head.", "score.": "score."}


def naming_of(names: Collection[str]) -> BlockNaming:
    """Return the naming scheme of a checkpoint with tensors of these names."""
    for stack, own in _STACKS.items():
        pattern = re.compile(rf"^({re.escape(stack)}layers\.)(\d+)(\..+)$")
        if any(pattern.match(name) for name in names):
            return BlockNaming(pattern, {stack: own, **_HEADS})
    return BlockNaming(re.compile(r"^(layers\.)(\d+)(\..+)$"))


class SafetensorsCheckpoint:
    """``ModelCheckpoint`` of a directory. Raises ``IntegrityError`` if a file is missing or
    damaged."""

    def __init__(self, root: Path, hub: HubFiles | None = None) -> None:
        """``hub``: the commit on the hub that has the missing weight files. They are fetched when
        needed.
        """
        self.root = root
        self.hub = hub
        self.known: Known = {}
        if file_of(root, "config.json") is None:
            if (root / "adapter_config.json").is_file():
                raise ConfigError(
                    f"{root} is an adapter, not a model",
                    hint="give the model that it was tuned from, and the adapter to `swarmnet run --adapter`",
                )
            gguf = next((path.name for path in sorted(root.glob("*.gguf"))), "a .gguf file")
            raise ConfigError(
                f"{root} has no config.json", hint=f"give a directory in Hugging Face layout, or {gguf}"
            )
        weights, self._index = _weight_files(root, has_single=hub is not None and SINGLE_NAME in hub.known)
        if hub is not None:
            self.known = {name: hub.known[name] for name in weights if name in hub.known}
            if not self._index:  # without an index, only the headers list the tensors
                for name in self.known:
                    if self._whole(name) is None:
                        hub.read_head(name, lambda path: read_header(path).head_bytes)
        self._headers: dict[str, tuple[dict[str, int], Mapping[str, StoredTensor]]] = {}
        """For each file that was read, its stamp and its tensors."""
        holders = {name: weight for weight in weights for name in self._names_in(weight)}
        if missing := self._index.keys() - holders.keys():
            raise IntegrityError(f"{root}: no file contains tensor {min(missing)[:200]!r} of {INDEX_NAME}")
        self.naming = naming_of(holders)
        self._file_of: Mapping[str, str] = {
            name: weight for name, weight in holders.items() if self.naming.is_of_language_model(name)
        }
        self._others = tuple(name for name in holders if name not in self._file_of)
        """Tensors that are not part of the language model."""
        used = set(self._file_of.values())
        weights = [weight for weight in weights if weight in used]
        metadata = [name for name in (*METADATA_PATTERNS, INDEX_NAME) if file_of(root, name) is not None]
        self.files = (*metadata, *weights)
        self.tensor_names = tuple(self._file_of)

    def _names_in(self, weight: str) -> Iterable[str]:
        """Return the tensors in a file: from its header or, while the file is not on disk, from the
        index."""
        if weight in self.known and self._index and self._whole(weight) is None:
            return [name for name, file in self._index.items() if file == weight]
        return self._tensors(weight)

    def _whole(self, weight: str) -> Path | None:
        """Return the path of a weight file that is on disk as a whole."""
        return file_of(self.root, weight, has_weights=True)

    def path_of(self, file: str) -> Path:
        found = file_of(self.root, file, has_weights=file not in _METADATA)
        if found is None and self.hub is not None and file in self.known:
            return self.hub.partial(file).path
        return found or self.root / file

    def layout(self, file: str) -> Layout:
        layout = read_header(self.path_of(file))
        if missing := {name for name, at in self._index.items() if at == file} - layout.spans.keys():
            raise IntegrityError(f"{self.path_of(file)} lacks tensor {min(missing)[:200]!r} of {INDEX_NAME}")
        return layout

    def fetch(self, files: Iterable[str]) -> None:
        for file in sorted(files):
            if self.hub is not None and file in self.known and self._whole(file) is None:
                self.hub.fetch(file)
                self.layout(file)

    @property
    def precision(self) -> str:
        if self._scheme is not None:
            return self._scheme.precision
        dtype = str(self.config().dtype or "torch.float32")
        return _SHORT_NAMES.get(dtype, dtype.removeprefix("torch."))

    def holders(self, names: Iterable[str]) -> set[str]:
        return {self._file_of[name] for name in names}

    def sizes(self, names: Iterable[str]) -> WeightSizes:
        """Return the sizes of 4-bit weights whose groups no packed format supports, as far as
        headers are here."""
        scheme = self._scheme
        if scheme is None or not scheme.is_expanded:
            return WeightSizes()
        wanted = set(names)
        stored = expanded = codes = 0
        for file in self.holders(wanted):
            path = self.path_of(file)
            for name, (start, end) in (read_header(path).spans if path.is_file() else {}).items():
                size = (end - start) * (name in wanted)
                stored += size
                expanded += size * name.endswith((*scheme.parts, *scheme.optional))
                codes += size * name.endswith(scheme.parts[0])
        return WeightSizes(stored, expanded, 2 * codes, (scheme.precision,) if codes else ())

    @cached_property
    def _scheme(self) -> "Scheme | None":
        """The quantisation of the weights. Raises ``ConfigError`` for an unsupported way."""
        from swarmnet_protocols.models.checkpoints.quantized_weights import scheme_of

        settings = getattr(self._config(), "quantization_config", None)
        if settings is None or isinstance(settings, Mapping):
            return None if settings is None else scheme_of(settings)
        raise ConfigError(f"{self.root / 'config.json'}: its quantization_config is not an object")

    @property
    def config_tensors(self) -> tuple[str, ...]:
        return ()

    def settings(self) -> Mapping[str, Any]:
        return json_in(self.root / "config.json", MAX_CONFIG_BYTES)

    def check_kind(self) -> None:
        """Check the settings of the config. The class that it names is checked later, when a model
        is built."""
        whole, settings = self._whole_config()
        with self._named():
            check_settings(language_config(whole), language_settings(whole, settings))

    def check_complete(self, whole: Builder) -> None:
        """Compare the tensors whose headers are here with the model. Loading compares all
        tensors."""
        config, _ = self._whole_config()
        text = language_config(config)
        blocks: dict[int, list[str]] = {}
        for name in self.tensor_names:
            if (block := self.naming.block_of(name)) is not None:
                blocks.setdefault(block, []).append(name)
        count = text.num_hidden_layers
        ahead = {name for block, names in blocks.items() if block >= count for name in names}
        names = [name for name in self.tensor_names if name not in ahead]
        with self._named():
            check_tensors(self._others, is_multimodal=type(text) is not type(config))
            check_blocks(blocks, count)
            shapes = self._shapes(names)
            whole.check(shapes, are_all=len(shapes) == len(names))

    def _shapes(self, names: Iterable[str]) -> dict[str, Sequence[int]]:
        """Return the shapes of tensors by transformers' names, as far as headers are here. Parts of
        quantised weights, which have other shapes than the weights, are left out."""
        found = {
            name: tensor.shape
            for file in self.holders(names)
            if self.path_of(file).is_file()
            for name, tensor in self._tensors(file).items()
        }
        quantized = self._scheme.weights(names, lambda name: name) if self._scheme is not None else []
        parts = {part for weight in quantized for part in weight.tensors if part != weight.name}
        return {
            self.naming.renumbered(name, 0): found[name]
            for name in names
            if name in found and name not in parts
        }

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the folder of the files to an error."""
        try:
            yield
        except (ConfigError, IntegrityError) as error:
            raise type(error)(f"{self.root}: {error}", hint=error.hint) from error

    def config(self, *, has_values: bool = True) -> "PretrainedConfig":
        config = self._config()
        # transformers would look for packages that multiply with such weights
        if self._scheme is not None:
            del config.quantization_config
        return config

    def _config(self) -> "PretrainedConfig":
        return language_config(self._whole_config()[0])

    def _whole_config(self) -> "tuple[PretrainedConfig, dict[str, Any]]":
        """Return the config, with all parts of a multimodal model, and the settings in its file."""
        lean_imports.import_transformers_if_used()
        from huggingface_hub.errors import StrictDataclassError
        from transformers.models.auto.configuration_auto import AutoConfig

        faults = (*CONFIG_FAULTS, OSError, StrictDataclassError)
        path = self.root / "config.json"
        settings = json_in(path, MAX_CONFIG_BYTES)
        if "configuration_files" in settings:  # transformers would read the files that it names
            raise ConfigError(f"{path} refers to other files", hint="remove its configuration_files")
        known = _SAME_TYPES.get(str(settings.get("model_type")))
        try:
            if known is not None:
                settings["model_type"] = known
                config = AutoConfig.for_model(**copy.deepcopy(settings))
            else:
                config = AutoConfig.from_pretrained(self.root, trust_remote_code=False, local_files_only=True)
            language_config(config)
        except faults as error:
            cause = next(_causes(settings, faults), "")
            raise ConfigError(
                f"{path} does not describe a model that transformers knows: {cause}{error}"
            ) from error
        return config, settings

    def generation_config(self) -> "GenerationConfig | None":
        from transformers.generation import GenerationConfig

        if file_of(self.root, "generation_config.json") is None:
            return None
        return GenerationConfig.from_pretrained(self.root, local_files_only=True)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return ()

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        if not any(file_of(self.root, name) for name in TOKENIZER_NAMES):
            raise ConfigError(
                f"{self.root} has no tokenizer",
                hint="put its tokenizer.json and tokenizer_config.json there",
            )
        return tokenizer_in(self.root, METADATA_PATTERNS)

    def state_dict(
        self, names: Sequence[str], first_block: int, model: "PreTrainedModel | EmptyModel", form: WeightForm
    ) -> dict[str, Any]:
        """Return tensors that transformers reads one by one as it copies them into the model.

        So no span is in memory twice. Weights that stay packed are read at once: quantised ones,
        16-bit matrices on the CPU and, with ``form.quantized``, 16 and 32-bit matrices on any
        device.
        """
        from swarmnet_protocols.models.checkpoints.expert_weights import ExpertReader
        from swarmnet_protocols.quantization.formats import Format
        from swarmnet_protocols.quantization.packed_tensor import PackedTensor

        numbers_formats = {"BF16": Format.BF16, "F16": Format.F16, "F32": Format.F32}
        formats = {
            name: format
            for name, format in numbers_formats.items()
            if form.quantized is not None or format != Format.F32
        }
        quantized = form.quantized
        is_packed = form.packed and (quantized is not None or form.device.type == "cpu")
        places = self.expert_places(names, first_block, model) if form.places is None else form.places
        reader = ExpertReader(places, self.naming.block_of, form.experts, form.loaded)
        names = [name for name in names if reader.has_wanted(name)]

        def matrix_of(tensor: StoredTensor, place: "ExpertPlace", index: slice) -> PackedTensor:
            import torch

            numbers = tensor[index] if place.expert is not None else tensor[index].flatten(0, 1)
            numbers = (numbers.T if place.is_transposed else numbers).contiguous()
            matrix = PackedTensor.of(numbers_formats[tensor.kind], numbers.view(torch.uint8))
            return form.rounded(matrix, place.weight)

        # with known places, experts are read again and again
        tensor_of = partial(self._tensor, is_mapped=form.places is None)
        found: dict[str, Any] = {}
        plain = set(names)
        for stored in self._scheme.weights(names, tensor_of) if self._scheme is not None else ():
            plain.difference_update(stored.tensors)
            hf_name = self.naming.renumbered(stored.name, first_block)
            own_name = packable_weight(model, hf_name) if form.packed else None
            first_part = next(iter(stored.tensors))
            if own_name is not None:
                found[own_name] = form.loaded(stored.packed())
            elif first_part in places and (form.packed or form.experts):
                reader.read(first_part, stored.packed)
            else:
                found[hf_name] = stored
        for name in sorted(plain):
            hf_name, tensor = self.naming.renumbered(name, first_block), tensor_of(name)
            own_name = packable_weight(model, hf_name) if is_packed else None
            kind = formats.get(tensor.kind)
            if own_name is not None and kind is not None:
                matrix = PackedTensor.of(kind, tensor.rows())
                found[own_name] = form.loaded(form.rounded(matrix, own_name))
            elif name in places and (form.experts or (is_packed and kind is not None)):
                reader.read(name, partial(matrix_of, tensor, places[name]))
            else:
                found[hf_name] = tensor
        return found | reader.finish()

    def _tensor(self, name: str, *, is_mapped: bool) -> StoredTensor:
        file = self._file_of[name]
        found = self._tensors(file).get(name)
        if found is None:
            raise IntegrityError(f"{self.path_of(file)} lacks tensor {name[:200]!r}")
        return replace(found, is_mapped=is_mapped)

    def _tensors(self, file: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of a file. Its header is read again only when the file has changed."""
        path = self.path_of(file)
        try:
            stamp = stamp_of(path)
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
        if file not in self._headers or self._headers[file][0] != stamp:
            self._headers[file] = stamp, read_tensors(path)[1]
        return self._headers[file][1]

    def expert_places(
        self, names: Iterable[str], first_block: int, model: "PreTrainedModel | EmptyModel"
    ) -> "dict[str, ExpertPlace]":
        from swarmnet_protocols.models.checkpoints.expert_weights import ExpertPlaces

        weights = {name: name for name in names}
        for stored in self._scheme.weights(weights, lambda name: name) if self._scheme is not None else ():
            weights |= dict.fromkeys(stored.tensors, stored.name)
        places = ExpertPlaces(model)
        found = {
            name: places.of(self.naming.renumbered(weight, first_block)) for name, weight in weights.items()
        }
        return {name: place for name, place in found.items() if place is not None}


def _causes(settings: Mapping[str, Any], faults: tuple[type[BaseException], ...]) -> Iterator[str]:
    """Return the settings that transformers cannot read: it makes a config when any one of them is
    left out."""
    from transformers.models.auto.configuration_auto import AutoConfig

    text = settings.get("text_config")
    parts: list[Mapping[str, Any]] = [text, settings] if isinstance(text, dict) else [settings]
    for part in parts:
        for name in list(part)[:MAX_BLAMED]:
            rest: dict[str, Any] = {key: value for key, value in part.items() if key != name}
            rest = rest if part is settings else {**settings, "text_config": rest}
            with suppress(*faults):
                AutoConfig.for_model(**copy.deepcopy(rest))
                yield f"{name} = {str(part[name])[:100]}: "


def _weight_files(root: Path, *, has_single: bool) -> tuple[list[str], dict[str, str]]:
    """Return the safetensors files of a directory, and the file of each tensor by its index.
    ``has_single``: the hub has ``SINGLE_NAME``."""
    index = file_of(root, INDEX_NAME)
    if index is None:
        if not has_single and file_of(root, SINGLE_NAME, has_weights=True) is None:
            raise ConfigError(
                f"{root} has no {SINGLE_NAME}", hint="only safetensors and gguf weights are read"
            )
        return [SINGLE_NAME], {}
    weight_map = json_in(index, MAX_METADATA_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(f"{index} has no weight_map")
    files = {file for file in weight_map.values() if isinstance(file, str)}
    if len(files) < len(set(map(str, weight_map.values()))) or any(
        Path(f).name != f or f in (*_METADATA, "..") for f in files
    ):
        raise IntegrityError(f"{index} lists something that is not a file of this directory")
    return sorted(files), weight_map
