"""The activation log against a model that keeps every sequence whole: the log rebuilds any hop, and
feeds any surviving hop."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnet_protocols.session.activation_log import ActivationLog, Cursor, StepsCompacted
from swarmnet_protocols.session.steps import Row, Step, check_rows
from tests.support.swarm.logs import a_log

SEQUENCES = 3
REPLAY_POSITIONS = 5
Sequences = dict[int, list[int]]


@pytest.fixture(scope="module", autouse=True)
def short_replays() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnet_protocols.session.activation_log.REPLAY_POSITIONS", REPLAY_POSITIONS)
        yield


def apply(sequences: Sequences, step: Step) -> None:
    """A model of a hop's activation log, with lists."""
    before = {sequence: list(values) for sequence, values in sequences.items()}
    for row, values in zip(step.rows, step.split(), strict=True):
        sequences[row.sequence] = (
            before.get(row.source, [])[: row.start] + values[:, 0].astype(np.int64).tolist()
        )


@dataclass
class Downstream:
    """A hop fed from a log: refuses what a host would refuse."""

    sequences: Sequences = field(default_factory=dict)
    log: ActivationLog = field(default_factory=a_log)
    seqs: list[int] = field(default_factory=list)

    def take(self, step: Step) -> None:
        check_rows(step.rows, {sequence: len(values) for sequence, values in self.sequences.items()})
        self.log.append(step)
        if not step.replay:
            self.seqs.append(step.seq)
        apply(self.sequences, step)


@st.composite
def rows(draw: st.DrawFn, sequences: Sequences) -> tuple[Row, ...]:
    chosen = draw(st.lists(st.integers(0, SEQUENCES - 1), min_size=1, max_size=SEQUENCES, unique=True))
    found = []
    for sequence in chosen:
        source = draw(st.sampled_from([sequence, *range(SEQUENCES)]))
        held = len(sequences.get(source, []))
        start = draw(st.sampled_from([held, held, draw(st.integers(0, held))]))
        rewrite = source != sequence or start < held
        found.append(
            Row(sequence, start, draw(st.sampled_from([1, 2, REPLAY_POSITIONS + 1])), 0, source, rewrite)
        )
    return tuple(found)


def numbers() -> Iterator[int]:
    yield from range(1, 1 << 30)


@settings(max_examples=120)
@given(st.data())
def test_any_hop_can_be_rebuilt_from_the_log(data: st.DataObject) -> None:
    """Steps are appended, sent, acknowledged, sequences forgotten, and links broken, in any order;
    hops start fresh or survive."""
    log = a_log()
    truth: Sequences = {}
    number = numbers()
    hop, cursor = Downstream(), log.attach(0)
    acked = 0
    for _ in range(data.draw(st.integers(1, 14))):
        match data.draw(st.sampled_from(["step", "step", "step", "send", "ack", "relink", "replace"])):
            case "step":
                chosen = data.draw(rows(truth))
                values = [[float(next(number) % 65536)] for row in chosen for _ in range(row.count)]
                step = Step(log.last + 1, chosen, np.array(values), acked)
                log.append(step)
                apply(truth, step)
            case "send":
                if (step_out := log.next(cursor)) is not None:
                    hop.take(step_out)
            case "ack":
                # The client holds what came through the hop.
                acked = max(acked, data.draw(st.integers(0, hop.log.last)))
                log.acknowledge(acked)
            case "relink":
                log.detach(cursor)
                if hop.log.last == 0:
                    hop = Downstream()
                cursor = log.attach(hop.log.last)
            case "replace":
                log.detach(cursor)
                needed = data.draw(st.sets(st.sampled_from(sorted(truth)))) if truth else set()
                log.retain(needed)
                assert log.lengths.keys() >= needed
                truth = {number: held for number, held in truth.items() if number in log.lengths}
                hop, cursor = Downstream(), log.attach(0)
    while (step_out := log.next(cursor)) is not None:
        hop.take(step_out)
    assert {number: hop.sequences[number] for number in truth} == truth
    assert hop.log.last == log.last
    assert dict(log.lengths) == {sequence: len(values) for sequence, values in truth.items()}
    assert hop.seqs == sorted(set(hop.seqs)), "a step was computed twice"


@settings(max_examples=120)
@given(st.data())
def test_a_replacement_sends_the_survivor_exactly_the_missing_steps(
    data: st.DataObject,
) -> None:
    """upstream -> middle -> survivor: the middle is replaced at any moment, even during a
    replay."""
    upstream, truth, number = a_log(), {}, numbers()
    survivor = Downstream()
    acked = 0

    def new_middle() -> tuple[Downstream, Cursor, Cursor]:
        nonlocal survivor
        if survivor.log.last == 0:
            survivor = Downstream()  # a replay that was broken off is forgotten
        middle = Downstream()
        return middle, upstream.attach(0), middle.log.attach(survivor.log.last)

    middle, to_middle, to_survivor = new_middle()

    def pass_on() -> bool:
        nonlocal survivor, to_survivor
        try:
            step = middle.log.next(to_survivor)
        except StepsCompacted:
            # Only a survivor that was itself being rebuilt may be behind: what is acknowledged has
            # passed through it.
            assert survivor.log.last < acked
            middle.log.detach(to_survivor)
            survivor = Downstream()
            to_survivor = middle.log.attach(0)
            return True
        if step is not None:
            survivor.take(step)
        return step is not None

    for _ in range(data.draw(st.integers(1, 20))):
        match data.draw(
            st.sampled_from(["step", "step", "feed", "feed", "pass on", "ack", "replace", "lose last"])
        ):
            case "step":
                chosen = data.draw(rows(truth))
                values = [[float(next(number) % 65536)] for row in chosen for _ in range(row.count)]
                step = Step(upstream.last + 1, chosen, np.array(values), acked)
                upstream.append(step)
                apply(truth, step)
            case "feed":
                if (fed := upstream.next(to_middle)) is not None:
                    middle.take(fed)
            case "pass on":
                pass_on()
            case "ack":
                acked = max(acked, data.draw(st.integers(0, survivor.log.last)))
                upstream.acknowledge(acked)
            case "replace":
                upstream.detach(to_middle)
                try:
                    middle, to_middle, to_survivor = new_middle()
                except StepsCompacted:
                    survivor = Downstream()
                    middle, to_middle, to_survivor = new_middle()
            case "lose last":
                middle.log.detach(to_survivor)
                survivor = Downstream()
                to_survivor = middle.log.attach(0)
    while (fed := upstream.next(to_middle)) is not None:
        middle.take(fed)
    while pass_on():
        pass
    assert middle.sequences == truth
    assert survivor.sequences == truth
    assert survivor.seqs == sorted(set(survivor.seqs)), "the survivor computed a step twice"
