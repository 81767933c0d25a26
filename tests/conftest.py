"""One thread for every test, and options for longer sweeps: ``pytest tests/sim --seeds 1000 --first-seed 50``."""

import sys

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.register_profile("thorough", deadline=None, max_examples=100_000)  # --hypothesis-profile thorough
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models of tests are too small for two threads, and beside the nodes' own they take turns to wait for each other."""
    if torch := sys.modules.get("torch"):  # who has not imported it does not compute
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=50, help="seeds to run of every randomized simulation")
    group.addoption("--first-seed", type=int, default=0, help="the first of them; a failure names its seed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first, seeds = metafunc.config.getoption("first_seed"), metafunc.config.getoption("seeds")
        metafunc.parametrize("seed", range(first, first + seeds))
