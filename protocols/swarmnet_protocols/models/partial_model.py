"""Builds parts of a transformers model: the decoder layers of some blocks, or everything except
them.

1. The architecture's own class is instantiated as a whole on the meta device, which takes no
   memory. So every layer, and the rotary embedding, is configured by the config of the whole model.
2. The unwanted parts are removed.
3. The weights of the rest are loaded.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.machine.devices import torch_device, torch_dtype
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS
from swarmnet_protocols.models.checkpoints.conversion import Conversion, experts_modules
from swarmnet_protocols.models.checkpoints.language_model import headed_class
from swarmnet_protocols.models.checkpoints.unread import UNUSED, obstacle_in
from swarmnet_protocols.quantization.packed_experts import (
    ExpertMatrices,
    install_experts,
    packed_experts_bytes,
)
from swarmnet_protocols.quantization.packed_linear import install, packed_bytes
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

StateDict = dict[str, Any]

_BUILT_IN_ATTENTION = (None, "eager", "sdpa")
_BUILT_IN_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
"""Experts implementations that are part of transformers and torch.

For any other name, transformers downloads a kernel from the hub, or imports an installed package.
"""

EMBEDDING_SCALE = "embedding_multiplier"
"""The attribute that Granite's decoder stacks multiply their inputs by, ids or embeddings alike.

Clients multiply; hosts do not.
"""
_META = torch.device("meta")
_INITIALISERS = {init.constant_, init.kaiming_uniform_, init.normal_, init.uniform_}
"""Initialisers that ``TorchFunctionMode`` intercepts. Other initialisers call these, or are
rare."""


def causal_class(config: "PretrainedConfig") -> type:
    """Return the CausalLM class of an architecture.

    Raises ``ConfigError`` if there is none, or if the config selects an attention or experts
    implementation that is not built in.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    _check_implementations(config)

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: type | None = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    else:
        found = headed_class(config)
    if found is None:
        raise ConfigError(
            f"{architecture_of(config)} is not a text generation model that transformers knows",
            hint="use a decoder-only language model such as Llama, Qwen3, Mistral or Mixtral",
        )
    return found


def _check_implementations(config: "PretrainedConfig") -> None:
    """Refuse implementations that are not built in. A config may come from another peer, and peers
    must not choose the code that runs here."""
    for known, name in (
        (_BUILT_IN_ATTENTION, "_attn_implementation"),
        (_BUILT_IN_EXPERTS, "_experts_implementation"),
    ):
        asked = getattr(config, name, None)
        if asked not in known:
            raise ConfigError(
                f"the config selects {name.strip('_')} {str(asked)[:100]!r}, which is not built into transformers",
                hint=f"remove it, or use {' or '.join(sorted(filter(None, known)))}",
            )
    for part in config.sub_configs:
        if (inner := getattr(config, part, None)) is not None:
            _check_implementations(inner)


def architecture_of(config: "PretrainedConfig") -> str:
    """Return the name of the architecture's CausalLM class, e.g. ``LlamaForCausalLM``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
    if (headed := headed_class(config)) is not None:
        return headed.__name__
    return str((config.architectures or [config.model_type])[0])


def decoder_stack(config: "PretrainedConfig") -> tuple[type, tuple[str, str]]:
    """Return the class of an architecture's decoder stack, and the names of its embeddings and its
    final norm.

    Raises ``ConfigError`` if the stack has other parts than these and layers.
    """
    cls = causal_class(config)
    if not all(isinstance(getattr(config, name, None), int) for name in ("num_hidden_layers", "hidden_size")):
        raise _no_blocks(config, "it is not just embeddings, layers and a norm")
    if obstacle := obstacle_in(config):
        raise _no_blocks(config, obstacle)
    empty: Any = ModelBuilder(cls, with_blocks(config, 0, 0)).empty()
    base = empty.base_model
    ends = _ends_of(base)
    if ends is None:
        parts = ", ".join(name for name, _ in base.named_children())
        raise _no_blocks(config, f"it is not just embeddings, layers and a norm, but {parts[:200]}")
    return type(base), ends


def _no_blocks(config: "PretrainedConfig", reason: str) -> ConfigError:
    return ConfigError(
        f"{architecture_of(config)} cannot be split into blocks: {reason}",
        hint="docs/families.md lists families that work",
    )


def _ends_of(base: Any) -> tuple[str, str] | None:
    """Return the names of a decoder stack's embeddings and final norm; None if it has other parts
    than these, layers and rotary embeddings."""
    children = {name: child for name, child in base.named_children() if not name.startswith("rotary_emb")}
    if not isinstance(children.pop("layers", None), nn.ModuleList) or len(children) != 2:
        return None
    embeddings = [name for name, child in children.items() if isinstance(child, nn.Embedding)]
    norms = [name for name, child in children.items() if type(child).__name__.endswith("Norm")]
    return (embeddings[0], norms[0]) if len(embeddings) == len(norms) == 1 else None


def embed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the inputs [..., D] of the first block of a model for token ids [...]."""
    embedded: torch.Tensor = model.get_input_embeddings()(ids)
    scale = getattr(model.base_model, EMBEDDING_SCALE, 1)
    return embedded if scale == 1 else embedded * scale


