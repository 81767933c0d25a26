"""Defences of averaging rounds against members that send false results, decisions or votes."""

from pathlib import Path
from typing import Any

import pytest

from swarmnet_node.training import known_workers
from swarmnet_node.training.checkpoint import WorkerCheckpoint
from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.replica import Replica
from swarmnet_protocols.training import rosters
from swarmnet_protocols.training.matchmaking import Matchmaking
from swarmnet_protocols.training.rounds import reduction, round_state, slice_plans, votes
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.messages import Hashes, Vote
from swarmnet_protocols.training.rounds.votes import Electorate, Votes
from tests.defences import Defence, Patch, no, nothing, replacing, yes
from tests.sim import test_matchmaking
from tests.sim import test_training_decisions as decisions
from tests.sim import test_verifiable_rounds as rounds
from tests.unit.training import test_round_state, test_training_terms
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


def counts_always(patch: Patch) -> None:
    patch.setattr(Votes, "counts", yes)


def unsigned_votes_count(patch: Patch) -> None:
    patch.setattr(votes, "verify", yes)


def votes_again(patch: Patch) -> None:
    """A member casts a vote for each proposal."""

    def cast(self: Votes, hashes: Hashes) -> Vote:
        return Vote(hashes, self._electorate.sign(self._signed(hashes)))

    patch.setattr(Votes, "cast", cast)
    patch.setattr(Votes, "own", None)


def at_once(patch: Patch) -> None:
    """A member follows any other to a later attempt."""
    patch.setattr(Electorate, "majority", property(lambda self: len(self.keys)))


def chooses_claims(patch: Patch) -> None:
    honest = slice_plans.plan

    def plan(assignments: Any, reports: Any, me: int, *args: Any, **options: Any) -> Any:
        claimed = max(reports.values(), key=lambda report: sum(map(len, report.held)))
        return honest(assignments, {**reports, me: claimed}, me, *args, **options)

    patch.setattr(round_state, "plan", plan)


def false_decision(_: Path) -> None:
    test_round_state.test_a_decision_counts_only_with_the_votes_of_a_majority(
        test_round_state.FALSE_DECISIONS["with one vote"]
    )


def replayed_decision(_: Path) -> None:
    test_round_state.test_a_decision_counts_only_with_the_votes_of_a_majority(
        test_round_state.FALSE_DECISIONS["with votes of a round with other terms"]
    )


def lies_to_one_of_four(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        decisions.test_workers_exclude_one_that_decides_alone_and_keep_one_set_of_parameters(
            "mean", folder, patch
        )


VERIFIABLE = (
    Defence("a decision counts only with the votes of a majority", counts_always, false_decision),
    Defence("votes of another round do not count", unsigned_votes_count, replayed_decision),
    Defence(
        "a member votes once",
        votes_again,
        lambda _: test_round_state.test_a_member_votes_once_and_only_for_results_that_it_holds(),
    ),
    Defence(
        "two votes of one member are noticed",
        replacing(Votes, "count", nothing),
        lambda _: test_round_state.test_a_member_that_votes_for_two_outcomes_is_accused_with_both_votes(),
    ),
    Defence(
        "an accusation counts only with its proof",
        replacing(Votes, "proves", yes),
        lambda _: test_round_state.test_a_false_decision_that_its_sender_did_not_sign_is_no_proof(),
    ),
    Defence(
        "a liar that lies to one member is excluded by all",
        replacing(Votes, "proves", no),
        lies_to_one_of_four,
    ),
    Defence(
        "no minority has a coordinator passed over",
        at_once,
        lambda _: test_round_state.test_no_minority_has_a_coordinator_passed_over(),
    ),
    Defence(
        "the first coordinator alone discards no complete round",
        replacing(RoundTiming, "attempt_s", 1e-3),
        lambda _: test_round_state.test_the_first_coordinator_alone_discards_no_complete_round(),
    ),
    Defence(
        "a result that a member only claims to hold is not chosen",
        chooses_claims,
        lambda _: (
            test_round_state.test_a_result_that_one_member_claims_to_hold_is_not_chosen_before_it_arrives()
        ),
    ),
    Defence(
        "members with different states do not average together",
        replacing(test_training_terms, "replace", lambda terms, **_: terms),
        lambda _: (
            test_training_terms.test_members_that_differ_on_who_is_new_or_on_the_state_do_not_average_together()
        ),
    ),
    Defence(
        "a member of a roster can sign",
        replacing(rosters, "public_key_of", nothing),
        lambda _: test_matchmaking.test_a_member_that_cannot_sign_is_refused("b"),
    ),
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
