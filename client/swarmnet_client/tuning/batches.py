"""Splits rows into training and held-out ones, orders them by epoch, and pads batches. The seed
determines all of it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from swarmnet_client.tuning.methods import TuneMethod, TuneSettings
from swarmnet_client.tuning.rows import RowFile, read_rows
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.text.rows import Encoder, Example

IGNORED = -100
"""Label of a token without a loss, as in transformers."""

MAX_LABELS = 1000
"""Most classes of a classifier.

More are a mistake, such as texts in place of labels. They would need a head of a million rows.
"""

Batch = dict[str, torch.Tensor]
"""``input_ids``, ``attention_mask`` and ``labels`` [B, n] (a classifier's labels: [B]), padded on
the right."""


@dataclass(frozen=True)
class Dataset:
    """Training and held-out rows. ``labels``: the classes of a classifier, in order.

    ``cut``: number of rows that were too long and lost their end. ``sha256``: hashes of the files.
    ``has_chats``: some rows are conversations in the model's chat template.
    """

    train: Sequence[Example]
    held_out: Sequence[Example]
    labels: tuple[str, ...]
    batch_size: int
    seed: int
    pad_id: int
    cut: int = 0
    sha256: tuple[str, ...] = ()
    has_chats: bool = False

    @classmethod
    def read(cls, tokenizer: Any, data: Path, evaluation: Path | None, settings: TuneSettings) -> "Dataset":
        """Read the rows of ``data``, and of ``evaluation`` if given.

        Raises ``ConfigError``, naming the lines that are not valid rows.
        """
        is_classifier = settings.method is TuneMethod.CLASSIFIER
        encoder = Encoder(tokenizer, settings.max_length, labelled=is_classifier)
        files = [read_rows(path, encoder) for path in (data, evaluation) if path is not None]
        train, held_out = split(files[0], files[1:], held_out=settings.held_out, seed=settings.seed)
        pad_id = tokenizer.pad_token_id
        return cls(
            train=train,
            held_out=held_out,
            labels=classes(train, held_out) if is_classifier else (),
            batch_size=settings.batch_size,
            seed=settings.seed,
            pad_id=tokenizer.eos_token_id if pad_id is None else pad_id,
            cut=sum(file.cut for file in files),
            sha256=tuple(file.sha256 for file in files),
            has_chats=any(file.has_chats for file in files),
        )

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return the rows of a step, padded."""
        return self._padded(self.rows(step))

    def rows(self, step: int) -> list[Example]:
        """Return the rows of step 0, 1, ...: every epoch takes all rows once, in a new order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.seed, epoch, len(self.train))
        chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
        return [self.train[row] for row in chosen]

    def held_out_batches(self) -> Iterator[Batch]:
        """Yield all held-out rows, the longest first: rows of one length share a batch."""
        rows = sorted(self.held_out, key=lambda row: -len(row.ids))
        for first in range(0, len(rows), self.batch_size):
            yield self._padded(rows[first : first + self.batch_size])

    def _padded(self, rows: Sequence[Example]) -> Batch:
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        labels = torch.full((len(rows), width), IGNORED)
        for index, row in enumerate(rows):
            here = torch.from_numpy(row.ids).long()
            ids[index, : len(here)] = here
            mask[index, : len(here)] = 1
            labels[index, : len(here)] = here.masked_fill(~torch.from_numpy(row.learned), IGNORED)
        # The first token has no loss, because no token precedes it. With prompt methods virtual
        # tokens do, but to keep losses comparable it has none there either.
        labels[:, 0] = IGNORED
        if self.labels:
            labels = torch.tensor([self.labels.index(row.label) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, rows: int) -> Sequence[int]:
    """Return the order of the rows in an epoch. Cached for the steps of the epoch: shuffling a
    million rows takes seconds."""
    order = list(range(rows))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def split(
    data: RowFile, evaluation: Sequence[RowFile], *, held_out: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """Split rows into training and held-out rows.

    The rows of ``evaluation`` are held out. Without any, the share ``held_out`` in [0, 1) of
    ``data`` is. Raises ``ConfigError`` if no training row would be left.
    """
    if evaluation:
        return data.rows, [row for file in evaluation for row in file.rows]
    if not held_out:
        return data.rows, []
    count = max(1, round(held_out * len(data.rows)))
    if count >= len(data.rows):
        raise ConfigError(
            f"{data.path} has {len(data.rows)} rows, and {count} of them would be held out",
            hint="write more rows, or hold none out: --held-out 0",
        )
    chosen = set(random.Random(f"{seed}/held-out").sample(range(len(data.rows)), count))
    return (
        [row for index, row in enumerate(data.rows) if index not in chosen],
        [row for index, row in enumerate(data.rows) if index in chosen],
    )


def classes(train: Sequence[Example], held_out: Sequence[Example]) -> tuple[str, ...]:
    """Return the labels of the training rows, sorted.

    Raises ``ConfigError`` for fewer than 2 or more than ``MAX_LABELS`` labels, or for a held-out
    row with another label.
    """
    names = tuple(sorted({row.label for row in train}))
    if len(names) < 2:
        raise ConfigError(
            "a classifier needs rows with at least two labels", hint="add rows of another label"
        )
    if len(names) > MAX_LABELS:
        raise ConfigError(
            f"the rows have {len(names)} different labels, {MAX_LABELS} is the most",
            hint='"label" is the class, "text" the input to classify',
        )
    unknown = next((row for row in held_out if row.label not in names), None)
    if unknown is not None:
        raise ConfigError(
            f"the held-out row in line {unknown.line} has a label that no other row has: {unknown.label!r}",
            hint="add rows with this label, or another --seed chooses other rows to hold out",
        )
    return names
