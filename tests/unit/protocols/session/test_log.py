"""The activation log's bounds and refusals."""

import numpy as np
import pytest

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.session.activation_log import REPLAY_POSITIONS, LogDropped, StepsCompacted
from swarmnet_protocols.session.steps import Row, Step
from tests.support.swarm.logs import a_log


def step(seq: int, start: int, count: int = 1, *, acked: int = 0, replay: bool = False) -> Step:
    return Step(seq, (Row(0, start, count, 0, 0),), np.full((count, 4), seq, np.float32), acked, replay)


def test_a_gap_or_a_repetition_in_the_sequence_is_refused() -> None:
    log = a_log()
    log.append(step(1, 0))
    for seq in (1, 3):
        with pytest.raises(ProtocolViolation, match="after step 1"):
            log.append(step(seq, 1))


def test_a_replay_after_steps_is_refused() -> None:
    log = a_log()
    log.append(step(1, 0))
    with pytest.raises(ProtocolViolation, match="replay after steps"):
        log.append(step(1, 1, replay=True))


def test_a_refused_step_leaves_the_log_as_it_was() -> None:
    log = a_log()
    log.append(step(1, 0))
    with pytest.raises(ProtocolViolation, match="gap"):
        log.append(step(2, 5))
    assert (log.last, dict(log.lengths)) == (1, {0: 1})


def test_acknowledged_steps_are_replayed_in_long_parts() -> None:
    log = a_log()
    for seq in range(1, REPLAY_POSITIONS + 3):
        log.append(step(seq, seq - 1, acked=seq - 1))
    cursor = log.attach(0)
    sent = []
    while (part := log.next(cursor)) is not None:
        sent.append((part.seq, part.positions, part.replay))
    compacted = REPLAY_POSITIONS + 1
    assert sent == [(0, REPLAY_POSITIONS, True), (compacted, 1, True), (compacted + 1, 1, False)]


def test_a_log_over_its_limit_feeds_survivors_but_no_fresh_hop() -> None:
    log = a_log(256)
    for seq in range(1, 41):
        log.append(step(seq, seq - 1, acked=seq - 1))
    assert log.nbytes <= 256
    with pytest.raises(LogDropped):
        log.attach(0)
    cursor = log.attach(39)
    sent = log.next(cursor)
    assert sent is not None
    assert sent.seq == 40


def test_a_survivor_that_lacks_compacted_steps_is_refused() -> None:
    log = a_log()
    for seq in range(1, 6):
        log.append(step(seq, seq - 1, acked=seq - 1))
    with pytest.raises(StepsCompacted):
        log.attach(2)


def test_a_survivor_that_lacks_replayed_steps_is_refused() -> None:
    log = a_log()
    cursor = log.attach(2)
    log.append(step(4, 0, 4, acked=4, replay=True))
    with pytest.raises(StepsCompacted):
        log.next(cursor)


def test_a_log_feeds_a_hop_and_its_standby() -> None:
    log = a_log()
    hop, standby = log.attach(0), log.attach(0)
    for seq in (1, 2):
        log.append(step(seq, seq - 1, acked=seq - 1))
    for cursor in (hop, standby):
        sent = [log.next(cursor) for _ in range(3)]
        assert [each and each.seq for each in sent] == [1, 2, None]


def test_a_cursor_that_was_detached_gets_nothing() -> None:
    log = a_log()
    old = log.attach(0)
    log.detach(old)
    log.append(step(1, 0))
    with pytest.raises(StepsCompacted):
        log.next(old)


def test_a_full_log_stops_feeding_a_standby_that_is_late_and_goes_on() -> None:
    log = a_log(256)
    hop, standby = log.attach(0), log.attach(0)
    for seq in range(1, 41):
        log.append(step(seq, seq - 1, acked=seq - 1))
        sent = log.next(hop)
        assert sent is not None
        assert sent.seq == seq
    with pytest.raises(StepsCompacted):
        log.next(standby)
