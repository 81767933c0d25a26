"""The times when a node may run: days of the week and hours of the day, in local time."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
MAX_TEXT = 256
_DAY = "(?:" + "|".join(DAYS) + ")"
_WINDOW = re.compile(
    rf"(?:(?P<days>{_DAY}(?:-{_DAY})?(?:\s*,\s*{_DAY}(?:-{_DAY})?)*)\s+)?"
    r"(?P<from>[0-9]{1,2}:[0-9]{2})\s*-\s*(?P<to>[0-9]{1,2}:[0-9]{2})"
)


@dataclass(frozen=True)
class Window:
    """The minutes [start, end) of some days.

    A window that passes midnight has ``end <= start``. It belongs to the day when it begins.
    """

    days: frozenset[int]
    start: int
    end: int

    def holds(self, weekday: int, minute: int) -> bool:
        """Return whether the window is open at this minute of the day. Monday is 0."""
        if self.start < self.end:
            return weekday in self.days and self.start <= minute < self.end
        yesterday = (weekday - 1) % 7
        return (weekday in self.days and minute >= self.start) or (
            yesterday in self.days and minute < self.end
        )


@dataclass(frozen=True)
class Schedule:
    """The times when a node may run: inside any of the windows. ``text``: the schedule as
    written."""

    text: str
    windows: tuple[Window, ...]

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read a schedule such as ``mon-fri 19:00-07:00; sat,sun 00:00-24:00``.

        A window without days holds every day. Raises ``ValueError`` for other text.
        """
        if len(text) > MAX_TEXT:
            raise ValueError(f"a schedule has at most {MAX_TEXT} characters")
        windows = tuple(_window(part.strip().lower()) for part in text.split(";"))
        return cls(text.strip(), windows)

    def allows(self, now: datetime) -> bool:
        """Return whether a node may run at the local time ``now``."""
        return any(window.holds(now.weekday(), now.hour * 60 + now.minute) for window in self.windows)

    def opens(self, now: datetime) -> datetime:
        """Return ``now`` if a node may run at this local time, else the next start of a window."""
        if self.allows(now):
            return now
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return min(
            begin
            for ahead in range(8)
            for window in self.windows
            if (begin := today + timedelta(days=ahead, minutes=window.start)) > now
            and begin.weekday() in window.days
        )


def _window(text: str) -> Window:
    match = _WINDOW.fullmatch(text)
    if match is None:
        raise ValueError("write a schedule as 'mon-fri 19:00-07:00; sat,sun 00:00-24:00'")
    start, end = _minute(match["from"]), _minute(match["to"])
    if start in (end, DAY_MINUTES):
        raise ValueError(f"{match['from']}-{match['to']} is empty: for a whole day write 00:00-24:00")
    days = re.split(r"\s*,\s*", match["days"]) if match["days"] else ["mon-sun"]
    return Window(frozenset(day for part in days for day in _days(part)), start, end)


def _minute(text: str) -> int:
    hours, minutes = map(int, text.split(":"))
    if minutes >= 60 or hours * 60 + minutes > DAY_MINUTES:
        raise ValueError(f"{text} is not a time of day")
    return hours * 60 + minutes


def _days(text: str) -> list[int]:
    first, _, last = text.partition("-")
    begin, end = DAYS.index(first), DAYS.index(last or first)
    return [(begin + ahead) % 7 for ahead in range((end - begin) % 7 + 1)]
