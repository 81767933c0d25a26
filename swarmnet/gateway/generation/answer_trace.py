"""The steps of an answer as its stream tells them: the route, and where the time of each went."""

import asyncio
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from swarmnet_client.batching.answers import Answer, AnswerStep
from swarmnet_client.chain.trace import HopStay, TracedStep, clock_offsets, step_parts

LATE_S = 0.3
"""Seconds that the end of a stream waits for times from the hops. More would delay the end when a
host was lost, less would lose the last step over slow links."""
DIGITS = 6


class AnswerTrace:
    """Tells the steps of the answers of one request, each once and in order."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._told: list[int] = []
        self._fastest: dict[tuple[bytes, ...], TracedStep] = {}
        """The step with the shortest travel on each route, by the sessions of its hops."""
        self._route: list[dict[str, Any]] = []

    def add(self, answer: Answer) -> None:
        """Tell the steps of this answer, too."""
        self._answers.append(answer)
        self._told.append(0)

    async def complete(self) -> None:
        """Wait at most ``LATE_S`` for the times of the last steps."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                for answer in self._answers:
                    if answer.steps:
                        await answer.steps[-1].step.told.wait()

    def news(self, *, is_end: bool = False) -> dict[str, Any]:
        """Return the steps that were not told yet, and the route if it changed.

        A step is told when its hops, or those of a later step, have told their times. At the end
        all steps are told.
        """
        steps: list[dict[str, Any]] = []
        route: list[dict[str, Any]] | None = None
        for at, answer in enumerate(self._answers):
            waiting = answer.steps[self._told[at] :]
            known = [number for number, each in enumerate(waiting, 1) if each.step.told.is_set()]
            count = len(waiting) if is_end else max(known, default=0)
            self._told[at] += count
            for each in waiting[:count]:
                stays = each.step.route
                here = [_hop_fields(stay) for stay in stays]
                if here and here != self._route:
                    self._route = route = here
                steps.append(self._fields(each, stays))
        return {**({"route": route} if route else {}), **({"steps": steps} if steps else {})}

    def _fields(self, each: AnswerStep, stays: list[HopStay]) -> dict[str, Any]:
        step = each.step
        sessions = tuple(stay.session for stay in stays)
        fastest = self._fastest.setdefault(sessions, step)
        if step.travel_s < fastest.travel_s:
            fastest = self._fastest[sessions] = step
        parts = step_parts(step, clock_offsets([fastest])[sessions])
        times = _rounded(asdict(parts))
        hops = [_hop_fields(stay) | hop for stay, hop in zip(stays, times["hops"], strict=True)]
        return {"tokens": each.tokens, "positions": step.positions, **times, "hops": hops}


def _hop_fields(stay: HopStay) -> dict[str, Any]:
    return {"peer": str(stay.hop.peer), "start": stay.hop.start, "end": stay.hop.end}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, DIGITS)
