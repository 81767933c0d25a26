"""Votes that move a worker to another round."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import Move, Position, Stay, catch_up, continued

MINE = Position(5, b"mine")
LATER = Position(9, b"later")
positions = st.builds(Position, st.integers(0, 20), st.sampled_from([b"a", b"b", b"mine"]))


def votes(*each: Position) -> dict[PeerId, Position]:
    return {PeerId(f"p{number}"): place for number, place in enumerate(each)}


def test_more_than_half_of_the_answering_voters_move_a_worker() -> None:
    assert catch_up(MINE, votes(LATER, LATER, MINE), same_state=True) == Move(
        LATER, (PeerId("p0"), PeerId("p1"))
    )
    assert catch_up(MINE, votes(LATER, LATER, MINE, MINE), same_state=True) == Stay(is_settled=False)
    assert catch_up(MINE, votes(LATER, MINE, MINE), same_state=True) == Stay(is_settled=True)
    assert catch_up(MINE, votes(LATER, Position(9, b"else")), same_state=True) == Stay(is_settled=False)
    assert catch_up(MINE, {}, same_state=True) == Stay(is_settled=False)


def test_the_smaller_part_of_a_split_round_follows_the_larger() -> None:
    other = Position(5, b"other")
    assert isinstance(catch_up(MINE, votes(MINE, other, other), same_state=True), Move)
    assert isinstance(catch_up(other, votes(other, MINE, MINE), same_state=True), Stay)


def test_with_different_replicas_the_median_round_counts() -> None:
    verdict = catch_up(
        MINE, votes(Position(300, b"x"), Position(6, b"a"), Position(6, b"b")), same_state=False
    )
    assert verdict == Move(Position(6, b"a"), (PeerId("p1"),))
    assert isinstance(
        catch_up(MINE, votes(Position(300, b"x"), Position(5, b"a"), Position(5, b"b")), same_state=False),
        Stay,
    )


@given(st.lists(positions, max_size=6), st.lists(positions, max_size=6), st.booleans())
def test_fewer_than_half_of_the_voters_do_not_move_a_worker(
    honest: list[Position], liars: list[Position], same: bool
) -> None:
    """Honest voters are at this worker's position, or one round before it."""
    here = [MINE if same or place.round % 2 else Position(4, place.state) for place in honest]
    liars = liars[: max(0, len(here) - 1)]
    verdict = catch_up(MINE, votes(*here, *liars), same_state=same)
    assert isinstance(verdict, Stay) or verdict.position.round == MINE.round


def test_rosters_of_newcomers_or_of_a_minority_do_not_continue_the_last_one() -> None:
    before = [PeerId(name) for name in "abcd"]
    assert continued([], {PeerId("x"): 0})
    assert continued(before, dict.fromkeys(map(PeerId, "abcx"), 0))
    assert not continued(before, dict.fromkeys(map(PeerId, "ab"), 0))
    assert not continued(before, dict.fromkeys(map(PeerId, "abvwxyz"), 0))
