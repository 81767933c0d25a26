"""Fits a router to comparisons: which of two models answered a question better.

With features φ of a question, weights w of models and y = 1 if model a won, 0 if model b won and
1/2 for a tie, the weights minimise

    Σ [log(1 + exp(z)) - y z] + L2/2 · |w|²,   z = (w_a - w_b) · φ

the logistic regression of Bradley and Terry's model. It is convex, and Newton's steps find its
minimum.
"""

import math
from binascii import crc32
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from swarmnet.gateway.errors import validation_error
from swarmnet.gateway.generation.requests import ChatPrompt
from swarmnet.gateway.parsing import json_lines
from swarmnet.gateway.protocols.schemas import Messages, OpenModel
from swarmnet.gateway.routing.router import (
    MAX_MODELS,
    MAX_NAME_CHARS,
    Router,
    features,
    question,
    relative_costs,
)
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import ConfigError

LEAST = 20
"""Fewest comparisons. With fewer, the part that is held out says nothing."""
MOST = 20_000
"""Most comparisons: their features take 160 MB."""
HELD_OUT = 5
"""One question in this many is held out of the first fit, and measures it."""
L2 = 1.0
"""Strength of the pull towards equal models. With less, words that occur once decide. With more,
the router sees the usual winner only."""
LINE_HINT = 'a line has "prompt" or "messages", "model_a", "model_b", and "winner": "a", "b" or "tie"'
NEWTON_STEPS = 12
"""Most steps of Newton's method. It ends earlier when no weight changes by ``TOLERANCE``."""
SOLVER_STEPS = 60
"""Most steps of conjugate gradients for one step of Newton's method."""
TOLERANCE = 1e-4
POINTS = 10
"""Prices above 0 for which the curve has a point."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class ComparisonLine(OpenModel):
    """A line of a file of comparisons. It has ``prompt`` or ``messages``."""

    prompt: str = ""
    messages: Messages | None = None
    model_a: Name
    model_b: Name
    winner: Literal["a", "b", "tie"]

    def text(self) -> str:
        """Return the question; "" if there is none."""
        chat = ChatPrompt(tuple(each.message() for each in self.messages or ()))
        return self.prompt or question(chat)


@dataclass(frozen=True)
class Comparisons:
    """Comparisons as arrays, one row for each.

    - ``features``: of the question, [rows, FEATURES].
    - ``sides``: 1 for model a, -1 for model b, 0 for others, [rows, models].
    - ``won``: 1 if model a won, 0 if model b won, 0.5 for a tie.
    - ``held_out``: whether the row measures the first fit. All rows of one question are held out,
      or none.
    """

    names: tuple[str, ...]
    features: Array
    sides: Array
    won: Array
    held_out: Array

    def part(self, rows: Array) -> "Comparisons":
        """Return the rows of a mask."""
        return Comparisons(
            self.names, self.features[rows], self.sides[rows], self.won[rows], self.held_out[rows]
        )


@dataclass(frozen=True)
class CurvePoint:
    """Cost and quality at one price, over the comparisons that were held out.

    - ``cost``: mean cost of an answer, relative to the slowest model.
    - ``quality``: share of comparisons that the chosen model wins; a tie counts half.
    - ``mixed``: the quality of choosing at random between the two models, at the same mean cost.
    """

    price: float
    cost: float
    quality: float
    mixed: float


@dataclass(frozen=True)
class FitReport:
    """The quality of a router on questions that it has not seen.

    - ``accuracy``: of the held-out comparisons with a winner, the share in which the router names
      this winner.
    - ``baseline``: the same for a router that knows no questions, only who usually wins.
    """

    comparisons: int
    held_out: int
    accuracy: float
    baseline: float
    costs: Mapping[str, float]
    curve: Sequence[CurvePoint]


def read_comparisons(path: Path, report: Callable[[int], None] = lambda _: None) -> Comparisons:
    """Read a file of comparisons. Raises ``ConfigError`` that names the first invalid line."""
    rows: list[Array] = []
    found: list[ComparisonLine] = []
    held_out: list[bool] = []
    for where, line in _lines(path):
        if len(rows) == MOST:
            raise ConfigError(
                f"{path} has more than {MOST} comparisons", hint="draw some at random: shuf -n 20000"
            )
        text = line.text()
        if not text:
            raise ConfigError(
                f"{where} has no question", hint='give "prompt" or "messages" with a user message'
            )
        if line.model_a == line.model_b:
            raise ConfigError(f"{where} compares {line.model_a} with itself", hint="remove the line")
        rows.append(features(text))
        found.append(line.model_copy(update={"prompt": "", "messages": None}))
        held_out.append(crc32(text.encode(errors="replace")) % HELD_OUT == 0)
        report(len(rows))
    names = tuple(sorted({name for line in found for name in (line.model_a, line.model_b)}))
    if len(found) < LEAST or not 0 < sum(held_out) < len(found):
        message = (
            f"{path} has {len(found)} comparisons: a router needs {LEAST} or more, of different questions"
        )
        raise ConfigError(message, hint=LINE_HINT)
    if len(names) > MAX_MODELS:
        message = f"{path} compares {len(names)} models: {MAX_MODELS} are the most"
        raise ConfigError(message, hint="keep the comparisons of the models that you serve")
    sides = np.zeros((len(found), len(names)), np.float32)
    for side, line in zip(sides, found, strict=True):
        side[[names.index(line.model_a), names.index(line.model_b)]] = 1, -1
    won = np.array([{"a": 1.0, "b": 0.0, "tie": 0.5}[line.winner] for line in found], np.float32)
    return Comparisons(names, np.stack(rows), sides, won, np.array(held_out))


def _lines(path: Path) -> Iterator[tuple[str, ComparisonLine]]:
    for _, where, fields in json_lines(path, LINE_HINT):
        try:
            yield where, ComparisonLine.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{where}: {validation_error(error).message}", hint=LINE_HINT) from error


def fit(data: Comparisons, l2: float = L2) -> Router:
    """Return the router that explains comparisons best."""

    def margins(weights: Array) -> Array:
        found: Array = ((data.features @ weights.T) * data.sides).sum(1)
        return found

    def spread(residuals: Array) -> Array:
        found: Array = (data.sides * residuals[:, None]).T @ data.features
        return found

    def curved(slope: Array, way: Array) -> Array:
        return spread(slope * margins(way)) + l2 * way

    weights = np.zeros((len(data.names), data.features.shape[1]), np.float32)
    for _ in range(NEWTON_STEPS):
        likely = np.exp(-np.logaddexp(0, -margins(weights)))
        slope = likely * (1 - likely)
        step = solved(partial(curved, slope), spread(likely - data.won) + l2 * weights)
        weights -= step
        if float(np.abs(step).max()) < TOLERANCE:
            break
    return Router(data.names, weights)


def solved(matrix: Callable[[Array], Array], right: Array) -> Array:
    """Return x with ``matrix(x) = right``, by conjugate gradients (Hestenes and Stiefel 1952)."""
    found = np.zeros_like(right)
    left = way = right
    size = first = float((left * left).sum())
    for _ in range(SOLVER_STEPS):
        if size <= TOLERANCE**2 * first:
            break
        image = matrix(way)
        length = size / float((way * image).sum())
        found += length * way
        left = left - length * image
        size, before = float((left * left).sum()), size
        way = left + size / before * way
    return found


def measured(data: Comparisons, speeds: Mapping[str, float] | None = None) -> FitReport:
    """Return how well a router, fitted to the other comparisons, predicts those held out.

    ``speeds``: tokens per second of each model. If None, the model that wins most often costs 1 and
    the others cost 0: the cost of an answer is then the share of that model.
    """
    seen, unseen = data.part(~data.held_out), data.part(data.held_out)
    usual = seen.sides.T @ (seen.won - 0.5)
    if speeds is None:
        speeds = dict.fromkeys(data.names, float("inf")) | {data.names[int(usual.argmax())]: 1.0}
    costs = relative_costs(speeds)
    scores = unseen.features @ fit(seen).weights.T
    is_won = unseen.won != 0.5

    def right(margins: Array) -> float:
        agrees = (margins[is_won] > 0) == (unseen.won[is_won] == 1)
        return round(float(agrees.mean()), 4) if len(agrees) else 0.0

    return FitReport(
        len(data.won),
        len(unseen.won),
        right((scores * unseen.sides).sum(1)),
        right(unseen.sides @ usual),
        costs,
        curve(scores, unseen.sides, unseen.won, np.array([costs[each] for each in data.names])),
    )


def curve(scores: Array, sides: Array, won: Array, costs: Array) -> list[CurvePoint]:
    """Return the points of the price 0, and of ten more prices up to the one at which the cheaper
    model of each comparison answers.

    ``scores``: predicted qualities [rows, models]. ``sides`` and ``won``: as in ``Comparisons``.
    """
    gain, extra = (scores * sides).sum(1), sides @ costs
    # from here on, the first model of each comparison is the dearer one
    turned = np.where(extra < 0, -1, 1)
    gain, extra = gain * turned, extra * turned
    won = np.where(turned > 0, won, 1 - won)
    dear = np.where(sides != 0, costs, -np.inf).max(1)
    limits = gain[(extra > 0) & (gain > 0)] / extra[(extra > 0) & (gain > 0)]
    prices = np.quantile(limits, np.arange(1, POINTS + 1) / POINTS) if len(limits) else []
    least, most = float((dear - extra).mean()), float(dear.mean())
    points = []
    for price in sorted({0.0, *(math.ceil(1000 * each) / 1000 for each in prices)}):
        is_dear = gain > price * extra
        cost = float(np.where(is_dear, dear, dear - extra).mean())
        quality = float(np.where(is_dear, won, 1 - won).mean())
        share = (cost - least) / (most - least) if most > least else 1.0
        mixed = share * float(won.mean()) + (1 - share) * float(1 - won.mean())
        points.append(CurvePoint(price, round(cost, 4), round(quality, 4), round(mixed, 4)))
    return points
