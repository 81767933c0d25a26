"""How many threads a native step is given, as durations change under it."""

from collections.abc import Callable

from swarmnet_node.native.team import EVERY, Team

ALONE_S, TOGETHER_S, CONTENDED_S = 0.012, 0.007, 0.030


def steps(team: Team, count: int, together_s: float, *, rows: int = 1, most: int = 4) -> list[int]:
    """The sizes of the next steps."""
    sizes = []
    for _ in range(count):
        sizes.append(team.size(rows, most))
        team.took(rows, sizes[-1], ALONE_S if sizes[-1] == 1 else together_s)
    return sizes


def share(sizes: list[int], wanted: Callable[[int], bool]) -> float:
    return sum(map(wanted, sizes)) / len(sizes)


def test_alone_on_a_machine_a_node_takes_all_threads() -> None:
    sizes = steps(Team(), 10 * EVERY, TOGETHER_S)
    assert share(sizes, lambda size: size == 4) > 1 - 2 / EVERY
    assert set(sizes) == {1, 4}, "one thread is tried now and then"


def test_where_threads_wait_for_cores_one_is_taken_and_all_again_afterwards() -> None:
    team = Team()
    steps(team, 100, TOGETHER_S)
    assert steps(team, 5, CONTENDED_S)[-1] == 1
    assert share(steps(team, 10 * EVERY, CONTENDED_S), lambda size: size == 1) > 1 - 2 / EVERY
    assert steps(team, 3 * EVERY, TOGETHER_S)[-1] == 4


def test_one_step_that_was_interrupted_changes_nothing() -> None:
    team = Team()
    steps(team, 10, TOGETHER_S)
    team.took(1, 4, 1.0)
    assert team.size(1, 4) == 4


def test_steps_of_other_sizes_are_not_compared_and_one_thread_is_one_thread() -> None:
    team = Team()
    steps(team, 10, CONTENDED_S, rows=8)
    assert steps(team, 10, TOGETHER_S, rows=1)[-1] == 4
    assert set(steps(Team(), 10, TOGETHER_S, most=1)) == {1}
