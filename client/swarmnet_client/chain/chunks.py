"""Splits long rows into steps, so that every hop of a chain has one to compute."""

from collections.abc import Sequence

import torch

from swarmnet_protocols.session.steps import MAX_ROWS, Row

CHUNK = 256
"""Positions in one step: a hop computes one while the next hop computes the one before."""

Part = list[tuple[int, Row]]
"""The pieces of one step, each with the index of the row it is a piece of."""


def cut(rows: tuple[Row, ...]) -> list[Part]:
    """Rows split into steps of at most ``CHUNK`` positions; of more rows than that, at most one position of each row.

    A row that starts from another sequence means that sequence as it is before the batch, so all rows of such a batch begin in one step.
    """
    done = [0] * len(rows)
    parts: list[Part] = []
    if any(row.source != row.sequence for row in rows):
        share = max(1, CHUNK // len(rows))
        done = [min(share, row.count) for row in rows]
        parts.append([(index, _piece(row, 0, done[index])) for index, row in enumerate(rows)])
    return parts + _cut_rest(rows, done)


def cut_values(parts: Sequence[Part], rows: Sequence[Row], values: torch.Tensor) -> list[torch.Tensor]:
    """The values of each part. ``values`` [P, ...] are those of ``rows``, one after another."""
    inputs = torch.split(values, [row.count for row in rows])
    taken = [0] * len(rows)
    cuts = []
    for part in parts:
        pieces = []
        for index, row in part:
            pieces.append(inputs[index][taken[index] : taken[index] + row.count])
            taken[index] += row.count
        cuts.append(torch.cat(pieces))
    return cuts


def _cut_rest(rows: Sequence[Row], done: Sequence[int]) -> list[Part]:
    parts: list[Part] = []
    room = 0
    for index, row in enumerate(rows):
        reached = done[index]
        while reached < row.count:
            if room == 0 or len(parts[-1]) == MAX_ROWS:
                parts.append([])
                room = CHUNK
            count = min(room, row.count - reached)
            parts[-1].append((index, _piece(row, reached, count)))
            reached += count
            room -= count
    return parts


def _piece(row: Row, done: int, count: int) -> Row:
    """``count`` positions of a row after the first ``done``, which earlier steps have."""
    left = row.count - done - count
    outputs = max(0, min(count, row.outputs - left))
    source = row.sequence if done else row.source
    return Row(row.sequence, row.start + done, count, outputs, source, row.rewrite and not done)
