"""The mixture of experts that simulations answer with."""

import pytest

from tests.support.swarm.expert_lab import load_experts_reference
from tests.support.swarm.swarm_lab import Reference


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return load_experts_reference("mixtral", tmp_path_factory.mktemp("mixtral"))
