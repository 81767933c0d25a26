"""A host moves where the swarm is short, after two looks; at once where a block has no host; and
never away from a block that needs it."""

import random
from dataclasses import replace

import pytest

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing import relocation
from swarmnet_protocols.routing import throughput as throughput_module
from swarmnet_protocols.routing.model_needs import ServedModel
from swarmnet_protocols.routing.outlook import Outlook
from swarmnet_protocols.routing.relocation import (
    CONFIRM_S,
    GAP_PAUSE_S,
    GAP_WAIT_S,
    PAUSE_S,
    Kind,
    Look,
    Relocation,
    Remembered,
    blocks_to_leave,
    is_confirmed,
    should_relocate,
)
from swarmnet_protocols.routing.throughput import MAX_SPEED, Claim, throughput
from tests.defences import defence, replacing

A, B, C, D = (PeerId(name) for name in "abcd")
BLOCKS = 8
NOTHING = Remembered()
SHORT = [Claim(A, 0, 4), Claim(B, 0, 4), Claim(C, 0, 4), Claim(D, 4, 8)]
"""Blocks 4 to 8 have one host, the other blocks three. One of these three hosts can raise the
throughput from a quarter to a half."""


def look(
    claims: list[Claim], peer: PeerId, memory: Remembered, now: float, seed: int = 0, length: int = 4
) -> tuple[Relocation | None, Remembered]:
    [mine] = [claim for claim in claims if claim.peer == peer and claim.settled]
    seen = Look(model(claims), mine, length)
    return should_relocate(seen, memory, now=now, rng=random.Random(seed))


def model(claims: list[Claim]) -> ServedModel:
    return ServedModel(b"a", "alpha", BLOCKS, 1.0, claims)


def may_leave(claims: list[Claim], mine: Claim, kept: tuple[int, int] = (0, 0)) -> bool:
    seen, move = Look(model(claims), mine, 4), Relocation(Kind.MOVE, *kept, reason="")
    return is_confirmed(seen, move, blocks_to_leave(seen, move, kept=kept))


def moves(
    claims: list[Claim], peer: PeerId, memory: Remembered = NOTHING, seeds: int = 100
) -> list[Relocation]:
    """The moves of 100 hosts, each at its second look, long enough after the first."""
    found = []
    for seed in range(seeds):
        _, seen = look(claims, peer, memory, 0.0, seed)
        move, _ = look(claims, peer, seen, CONFIRM_S, seed)
        if move is not None:
            found.append(move)
    return found


def test_an_idle_host_moves_to_short_blocks_at_its_second_look() -> None:
    move, memory = look(SHORT, A, Remembered(), 0.0)
    assert move is None
    assert memory.shortage is not None
    move, memory = look(SHORT, A, memory, CONFIRM_S - 1)
    assert move is None
    found = moves(SHORT, A)
    assert not any(move.fills_gap for move in found)
    for move in found:
        assert throughput([Claim(A, move.start, move.end), *SHORT[1:]], BLOCKS) > 0.3
    assert "lacks hosts of these blocks" in found[0].reason


def test_between_two_memory_hosts_move_at_most_as_much_as_is_short() -> None:
    for scale in (1, 3):  # few hosts and many
        claims = [Claim(PeerId(f"h{number:03}"), 0, 4) for number in range(50 * scale)]
        claims += [Claim(PeerId(f"i{number:03}"), 4, 8) for number in range(30 * scale)]
        share = len(moves(claims, claims[0].peer, seeds=400)) / 400
        assert 2 < share * 50 <= 10, "a fifth of the first make both halves equal"


def test_few_of_many_hosts_search_for_better_blocks() -> None:
    claims = [Claim(PeerId(f"h{number:03}"), 0, 4) for number in range(100)]
    claims += [Claim(PeerId(f"i{number:03}"), 4, 8) for number in range(80)]
    seen = Look(model(claims), claims[0], 4)
    with pytest.MonkeyPatch.context() as patch:
        searches: list[int] = []
        patch.setattr(relocation, "_target", lambda *_: searches.append(1) or (None, 0.0))
        for seed in range(1000):
            should_relocate(seen, Remembered(), now=0.0, rng=random.Random(seed))
    assert 50 < len(searches) < 200, "one of nine hosts would make both halves equal"


def test_a_sample_without_the_claim_of_a_host_serves_it_as_well() -> None:
    sample = SHORT[1:]
    move, memory = None, Remembered()
    rng = random.Random(0)
    for number in range(100):
        now = number * CONFIRM_S
        move, memory = should_relocate(Look(model(sample), SHORT[0], 4), memory, now=now, rng=rng)
        if move is not None:
            break
    assert move is not None
    assert move.start > 0


