"""The model every simulation answers with, made once."""

import pytest

from tests.support.swarm_lab import Reference, load_reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("tiny")
    return load_reference(directory / "model", directory / "cache")
