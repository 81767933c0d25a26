"""Results of a sparse codec: all members get the contributions themselves, and no reducer can
change them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.reduction import (
    Contribution,
    Result,
    read_result,
    reduce_slice,
    result_hash,
)
from swarmnet_protocols.training.rounds.terms import RoundTerms
from swarmnet_protocols.wire import training_pb2 as pb
from tests.support.models.rounding import assert_sum
from tests.support.network.memory_network import Delivery
from tests.support.training.lab import TrainingLab, Work, simulate, terms_of

COUNT = 5000
MEMBERS = 4
TERMS = terms_of(COUNT, "topk", exchange_number=3, index=1, members=MEMBERS)


def payload_of(values: torch.Tensor, weight: float = 1.0) -> Contribution:
    return Contribution.of(weight, TERMS.codec.encode(values))


def vectors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(COUNT, generator=generator) for _ in range(3)]


PAYLOADS = [(member, payload_of(values, member + 1.0)) for member, values in enumerate(vectors())]
OTHER = payload_of(vectors(seed=1)[0], 1.0)


def bundle(payloads: Sequence[tuple[int, Contribution]], hashes: Mapping[int, bytes] = {}) -> Result:
    """A result that a lying reducer may make: these contributions, under ``hashes`` where given."""
    contributors = [
        pb.Contributor(member=member, weight=payload.weight, hash=hashes.get(member, payload.hash))
        for member, payload in payloads
    ]
    summary = pb.Summary(exchange_number=3, slice=1, contributors=contributors).SerializeToString()
    data = b"".join(payload.data for _, payload in payloads)
    return Result(result_hash(summary, data), summary, data)


def read(result: Result, me: int = 3, terms: RoundTerms = TERMS) -> torch.Tensor:
    return read_result(terms, 1, result, me, dict(PAYLOADS).get(me))


def test_members_decode_a_bundle_to_the_bits_of_the_reducer() -> None:
    reduced = reduce_slice(TERMS, 1, PAYLOADS)
    assert reduced is not None
    result, values = reduced
    assert result.payload == b"".join(payload.data for _, payload in PAYLOADS)
    assert len(result.payload) == TERMS.result_bytes(COUNT, 3)
    for me in range(MEMBERS):
        assert torch.equal(read(result, me), values)
    kept = torch.stack([TERMS.codec.decode(payload.data, COUNT) for _, payload in PAYLOADS])
    assert_sum(values, kept * torch.tensor([1.0, 2.0, 3.0])[:, None] / 6, 3)


def test_an_altered_contribution_does_not_have_its_hash() -> None:
    altered = [(0, OTHER), *PAYLOADS[1:]]
    with pytest.raises(ProtocolViolation, match="does not have its hash"):
        read(bundle(altered, {0: PAYLOADS[0][1].hash}))


@pytest.mark.parametrize(
    "forged", [OTHER, replace(PAYLOADS[0][1], weight=2.0)], ids=["values and hash", "weight"]
)
def test_the_author_of_a_contribution_refuses_a_forged_one(forged: Contribution) -> None:
    result = bundle([(0, forged), *PAYLOADS[1:]])
    with pytest.raises(ProtocolViolation, match="that it did not make"):
        read(result, 0)
    read(result, 1)  # a member that is not the author cannot know


def test_a_member_without_a_contribution_refuses_a_result_naming_it() -> None:
    with pytest.raises(ProtocolViolation, match="that it did not make"):
        read(bundle([*PAYLOADS, (3, OTHER)]))


def test_a_bundle_of_another_size_than_its_summary_says_is_refused() -> None:
    whole = bundle(PAYLOADS)
    for data in (whole.payload[:-1], bytes(whole.payload) + b"\0", b""):
        with pytest.raises(ProtocolViolation, match="from 3 contributors"):
            read(Result(result_hash(whole.summary, data), whole.summary, data))


def test_a_bundle_with_an_invalid_contribution_is_refused() -> None:
    garbage = b"\xff" * TERMS.codec.max_bytes(COUNT)
    broken = Contribution.of(1.0, garbage)
    with pytest.raises(ProtocolViolation, match="member 2 is in a bundle, but"):
        read(bundle([*PAYLOADS[:2], (2, broken)]))
    unwanted = TERMS.codec.decode(PAYLOADS[1][1].data, COUNT)
    rules = AggregationRules(
        screen=lambda rows, _: ["too long" if torch.equal(row, unwanted) else "" for row in rows]
    )
    with pytest.raises(ProtocolViolation, match="member 1 is in a bundle, but too long"):
        read(bundle(PAYLOADS), terms=replace(TERMS, rules=rules))
    with pytest.raises(ProtocolViolation, match="weight 1e\\+300 is above"):
        read(bundle([(0, replace(PAYLOADS[0][1], weight=1e300)), *PAYLOADS[1:]]))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_weight_is_refused(weight: float) -> None:
    with pytest.raises(ProtocolViolation, match="positive and finite"):
        read(bundle([(0, replace(PAYLOADS[0][1], weight=weight)), *PAYLOADS[1:]]))


def test_a_contribution_that_does_not_decode_is_left_out() -> None:
    garbage = b"\xff" * TERMS.codec.max_bytes(COUNT)
    broken = Contribution.of(1.0, garbage)
    reduced = reduce_slice(TERMS, 1, [PAYLOADS[0], (1, broken), PAYLOADS[2]])
    assert reduced is not None
    assert len(reduced[0].payload) == TERMS.result_bytes(COUNT, 2)
    assert torch.equal(read(reduced[0]), reduced[1])


def traffic(codec: str, count: int) -> tuple[int, int]:
    """Bytes sent in a round of 8 workers, heartbeats included: by the busiest worker, and by
    all."""
    lab = TrainingLab(8)
    work = Work.random(lab, count, codec)
    in_all = []

    def observe(delivery: Delivery) -> None:
        if delivery.protocol.id == EXCHANGE.id:
            in_all.append(len(delivery.message.header) + len(delivery.message.payload))

    lab.network.observers.append(observe)
    outcomes = simulate(lambda lab: lab.average(work), lab)
    assert all(outcome.committed and outcome.average is not None for outcome in outcomes.values())
    return max(outcome.bytes_sent for outcome in outcomes.values()), sum(in_all)


def test_a_sparse_exchange_every_thirty_steps_costs_a_thousandth() -> None:
    count = 1 << 20
    busiest, in_all = traffic("topk", count)
    busiest_dense, in_all_dense = traffic("float32", count)
    print(f"sparseloco_round_bytes={busiest} of_all={in_all}")
    print(f"thirty_allreduce_bytes={30 * busiest_dense} of_all={30 * in_all_dense}")
    print(f"ratio_busiest={30 * busiest_dense / busiest:.0f} ratio_of_all={30 * in_all_dense / in_all:.0f}")
    assert 30 * busiest_dense >= 1000 * busiest
    assert 30 * in_all_dense >= 1000 * in_all
