"""Rules of tests, and the second run of tests of defences."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.defences import Defences
from tests.support.house.source_code import PACKAGES, ROOT

LONGEST_NAME = 60
UNIT = ROOT / "tests" / "unit"

EXAMPLE = """
import pytest
from hypothesis import given, strategies

from tests.defences import defence, nothing, patience_s, replacing

LIMIT = 3

@defence("tested", off=replacing(__name__, "LIMIT", 9), size=4)
@defence("tested at another size only", off=replacing(__name__, "LIMIT", 9), size=2)
@defence("switched off wrongly", off=lambda patch: patch.setattr(f"{__name__}.LIMIT", None), size=4)
@pytest.mark.parametrize("size", [2, 4])
def test_sizes(size):
    assert min(size, LIMIT) <= 3

@defence("tested by one example", off=replacing(__name__, "LIMIT", 9), size=4)
@given(strategies.integers(0, 100))
def test_any_size(size):
    assert min(size, LIMIT) <= 3

@defence("not waited for as long as in the first run", off=nothing)
def test_patience():
    assert patience_s(60.0) == 60.0
"""


SHARED = """
from tests.defences import defence

LEFT_BEHIND = []

@defence("switching off changes what tests share", off=lambda patch: LEFT_BEHIND.append("damage"))
def test_first():
    assert not LEFT_BEHIND

def test_second():
    assert not LEFT_BEHIND
"""


def run(file: Path, *plugins: object) -> int:
    """Run a file of tests in this process, and return the exit code."""
    options = ["--rootdir", str(file.parent), "-q", "--no-header", "-p", "no:cacheprovider"]
    return pytest.main([*options, "-o", "markers=defence", str(file)], plugins=[Defences(), *plugins])


class Outcomes:
    """A plugin that notes the outcome of each second run, by its promise."""

    def __init__(self) -> None:
        self.all: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        promise = report.nodeid.partition("without: ")[2].removesuffix("]")
        if report.when == "call" and promise:
            self.all[promise] = report.outcome


def test_a_second_run_passes_only_if_the_test_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_example.py"
    file.write_text(EXAMPLE)
    outcomes = Outcomes()
    run(file, outcomes)
    assert outcomes.all == {
        "tested": "passed",
        "tested at another size only": "failed",
        "switched off wrongly": "failed",
        "tested by one example": "passed",
        "not waited for as long as in the first run": "passed",
    }


def test_second_runs_come_after_all_first_runs(tmp_path: Path) -> None:
    file = tmp_path / "test_shared.py"
    file.write_text(SHARED)
    assert run(file) == pytest.ExitCode.OK


def code_of(folder: Path) -> Path:
    """The folder of code that a folder of unit tests is named like."""
    first, *rest = folder.relative_to(UNIT).parts
    package = PACKAGES.get(f"swarmnet_{first}")
    return package.joinpath(*rest) if package else PACKAGES["swarmnet"].joinpath(first, *rest)


def test_folders_of_unit_tests_are_named_like_the_code() -> None:
    folders = {path.parent for path in UNIT.rglob("test_*.py")} - {UNIT / "house"}
    assert [each for each in folders if not (code_of(each) / "__init__.py").exists()] == []
    assert len(folders) > 30


def found(pattern: str) -> list[str]:
    return [each for path in (ROOT / "tests").rglob("*.py") for each in re.findall(pattern, path.read_text())]


def test_modules_of_tests_say_what_they_hold() -> None:
    modules = (ROOT / "tests").rglob("test_*.py")
    assert [path for path in modules if not path.read_text().startswith('"""')] == []


def test_tests_that_docstrings_name_exist() -> None:
    named = set(found(r"``((?:conformance|e2e|net|properties|sim|unit)/[\w/]+\.py)``"))
    assert [name for name in named if not (ROOT / "tests" / name).exists()] == []
    assert len(named) > 8


def test_names_of_tests_are_short_sentences() -> None:
    assert [name for name in found(r"def test_(\w+)") if len(name) > LONGEST_NAME] == []


def test_results_have_derived_bounds_and_no_fixed_tolerances() -> None:
    """``tests/support/models/rounding.py`` derives bounds that hold on every processor."""
    assert found(r"\b(?:assert_(?:all)?close|allclose)\(") == []
    assert len(found(r"\bassert_(?:near|product|sum)\(")) > 100


def test_no_two_defences_have_the_same_promise() -> None:
    promises = Counter(found(r'(?m)^@defence\(\s*"([^"]+)"'))
    assert len(promises) > 400
    assert [each for each, count in promises.items() if count > 1] == []
