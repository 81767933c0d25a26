"""Receipts of microbatches, and what two honest answers may differ by."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.training.codecs.boundary import BOUNDARY_CODECS
from swarmnet_protocols.training.pipeline import microbatches
from swarmnet_protocols.training.pipeline.audits import (
    AUDITED,
    AUDITED_ROUNDS,
    Accusations,
    AuditDraws,
    Tolerance,
    is_odd,
    stretch,
)
from swarmnet_protocols.training.pipeline.microbatches import Microbatch, MicrobatchId
from swarmnet_protocols.training.pipeline.receipts import (
    Receipt,
    receipts_from_wire,
    receipts_to_wire,
    tensor_hash,
)
from tests.defences import Patch, defence

JOB = bytes(range(32))
ORIGIN, *WORKERS = (Identity.from_seed(bytes([number])) for number in range(4))
CHAIN = Microbatch(MicrobatchId(7, ORIGIN.peer_id, 3), 1, tuple(each.peer_id for each in WORKERS))
TENSORS = [bytes([number]) * 8 for number in range(4)]
"""The outputs of stages 0 to 3."""
GRADIENTS = [bytes([100 + number]) * 8 for number in range(4)]


def receipts(**changes: bytes | int) -> list[Receipt]:
    """The receipts of the chain. ``changes``: in the second worker's, before it signs."""
    found = []
    for stage, worker in enumerate(WORKERS, 1):
        tensors = (TENSORS[stage - 1], TENSORS[stage], GRADIENTS[stage], GRADIENTS[stage - 1])
        inputs, outputs, grad_outputs, grad_inputs = map(tensor_hash, tensors)
        receipt = Receipt(bytes(32), inputs, outputs, grad_outputs, grad_inputs, 24)
        receipt = replace(receipt, **changes) if stage == 2 else receipt  # type: ignore[arg-type]
        signed = receipt.signed_bytes(replace(CHAIN, stage=stage).subject(JOB))
        found.append(replace(receipt, signature=worker.sign(signed)))
    return found


def test_receipts_of_an_honest_chain_agree() -> None:
    sent = receipts_from_wire(receipts_to_wire(receipts()), 3)
    CHAIN.check_receipts(sent, JOB, TENSORS[0], GRADIENTS[0])
    CHAIN.onward().check_receipts(sent[1:], JOB, TENSORS[1], GRADIENTS[1])


def check_nothing(patch: Patch) -> None:
    patch.setattr(microbatches, "check_receipts", lambda *_, **__: None)


OTHER = tensor_hash(b"other")


@defence("a worker says of its neighbours' tensors only what they say", off=check_nothing)
@pytest.mark.parametrize("field", ["inputs", "outputs", "grad_outputs", "grad_inputs"])
def test_receipts_that_disagree_are_refused(field: str) -> None:
    with pytest.raises(ProtocolViolation, match="other tensors"):
        CHAIN.check_receipts(receipts(**{field: OTHER}), JOB, TENSORS[0], GRADIENTS[0])


@defence("nobody signs for another worker, microbatch or state", off=check_nothing)
@pytest.mark.parametrize("change", [{"state": OTHER}, {"bits": 8}, {"signature": bytes(64)}], ids=str)
def test_a_receipt_without_a_signature_is_refused(change: dict[str, bytes]) -> None:
    first, second, third = receipts()
    with pytest.raises(ProtocolViolation, match="signed"):
        CHAIN.check_receipts(
            [first, replace(second, **change), third],  # type: ignore[arg-type]
            JOB,
            TENSORS[0],
            GRADIENTS[0],
        )
    other = replace(CHAIN, id=replace(CHAIN.id, number=2))
    with pytest.raises(ProtocolViolation, match="signed"):
        other.check_receipts(receipts(), JOB, TENSORS[0], GRADIENTS[0])


