"""The order of a job's data: the sequences that each slot trains on, by round and step, and their
batches.

It follows from the job's seed and the weights of the sources. So workers divide the data without
communication.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from swarmnet_node.training.data.corpus import Corpus
from swarmnet_protocols.training.job_settings import Job

_FEISTEL_ROUNDS = 6
"""Rounds of the Feistel network that permutes the sequences."""
BLOCK = 1024
"""Sequences after which the mixture has the exact shares of its sources. With fewer, a source of a
small weight gets too much; with more, the shares of a short job are less exact."""


@dataclass(frozen=True)
class Share:
    """The part of a source in the batches.

    - ``sequences``: the number of its sequences.
    - ``weight``: its share of a batch, relative to the other sources.
    - ``is_own``: True for a source that this worker shares with nobody.
    """

    sequences: int
    weight: float = 1.0
    is_own: bool = False


@dataclass(frozen=True)
class BatchSampler:
    """Divides the sequences of a corpus among rounds, steps and slots.

    The batches of a slot, in order of (round, step), are an infinite stream. In each ``BLOCK`` of
    it, every source has its share, at places that the seed determines. The sequences of a source,
    in order of (round, step, slot), are consecutive parts of one permutation after another. So no
    sequence occurs twice in an epoch. Sequences of a slot without a worker are left out in that
    epoch. A worker's own source is not divided among slots.
    """

    seed: int
    shares: tuple[Share, ...]
    batch_size: int
    steps_per_round: int
    slots: int

    def batch(self, round: int, step: int, slot: int) -> NDArray[np.int64]:
        """Return the sequence numbers of a slot's batch, ``[batch_size]``, as in ``Sequences``.

        Raises ``ValueError`` outside the job.
        """
        if not (round >= 0 and 0 <= step < self.steps_per_round and 0 <= slot < self.slots):
            raise ValueError(f"there is no batch for round {round}, step {step}, slot {slot}")
        first = (round * self.steps_per_round + step) * self.batch_size
        source, ranks = self._mixture(np.arange(first, first + self.batch_size, dtype=np.int64))
        numbers = np.empty(self.batch_size, dtype=np.int64)
        start = 0
        for number, share in enumerate(self.shares):
            here = source == number
            places = ranks[here]
            if not share.is_own:
                batch, place = np.divmod(places, self.batch_size)
                places = (batch * self.slots + slot) * self.batch_size + place
            numbers[here] = start + self._permuted(number, places)
            start += share.sequences
        return numbers

    def _mixture(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each place in a slot's stream, and its place in the
        source's own stream."""
        counts = shares_of(BLOCK, [share.weight for share in self.shares])
        if len(counts) == 1:
            return np.zeros_like(places), places
        blocks, within = np.divmod(places, BLOCK)
        for block in np.unique(blocks):
            here = blocks == block
            key = hashlib.sha256(f"swarmnet-mixture-1 {self.seed} {block}".encode()).digest()
            within[here] = permute(within[here].astype(np.uint64), BLOCK, key)
        ends = np.cumsum(counts)
        source = np.searchsorted(ends, within, side="right")
        sizes = np.array(counts)[source]
        return source, blocks * sizes + within - ends[source] + sizes

    def _permuted(self, source: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.shares[source].sequences
        epochs, within = np.divmod(places, size)
        for epoch in np.unique(epochs):  # more than one only where a batch spans two epochs
            here = epochs == epoch
            label = f"swarmnet-epoch-1 {self.seed} {epoch}" + (f" {source}" if source else "")
            key = hashlib.sha256(label.encode()).digest()
            within[here] = permute(within[here].astype(np.uint64), size, key)
        return within


def shares_of(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` by ``weights``: largest remainders, and at least 1 each, even if these are
    more than ``total``."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    order = sorted(range(len(weights)), key=lambda index: int(exact[index]) - exact[index])
    for index in order[: max(0, total - sum(counts))]:
        counts[index] += 1
    while sum(counts) > max(total, len(counts)):  # for a share below 1, the largest gives
        counts[counts.index(max(counts))] -= 1
    return counts


def permute(places: NDArray[np.uint64], size: int, key: bytes) -> NDArray[np.int64]:
    """Map ``places`` by a bijection of [0, size) that ``key`` (32 bytes) chooses.

    A Feistel network permutes the next larger power of four. Images outside [0, size) are permuted
    again until they are inside (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002, section 4).
    """
    half_bits = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    keys = np.frombuffer(hashlib.shake_256(key).digest(8 * _FEISTEL_ROUNDS), dtype="<u8")
    images = _feistel(places, half_bits, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half_bits, keys)
    return images.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half_bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finaliser of splitmix64 (Steele, Lea and Flood, 2014).

    Every input bit flips each output bit with probability 1/2.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Batches:
    """A corpus, and the order in which a job's workers train on it.

    A batch is ``[batch_size, length + 1]`` tokens. Tokens that do not count in the loss are stored
    inverted, so they are negative.
    """

    def __init__(self, corpus: Corpus, sampler: BatchSampler, microbatch: int) -> None:
        self.corpus = corpus
        self.sampler = sampler
        self._microbatch = microbatch

    @classmethod
    def of(cls, job: Job, corpus: Corpus) -> Self:
        """Return the batches of ``job``."""
        sampler = BatchSampler(
            seed=job.job.seed,
            shares=tuple(
                Share(count, source.weight, source.is_own)
                for count, source in zip(corpus.train.counts, job.data.sources, strict=True)
            ),
            batch_size=job.training.batch_size,
            steps_per_round=job.make_method().steps_per_round,
            slots=job.exchange.max_workers,
        )
        return cls(corpus, sampler, job.training.microbatch or job.training.batch_size)

    def take(self, round: int, step: int, slot: int) -> Tensor:
        """Return the slot's batch of an inner step."""
        return self.corpus.train.take(self.sampler.batch(round, step, slot))

    def parts(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Return the microbatches of a batch."""
        return tuple(
            batch[start : start + self._microbatch] for start in range(0, len(batch), self._microbatch)
        )

    @property
    def parts_count(self) -> int:
        """The number of microbatches of a batch."""
        return -(-self.sampler.batch_size // self._microbatch)

    def filled(self, part: Tensor) -> Tensor:
        """Return a microbatch with as many rows as all have. Added rows do not count in the
        loss."""
        row = part[:1]
        ignored = torch.where(row >= 0, ~row, row).expand(self._microbatch - len(part), -1)
        return torch.cat([part, ignored])

    def held_out(self, batches: int) -> Iterator[tuple[int, Tensor]]:
        """Yield microbatches of at most ``batches`` validation batches, with their source.

        A source's number of batches follows from its weight, if it has enough.
        """
        held_out, weights = self.corpus.validation, [share.weight for share in self.sampler.shares]
        first = 0
        wanted = shares_of(batches * self.sampler.batch_size, weights)
        for source, (count, most) in enumerate(zip(held_out.counts, wanted, strict=True)):
            end = first + min(count, most)
            for start in range(first, end, self._microbatch):
                yield source, held_out.take(np.arange(start, min(end, start + self._microbatch)))
            first += count

    def mean(self, losses: Iterable[tuple[int, float, int]]) -> tuple[float, int]:
        """Return the mean loss of held-out microbatches, and its number of tokens.

        ``losses``: source, summed loss and tokens of each. A source counts by its weight.
        """
        totals, counts = [0.0] * len(self.sampler.shares), [0] * len(self.sampler.shares)
        for source, loss, tokens in losses:
            totals[source] += loss
            counts[source] += tokens
        mean = weighed = 0.0
        for share, total, tokens in zip(self.sampler.shares, totals, counts, strict=True):
            if tokens:  # a source of few rows may hold out none with an answer
                mean, weighed = mean + share.weight * total / tokens, weighed + share.weight
        return mean / weighed if weighed else 0.0, sum(counts)


def target_count(batch: Tensor) -> int:
    """Return the number of tokens of ``batch`` that count in the loss."""
    return int((batch[:, 1:] >= 0).sum())


def loss_sum(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the summed cross-entropy of ``batch``, ``[k, L + 1]``, with ``logits``,
    ``[k, L, V]``.

    Negative tokens do not count.
    """
    targets = batch[:, 1:].clamp(min=-1).flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum", ignore_index=-1)


def inputs_of(batch: Tensor) -> Tensor:
    """Return the token ids ``[k, L]`` that a model reads of ``batch``, ``[k, L + 1]``."""
    return torch.where(batch < 0, ~batch, batch)[:, :-1]
