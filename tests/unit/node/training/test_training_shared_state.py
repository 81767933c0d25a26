"""The packed shared state: canonical, unpacked without a copy, and safe against hostile bytes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load

from swarmnet_node.training.shared_state import SharedState, max_state_bytes
from swarmnet_protocols.errors import IntegrityError

COUNT = 1000
OUTER = {"momentum": torch.arange(COUNT) / 7, "own.share": torch.ones(COUNT)}
INNER = {"step": torch.tensor(3.0)}
STATE = SharedState(5, torch.arange(COUNT) - 0.5, OUTER, INNER)
START = 8


def packed() -> bytearray:
    return bytearray().join(STATE.pack())


def test_a_packed_state_is_a_safetensors_file() -> None:
    tensors = load(bytes(packed()))
    assert set(tensors) == {"agreed", "revision", "outer.momentum", "inner.step"}
    assert torch.equal(tensors["agreed"], STATE.agreed)
    assert torch.equal(tensors["outer.momentum"], OUTER["momentum"])
    assert (int(tensors["revision"]), float(tensors["inner.step"])) == (5, 3.0)
    assert len(packed()) <= max_state_bytes(COUNT)


def test_packing_and_unpacking_copy_nothing() -> None:
    pieces = STATE.pack()
    STATE.agreed[7] = 4.25
    data = bytearray().join(pieces)
    taken = SharedState.unpack(data)
    assert taken.agreed[7] == 4.25
    taken.agreed[7] = 6.5
    assert float(load(bytes(data))["agreed"][7]) == 6.5
    assert (taken.revision, set(taken.outer), set(taken.inner)) == (5, {"momentum"}, {"step"})
    assert torch.equal(taken.outer["momentum"], OUTER["momentum"])


def test_equal_states_are_equal_bytes() -> None:
    outer = {"b": torch.ones(3), "a": torch.zeros(2)}
    one = SharedState(1, torch.ones(4), outer, {})
    other = SharedState(1, torch.ones(4), dict(reversed(outer.items())), {})
    assert b"".join(one.pack()) == b"".join(other.pack())


def rewritten(change: Callable[[dict[str, Any]], object]) -> bytearray:
    """The packed state with another header of any size."""
    data = packed()
    length = int.from_bytes(data[:START], "little")
    header = json.loads(bytes(data[START : START + length]))
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % START)
    return bytearray(len(text).to_bytes(START, "little") + text + data[START + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.pop("agreed"),
        lambda header: header.update(more={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
        lambda header: header["agreed"].update(dtype="F64"),
        lambda header: header["agreed"].update(dtype=["F32"]),
        lambda header: header["agreed"].update(shape=[COUNT - 1]),
        lambda header: header["agreed"].update(shape=[COUNT, 1]),
        lambda header: header["agreed"].update(shape=[-COUNT]),
        lambda header: header["agreed"].update(shape=[1 << 62]),
        lambda header: header["agreed"].update(shape=[float(COUNT)]),
        lambda header: header["agreed"].update(shape=COUNT),
        lambda header: header["agreed"].update(data_offsets=[0, 4 * COUNT]),
        lambda header: header["revision"].update(shape=[True]),
        lambda header: header.update(agreed=[]),
        lambda header: header.update(__metadata__={"format": "pt"}),
        lambda header: header.update(other=header.pop("inner.step")),
    ],
)
def test_a_header_that_is_not_canonical_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    assert rewritten(lambda header: None) == packed()
    with pytest.raises(IntegrityError):
        SharedState.unpack(rewritten(change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 100,
        (1 << 40).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (4000).to_bytes(8, "little") + b"[" * 4000,
        packed()[:-1],
        packed() + b"\x00",
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        SharedState.unpack(bytearray(data))
