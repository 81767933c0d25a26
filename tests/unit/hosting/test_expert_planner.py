"""A trunk counts how often its routers choose each of the experts that it lacks: these counts decide on which peers they are placed."""

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from swarmnet_node.experts.expert_planner import ExpertPlanner


def test_rows_count_for_those_of_their_experts_that_the_trunk_lacks() -> None:
    dispatcher: Any = SimpleNamespace(wanted={5: {1, 3, 4, 6}})
    planner = ExpertPlanner(dispatcher, random.Random(0))
    chosen = torch.tensor([[1, 3, 6], [0, 3, 4], [2, 6, 5], [0, 2, 5]])  # the trunk has 0, 2 and 5
    planner._note(5, SimpleNamespace(), (torch.empty(0), chosen))
    planner._count(0.0)
    use = cast(Any, planner._counts)
    assert use.rows.tolist() == [[1, 2, 1, 2]]
    together = np.zeros((4, 4))
    for one, other in ((0, 1), (0, 3), (1, 3), (1, 2)):
        together[one, other] = together[other, one] = 1
    assert (use.together[0] == together).all()
