"""The arithmetic of each family's blocks, as data. ``decode.c`` computes any combination.

``block_shapes`` reads a config, and ``decoder_layers.py`` finds the weights. A row of ``FAMILIES``
says how a family differs from Llama; a family without a row is taken for one of the Llama shape.
When a stage is loaded, trials compare outputs with those of transformers, so a wrong row costs
speed and not correctness.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarmnet_node.engine.kernels.rotary_embeddings import RotaryEmbedding, rotary_embedding

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_pytorch_tanh": 1,
    "gelu_new": 1,
    "gelu": 2,
    "relu2": 3,
}
"""Activations by their names in configs, and their numbers in decode.c."""


@dataclass(frozen=True)
class Mixture:
    """A family's mixture of experts: modules by their paths in a block, and settings by their
    names."""

    router: str = "mlp.gate"
    """The module whose outputs are a logit of each expert."""
    experts: str = "mlp.experts"
    correction: str = ""
    """The buffer that is added to the scores that choose experts. Empty without one."""
    is_sigmoid: bool = False
    """True if scores are sigmoids of the router's outputs. Otherwise scores are the softmax."""
    normalises: str = ""
    """The setting that divides the weights of a position by their sum. Empty if a family always
    divides."""
    scale: str = ""
    """The setting with the factor of the weights. Empty for a factor of 1."""
    shared_gate_up: tuple[str, ...] = ()
    """Modules of the MLP that computes every position. Empty without one."""
    shared_down: str = ""
    has_share: bool = False
    """True if the last module of ``shared_gate_up`` has one output. Its sigmoid multiplies the
    outputs of the MLP."""


@dataclass(frozen=True)
class Family:
    """The modules of a family's blocks, by their paths in a block. Empty where there is none."""

    attention_norm: str = "input_layernorm"
    """The norm of the inputs of attention."""
    attention_out_norm: str = ""
    """The norm of the outputs of attention."""
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = ""
    query_norm: str = "self_attn.q_norm"
    """The norms of heads may be missing."""
    key_norm: str = "self_attn.k_norm"
    value_norm: str = ""
    is_centred: bool = False
    """True if norms are LayerNorms, which subtract the mean. Others are RMSNorms."""
    gain: float = 0.0
    """Number that is added to the weights of norms."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    is_gated: bool = True
    down: str = "mlp.down_proj"
    activation: str = "hidden_act"
    """The setting that names the activation."""
    is_parallel: bool = False
    """True if the MLP has the same inputs as attention."""
    is_interleaved: bool = False
    """True if rotary embeddings turn neighbours."""
    unrotated: str = ""
    """The type of layers without rotary embedding."""
    has_shared_values: bool = False
    """True if keys are the values where a block has no projection of values."""
    scale: str = ""
    """A number by which a block multiplies its outputs."""
    mixture: Mixture | None = None
    """Routed experts of blocks with a router. Other blocks have an MLP instead."""

    def of_block(self, *, has_router: bool) -> "Family":
        """Return the modules of a block with or without routed experts."""
        if self.mixture is None or not has_router:
            return replace(self, mixture=None)
        return replace(self, gate_up=self.mixture.shared_gate_up, down=self.mixture.shared_down)

    @property
    def products(self) -> "dict[str, tuple[str, ...]]":
        """The linear modules of each product of a block."""
        down = (self.down,) if self.down else ()
        return {"qkv": self.qkv, "output": (self.output,), "gate_up": self.gate_up, "down": down}


@dataclass(frozen=True)
class BlockShape:
    """One block: its modules, and the numbers of its config."""

    family: Family
    heads: int
    head_size: int
    activation: str
    residual: float
    """Factor of what attention and MLP add to the hidden states."""
    rotary: RotaryEmbedding | None
    query_growth: tuple[float, int] | None
    """(b, n): queries at position p are multiplied by 1 + b log(1 + floor(p / n)); None: they are
    not."""
    chosen: int = 0
    """Experts of a position. 0 in a block without routed experts."""
    is_normalised: bool = False
    """True if the weights of these experts are divided by their sum."""
    mixed_scale: float = 1.0
    """Factor of the weights."""


_SANDWICHED: dict[str, Any] = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_GEMMA: dict[str, Any] = {**_SANDWICHED, "gain": 1.0, "activation": "hidden_activation"}
_NORMED_OUTPUTS: dict[str, Any] = {**_SANDWICHED, "attention_norm": "", "mlp_norm": ""}
_COHERE: dict[str, Any] = {
    **{"mlp_norm": "input_layernorm", "is_centred": True, "is_parallel": True, "is_interleaved": True},
}

_LACKS: tuple[tuple[str, tuple[Any, ...]], ...] = (("clip_qkv", (None,)), ("n_group", (None, 1)))
"""Settings that decode.c lacks, and the values that switch them off: bounds of queries, keys and
values, and experts in groups."""
_SHARED_EXPERT = tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up"))
_GRANITE_EXPERTS = Mixture(router="block_sparse_moe.router", experts="block_sparse_moe.experts")

FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "qwen2", "qwen3", "granite", "smollm3"),
        Family(),
    ),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), Family()),
    "phi3": Family(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
    "gemma2": Family(**_GEMMA),
    "gemma3_text": Family(**_GEMMA),
    "gemma4_text": Family(
        **_SANDWICHED,
        value_norm="self_attn.v_norm",
        activation="hidden_activation",
        has_shared_values=True,
        scale="layer_scalar",
    ),
    "olmo2": Family(**_NORMED_OUTPUTS),
    "olmo3": Family(**_NORMED_OUTPUTS),
    "cohere": Family(**_COHERE),
    "cohere2": Family(**_COHERE, unrotated="full_attention"),
    **dict.fromkeys(("qwen3_moe", "olmoe"), Family(mixture=Mixture(normalises="norm_topk_prob"))),
    **dict.fromkeys(("mixtral", "qwen3_vl_moe_text"), Family(mixture=Mixture())),
    "qwen2_moe": Family(
        mixture=Mixture(
            normalises="norm_topk_prob",
            shared_gate_up=(*_SHARED_EXPERT, "mlp.shared_expert_gate"),
            shared_down="mlp.shared_expert.down_proj",
            has_share=True,
        )
    ),
    "granitemoe": Family(mixture=_GRANITE_EXPERTS),
    "granitemoeshared": Family(
        mixture=replace(
            _GRANITE_EXPERTS,
            shared_gate_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
        )
    ),
    "glm4_moe": Family(
        mixture=Mixture(
            correction="mlp.gate.e_score_correction_bias",
            is_sigmoid=True,
            normalises="norm_topk_prob",
            scale="routed_scaling_factor",
            shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            shared_down="mlp.shared_experts.down_proj",
        )
    ),
    "minimax_m2": Family(mixture=Mixture(correction="mlp.e_score_correction_bias", is_sigmoid=True)),
    "starcoder2": Family(is_centred=True, gate_up=("mlp.c_fc",), is_gated=False, down="mlp.c_proj"),
    # Families that docs/families.md does not list.
    "arcee": Family(gate_up=("mlp.up_proj",), is_gated=False),
    "ernie4_5": Family(is_interleaved=True),
    "gemma": Family(gain=1.0),
    "glm": Family(gate_up=("mlp.gate_up_proj",), is_interleaved=True),
    "glm4": Family(
        attention_out_norm="post_self_attn_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        gate_up=("mlp.gate_up_proj",),
        is_interleaved=True,
    ),
    "helium": Family(is_interleaved=True),
}


def family_of(config: Any) -> Family:
    """Return the row of a config's family."""
    return FAMILIES.get(config.model_type, Family())