def build_span(config: "PretrainedConfig", start: int, end: int) -> "ModelBuilder":
    """Return a builder of the decoder stack of blocks [start, end): no embeddings, no final norm,
    layers numbered from 0."""
    cls, ends = decoder_stack(config)
    return ModelBuilder(_stripped_class(cls, partial(_keep_span, start=start, end=end, ends=ends)), config)


def _keep_span(model: Any, *, start: int, end: int, ends: tuple[str, str]) -> None:
    keep_layers(model, start, end)
    embeddings, norm = ends
    setattr(model, embeddings, None)
    setattr(model, norm, nn.Identity())
    if hasattr(model, EMBEDDING_SCALE):
        setattr(model, EMBEDDING_SCALE, 1)


def build_experts(config: "PretrainedConfig", block: int) -> "ModelBuilder":
    """Return a builder of one block's decoder stack with only the module of routed experts left.

    Raises ``ConfigError`` if the block has no such module.
    """
    cls, ends = decoder_stack(config)

    def strip(model: Any) -> None:
        _keep_span(model, start=block, end=block + 1, ends=ends)
        [layer] = model.layers
        paths = [path for path, _ in experts_modules(layer)]
        if len(paths) != 1:
            raise ConfigError(f"block {block} of {architecture_of(config)} has no routed experts")
        _keep_only(layer, paths[0])

    return ModelBuilder(_stripped_class(cls, strip), config)


def expert_counts(config: "PretrainedConfig") -> dict[int, int]:
    """Return the number of routed experts of each block that has some, known without reading
    weights."""
    empty = build_span(config, 0, config.num_hidden_layers).empty()
    return {int(path.split(".")[1]): module.num_experts for path, module in experts_modules(empty)}


def _keep_only(module: nn.Module, path: str) -> None:
    """Remove everything from a module but the submodule at ``path``."""
    while path:
        head, _, path = path.partition(".")
        module._parameters.clear()
        for name in list(module._modules):
            if name != head:
                delattr(module, name)
        module = module.get_submodule(head)


def build_local_layers(
    config: "PretrainedConfig", on_layers: Callable[[nn.ModuleList], None], *, labels: int | None = None
) -> "ModelBuilder":
    """Return a builder of the model without its layers. ``on_layers`` is called with the layers, on
    the meta device.

    The model is the CausalLM, or with ``labels`` the sequence classifier of ``labels`` classes,
    whose head is initialised if the checkpoint has none. Raises ``ConfigError`` if transformers has
    no such class for the architecture.
    """
    decoder_stack(config)

    def strip(model: Any) -> None:
        on_layers(model.base_model.layers)
        model.base_model.layers = nn.ModuleList()

    if labels is None:
        return ModelBuilder(_stripped_class(causal_class(config), strip), config)
    return ModelBuilder(_stripped_class(_classifier_class(config), strip), config, optional=("score.weight",))


