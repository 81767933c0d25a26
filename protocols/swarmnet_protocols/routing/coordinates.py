"""Network coordinates: estimate the delay between two peers from their coordinates, without a ping.

This is Vivaldi (Dabek et al. 2004, "Vivaldi: A Decentralized Network Coordinate System", section
3.4; section 5.4 for heights). A peer has a position in a Euclidean space and a height, which is the
delay of its access link. The estimated delay between peers i and j, in one-way seconds, is

    distance(i, j) = ||x_i - x_j|| + h_i + h_j + a_i + a_j     (if negative: without a_i and a_j)

When peer i measures this delay as ``delay_s``, it moves as if a spring connected the two peers::

    w    = e_i / (e_i + e_j)         e: the relative error that a peer expects of its coordinate
    r    = delay_s - distance(i, j), without the adjustments      the residual
    e_i <- C w |r| / delay_s + (1 - C w) e_i
    x_i <- x_i + C w r unit(x_i - x_j)                            and h_i in proportion

Three details come from serf (hashicorp/serf, coordinate/client.go). A peer uses the median of its
last three delays to each peer. It adds a share of its recent residuals: the term ``a``. It is drawn
towards the origin, so that the coordinates of all peers do not drift together.

Peers may announce false coordinates and delay their answers. Four bounds limit how far this moves
an honest peer:

- Coordinates and delays out of range are ignored.
- The error of another peer counts as at least ``MIN_ERROR``.
- ``a`` is half of a median, not of a mean.
- One measurement moves a peer by at most ``MAX_STEP_S``, so that the springs to honest peers
  outweigh a minority.

Filters that drop unusual measurements were worse in simulation. Attackers just inside the filter
moved peers farther, and honest peers kept wrong places. The caller should measure peers that it has
picked itself.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from swarmnet_protocols.machine.latest import Latest
from swarmnet_protocols.net import PeerId

DIMENSIONS = 3
MAX_DELAY_S = 5.0
"""Longest one-way delay that is measured or estimated, in seconds. Longer ones come from stalled
machines, not from the network."""
MIN_HEIGHT_S = 1e-5
MIN_ERROR, MAX_ERROR = 0.1, 1.5
GAIN = 0.25
"""C in the equations: the largest share of a residual that one measurement corrects."""
MAX_STEP_S = 0.003
"""One measurement moves a peer by at most this many seconds."""
RECENT = 20
"""Number of recent residuals. The adjustment is half of their median."""
FILTERED = 3
"""Number of last delays to one peer. Their median is used."""
MAX_FILTERED_PEERS = 256
"""Peers whose last delays are remembered."""
GRAVITY = 0.001
"""Each measurement also pulls a peer towards the origin, by this times its squared distance from
the origin. At 100 ms that is 10 microseconds."""

_NEAR_S = 1e-6
"""Positions nearer than this have no direction from one to the other. Shorter delays count as this
long."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A place in delay space: the estimated one-way delay between two peers is :func:`distance`."""

    position: tuple[float, ...] = (0.0,) * DIMENSIONS
    """Seconds along each of ``DIMENSIONS`` axes."""
    height_s: float = MIN_HEIGHT_S
    adjustment_s: float = 0.0
    """Half the median residual: a correction for delays that no position in the space
    represents."""
    error: float = MAX_ERROR
    """Relative error that the peer expects of its estimates."""

    def numbers(self) -> list[float]:
        """Return the coordinate as numbers for :func:`read_coordinate`."""
        return [*self.position, self.height_s, self.adjustment_s, self.error]


def read_coordinate(numbers: Sequence[float]) -> Coordinate | None:
    """Read a coordinate that a peer sent as ``numbers``; None if their count or range is
    invalid."""
    if len(numbers) != DIMENSIONS + 3:
        return None
    *position, height_s, adjustment_s, error = numbers
    if (
        all(map(math.isfinite, numbers))
        and math.hypot(*position) <= MAX_DELAY_S
        and 0 < height_s <= MAX_DELAY_S
        and abs(adjustment_s) <= MAX_DELAY_S
        and 0 <= error <= MAX_ERROR
    ):
        return Coordinate(tuple(position), height_s, adjustment_s, error)
    return None


