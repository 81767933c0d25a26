"""Writes a small gpt-oss as gguf, with the names and formats of published files: experts in MXFP4,
other matrices in Q8_0."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import GptOssConfig, GptOssForCausalLM

WIDTH, EXPERT_WIDTH, EXPERTS, BLOCKS = 64, 96, 4, 3
_OWN_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gpt_oss(path: Path, *, leave_out: str = "", yarn: bool = True, **shapes: int) -> GptOssForCausalLM:
    """Write the file, and return the model with the values that it has.

    ``leave_out``: a tensor or a field that is not written. ``shapes``: sizes of the first dimension
    to which tensors are cut, by name.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    if yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        }
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0}
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=EXPERT_WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=6,
        max_position_embeddings=256,
        rms_norm_eps=float(np.float32(1e-5)),  # as a file has it
        rope_parameters=rope,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.2)
    writer = gguf.GGUFWriter(path, "gpt-oss")
    _add_fields(writer, leave_out, yarn=yarn)

    def add(name: str, values: np.ndarray[Any, Any], kind: GGMLQuantizationType | None) -> torch.Tensor:
        """Returns the values that the file has."""
        values = np.ascontiguousarray(values)
        if name != leave_out:
            kept = np.ascontiguousarray(values[:, : shapes[name]]) if name in shapes else values
            if kind is None:
                writer.add_tensor(name, kept)
            else:
                writer.add_tensor(name, gguf.quantize(kept, kind), raw_dtype=kind)
        return torch.from_numpy(
            values if kind is None else gguf.dequantize(gguf.quantize(values, kind), kind)
        )

    for name, tensor in model.state_dict().items():
        tensor.copy_(_add(add, name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(add: Any, name: str, values: np.ndarray[Any, Any]) -> torch.Tensor:
    if name in _ENDS:
        return add(_ENDS[name], values, GGMLQuantizationType.Q8_0 if values.ndim == 2 else None)
    _, _, block, rest = name.split(".", 3)
    stem, kind = f"blk.{block}.", GGMLQuantizationType.MXFP4
    if rest.startswith("mlp.experts."):
        own, is_bias = rest.removeprefix("mlp.experts.").removesuffix("_bias"), rest.endswith("_bias")
        end, kind = (".bias", None) if is_bias else (".weight", kind)
        rows = values if is_bias else values.swapaxes(1, 2)
        if own == "down_proj":
            found = add(f"{stem}ffn_down_exps{end}", rows, kind)
        else:
            parts = [
                add(f"{stem}ffn_{part}_exps{end}", rows[:, at::2], kind)
                for at, part in ((0, "gate"), (1, "up"))
            ]
            found = torch.stack(parts, 2).flatten(1, 2)
        return found if is_bias else found.transpose(1, 2)
    module, _, end = rest.rpartition(".")
    own = _OWN_NAMES.get(rest) or f"{_OWN_NAMES[module]}.{end}"
    is_matrix = values.ndim == 2 and "router" not in rest
    return add(stem + own, values, GGMLQuantizationType.Q8_0 if is_matrix else None)


def _add_fields(writer: gguf.GGUFWriter, leave_out: str, *, yarn: bool) -> None:
    writer.add_block_count(BLOCKS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(EXPERT_WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    if leave_out != "sliding_window":
        writer.add_sliding_window(6)
    if yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list([*(chr(33 + i) for i in range(63)), "!!"])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
