"""The model every simulation answers with, made once."""

import pytest
import torch

from tests.support.swarm_lab import Reference, load_reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)  # the model is far too small to be worth a second one
    directory = tmp_path_factory.mktemp("tiny")
    return load_reference(directory / "model", directory / "cache")