def distance(one: Coordinate, other: Coordinate) -> float:
    """Return the estimated one-way seconds between two peers: above 0, at most ``MAX_DELAY_S``."""
    plain_s = _plain_distance(one, other)
    adjusted_s = plain_s + one.adjustment_s + other.adjustment_s
    return min(adjusted_s if adjusted_s > 0 else plain_s, MAX_DELAY_S)


def _plain_distance(one: Coordinate, other: Coordinate) -> float:
    return math.dist(one.position, other.position) + one.height_s + other.height_s


class OwnCoordinate:
    """The coordinate of this peer. Every delay that the peer measures corrects it."""

    def __init__(self, rng: random.Random) -> None:
        self.coordinate = Coordinate()
        self._rng = rng
        self._residuals: deque[float] = deque(maxlen=RECENT)
        self._delays: Latest[PeerId, deque[float]] = Latest(MAX_FILTERED_PEERS)

    def measured(self, peer: PeerId, remote: Coordinate, delay_s: float) -> None:
        """Correct the coordinate after a measured one-way delay to ``peer``, whose coordinate is
        ``remote``.

        A delay out of range is ignored.
        """
        if not 0 <= delay_s <= MAX_DELAY_S:
            return
        delays = self._delays[peer] = self._delays.get(peer, deque(maxlen=FILTERED))
        delays.append(delay_s)
        usual_s = max(median(delays), _NEAR_S)
        self._residuals.append(usual_s - _plain_distance(self.coordinate, remote))
        moved = corrected(self.coordinate, remote, usual_s, direction=self._direction())
        self.coordinate = replace(moved, adjustment_s=median(self._residuals) / 2)

    def _direction(self) -> tuple[float, ...]:
        drawn = [self._rng.gauss(0.0, 1.0) for _ in range(DIMENSIONS)]
        norm = math.hypot(*drawn) or 1.0
        return tuple(number / norm for number in drawn)


def corrected(
    here: Coordinate, remote: Coordinate, delay_s: float, *, direction: Sequence[float]
) -> Coordinate:
    """Return ``here`` after a measured ``delay_s`` > 0 to a peer at ``remote``, by the equations
    above.

    ``direction`` is the unit vector that separates two peers at the same place.
    """
    error_j = max(remote.error, MIN_ERROR)
    gain = GAIN * here.error / (here.error + error_j)
    residual_s = delay_s - _plain_distance(here, remote)
    error = gain * abs(residual_s) / delay_s + (1 - gain) * here.error
    here = replace(here, error=min(max(error, _NEAR_S), MAX_ERROR))
    here = _pushed(here, remote, _clipped(gain * residual_s, MAX_STEP_S), direction)
    pull_s = GRAVITY * math.hypot(*here.position) ** 2
    return _pushed(here, _ORIGIN, -min(pull_s, MAX_STEP_S), direction)


_ORIGIN = Coordinate(height_s=0.0)


def _pushed(here: Coordinate, other: Coordinate, step_s: float, direction: Sequence[float]) -> Coordinate:
    """Move ``here`` away from ``other`` by ``step_s`` (towards it if negative).

    The height grows in proportion.
    """
    apart_s = math.dist(here.position, other.position)
    height_s = here.height_s
    if apart_s > _NEAR_S:
        direction = [(a - b) / apart_s for a, b in zip(here.position, other.position, strict=True)]
        grown_s = _clipped((here.height_s + other.height_s) * step_s / apart_s, MAX_STEP_S)
        height_s = min(max(height_s + grown_s, MIN_HEIGHT_S), MAX_DELAY_S)
    position = tuple(a + step_s * b for a, b in zip(here.position, direction, strict=True))
    too_far = math.hypot(*position) / MAX_DELAY_S
    if too_far > 1:
        position = tuple(a / too_far for a in position)
    return replace(here, position=position, height_s=height_s)


def _clipped(value: float, most: float) -> float:
    return min(max(value, -most), most)
