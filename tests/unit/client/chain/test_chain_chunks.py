"""Long rows are cut to steps."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_client.chain.chain import CHUNK, cut
from swarmnet_protocols.session.steps import MAX_ROWS, Row, check_rows


@st.composite
def batches(draw: st.DrawFn) -> tuple[Row, ...]:
    """Rows of one to three kinds, at least as many as fit into a step."""
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
def test_chunks_are_steps_that_add_up_to_the_rows(rows: tuple[Row, ...]) -> None:
    lengths = dict.fromkeys(range(len(rows)), 100)
    taken, wanted = [0] * len(rows), [0] * len(rows)
    if len(rows) > MAX_ROWS and any(row.source != row.sequence for row in rows):
        return  # these rows must start in the same step, which exceeds what hosts take
    for part in cut(rows):
        pieces = tuple(piece for _, piece in part)
        assert sum(piece.count for piece in pieces) <= max(CHUNK, len(pieces))
        assert len(pieces) <= MAX_ROWS
        check_rows(pieces, lengths)
        for index, piece in part:
            row = rows[index]
            assert (piece.sequence, piece.start) == (row.sequence, row.start + taken[index])
            taken[index] += piece.count
            # The wanted outputs are those of the last positions, so all chunks after the first with
            # wanted outputs have some.
            left = row.count - taken[index]
            assert piece.outputs == max(0, min(piece.count, row.outputs - left))
            wanted[index] += piece.outputs
        lengths.update({piece.sequence: piece.end for piece in pieces})
    assert taken == [row.count for row in rows]
    assert wanted == [row.outputs for row in rows]
