"""What many contributions become, and which of them count. Pure.

Sums over coordinates are folded in one fixed order of elementwise additions, so equal inputs in equal order give equal bits on
every machine, whatever its threads and vector width: whoever sees the contributions can audit who aggregated them. The caller
puts contributions in an order all agree on (sorted by contributor).
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet_protocols.errors import ConfigError

AGGREGATORS = ("mean", "median", "centered-clip")
CLIP_ITERATIONS = 20
TINY = 1e-30  # no distance at all divides nothing
OUTLIER = 100
COORDINATES_AT_ONCE = 1 << 18  # worked on at a time: temporaries take about 32 bytes x contributions x this


def outliers(contributions: Tensor, weights: Tensor) -> list[str]:
    """For each row of ``contributions`` [k, n] why it must not count, or "": longer than any batch of data can make it."""
    lengths = norms(contributions)
    limit = OUTLIER * median(lengths, weights)
    return [
        f"norm {length:.4g} is over {OUTLIER} times the median of all" if length > limit > 0 else ""
        for length in lengths
    ]


def clip_to_median_norm_(contributions: Tensor, weights: Tensor) -> Tensor:
    """Shorten rows of ``contributions`` [k, n], in place, to the weighted median of the rows' norms (SparseLoCo, templar ``neurons.py``)."""
    lengths = norms(contributions)
    limit = median(lengths, weights)
    scales = [limit / length if length > limit else 1.0 for length in lengths]
    return contributions.mul_(torch.tensor(scales, dtype=contributions.dtype)[:, None])


def aggregate(name: str, contributions: Tensor, weights: Tensor) -> Tensor:
    """The aggregate [n], float32, of finite ``contributions`` [k, n] under positive ``weights`` [k].

    "mean" trusts everybody. "median" (per coordinate) and "centered-clip" stay near the honest ones while those hold more than
    half of the weight. Raises ``ConfigError`` for another name and ``ValueError`` for weights that do not fit the contributions.
    """
    if weights.shape != contributions.shape[:1] or not bool(((weights > 0) & weights.isfinite()).all()):
        raise ValueError("there must be one positive weight a contribution")
    match name:
        case "mean":
            return weighted_mean(contributions, weights)
        case "median":
            return weighted_median(contributions, weights)
        case "centered-clip":
            return centered_clip(mix_neighbours(contributions, weights), weights)
    raise ConfigError(f"no aggregator is called {name!r}", hint=f"use one of: {', '.join(AGGREGATORS)}")


def weighted_mean(contributions: Tensor, weights: Tensor) -> Tensor:
    """Sum of w x over sum of w, rows added in their order."""
    return combine(contributions, shares(weights))


def weighted_median(contributions: Tensor, weights: Tensor) -> Tensor:
    """Per coordinate, a value with at most half of the weight below it and at most half above; the middle of two if both fit."""
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
    """Every row [k, n] as the weighted mean of itself and the rows nearest to it, up to more than half of the weight.

    Allouah et al. 2023, "Fixing by Mixing", section 4 (nearest neighbour mixing). Without it, what honest contributions differ by
    pulls a median, and so a clip's start and radius, towards liars who are nearly as many.
    """
    count, fractions = len(contributions), shares(weights)
    distances = [[0.0] * count for _ in range(count)]
    for one in range(1, count):
        for other, distance in enumerate(norms(contributions[:one] - contributions[one])):
            distances[one][other] = distances[other][one] = distance
    mixed = torch.empty_like(contributions)
    for row in range(count):
        near = sorted(range(count), key=lambda other: (distances[row][other], other != row, other))
        gathered = list(itertools.accumulate(fractions[other] for other in near))
        enough = next(number for number, share in enumerate(gathered, 1) if share > 0.5)
        chosen = sorted(near[:enough])
        mixed[row] = combine(contributions[chosen], shares(weights[chosen]))
    return mixed


def centered_clip(contributions: Tensor, weights: Tensor, *, radius: float | None = None) -> Tensor:
    """The point v at which contributions, each pulling with at most ``radius``, balance: v += sum w min(1, r/|x-v|) (x-v) / sum w.

    Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", section 4, from the coordinate median.
    Without ``radius`` it is the weighted median distance of the contributions from that start: free of their scale, and an
    honest distance while the honest hold more than half of the weight.
    """
    center = weighted_median(contributions, weights)
    if radius is None:
        radius = median(norms(contributions - center), weights)
    for _ in range(CLIP_ITERATIONS):
        pulls = contributions - center
        clipped = [
            share * min(1.0, radius / max(length, radius, TINY))
            for share, length in zip(shares(weights), norms(pulls), strict=True)
        ]
        center = center + combine(pulls, clipped)
    return center


def shares(weights: Tensor) -> list[float]:
    """Each weight over the exact sum of all."""
    listed = weights.double().tolist()
    total = math.fsum(listed)
    return [weight / total for weight in listed]


def combine(rows: Tensor, factors: Sequence[float]) -> Tensor:
    """Sum of factor x row, float32 [n], rows added in their order."""
    total = torch.zeros_like(rows[0])
    for part, columns in zip(
        torch.split(total, COORDINATES_AT_ONCE), torch.split(rows, COORDINATES_AT_ONCE, dim=1), strict=True
    ):
        for row, factor in zip(columns, factors, strict=True):
            part.add_(row * factor)
    return total


def median(numbers: Sequence[float], weights: Tensor) -> float:
    """Weighted median of ``numbers``, one a weight."""
    return weighted_median(torch.tensor(numbers, dtype=torch.float64)[:, None], weights).item()


def norms(rows: Tensor) -> list[float]:
    """Euclidean norm of every row [k, n]: squares in float64, folded in halves so that the order of additions is fixed."""
    totals = [0.0] * len(rows)
    for part in torch.split(rows, COORDINATES_AT_ONCE, dim=1):
        squares = part.double().square()
        while (count := squares.shape[1]) > 1:
            half = (count + 1) // 2
            folded = squares[:, :half].clone()
            folded[:, : count - half] += squares[:, half:]
            squares = folded
        totals = [total + more for total, more in zip(totals, squares.sum(dim=1).tolist(), strict=True)]
    return [math.sqrt(total) for total in totals]
