"""The yardstick of pipelines in miniature: its clock, its meter, and a row of each kind."""

import argparse
from pathlib import Path

import pytest

from swarmnet_protocols.training.codecs.boundary import BOUNDARY_CODECS, codecs_by_size
from swarmnet_protocols.training.job_settings import DataSection
from tests.bench import pipeline
from tests.bench.pipeline import Visit, pipeline_job, report, step_seconds, train
from tests.bench.training_run import Curve, Point

RING = [Visit(stage, 1.0) for stage in (0, 1, 2, 3, 0, 3, 2, 1, 0)]


def test_one_microbatch_waits_for_every_computation_and_crossing() -> None:
    assert step_seconds(RING, [2_500_000] * 8, 1) == pytest.approx(9 + 8 * (1 + 0.05))


def test_crossings_overlap_with_computation() -> None:
    """Stage 0 computes three seconds of each microbatch, and is the bottleneck."""
    assert step_seconds(RING, [0] * 8, 40) == pytest.approx(3 * 40, rel=0.1)
    assert step_seconds(RING, [1_250_000] * 8, 40) == pytest.approx(3 * 40, rel=0.1)


def test_a_slow_link_sets_the_pace() -> None:
    """Two tensors of each microbatch come over the link of a stage."""
    assert 2 * 4 * 20 < step_seconds(RING, [10_000_000] * 8, 20) < 2 * 4 * 26


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"SEQUENCES": 4, "MICROBATCHES": 2, "POSITIONS": 16, "EVAL_BATCHES": 1}.items():
        monkeypatch.setattr(pipeline, name, value)
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    data = DataSection.model_validate({"path": str(tmp_path), "sequence_length": 16, "validation": 0.2})
    whole = pipeline_job
    monkeypatch.setattr(
        pipeline,
        "pipeline_job",
        lambda row, **settings: whole(row, **settings).model_copy(update={"data": data}),
    )
    return tmp_path


@pytest.mark.parametrize("row", ["float32", "int4", "int8:k=16"])
def test_the_meter_bills_the_bytes_of_every_crossing(row: str, small: Path) -> None:
    curve = train(row, argparse.Namespace(seed=0, steps=3, learning_rate=1e-3, mbits=pipeline.MBITS), small)
    codec, _, rank = row.partition(":k=")
    one_way = BOUNDARY_CODECS[codec].size_bytes(2 * 16, int(rank or 64))
    ids = 2 * 16 if rank else 0
    first, last = curve.points
    assert last.size_bytes == 3 * 2 * 4 * (2 * one_way + ids)
    assert last.val_loss < first.val_loss
    assert curve.parameters == pytest.approx(197_184, rel=2e-3)


def test_only_boundaries_between_fast_links_are_more_exact(small: Path) -> None:
    """Stage 0 has a slow link, so the first boundary and the last one are slow."""
    mbits = (1e-3, 1e6, 1e6, 1e6)
    curve = train("auto", argparse.Namespace(seed=0, steps=1, learning_rate=1e-3, mbits=mbits), small)
    float32, _, int8 = codecs_by_size("auto", 2 * 16, 64)
    assert curve.points[-1].size_bytes == 2 * 2 * 2 * (float32 + int8)
    assert curve.label == "auto on mixed links"


def test_a_report_has_the_score_and_its_ratios() -> None:
    def curve(label: str, size_bytes: int, hours: float, losses: tuple[float, ...]) -> Curve:
        points = [
            Point(step, step, step * size_bytes, loss, {pipeline.LINK: step * hours})
            for step, loss in enumerate(losses)
        ]
        return Curve(label, 1, points=points)

    losses = (4.0, *(3.0,) * 8, 2.0, 1.0)
    yardstick = curve("float32", 400, 2.0, losses)
    line = report(curve("int8", 100, 0.5, (*losses[:9], 2.4, 1.25)), yardstick)
    assert (line["steps_to_target"], line["T"], line["faster"]) == (10, 18_000.0, 3.6)
    assert (line["loss_ratio"], line["bytes_ratio"]) == (1.25, 0.25)
    never = report(curve("int4", 50, 0.1, (*losses[:9], 3.0, 2.5)), yardstick)
    assert never["T"] is None
    assert "faster" not in never
