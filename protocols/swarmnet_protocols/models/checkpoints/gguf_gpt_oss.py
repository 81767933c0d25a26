"""gpt-oss in gguf files, of which transformers reads neither the config nor the experts: its config, and the conversion of its tensors.

The rows of gate and up projection take turns in transformers' weights; in gguf they are tensors of their own. E experts, width I, hidden size D.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.models.checkpoints.gguf_header import Field

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig

ARCHITECTURE = "gpt-oss"
_OF_EXPERTS = re.compile(r"^(.*layers\.(\d+)\.mlp\.experts\.)(gate_up|down)_proj(_bias)?$")
_PARTS = re.compile(r"^blk\.\d+\.ffn_(gate|up)_exps\.(weight|bias)$")


def config_of(
    fields: Mapping[str, Field], *, vocabulary: int, width: int, is_tied: bool
) -> "PretrainedConfig":
    """The config by the fields of a file's header. ``width`` is that of the experts; ``is_tied``: the head has no weights of its own.

    Raises ``LookupError`` for a field that is missing, and the errors of ``GptOssConfig``.
    """
    from transformers import GptOssConfig

    own = {key.removeprefix(f"{ARCHITECTURE}."): value for key, value in fields.items()}
    rope: dict[str, Any] = {"rope_type": "default"}
    if own.get("rope.scaling.type", "none") != "none":
        rope = {
            "rope_type": own["rope.scaling.type"],
            "factor": own["rope.scaling.factor"],
            "original_max_position_embeddings": own["rope.scaling.original_context_length"],
            "beta_fast": own.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": own.get("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
        }
    return GptOssConfig(
        vocab_size=vocabulary,
        num_hidden_layers=own["block_count"],
        hidden_size=own["embedding_length"],
        intermediate_size=width,
        head_dim=own["attention.key_length"],
        num_attention_heads=own["attention.head_count"],
        num_key_value_heads=own["attention.head_count_kv"],
        num_local_experts=own["expert_count"],
        num_experts_per_tok=own["expert_used_count"],
        sliding_window=own["attention.sliding_window"],
        max_position_embeddings=own["context_length"],
        rms_norm_eps=own["attention.layer_norm_rms_epsilon"],
        rope_parameters=rope | {"rope_theta": own["rope.freq_base"]},
        tie_word_embeddings=is_tied,
        bos_token_id=own.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=own.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=own.get("tokenizer.ggml.padding_token_id"),
    )


class GptOssTensors:
    """Takes the place of transformers' ``TensorProcessor``: converts the tensors of a file to weights of transformers."""

    def preprocess_name(self, hf_name: str) -> str:
        return hf_name

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        """Add the tensors of a weight of experts to the map from gguf's to transformers' names."""
        if match := _OF_EXPERTS.match(hf_name):
            kind = "bias" if match[4] else "weight"
            for part in match[3].split("_"):
                gguf_to_hf_name_map[f"blk.{match[2]}.ffn_{part}_exps.{kind}"] = qual_name + hf_name

    def process(
        self,
        weights: "np.ndarray[Any, Any]",
        name: str,
        tensor_key_mapping: Mapping[str, str],
        parsed_parameters: dict[str, dict[str, Any]],
    ) -> Any:
        """Returns the converted tensor with its name, or puts it into ``parsed_parameters`` when both of its parts were given.

        Raises ``IntegrityError`` for parts of different shapes.
        """
        from transformers.modeling_gguf_pytorch_utils import GGUFTensor

        if name.endswith(".attn_sinks.weight"):
            return GGUFTensor(weights, name.removesuffix(".weight"), {})
        if name.endswith(".ffn_down_exps.weight"):
            return GGUFTensor(weights.swapaxes(1, 2), name.removesuffix(".weight"), {})
        if (match := _PARTS.match(name)) is None or name not in tensor_key_mapping:
            return GGUFTensor(weights, name, {})
        hf_name = tensor_key_mapping[name]
        parts = parsed_parameters.setdefault("parts", {}).setdefault(hf_name, {})
        parts[match[1]] = weights
        if len(parts) == 2:
            parsed_parameters["tensors"][hf_name] = _taking_turns(parts["gate"], parts["up"], hf_name)
        return GGUFTensor(weights, None, {})


def _taking_turns(gate: "np.ndarray[Any, Any]", up: "np.ndarray[Any, Any]", name: str) -> Any:
    """The weights [E, D, 2 I] from two of [E, I, D], or the biases [E, 2 I] from two of [E, I]."""
    import numpy as np
    import torch

    if gate.shape != up.shape:
        raise IntegrityError(f"the parts of {name} have the shapes {gate.shape} and {up.shape}")
    joined = np.stack([gate, up], 2).reshape(len(gate), -1, *gate.shape[2:])
    return torch.from_numpy(np.ascontiguousarray(joined.swapaxes(1, 2) if joined.ndim == 3 else joined))
