"""An architecture's own transformers model, cut to some of its blocks or to what lies around them."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models.blank import blank
from swarmnet_protocols.models.checkpoint import CONFIG_FAULTS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

StateDict = dict[str, Any]

_OWN_ATTENTION = (None, "eager", "sdpa")
_OWN_EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
"""What transformers computes with code of its own and torch's; anything else is code that it fetches from the hub, or finds installed."""


def causal_class(config: "PretrainedConfig") -> type:
    """The CausalLM class of an architecture; raises ``ConfigError`` where there is none, or the config asks for foreign code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    _check_implementations(config)

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{architecture_of(config)} is not a text generation model that transformers knows",
            hint="use a decoder-only language model such as Llama, Qwen3, Gemma 3 or Mixtral",
        )
    found: type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found


def _check_implementations(config: "PretrainedConfig") -> None:
    """A config may come from another peer: it does not choose which code runs here."""
    for known, name in ((_OWN_ATTENTION, "_attn_implementation"), (_OWN_EXPERTS, "_experts_implementation")):
        asked = getattr(config, name, None)
        if asked not in known:
            raise ConfigError(
                f"the config asks for {name.strip('_')} {str(asked)[:100]!r}, which is code from elsewhere",
                hint=f"remove it, or use {' or '.join(sorted(filter(None, known)))}",
            )
    for part in config.sub_configs:
        if (inner := getattr(config, part, None)) is not None:
            _check_implementations(inner)


def architecture_of(config: "PretrainedConfig") -> str:
    """The name people know an architecture by."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return str(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
    return str((config.architectures or [config.model_type])[0])


def base_class(config: "PretrainedConfig") -> type:
    """The class of an architecture's decoder stack, if it is one that can be cut."""
    import torch

    refusal = ConfigError(
        f"{architecture_of(config)} cannot be cut into blocks: it is not embeddings, layers and a norm",
        hint="use a model of a family such as Llama, Qwen3, Gemma 3 or Mixtral",
    )
    cls = causal_class(config)
    if not all(isinstance(getattr(config, name, None), int) for name in ("num_hidden_layers", "hidden_size")):
        raise refusal
    try:
        with torch.device("meta"), blank():
            base: Any = cls(with_blocks(config, 0, 0)).base_model
    except CONFIG_FAULTS as error:
        raise ConfigError(f"the config of {architecture_of(config)} makes no model: {error}") from error
    children = {name for name, _ in base.named_children() if not name.startswith("rotary_emb")}
    if children != {"embed_tokens", "layers", "norm"}:
        raise refusal
    if changing := _rope_types(config) & {"dynamic", "longrope"}:
        raise ConfigError(
            f"{architecture_of(config)} has {min(changing)} rotary embeddings: they change with a sequence's length, "
            "so cached keys go stale and sequences cannot share a batch",
            hint="use a model with another rope_type",
        )
    return type(base)


def _rope_types(config: "PretrainedConfig") -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", "default")) for each in (by_layer_type or [parameters])}


def build_span(config: "PretrainedConfig", start: int, end: int) -> "Builder":
    """How to build the decoder stack of blocks [start, end): no embeddings, no final norm, layers numbered from 0."""
    from torch import nn

    def cut(model: Any) -> None:
        keep_layers(model, start, end)
        model.embed_tokens = None
        model.norm = nn.Identity()

    return Builder(_cut_class(base_class(config), cut), config)


def build_edges(
    config: "PretrainedConfig", head: "Head", taken: "Callable[[nn.ModuleList], None]"
) -> "Builder":
    """How to build the model with this head and without its layers, which ``taken`` gets, on the meta device."""
    from torch import nn

    base_class(config)

    def cut(model: Any) -> None:
        taken(model.base_model.layers)
        model.base_model.layers = nn.ModuleList()

    return Builder(_cut_class(head.model_class(config), cut), config, fresh=head.fresh)


@dataclass(frozen=True)
class Head:
    """What follows the decoder stack: the language model's own head, or with ``labels`` a classifier, fresh where none is stored."""

    labels: int | None = None

    @property
    def fresh(self) -> tuple[str, ...]:
        """Weights that need not be stored."""
        return () if self.labels is None else ("score.weight",)

    def model_class(self, config: "PretrainedConfig") -> type:
        """The architecture's class; raises ``ConfigError`` where there is none."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

        if self.labels is None:
            return causal_class(config)
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ConfigError(f"transformers has no classifier for {architecture_of(config)}")
        found: type = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
        return found


def keep_layers(model: Any, start: int, end: int) -> None:
    """Leave a decoder stack its layers [start, end), numbered from 0."""
    from torch import nn

    model.layers = nn.ModuleList(list(model.layers)[start:end])
    for module in model.layers.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= start
    _keep_blocks(model.config, start, end)


def _cut_class(cls: Any, cut: "Callable[[Any], None]") -> type:
    """Makes objects of ``cls``, cut before they have weights.

    They are built whole (on the meta device), so that every layer and the rotary embedding are what the whole config
    makes them.
    """

    def init(self: Any, config: "PretrainedConfig") -> None:
        cls.__init__(self, config)
        cut(self)
        self.__class__ = cls

    return type(cls.__name__, (cls,), {"__init__": init})


def build_whole(config: "PretrainedConfig") -> "Builder":
    """How to build the CausalLM as it is."""
    return Builder(causal_class(config), config)


class Builder:
    """A class and a config that together make a model; weights in ``fresh`` are initialised when none are given."""

    def __init__(self, cls: type, config: "PretrainedConfig", fresh: tuple[str, ...] = ()) -> None:
        self._cls: Any = cls
        self._config = config
        self._fresh = fresh

    def load(
        self,
        state_dict: "Callable[[PreTrainedModel], StateDict]",
        *,
        dtype: "torch.dtype",
        device: "torch.device",
    ) -> "nn.Module":
        """The model with its weights, in evaluation mode; ``state_dict`` gets an empty one on the meta device.

        Raises ``IntegrityError`` when a weight is missing or has another shape.
        """
        import torch

        with torch.device("meta"), blank():
            empty = self._cls(copy.deepcopy(self._config))
        with _quietly(), blank():
            model, info = self._cls.from_pretrained(
                None,
                config=self._config,
                state_dict=state_dict(empty),
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        missing = set(info["missing_keys"]) - set(self._fresh)
        wrong = [*missing, *(str(key) for key in info["mismatched_keys"]), *info["error_msgs"]]
        if wrong:
            raise IntegrityError(f"the checkpoint does not fit {self._cls.__name__}: {min(wrong)}")
        # Not "None": PEFT writes the name into adapters, and asks the Hub about it when it saves one.
        model.name_or_path = model.config.name_or_path = ""
        loaded: nn.Module = model.to(device).requires_grad_(False)
        return loaded


def with_blocks(config: "PretrainedConfig", start: int, end: int) -> "PretrainedConfig":
    """A config that speaks of blocks [start, end) only."""
    config = copy.deepcopy(config)
    _keep_blocks(config, start, end)
    return config


def _keep_blocks(config: "PretrainedConfig", start: int, end: int) -> None:
    """Make ``config`` speak of blocks [start, end) only, in the lists that have an entry for each block."""
    total = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == total:
            setattr(config, name, value[start:end])
    config.num_hidden_layers = end - start


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' progress bar, and its report of weights that are missing or too many: both are looked at here."""
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
