"""Speculative decoding: drafts of the next tokens, which the blocks check in one trip around the
chain.

A step carries the newest token and a draft, and gives the model's own choice after each of these
tokens. The choices up to the first that differs from the draft become part of the answer. So the
answer is the same as without drafts (Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding", with a deterministic draft). Each token of the answer uses one random number,
whichever step computed it, so this holds for sampling, too.

Pure: no model, no clock, no I/O.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_DRAFT = 16
"""Most tokens of a draft."""
MAX_MATCH = 16
"""Most tokens before a draft that are compared with the end of the sequence."""
MAX_PLACES = 64
"""Most earlier occurrences of a token that are compared. A frequent token has thousands."""
MIN_GAIN = 1.05
"""Least factor by which a draft position must raise the expected tokens per second to be sent. A
smaller gain is within the noise of measurements."""
_PRIOR_RATES = (0.2, 0.4, 0.6, 0.8, 0.9)
"""Acceptance rates before any draft was checked: for matches of 1, 2-3, 4-7, 8-15 and 16 tokens,
then for tokens with a draft model's probability up to each of ``_CONFIDENCES``."""
_CONFIDENCES = (0.3, 0.5, 0.7, 0.9, 1.0)
_OF_MODEL = len(_PRIOR_RATES)
"""Index of the first acceptance rate of a draft model. Prompt lookup's rates come before it."""
TRUSTED_MATCH = 4
"""Matches at least this long are continued even if there is a draft model.

The model costs time, and does not know the names and numbers of the text.
"""
_PRIOR_DRAFTS = 4.0
"""Weight of the prior rates, as a number of checked tokens."""
_KEPT = 0.95
"""Factor by which each new measurement reduces the weight of the older ones. Acceptance rates
change within a text, and step times change within a chain."""
_PRIOR_COST = 0.05
"""Guess of the time of one more position, as a share of the time of a whole step."""
_PRIOR_VARIANCE = 0.25
"""Weight of the guess ``_PRIOR_COST``. Measurements weigh as much as the variance of the number of
positions in recent steps. So the more the sizes of steps vary, the less the guess counts."""


