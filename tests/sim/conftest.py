"""The models simulations answer with, made once."""

import pytest

from tests.support.swarm.swarm_lab import Reference, load_reference
from tests.support.swarm.tiny_swarm import load_tiny


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory = tmp_path_factory.mktemp("tiny")
    return load_reference(directory / "model", directory / "cache")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The tiny model with a tokenizer."""
    return load_tiny(tmp_path_factory.mktemp("tiny"))
