"""A wrong clock is reported; a small deviation is not."""

import pytest

from swarmnet_protocols.machine.clock import SET_CLOCK, clock_advice


@pytest.mark.parametrize("behind_s", [0.0, 299.0, -300.0, 300.0])
def test_five_minutes_need_no_advice(behind_s: float) -> None:
    assert clock_advice(behind_s) == ""


@pytest.mark.parametrize(
    ("behind_s", "words"), [(301.0, "5 minutes behind"), (-7200.0, "120 minutes ahead of"), (1e9, "behind")]
)
def test_more_says_which_way_and_how_to_set_it(behind_s: float, words: str) -> None:
    advice = clock_advice(behind_s)
    assert words in advice
    assert SET_CLOCK in advice
