"""Votes that move a worker to another round."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import CatchUp, Stay, WorkerPosition, catch_up, continued, join
from tests.defences import Patch, defence, replacing, yes

MINE = WorkerPosition(5, b"mine")
LATER = WorkerPosition(9, b"later")
positions = st.builds(WorkerPosition, st.integers(0, 20), st.sampled_from([b"a", b"b", b"mine"]))


def votes(*each: WorkerPosition) -> dict[PeerId, WorkerPosition]:
    return {PeerId(f"p{number}"): place for number, place in enumerate(each)}


def test_more_than_half_of_the_answering_voters_move_a_worker() -> None:
    assert catch_up(MINE, votes(LATER, LATER, MINE), same_state=True) == CatchUp(
        LATER, (PeerId("p0"), PeerId("p1"))
    )
    assert catch_up(MINE, votes(LATER, LATER, MINE, MINE), same_state=True) == Stay(is_settled=False)
    assert catch_up(MINE, votes(LATER, MINE, MINE), same_state=True) == Stay(is_settled=True)
    assert catch_up(MINE, votes(LATER, WorkerPosition(9, b"else")), same_state=True) == Stay(is_settled=False)
    assert catch_up(MINE, {}, same_state=True) == Stay(is_settled=False)


def test_the_smaller_part_of_a_split_round_follows_the_larger() -> None:
    other = WorkerPosition(5, b"other")
    assert isinstance(catch_up(MINE, votes(MINE, other, other), same_state=True), CatchUp)
    assert isinstance(catch_up(other, votes(other, MINE, MINE), same_state=True), Stay)


def test_an_untrained_worker_follows_the_majority_of_trained_ones() -> None:
    start, here, there = WorkerPosition(0, b"start"), WorkerPosition(2, b"here"), WorkerPosition(7, b"there")
    assert join(start, 0, votes(start, start, start, here)) == CatchUp(here, (PeerId("p3"),))
    assert join(start, 0, votes(here, here, there)) == CatchUp(here, (PeerId("p0"), PeerId("p1")))
    assert isinstance(join(start, 0, votes(here, there)), Stay)
    assert isinstance(join(start, 0, votes(start, start)), Stay)


def join_the_latest(patch: Patch) -> None:
    def latest(_: WorkerPosition, __: int, others: dict[PeerId, WorkerPosition]) -> CatchUp:
        position = max(others.values(), key=lambda each: each.round)
        return CatchUp(position, tuple(peer for peer, each in others.items() if each == position))

    patch.setattr(sys.modules[__name__], "join", latest)


@defence("no minority moves a new worker that has trained", off=join_the_latest)
def test_a_new_worker_moves_to_a_larger_group_and_not_to_a_minority() -> None:
    here, there = WorkerPosition(2, b"here"), WorkerPosition(1, b"there")
    liars = WorkerPosition(300, b"forged")
    assert isinstance(join(here, 2, votes(there, there, there)), CatchUp)
    assert isinstance(join(here, 5, votes(liars, liars, liars)), Stay)
    assert isinstance(join(here, 3, votes(there, there, liars)), Stay)


@given(st.lists(positions, min_size=2, max_size=6), st.integers(1, 4), st.integers(1, 4))
def test_of_two_new_groups_exactly_one_moves(places: list[WorkerPosition], few: int, many: int) -> None:
    one, other = places[0], places[-1]
    if one == other or not (one.round and other.round):
        return
    moves = [
        isinstance(join(one, few, votes(*[other] * many)), CatchUp),
        isinstance(join(other, many, votes(*[one] * few)), CatchUp),
    ]
    assert moves.count(True) == 1


def test_with_different_replicas_the_median_round_counts() -> None:
    verdict = catch_up(
        MINE,
        votes(WorkerPosition(300, b"x"), WorkerPosition(6, b"a"), WorkerPosition(6, b"b")),
        same_state=False,
    )
    assert verdict == CatchUp(WorkerPosition(6, b"a"), (PeerId("p1"),))
    assert isinstance(
        catch_up(
            MINE,
            votes(WorkerPosition(300, b"x"), WorkerPosition(5, b"a"), WorkerPosition(5, b"b")),
            same_state=False,
        ),
        Stay,
    )


@given(st.lists(positions, max_size=6), st.lists(positions, max_size=6), st.booleans())
def test_fewer_than_half_of_the_voters_do_not_move_a_worker(
    honest: list[WorkerPosition], liars: list[WorkerPosition], same: bool
) -> None:
    """Honest voters are at this worker's position, or one round before it."""
    here = [MINE if same or place.round % 2 else WorkerPosition(4, place.state) for place in honest]
    liars = liars[: max(0, len(here) - 1)]
    verdict = catch_up(MINE, votes(*here, *liars), same_state=same)
    assert isinstance(verdict, Stay) or verdict.position.round == MINE.round


@defence("a roster of newcomers does not continue an earlier one", off=replacing(__name__, "continued", yes))
def test_rosters_of_newcomers_or_minorities_do_not_continue_the_last() -> None:
    before = [PeerId(name) for name in "abcd"]
    assert continued([], {PeerId("x"): 0})
    assert continued(before, dict.fromkeys(map(PeerId, "abcx"), 0))
    assert not continued(before, dict.fromkeys(map(PeerId, "ab"), 0))
    assert not continued(before, dict.fromkeys(map(PeerId, "abvwxyz"), 0))
