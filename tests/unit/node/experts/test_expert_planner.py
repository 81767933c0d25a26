"""A trunk counts how often its routers choose each of the experts that it lacks: these counts
decide on which peers they are placed."""

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from swarmnet_node.experts import expert_planner
from swarmnet_node.experts.expert_links import MAX_LINKS
from swarmnet_node.experts.expert_planner import MAX_COPIES, ExpertPlanner
from swarmnet_protocols.directory.expert_announcements import ExpertBits
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.experts import placement as expert_placement
from tests.defences import defence, replacing


def test_rows_count_for_those_of_their_experts_that_the_trunk_lacks() -> None:
    dispatcher: Any = SimpleNamespace(wanted={5: {1, 3, 4, 6}})
    planner = ExpertPlanner(dispatcher, random.Random(0))
    chosen = torch.tensor([[1, 3, 6], [0, 3, 4], [2, 6, 5], [0, 2, 5]])  # the trunk has 0, 2 and 5
    planner._count_choice(5, SimpleNamespace(), (torch.empty(0), chosen))
    planner._count(0.0)
    use = cast(Any, planner._counts)
    assert use.rows.tolist() == [[1, 2, 1, 2]]
    together = np.zeros((4, 4))
    for one, other in ((0, 1), (0, 3), (1, 3), (1, 2)):
        together[one, other] = together[other, one] = 1
    assert (use.together[0] == together).all()


def planner_of(links: list[Any], blocks: int, experts: int) -> ExpertPlanner:
    wanted = {block: {*range(experts)} for block in range(blocks)}
    dispatcher: Any = SimpleNamespace(wanted=wanted, links=SimpleNamespace(missing=lambda: {}, every=links))
    planner = ExpertPlanner(dispatcher, random.Random(0))
    use = cast(Any, planner._counts)
    choices = np.random.default_rng(0).integers(0, 1000, (blocks, experts))
    use.rows[:] = choices
    use.together[:] = np.minimum(choices[:, :, None], choices[:, None, :])
    return planner


def boastful_link(name: str, blocks: int, experts: int) -> Any:
    """A link to a peer that says it has every expert and room for more."""
    every = {block: ExpertBits.of(range(experts)) for block in range(blocks)}
    host = SimpleNamespace(peer=PeerId(name), capacity=1 << 30)
    return SimpleNamespace(host=host, experts=every, row_s=1e-4, is_open=True)


@defence(
    "the memory of a plan does not grow with the square of the copies that peers claim",
    off=replacing(expert_placement, "MOST_COPIES", 1 << 30),
    peers=12,
)
@pytest.mark.parametrize("peers", [12, MAX_LINKS])
def test_a_plan_takes_bounded_memory_whatever_peers_claim(peers: int) -> None:
    links = [boastful_link(f"p{number}", 1, 128) for number in range(peers)]
    planner = planner_of(links, 1, 128)
    tracemalloc.start()
    try:
        planner.plan(links, 0.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


@defence("a plan considers a bounded number of copies", off=replacing(expert_planner, "MAX_COPIES", 1 << 60))
def test_a_plan_considers_bounded_copies_and_later_ones_the_rest() -> None:
    experts, blocks = 256, 6
    links = [boastful_link(f"p{number}", blocks, experts) for number in range(MAX_LINKS)]
    planner = planner_of(links, blocks, experts)
    turns = [planner._blocks_in_turn(links) for _ in range(4)]
    assert all(len(turn) * experts * len(links) <= MAX_COPIES for turn in turns)
    assert {block for turn in turns for block in turn} == {*range(blocks)}
    few = links[:2]
    assert planner._blocks_in_turn(few) == [*range(blocks)]
    planner._dispatcher.links.missing = lambda: {4: ExpertBits.of({1})}  # type: ignore[method-assign]
    assert all(4 in planner._blocks_in_turn(links) for _ in range(3))


def test_a_plan_survives_any_time_that_a_peer_announces() -> None:
    links = [boastful_link(f"p{number}", 1, 8) for number in range(3)]
    links[0].row_s, links[1].row_s = 1e-310, 3600.0
    planner = planner_of(links, 1, 8)
    planner.plan(links, 0.0)