def _classifier_class(config: "PretrainedConfig") -> type:
    """Return the sequence classifier of an architecture. Raises ``ConfigError`` if transformers has
    none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(f"transformers has no classifier for {architecture_of(config)}")
    found: type = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    return found


def keep_layers(model: Any, start: int, end: int) -> None:
    """Keep only layers [start, end) of a decoder stack, and number them from 0."""
    for name, module in model.named_children():
        if name.startswith("rotary_emb"):  # the rotary embedding depends on the config of all layers
            module.config = copy.deepcopy(model.config)
    model.layers = nn.ModuleList(list(model.layers)[start:end])
    for module in model.layers.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= start
    _keep_blocks(model.config, start, end)


def _stripped_class(cls: Any, strip: Callable[[Any], None]) -> type:
    """Return a class whose constructor makes an object of ``cls`` and applies ``strip``, before
    weights are loaded."""

    def init(self: Any, config: "PretrainedConfig") -> None:
        made = type(self)
        cls.__init__(self, config)
        strip(self)
        if type(self) is made:  # unless ``cls`` was made here, too
            self.__class__ = cls

    return type(cls.__name__, (cls,), {"__init__": init})


def _install_packed(
    model: Any,
    *,
    weights: Mapping[str, PackedTensor],
    experts: Mapping[str, ExpertMatrices],
    products: Products,
) -> None:
    """Replace modules by packed ones, and merged weights of experts by matrices. Two modules with
    tied weights share one packed matrix."""
    weights = dict(weights)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(tied.items()):
        shared = weights.get(source, weights.get(target))
        if shared is not None:
            weights[source] = weights[target] = shared
            del tied[target]
    try:
        install(model, weights, products)
        install_experts(model, experts, products)
    except ValueError as error:
        raise IntegrityError(f"the checkpoint does not fit {type(model).__name__}: {error}") from error


def build_whole(config: "PretrainedConfig") -> "ModelBuilder":
    """Return a builder of the whole CausalLM."""
    return ModelBuilder(causal_class(config), config)


_CONVERSION = "automatic conversion of the weights"
"""A part of transformers' message for experts that cannot be merged."""


class ModelBuilder:
    """Builds a model of one class from one config and loads its weights."""

    def __init__(self, cls: type, config: "PretrainedConfig", optional: tuple[str, ...] = ()) -> None:
        """Weights named in ``optional`` are initialised if the checkpoint lacks them."""
        self._cls: Any = cls
        self._config = config
        self._optional = optional

    def empty(self) -> nn.Module:
        """Return the model on the meta device: shapes without values.

        Raises ``ConfigError`` for a config without such a model.
        """
        try:
            with _META, _SkipInitialisation():
                empty: nn.Module = self._cls(copy.deepcopy(self._config))
        except CONFIG_FAULTS as error:
            raise ConfigError(
                f"no {architecture_of(self._config)} can be built from this config: {error}"
            ) from error
        return empty

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the model's weights in ``dtype``, computed without reading any."""
        return sum(parameter.numel() for parameter in self.empty().parameters()) * dtype.itemsize

    def load(
        self,
        state_dict: "Callable[[PreTrainedModel], StateDict]",
        *,
        dtype: torch.dtype,
        device: torch.device,
        products: Products | None = None,
    ) -> nn.Module:
        """Load the model in evaluation mode, without gradients.

        ``state_dict`` is called with an empty copy on the meta device. Tensors go to ``device`` one
        by one, so that the CPU's memory never holds a whole span that is for an accelerator.

        - Weights returned as ``PackedTensor``: their linear modules and embeddings are replaced by
          packed ones, which compute with ``products``.
        - Weights returned as ``ExpertMatrices``: ``PackedExperts`` replace the merged weights.

        Raises ``IntegrityError`` if a weight is missing or has another shape, and ``ConfigError``
        if a weight is not used.
        """
        device, dtype = torch_device(device), torch_dtype(dtype)
        weights = {name: as_tensor(each) for name, each in state_dict(self.empty()).items()}
        packed, experts = _pop(weights, PackedTensor), _pop(weights, Mapping)
        cls: Any = self._cls
        if (packed or experts) and products is not None:
            strip = partial(_install_packed, weights=packed, experts=experts, products=products)
            cls = _stripped_class(cls, strip)
        placement = {} if device.type == "cpu" else {"device_map": {"": device}}
        with _quietly(), _SkipInitialisation():
            try:
                model, info = cls.from_pretrained(
                    None,
                    config=self._config,
                    state_dict=weights,
                    dtype=dtype,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                    **placement,
                )
            except RuntimeError as error:
                if _CONVERSION not in str(error):
                    raise
                raise IntegrityError(
                    f"the checkpoint does not fit {self._cls.__name__}: its experts are not complete, or differ in shape"
                ) from error
        wrong = [*map(str, info["mismatched_keys"]), *info["error_msgs"]]
        self._check(info["missing_keys"], wrong, info["unexpected_keys"])
        # The default name is "None": PEFT writes it into adapters, and looks it up on the hub when
        # it saves one.
        model.name_or_path = model.config.name_or_path = ""
        loaded: nn.Module = model.to(device).requires_grad_(False)
        return loaded

    def check(self, shapes: Mapping[str, Sequence[int]], *, are_all: bool) -> None:
        """Raise what :meth:`load` would raise for tensors of these names and shapes. ``are_all``:
        there are no other tensors, so a missing weight is an error, too."""
        found = Conversion(self.empty()).misfits(shapes)
        if "score.weight" in shapes:  # a classifier, which has no other head
            found.missing.discard("lm_head.weight")
        self._check(found.missing if are_all else (), found.wrong, found.unused)

    def _check(self, missing: Collection[str], wrong: Iterable[str], unused: Iterable[str]) -> None:
        """Raise ``IntegrityError`` for weights that are missing or have another shape, and
        ``ConfigError`` for tensors that are not used."""
        if wrong := [*{*missing} - {*self._optional}, *wrong]:
            raise IntegrityError(f"the checkpoint does not fit {self._cls.__name__}: {min(wrong)}")
        if unused := [name for name in unused if not UNUSED.search(name)]:
            raise ConfigError(
                f"the checkpoint has the tensor {min(unused)[:200]!r}, which {self._cls.__name__} of transformers does not use",
                hint="without it answers would be wrong; a newer transformers may know the model",
            )


