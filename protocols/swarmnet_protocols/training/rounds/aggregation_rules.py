"""Aggregation rules: from contributions and weights to one vector, and the screen for outliers.

Pure. Sums over coordinates are elementwise additions in one fixed order. So equal inputs in equal
order give equal bits on every machine, whatever its number of threads and vector width. Any member
that has the contributions can therefore check an aggregate. The caller orders contributions by
member.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.codecs.values import Values

T = TypeVar("T")
AGGREGATORS = ("mean", "median", "centered-clip")
CLIP_ITERATIONS = 20
TINY = 1e-30
"""Smallest divisor, for distances of zero."""
OUTLIER = 100
"""Norm of an outlier, as a multiple of the median norm."""
COORDINATES_AT_ONCE = 1 << 18
"""Coordinates computed at a time.

Temporaries take about 32 bytes times contributions times this.
"""


def accept_all(rows: Sequence[Values], _weights: Tensor) -> list[str]:
    """Leave out no contribution."""
    return [""] * len(rows)


def outliers(contributions: Sequence[Values], weights: Tensor) -> list[str]:
    """Return for each of k ``contributions`` [n] the reason for leaving it out; "" to keep it.

    The reason is a norm over ``OUTLIER`` times the weighted median norm.
    """
    lengths = norms(contributions)
    limit = OUTLIER * median(lengths, weights)
    return [
        f"norm {length:.4g} is over {OUTLIER} times the median of all" if length > limit > 0 else ""
        for length in lengths
    ]


def clip_to_median_norm_(contributions: Tensor, weights: Tensor) -> Tensor:
    """Shorten rows of ``contributions`` [k, n] in place to the weighted median of all norms.

    As in templar, the SparseLoCo code, ``neurons.py``.
    """
    return contributions.mul_(_scales(list(contributions), weights)[:, None])


def _scales(contributions: Sequence[Values], weights: Tensor) -> Tensor:
    """Return the factors that shorten contributions to the weighted median of all norms."""
    lengths = norms(contributions)
    limit = median(lengths, weights)
    return torch.tensor([limit / length if length > limit else 1.0 for length in lengths])


def aggregate(name: str, contributions: Tensor, weights: Tensor) -> Tensor:
    """Aggregate finite ``contributions`` [k, n] with positive ``weights`` [k] to float32 [n].

    - "mean": the weighted mean. One dishonest contributor can move it anywhere.
    - "median": the weighted median of each coordinate (Yin et al. 2018, "Byzantine-Robust
      Distributed Learning", algorithm 1, option I).
    - "centered-clip": ``centered_clip`` after ``mix_neighbours``.

    The robust rules stay near the honest contributions while these have more than half of the
    weight. Raises ``ConfigError`` for an unknown name, and ``ValueError`` unless there is one
    positive, finite weight for each contribution.
    """
    if weights.shape != contributions.shape[:1] or not bool(((weights > 0) & weights.isfinite()).all()):
        raise ValueError("each contribution needs one positive weight")
    match name:
        case "mean":
            return weighted_mean(list(contributions), weights)
        case "median":
            return weighted_median(contributions, weights)
        case "centered-clip":
            return centered_clip(mix_neighbours(contributions, weights), weights)
    raise ConfigError(f"no aggregator is called {name!r}", hint=f"use one of: {', '.join(AGGREGATORS)}")


def weighted_mean(contributions: Sequence[Values], weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Return sum_i w_i x_i / sum_i w_i, rows added in order."""
    return combine(contributions, shares(weights), out=out)


def clipped_mean(contributions: Sequence[Values], weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the weighted mean of contributions, each shortened as by ``clip_to_median_norm_``."""
    return combine(contributions, shares(weights), _scales(contributions, weights), out)


def weighted_median(contributions: Tensor, weights: Tensor) -> Tensor:
    """Return for each coordinate a value with at most half of the weight on either side.

    If two values qualify, returns their middle.
    """
    return torch.cat(
        [_median_of_part(part, weights) for part in torch.split(contributions, COORDINATES_AT_ONCE, dim=1)]
    )


def _median_of_part(contributions: Tensor, weights: Tensor) -> Tensor:
    ordered, order = contributions.sort(dim=0, stable=True)
    below = weights.double()[order].cumsum(dim=0)
    half = below[-1] / 2
    lower = ordered.gather(0, (below < half).sum(dim=0, keepdim=True))
    upper = ordered.gather(0, (below <= half).sum(dim=0, keepdim=True))
    return (lower * 0.5 + upper * 0.5)[0]


def mix_neighbours(contributions: Tensor, weights: Tensor) -> Tensor:
    """Replace every row [k, n] by the weighted mean of itself and its nearest rows.

    The mean takes the fewest rows that have more than half of the weight. This is nearest neighbour
    mixing (Allouah et al. 2023, "Fixing by Mixing", section 4). Honest contributions differ from
    each other. Without mixing, that lets dishonest ones that are nearly as many pull the median
    towards them, and with it the start and the radius of the clipping.
    """
    count, fractions = len(contributions), shares(weights)
    distances = [[0.0] * count for _ in range(count)]
    for one in range(1, count):
        for other, distance in enumerate(norms(list(contributions[:one] - contributions[one]))):
            distances[one][other] = distances[other][one] = distance
    mixed = torch.empty_like(contributions)
    for row in range(count):
        near = sorted(range(count), key=lambda other: (distances[row][other], other != row, other))
        cumulative = list(itertools.accumulate(fractions[other] for other in near))
        enough = next(rows for rows, share in enumerate(cumulative, 1) if share > 0.5)
        chosen = sorted(near[:enough])
        mixed[row] = combine(list(contributions[chosen]), shares(weights[chosen]))
    return mixed


def centered_clip(contributions: Tensor, weights: Tensor, *, radius: float | None = None) -> Tensor:
    """Clip around a centre: v <- v + sum_i w_i min(1, r / |x_i - v|) (x_i - v) / sum_i w_i.

    Repeats this ``CLIP_ITERATIONS`` times from the median (Karimireddy et al. 2021, "Learning from
    History for Byzantine Robust Optimization", section 4). Without ``radius``, r is the weighted
    median distance of the contributions from the start, so it adapts to their scale. While honest
    contributions have more than half of the weight, their distances bound it on both sides.
    """
    center = weighted_median(contributions, weights)
    if radius is None:
        radius = median(norms(list(contributions - center)), weights)
    for _ in range(CLIP_ITERATIONS):
        pulls = contributions - center
        clipped = [
            share * min(1.0, radius / max(length, radius, TINY))
            for share, length in zip(shares(weights), norms(list(pulls)), strict=True)
        ]
        center = center + combine(list(pulls), clipped)
    return center


def shares(weights: Tensor) -> list[float]:
    """Divide each weight by the exact sum of all."""
    listed = weights.double().tolist()
    total = math.fsum(listed)
    return [weight / total for weight in listed]


def combine(
    rows: Sequence[Values],
    factors: Sequence[float],
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return sum_i factor_i (scale_i row_i), float32 [n], rows added in order.

    ``out``, if given, takes the result.
    """
    total = torch.empty(len(rows[0])) if out is None else out
    for part in _parts(len(total)):
        total[part] = 0
        for number, factor in enumerate(factors):
            row = rows[number][part]
            total[part] += (row if scales is None else row * scales[number]) * factor
    return total


def _parts(count: int) -> Iterator[slice]:
    for start in range(0, count, COORDINATES_AT_ONCE):
        yield slice(start, start + COORDINATES_AT_ONCE)


def median(numbers: Sequence[float], weights: Tensor) -> float:
    """Return the weighted median of ``numbers``."""
    return weighted_median(torch.tensor(numbers, dtype=torch.float64)[:, None], weights).item()


def norms(rows: Sequence[Values]) -> list[float]:
    """Return the Euclidean norms of k rows [n].

    Squares are float64 and added by halving, in a fixed order.
    """
    found = []
    for row in rows:
        total = 0.0
        for part in _parts(len(row)):
            squares = row[part].double().square()
            while (count := len(squares)) > 1:
                half = (count + 1) // 2
                folded = squares[:half].clone()
                folded[: count - half] += squares[half:]
                squares = folded
            total += squares.sum().item()
        found.append(math.sqrt(total))
    return found


@dataclass(frozen=True)
class AggregationRules:
    """The rules that screen and aggregate contributions, equal at all members of a job."""

    aggregate: Callable[..., Tensor] = weighted_mean
    """Maps contributions [k, n] and weights [k] to the aggregate, float32 [n].

    The contributions are in the order of members. May change the contributions, unless it
    ``reads_parts``: then they are k ``Values``, and a third argument may name the tensor that
    takes the aggregate.
    """
    screen: Callable[[Sequence[Values], Tensor], list[str]] = accept_all
    """Returns k reasons for leaving a contribution out; "" to keep it.

    Takes the same arguments as ``aggregate``. It is called again with the kept contributions until
    it keeps all of them.
    """
    max_weight: float = 2.0**64
    """Largest weight of a contribution.

    The default is above any number of tokens, and sums of such weights are still finite.
    """
    verifiable: bool = False
    """True if every member checks the aggregation of every slice.

    Contributions are then signed, so a reducer can omit some, but not change any. A result needs
    contributions of a majority of the training members (``RoundTerms.quorum``). So a reducer cannot
    keep only its accomplices' contributions.
    """

    @property
    def reads_parts(self) -> bool:
        """True if contributions are read part by part, so that no memory holds all of them."""
        return self.aggregate in (weighted_mean, clipped_mean)

    @classmethod
    def named(cls, name: str, max_weight: float, *, exact: bool = False) -> "AggregationRules":
        """Return the rules of a job with the aggregator ``name``.

        Robust rules are verifiable, and count each contribution once: nobody can check how many
        tokens a worker trained on.
        ``exact``: a mean clips no contribution. Workers of a stage count few or many tokens, so the
        norms of honest gradients differ, and clipped ones would be another gradient.
        """
        mean = weighted_mean if exact else clipped_mean
        if name == "mean":
            return cls(mean, outliers, max_weight)
        robust = partial(_aggregate_clipped, name)
        return cls(partial(_equally, robust), partial(_equally, outliers), max_weight, verifiable=True)


def _equally(rule: Callable[..., T], rows: Any, weights: Tensor) -> T:
    return rule(rows, torch.ones_like(weights))


def _aggregate_clipped(name: str, rows: Tensor, weights: Tensor) -> Tensor:
    return aggregate(name, clip_to_median_norm_(rows, weights), weights)
