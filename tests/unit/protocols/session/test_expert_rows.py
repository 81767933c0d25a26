"""Rows for experts and their outputs, as they travel between peers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_protocols.arrays import as_array
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net.protocol_ids import EXPERTS
from swarmnet_protocols.session import expert_rows
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.session.expert_rows import (
    MAX_ROWS,
    ExpertRows,
    decode_outputs,
    decode_rows,
    encode_rows,
    max_pairs,
    split_rows,
)
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing

HIDDEN = 4


def received(request: ExpertRows) -> ExpertRows:
    message, payload = encode_rows(request, 1)
    return decode_rows(message, bytes(payload), hidden_size=HIDDEN)


@given(
    rows=st.dictionaries(
        st.integers(0, 1000), st.sets(st.integers(0, 29), min_size=1), min_size=1, max_size=12
    ),
    most=st.integers(1, 40),
)
def test_rows_of_every_expert_arrive_in_order(rows: dict[int, set[int]], most: int) -> None:
    hidden = torch.arange(30.0)[:, None].expand(30, HIDDEN)
    indexes = {expert: torch.tensor(sorted(each)) for expert, each in rows.items()}
    found: dict[int, list[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_rows, "max_pairs", lambda *_: most)
        for request in split_rows(7, hidden, indexes):
            arrived = received(request)
            assert arrived.block == 7
            assert arrived.pairs <= most
            assert len(arrived.values) <= arrived.pairs, "a row that no expert needs travelled"
            for expert, each in arrived.rows.items():
                found.setdefault(expert, []).extend(arrived.values[each][:, 0].tolist())
    assert found == {expert: sorted(each) for expert, each in rows.items()}


def test_the_answer_to_a_request_fits_into_a_message() -> None:
    for hidden_size in (64, 7168, 1 << 20):
        for type in (ElementType.FLOAT32, ElementType.BFLOAT16):
            pairs = max_pairs(hidden_size, type)
            assert pairs * hidden_size * type.itemsize <= EXPERTS.max_payload_bytes
            assert 1 <= pairs <= MAX_ROWS


def message(count: int = 3, **rows: list[int]) -> tuple[pb.Rows, bytes]:
    tensor, payload = encode_tensor(np.zeros((count, HIDDEN), np.float32))
    experts = [pb.ExpertRows(expert=int(name[1:]), rows=each) for name, each in rows.items()]
    return pb.Rows(id=1, block=0, tensor=tensor, experts=experts), bytes(payload)


@pytest.mark.parametrize(
    "rows",
    [
        {"e1": [3]},
        {"e1": []},
        {"e1": [1, 1]},
        {"e1": [1, 0]},
        {"e5": [0], "e1": [0]},
    ],
)
def test_rows_that_are_not_those_of_the_request_are_refused(rows: dict[str, list[int]]) -> None:
    with pytest.raises(ProtocolViolation):
        decode_rows(*message(**rows), hidden_size=HIDDEN)


@defence(
    "a request for rows is bounded before it is computed",
    off=replacing(expert_rows, "max_pairs", lambda *_: 1 << 30),
)
def test_a_request_of_too_many_rows_is_refused() -> None:
    count = MAX_ROWS + 1
    with pytest.raises(ProtocolViolation, match="too many"):
        decode_rows(*message(count, e1=[0]), hidden_size=HIDDEN)
    with pytest.raises(ProtocolViolation, match="too many"):
        decode_rows(*message(MAX_ROWS, e1=[*range(MAX_ROWS)], e2=[0]), hidden_size=HIDDEN)


def answer(values: torch.Tensor, number: int = 9) -> tuple[pb.Computed, bytes]:
    tensor, payload = encode_tensor(as_array(values))
    return pb.Computed(id=number, tensor=tensor), bytes(payload)


def test_outputs_are_those_of_each_expert_for_its_rows() -> None:
    request = ExpertRows(0, torch.zeros(3, HIDDEN), {1: torch.tensor([0, 2]), 5: torch.tensor([1])})
    values = torch.arange(12.0).reshape(3, HIDDEN)
    outputs = decode_outputs(*answer(values), request, 9)
    assert {expert: each.tolist() for expert, each in outputs.items()} == {
        1: values[:2].tolist(),
        5: values[2:].tolist(),
    }
    for wrong in (values[:2], values[:, :3], values.bfloat16()):
        with pytest.raises(ProtocolViolation):
            decode_outputs(*answer(wrong.contiguous()), request, 9)
    with pytest.raises(ProtocolViolation, match="request 8 instead of 9"):
        decode_outputs(*answer(values, 8), request, 9)


@defence(
    "a peer with experts refuses rows that are not finite",
    off=replacing(expert_rows, "are_finite", lambda _: True),
    number=float("nan"),
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused_and_outputs_allowed(number: float) -> None:
    request = ExpertRows(0, torch.full((1, HIDDEN), number), {1: torch.tensor([0])})
    with pytest.raises(ProtocolViolation, match="not finite"):
        received(request)
    decode_outputs(*answer(torch.full((1, HIDDEN), number)), request, 9)
