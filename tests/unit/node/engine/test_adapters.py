"""Adapters in stages match transformers with PEFT, in any batch."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnet_node.engine.kernels.backend import DecodeRow
from swarmnet_node.engine.kernels.native_backend import load_backend
from swarmnet_node.engine.stage import Stage
from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_node.engine.torch_layers.adapters import StageAdapter
from swarmnet_protocols.models import LocalModel, resolve
from tests.support.models.peft_oracle import (
    lora_tensors,
    prefix_tensors,
    random_tensors,
    with_lora,
    with_prefix,
)
from tests.support.models.rounding import assert_near
from tests.support.models.tiny_models import FAMILIES, save_tiny

# PEFT 0.21 uses a name that transformers 5.23 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

CPU = torch.device("cpu")
SPANS = ((0, 2), (2, 5))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PREFIX = 7
TARGETS = {
    "lora on attention": ATTENTION,
    "lora on two": ("q_proj", "v_proj"),
    "lora on all": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}
DENSE = ("llama-tied", "qwen3", "gemma3")


def load(family: str, tmp_path: Path) -> LocalModel:
    return resolve(str(save_tiny(family, tmp_path / "model")), cache_dir=tmp_path / "cache")


def whole(model: LocalModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32, attn_implementation="eager")


def expected(tuned: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [n, V]."""
    with torch.inference_mode():
        logits: torch.Tensor = tuned(input_ids=ids[None]).logits[0]
    return logits


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed))


class Chain:
    """The whole model in stages, with one sequence for each text."""

    def __init__(self, model: LocalModel, tensors: list[dict[str, torch.Tensor]]) -> None:
        self.plain = whole(model)
        self.stages = [load_stage(model, start, end, dtype=torch.float32, device=CPU) for start, end in SPANS]
        self.sequences = [
            [
                stage.new_sequence(adapter_of(stage, start, each))
                for stage, (start, _) in zip(self.stages, SPANS, strict=True)
            ]
            for each in tensors
        ]

    @torch.inference_mode()
    def feed(self, pieces: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """New ids of some texts in one batch; their logits."""
        rows = [self.plain.get_input_embeddings()(piece) for piece in pieces.values()]
        for index, stage in enumerate(self.stages):
            rows = stage.forward(
                [(self.sequences[text][index], row) for text, row in zip(pieces, rows, strict=True)]
            )
        norm = self.plain.model.norm
        logits = [self.plain.lm_head(norm(row)) for row in rows]
        cap = getattr(self.plain.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = [torch.tanh(each / cap) * cap for each in logits]
        return dict(zip(pieces, logits, strict=True))


def adapter_of(stage: Stage, start: int, tensors: dict[str, torch.Tensor]) -> StageAdapter | None:
    own = {
        name: tensor
        for name, tensor in tensors.items()
        if start <= int(name.split(".")[0]) < start + stage.blocks
    }
    return stage.load_adapter(own, start) if own else None


def cases() -> list[Any]:
    """Every family with what PEFT can tune of it."""
    found = [(family, "lora on attention") for family in FAMILIES]
    found += [(family, kind) for family in DENSE for kind in ("lora on two", "lora on all")]
    found += [(family, "prefix") for family in FAMILIES]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "kind"), cases())
def test_an_adapter_matches_peft(family: str, kind: str, tmp_path: Path) -> None:
    """Texts with an adapter, with another adapter and with none, in one batch, entered in chunks of
    random sizes."""
    model = load(family, tmp_path)
    texts = [ids(count, count) for count in (25, 14, 19)]
    if kind == "prefix":
        tuned = [with_prefix(whole(model), PREFIX, seed=1), with_prefix(whole(model), PREFIX + 2, seed=2)]
        tensors = [prefix_tensors(each) for each in tuned]
    else:
        tuned = [with_lora(whole(model), TARGETS[kind], rank=3 + seed, seed=seed) for seed in (1, 2)]
        tensors = [lora_tensors(each) for each in tuned]
    chain = Chain(model, [*tensors, {}])
    results: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    chunk, fed = random.Random(family), [0, 0, 0]
    while pieces := {
        i: text[fed[i] : fed[i] + chunk.choice((1, 5, 8))]
        for i, text in enumerate(texts)
        if fed[i] < len(text)
    }:
        for i, logits in chain.feed(pieces).items():
            results[i].append(logits)
            fed[i] += len(pieces[i])
    for i, reference in enumerate((*tuned, chain.plain)):
        assert_near(torch.cat(results[i]), expected(reference, texts[i]))
    plain, adapted = expected(chain.plain, texts[0]), expected(tuned[0], texts[0])
    assert (plain - adapted).abs().max() > 1e-2


