"""Relations between timeouts."""

import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.timing import Timing


@pytest.mark.parametrize(
    "change",
    [
        {"heartbeat_s": 0.7},
        {"matchmaking_heartbeat_s": 2.7},
        {"announce_s": 23.0},
        {"recover_s": 4.4},
        {"client_silence_s": 3.9},
        {"pass_wait_s": 3.1},
        {"first_step_s": 119.0},
    ],
    ids=str,
)
def test_timeouts_that_contradict_each_other_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Timing(**change)


def test_a_failed_hop_is_detected_and_replaced_within_three_seconds() -> None:
    timing = Timing()
    assert timing.silence_s + timing.heartbeat_s < 3.0
    assert timing.open_s < 3.0
