"""Moving averages of what is measured again and again."""


def averaged(before: float, value: float, weight: float) -> float:
    """Return the exponential moving average after one more ``value``.

    ``before`` is the average so far; 0 stands for no measurement, so that the average begins at its
    first value. ``weight`` is the share of the new value.
    """
    return before + weight * (value - before) if before else value
