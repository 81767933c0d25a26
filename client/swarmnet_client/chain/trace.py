"""Traces of the steps of an answer, at the client and on every hop, for Perfetto and Chrome.

Each hop reports times of its own clock (``session/hop_times.py``). The client places them between
sending a step and receiving its outputs:

1. Take the fastest step, and the time in it that no hop accounts for.
2. Divide that time equally among the paths between the peers. This gives the offset of each clock.
3. The travel times of all other steps follow from the offsets.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.hop_times import HopTimes, Moment, decode_times
from swarmnet_protocols.session.steps import Step
from swarmnet_protocols.wire import session_pb2 as pb

MAX_STEPS = 20_000
"""Most steps of one trace; later ones are left out."""
MAX_KEPT = 256
"""Newest answered steps of a chain whose hops may still tell their times. More would hold memory
for hops that never do. Fewer would lose times of slow hops."""
LATE_S = 1.0
"""Seconds that a client waits at the end of an answer for times that hops have yet to send."""
SLACK_S = 1.0
"""Seconds by which a hop's report may exceed the time that the client waited. Clocks do not run
equally fast."""
CLIENT_MOMENTS = (
    Moment.ASKED,
    Moment.TAKEN,
    Moment.EMBEDDED,
    Moment.ENCODED,
    Moment.SENT,
    Moment.ANSWERED,
)
CLIENT_SLICES = ("waiting for the chain", "embedding", "encoding", "sending", "in the chain")
HOP_SLICES = ("waiting", "computing", "waiting to be sent", "encoding", "sending")


@dataclass(frozen=True)
class HopStay:
    """A step on one hop, by the hop's own clock."""

    session: bytes
    hop: Hop
    times: HopTimes


@dataclass(eq=False)
class TracedStep:
    """A step of a chain of ``blocks`` blocks."""

    seq: int
    positions: int
    blocks: int
    sequences: frozenset[int]
    """The sequences of the chain that the step continues."""
    marked: dict[Moment, float] = field(default_factory=dict)
    """Times on the client's clock."""
    stays: dict[int, HopStay] = field(default_factory=dict)
    """First block of a hop → times on that hop's clock."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all hops have told their times."""

    @property
    def is_answered(self) -> bool:
        return Moment.ANSWERED in self.marked

    @property
    def client_s(self) -> list[float]:
        """Return the client's times in order, once the step is answered.

        Outputs may arrive before the client notes that the step was sent. Then both have the same
        time.
        """
        end_s = self.marked[Moment.ANSWERED]
        return sorted(min(self.marked.get(moment, end_s), end_s) for moment in CLIENT_MOMENTS)

    @property
    def route(self) -> list[HopStay]:
        """Return the hops in order; empty unless all of them reported their times."""
        stays = [self.stays[start] for start in sorted(self.stays)]
        edges = [0, *(stay.hop.end for stay in stays)]
        is_whole = edges[-1] == self.blocks and [stay.hop.start for stay in stays] == edges[:-1]
        return stays if is_whole else []

    @property
    def travel_s(self) -> float:
        """Seconds between the peers: the time that no hop accounts for."""
        *_, sent_s, answered_s = self.client_s
        return answered_s - sent_s - sum(stay.times.stay_s for stay in self.route)


class Slice(NamedTuple):
    """An activity from ``start_s`` to ``end_s``."""

    name: str
    start_s: float
    end_s: float


KeepStep = Callable[[TracedStep], object]
"""Takes each step of a chain when its outputs have come."""


