"""Sizes that the config of a model states: of transformers, or a ``LlamaShape``."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerWidths:
    """Widths of a decoder layer: its hidden states, its query heads together, and its MLP.

    In a mixture of experts, ``intermediate`` counts all experts that compute one position.
    """

    hidden: int
    attention: int
    intermediate: int

    @classmethod
    def of(cls, config: Any) -> "LayerWidths":
        """Return the widths in a config. Where layers differ, the largest counts."""
        heads = getattr(config, "num_attention_heads", None) or 1
        head_size = max(_of_layers(config, "head_dim")) or config.hidden_size // heads
        widths = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        widest = max(widths) if isinstance(widths, list | tuple) else int(widths)
        experts = getattr(config, "num_experts_per_tok", None) or 1
        of_experts = experts * int(getattr(config, "moe_intermediate_size", None) or widest)
        return cls(config.hidden_size, heads * head_size, max(widest, of_experts))


def _of_layers(config: Any, name: str) -> set[int]:
    """Return the values of a setting in all layers. 0 stands for a missing value."""
    layers = getattr(config, "per_layer_config", None)
    configs = [config] if layers is None else [layers[index] for index in range(config.num_hidden_layers)]
    return {getattr(each, name, None) or 0 for each in configs or [config]}


def max_positions(config: Any) -> int:
    """Return the most positions of a sequence.

    In some models the rotary embedding of all positions changes at a certain length (LongRoPE, Ding
    et al., 2024; dynamic NTK). There every host would have to compute all earlier positions again,
    so sequences end before that length.
    """
    longest = int(config.max_position_embeddings)
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for each in by_layer_type or [parameters]:
        if each.get("rope_type") == "longrope":
            longest = min(longest, int(each.get("original_max_position_embeddings") or longest))
    return longest
