"""Sampling of next tokens from logits. Pure: randomness follows from a seed and a position.

So a seeded answer depends neither on the other answers in the batch nor on a failover.
"""

import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from secrets import randbits
from typing import Any, Protocol

import numpy as np

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import IntegrityError

NUCLEUS = 512
"""Tokens among which a nucleus is first searched. Most are smaller, and the rest of the vocabulary
need not be sorted."""

BANNED = -1e30
"""The score of a token that would complete a bad word. It is finite, because the grammar may allow
no other token."""


@dataclass(frozen=True)
class Sampling:
    """The rules by which the tokens of an answer are chosen.

    1. ``biases`` (pairs of token id and bias) are added to the scores. ``repetition_penalty``
       divides the score of each token that occurs in the prompt or answer, and multiplies a
       negative one (Keskar et al. 2019, "CTRL", section 4.1).
    2. ``presence_penalty`` is subtracted from the score of each token that occurs in the answer,
       and ``frequency_penalty`` once for each occurrence. For these the prompt does not count.
    3. ``bad_words``: token sequences that never occur in the answer.
    4. ``temperature`` 0 takes the most likely token. ``top_k`` limits the choice to as many of the
       likeliest tokens; 0 for all. ``top_p`` limits it to the fewest of these that together have
       this probability. ``min_p`` limits it to tokens with at least this share of the likeliest
       one's probability (Nguyen et al. 2024, "Turning Up the Heat"). The order of these steps is
       that of transformers.
    5. ``top_logprobs``: how many other tokens' log probabilities come with each token's own; None
       for no log probabilities.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def penalises(self) -> bool:
        """True if the choice depends on how often tokens are in the answer."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def given(
        self, temperature: float | None, top_p: float | None, seed: int | None = None, **others: Any
    ) -> "Sampling":
        """Return the sampling of a caller. None stands for the value here, or a random seed."""
        return Sampling(
            self.temperature if temperature is None else temperature,
            self.top_p if top_p is None else top_p,
            randbits(63) if seed is None else seed,
            **others,
        )


USUAL_SAMPLING = Sampling(temperature=0.7, top_p=0.95)
"""For models whose files state nothing. Small models ramble at higher temperatures."""


class WantedSampling(Protocol):
    """A caller's wishes for the choice of tokens. None stands for the model's own."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def seed(self) -> int | None: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def bad_words(self) -> Sequence[str]: ...
    @property
    def biases(self) -> Sequence[tuple[int, float]]: ...


def sampling_of(wanted: WantedSampling, usual: Sampling, tokenizer: Any) -> Sampling:
    """Return how tokens are chosen: as ``wanted`` says, or else as ``usual``."""
    return usual.given(
        wanted.temperature,
        wanted.top_p,
        wanted.seed,
        biases=tuple(wanted.biases),
        top_k=max(0, wanted.top_k),
        min_p=wanted.min_p,
        repetition_penalty=wanted.repetition_penalty,
        bad_words=word_ids(wanted.bad_words, tokenizer),
    )


def word_ids(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words, at the beginning of a text and within."""
    found = (
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for word in words
        for text in (word, " " + word.lstrip())
    )
    return tuple(dict.fromkeys(ids for ids in found if ids))


@dataclass(frozen=True)
class Draw:
    """One choice of a token: its rules and its position in the answer.

    - ``counts``: occurrences of each token in the answer, if ``sampling`` penalises them.
    - ``prompt``: the tokens of the prompt, if ``sampling`` has a repetition penalty.
    - ``last``: the tokens before this one, as far as ``sampling`` has bad words of this length.
    - ``allowed``: which tokens [V] the grammar allows; None without a grammar.
    """

    sampling: Sampling
    position: int
    counts: Mapping[int, int] = field(default_factory=dict)
    prompt: Set[int] = frozenset()
    last: Sequence[int] = ()
    allowed: Array | None = None