@pytest.mark.parametrize("codec", sorted(BOUNDARY_CODECS))
def test_rounding_is_no_lie_and_a_lie_is(codec: str) -> None:
    """A residual block in float32 and, as if on another processor, in float64."""
    torch.manual_seed(0)
    boundary = BOUNDARY_CODECS[codec]
    tolerance = Tolerance.of(24, 4, boundary.level, 128, routed=False)
    for seed in range(100):
        inputs = torch.randn(64, 128) * torch.rand(128).exp2()
        weights = torch.randn(4, 128, 128) / 128**0.5
        one, other = inputs, inputs.double()
        for each in weights:
            one = one + torch.tanh(one @ each)
            other = other + torch.tanh(other @ each.double())
        sent = [
            boundary.decode(boundary.encode(values, seed), *values.shape) for values in (one, other.float())
        ]
        assert tolerance.allows(*sent)
        assert not tolerance.allows(one, inputs)


def believe_all(patch: Patch) -> None:
    patch.setattr(Tolerance, "agree", Tolerance.allows)


@defence("no answer convicts an honest worker in the eyes of another", off=believe_all)
def test_an_answer_at_the_limit_is_uncertain() -> None:
    """Two honest workers whose arithmetic differs, and a liar's answer between lie and truth."""
    tolerance, mine = Tolerance.of(24, 4, 0.0, 16, routed=False), torch.randn(100, 16)
    other = mine * (1 + tolerance.most / 8)
    assert tolerance.agree(mine, other)
    for lie in range(1, 100):
        answer = mine * (1 - tolerance.most * lie / 50)
        assert {tolerance.agree(mine, answer), tolerance.agree(other, answer)} != {True, False}


def test_a_false_position_is_a_lie_unless_experts_are_near() -> None:
    values = torch.randn(100, 16)
    false = torch.cat([-values[:1], values[1:]])
    assert not Tolerance.of(24, 1, 0.0, 16, routed=False).allows(values, false)
    assert Tolerance.of(24, 1, 0.0, 16, routed=True).allows(values, false)
    assert not Tolerance.of(24, 1, 0.0, 16, routed=True).allows(values, -values)


def test_most_of_a_stage_must_accuse_a_worker() -> None:
    liar, first, second = (each.peer_id for each in WORKERS)
    stage = {liar, first, second}
    accusations = Accusations()
    assert not accusations.accuse(first, liar, stage)
    assert not accusations.accuse(first, liar, stage)
    assert not accusations.accuse(ORIGIN.peer_id, liar, stage)
    assert not accusations.accuse(liar, liar, stage)
    assert accusations.accuse(second, liar, stage)


def test_a_worker_with_another_state_is_odd_among_most() -> None:
    liar, first, second = (each.peer_id for each in WORKERS)
    states = {liar: b"", first: b"state"}
    assert not is_odd(states, liar)
    assert is_odd(states | {second: b"state"}, liar)
    assert not is_odd(states | {second: b"state"}, first)


@pytest.mark.parametrize(("workers", "microbatches"), [(3, 2), (3, 9), (3, 100), (30, 4), (2, 1)])
def test_each_worker_is_audited_within_16_rounds(workers: int, microbatches: int) -> None:
    """By the only origin of a job, which has equal parts for all workers."""
    answers, draws, worker = stretch(workers, microbatches), AuditDraws(Random(0)), WORKERS[0].peer_id
    audited = [number for number in range(10_000) if draws.draw(worker, answers)]
    assert len(audited) == 10_000 // answers
    waits = [later - one for one, later in pairwise([-1, *audited])]
    assert max(waits) < 2 * answers
    assert max(waits) * workers / microbatches <= 2 * AUDITED_ROUNDS or answers == 1
    assert set(range(1, answers)) <= set(waits), "nobody can foresee an audit"


def test_a_liar_to_many_origins_lives_for_less_than_50_steps() -> None:
    """A liar lies in its part of every batch. In each of 2,000 jobs, an origin draws one of its
    answers."""
    lived = 0
    for seed in range(2000):
        rng, answers = Random(seed), stretch(6, 12)
        origins = [AuditDraws(rng) for _ in range(6)]
        for each in origins:  # the liar was honest for a while
            for _ in range(rng.randrange(answers)):
                each.draw(WORKERS[0].peer_id, answers)
        rounds = (
            number
            for number in range(50)
            for each in origins
            if number % 3 == 0 and each.draw(WORKERS[0].peer_id, answers)
        )
        lived = max(lived, next(rounds, 50))
    assert answers < AUDITED
    assert lived < 50
