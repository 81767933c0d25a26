"""Long rows cut to steps, so that every hop of a chain has one to work on."""

from swarmnet_protocols.session.steps import MAX_ROWS, Row

CHUNK = 256
"""Positions in one step: a hop works on one while the next hop works on the one before."""


def cut(rows: tuple[Row, ...]) -> list[list[tuple[int, Row]]]:
    """Rows cut to steps of at most ``CHUNK`` positions: per step, (index of the row it is a piece of, the piece).

    Rows that start from another lane mean the lanes as they are now, so those stay together in one step.
    """
    if any(row.source != row.lane for row in rows):
        return [list(enumerate(rows))]
    parts: list[list[tuple[int, Row]]] = [[]]
    room = CHUNK
    for index, row in enumerate(rows):
        done = 0
        while done < row.count:
            if room == 0 or len(parts[-1]) == MAX_ROWS:
                parts.append([])
                room = CHUNK
            count = min(room, row.count - done)
            left = row.count - done - count
            piece = Row(
                row.lane,
                row.start + done,
                count,
                max(0, min(count, row.outputs - left)),
                row.source,
                row.rewrite and not done,
            )
            parts[-1].append((index, piece))
            done += count
            room -= count
    return parts