def _pop(weights: StateDict, kind: type) -> StateDict:
    """Remove the values of one type from ``weights``, and return them."""
    return {name: weights.pop(name) for name in list(weights) if isinstance(weights[name], kind)}


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights. Packed weights count as they are packed."""
    dense = sum(parameter.nbytes for parameter in model.parameters())
    return dense + packed_bytes(model) + packed_experts_bytes(model)


def with_blocks(config: "PretrainedConfig", start: int, end: int) -> "PretrainedConfig":
    """Return a copy of the config for blocks [start, end) only."""
    config = copy.deepcopy(config)
    _keep_blocks(config, start, end)
    return config


def _keep_blocks(config: "PretrainedConfig", start: int, end: int) -> None:
    """Reduce ``config`` to blocks [start, end), in every list that has one entry for each block."""
    total = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(config, name, value[start:end])
    config.num_hidden_layers = end - start


@contextmanager
def _quietly() -> Iterator[None]:
    """Turn off transformers' progress bar and its report of missing and unexpected weights, which
    ``load`` checks itself."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


class _SkipInitialisation(TorchFunctionMode):
    """Makes initialisation cheap on the meta device.

    ``torch.nn.init`` skips tensors there. ``torch.arange`` and ``torch.tensor`` use the CPU
    instead: on the meta device torch computes them in Python, and imports a computer algebra system
    for the shapes. That takes 35 MB, and one second for 30 blocks. Rotary embeddings are
    initialised from short ranges. Tensors of both devices concatenate to a tensor on the meta
    device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _INITIALISERS and given["tensor"].is_meta:
            return given["tensor"]
        # transformers finds the current device by making an empty tensor
        is_short = func is torch.arange or (func is torch.tensor and args[0] != [])
        if is_short and torch.device(given.get("device") or _META) == _META:
            given = {**given, "device": "cpu"}
        if func is torch.cat and any(tensor.is_meta for tensor in args[0]):
            args = ([tensor.to(_META) for tensor in args[0]], *args[1:])
        return func(*args, **given)
