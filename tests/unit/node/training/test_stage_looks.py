"""A worker's looks at its stage."""

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnet_node.training.pipeline.stage_part import FEW_MATES, StagePart
from swarmnet_protocols.training.catch_up import WorkerPosition

MATES = 20
ROUND = 3


@pytest.mark.parametrize(
    ("rounds", "asked"),
    [
        ([ROUND] * MATES, FEW_MATES),
        ([ROUND + 1] * MATES, FEW_MATES + MATES),
        ([None] * MATES, FEW_MATES + MATES),
    ],
    ids=["all here", "all ahead", "all silent"],
)
def test_a_look_asks_all_mates_if_few_are_not_enough(rounds: list[int | None], asked: int) -> None:
    questions: list[int] = []

    async def positions(mates: Sequence[int]) -> dict[int, WorkerPosition]:
        questions.extend(mates)
        return {each: WorkerPosition(at, b"") for each in mates if (at := rounds[each]) is not None}

    part: Any = SimpleNamespace(
        keeper=SimpleNamespace(
            matchmaking=SimpleNamespace(positions=positions),
            workers=SimpleNamespace(alive=lambda: [*range(MATES)]),
        ),
        pipeline=SimpleNamespace(job=SimpleNamespace(standing=SimpleNamespace(rng=random.Random(0)))),
    )
    found = asyncio.run(StagePart._mates(part, ROUND))
    assert len(questions) == asked
    assert set(found) == {each for each in rounds if each is not None}
