"""gpt-oss loads from gguf with the values, config and tokens of transformers; its experts stay in
MXFP4."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import GptOssConfig, GptOssForCausalLM

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from swarmnet_protocols.models.checkpoints.gguf.file import GgufCheckpoint
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_experts import PackedExperts, compute_expert
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.defences import nothing
from tests.support.models.rounding import assert_near
from tests.support.models.tensor_layers import TensorLayers

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


FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def load(path: Path, tmp_path: Path) -> LocalModel:
    return resolve(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("yarn", [True, False])
def test_the_weights_and_the_config_are_those_of_transformers(yarn: bool, tmp_path: Path) -> None:
    theirs = write_gpt_oss(tmp_path / "oss.gguf", yarn=yarn)
    model = load(tmp_path / "oss.gguf", tmp_path)
    mine = model.load_whole(**FLOAT32)
    expected = theirs.state_dict()
    assert mine.state_dict().keys() == expected.keys()
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.randint(3, 60, (1, 90), generator=torch.Generator().manual_seed(0))
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    own, other = model.config.to_dict(), theirs.config.to_dict()
    differing = {key for key in own if own[key] != other[key]}
    assert differing <= {
        "transformers_version",
        "bos_token_id",
        "eos_token_id",
        "_name_or_path",
        "dtype",
        "architectures",
    }
    assert model.tokenizer()("A!!").input_ids == [32, 63]


def test_a_chain_with_experts_in_mxfp4_gives_transformers_tokens(tmp_path: Path) -> None:
    theirs = write_gpt_oss(tmp_path / "oss.gguf")
    theirs.generation_config.eos_token_id = None
    model = load(tmp_path / "oss.gguf", tmp_path)
    options = {**FLOAT32, "backend": load_backend(default_cache_dir()), "packed": True}
    hops = [load_stage(model, start, end, **options) for start, end in ((0, 1), (1, BLOCKS))]
    for hop in hops:
        for _, module in experts_modules(hop._model):
            matrices = [*module.gate_up_proj.matrices.values(), *module.down_proj.matrices.values()]
            assert len(matrices) == 2 * EXPERTS
            assert {each.format for matrix in matrices for each in matrix.segments} == {Format.MXFP4}
    local = TensorLayers(model)
    prompt = torch.randint(3, 60, (1, 29), generator=torch.Generator().manual_seed(0))
    text = theirs.generate(prompt, max_new_tokens=8, do_sample=False)[0]
    sequences = [hop.new_sequence() for hop in hops]
    tokens, new = prompt[0], prompt[0]
    while len(tokens) < len(text):
        rows = local.embed(new)
        for hop, sequence in zip(hops, sequences, strict=True):
            [rows] = hop.forward([(sequence, rows)])
        new = local.logits(rows[-1:]).argmax(-1)
        tokens = torch.cat([tokens, new])
    assert tokens.tolist() == text.tolist()


def test_some_experts_load_without_the_others(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "oss.gguf")
    model = load(tmp_path / "oss.gguf", tmp_path)
    assert model.precision == "mxfp4"
    some: Any = model.load_experts(1, [0, 2], **FLOAT32)
    assert isinstance(some.down_proj, PackedExperts)
    assert {*some.down_proj.matrices} == {*some.gate_up_proj.matrices} == {0, 2}
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    [(_, dense)] = experts_modules(model.load_span(1, 2, **FLOAT32))
    for expert in (0, 2):
        expected = compute_expert(dense, expert, rows)
        assert_near(compute_expert(some, expert, rows), expected)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "missing", ["blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.bias", "blk.1.attn_sinks.weight"]
)
def test_a_file_that_lacks_a_part_is_refused(
    missing: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpt_oss(tmp_path / "oss.gguf", leave_out=missing)
    with pytest.raises(IntegrityError, match="does not fit"):
        load(tmp_path / "oss.gguf", tmp_path)
    monkeypatch.setattr(GgufCheckpoint, "_check_sizes", nothing)
    with pytest.raises(IntegrityError, match=r"does not fit|lacks expert"):
        load(tmp_path / "oss.gguf", tmp_path).load_span(1, 2, packed=packed, **FLOAT32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.bias"])
def test_parts_that_do_not_fit_together_are_refused(
    name: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gpt_oss(tmp_path / "oss.gguf", **{name: 32})
    with pytest.raises(IntegrityError, match=r"gate_up_proj"):
        load(tmp_path / "oss.gguf", tmp_path)
    monkeypatch.setattr(GgufCheckpoint, "_check_sizes", nothing)
    with pytest.raises(IntegrityError, match=r"gate_up_proj"):
        load(tmp_path / "oss.gguf", tmp_path).load_span(1, 2, packed=packed, **FLOAT32)


@pytest.mark.parametrize("missing", ["sliding_window", "token_embd.weight"])
def test_a_file_without_a_setting_is_a_clear_error(missing: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "oss.gguf", leave_out=missing)
    with pytest.raises(ConfigError, match=r"oss\.gguf.*gpt-oss"):
        load(tmp_path / "oss.gguf", tmp_path)


def test_rows_that_take_turns_have_one_shape_and_one_format() -> None:
    rows = torch.arange(2 * 34, dtype=torch.uint8).view(2, 34)
    first, second = (PackedTensor.of(Format.Q8_0, each) for each in (rows, rows + 100))
    [joined] = PackedTensor.taking_turns([first, second]).segments
    assert torch.equal(joined.tensor, torch.stack([rows[0], rows[0] + 100, rows[1], rows[1] + 100]))
    for other in (PackedTensor.of(Format.Q8_0, rows[:1]), PackedTensor.of(Format.MXFP4, rows)):
        with pytest.raises(ValueError, match="take turns"):
            PackedTensor.taking_turns([first, other])