class StepTimer:
    """Records the times of the steps of one chain. The hops tell it their own times."""

    def __init__(self, blocks: int, keep: KeepStep, clock: Callable[[], float]) -> None:
        """``keep`` gets each answered step. Hops may tell their times later. ``clock`` returns
        seconds."""
        self._blocks = blocks
        self._keep = keep
        self._clock = clock
        self._steps: dict[int, TracedStep] = {}
        self._told = asyncio.Event()

    @contextlib.contextmanager
    def step(self, sent: Step) -> Iterator[None]:
        """Record a step. The context lasts from before it is sent until its outputs have come.

        If the context ends with an error, the step is forgotten.
        """
        sequences = frozenset(row.sequence for row in sent.rows)
        step = self._steps[sent.seq] = TracedStep(sent.seq, sent.positions, self._blocks, sequences)
        self.mark(sent.seq, Moment.ASKED)
        try:
            yield
        except BaseException:  # unanswered, the step would keep all later ones in memory
            del self._steps[sent.seq]
            raise
        self.mark(sent.seq, Moment.ANSWERED)
        self._keep(step)
        while len(self._steps) > MAX_KEPT and (oldest := next(iter(self._steps.values()))).is_answered:
            del self._steps[oldest.seq]

    def mark(self, seq: int, moment: Moment) -> None:
        """Record that ``moment`` is now. If a step is sent again, its first times stay."""
        if seq in self._steps:
            self._steps[seq].marked.setdefault(moment, self._clock())

    def add_times(self, session: bytes, hop: Hop, message: pb.Timed) -> None:
        """Add the times that a hop reported. Raises ``ProtocolViolation`` for impossible times."""
        times = decode_times(message)
        step = self._steps.get(times.step)
        if step is None:
            return
        if times.stay_s > self._clock() - step.marked[Moment.ASKED] + SLACK_S:
            raise ProtocolViolation("a hop reports that it had a step longer ago than it was sent")
        step.stays[hop.start] = HopStay(session, hop, times)
        if step.route:
            step.told.set()
        self._told.set()

    async def complete(self) -> None:
        """Wait at most ``LATE_S`` for the times that hops have yet to send."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                while any(step.is_answered and not step.route for step in self._steps.values()):
                    self._told.clear()
                    await self._told.wait()


class Trace:
    """The steps of a command on all its chains, for a file: the first ``MAX_STEPS``."""

    def __init__(self) -> None:
        self.steps: list[TracedStep] = []

    def keep(self, step: TracedStep) -> None:
        """Add a step, if the trace has room."""
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)

    def write(self, file: TextIO) -> None:
        """Write the recorded steps."""
        json.dump({"traceEvents": trace_events(self.steps), "displayTimeUnit": "ms"}, file)


@contextlib.contextmanager
def tracing(path: str | Path) -> Iterator[Trace]:
    """Yield a trace, and write it to a file when the context ends. Raises ``OSError`` if the file
    cannot be written."""
    trace = Trace()
    with open(path, "w", encoding="utf-8") as file:  # before the work, which may be long
        try:
            yield trace
        finally:
            trace.write(file)


def trace_events(steps: Sequence[TracedStep]) -> list[dict[str, object]]:
    """Make trace events of answered steps. The client and each hop are a process, with rows of
    slices that do not overlap."""
    offsets = clock_offsets(steps)
    client = [_client_slices(step, offsets) for step in steps]
    hops: dict[bytes, tuple[Hop, list[list[Slice]]]] = {}
    for step in steps:
        route = step.route
        at_s = step.client_s[-2]
        for stay in route:
            offset_s = offsets[tuple(each.session for each in route)][stay.session]
            slices = _hop_slices(step, stay, at_s, offset_s)
            hops.setdefault(stay.session, (stay.hop, []))[1].append(slices)
            at_s = stay.times.at_s[-1] + offset_s
    origin_s = min((step.client_s[0] for step in steps), default=0.0)
    events = _process(0, "client", [("answer", _answer_slices(steps)), *_rows(client)], origin_s)
    by_block = sorted(hops.values(), key=lambda each: each[0].start)
    for number, (hop, groups) in enumerate(by_block, start=1):
        name = f"hop {number}: blocks {hop.start}:{hop.end} on {hop.peer}"
        events += _process(number, name, _rows(groups), origin_s)
    return events


def clock_offsets(steps: Iterable[TracedStep]) -> dict[tuple[bytes, ...], dict[bytes, float]]:
    """Return the offset of each hop's clock on each route: seconds to add to its times to get the
    client's. The keys are the sessions of the route, then the session of the hop."""
    by_route: dict[tuple[bytes, ...], list[TracedStep]] = {}
    for step in steps:
        by_route.setdefault(tuple(stay.session for stay in step.route), []).append(step)
    offsets: dict[tuple[bytes, ...], dict[bytes, float]] = {}
    for sessions, alike in by_route.items():
        fastest = min(alike, key=lambda step: step.travel_s)
        way_s = fastest.travel_s / (len(sessions) + 1)
        at_s = fastest.client_s[-2]
        offsets[sessions] = {}
        for stay in fastest.route:
            at_s += way_s
            offsets[sessions][stay.session] = at_s - stay.times.at_s[0]
            at_s += stay.times.stay_s
    return offsets


@dataclass(frozen=True)
class HopParts:
    """The seconds of a step on one hop, and on the wire to it."""

    wire_s: float
    wait_s: float
    compute_s: float
    send_s: float


