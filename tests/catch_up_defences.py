"""Defences of workers against claims of a later round."""

from pathlib import Path

import pytest

from swarmnet_node.training import worker
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training import matchmaking
from swarmnet_protocols.training.catch_up import CatchUp, WorkerPosition
from tests.defences import Defence, Patch, replacing, yes
from tests.sim import test_matchmaking, test_training_takeover
from tests.unit.workers import test_training_catch_up


def believe_the_latest(patch: Patch) -> None:
    def latest(_: WorkerPosition, votes: dict[PeerId, WorkerPosition], **__: bool) -> CatchUp:
        position = max(votes.values(), key=lambda each: each.round)
        return CatchUp(position, tuple(peer for peer, each in votes.items() if each == position))

    patch.setattr(worker, "catch_up", latest)


def one_of_four(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_training_takeover.test_claims_of_a_later_round_by_newcomers_are_ignored(3, 1, 0.0, folder, patch)


def join_the_latest(patch: Patch) -> None:
    def latest(_: WorkerPosition, __: int, others: dict[PeerId, WorkerPosition]) -> CatchUp:
        position = max(others.values(), key=lambda each: each.round)
        return CatchUp(position, tuple(peer for peer, each in others.items() if each == position))

    patch.setattr(test_training_catch_up, "join", latest)


CATCH_UP = (
    Defence(
        "no minority moves a new worker that has trained",
        join_the_latest,
        lambda _: test_training_catch_up.test_a_new_worker_moves_to_a_larger_group_and_no_minority_moves_it(),
    ),
    Defence(
        "a leader does not wait long for a worker at another round",
        replacing(matchmaking, "ELSEWHERE_S", 1e9),
        lambda _: test_matchmaking.test_a_leader_waits_a_few_seconds_for_a_worker_at_another_round(2),
    ),
    Defence("a claim of a later round replaces no worker's weights", believe_the_latest, one_of_four),
    Defence(
        "a roster of newcomers does not continue an earlier one",
        replacing(test_training_catch_up, "continued", yes),
        lambda _: (
            test_training_catch_up.test_rosters_of_newcomers_or_of_a_minority_do_not_continue_the_last_one()
        ),
    ),
)
