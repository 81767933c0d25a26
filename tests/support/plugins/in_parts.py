"""``--in-parts FILE``: hours of tests in several runs. The file names the tests that have passed;
they are not run again."""

from pathlib import Path

import pytest


class Parts:
    """A pytest plugin. The file has one test a line; to start again, delete it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the tests that have passed before."""
        passed = set(self._file.read_text().splitlines()) if self._file.exists() else set()
        done = [item for item in items if item.nodeid in passed]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down a passed test at once: the run may end at any time."""
        if report.when == "call" and report.passed:
            with self._file.open("a") as file:
                file.write(f"{report.nodeid}\n")