def test_a_shortage_that_is_gone_at_the_second_look_is_forgotten() -> None:
    _, memory = look(SHORT, A, Remembered(), 0.0)
    even = [*SHORT[:2], Claim(C, 4, 8), SHORT[3]]
    _, memory = look(even, A, memory, 60.0)
    assert memory == Remembered()


def test_an_announced_move_counts_as_done() -> None:
    assert not moves([*SHORT, Claim(C, 4, 8, settled=False)], A)


def test_a_host_moves_once_an_hour() -> None:
    assert not moves(SHORT, A, Remembered(relocated_at=CONFIRM_S - PAUSE_S + 1))
    assert moves(SHORT, A, Remembered(relocated_at=-PAUSE_S))


def test_the_last_host_of_a_block_stays() -> None:
    claims = [Claim(A, 0, 4, 10.0), Claim(B, 1, 4, 10.0), Claim(C, 1, 4, 10.0), Claim(D, 4, 8)]
    assert not moves(claims, A)
    assert moves(claims, B)


def test_a_host_grows_where_the_swarm_is_short() -> None:
    found = [
        look(SHORT, A, look(SHORT, A, Remembered(), 0.0, seed, 8)[1], CONFIRM_S, seed, 8)[0]
        for seed in range(20)
    ]
    moves = {(move.kind, move.span, move.fills_gap) for move in found if move}
    assert moves == {(Kind.GROW, (0, 8), False)}


def test_the_last_host_of_a_block_grows_without_leaving_it() -> None:
    claims = [Claim(A, 0, 4, 10.0), Claim(B, 1, 4, 10.0), Claim(C, 1, 4, 10.0), Claim(D, 4, 8)]
    for length in (5, 6, 7):
        found = [
            look(claims, A, look(claims, A, Remembered(), 0.0, seed, length)[1], CONFIRM_S, seed, length)[0]
            for seed in range(20)
        ]
        assert {(move.start, move.end) for move in found if move} == {(0, length)}


def test_a_host_with_more_memory_stays_where_the_swarm_gains_nothing() -> None:
    claims = [Claim(A, 0, 4), Claim(B, 4, 8, 0.96)]
    for seed in range(20):
        _, memory = look(claims, A, Remembered(), 0.0, seed, 8)
        assert look(claims, A, memory, CONFIRM_S, seed, 8) == (None, Remembered())


def test_memory_that_is_gone_at_the_second_look_is_not_used() -> None:
    _, memory = look(SHORT, A, Remembered(), 0.0, length=8)
    assert memory.shortage is not None
    assert memory.shortage.what == (0, 8)
    for seed in range(20):
        move, after = look(SHORT, A, memory, CONFIRM_S, seed)
        assert move is None
        assert after.shortage is None or after.shortage.what[1] - after.shortage.what[0] == 4


def test_memory_that_is_free_meanwhile_does_not_begin_the_search_anew() -> None:
    _, memory = look(SHORT, A, Remembered(), 0.0)
    assert any(look(SHORT, A, memory, CONFIRM_S, seed, 8)[0] for seed in range(20))


@pytest.mark.parametrize(
    ("others", "length", "kept"),
    [
        ([Claim(B, 0, 3), Claim(C, 6, 8)], 3, (3, 6)),
        ([Claim(B, 4, 8)], 4, (0, 4)),
        ([Claim(B, 0, 4), Claim(C, 4, 8, 5.0)], 4, (0, 4)),
        ([Claim(B, 0, 4, 5.0), Claim(C, 4, 8)], 4, (4, 8)),
        ([Claim(B, 0, 4), Claim(B, 4, 8, settled=False)], 4, (0, 4)),
        ([Claim(B, 0, 2)], 6, (2, 8)),
    ],
    ids=["the only host of some", "one half", "the slower half", "the other half", "a host that leaves", "all that others lack"],
)  # fmt: skip
def test_a_host_that_must_shrink_drops_the_blocks_least_needed(
    others: list[Claim], length: int, kept: tuple[int, int]
) -> None:
    mine = Claim(A, 0, 8)
    memory = Remembered(relocated_at=0.0)
    move, after = look([mine, *others], A, memory, 1.0, length=length)
    assert move is not None
    assert (move.kind, move.span, move.fills_gap, after) == (Kind.SHRINK, kept, False, memory)
    assert "memory limit" in move.reason


def test_a_host_may_leave_only_blocks_that_it_does_not_keep() -> None:
    claims = [Claim(A, 0, 4), Claim(B, 0, 2)]
    assert not may_leave(claims, claims[0])
    assert may_leave(claims, claims[0], kept=(2, 6))
    assert not may_leave(claims, claims[0], kept=(3, 6))


