"""The deadlines of a round, what a member learns in it (events) and what it is to do about it (effects)."""

import math
from dataclasses import dataclass

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.rounds.messages import Control, Hashes


@dataclass(frozen=True)
class RoundTiming:
    """Deadlines of a round, in seconds since this member began it."""

    contribution_s: float = 20.0
    """A contribution that comes later is left out. An owner that takes over a slice waits as long again."""
    settle_s: float = 40.0
    """From here on a majority is enough to commit; if no majority holds all results the round is discarded."""
    deadline_s: float = 60.0
    """Whoever knows no decision by now is behind."""
    silence_s: float = 2.0
    """A member that sent no beat for this long is taken for gone, until it is heard again."""
    heartbeat_s: float = 0.4
    open_s: float = 2.5
    """To dial a member and open a stream."""

    def __post_init__(self) -> None:
        if not 0 < self.contribution_s < self.settle_s < self.deadline_s < math.inf:
            raise ConfigError("a round needs 0 < contribution_s < settle_s < deadline_s")
        if self.silence_s < 3 * self.heartbeat_s:
            raise ConfigError("silence_s must be at least three beats, or one late packet looks like a death")

    @property
    def late_s(self) -> float:
        """An owner that has delivered nothing by now is replaced: early enough for another one to be."""
        return (self.contribution_s + self.settle_s) / 2

    @property
    def attempt_s(self) -> float:
        """A coordinator that reaches no decision for so long after ``settle_s`` is replaced: four in the time that is left."""
        return (self.deadline_s - self.settle_s) / 4

    @property
    def give_up_s(self) -> float:
        """A member that has lost the majority for so long ends behind."""
        return 3 * (self.silence_s + self.open_s)


# What a member learns -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkUp:
    member: int


@dataclass(frozen=True)
class LinkDown:
    member: int


@dataclass(frozen=True)
class Received:
    member: int
    message: Control


@dataclass(frozen=True)
class Began:
    """A member is in this round: it has said hello."""

    member: int


@dataclass(frozen=True)
class Contributed:
    """The whole contribution of a member to a slice is here, or its word that there is none."""

    slice: int
    member: int


@dataclass(frozen=True)
class Receiving:
    """A part of a result came."""

    slice: int


@dataclass(frozen=True)
class Holds:
    """The whole result of a slice is here, and right."""

    slice: int
    hash: bytes


@dataclass(frozen=True)
class Tick:
    pass


Event = LinkUp | LinkDown | Began | Received | Contributed | Receiving | Holds | Tick


# What it is to do -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    member: int
    message: Control


@dataclass(frozen=True)
class SendContribution:
    member: int
    slice: int


@dataclass(frozen=True)
class SendResult:
    member: int
    slice: int
    hash: bytes


@dataclass(frozen=True)
class Reduce:
    """Average what these members contributed to a slice, and tell with ``Holds``."""

    slice: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """The end for this member: with every result that ``hashes`` names, discarded by all, or behind (None)."""

    hashes: Hashes | None
    reason: str


Effect = Send | SendContribution | SendResult | Reduce | Finish
