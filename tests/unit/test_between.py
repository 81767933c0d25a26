"""The gradients of fused layers that are written by hand, against numerical ones and autograd's own."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from swarmnet_node.engine.kernels.fused_ops import gated, normed, rotated

HEADS, POSITIONS, SIZE = 3, 5, 8


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def angles(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one rotation, and the two halves of the sines not alike: nothing here may rely on that."""
    return drawn(1, 1, POSITIONS, SIZE, dtype=dtype), drawn(1, 1, POSITIONS, SIZE + 2, dtype=dtype)[..., 2:]


def plainly_normed(states: torch.Tensor) -> torch.Tensor:
    return rms_norm(states, (SIZE,), drawn(SIZE, dtype=states.dtype), 1e-5)


def by_hand_normed(states: torch.Tensor) -> torch.Tensor:
    return normed(states, ((SIZE,), drawn(SIZE, dtype=states.dtype), 1e-5))


def plainly_rotated(states: torch.Tensor) -> torch.Tensor:
    cosines, sines = angles(states.dtype)
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat((second, first), -1) * sines


def by_hand_rotated(states: torch.Tensor) -> torch.Tensor:
    return rotated(states, angles(states.dtype))


def plainly_gated(states: torch.Tensor) -> torch.Tensor:
    gate, up = states.chunk(2, -1)
    return silu(gate) * up


Function = Callable[[torch.Tensor], torch.Tensor]

CASES = pytest.mark.parametrize(
    ("by_hand", "plainly", "shape"),
    [
        (by_hand_normed, plainly_normed, (POSITIONS, SIZE)),
        (by_hand_normed, plainly_normed, (1, HEADS, POSITIONS, SIZE)),
        (by_hand_rotated, plainly_rotated, (1, HEADS, POSITIONS, SIZE)),
        (gated, plainly_gated, (POSITIONS, SIZE)),
    ],
)


@CASES
def test_gradients_are_those_of_the_function(
    by_hand: Function, plainly: Function, shape: tuple[int, ...]
) -> None:
    assert torch.autograd.gradcheck(by_hand, (drawn(*shape).requires_grad_(),))


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd(
    by_hand: Function, plainly: Function, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    states = drawn(*shape, dtype=dtype)
    found, expected = [], []
    for function, kept in ((by_hand, found), (plainly, expected)):
        leaf = states.clone().requires_grad_()
        outputs = function(leaf)
        kept += [outputs, *torch.autograd.grad(outputs, leaf, drawn(*outputs.shape, dtype=dtype))]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        assert (one - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_that_leaves_a_graph_has_the_values_of_one_that_leaves_none(
    by_hand: Function, plainly: Function, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    states = drawn(*shape, dtype=dtype)
    assert torch.equal(by_hand(states.clone().requires_grad_()), by_hand(states))
