"""A trace shows what happened to each step of an answer on every hop, and hops that lie about it
are replaced."""

import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from swarmnet_client.chain import trace
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_client.chain.trace import HOP_SLICES, MAX_STEPS, StepTimer, Trace, TracedStep, trace_events
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.protocol_ids import SESSION
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session import hop_times
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.hop_times import MAX_S, HopTimes, Moment, decode_times, encode_times
from swarmnet_protocols.session.steps import Row, Step
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, nothing, replacing
from tests.support.attacks.lying_hosts import assert_liar_is_replaced
from tests.support.attacks.switched_off import overlooking
from tests.support.network.memory_network import MemoryStream
from tests.support.network.virtual_time import TimedExecutor
from tests.support.swarm.swarm_lab import Lab, Reference, peer, simulate

SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
PROMPT = [2 + number * 7 % 90 for number in range(600)]
TOKENS = 5
MOST_KEPT = trace.MAX_KEPT
DELAY_US = 10_000
FORWARD_S = 0.02


def traced_chain(lab: Lab, swarm: ModelHosts, trace: Trace) -> Any:
    return Chain(
        swarm, ChainSpec(6, 32, 1024, ElementType.FLOAT32, trace=trace.keep), lab.reference.layers.embed
    ).open()


async def traced(lab: Lab, tokens: int = TOKENS) -> tuple[Trace, list[int]]:
    trace = Trace()
    async with lab.client() as swarm, traced_chain(lab, swarm, trace) as chain:
        answer = await lab.generate(chain, PROMPT, tokens)
    return trace, answer


def traced_answer(reference: Reference) -> Trace:
    async def scenario(lab: Lab) -> Trace:
        for name, span in SPANS.items():
            node = await lab.start(name, lab.hosting(span))
            node.engine._executor = TimedExecutor(FORWARD_S)
        trace, answer = await traced(lab)
        assert answer == reference.greedy(PROMPT, TOKENS)
        return trace

    return simulate(reference, scenario)


