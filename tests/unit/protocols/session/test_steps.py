"""Steps on the wire, and the rules for the positions they may touch."""

from typing import Any

import numpy as np
import pytest

from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.session import steps
from swarmnet_protocols.session.arrays import ElementType, rounded
from swarmnet_protocols.session.steps import (
    MAX_POSITION,
    MAX_ROWS,
    MAX_SEQUENCE,
    Row,
    Step,
    check_rows,
    decode_step,
    encode_step,
)
from swarmnet_protocols.session.wire_tensors import decode_tensor, encode_tensor
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing, yes


@pytest.mark.parametrize(
    "rows",
    [
        (Row(0, 5, 1, 1, 0),),
        (Row(1, 0, 3, 0, 1),),
        (Row(0, 2, 1, 1, 0, rewrite=True),),
        (Row(1, 5, 1, 1, 0, rewrite=True),),
        (Row(0, 5, 1, 0, 0), Row(1, 3, 1, 0, 0, rewrite=True)),
    ],
    ids=["append", "new sequence", "roll back", "copy", "append and copy"],
)
def test_valid_rows_are_accepted(rows: tuple[Row, ...]) -> None:
    check_rows(rows, {0: 5})


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ((Row(0, 6, 1, 1, 0),), "gap"),
        ((Row(0, 6, 1, 1, 0, rewrite=True),), "gap"),
        ((Row(1, 1, 1, 1, 1),), "gap"),
        ((Row(0, 4, 1, 1, 0),), "overlap"),
        ((Row(1, 5, 1, 1, 0),), "overlap"),
        ((Row(0, 5, 1, 1, 0), Row(0, 5, 1, 1, 0)), "twice"),
    ],
)
def test_invalid_rows_are_refused(rows: tuple[Row, ...], what: str) -> None:
    with pytest.raises(ProtocolViolation, match=what):
        check_rows(rows, {0: 5})


def wire(**row: int) -> tuple[pb.Step, bytes]:
    fields: dict[str, Any] = {"sequence": 0, "start": 0, "count": 1, "outputs": 1, "source": 0}
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1, 2])
    return pb.Step(seq=1, rows=[pb.Row(**{**fields, **row})], tensor=tensor), bytes(8)


@defence(
    "positions of a step are bounded",
    off=replacing(steps, "MAX_POSITION", 1 << 40),
    row={"start": MAX_POSITION},
)
@pytest.mark.parametrize(
    "row",
    [
        {"sequence": MAX_SEQUENCE + 1},
        {"source": MAX_SEQUENCE + 1},
        {"count": 0},
        {"start": MAX_POSITION},
        {"start": (1 << 32) - 1},
        {"count": 2},
        {"outputs": 2},
    ],
    ids=str,
)
def test_numbers_of_a_decoded_step_are_bounded(row: dict[str, int]) -> None:
    decode_step(*wire(), hidden_size=2)
    with pytest.raises(ProtocolViolation):
        decode_step(*wire(**row), hidden_size=2)


@defence("rows of a step are bounded", off=replacing(steps, "MAX_ROWS", 1 << 40), rows=MAX_ROWS + 1)
@pytest.mark.parametrize("rows", [0, MAX_ROWS + 1])
def test_the_number_of_rows_is_bounded(rows: int) -> None:
    row = pb.Row(count=1)
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[rows, 2])
    with pytest.raises(ProtocolViolation, match="rows"):
        decode_step(pb.Step(seq=1, rows=[row] * rows, tensor=tensor), bytes(8 * rows), hidden_size=2)


def test_a_replay_wants_no_outputs() -> None:
    message, payload = wire()
    message.replay = True
    with pytest.raises(ProtocolViolation, match="replay"):
        decode_step(message, payload, hidden_size=2)


@pytest.mark.parametrize(
    ("header", "size_bytes"),
    [
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[3, 2]), 23),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[2, 3]), 24),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[6]), 24),
        (pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1 << 31, 1 << 31]), 24),
        (pb.Tensor(dtype=pb.DTYPE_UNSPECIFIED, shape=[3, 2]), 24),
        (pb.Tensor(dtype=77, shape=[3, 2]), 24),
        (pb.Tensor(dtype=pb.DTYPE_BFLOAT16, shape=[3, 2]), 24),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_match_its_header_is_refused(header: pb.Tensor, size_bytes: int) -> None:
    with pytest.raises(ProtocolViolation):
        decode_tensor(header, bytes(size_bytes), positions=3, hidden_size=2)


@pytest.mark.parametrize("type", [ElementType.FLOAT32, ElementType.BFLOAT16, ElementType.FLOAT16])
def test_tensors_survive_encoding_and_decoding(type: ElementType) -> None:
    values = rounded(np.random.default_rng(0).standard_normal((3, 4), np.float32).T, type)
    header, payload = encode_tensor(values)
    assert np.array_equal(decode_tensor(header, payload, positions=4, hidden_size=3), values)
    header, payload = encode_tensor(values[:0])
    assert decode_tensor(header, payload, positions=0, hidden_size=3).shape == (0, 3)


def test_steps_survive_encoding_and_decoding() -> None:
    rows = (Row(0, 5, 2, 1, 0), Row(3, 1, 1, 1, 0, rewrite=True))
    step = Step(7, rows, np.random.default_rng(0).standard_normal((3, 2), np.float32), acked=4)
    message, payload = encode_step(step, ElementType.FLOAT32)
    again = decode_step(pb.Step.FromString(message.SerializeToString()), bytes(payload), hidden_size=2)
    assert again == step
    assert np.array_equal(again.values, step.values)
    assert np.array_equal(again.wanted_values(), step.values[1:])


@defence(
    "a step with values that are not finite is refused by the hop that receives it",
    off=replacing(steps, "are_finite", yes),
    type=ElementType.FLOAT32,
    number=float("nan"),
)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("type", ElementType)
def test_a_step_with_values_that_are_not_finite_is_refused(type: ElementType, number: float) -> None:
    values = np.zeros((3, 64), np.float32)
    values[1, 5] = number
    wanted = Step(seq=1, rows=(Row(0, 0, 3, 1, 0),), values=values)
    # this type has no NaN: its bytes are those of an outlier that is not finite
    if type is ElementType.INT8:
        message, payload = encode_step(wanted.with_values(np.zeros((3, 64), np.float32)), type)
        sent = bytearray(payload)
        row = len(sent) // 3
        sent[2 * row - 2 : 2 * row] = b"\xff\x7f"
        payload = memoryview(sent)
    else:
        message, payload = encode_step(wanted, type)
    with pytest.raises(ProtocolViolation, match="not finite"):
        decode_step(message, bytes(payload), hidden_size=64)