def test_a_balanced_swarm_is_left_alone() -> None:
    for peer in (A, B):
        assert not moves([Claim(A, 0, 4), Claim(B, 4, 8, 0.96)], peer)


def test_a_spare_host_fills_a_gap_at_once() -> None:
    claims = [Claim(A, 0, 4), Claim(B, 0, 4), Claim(C, 4, 6)]
    found = {
        peer: look(claims, peer, Remembered(), 0.0, length=2 if peer == C else 4)[0] for peer in (A, B, C)
    }
    [move] = [move for move in found.values() if move]
    assert (move.kind, move.span, move.fills_gap) == (Kind.MOVE, (4, 8), True)
    assert "no host has 2 of these blocks" in move.reason


def test_hosts_shift_towards_a_gap_if_none_can_be_spared() -> None:
    claims = [Claim(A, 2, 5), Claim(B, 4, 7), Claim(C, 5, 8)]
    found = {peer: look(claims, peer, Remembered(), 0.0, length=3)[0] for peer in (A, B, C)}
    after = [
        replace(claim, start=move.start, end=move.end) if (move := found[claim.peer]) else claim
        for claim in claims
    ]
    assert throughput(after, BLOCKS) > 0
    assert found[C] is None, "the fewest hosts move"


def test_a_host_whose_owner_named_its_blocks_is_not_part_of_the_plan() -> None:
    claims = [Claim(A, 0, 4), Claim(B, 0, 4, may_move=False), Claim(C, 4, 6)]
    assert set(Outlook(claims, blocks=BLOCKS).repairs) == {A}


def test_a_host_with_more_memory_grows_over_a_gap_beside_it() -> None:
    move, _ = look([Claim(A, 0, 5), Claim(B, 0, 3)], A, Remembered(), 0.0, length=8)
    assert move is not None
    assert (move.kind, move.span, move.fills_gap) == (Kind.GROW, (0, 8), True)


def test_other_hosts_fill_a_gap_if_those_of_the_plan_do_not() -> None:
    claims = [Claim(A, 0, 4), Claim(B, 0, 4), Claim(C, 4, 6)]
    [idle] = {A, B} - set(Outlook(claims, blocks=BLOCKS).repairs)
    memory = Remembered(gap_since=0.0)
    assert not any(look(claims, idle, memory, GAP_WAIT_S - 1, seed)[0] for seed in range(20))
    assert any(look(claims, idle, memory, GAP_WAIT_S, seed)[0] for seed in range(20))
    assert not any(look(claims, C, memory, GAP_WAIT_S, seed, length=2)[0] for seed in range(20)), (
        "the last host of its blocks"
    )


def test_a_host_fills_gaps_one_after_another() -> None:
    claims = [Claim(A, 0, 4), Claim(C, 0, 4, may_move=False)]
    assert look(claims, A, Remembered(relocated_at=0.0), GAP_PAUSE_S - 1)[0] is None
    move, memory = look(claims, A, Remembered(relocated_at=0.0), GAP_PAUSE_S)
    assert move is not None
    assert memory.relocated_at == GAP_PAUSE_S


def test_of_two_hosts_that_leave_a_block_at_once_one_waits() -> None:
    claims = [Claim(A, 0, 4), Claim(B, 0, 4), Claim(A, 4, 8, settled=False), Claim(B, 4, 8, settled=False)]
    assert may_leave(claims, claims[0])
    assert not may_leave(claims, claims[1])


def test_a_host_that_still_loads_its_blocks_lets_no_other_leave_them() -> None:
    assert not may_leave([Claim(A, 0, 4), Claim(B, 0, 4, settled=False)], Claim(A, 0, 4))


@defence(
    "an announced speed moves few hosts", off=replacing(throughput_module, "MAX_SPEED", 1e9), announced=1e9
)
@pytest.mark.parametrize("announced", [MAX_SPEED, 1e9])
def test_an_announced_speed_counts_as_ten_medians_at_most(announced: float) -> None:
    claims = [Claim(PeerId(f"h{number}"), 0, 4) for number in range(8)] + [Claim(D, 4, 8, announced)]
    assert Outlook(claims, blocks=BLOCKS).supply.mean == (8 + MAX_SPEED) / BLOCKS


@defence(
    "the fastest claims count as fast as the others",
    off=replacing(throughput_module, "FASTEST", 0.0),
    liars=2,
)
@pytest.mark.parametrize("liars", [1, 2])
def test_the_fastest_tenth_of_the_claims_counts_as_fast_as_the_others(liars: int) -> None:
    claims = [Claim(PeerId(f"h{number}"), 0, 4) for number in range(20 - liars)]
    claims += [Claim(D, 4, 8, MAX_SPEED) for _ in range(liars)]
    assert Outlook(claims, blocks=BLOCKS).supply.mean == 20 / BLOCKS
