"""Sizes and durations as people write them."""

import re

MAX_DURATION_S = 3650 * 24 * 3600
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def parse_size_bytes(text: str) -> int:
    """``512MiB``, ``1.5GB`` or a plain number of bytes. Raises ``ValueError`` that says how to write one."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(|[kmg]i?)b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError("write a size as 512MiB or 2GB")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_duration_s(text: str) -> int:
    """``90s``, ``30m``, ``12h``, ``7d`` or ``2w``. Raises ``ValueError`` that says how to write one."""
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhdw])", text.strip().lower())
    if match is None or int(match[1]) * _DURATIONS[match[2]] > MAX_DURATION_S:
        raise ValueError("write a duration as 90s, 30m, 12h, 7d or 2w; ten years are the most")
    return int(match[1]) * _DURATIONS[match[2]]
