"""Network coordinates: finite whatever peers claim, near the true delays among honest peers, and
moved little by a minority of liars."""

import math
import random
from collections.abc import Callable
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import coordinates
from swarmnet_protocols.routing.coordinates import (
    DIMENSIONS,
    MAX_DELAY_S,
    MAX_ERROR,
    MAX_FILTERED_PEERS,
    MAX_STEP_S,
    MIN_HEIGHT_S,
    Coordinate,
    OwnCoordinate,
    corrected,
    distance,
    read_coordinate,
)
from tests.defences import defence, replacing

NUMBERS = st.lists(st.floats(), min_size=DIMENSIONS + 3, max_size=DIMENSIONS + 3)
ANY = st.lists(st.floats(width=32), max_size=DIMENSIONS + 5) | NUMBERS
SMALL = st.floats(-1.0, 1.0)
COORDINATES = st.builds(
    Coordinate,
    position=st.tuples(*[SMALL] * DIMENSIONS),
    height_s=st.floats(MIN_HEIGHT_S, 1.0),
    adjustment_s=st.floats(-0.1, 0.1),
    error=st.floats(0.0, MAX_ERROR),
)
DELAYS = st.floats(1e-6, MAX_DELAY_S)


@given(COORDINATES, COORDINATES)
def test_a_distance_is_positive_and_the_same_both_ways(one: Coordinate, other: Coordinate) -> None:
    assert 0 < distance(one, other) <= MAX_DELAY_S
    assert math.isclose(distance(one, other), distance(other, one))


@given(COORDINATES)
def test_a_coordinate_is_read_as_it_was_sent(coordinate: Coordinate) -> None:
    assert read_coordinate(coordinate.numbers()) == coordinate


@given(ANY)
def test_only_plausible_numbers_are_a_coordinate(numbers: list[float]) -> None:
    read = read_coordinate(numbers)
    assert read is None or 0 < distance(read, Coordinate()) <= MAX_DELAY_S
    assert read_coordinate([*numbers, math.nan]) is None


@defence(
    "only plausible coordinates are read",
    off=replacing(
        coordinates,
        "read_coordinate",
        lambda numbers: coordinates.Coordinate(tuple(numbers[:3]), *numbers[3:6]),
    ),
)
def test_a_coordinate_out_of_range_is_none() -> None:
    good = Coordinate((0.1, 0.0, 0.0), 0.001, 0.0, 0.5).numbers()
    assert coordinates.read_coordinate(good) is not None
    for index, wrong in (
        (0, math.inf),
        (1, math.nan),
        (2, 9.0),
        (3, 0.0),
        (3, 9.0),
        (4, -9.0),
        (5, -0.1),
        (5, 9.0),
    ):
        assert coordinates.read_coordinate([*good[:index], wrong, *good[index + 1 :]]) is None


@given(COORDINATES, COORDINATES, DELAYS)
def test_a_measurement_moves_a_peer_a_bounded_way_and_not_too_far(
    here: Coordinate, remote: Coordinate, delay_s: float
) -> None:
    moved = corrected(here, remote, delay_s, direction=(1.0, 0.0, 0.0))
    assert math.dist(moved.position, here.position) <= 2 * MAX_STEP_S + 1e-9
    assert abs(moved.height_s - here.height_s) <= 2 * MAX_STEP_S + 1e-9
    assert read_coordinate(moved.numbers()) == moved


@given(st.lists(st.tuples(st.integers(0, 3), NUMBERS, st.floats())))
def test_no_measurement_makes_a_coordinate_implausible(
    claims: list[tuple[int, list[float], float]],
) -> None:
    own = OwnCoordinate(random.Random(0))
    for peer, numbers, delay_s in claims:
        remote = read_coordinate(numbers)
        if remote is not None:
            own.measured(PeerId(f"p{peer}"), remote, delay_s)
    assert read_coordinate(own.coordinate.numbers()) == own.coordinate


