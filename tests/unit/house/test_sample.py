"""A sample: few cells of each matrix, in which each value of each parameter occurs, and no test for
thorough runs only."""

from pathlib import Path

import pytest

from tests.support.plugins.sample import Sample

TESTS = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("fault", ["crash", "hang", pytest.param(object(), marks=pytest.mark.thorough)])
@pytest.mark.parametrize("victim", range(6))
def test_a_matrix(fault, victim):
    pass

@pytest.mark.parametrize("victim", range(6))
@pytest.mark.parametrize("fault", range(3))
def test_another(fault, victim):
    pass

@pytest.mark.thorough
@pytest.mark.parametrize("fault", range(3))
def test_a_third(fault):
    pass
"""


class Chosen:
    """The parameters of the tests that were chosen, by the name of the function."""

    def __init__(self) -> None:
        self.cells: dict[str, list[tuple[str, ...]]] = {
            "test_a_matrix": [],
            "test_another": [],
            "test_a_third": [],
        }

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            assert isinstance(item, pytest.Function)
            self.cells[item.originalname].append(tuple(map(str, item.callspec.params.values())))


def test_each_value_of_each_parameter_of_a_matrix_is_in_the_sample(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    matrix\n    thorough\n")
    tests = tmp_path / "test_a_matrix.py"
    tests.write_text(TESTS)

    def chosen(*plugins: object) -> Chosen:
        seen = Chosen()
        where = ["-q", "--collect-only", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tests)]
        pytest.main(where, [seen, *plugins])
        return seen

    whole, sample = chosen().cells, chosen(Sample()).cells
    assert [len(cells) for cells in whole.values()] == [18, 18, 3]
    assert sample["test_another"] == whole["test_another"]
    assert sample["test_a_third"] == []
    assert 6 <= len(sample["test_a_matrix"]) <= 8
    for axis, thorough in ((0, 0), (1, 1)):
        values, kept = ({cell[axis] for cell in cells["test_a_matrix"]} for cells in (whole, sample))
        assert len(kept) == len(values) - thorough
