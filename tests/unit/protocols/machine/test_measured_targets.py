"""A machine measures its targets once, and a backend uses the fastest."""

import errno
import logging
import subprocess
from pathlib import Path

import pytest

from swarmnet.paths import default_cache_dir
from swarmnet_node.engine.kernels import native_backend
from swarmnet_protocols.machine import measured_targets, native_code
from swarmnet_protocols.machine.measured_targets import Times, fastest, measure
from swarmnet_protocols.machine.native_code import Target
from swarmnet_protocols.quantization import products
from swarmnet_protocols.quantization.formats import Format
from tests.defences import defence, replacing

CODE = """
#include <stdint.h>
int trial(void) { return 0; }
double pace(int64_t number) { return SECONDS * (double)number; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """C code whose best target says that it takes 3 s, and the next one 2 s."""
    best, simple = (
        Target(name, (f"-DSECONDS={seconds}",), frozenset({"any"}))
        for name, seconds in (("best", 3), ("simple", 2))
    )
    monkeypatch.setattr(native_code, "targets", lambda *_: [best, simple, Target("plain", ("-DSECONDS=1",))])
    monkeypatch.setattr(measured_targets, "MEASURE_S", 0.0)
    path = tmp_path / "code.c"
    path.write_text(CODE)
    return path


def measured(source: Path, cases: tuple[int, ...] = (1, 2)) -> Times:
    return measure(source, source.parent, [(each,) for each in cases])


@pytest.mark.parametrize(
    ("best", "simple", "chosen"),
    [
        ([2.0, 8.0], [2.0, 8.0], "best"),
        ([2.0, 8.0], [1.9, 7.8], "best"),
        ([2.0, 8.0], [1.8, 7.6], "simple"),
        ([2.0, 8.0], [1.0, 17.0], "best"),
        ([2.0, 8.0], [1.0, 14.0], "simple"),
    ],
)
def test_a_target_must_be_faster_by_more_than_noise(
    best: list[float], simple: list[float], chosen: str
) -> None:
    assert fastest({"best": best, "simple": simple}) == chosen


def test_the_best_target_near_the_fastest_is_chosen() -> None:
    assert fastest({"a": [1.0], "b": [0.91], "c": [0.88]}) == "b"


def test_targets_are_measured_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"best": [3.0, 6.0], "simple": [2.0, 4.0]}
    assert measured(source) == expected
    monkeypatch.setattr(subprocess, "run", None)
    assert measured(source) == expected


def test_other_cases_are_measured_again(source: Path) -> None:
    measured(source)
    assert measured(source, (4,)) == {"best": [12.0], "simple": [8.0]}


def test_a_full_disk_keeps_nothing_and_chooses(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(measured_targets, "write_whole", fail)
    assert measured(source) == {"best": [3.0, 6.0], "simple": [2.0, 4.0]}
    assert "no space left" in caplog.text


def _without_check(text: str, shape: dict[str, int]) -> Times:
    return {target: [1.0, 1.0] for target in shape}


@defence(
    "times in a damaged file choose no target",
    off=replacing(measured_targets, "parsed", _without_check),
)
@pytest.mark.parametrize(
    "damaged",
    [
        "",
        "[[1.0, 2.0]",
        "[" * 10_000,
        "{}",
        "[[1.0, 2.0]]",
        "[[1.0, 2.0], [1.0]]",
        "[[1.0, 2.0], [1.0, NaN]]",
        "[[1.0, 2.0], [1.0, -1.0]]",
        '[[1.0, 2.0], [1.0, "2"]]',
        "[[1.0, 2.0], null]",
    ],
)
def test_a_damaged_file_is_measured_again(damaged: str, source: Path) -> None:
    expected = measured(source)
    [kept] = (source.parent / "native").glob("*.json")
    kept.write_text(damaged)
    assert measured(source) == expected
    assert kept.read_text() != damaged


def test_nobody_measures_for_a_forced_target(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(native_code._CHOSEN, "target", "simple")
    assert measured(source) == {}


@pytest.mark.parametrize(
    ("pace", "told"),
    [
        ("", "undefined symbol: pace"),
        ("double pace(int64_t number) { return 0.0 / 0.0; }", "Infinity"),
        ("double pace(int64_t number) { __builtin_trap(); }", "cannot be measured"),
    ],
)
def test_code_that_cannot_be_measured_chooses_nothing(
    pace: str, told: str, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text(f"#include <stdint.h>\nint trial(void) {{ return 0; }} {pace}")
    assert measured(source) == {}
    assert told in caplog.text
    assert list((source.parent / "native").glob("*.json")) == []


def test_a_target_that_does_not_compile_is_left_out(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text(CODE + "\n#if SECONDS == 3\n#error\n#endif")
    with caplog.at_level(logging.INFO):
        assert measured(source) == {"simple": [2.0, 4.0]}
    assert "code.c for best is left out" in caplog.text


def test_a_backend_computes_with_the_fastest_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simplest target pretends to be the fastest. The decode step takes it too."""
    names = [each.name for each in native_code.targets()]
    times = {name: [1.0 / (1 + number)] * len(products.AHEAD) for number, name in enumerate(names)}
    monkeypatch.setattr(measured_targets, "measure", lambda *_, **__: times)
    monkeypatch.setattr(native_backend, "load_products", products.load_products.__wrapped__)
    assert native_backend.NativeBackend.load(default_cache_dir()) is not None
    loaded = {native_code.loaded_target(each) for each in (products.SOURCE, native_backend.SOURCE)}
    assert loaded == {names[-1]}


def test_products_fetch_as_far_ahead_as_is_fastest_here() -> None:
    assert [products.fastest_ahead([0.5, 3.0, *rest]) for rest in ((1.0, 2.0, 3.0), (2.0, 3.0, 1.0))] == [
        products.AHEAD[0],
        products.AHEAD[-1],
    ]


def test_products_of_all_formats_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own times. No target is ten times as fast as another."""
    monkeypatch.setattr(measured_targets, "measure", measure)
    monkeypatch.setattr(measured_targets, "MEASURE_S", 0.0)
    names = [each.name for each in native_code.targets() if each.features]
    times = products.times_by_format(default_cache_dir())
    if len(names) < 2:
        assert times == {}
        return
    assert set(times) == {format.name for format in Format}
    for format, found in times.items():
        assert list(found) == names, format
        assert 0.1 < min(found.values()) <= max(found.values()) < 10, format