@dataclass(frozen=True)
class StepParts:
    """The parts of a step's time, in seconds. ``hops`` is empty unless all hops told their times.

    - ``here_s``: at the client, before the step was sent.
    - ``back_s``: on the wire from the last hop.
    """

    took_s: float
    here_s: float
    back_s: float
    hops: tuple[HopParts, ...]


def step_parts(step: TracedStep, offsets: Mapping[bytes, float]) -> StepParts:
    """Return where the time of an answered step went. ``offsets``: of the clocks of its hops, as
    ``clock_offsets`` returns them."""
    at_s = step.client_s
    here_s, left_s = at_s[-2] - at_s[0], at_s[-2]
    hops = []
    for stay in step.route:
        received_s, started_s, computed_s, taken_s, _, sent_s = (
            each + offsets[stay.session] for each in stay.times.at_s
        )
        wait_s = started_s - received_s + taken_s - computed_s
        hops.append(HopParts(max(0.0, received_s - left_s), wait_s, computed_s - started_s, sent_s - taken_s))
        left_s = sent_s
    return StepParts(at_s[-1] - at_s[0], here_s, max(0.0, at_s[-1] - left_s), tuple(hops))


def _answer_slices(steps: Sequence[TracedStep]) -> list[Slice]:
    """Return the trips, and what the client did between them. Steps of one trip overlap."""
    slices: list[Slice] = []
    for start_s, *_, end_s in sorted(step.client_s for step in steps):
        if slices and start_s < slices[-1].end_s:
            slices[-1] = slices[-1]._replace(end_s=max(end_s, slices[-1].end_s))
        else:
            slices.append(Slice("trip around the chain", start_s, end_s))
    gaps = [
        Slice("final norm, lm_head and sampling", one.end_s, other.start_s) for one, other in pairwise(slices)
    ]
    return sorted([*slices, *gaps], key=lambda each: each.start_s)


def _client_slices(
    step: TracedStep, offsets: Mapping[tuple[bytes, ...], Mapping[bytes, float]]
) -> list[Slice]:
    at_s = step.client_s
    slices = [_whole(step, at_s[0], at_s[-1])]
    slices += [Slice(name, *edges) for name, edges in zip(CLIENT_SLICES, pairwise(at_s), strict=True)]
    route = step.route
    if route:
        last = route[-1]
        left_s = last.times.at_s[-1] + offsets[tuple(each.session for each in route)][last.session]
        slices.append(Slice("travelling back", max(left_s, at_s[-2]), at_s[-1]))
    return slices


def _hop_slices(step: TracedStep, stay: HopStay, sent_s: float, offset_s: float) -> list[Slice]:
    """Return the slices of ``step`` on one hop. ``sent_s``: when the upstream hop or the client had
    sent the step."""
    at_s = [each + offset_s for each in stay.times.at_s]
    slices = [Slice("travelling here", sent_s, at_s[0]), _whole(step, at_s[0], at_s[-1])]
    slices += [Slice(name, *edges) for name, edges in zip(HOP_SLICES, pairwise(at_s), strict=True)]
    return slices


def _whole(step: TracedStep, start_s: float, end_s: float) -> Slice:
    noun = "position" if step.positions == 1 else "positions"
    return Slice(f"step {step.seq}: {step.positions} {noun}", start_s, end_s)


def _rows(groups: Iterable[Sequence[Slice]]) -> list[tuple[str, list[Slice]]]:
    """Put groups of slices into rows without overlap. A group goes to the first row free at its
    start.
    """
    rows: list[list[Slice]] = []
    ends_s: list[float] = []
    for group in sorted(groups, key=lambda each: min(one.start_s for one in each)):
        start_s, end_s = min(each.start_s for each in group), max(each.end_s for each in group)
        free = next((row for row, row_end_s in enumerate(ends_s) if row_end_s <= start_s), None)
        if free is None:
            rows.append([*group])
            ends_s.append(end_s)
        else:
            rows[free] += group
            ends_s[free] = end_s
    return [("steps", slices) for slices in rows]


def _process(
    pid: int, name: str, rows: Sequence[tuple[str, Sequence[Slice]]], origin_s: float
) -> list[dict[str, object]]:
    def micros(at_s: float) -> int:
        return round((at_s - origin_s) * 1e6)

    events: list[dict[str, object]] = [_named("process_name", pid, 0, name)]
    for tid, (title, slices) in enumerate(rows):
        events.append(_named("thread_name", pid, tid, title))
        for each in slices:
            start, end = micros(each.start_s), micros(each.end_s)
            if end > start:
                events.append(
                    {"ph": "X", "name": each.name, "pid": pid, "tid": tid, "ts": start, "dur": end - start}
                )
    return events


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
