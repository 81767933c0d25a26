"""gpt-oss loads from gguf with the values, config and tokens of transformers; its experts stay in
MXFP4."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_client.model.local_layers import LoadOptions, LocalLayers
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_experts import PackedExperts, compute_expert, experts_modules
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.support.gpt_oss_gguf import BLOCKS, EXPERTS, WIDTH, write_gpt_oss
from tests.support.rounding import assert_near

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
    hops = [Stage.load(model, start, end, **options) for start, end in ((0, 1), (1, BLOCKS))]
    for hop in hops:
        for _, module in experts_modules(hop._model):
            matrices = [*module.gate_up_proj.matrices.values(), *module.down_proj.matrices.values()]
            assert len(matrices) == 2 * EXPERTS
            assert {each.format for matrix in matrices for each in matrix.segments} == {Format.MXFP4}
    local = LocalLayers(model, LoadOptions(torch.float32, torch.device("cpu")))
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
def test_a_file_that_lacks_a_part_is_refused(missing: str, packed: bool, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "oss.gguf", leave_out=missing)
    with pytest.raises(IntegrityError, match=r"does not fit|lacks expert"):
        load(tmp_path / "oss.gguf", tmp_path).load_span(1, 2, packed=packed, **FLOAT32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.bias"])
def test_parts_that_do_not_fit_together_are_refused(name: str, packed: bool, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "oss.gguf", **{name: 32})
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
    assert torch.equal(joined.data, torch.stack([rows[0], rows[0] + 100, rows[1], rows[1] + 100]))
    for other in (PackedTensor.of(Format.Q8_0, rows[:1]), PackedTensor.of(Format.MXFP4, rows)):
        with pytest.raises(ValueError, match="take turns"):
            PackedTensor.taking_turns([first, other])
