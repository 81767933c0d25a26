"""Finds the columns of each row of a batch that hold tokens, by the attention mask. The others are
padding."""

from collections.abc import Sequence

import torch

Columns = list[tuple[int, int]]
"""For each row, the columns [first, end) that hold its tokens.

In a batch with holes, these are the columns in which ``Unpadded.close`` puts the tokens.
"""


def read_mask(mask: torch.Tensor | None, batch: int, held: int, width: int) -> Columns:
    """Return the columns [first, end) that hold tokens, for each of ``batch`` rows.

    - ``mask``: [B, n], true where a column holds a token, with n at least ``held + width``. None
      stands for all true.
    - ``held``: columns of earlier calls.
    - ``width``: columns of this call.

    All masked columns before a row's last token are taken for padding on its left, even those
    between tokens. Raises ``ValueError`` if the mask has another shape. Also if a later call, with
    ``held`` above 0, masks a new column: padding must be on the left.
    """
    total = held + width
    if mask is None:
        return [(0, total)] * batch
    if mask.dim() != 2 or mask.shape[1] < total:
        raise ValueError(f"an attention mask [{batch}, {total}] is needed, this one is {list(mask.shape)}")
    columns = []
    for row in mask[:, :total].bool().tolist():
        if held and not all(row[held:]):
            raise _not_left()
        end = total - row[::-1].index(True) if True in row else total
        columns.append((end - sum(row), end))
    return columns


def check_positions(position_ids: torch.Tensor, columns: Columns, held: int) -> None:
    """Raise ``ValueError`` unless ``position_ids`` [B or 1, n] grow by 1 from token to token of
    each row.

    Hosts number positions this way.
    """
    for row, (first, end) in zip(position_ids.expand(len(columns), -1), columns, strict=True):
        if not bool((row[max(first - held, 0) : end - held].diff() == 1).all()):
            raise ValueError("position_ids must number the tokens of a row one after another")


class Unpadded:
    """Removes the holes of a batch.

    A hole is a masked column between two tokens: prompt tuning puts its tokens before the left
    padding. The tokens of each row keep their order and move to the right, up to the column of the
    row's last token.
    """

    def __init__(self, mask: torch.Tensor, columns: Sequence[tuple[int, int]]) -> None:
        is_after = torch.arange(mask.shape[1]) >= torch.tensor([[end] for _, end in columns])
        # First the masked columns, then the tokens, then all columns after the last token.
        rank = mask.bool().long() + is_after * 2
        self._order = rank.argsort(dim=1, stable=True)

    @classmethod
    def needed(
        cls, mask: torch.Tensor | None, columns: Columns, held: int, width: int, *, are_ids: bool
    ) -> "Unpadded | None":
        """Return an instance for the first call of a batch; None if the batch has no holes.

        ``columns`` is what ``read_mask`` returned for the other arguments. Raises ``ValueError`` if
        token ids have holes: their positions would be ambiguous.
        """
        if mask is None or held:
            return None
        mask = mask[:, :width].cpu()
        if all(bool(row[first:end].all()) for row, (first, end) in zip(mask, columns, strict=True)):
            return None
        if are_ids:
            raise _not_left()
        return cls(mask, columns)

    def close(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [B, n, ...] with the tokens of each row side by side."""
        return values.gather(1, self._index(values))

    def open(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [B, n, ...], as ``close`` returns them, at their former columns."""
        return torch.zeros_like(values).scatter(1, self._index(values), values)

    def _index(self, values: torch.Tensor) -> torch.Tensor:
        order = self._order.to(values.device)
        return order.view(*order.shape, *(1 for _ in values.shape[2:])).expand_as(values)


def _not_left() -> ValueError:
    return ValueError("padding must be on the left of the tokens: tokenizer.padding_side = 'left'")
