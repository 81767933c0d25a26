"""Routed experts of every family compute from packed weights, and some of them can be loaded
without the others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.fetching import pieces
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from swarmnet_protocols.models.partial_model import ModelBuilder
from swarmnet_protocols.quantization.formats import PRECISIONS
from swarmnet_protocols.quantization.packed_experts import PackedExperts, compute_expert, compute_experts
from swarmnet_protocols.quantization.packed_linear import PackedLinear
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.defences import nothing
from tests.support.gguf.packed_matrices import values_of
from tests.support.models import big_model
from tests.support.models.hub_families import FAMILIES
from tests.support.models.model_hub import NAME, model_hub
from tests.support.models.rounding import NEAR, assert_near
from tests.support.models.tensor_layers import TensorLayers
from tests.support.models.tiny_models import write_gguf

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
WITH_EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    "minimax_m2",
    "qwen3_5_moe",
)
NEW_TOKENS = 8


def save(family: str, folder: Path, **changes: Any) -> Path:
    """A tiny model in 16 bits, with rows long enough to be quantised."""
    tiny = FAMILIES[family]
    wide = {name: 64 for name in tiny.config if name.endswith("intermediate_size")}
    config = {**tiny.config, **wide, **changes}
    if "text_config" in config:
        text = config["text_config"]
        wide = {name: 64 for name in text if name.endswith("intermediate_size")}
        config["text_config"] = {**text, **wide}
    path = replace(tiny, config=config).save(folder)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def reference(family: str, path: Path) -> Any:
    model: Any = getattr(transformers, FAMILIES[family].architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    model.generation_config.eos_token_id = None
    return model


def with_values_of(stage: Stage, model: Any) -> None:
    """Give ``model`` the dequantised weights of ``stage``, which has all its blocks."""
    decoder = model.get_decoder()
    for path, module in stage._model.named_modules():
        own = decoder.get_submodule(path) if path else decoder
        if isinstance(module, PackedLinear):
            own.weight.data = values_of(module.packed)
        for name, weight in vars(module).items():
            if isinstance(weight, PackedExperts):
                matrices = [weight.matrices[expert] for expert in range(own.num_experts)]
                values = torch.stack([values_of(each) for each in matrices if isinstance(each, PackedTensor)])
                getattr(own, name).data = values.transpose(1, 2) if own.is_transposed else values


def packed_weights(stage: Stage) -> list[PackedExperts]:
    values = (value for module in stage._model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, PackedExperts)]


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["as stored", "int8", "int4"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_packed_experts_give_the_tokens_of_transformers(family: str, precision: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / "model")
    model = resolve(str(path), cache_dir=tmp_path / "cache")
    blocks = model.manifest.blocks
    options = {**FLOAT32, "backend": load_backend(default_cache_dir()), "packed": True}
    stages = [
        load_stage(model, start, end, quantized=PRECISIONS.get(precision), **options)
        for start, end in ((0, blocks), (0, 2), (2, blocks))
    ]
    assert len(packed_weights(stages[0])) == 2 * len(list(experts_modules(stages[0]._model))) > 0
    theirs = reference(family, path)
    if precision != "as stored":
        with_values_of(stages[0], theirs)
    local = TensorLayers(model)
    for length in (3, 29):
        prompt = torch.randint(3, 100, (1, length), generator=torch.Generator().manual_seed(length))
        text = theirs.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        for hops in (stages[:1], stages[1:]):
            sequences = [hop.new_sequence() for hop in hops]
            tokens, new = prompt[0], prompt[0]
            while len(tokens) < len(text):
                rows = local.embed(new)
                for hop, sequence in zip(hops, sequences, strict=True):
                    [rows] = hop.forward([(sequence, rows)])
                new = local.logits(rows[-1:]).argmax(-1)
                tokens = torch.cat([tokens, new])
            assert tokens.tolist() == text.tolist()


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_a_host_holds_experts_in_the_bytes_of_the_file(family: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / "model", hidden_size=128, intermediate_size=256, moe_intermediate_size=256)
    model = resolve(str(path), cache_dir=tmp_path / "cache")
    stored = load_file(path / "model.safetensors")
    for quantized, share in ((None, 1.0), (PRECISIONS["int8"], 8.5 / 16), (PRECISIONS["int4"], 6.6 / 16)):
        stage = load_stage(model, 1, 3, packed=True, quantized=quantized, **FLOAT32)
        in_file = sum(stored[name].nbytes for block in (1, 2) for name in model.manifest.tensors[block])
        assert stage.weight_bytes <= 1.15 * share * in_file


def test_experts_of_a_gguf_file_stay_packed(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen3moe")
    model = resolve(str(file), cache_dir=tmp_path / "cache")
    mine, dense = (load_stage(model, 0, 3, packed=packed, **FLOAT32) for packed in (True, False))
    [gate_up, *_] = packed_weights(mine)
    assert {type(each) for each in gate_up.matrices.values()} == {PackedTensor}
    assert mine.weight_bytes <= 1.15 * file.stat().st_size
    assert mine.weight_bytes < 0.4 * dense.weight_bytes
    inputs = torch.randn(9, mine.hidden_size, generator=torch.Generator().manual_seed(0))
    outputs = [stage.forward([(stage.new_sequence(), inputs)])[0] for stage in (mine, dense)]
    assert_near(outputs[0], outputs[1])


def test_gradients_flow_through_packed_experts(tmp_path: Path) -> None:
    path = save("mixtral", tmp_path / "model")
    model = resolve(str(path), cache_dir=tmp_path / "cache")
    inputs = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for packed in (True, False):
        stage = load_stage(model, 0, 2, packed=packed, **FLOAT32)
        outputs, graph = stage.record_sequences(inputs, [4, 3])
        found.append((outputs, stage.gradients(graph, torch.ones_like(outputs))[0]))
    for mine, theirs in zip(*found, strict=True):
        assert_near(mine, theirs)


def expert_inputs(module: Any, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(module.num_experts, generator=generator)[:2] for _ in range(9)])
    return torch.randn(9, size, generator=generator), ids, torch.rand(9, 2, generator=generator)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_hosts_of_some_experts_give_together_what_one_of_all_gives(family: str, tmp_path: Path) -> None:
    path = save(family, tmp_path / "model")
    model = resolve(str(path), cache_dir=tmp_path / "cache")
    whole: Any = model.load_experts(1, range(4), **FLOAT32)
    hidden, ids, weights = expert_inputs(whole, 32)
    expected = compute_experts(whole, hidden, ids, weights)
    [dense] = [each for _, each in experts_modules(model.load_span(1, 2, **FLOAT32))]
    assert_near(dense(hidden, ids, weights), expected)
    size = expected.norm()
    for chosen in ([0, 3], [1, 2]):
        some: Any = model.load_experts(1, chosen, **FLOAT32)
        assert {*some.down_proj.matrices} == set(chosen)
        elsewhere = torch.where(torch.isin(ids, torch.tensor(chosen)), ids, whole.num_experts)
        expected = expected - compute_experts(some, hidden, elsewhere, weights)
        assert torch.equal(compute_expert(some, chosen[0], hidden), compute_expert(whole, chosen[0], hidden))
    assert expected.norm() <= NEAR * size


def test_an_expert_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    model = resolve(str(save("mixtral", tmp_path / "model")), cache_dir=tmp_path / "cache")
    some: Any = model.load_experts(2, [1], **FLOAT32)
    hidden, ids, weights = expert_inputs(some, 32)
    with pytest.raises(LookupError, match="expert 0 is not on this machine"):
        compute_experts(some, hidden, ids, weights)
    with pytest.raises(ConfigError, match="no expert 4"):
        model.load_experts(2, [1, 4], **FLOAT32)
    with pytest.raises(ConfigError, match="no block 9"):
        model.load_experts(9, [1], **FLOAT32)


def test_a_block_without_experts_is_refused(tmp_path: Path) -> None:
    model = resolve(str(save("deepseek_v3", tmp_path / "model")), cache_dir=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"block 0 of .* has no routed experts"):
        model.load_experts(0, [1], **FLOAT32)


def test_a_span_may_leave_out_experts_of_some_blocks(tmp_path: Path) -> None:
    model = resolve(str(save("qwen3_moe", tmp_path / "model")), cache_dir=tmp_path / "cache")
    span: Any = model.load_span(1, 4, **FLOAT32, experts={1: [2], 3: []})
    held = [{*module.gate_up_proj.matrices} for _, module in experts_modules(span)]
    assert held == [{2}, {0, 1, 2, 3}, set()]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gguf"])
def test_only_the_pieces_of_chosen_experts_are_fetched(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2048)
    folder = tmp_path / "model"
    if family == "gguf":
        folder.mkdir()
        (folder / ".gitattributes").touch()
        source, name = write_gguf(folder / "model.gguf", "qwen3moe"), f"{NAME}:model.gguf"
    else:
        source, name = save(family, folder, hidden_size=64, intermediate_size=128), NAME
    tables, _ = big_model.make_tables(source, tmp_path / "maker")
    whole: Any = resolve(str(source), cache_dir=tmp_path / "maker").load_experts(1, range(4), **FLOAT32)
    with model_hub(folder, tmp_path / "hf") as hub:
        model: LocalModel = big_model.load(tmp_path / "cache", tables, name)
        model.config  # noqa: B018 - fetches headers
        before = sum(hub.sent.values())
        some: Any = model.load_experts(1, [2], **FLOAT32)
        fetched = sum(hub.sent.values()) - before
    size = whole.down_proj.nbytes + whole.gate_up_proj.nbytes
    edges = 6 * 2048  # pieces begin before a matrix, and end after it
    biases = sum(each.nbytes for each in whole.parameters())
    head = 64 << 10
    assert fetched < size / 4 + edges + biases + head
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compute_expert(some, 2, rows), compute_expert(whole, 2, rows))


@pytest.mark.parametrize("fault", ["missing", "shorter", "another number"])
def test_experts_that_do_not_fit_are_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the model is resolved; and when they are loaded, if their header was not there
    before."""
    path = save("mixtral", tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    [name] = [each for each in weights if "layers.1." in each and "experts.2.w2" in each]
    tensor = weights.pop(name)
    if fault == "shorter":
        weights[name] = tensor[:, :32].contiguous()
    elif fault == "another number":
        weights[name.replace("experts.2", "experts.9")] = tensor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((IntegrityError, ConfigError), match=r"does not fit|does not use"):
        resolve(str(path), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(ModelBuilder, "check", nothing)
    model = resolve(str(path), cache_dir=tmp_path / "cache")
    for experts in (None, {1: [2]}):
        with pytest.raises(IntegrityError, match=r"expert|does not fit"):
            model.load_span(1, 2, packed=True, experts=experts, **FLOAT32)
