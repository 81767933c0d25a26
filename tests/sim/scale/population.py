"""Hosts of a simulated swarm: speeds, places on the network, routers, and lifetimes, drawn from a
seed.

Lifetimes: Weibull distributions with shapes below 1, as every published trace has (the longer a
host has run, the longer it stays). Visitors: k 0.59, scale 41 min, within the range of BitTorrent
sessions in Stutzbach and Rejaie 2006, "Understanding Churn in Peer-to-Peer Networks". Always-on
machines: k 0.6, scale 5 days, near Heien et al. 2011, "Correlated Resource Models of Internet End
Hosts". The shares of the kinds, and the links, are assumptions.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.coordinates import Coordinate

HOUR, DAY = 3600.0, 86400.0
SHAPE = 0.59
"""Shape of the Weibull distribution of visitors' lifetimes."""
SILENT = 0.4
"""Share of hosts that leave without a word. The others announce it."""

LINKS = {
    # name: share of hosts, one-way seconds of the access link
    "fibre": (0.35, 0.002),
    "cable": (0.33, 0.008),
    "dsl": (0.15, 0.015),
    "mobile": (0.12, 0.03),
    "low satellite": (0.04, 0.025),
    "high satellite": (0.01, 0.28),
}
CONTINENTS = ((0.0, 0.0), (0.04, 0.0), (0.08, 0.06), (0.01, 0.06))
"""Their places in one-way seconds: North America, Europe, Asia, South America. A host's clock is
six hours later on each next one."""
CONTINENT_SPREAD_S = 0.008
ROUTERS = {"open": 0.4, "cone": 0.45, "symmetric": 0.15}
"""Shares of hosts that can be dialled, and of those behind either kind of router."""

Kind = Literal["always on", "evening", "visitor"]
KINDS: dict[Kind, float] = {"always on": 0.25, "evening": 0.45, "visitor": 0.30}


@dataclass(frozen=True)
class Place:
    """A place on the network: ``position`` and ``access_s`` in one-way seconds."""

    position: tuple[float, float] = (0.0, 0.0)
    access_s: float = 0.005
    continent: int = 0
    router: str = "open"

    @property
    def coordinate(self) -> Coordinate:
        """The network coordinate that a peer at this place finds."""
        return Coordinate((*self.position, 0.0), self.access_s, error=0.2)


def random_place(rng: random.Random) -> Place:
    continent = rng.randrange(len(CONTINENTS))
    x, y = CONTINENTS[continent]
    [link] = rng.choices(list(LINKS), [share for share, _ in LINKS.values()])
    [router] = rng.choices(list(ROUTERS), list(ROUTERS.values()))
    position = rng.gauss(x, CONTINENT_SPREAD_S), rng.gauss(y, CONTINENT_SPREAD_S)
    return Place(position, LINKS[link][1] * rng.uniform(0.7, 1.5), continent, router)


def delay_s(one: Place, other: Place) -> float:
    """One-way seconds between two places. Each pair deviates by up to a quarter from what a space
    can represent, as routes of the internet do."""
    plain_s = math.dist(one.position, other.position) + one.access_s + other.access_s
    pair = sorted((one.position, other.position))
    return plain_s * (0.75 + 0.5 * crc32(repr(pair).encode()) / 0xFFFFFFFF)


@dataclass
class Peer:
    """What a simulated host is, whatever blocks it serves."""

    peer: PeerId
    speed: float
    """Single-token steps of one block per second."""
    length: int
    """Blocks that it holds."""
    place: Place = field(default_factory=Place)
    announced: float = 0.0
    """The speed that it announces; its own by default."""

    def __post_init__(self) -> None:
        self.announced = self.announced or self.speed


def random_peer_id(rng: random.Random) -> PeerId:
    return PeerId(f"12D3KooW{rng.getrandbits(200):050x}")


def two_decades(rng: random.Random) -> float:
    """A speed of 5 to 500 blocks per second: from an old laptop to a good accelerator."""
    return float(5 * 10 ** rng.uniform(0, 2))


def weibull(rng: random.Random, shape: float, mean_s: float) -> float:
    return rng.weibullvariate(mean_s / math.gamma(1 + 1 / shape), shape)


def residual(rng: random.Random, shape: float, mean_s: float) -> float:
    """What is left of the lifetime of a host that is met at a random moment: a uniform part of a
    lifetime drawn in proportion to its length."""
    lifetimes = [weibull(rng, shape, mean_s) for _ in range(64)]
    return rng.choices(lifetimes, lifetimes)[0] * rng.random()


def lifetime(rng: random.Random, kind: Kind) -> float:
    """Seconds that a host of this kind stays after it joined."""
    if kind == "always on":
        return rng.weibullvariate(5 * DAY, 0.6)
    if kind == "visitor":
        return rng.weibullvariate(41 * 60, SHAPE)
    return max(rng.gauss(4 * HOUR, 1.5 * HOUR), 600.0)


def arrivals_per_s(kind: Kind, hosts: int, now: float, continent: int) -> float:
    """Rate at which hosts of this kind join on one continent, of a swarm of ``hosts`` on average.
    That of evening machines peaks at 21 h local time."""
    mean_s = {"always on": 5 * DAY * math.gamma(1 + 1 / 0.6), "visitor": 41 * 60 * math.gamma(1 + 1 / SHAPE)}
    rate = KINDS[kind] * hosts / len(CONTINENTS) / mean_s.get(kind, 4 * HOUR)
    if kind == "evening":
        local_h = (now / HOUR + 6 * continent) % 24
        rate *= 1 + 0.5 * math.cos((local_h - 21) / 24 * 2 * math.pi)
    return rate
