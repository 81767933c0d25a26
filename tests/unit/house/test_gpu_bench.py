"""The GPU bench on a machine without a GPU: its exactness part runs on the CPU, and the rest says
that it is skipped."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_protocols.models import resolve
from tests.bench import gpu
from tests.support.models.tiny_models import write_gguf


def test_exactness_is_measured_on_the_cpu_with_accelerator_caches(tmp_path: Path) -> None:
    local = resolve(str(write_gguf(tmp_path / "tiny.gguf", "llama")), cache_dir=tmp_path / "cache")
    report: dict[str, Any] = gpu.exact(local, torch.device("cpu"))
    assert report["ok"]
    assert set(report["float32"]["errors"]) == {"arena", "packed", "alone"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_without_a_gpu_the_bench_says_that_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    gpu.main()
    assert "no CUDA device" in json.loads(capsys.readouterr().out)["skipped"]
