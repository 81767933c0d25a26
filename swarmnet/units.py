"""Sizes, rates, durations and counts: reading what users type, and writing what they read."""

import re
from datetime import datetime

MAX_DURATION_S = 3650 * 24 * 3600
_SIZES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
_BITS = {"k": 10**3, "m": 10**6, "g": 10**9}
_DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def parse_size_bytes(text: str) -> int:
    """Parse ``512MiB`` or ``1.5GB``. Raises ``ValueError`` that says how to write one."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(|[kmgt]i?)b?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError("write a size as 512MiB or 2GB")
    if not match[2]:  # nobody means 8 bytes of memory, and a guess may be a thousand times too large
        raise ValueError(f"write the unit of the size: {match[1]}GiB or {match[1]}MiB")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_rate_bytes_per_s(text: str) -> float:
    """Parse ``20mbit``, ``500kbit`` or ``2.5MB/s``. Raises ``ValueError`` that says how to write
    one."""
    plain = text.strip().lower()
    bits = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kmg])bit(?:/s)?", plain)
    if bits is not None and float(bits[1]) > 0:
        return float(bits[1]) * _BITS[bits[2]] / 8
    if plain.endswith("b/s"):
        return float(parse_size_bytes(plain.removesuffix("/s")))
    raise ValueError("write a rate as 20mbit, 500kbit or 2.5MB/s")


def parse_share(text: str) -> float:
    """Parse ``80%`` as 0.8, or ``6GB`` as its bytes. A result above 1 is bytes. Raises
    ``ValueError`` that says how to write one."""
    percent = re.fullmatch(r"([0-9]{1,3})\s*%", text.strip())
    if percent is None:
        return float(parse_size_bytes(text))
    if not 1 <= int(percent[1]) <= 100:
        raise ValueError("write a share as 1% to 100%, or a size as 6GB")
    return int(percent[1]) / 100


def show_size(nbytes: float) -> str:
    """Return ``1.5 GB`` and the like, for people."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * size:  # 999.5 kB is shown as 1 MB, not as 1000 kB
            return f"{_figures(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def show_number(number: float) -> str:
    """Return ``12,300``, ``1.5 million`` and the like, for people."""
    for unit, size in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= 0.9995 * size:
            return f"{_figures(number / size)} {unit}"
    return f"{number:,.0f}"


def show_memory(nbytes: float) -> str:
    """Return ``6 GiB`` and the like, as people write it for ``--max-ram``."""
    if nbytes >= 1 << 30:
        return f"{_figures(nbytes / (1 << 30), 4)} GiB"
    return f"{_figures(nbytes / (1 << 20), 4)} MiB"


def show_rate(bytes_per_s: float) -> str:
    """Return ``20 mbit/s`` and the like, for people."""
    bits_per_s = bytes_per_s * 8
    if bits_per_s < 1e6:
        return f"{_figures(bits_per_s / 1e3)} kbit/s"
    return f"{_figures(bits_per_s / 1e6)} mbit/s"


def parse_duration_s(text: str) -> int:
    """Parse ``90s``, ``30m``, ``12h``, ``7d`` or ``2w``. Raises ``ValueError`` that says how to
    write one."""
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smhdw])", text.strip().lower())
    if match is None or int(match[1]) * _DURATIONS[match[2]] > MAX_DURATION_S:
        raise ValueError("write a duration as 90s, 30m, 12h, 7d or 2w; ten years are the most")
    return int(match[1]) * _DURATIONS[match[2]]


def show_duration(seconds: float) -> str:
    """Return ``42 s``, ``17 minutes``, ``5 hours`` or ``3 days``, for people."""
    for unit, size in (("days", 24 * 3600), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_time(unix_s: float) -> str:
    """Return ``Friday 27 November, 18:30``, by the clock of this machine."""
    time = datetime.fromtimestamp(unix_s)  # noqa: DTZ006
    return f"{time:%A} {time.day} {time:%B}, {time:%H:%M}"


def _figures(number: float, digits: int = 3) -> str:
    """Return ``number`` with that many significant digits, and never fewer than its integer part
    has. No exponent."""
    return f"{number:.{digits}g}" if number < 10**digits - 0.5 else f"{number:.0f}"


def counted(number: int, what: str) -> str:
    """Return ``1 host``, ``2 hosts``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