@defence("the delays of few peers are remembered", off=replacing(coordinates, "MAX_FILTERED_PEERS", 1 << 20))
def test_the_delays_of_few_peers_are_remembered() -> None:
    own = OwnCoordinate(random.Random(0))
    for number in range(2 * MAX_FILTERED_PEERS):
        own.measured(PeerId(f"p{number}"), Coordinate(), 0.01)
    assert len(own._delays) == MAX_FILTERED_PEERS


Delay = Callable[[int, int], float]
PEERS = 40


def settled(liars: int) -> tuple[list[OwnCoordinate], Delay]:
    """The coordinates of ``PEERS`` peers after some minutes, and the true delays.

    The first ``liars`` push honest peers apart. Each liar answers 1 s late and claims a place next
    to the peer that asks. It claims one side for half of the peers, and the other side for the
    other half.
    """
    rng = random.Random(4)
    places = [[rng.gauss(0.0, 0.03) for _ in range(DIMENSIONS)] for _ in range(PEERS)]
    access_s = [rng.lognormvariate(math.log(0.004), 0.8) for _ in range(PEERS)]

    def delay(one: int, other: int) -> float:
        return math.dist(places[one], places[other]) + access_s[one] + access_s[other]

    own = [OwnCoordinate(rng) for _ in range(PEERS)]
    for _ in range(300):
        for one in range(liars, PEERS):
            other = (one + 1 + rng.randrange(PEERS - 1)) % PEERS
            measured_s, remote = delay(one, other) * rng.uniform(1.0, 1.2), own[other].coordinate
            if other < liars:
                x, *rest = own[one].coordinate.position
                measured_s, remote = measured_s + 1.0, Coordinate((x + (-1) ** one * 0.02, *rest), error=0.0)
            own[one].measured(PeerId(f"p{other}"), remote, measured_s)
    return own, delay


def errors(own: list[OwnCoordinate], delay: Delay, first: int) -> list[float]:
    """The relative errors of the estimates between all peers from the number ``first`` on."""
    return [
        abs(distance(own[one].coordinate, own[other].coordinate) / delay(one, other) - 1)
        for one in range(first, PEERS)
        for other in range(first, one)
    ]


def test_the_estimates_of_honest_peers_are_near_the_true_delays() -> None:
    assert median(errors(*settled(0), first=0)) < 0.2


@defence("one measurement moves a peer a short way", off=replacing(coordinates, "MAX_STEP_S", 1e9))
def test_a_third_of_liars_moves_the_estimates_of_honest_peers_little() -> None:
    """The median error is 0.6, and 11 if a step has no bound."""
    liars = PEERS * 3 // 10
    assert median(errors(*settled(liars), first=liars)) < 1.0


def test_a_peer_that_moves_is_found_at_its_new_place() -> None:
    """A laptop that changes to a slow access link: all its delays grow at once, which is no lie."""
    own, delay = settled(0)
    mover, slower_s = own[0], 0.08
    for _ in range(40):
        for other in range(1, PEERS):
            mover.measured(PeerId(f"p{other}"), own[other].coordinate, delay(0, other) + slower_s)
    off = [
        distance(mover.coordinate, own[other].coordinate) / (delay(0, other) + slower_s) - 1
        for other in range(1, PEERS)
    ]
    assert median(map(abs, off)) < 0.2


@defence("no peer claims to be certain of its coordinate", off=replacing(coordinates, "MIN_ERROR", 1e-9))
def test_a_coordinate_claims_no_more_certainty_than_it_may() -> None:
    """A peer that claims to be certain of its coordinate pulls no harder than one with
    ``MIN_ERROR``."""
    here = Coordinate(error=0.2)
    pulled = [
        corrected(here, Coordinate((0.1, 0.0, 0.0), error=error), 0.05, direction=(1, 0, 0))
        for error in (0.0, 0.1)
    ]
    assert pulled[0] == pulled[1]
