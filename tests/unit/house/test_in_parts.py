"""A run in parts: tests that passed are not run again, the others are."""

from pathlib import Path

import pytest

from tests.support.plugins.in_parts import Parts

TESTS = """
def test_passes():
    pass

def test_fails():
    assert False
"""


class Called:
    """The names of the tests that ran."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.names.append(item.name)


def test_tests_that_passed_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    tests, file = tmp_path / "test_some.py", tmp_path / "done"
    tests.write_text(TESTS)

    def run() -> list[str]:
        called = Called()
        pytest.main(
            ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tests)], [Parts(file), called]
        )
        return called.names

    assert run() == ["test_passes", "test_fails"]
    assert file.read_text().splitlines() == ["test_some.py::test_passes"]
    assert run() == ["test_fails"]
    file.unlink()
    assert run() == ["test_passes", "test_fails"]
