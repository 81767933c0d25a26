"""The small mixture of experts in the package: resolved by its name, packed, trained, and small."""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from swarmnet_node.engine.stage_loading import load_stage
from swarmnet_protocols.models import EXPERTS_MODEL, resolve
from swarmnet_protocols.models.checkpoints.conversion import experts_modules
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from tests.support.training.train_experts import BLOCKS, CHOSEN, EXPERTS, code_bytes, recording, windows

FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


def test_a_host_keeps_its_experts_in_4_bits(tmp_path: Path) -> None:
    model = resolve(EXPERTS_MODEL, cache_dir=tmp_path, published=True)
    assert model.manifest.blocks == BLOCKS
    assert sum(path.stat().st_size for path in model.path.iterdir()) < 5 << 20
    stage = load_stage(model, 2, 4, packed=True, **FLOAT32)
    modules: list[Any] = [module for _, module in experts_modules(stage._model)]
    matrices = [each for module in modules for each in module.gate_up_proj.matrices.values()]
    assert len(matrices) == 2 * EXPERTS
    assert all(isinstance(each, PackedTensor) for each in matrices)
    assert {segment.format for each in matrices for segment in each.segments} == {Format.INT4}
    some: Any = model.load_experts(5, [3, 17], **FLOAT32)
    assert {*some.down_proj.matrices} == {3, 17}


def test_it_has_learnt_python_and_uses_all_of_its_experts(tmp_path: Path) -> None:
    model = resolve(EXPERTS_MODEL, cache_dir=tmp_path)
    whole: Any = model.load_whole(**FLOAT32).eval()
    tokens = windows(code_bytes())
    with torch.no_grad(), recording(whole) as chosen:
        logits = whole(input_ids=tokens, use_cache=False).logits
    loss = float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    assert loss < 2.0, "nats a byte; without training 5.5"
    assert len(chosen) == BLOCKS
    for rows in chosen:
        assert rows.shape == (tokens.numel(), CHOSEN)
        share = rows.flatten().bincount(minlength=EXPERTS) * EXPERTS / rows.numel()
        assert 0.1 < float(share.min()) <= float(share.max()) < 2.0
