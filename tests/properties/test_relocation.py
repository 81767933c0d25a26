"""Moves never lower the throughput, never leave a block without a host, and fill every gap that the
hosts can fill."""

import random
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.relocation import CONFIRM_S, Look, Remembered, should_relocate
from swarmnet_protocols.routing.throughput import ROUNDING, Claim, holders, throughput

BLOCKS = 12


@st.composite
def claims(draw: st.DrawFn) -> list[Claim]:
    found = []
    for index in range(draw(st.integers(1, 8))):
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, BLOCKS))
        found.append(Claim(PeerId(f"h{index}"), start, end, draw(st.sampled_from([0.1, 1.0, 1.5, 8.0]))))
    return found


@given(claims())
def test_the_plan_fills_every_gap_that_the_hosts_can_fill(found: list[Claim]) -> None:
    outlook = Outlook(found, blocks=BLOCKS)
    assume(outlook.gaps)
    placed = {claim.peer: claim for claim in found} | outlook.repairs
    assert all(
        claim.end - claim.start == placed[claim.peer].end - placed[claim.peer].start for claim in found
    )
    left = holders(placed.values(), BLOCKS).count(0)
    if sum(claim.end - claim.start for claim in found) >= BLOCKS:
        assert left == 0
    assert left <= len(outlook.gaps)


@given(claims(), st.integers(), st.data())
def test_a_move_lowers_no_throughput_and_opens_no_gap(
    found: list[Claim], seed: int, data: st.DataObject
) -> None:
    found.append(Claim(PeerId("all"), 0, BLOCKS, 0.1))
    model = ServedModel(b"a", "alpha", BLOCKS, 1.0, found)
    mine = data.draw(st.sampled_from(found))
    length = data.draw(st.integers(mine.end - mine.start, BLOCKS))
    look = Look(model, mine, length)
    rng, memory, now, move = random.Random(seed), Remembered(), 0.0, None
    while move is None and now < 60 * CONFIRM_S:
        move, memory = should_relocate(look, memory, now=now, rng=rng)
        now += CONFIRM_S
    if move is None:
        return
    assert not move.fills_gap
    assert move.end - move.start == length
    after = [replace(claim, start=move.start, end=move.end) if claim is mine else claim for claim in found]
    assert throughput(after, BLOCKS) >= throughput(found, BLOCKS) * (1 - 2 * ROUNDING)
    assert all(holders(after, BLOCKS))
