"""Which rows are learned and which are held out, and in what order they come: all follows from the seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from swarmnet_client.tuning.methods import Method, Settings
from swarmnet_client.tuning.rows import Encoder, Row, RowFile, read_rows
from swarmnet_protocols.errors import ConfigError

IGNORED = -100
"""The label of a token that is not learned, as transformers has it."""

MAX_LABELS = 1000
"""Classes of a classifier. More are a mistake, such as texts in place of labels, and a head of a million rows."""

Batch = dict[str, torch.Tensor]
"""``input_ids``, ``attention_mask`` and ``labels`` [B, n] (a classifier's labels: [B]), padded on the right."""


@dataclass(frozen=True)
class Dataset:
    """Rows to learn from and rows to evaluate on. ``labels`` names the classes of a classifier, in order.

    ``cut`` rows were too long, ``sha256`` are the hashes of the files.
    """

    train: Sequence[Row]
    held_out: Sequence[Row]
    labels: tuple[str, ...]
    batch_size: int
    seed: int
    pad_id: int
    cut: int = 0
    sha256: tuple[str, ...] = ()

    @classmethod
    def read(cls, tokenizer: Any, data: Path, evaluation: Path | None, settings: Settings) -> "Dataset":
        """Raises ``ConfigError`` for files that will not do, naming the lines that are no rows."""
        is_classifier = settings.method is Method.CLASSIFIER
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
        )

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train) // self.batch_size)

    def batch(self, step: int) -> Batch:
        """The batch of step 0, 1, ...: every epoch goes once through all rows, in an order of its own."""
        epoch, number = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.seed, epoch, len(self.train))
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
        return self._padded([self.train[index] for index in chosen])

    def held_out_batches(self) -> Iterator[Batch]:
        """All held-out rows, the longest first: rows of one length share a batch."""
        rows = sorted(self.held_out, key=lambda row: -len(row.ids))
        for first in range(0, len(rows), self.batch_size):
            yield self._padded(rows[first : first + self.batch_size])

    def _padded(self, rows: Sequence[Row]) -> Batch:
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        labels = torch.full((len(rows), width), IGNORED)
        for index, row in enumerate(rows):
            here = torch.from_numpy(row.ids).long()
            ids[index, : len(here)] = here
            mask[index, : len(here)] = 1
            labels[index, : len(here)] = here.masked_fill(~torch.from_numpy(row.learned), IGNORED)
        # Nothing predicts the first token, unless virtual ones come before it: it counts for no method.
        labels[:, 0] = IGNORED
        if self.labels:
            labels = torch.tensor([self.labels.index(row.label) for row in rows])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, rows: int) -> Sequence[int]:
    """The order in which an epoch goes through the rows. To draw that of a million takes seconds: it is kept for its steps."""
    order = list(range(rows))
    random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


def split(
    data: RowFile, evaluation: Sequence[RowFile], *, held_out: float, seed: int
) -> tuple[list[Row], list[Row]]:
    """Rows to learn from and to evaluate on: those of ``evaluation``, or else the share ``held_out`` [0, 1) of ``data``.

    Raises ``ConfigError`` if nothing would be left to learn from.
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


def classes(train: Sequence[Row], held_out: Sequence[Row]) -> tuple[str, ...]:
    """The labels of the rows to learn from, sorted.

    Raises ``ConfigError`` for one, for more than ``MAX_LABELS``, or for others on held-out rows.
    """
    names = tuple(sorted({row.label for row in train}))
    if len(names) < 2:
        raise ConfigError(
            "a classifier needs rows with two labels at least", hint="add rows of another label"
        )
    if len(names) > MAX_LABELS:
        raise ConfigError(
            f"the rows have {len(names)} different labels, {MAX_LABELS} is the most",
            hint='write what is to be told apart as "label", and the rest as "text"',
        )
    unknown = next((row for row in held_out if row.label not in names), None)
    if unknown is not None:
        raise ConfigError(
            f"the held-out row in line {unknown.line} has a label that no other row has: {unknown.label!r}",
            hint="add rows with this label, or another --seed chooses other rows to hold out",
        )
    return names
