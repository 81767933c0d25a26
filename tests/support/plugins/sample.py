"""``--sample``: leave out tests marked ``thorough``, and run a ``matrix`` on a sample of its
parameters.

Each value of each parameter occurs in the sample.
"""

from collections import defaultdict
from random import Random

import pytest


class Sample:
    """A pytest plugin. The sample is the same in every run."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out the rest of every matrix, and what only thorough runs have."""
        left = {item for item in items if item.get_closest_marker("thorough")}
        matrices: defaultdict[str, list[pytest.Function]] = defaultdict(list)
        for item in items:
            if (
                isinstance(item, pytest.Function)
                and item.get_closest_marker("matrix")
                and not item.get_closest_marker("defence")
                and item not in left
            ):
                matrices[item.nodeid.partition("[")[0]].append(item)
        left |= {item for cells in matrices.values() for item in left_out(cells)}
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def left_out(cells: list[pytest.Function]) -> list[pytest.Function]:
    """The cells of a matrix of which each value occurs in a cell that stays."""
    seen: set[tuple[str, str]] = set()
    left = []
    for cell in Random(0).sample(cells, len(cells)):
        values = {(name, repr(value)) for name, value in cell.callspec.params.items()}
        if values <= seen:
            left.append(cell)
        seen |= values
    return left