def common_prefix(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning of both."""
    count = 0
    for one, other in zip(ids, others, strict=False):
        if one != other:
            break
        count += 1
    return count


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next."""

    tokens: tuple[int, ...] = ()
    match: int = 0
    """Number of tokens before the copied tokens that equal the end of the sequence."""


class PromptLookup:
    """Drafts what followed the last tokens of a sequence when they occurred in it before (Saxena
    2023, "Prompt Lookup Decoding")."""

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids: list[int] = []
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._place: int | None = None
        """Index of the last token of the newest draft's match."""
        self._distance = 0
        """Distance between the end of the sequence and the match, for the last draft that was
        right.

        While the text copies an earlier part, the distance stays the same.
        """
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens at the end of the sequence."""
        if self._place is not None and ids and ids[0] == self._ids[self._place + 1]:
            self._distance = len(self._ids) - 1 - self._place
        self._place = None
        for token in ids:
            self._places[token].append(len(self._ids))
            self._ids.append(token)

    def draft(self, most: int) -> Draft:
        """Draft at most ``most`` tokens that followed the longest match.

        If fewer tokens followed, the draft repeats the tokens since the match. Among matches of
        equal length, the nearest to the continuation of the last right draft wins, so that an
        edited copy continues behind the edit. Of equally near matches, the latest wins.
        """
        ids = self._ids
        if not ids or most < 1:
            return Draft()
        best, match = -1, 0
        copied = len(ids) - 1 - self._distance
        for place in reversed(self._places[ids[-1]][-MAX_PLACES - 1 : -1]):
            length = self._match_at(place)
            if length > match or (length == match and abs(place - copied) < abs(best - copied)):
                best, match = place, length
            if match == MAX_MATCH and place <= copied:  # earlier places are farther away
                break
        if not match:
            return Draft()
        self._place = best
        period = len(ids) - 1 - best
        return Draft(tuple(ids[best + 1 + index % period] for index in range(most)), match)

    def _match_at(self, place: int) -> int:
        """Count the tokens up to ``place`` that equal the end of the sequence."""
        ids, length = self._ids, 1
        while length < min(MAX_MATCH, place + 1) and ids[place - length] == ids[-1 - length]:
            length += 1
        return length


class StepTimes:
    """Seconds of a step as a linear function of its number of positions.

    A regression over recent steps of one chain, in which older steps weigh less and less.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._positions = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def add(self, positions: int, seconds: float) -> None:
        """Count one step. It counts as at most four mean steps, because a failover makes a step
        slow whatever its positions."""
        if self._weight:
            seconds = min(seconds, 4 * self._seconds)
        self._weight = self._weight * _KEPT + 1
        share = 1 / self._weight
        off_positions, off_seconds = positions - self._positions, seconds - self._seconds
        self._positions += share * off_positions
        self._seconds += share * off_seconds
        rest = 1 - share
        self._variance = rest * (self._variance + share * off_positions * off_positions)
        self._covariance = rest * (self._covariance + share * off_positions * off_seconds)

    @property
    def position_s(self) -> float:
        """Seconds of one more position. If recent steps all have the same size, this approaches a
        guess, so drafts are tried again now and then."""
        guess = _PRIOR_COST * self._seconds
        return max(0.0, (self._covariance + _PRIOR_VARIANCE * guess) / (self._variance + _PRIOR_VARIANCE))

    def step_s(self, positions: int) -> float:
        """Return the seconds of a step of ``positions``; 0 before the first was counted."""
        return max(0.0, self._seconds + (positions - self._positions) * self.position_s)


class DraftSequence(Protocol):
    """A small model's view of the sequence, from which it drafts."""

    @property
    def token_s(self) -> float:
        """Seconds of one token of a draft; infinite while the model is still reading the
        sequence."""

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens at the end of the sequence."""

    def tokens(self) -> Iterator[tuple[int, float]]:
        """Return the most likely continuation: each token with its probability, computed when it is
        asked for."""


class Speculator:
    """Drafts for one sequence, and their acceptance rates by length of match or by probability."""

    def __init__(self, ids: Sequence[int] = (), model: DraftSequence | None = None) -> None:
        """``ids``: the beginning of the sequence, which ``model`` has already."""
        self._lookup = PromptLookup(ids)
        self._model = model
        self._accepted = [rate * _PRIOR_DRAFTS for rate in (*_PRIOR_RATES, *_PRIOR_RATES)]
        self._checked = [_PRIOR_DRAFTS] * len(self._accepted)
        self._drafted: list[tuple[int, int]] = []
        """Tokens of the last draft, sent or not, and the index of the acceptance rate of each."""

    def draft(self, times: StepTimes, *, positions: int = 1, most: int = MAX_DRAFT) -> tuple[int, ...]:
        """Return at most ``most`` draft tokens to send after the newest token.

        The step has ``positions`` positions without them. A further draft token pays while it
        raises the expected tokens per second.
        """
        found = self._lookup.draft(MAX_DRAFT)
        self._drafted = [(token, _bucket(found.match)) for token in found.tokens]
        position_s, step_s = times.position_s, times.step_s(positions)
        coming: Iterator[tuple[int, float]] = iter(())
        token_s = math.inf if self._model is None else self._model.token_s
        if self._model is not None and found.match < TRUSTED_MATCH and math.isfinite(token_s):
            self._drafted, coming = [], self._model.tokens()
            position_s += token_s
        best = max(map(self._rate, range(_OF_MODEL, len(self._accepted))))
        expected, chance, length = float(positions), 1.0, 0

        def pays(rate: float) -> bool:
            return step_s > 0 and chance * rate * step_s >= MIN_GAIN * expected * position_s

        while length < min(most, MAX_DRAFT):
            if length == len(self._drafted):
                token = next(coming, None) if pays(best) else None
                if token is None:
                    break
                self._drafted.append((token[0], _bucket_of_model(token[1])))
            rate = self._rate(self._drafted[length][1])
            if not pays(rate):
                break
            chance *= rate
            expected, step_s, length = expected + chance, step_s + position_s, length + 1
        return tuple(token for token, _ in self._drafted[:length])

    def choose(self, chosen: Sequence[int], sent: int) -> int:
        """Take the model's choices [sent + 1] after a draft of ``sent`` tokens; return how many are
        valid.

        The first choice that differs from the draft is the last valid one: later choices were made
        after a wrong token. The first draft token updates its acceptance rate even if it was not
        sent: the model's choice tells whether it was right.
        """
        valid = 1
        while valid <= sent and chosen[valid - 1] == self._drafted[valid - 1][0]:
            valid += 1
        # The accepted tokens, and the first that was refused.
        for at, (token, bucket) in enumerate(self._drafted[: max(1, min(valid, sent))]):
            self._accepted[bucket] = self._accepted[bucket] * _KEPT + (token == chosen[at])
            self._checked[bucket] = self._checked[bucket] * _KEPT + 1
        self.extend(chosen[:valid])
        return valid

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens to the sequence."""
        self._lookup.extend(ids)
        if self._model is not None:
            self._model.extend(ids)

    def _rate(self, bucket: int) -> float:
        """Return the expected share of right tokens in a bucket."""
        return self._accepted[bucket] / self._checked[bucket]


def _bucket(match: int) -> int:
    """Return the index of the acceptance rate of tokens after a match of ``match`` tokens."""
    return min(match, MAX_MATCH).bit_length() - 1


def _bucket_of_model(probability: float) -> int:
    """Return the index of the acceptance rate for tokens with this probability from a draft
    model."""
    return _OF_MODEL + sum(probability > each for each in _CONFIDENCES[:-1])
