"""Moving averages of what is measured again and again."""


def averaged(before: float, value: float, weight: float) -> float:
    """Return an exponential moving average ``before`` with one more ``value``, whose share is
    ``weight``.

    0 stands for no measurement: the average begins at its first value, not far below it.
    """
    return before + weight * (value - before) if before else value