@dataclass(frozen=True)
class Token:
    """A chosen token. Log probabilities are natural, of the model's own scores; ``top`` has the
    likeliest first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(scores: Array, draws: list[Draw]) -> list[Token]:
    """Choose one token for each row of ``scores`` [N, V], float32.

    Raises ``IntegrityError`` for scores that are not finite: hosts' outputs are checked, so the
    model's own files are wrong.
    """
    changed = changed_scores(scores, draws)
    likeliest = changed.argmax(axis=1)
    if not np.isfinite(changed[np.arange(len(changed)), likeliest]).all():
        raise IntegrityError(
            "the scores of the model's tokens are not finite: its norm or lm_head is damaged",
            hint="fetch the model again: `swarmnet model verify` names damaged files",
        )
    tokens = []
    for unbiased, row, best, draw in zip(scores, changed, likeliest.tolist(), draws, strict=True):
        chosen = best if draw.sampling.temperature == 0 else _sample(row, draw)
        tokens.append(with_logprobs(unbiased, chosen, draw.sampling.top_logprobs))
    return tokens


def changed_scores(scores: Array, draws: list[Draw]) -> Array:
    """Return the scores with biases and penalties of all rows; the same array if there are none."""
    changed = scores
    for row, draw in enumerate(draws):
        sampling, banned = draw.sampling, _banned(draw)
        is_repeating = sampling.repetition_penalty != 1
        is_counting = bool(draw.counts and (sampling.presence_penalty or sampling.frequency_penalty))
        if not (sampling.biases or is_counting or banned or is_repeating or draw.allowed is not None):
            continue
        if changed is scores:
            changed = scores.copy()
        for token, bias in sampling.biases:
            changed[row, token] += bias
        if is_repeating:
            seen = np.fromiter({*draw.prompt, *draw.counts}, np.int64)
            value, penalty = changed[row, seen], sampling.repetition_penalty
            changed[row, seen] = np.where(value < 0, value * penalty, value / penalty)
        if is_counting:
            counts = np.fromiter(draw.counts.values(), np.float32)
            penalties = sampling.presence_penalty + counts * sampling.frequency_penalty
            changed[row, np.fromiter(draw.counts, np.int64)] -= penalties
        changed[row, banned] = BANNED
        if draw.allowed is not None and draw.allowed.size:
            known = min(len(draw.allowed), scores.shape[1])
            changed[row, :known][~draw.allowed[:known]] = -np.inf
            changed[row, known:] = -np.inf
    return changed


def _banned(draw: Draw) -> list[int]:
    """Return the tokens that would complete a bad word."""
    ends = {len(word): tuple(draw.last[len(draw.last) - len(word) + 1 :]) for word in draw.sampling.bad_words}
    return [word[-1] for word in draw.sampling.bad_words if word[:-1] == ends[len(word)]]


def distribution(row: Array, sampling: Sampling) -> tuple[Array, Array | None]:
    """Return the probabilities of the tokens among which one is drawn, up to a common factor, and
    the tokens; None for all in their order. ``row`` [V] has scores with biases and penalties."""
    scaled = row.astype(np.float64) / sampling.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    tokens = None
    if sampling.top_k:
        tokens = _largest(probabilities, sampling.top_k)
        probabilities = probabilities[tokens]
        if sampling.top_p < 1:
            probabilities = _fewest(probabilities, sampling.top_p * float(probabilities.sum()))
    elif sampling.top_p < 1:
        probabilities, tokens = _nucleus(probabilities, sampling.top_p)
    if sampling.min_p:
        probabilities = np.where(probabilities < sampling.min_p * probabilities.max(), 0.0, probabilities)
    return probabilities, tokens


def _sample(row: Array, draw: Draw) -> int:
    probabilities, tokens = distribution(row, draw.sampling)
    reached = probabilities.cumsum()
    point = random.Random(f"{draw.sampling.seed}/{draw.position}").random() * float(reached[-1])
    index = min(int(np.searchsorted(reached, point, "right")), len(reached) - 1)
    return index if tokens is None else int(tokens[index])


def _nucleus(probabilities: Array, top_p: float) -> tuple[Array, Array]:
    """Return the fewest likeliest tokens, at least one, that together have probability ``top_p``.
    Also return their probabilities."""
    tokens = _largest(probabilities, NUCLEUS)
    if float(probabilities[tokens].sum()) < top_p:
        tokens = _largest(probabilities, len(probabilities))
    kept = _fewest(probabilities[tokens], top_p)
    return kept, tokens[: len(kept)]


def _fewest(probabilities: Array, least: float) -> Array:
    """Return the first of descending ``probabilities``, at least one, that together reach
    ``least``."""
    before = probabilities.cumsum() - probabilities
    return probabilities[: max(1, int((before < least).sum()))]


def _largest(values: Array, count: int) -> Array:
    """Return the indices of the ``count`` largest values, the largest first."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    some = np.argpartition(-values, count)[:count]
    return some[np.argsort(-values[some], kind="stable")]


def with_logprobs(row: Array, token: int, count: int | None) -> Token:
    """Return a token with the log probabilities of its scores ``row`` [V], and those of the
    ``count`` likeliest tokens. None: no log probabilities."""
    if count is None:
        return Token(token)
    shifted = row - row.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    tokens = _largest(logprobs, count)
    pairs = zip(tokens.tolist(), logprobs[tokens].tolist(), strict=True)
    return Token(token, float(logprobs[token]), tuple(pairs))
