"""Long rows cut to steps, and how long a chain is mended."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_client.chain.chunks import CHUNK, cut
from swarmnet_client.chain.retry_policy import ATTEMPTS, PAUSE_S, RetryPolicy
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.session.steps import MAX_ROWS, Row, check_rows
from swarmnet_protocols.wire import session_pb2 as pb


@st.composite
def batches(draw: st.DrawFn) -> tuple[Row, ...]:
    """One to three kinds of rows, as many rows or more than fit into a step."""
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        count = draw(st.sampled_from([1, 3, CHUNK, CHUNK + 1, 3 * CHUNK + 7]))
        own = draw(st.sampled_from([True, True, False]))
        kinds.append((draw(st.sampled_from([100, 100, 40])), count, draw(st.integers(0, count)), own))
    found = []
    for sequence in range(draw(st.sampled_from([len(kinds), MAX_ROWS + 2]))):
        start, count, outputs, own = kinds[sequence % len(kinds)]
        source = sequence if own else 0
        found.append(Row(sequence, start, count, outputs, source, source != sequence or start < 100))
    return tuple(found)


@given(batches())
def test_pieces_are_steps_that_add_up_to_the_rows(rows: tuple[Row, ...]) -> None:
    lengths = dict.fromkeys(range(len(rows)), 100)
    taken, wanted = [0] * len(rows), [0] * len(rows)
    if len(rows) > MAX_ROWS and any(row.source != row.sequence for row in rows):
        return  # such rows must start in one step, which no host takes
    for part in cut(rows):
        pieces = tuple(piece for _, piece in part)
        assert sum(piece.count for piece in pieces) <= max(CHUNK, len(pieces))
        assert len(pieces) <= MAX_ROWS
        check_rows(pieces, lengths)
        for index, piece in part:
            row = rows[index]
            assert (piece.sequence, piece.start) == (row.sequence, row.start + taken[index])
            taken[index] += piece.count
            # The wanted outputs are the last ones, so once they begin they go on.
            left = row.count - taken[index]
            assert piece.outputs == max(0, min(piece.count, row.outputs - left))
            wanted[index] += piece.outputs
        lengths.update({piece.sequence: piece.end for piece in pieces})
    assert taken == [row.count for row in rows]
    assert wanted == [row.outputs for row in rows]


def test_patience_ends_after_many_attempts_and_long_enough() -> None:
    patience = RetryPolicy(recover_s=12.0)
    quick = [patience.lost(0.1 * number, idle=False) for number in range(3 * ATTEMPTS)]
    assert not any(quick), "not before recover_s has passed"
    assert patience.lost(12.1, idle=False)


def test_patience_is_new_after_an_answer() -> None:
    patience = RetryPolicy(recover_s=1.0)
    for number in range(100):
        assert not patience.lost(float(number), idle=False)
        patience.answered()


def test_who_is_full_is_asked_again_when_it_said_once_others_have_been_asked() -> None:
    patience = RetryPolicy(recover_s=12.0)
    full = Refused(pb.REASON_OUT_OF_MEMORY, "no room", 3.0)
    pauses = []
    for number in range(4):
        patience.lost(float(number), idle=False)
        pauses.append((patience.pause_s(full), patience.pause_s(None)))
    assert pauses == [(0.0, 0.0), (0.0, 0.0), (3.0, PAUSE_S), (3.0, PAUSE_S)]
    assert patience.pause_s(Refused(pb.REASON_OUT_OF_MEMORY, "no room", 60.0)) == 6.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_wait_that_makes_no_sense_is_none(seconds: float) -> None:
    said = pb.Refused(reason=pb.REASON_OUT_OF_MEMORY, retry_after_s=seconds)
    assert Refused.from_wire(said).retry_after_s == 0.0


def test_a_reason_of_a_newer_version_is_a_refusal_all_the_same() -> None:
    said = pb.Refused.FromString(b"\x08\xe7\x07")
    assert Refused.from_wire(said).reason == pb.REASON_UNSPECIFIED


def test_a_refusal_cannot_steer_the_terminal_that_shows_it() -> None:
    said = pb.Refused(reason=pb.REASON_INTERNAL, detail="\x1b]52;c;cm0gLXJm\x07no room\x9b2J")
    assert str(Refused.from_wire(said)).isprintable()


@pytest.mark.parametrize("idle", [True, False])
def test_a_chain_that_nobody_uses_may_break_now_and_then(idle: bool) -> None:
    patience = RetryPolicy(recover_s=1.0)
    verdicts = []
    for number in range(ATTEMPTS + 2):
        verdicts.append(patience.lost(10.0 * number, idle=idle))
        patience.mended(10.0 * number + 0.5)
    assert any(verdicts) is not idle
