"""The router of models: what it learns, what it chooses, and which files it refuses."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from swarmnet.cli import execute
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.routing import fitting, router
from swarmnet.gateway.routing.fitting import Comparisons, fit, measured, read_comparisons
from swarmnet.gateway.routing.router import BUCKETS, FEATURES, MAX_CHARS, MAX_MODELS, Router, features
from swarmnet_protocols.errors import ConfigError
from tests.defences import defence, replacing

LONGEST_QUESTION, LONGEST_FILE, MOST_MODELS = MAX_CHARS, router.MAX_FILE_BYTES, MAX_MODELS
SCALAR_COUNT = FEATURES - BUCKETS
WORDS = {
    "coder": "def return import class lambda self yield None",
    "writer": "river evening letter window quiet garden winter friend",
}


def comparisons(count: int = 200) -> list[dict[str, Any]]:
    """Comparisons that the model wins to whose words the question belongs."""
    rng = random.Random(0)
    found = []
    for number in range(count):
        better = ("coder", "writer")[number % 2]
        said = rng.sample(WORDS[better].split(), 4) + rng.sample(["the", "of", "and", "to", "in", "is"], 3)
        rng.shuffle(said)
        one, other = rng.sample(["coder", "writer"], 2)
        winner = "tie" if number % 10 == 0 else "a" if one == better else "b"
        question = f"{number} {' '.join(said)}"
        asked: dict[str, Any] = {"prompt": question}
        if number % 3 == 0:
            asked = {"messages": [{"role": "user", "content": question}]}
        found.append({**asked, "model_a": one, "model_b": other, "winner": winner, "judge": "ignored"})
    return found


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chooser(price: float = 0.0, **strength: float) -> Router:
    """A router that takes every question for the same: each model has one quality."""
    weights = np.zeros((len(strength), FEATURES), np.float32)
    weights[:, BUCKETS] = list(strength.values())
    return Router(tuple(strength), weights, price)


@pytest.fixture
def data(tmp_path: Path) -> Comparisons:
    return read_comparisons(written(tmp_path / "comparisons.jsonl", comparisons()))


def test_a_router_learns_which_model_wins_which_question(data: Comparisons) -> None:
    report = measured(data, {"coder": 10.0, "writer": 40.0})
    assert report.accuracy > 0.9
    assert report.baseline < 0.7
    first, *_, last = report.curve
    assert first.quality > max(0.85, first.mixed + 0.2)
    assert (last.cost, last.quality) == (report.costs["writer"], last.mixed) == (0.25, last.mixed)
    assert [point.cost for point in report.curve] == sorted((p.cost for p in report.curve), reverse=True)
    found = fit(data)
    assert found.choose("a class with self and yield", {"coder": 1, "writer": 1}) == "coder"
    assert found.choose("a letter from a friend in winter", {"coder": 1, "writer": 1}) == "writer"


def test_the_fitted_weights_are_a_minimum(data: Comparisons) -> None:
    def loss(weights: Any) -> float:
        margins = ((data.features @ weights.T) * data.sides).sum(1).astype(np.float64)
        return float((np.logaddexp(0, margins) - data.won * margins).sum() + (weights**2).sum() / 2)

    best, rng = fit(data).weights, np.random.default_rng(0)
    for _ in range(5):
        way = rng.normal(size=best.shape)
        assert loss(best) < min(loss(best + 0.01 * way), loss(best - 0.01 * way))
    assert loss(best) < loss(0.9 * best)
    assert loss(best) < loss(1.1 * best)


@pytest.mark.parametrize(
    ("price", "speeds", "chosen"),
    [
        (0.0, {"good": 1.0, "fast": 9.0}, "good"),
        (2.0, {"good": 1.0, "fast": 9.0}, "fast"),
        (2.0, {"good": 8.0, "fast": 9.0}, "good"),
        (2.0, {"good": 1.0, "fast": 0.0}, "good"),
        (2.0, {"good": 0.0, "fast": 0.0}, "good"),
        (0.0, {"fast": 9.0}, "fast"),
    ],
)
def test_quality_is_weighed_against_the_time_of_a_token(
    price: float, speeds: dict[str, float], chosen: str
) -> None:
    assert chooser(price, good=1.0, fast=0.0).choose("hello", speeds) == chosen


def test_a_conversation_stays_on_its_model_while_it_answers() -> None:
    found = chooser(good=1.0, fast=0.0)
    assert found.choose("hello", {"good": 1.0, "fast": 1.0}, before="fast") == "fast"
    assert found.choose("hello", {"good": 1.0}, before="fast") == "good"
    with pytest.raises(ApiError, match="no model of the router is available now: good, fast"):
        found.choose("hello", {})


@defence("long questions are cut before they are hashed", off=replacing(router, "MAX_CHARS", 1 << 30))
def test_the_middle_of_a_long_question_does_not_count() -> None:
    head, tail = "a" * LONGEST_QUESTION, "b" * LONGEST_QUESTION
    one, other = (features(head + middle * 100 + tail) for middle in ("x y", "z 1"))
    assert np.array_equal(one, other)


def test_half_a_character_is_a_feature_like_any_other() -> None:
    assert np.isfinite(features("\ud83d hello")).all()


def router_file(names: Any = ("a", "b"), weights: Any = None, format: str = "swarmnet-router-1") -> bytes:
    shape = (len(names) if isinstance(names, list | tuple) else 2, FEATURES)
    given = np.zeros(shape, np.float32) if weights is None else weights
    return save({"weights": given}, {"format": format, "models": json.dumps(names)})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no safetensors file"),
        (b"\xff" * 100, "no safetensors file"),
        (router_file()[:-1], "no safetensors file"),
        (
            save({"other": np.zeros(2)}, {"format": "swarmnet-router-1", "models": "[]"}),
            "no safetensors file",
        ),
        (save({"weights": np.zeros(2)}), "its format is not"),
        (router_file(format="swarmnet-router-2"), "its format is not"),
        (router_file("ab"), "does not name 2 to 64"),
        (router_file(["a"]), "does not name 2 to 64"),
        (router_file(["a", "a"]), "does not name 2 to 64"),
        (router_file(["a", ""]), "does not name 2 to 64"),
        (router_file(["a", 5]), "does not name 2 to 64"),
        (router_file([str(each) for each in range(MOST_MODELS + 1)]), "does not name 2 to 64"),
        (router_file(weights=np.zeros((2, 5), np.float32)), "are not float32 of"),
        (router_file(weights=np.zeros((2, FEATURES), np.float64)), "are not float32 of"),
        (router_file(weights=np.full((2, FEATURES), np.nan, np.float32)), "are not finite"),
    ],
)
def test_a_file_that_is_no_router_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "router.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"router\.safetensors is no router: .*{reason}"):
        Router.read(path)


@defence("a long file is not read", off=replacing(router, "MAX_FILE_BYTES", 1 << 30))
def test_a_long_router_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "router.safetensors"
    filler = {"filler": np.zeros(LONGEST_FILE, np.uint8), "weights": np.zeros((2, FEATURES), np.float32)}
    path.write_bytes(save(filler, {"format": "swarmnet-router-1", "models": '["a", "b"]'}))
    with pytest.raises(ConfigError, match="more than"):
        Router.read(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"prompt": ""}, "has no question"),
        ({"prompt": None, "messages": [{"role": "system", "content": "hi"}]}, "has no question"),
        ({"model_b": "coder", "model_a": "coder"}, "compares coder with itself"),
        ({"winner": "c"}, "winner"),
        ({"model_a": 5}, "model_a"),
        ({"model_a": "x" * 257}, "model_a"),
    ],
)
def test_a_wrong_comparison_is_named_by_its_line(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    good, *others = comparisons(LEAST)
    path = written(tmp_path / "all.jsonl", [good, {**others[0], **line}, *others])
    with pytest.raises(ConfigError, match=rf"line 2 of .*all\.jsonl:? .*{reason}"):
        read_comparisons(path)


LEAST = fitting.LEAST
REFUSALS = {"least": "a router needs 20 or more", "most": "more than 50", "models": "64 are the most"}


@defence("few comparisons are used", off=replacing(fitting, "MOST", 1 << 30), limit="most")
@defence("a few comparisons make no router", off=replacing(fitting, "LEAST", 0), limit="least")
@defence("few models are compared", off=replacing(fitting, "MAX_MODELS", 1 << 30), limit="models")
@pytest.mark.parametrize("limit", ["least", "most", "models"])
def test_the_number_of_comparisons_and_models_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    lines = comparisons(LEAST - 1 if limit == "least" else 100)
    if limit == "models":
        lines = [{**line, "model_a": f"model {number}"} for number, line in enumerate(lines)]
    if limit == "most" and fitting.MOST < 1 << 30:
        monkeypatch.setattr(fitting, "MOST", 50)
    with pytest.raises(ConfigError, match=REFUSALS[limit]):
        read_comparisons(written(tmp_path / "comparisons.jsonl", lines))


@pytest.fixture
def fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    source, out = written(tmp_path / "comparisons.jsonl", comparisons()), tmp_path / "r.safetensors"

    def run(*options: str) -> tuple[int, Any]:
        code = execute(["router", "fit", str(source), "--out", str(out), "--json", *options])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_router_fit_writes_a_file_that_serve_reads(fitted: Callable[..., tuple[int, Any]]) -> None:
    code, report = fitted("--speed", "coder=5", "--speed", "writer=20")
    assert (code, report["models"], report["comparisons"]) == (0, ["coder", "writer"], 200)
    assert report["costs"] == {"coder": 1.0, "writer": 0.25}
    assert report["accuracy"] > 0.9
    assert Router.read(Path(report["path"])).names == ("coder", "writer")
    code, report = fitted()
    assert (code, report["error"]) == (3, "config")
    assert "already exists" in report["message"]
    assert fitted("--force")[1]["curve"][-1]["cost"] == 0
