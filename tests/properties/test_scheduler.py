"""The scheduler: batches within their limit and of one part of the stage, no starvation, short
waits."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_node.engine.scheduler import (
    MAX_WAIT_BEHIND_S,
    MAX_WAIT_S,
    OPENING_TOKENS,
    PREFILL_SHARE,
    SHORT_TOKENS,
    Waiting,
    batching_delay_s,
    expected_wait_s,
    schedule,
)

BUDGETS = st.integers(PREFILL_SHARE, 64)
WAITING = st.lists(
    st.builds(Waiting, tokens=st.integers(1, 200), part=st.integers(0, 2)),
    min_size=1,
    max_size=20,
)


@given(WAITING, BUDGETS)
def test_a_batch_keeps_the_rules(waiting: list[Waiting], budget: int) -> None:
    batch = schedule(waiting, budget)
    assert batch
    assert len({index for index, _ in batch}) == len(batch)
    assert sum(tokens for _, tokens in batch) <= budget
    assert all(1 <= tokens <= waiting[index].tokens for index, tokens in batch)
    assert len({waiting[index].part for index, _ in batch}) == 1
    assert 0 in [index for index, _ in batch], "the oldest work is in every batch"


@given(WAITING, BUDGETS)
def test_all_work_is_computed_in_the_end(waiting: list[Waiting], budget: int) -> None:
    left = list(waiting)
    most = sum(work.tokens for work in waiting)
    for _ in range(most):
        batch = dict(schedule(left, budget))
        rest = []
        for index, work in enumerate(left):
            tokens = work.tokens - batch.get(index, 0)
            if tokens:
                rest.append(Waiting(tokens, work.part))
        left = rest
        if not left:
            return
    raise AssertionError(f"{left} still wait")


@given(
    st.lists(st.tuples(st.integers(1, 200), st.sampled_from("abc")), min_size=1, max_size=20),
    st.fixed_dictionaries({client: st.integers(0, 500) for client in "abc"}),
    BUDGETS,
)
def test_the_client_that_is_the_furthest_behind_is_in_every_batch(
    works: list[tuple[int, str]], served: dict[str, int], budget: int
) -> None:
    waiting = [Waiting(tokens, 0, client) for tokens, client in works]
    batch = dict(schedule(waiting, budget, served))
    least = min(served[client] for _, client in works)
    assert any(served[works[index][1]] == least for index in batch)
    assert sum(batch.values()) <= budget
    assert all(1 <= tokens <= waiting[index].tokens for index, tokens in batch.items())


def test_short_work_of_a_client_ahead_keeps_no_long_prompt_out() -> None:
    waiting = [Waiting(1, 0, "ahead"), Waiting(50, 0, "behind")]
    batch = dict(schedule(waiting, 4, {"ahead": 5, "behind": 4, "expected": 0}))
    assert batch[1] >= 1


@given(st.integers(1, 100), BUDGETS)
def test_a_long_prompt_gets_its_share_among_many_single_tokens(singles: int, budget: int) -> None:
    waiting = [Waiting(1, 0)] * singles + [Waiting(1000, 0)]
    batch = dict(schedule(waiting, budget))
    assert batch[singles] >= budget // PREFILL_SHARE


@given(st.integers(1, 8), BUDGETS)
def test_single_tokens_do_not_wait_for_a_prompt(singles: int, budget: int) -> None:
    room = budget - max(1, budget // PREFILL_SHARE)
    waiting = [Waiting(1000, 0)] + [Waiting(1, 0)] * singles
    batch = dict(schedule(waiting, budget))
    assert sum(batch.get(index, 0) for index in range(1, singles + 1)) == min(singles, room)


@given(st.integers(0, 50), st.integers(0, 50), st.just(0.0) | st.floats(1e-9, 10), st.floats(0, 100))
def test_a_forward_waits_briefly_and_only_for_expected_sequences(
    waiting: int, expected: int, forward_s: float, lead: float
) -> None:
    delay_s = batching_delay_s(waiting, expected, forward_s, lead)
    longest_s = MAX_WAIT_S if lead < SHORT_TOKENS else MAX_WAIT_BEHIND_S
    assert 0 <= delay_s <= min(longest_s, forward_s / 2)
    assert (delay_s > 0) == (0 < waiting < expected and forward_s > 0)


QUEUED = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5000))


@given(QUEUED, st.floats(0, 1))
def test_the_expected_wait_is_at_most_the_time_of_all_work_that_waits(
    queued: dict[str, int], position_s: float
) -> None:
    wait_s = expected_wait_s(queued, "a", position_s)
    assert 0 <= wait_s <= position_s * sum(queued.values())
    assert expected_wait_s({"a": queued.get("a", 0)}, "a", position_s) == position_s * queued.get("a", 0)


@given(QUEUED, st.integers(0, 10**9))
def test_a_flood_of_one_client_adds_at_most_one_prompt_to_a_wait(queued: dict[str, int], flood: int) -> None:
    queued.pop("a", None)
    without = expected_wait_s(queued | {"b": 0}, "a", 1.0)
    assert expected_wait_s(queued | {"b": flood}, "a", 1.0) <= without + OPENING_TOKENS