def step_of(seq: int, positions: int = 1) -> Step:
    return Step(seq, (Row(0, 0, positions, 1, 0),), np.zeros(positions, np.int64))


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def assert_slices_nest(events: list[dict[str, Any]]) -> None:
    """On one row, a slice lies within the one before it or begins after its end."""
    rows = defaultdict(list)
    for each in slices(events):
        rows[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for row in rows.values():
        around: list[int] = []
        for start, end in row:
            while around and around[-1] <= start:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def test_the_times_of_a_step_on_three_hops_add_up_to_the_answers(
    reference: Reference,
) -> None:
    trace = traced_answer(reference)
    events: list[Any] = trace_events(trace.steps)
    assert_slices_nest(events)
    assert list(names(events)) == [0, 1, 2, 3]
    assert [names(events)[pid].split(" on ")[0] for pid in (1, 2, 3)] == [
        "hop 1: blocks 0:2",
        "hop 2: blocks 2:4",
        "hop 3: blocks 4:6",
    ]

    assert [step.positions for step in trace.steps] == [256, 256, 88, *[1] * (TOKENS - 1)]
    for step in trace.steps:
        sent_s, answered_s = step.client_s[-2:]
        assert len(step.route) == 3
        spent_s = sum(stay.times.stay_s for stay in step.route) + step.travel_s
        assert spent_s == pytest.approx(answered_s - sent_s)

    whole = [each for each in slices(events) if (each["pid"], each["tid"]) == (0, 0)]
    assert sum(each["name"].startswith("trip") for each in whole) == TOKENS
    started_s, ended_s = trace.steps[0].client_s[0], trace.steps[-1].client_s[-1]
    assert sum(each["dur"] for each in whole) == pytest.approx((ended_s - started_s) * 1e6, abs=2)


def test_a_trace_finds_the_delay_of_each_link_and_forward(reference: Reference) -> None:
    trace = traced_answer(reference)
    events: list[Any] = trace_events(trace.steps)
    by_name = defaultdict(list)
    for each in slices(events):
        by_name[each["name"]].append(each["dur"])
    hops = 3 * len(trace.steps)
    assert by_name["travelling here"] == pytest.approx([DELAY_US] * hops, abs=DELAY_US / 20)
    assert by_name["travelling back"] == pytest.approx([DELAY_US] * len(trace.steps), abs=DELAY_US / 20)
    assert len(by_name["computing"]) == hops
    assert min(by_name["computing"]) == pytest.approx(FORWARD_S * 1e6, abs=2)
    assert by_name["waiting"], "chunks of the prompt wait for each other"


def test_a_trace_names_every_part_of_a_step_in_order() -> None:
    hop = Hop("hop", 0, 1)
    trace = Trace()
    timer = StepTimer(1, trace.keep, itertools.count().__next__)
    with timer.step(step_of(1, 7)):
        for moment in (Moment.TAKEN, Moment.EMBEDDED, Moment.ENCODED, Moment.SENT):
            timer.mark(1, moment)
        timer.add_times(b"session", hop, encode_times(HopTimes(1, (0.0, 1.0, 2.0, 3.0, 4.0, 5.0))))
    events: list[Any] = trace_events(trace.steps)
    found = [each["name"] for each in slices(events) if each["pid"] == 1]
    assert found == ["step 1: 7 positions", *HOP_SLICES]


def test_a_session_that_is_not_traced_is_told_no_times(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str | None] = []
    honest = MemoryStream.send

    async def send(self: MemoryStream, message: Message) -> None:
        if self.protocol.id == SESSION.id and self._transport.peer_id != peer("client").peer_id:
            sent.append(pb.SessionReply.FromString(message.header).WhichOneof("kind"))
        await honest(self, message)

    monkeypatch.setattr(MemoryStream, "send", send)

    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await lab.generate(chain, [5, 6, 7], 3)

    simulate(reference, scenario)
    assert "output" in sent
    assert "timed" not in sent


def test_a_trace_goes_on_when_a_hop_dies(reference: Reference) -> None:
    async def scenario(lab: Lab) -> Trace:
        await lab.start_all({**SPANS, "b2": (2, 4)})
        trace = Trace()
        async with lab.client() as swarm, traced_chain(lab, swarm, trace) as chain:

            def strike(number: int) -> None:
                if number == 2:
                    lab.network.crash(chain.report.route[1][0])

            assert await lab.generate(chain, PROMPT, TOKENS, strike) == reference.greedy(PROMPT, TOKENS)
        return trace

    trace = simulate(reference, scenario)
    events: list[Any] = trace_events(trace.steps)
    assert_slices_nest(events)
    assert len(names(events)) == 1 + 4
    assert all(step.route for step in trace.steps)


IMPOSSIBLE = {
    "not a number": (0.0, 0.0, math.nan, 0.0, 0.0, 0.0),
    "infinite": (0.0, 0.0, 0.0, 0.0, 0.0, math.inf),
    "negative": (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "not in order": (0.0, 0.2, 0.1, 0.3, 0.3, 0.3),
    "out of range": (0.0, 0.0, 0.0, 0.0, 0.0, 2 * MAX_S),
}


@defence(
    "times of a hop that cannot be are refused",
    off=replacing(hop_times, "_check", nothing),
    times=IMPOSSIBLE["not a number"],
)
@pytest.mark.parametrize("times", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_times_that_cannot_be_are_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ProtocolViolation):
        decode_times(encode_times(HopTimes(1, times)))


@defence(
    "a hop that says it had a step before that was sent is refused", off=replacing(trace, "SLACK_S", 1e9)
)
def test_a_hop_cannot_have_had_a_step_before_it_was_sent() -> None:
    steps: list[TracedStep] = []
    timer = StepTimer(1, steps.append, lambda: 100.0)

    def told(hop: str, step: int, last_s: float) -> None:
        times = HopTimes(step, (9.0, 9.1, last_s, last_s, last_s, last_s))
        timer.add_times(b"session", Hop(hop, 0, 1), encode_times(times))

    with timer.step(step_of(1)):
        with pytest.raises(ProtocolViolation):
            told("liar", 1, 50.0)
        told("honest", 1, 9.5)
        told("late", 2, 9.5)
    assert [stay.hop.peer for stay in steps[0].stays.values()] == ["honest"]


@defence("the steps of a trace are limited", off=replacing(trace, "MAX_STEPS", 1 << 40))
@defence("few steps wait for the times of hops", off=replacing(trace, "MAX_KEPT", 1 << 40))
def test_a_trace_has_a_limited_number_of_steps() -> None:
    whole = Trace()
    timer = StepTimer(1, whole.keep, lambda: 0.0)
    for seq in range(MAX_STEPS + 5):
        with timer.step(step_of(seq)):
            pass
    assert len(whole.steps) == MAX_STEPS
    assert len(timer._steps) == MOST_KEPT


def test_a_step_that_fails_is_not_kept() -> None:
    whole = Trace()
    timer = StepTimer(1, whole.keep, lambda: 0.0)
    with pytest.raises(TimeoutError), timer.step(step_of(1)):
        raise TimeoutError
    assert not whole.steps
    assert not timer._steps


@defence("a host that tells times unasked is replaced", off=overlooking(ChainSupervisor, "_record_times"))
def test_a_host_that_tells_times_unasked_is_replaced(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = pb.SessionReply(timed=encode_times(HopTimes(1, (0.0,) * 6)))

    def forge(stream: MemoryStream, message: Message) -> Message | None:
        if stream.protocol.id != SESSION.id or stream.peer != peer("client").peer_id:
            return None
        is_news = pb.SessionReply.FromString(message.header).HasField("link_made")
        return Message(timed.SerializeToString()) if is_news else None

    assert_liar_is_replaced(reference, {**SPANS, "a2": (0, 2), "b2": (2, 4)}, forge, monkeypatch)
