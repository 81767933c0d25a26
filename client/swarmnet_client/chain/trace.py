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
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.hop_times import HopTimes, Moment, decode_times
from swarmnet_protocols.wire import session_pb2 as pb

MAX_STEPS = 20_000
"""Most steps of one trace; later ones are left out."""
MAX_KEPT = 256
"""Newest steps that wait for times of hops, in a trace of answers. More would hold memory for hops
that never tell them; fewer would lose times of hops that are slow to tell them."""
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
    sequences: tuple[int, ...] = ()
    """The sequences of the chain that the step continues."""
    marked: dict[Moment, float] = field(default_factory=dict)
    """Times on the client's clock."""
    stays: dict[int, HopStay] = field(default_factory=dict)
    """First block of a hop → times on that hop's clock."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all hops have told their times."""

    @property
    def is_answered(self) -> bool:
        return all(moment in self.marked for moment in CLIENT_MOMENTS)

    @property
    def client_s(self) -> list[float]:
        """Return the client's times in order.

        Outputs may arrive before the client notes that the step was sent. Then both have the same
        time.
        """
        return sorted(min(self.marked[moment], self.marked[Moment.ANSWERED]) for moment in CLIENT_MOMENTS)

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


class Trace:
    """Records the steps of one answer. Its chain asks the hops for their times.

    With ``of_answers``, it records those of all answers of one chain: each answer takes its own
    steps (``take``), and the trace keeps no other.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, of_answers: bool = False) -> None:
        """``clock`` returns seconds."""
        self.trips: list[tuple[float, float]] = []
        """The beginning and the end of each trip around the chain."""
        self.steps: list[TracedStep] = []
        self._clock = clock
        self._of_answers = of_answers
        self._blocks = 0
        self._by_seq: dict[int, TracedStep] = {}
        self._told = asyncio.Event()

    def begin_chain(self, blocks: int) -> None:
        """Record the steps of another chain, of ``blocks`` blocks, from now on."""
        self._blocks = blocks
        self._by_seq = {}

    @contextlib.contextmanager
    def trip(self) -> Iterator[None]:
        """Record a trip around the chain, which lasts while the context is open."""
        started_s = self._clock()
        yield
        if not self._of_answers:
            self.trips.append((started_s, self._clock()))

    def asked(self, seq: int, positions: int, sequences: tuple[int, ...] = ()) -> None:
        """Begin a step that the client is about to send."""
        if len(self.steps) < MAX_STEPS:
            step = self._by_seq[seq] = TracedStep(seq, positions, self._blocks, sequences)
            self.steps.append(step)
            self.mark(seq, Moment.ASKED)
        if self._of_answers and len(self._by_seq) > MAX_KEPT:
            del self._by_seq[next(iter(self._by_seq))]

    def take(self, sequences: Collection[int]) -> list[TracedStep]:
        """Return and forget the answered steps of ``sequences``. Their hops may tell their times
        later. Without ``of_answers``, all steps stay."""
        if not self._of_answers:
            return []
        found = [
            step for step in self.steps if step.is_answered and not set(sequences).isdisjoint(step.sequences)
        ]
        self.steps = [step for step in self.steps if step not in found]
        return found

    def mark(self, seq: int, moment: Moment) -> None:
        """Record that ``moment`` is now. If a step is sent again, its first times stay."""
        if seq in self._by_seq:
            self._by_seq[seq].marked.setdefault(moment, self._clock())

    def add_times(self, session: bytes, hop: Hop, message: pb.Timed) -> None:
        """Add the times that a hop reported. Raises ``ProtocolViolation`` for impossible times."""
        times = decode_times(message)
        step = self._by_seq.get(times.step)
        if step is None:
            return
        if times.stay_s > self._clock() - step.marked[Moment.ASKED] + SLACK_S:
            raise ProtocolViolation("a hop reports that it had a step longer ago than it was sent")
        step.stays[hop.start] = HopStay(session, hop, times)
        if step.route:
            step.told.set()
        self._told.set()

    async def complete(self) -> None:
        """Wait at most ``LATE_S`` for the times that hops of the present chain have yet to send."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                while any(step.is_answered and not step.route for step in self._by_seq.values()):
                    self._told.clear()
                    await self._told.wait()

    def write(self, file: TextIO) -> None:
        """Write the recorded steps."""
        events = trace_events(self.trips, self.steps)
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


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


def trace_events(
    trips: Sequence[tuple[float, float]], steps: Sequence[TracedStep]
) -> list[dict[str, object]]:
    """Make trace events. The client and each hop are a process, with rows of slices that do not
    overlap."""
    answered = [step for step in steps if step.is_answered]
    offsets = clock_offsets(answered)
    client = [_client_slices(step, offsets) for step in answered]
    hops: dict[bytes, tuple[Hop, list[list[Slice]]]] = {}
    for step in answered:
        route = step.route
        at_s = step.client_s[-2]
        for stay in route:
            offset_s = offsets[tuple(each.session for each in route)][stay.session]
            slices = _hop_slices(step, stay, at_s, offset_s)
            hops.setdefault(stay.session, (stay.hop, []))[1].append(slices)
            at_s = stay.times.at_s[-1] + offset_s
    origin_s = min((started_s for started_s, _ in trips), default=0.0)
    events = _process(0, "client", [("answer", _answer_slices(trips)), *_rows(client)], origin_s)
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
    """Where the time of a step went on one hop, and on the wire to it, in seconds."""

    wire_s: float
    wait_s: float
    compute_s: float
    send_s: float


@dataclass(frozen=True)
class StepParts:
    """Where the time of a step went, in seconds. ``hops`` is empty unless all hops told their
    times.

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


def _answer_slices(trips: Sequence[tuple[float, float]]) -> list[Slice]:
    """Return the trips, and what the client did between them."""
    slices = [Slice("trip around the chain", *trip) for trip in sorted(trips)]
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
