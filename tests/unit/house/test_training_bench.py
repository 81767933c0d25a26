"""The comparison of training methods in miniature: every method runs, and the reported traffic is
the traffic sent."""

import json
from pathlib import Path

import pytest
import torch

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.job_settings import DataSection, EvalSection, Job
from tests.bench.training import METHODS, parse_method, report, standard_job
from tests.bench.training_plots import write_plots
from tests.bench.training_run import LINKS, Absence, Curve, Link, Simulation, Traffic, absences

SETTINGS: dict[str, dict[str, int | float | str]] = {
    "allreduce": {},
    "streaming": {"sync_every": 4, "fragments": 2, "overlap_steps": 1},
}
EVERY_SECOND: dict[str, int | float | str] = {"sync_every": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bench")
    for number in range(20):
        (made / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    return made


def small(folder: Path, method: str, *, steps: int = 6, workers: int = 2) -> Job:
    settings = SETTINGS.get(method, EVERY_SECOND)
    job = standard_job(method, settings, seed=0, steps=steps, workers=workers)
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = (job.model.config or {}) | tiny | {"num_key_value_heads": 2}
    data = DataSection.model_validate({"path": str(folder), "sequence_length": 16, "validation": 0.2})
    model = job.model.model_copy(update={"config": config})
    training = job.training.model_copy(update={"batch_size": 2})
    changes = {"data": data, "model": model, "training": training, "eval": EvalSection(batches=4)}
    return job.model_copy(update=changes)


def run(
    folder: Path, method: str, trace: tuple[Absence, ...] = (), *, steps: int = 6, workers: int = 2
) -> Simulation:
    simulation = Simulation(
        method, small(folder, method, steps=steps, workers=workers), workers, trace, folder
    )
    simulation.run(step_s=0.01, eval_every=2)
    return simulation


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_sees_equal_tokens(method: str, folder: Path) -> None:
    curve = run(folder, method).curve
    first, last = curve.points[0], curve.points[-1]
    assert last.step == 6
    assert last.tokens == 6 * 2 * 2 * 16
    assert 0 < last.val_loss < 1.01 * first.val_loss
    assert last.val_loss != first.val_loss
    assert [point.size_bytes for point in curve.points] == sorted(point.size_bytes for point in curve.points)
    assert all(last.hours[link.name] >= 6 * 0.01 / 3600 for link in LINKS)


def test_accounted_bytes_are_those_of_a_butterfly_all_reduce(folder: Path) -> None:
    allreduce, diloco = run(folder, "allreduce", workers=4).curve, run(folder, "diloco", workers=4).curve
    vector_bytes = 4 * allreduce.parameters
    assert allreduce.points[-1].size_bytes == 6 * 2 * 3 / 4 * vector_bytes
    assert diloco.points[-1].size_bytes == 3 * 2 * 3 / 4 * vector_bytes
    sparseloco = run(folder, "sparseloco", workers=4).curve
    payload_bytes = get_codec("topk").max_bytes(sparseloco.parameters)
    assert sparseloco.points[-1].size_bytes == 3 * (3 / 4 + 3) * payload_bytes
    streaming = run(folder, "streaming", workers=4).curve
    fragment = streaming.parameters // 2
    both = get_codec("int4").max_bytes(fragment) + get_codec("int8").max_bytes(fragment)
    assert streaming.points[-1].size_bytes == pytest.approx(3 * 3 / 4 * both, rel=1e-3)
    assert allreduce.peak_bytes_per_step == diloco.peak_bytes_per_step == 2 * 3 / 4 * vector_bytes
    line = report(diloco, allreduce)
    assert (line["fewer_bytes"], line["lower_peak"]) == (2.0, 1.0)
    assert report(allreduce, allreduce)["loss_ratio"] == 1.0


def test_an_overlapped_exchange_is_waited_for_only_beyond_its_steps(folder: Path) -> None:
    simulation = run(folder, "streaming")
    before = simulation.curve.points[-1].hours
    assert before[LINKS[2].name] == pytest.approx(6 * 0.01 / 3600)
    assert before[LINKS[0].name] > 1.5 * before[LINKS[2].name]


def test_time_is_size_over_the_slower_direction_and_delays() -> None:
    assert Traffic(1000.0, 2).seconds(Link("", 100.0, 500.0, 0.5)) == 11.0


@pytest.mark.parametrize("method", ["allreduce", "diloco", "streaming", "sparseloco"])
def test_a_worker_that_returns_has_the_weights_of_the_others(method: str, folder: Path) -> None:
    simulation = run(folder, method, (Absence(1, 2, 4),), steps=8, workers=3)
    first, *others = (worker.replica.method.agreed() for worker in simulation.workers)
    assert all(torch.equal(first, each) for each in others)
    steady = run(folder, method, steps=8, workers=3)
    assert not torch.equal(first, steady.workers[0].replica.method.agreed())


def test_without_healing_a_worker_that_returns_stays_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench.training_run.Worker.heal", lambda worker, donor: None)
    simulation = run(folder, "diloco", (Absence(1, 2, 4),), steps=8, workers=3)
    first, second, _ = (worker.replica.method.agreed() for worker in simulation.workers)
    assert not torch.equal(first, second)


def test_a_run_is_reproducible(folder: Path) -> None:
    assert run(folder, "noloco").curve == run(folder, "noloco").curve


def test_a_churn_trace_follows_its_seed_and_spares_the_first_worker() -> None:
    trace = absences(3, workers=8, steps=900, count=20)
    assert trace == absences(3, workers=8, steps=900, count=20)
    assert trace != absences(4, workers=8, steps=900, count=20)
    assert all(1 <= each.worker < 8 and 0 <= each.start < each.end <= 900 for each in trace)


def test_settings_are_read_from_the_label() -> None:
    assert parse_method("noloco") == ("noloco", {})
    assert parse_method("zo:seed=3,lr=1e-4,kind=x") == ("zo", {"seed": 3, "lr": 1e-4, "kind": "x"})


def test_a_method_has_its_own_learning_rate_unless_one_is_given() -> None:
    def rate(method: str, given: float | None = None) -> float:
        job = standard_job(method, {}, seed=0, steps=8, workers=1, learning_rate=given)
        return job.training.learning_rate

    assert (rate("allreduce"), rate("co2")) == (6e-3, 2e-2)
    assert (rate("allreduce", 1e-2), rate("co2", 1e-2)) == (1e-2, 1e-2)


def test_a_method_of_scalars_is_refused(folder: Path) -> None:
    job = small(folder, "allreduce").model_copy(
        update={"method": small(folder, "allreduce").method.model_copy(update={"name": "zo"})}
    )
    with pytest.raises(ConfigError, match="fine-tuning"):
        Simulation("zo", job, 2, (), folder)


def test_plots_and_curves_are_written(folder: Path, tmp_path: Path) -> None:
    curve: Curve = run(folder, "allreduce").curve
    write_plots([curve], [link.name for link in LINKS[:2]], tmp_path)
    for name in ("tokens", "bytes", "hours"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "curves.json").read_text())
    assert written[0]["points"][-1]["val_loss"] == curve.points[-1].val_loss
