"""Averages of what is measured again and again, or by many."""

from collections.abc import Iterable


def averaged(before: float, value: float, weight: float) -> float:
    """Return the exponential moving average after one more ``value``.

    ``before`` is the average so far; 0 stands for no measurement, so that the average begins at its
    first value. ``weight`` is the share of the new value.
    """
    return before + weight * (value - before) if before else value


def pooled(losses: Iterable[tuple[float, int]], *, most: int) -> float | None:
    """Return the mean of the losses (mean, tokens) of several peers over all their tokens.

    A peer counts at most ``most`` tokens, whatever it claims. None without any token.
    """
    known = [(loss, min(tokens, most)) for loss, tokens in losses]
    tokens = sum(count for _, count in known)
    return sum(loss * count for loss, count in known) / tokens if tokens else None