def block_shapes(
    config: Any, head_sizes: Sequence[int], routers: Sequence[bool]
) -> Sequence[BlockShape] | None:
    """Return the shapes of all blocks of a decoder stack, whose heads have these sizes.

    ``routers`` says which blocks have routed experts. None if the config has an activation, a
    rotary embedding or a setting that decode.c lacks.
    """
    family = family_of(config)
    activation = getattr(config, family.activation, None)
    if activation not in ACTIVATIONS or any(getattr(config, name, None) not in off for name, off in _LACKS):
        return None
    try:
        return [
            _block_shape(config, family.of_block(has_router=has_router), index, size)
            for index, (size, has_router) in enumerate(zip(head_sizes, routers, strict=True))
        ]
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError):
        return None


def _block_shape(config: Any, family: Family, index: int, head_size: int) -> BlockShape:
    kinds, rotated = getattr(config, "layer_types", None), getattr(config, "no_rope_layers", None)
    kind, mixture = kinds[index] if kinds else "", family.mixture
    settings = config.rope_parameters.get(kind, config.rope_parameters)
    rotary = None
    if rotated[index] if rotated else not kind or kind != family.unrotated:
        rotary = rotary_embedding(
            settings, head_size, config.max_position_embeddings, is_interleaved=family.is_interleaved
        )
    growth = None
    if (rate := settings.get("llama_4_scaling_beta")) is not None:
        growth = float(rate), max(1, int(settings["original_max_position_embeddings"]))
    return BlockShape(
        family=family,
        heads=config.num_attention_heads,
        head_size=head_size,
        activation=getattr(config, family.activation),
        residual=float(getattr(config, "residual_multiplier", 1.0)),
        rotary=rotary,
        query_growth=growth,
        chosen=int(config.num_experts_per_tok) if mixture else 0,
        is_normalised=bool(mixture and (not mixture.normalises or getattr(config, mixture.normalises))),
        mixed_scale=float(getattr(config, mixture.scale)) if mixture and mixture.scale else 1.0,
    )
