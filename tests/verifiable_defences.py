"""Defences of rounds with a robust aggregation rule against reducers that send false results."""

from pathlib import Path

import pytest

from swarmnet_protocols.training.matchmaking import Matchmaking
from swarmnet_protocols.training.rounds import reduction
from tests.defences import Defence, nothing, replacing, yes
from tests.sim import test_verifiable_rounds as rounds


def leaves_all_others_out(_: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rounds.test_a_lying_reducer_changes_nothing_and_is_refuted_by_all(rounds.only_its_own, 4, patch)


def one_of_four_lies(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rounds.test_workers_train_on_without_those_whose_results_were_false(3, 1, folder, patch)


VERIFIABLE = (
    Defence(
        "a contribution counts only with its author's signature",
        replacing(reduction, "verify", yes),
        lambda _: rounds.test_a_contribution_to_another_round_slice_or_job_is_not_taken_again(),
    ),
    Defence(
        "a robust result needs contributions of a quorum",
        replacing(reduction, "_has_quorum", yes),
        leaves_all_others_out,
    ),
    Defence(
        "a worker that sent a false result is excluded",
        replacing(Matchmaking, "exclude", nothing),
        one_of_four_lies,
    ),
)
