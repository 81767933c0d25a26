"""Defences of rounds with a robust aggregation rule against reducers that send false results."""

from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.training import known_workers
from swarmnet_node.training.checkpoint import WorkerCheckpoint
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.replica import Replica
from swarmnet_protocols.training.matchmaking import Matchmaking
from swarmnet_protocols.training.rounds import reduction
from tests.defences import Defence, Patch, nothing, replacing, yes
from tests.sim import test_matchmaking
from tests.sim import test_verifiable_rounds as rounds
from tests.unit.workers import test_known_workers


def excluding_none(patch: Patch) -> None:
    honest = Matchmaking.__init__

    def begin(self: Matchmaking, *args: Any, **options: Any) -> None:
        honest(self, *args, **options | {"is_excluded": lambda _: False})

    patch.setattr(Matchmaking, "__init__", begin)


def saving_no_exclusions(patch: Patch) -> None:
    honest = Replica.checkpoint

    def checkpoint(self: Replica, job_id: str, round: int, _: object = ()) -> WorkerCheckpoint:
        return honest(self, job_id, round)

    patch.setattr(Replica, "checkpoint", checkpoint)


def restarted(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rounds.test_an_exclusion_outlasts_a_restart(folder, patch)


def leaves_all_others_out(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rounds.test_a_lying_reducer_changes_nothing_and_is_refuted_by_all(rounds.only_its_own, 4, patch)


def one_of_four_lies(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rounds.test_workers_exclude_liars_and_train_on(3, 1, folder, patch)


VERIFIABLE = (
    Defence(
        "a contribution counts only with its author's signature",
        replacing(reduction, "verify", yes),
        lambda _: rounds.test_a_contribution_to_another_round_slice_or_job_is_refused(),
    ),
    Defence(
        "a robust result needs contributions of a quorum",
        replacing(reduction, "_has_quorum", yes),
        leaves_all_others_out,
    ),
    Defence(
        "a worker that sent a false result is excluded",
        replacing(KnownWorkers, "exclude", nothing),
        one_of_four_lies,
    ),
    Defence(
        "an excluded worker waits in no group",
        excluding_none,
        lambda _: test_matchmaking.test_an_excluded_follower_is_in_no_roster("waiting"),
    ),
    Defence(
        "no worker is redirected to an excluded leader",
        excluding_none,
        lambda _: test_matchmaking.test_no_worker_follows_an_excluded_leader_to_which_another_redirects(),
    ),
    Defence(
        "an excluded worker has no vote in catching up",
        replacing(KnownWorkers, "exclude", nothing),
        lambda _: test_known_workers.test_an_excluded_worker_neither_votes_nor_sends_a_state(),
    ),
    Defence(
        "the list of excluded workers is bounded",
        replacing(known_workers, "MAX_EXCLUDED", 1 << 30),
        lambda _: test_known_workers.test_the_list_of_excluded_workers_is_bounded(),
    ),
    Defence("an exclusion outlasts a restart", saving_no_exclusions, restarted),
)
