"""Models of the Llama shape, described without transformers: sizes and names.

A host that computes such layers in C needs no more than this of a model's config, and imports
neither transformers nor torch. ``LlamaShape.of`` accepts only settings whose meaning it knows:
transformers builds every other model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models.checkpoints.unread import UNUSED
from swarmnet_protocols.models.manifest import MAX_BLOCKS, MAX_HIDDEN_SIZE

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of ``model_type`` whose layers have this shape, unless a setting says otherwise."""
_MAX_SIZE = 1 << 24
_OPTIONAL = ("q_norm.weight", "k_norm.weight")
_ROPE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""For each kind of rotary embedding that is known here: the numbers that it needs."""


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a model. Attributes have the names of transformers' settings, because the
    readers of a config take this in its place."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "LlamaShape | None":
        """Return the shape that the settings of a config describe. None for another shape, or if a
        setting is missing or unknown."""
        kind, rope = settings.get("model_type"), _rope_of(settings)
        heads: Any = settings.get("num_attention_heads")
        hidden: Any = settings.get("hidden_size")
        layers: Any = settings.get("num_hidden_layers")
        epsilon = settings.get("rms_norm_eps")
        if kind not in FAMILIES or rope is None or settings.get("hidden_act") != "silu":
            return None
        if settings.get("quantization_config") is not None or _has_windows(settings):
            return None
        if not _is_size(heads) or not _is_size(hidden, MAX_HIDDEN_SIZE):
            return None
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": settings.get("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": settings.get("num_key_value_heads") or heads,
            "head_dim": settings.get("head_dim") or hidden // heads,
            "max_position_embeddings": settings.get("max_position_embeddings"),
        }
        if not all(map(_is_size, sizes.values())) or not _is_size(layers, MAX_BLOCKS):
            return None
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            return None
        return cls(
            model_type=kind, num_hidden_layers=layers, rms_norm_eps=epsilon, rope_parameters=rope, **sizes
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of the linear modules of a layer, by path."""
        queries, keys = (
            count * self.head_dim for count in (self.num_attention_heads, self.num_key_value_heads)
        )
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    @property
    def norms(self) -> dict[str, int]:
        """Sizes of the norms of a layer, by path. Not all families have norms of single heads."""
        whole = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), self.hidden_size)
        return whole | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), self.head_dim)


class EmptyModel:
    """Stands for an empty model of transformers: where checkpoints look up the names and shapes of
    weights."""

    base_model_prefix = "model"

    def __init__(
        self, shape: LlamaShape, weights: Mapping[str, tuple[int, ...]], *, is_stack: bool = False
    ) -> None:
        """``weights``: their shapes. ``is_stack``: a decoder stack, otherwise a CausalLM."""
        self.config = shape
        self.base_model = self if is_stack else None
        self._shapes = {name: SimpleNamespace(shape=sizes) for name, sizes in weights.items()}

    @classmethod
    def stack(cls, shape: LlamaShape, layers: int) -> "EmptyModel":
        """Return a decoder stack. Biases that few families have are among its weights."""
        weights = {
            f"layers.{layer}.{name}": sizes for layer in range(layers) for name, sizes in _weights(shape)
        }
        return cls(shape, weights, is_stack=True)

    @classmethod
    def ends(cls, shape: LlamaShape, vocabulary: int) -> "EmptyModel":
        """Return a CausalLM without layers: its embeddings, final norm and lm_head."""
        sizes = (vocabulary, shape.hidden_size)
        return cls(
            shape,
            {"model.embed_tokens.weight": sizes, "model.norm.weight": sizes[1:], "lm_head.weight": sizes},
        )

    def check(self, weights: Mapping[str, Any], of: str) -> None:
        """Raise ``IntegrityError`` if a weight is missing or has another shape, and ``ConfigError``
        if one is unknown. ``of`` says in errors what they are weights of."""
        needed = {name for name in self._shapes if name.endswith(".weight") and not name.endswith(_OPTIONAL)}
        if missing := needed - weights.keys():
            raise IntegrityError(f"{of} lack {min(missing)}")
        for name, weight in weights.items():
            if name in self._shapes:
                expected = self._shapes[name].shape
                if tuple(weight.shape) != expected:
                    raise IntegrityError(f"{of} have {name} of {tuple(weight.shape)} instead of {expected}")
            elif not UNUSED.search(name):
                raise ConfigError(f"{of} have the tensor {name[:200]!r}, which is not used")

    def state_dict(self) -> dict[str, SimpleNamespace]:
        """Return the shape of each weight, by name."""
        return self._shapes

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the modules that checkpoints treat in a special way. There are none."""
        return iter(())

    def has_matrix(self, name: str) -> bool:
        """Return whether a weight is a matrix, which can be packed."""
        return name in self._shapes and len(self._shapes[name].shape) == 2


def _weights(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the weights of a layer, by name, and their shapes."""
    for path, sizes in shape.linears.items():
        yield f"{path}.weight", sizes
        yield f"{path}.bias", sizes[:1]
    for path, size in shape.norms.items():
        yield f"{path}.weight", (size,)


def _rope_of(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parameters of the rotary embedding. None if its kind is not known here."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return None
    rope = {"rope_theta": settings.get("rope_theta"), **rope}
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    numbers = ("rope_theta", *_ROPE_SETTINGS.get(kind, ("",)))
    shares = (rope.get("partial_rotary_factor"), settings.get("partial_rotary_factor"))
    if any(share not in (None, 1) for share in shares):
        return None
    is_known = all(isinstance(value := rope.get(each), int | float) and value > 0 for each in numbers)
    return rope if is_known else None


def _has_windows(settings: Mapping[str, Any]) -> bool:
    """Return whether some layers may see only a part of the sequence."""
    kinds = settings.get("layer_types") or ()
    if any(kind != "full_attention" for kind in kinds):
        return True
    if settings.get("model_type") == "mistral":  # without the setting, it has a window
        return settings.get("sliding_window", 0) is not None
    return bool(settings.get("sliding_window") and settings.get("use_sliding_window", True))


def _is_size(value: object, most: int = _MAX_SIZE) -> bool:
    return type(value) is int and 0 < value <= most
