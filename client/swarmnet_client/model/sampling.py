"""Sampling of next tokens from logits. Pure: randomness follows from a seed and a position.

So a seeded answer depends neither on the other answers in the batch nor on a failover.
"""

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from swarmnet_protocols.errors import IntegrityError

NUCLEUS = 512
"""Tokens among which a nucleus is first searched. Most are smaller, and the rest of the vocabulary
need not be sorted."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen.

    1. ``biases`` (pairs of token id and bias) are added to the scores. ``presence_penalty`` is
       subtracted from the score of each token that occurs in the answer, and ``frequency_penalty``
       once for each occurrence. The prompt does not count.
    2. ``temperature`` 0 takes the most likely token. ``top_p`` limits the choice to the fewest
       tokens that together have this probability.
    3. ``top_logprobs``: how many other tokens' log probabilities come with each token's own; None
       for no log probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens already in the answer."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Draw:
    """One choice of a token: its rules and its position in the answer. ``counts``: occurrences of
    each token, if ``sampling`` penalises them."""

    sampling: Sampling
    position: int
    counts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Token:
    """A chosen token. Log probabilities are natural, of the model's own scores; ``top`` has the
    likeliest first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(scores: torch.Tensor, draws: list[Draw]) -> list[Token]:
    """Choose one token for each row of ``scores`` [N, V], float32.

    Raises ``IntegrityError`` for scores that are not finite: hosts' outputs are checked, so the
    model's own files are wrong.
    """
    changed = _changed(scores, draws)
    best, where = changed.max(dim=-1)
    if not bool(best.isfinite().all()):
        raise IntegrityError(
            "the scores of the model's tokens are not finite: its norm or lm_head is damaged",
            hint="fetch the model again: `swarmnet model verify` names damaged files",
        )
    likeliest = where.tolist()
    tokens = []
    for unbiased, row, best, draw in zip(scores, changed, likeliest, draws, strict=True):
        chosen = best if draw.sampling.temperature == 0 else _sample(row, draw)
        tokens.append(_with_logprobs(unbiased, chosen, draw.sampling.top_logprobs))
    return tokens


def _changed(scores: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Return the scores with biases and penalties of all rows; the same tensor if there are
    none."""
    # torch reads lists fifty times more slowly
    rows, tokens, values = array("q"), array("q"), array("f")
    for row, draw in enumerate(draws):
        changes = _changes(draw)
        rows.extend([row] * len(changes))
        tokens.extend(changes)
        values.extend(changes.values())
    if not rows:
        return scores
    where = tuple(torch.frombuffer(each, dtype=torch.int64).to(scores.device) for each in (rows, tokens))
    added = torch.frombuffer(values, dtype=torch.float32).to(scores.device)
    return scores.index_put(where, added, accumulate=True)


def _changes(draw: Draw) -> dict[int, float]:
    """Return the change of the score of each token."""
    sampling = draw.sampling
    changes = dict(sampling.biases)
    if sampling.penalises:
        for token, count in draw.counts.items():
            penalty = sampling.presence_penalty + count * sampling.frequency_penalty
            changes[token] = changes.get(token, 0.0) - penalty
    return changes


def _sample(row: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    probabilities = torch.softmax(row.double() / sampling.temperature, dim=-1)
    tokens = None
    if sampling.top_p < 1:
        probabilities, tokens = _nucleus(probabilities, sampling.top_p)
    reached = probabilities.cumsum(0)
    point = random.Random(f"{sampling.seed}/{draw.position}").random() * float(reached[-1])
    index = min(int(torch.searchsorted(reached, point, right=True)), len(reached) - 1)
    return index if tokens is None else int(tokens[index])


def _nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fewest likeliest tokens, at least one, that together have probability ``top_p``.
    Also return their probabilities."""
    kept, tokens = probabilities.topk(min(NUCLEUS, len(probabilities)))
    if float(kept.sum()) < top_p:
        kept, tokens = probabilities.sort(descending=True)
    before = kept.cumsum(0) - kept
    count = max(1, int((before < top_p).sum()))
    return kept[:count], tokens[:count]


def _with_logprobs(row: torch.Tensor, token: int, count: int | None) -> Token:
    if count is None:
        return Token(token)
    logprobs = torch.log_softmax(row, dim=-1)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return Token(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