def test_single_positions_with_adapters_use_the_decode_step(tmp_path: Path) -> None:
    """Native code and the layers of torch give the same outputs, for positions in one batch and one
    after the other."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    model = load("llama-tied", tmp_path)
    options: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    native = load_stage(model, 0, 5, backend=load_backend(tmp_path / "cache"), **options)
    stages = (native, load_stage(model, 0, 5, **options))
    assert native.method.decode_step is not None
    pairs = random_tensors(range(5), modules=[("self_attn.v_proj", 16, 32)])
    prefix = {
        f"{block}.prefix.{kind}": torch.randn(2, 3, 8) for block in range(5) for kind in ("key", "value")
    }
    calls: list[int] = []
    step = native.method.decode_step
    assert step is not None

    def counting(inputs: torch.Tensor, rows: Sequence[DecodeRow]) -> torch.Tensor:
        calls.append(len(rows))
        return step(inputs, rows)

    native.method = replace(native.method, decode_step=counting)
    sequences = {
        stage: [
            stage.new_sequence(stage.load_adapter(tensors, 0) if tensors else None)
            for tensors in (prefix, {}, pairs)
        ]
        for stage in stages
    }
    for chosen in ([0, 1], [0, 1, 2], [2], [0]):
        inputs = torch.randn(len(chosen), 1, 32)
        ours, theirs = (
            torch.cat(
                stage.forward([(sequences[stage][i], row) for i, row in zip(chosen, inputs, strict=True)])
            )
            for stage in stages
        )
        assert_near(ours, theirs)
    assert calls == [2, 3, 1, 1]


def test_an_adapter_is_applied_in_the_dtype_of_its_stage(tmp_path: Path) -> None:
    model = load("llama-tied", tmp_path)
    stage = load_stage(model, 0, 5, dtype=torch.bfloat16, device=CPU)
    tensors = random_tensors(range(5)) | {
        f"{block}.prefix.{kind}": torch.randn(2, 3, 8) for block in range(5) for kind in ("key", "value")
    }
    adapter = stage.load_adapter(tensors, 0)
    (outputs,) = stage.forward([(stage.new_sequence(adapter), torch.randn(4, 32))])

    assert outputs.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in adapter.tensors.values()} == {torch.bfloat16}
    assert adapter.nbytes == sum(tensor.numel() for tensor in tensors.values()) * 2


@pytest.mark.parametrize("family", ["llama-tied", "gemma3"])
def test_a_part_of_a_stage_applies_the_tensors_of_its_blocks(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    start, end = 2, 4
    whole_stage, alone = (
        load_stage(model, *span, dtype=torch.float32, device=CPU) for span in ((0, 5), (start, end))
    )
    tensors = random_tensors(range(start, end)) | {
        f"{block}.prefix.{kind}": torch.randn(2, 3, 8)
        for block in range(start, end)
        for kind in ("key", "value")
    }
    inputs = torch.randn(9, 32)
    part = whole_stage.part(start, end)
    (expected,) = alone.forward([(alone.new_sequence(alone.load_adapter(tensors, start)), inputs)])
    (outputs,) = part.forward([(part.new_sequence(whole_stage.load_adapter(tensors, 0)), inputs)])

    assert_near(outputs, expected)
    assert not any(module._forward_hooks for module in whole_stage._model.modules())
