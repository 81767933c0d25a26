"""Operations of the torch backend: handwritten gradients against numerical ones and autograd's,
attention against its definition."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from swarmnet_node.engine.kernels.backend import AttentionRule, Linear, LoraUpdate, Norm
from swarmnet_node.engine.kernels.torch_backend import TorchBackend, causal_mask
from tests.support.models.rounding import assert_near

HEADS, POSITIONS, SIZE = 3, 5, 8
TORCH = TorchBackend()


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def angles(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles whose sines differ between the halves: no operation may rely on their being alike."""
    return drawn(1, 1, POSITIONS, SIZE, dtype=dtype), drawn(1, 1, POSITIONS, SIZE + 2, dtype=dtype)[..., 2:]


def plain_rms_norm(states: torch.Tensor) -> torch.Tensor:
    return rms_norm(states, (SIZE,), drawn(SIZE, dtype=states.dtype), 1e-5)


def our_rms_norm(states: torch.Tensor) -> torch.Tensor:
    return TORCH.rms_norm(states, Norm(drawn(SIZE, dtype=states.dtype), 1e-5))


def plain_rope(states: torch.Tensor) -> torch.Tensor:
    cosines, sines = angles(states.dtype)
    first, second = states.chunk(2, -1)
    return states * cosines + torch.cat((second, first), -1) * sines


def our_rope(states: torch.Tensor) -> torch.Tensor:
    return TORCH.rope(states, angles(states.dtype))


def plain_swiglu(states: torch.Tensor) -> torch.Tensor:
    gate, up = states.chunk(2, -1)
    return silu(gate) * up


Function = Callable[[torch.Tensor], torch.Tensor]

CASES = pytest.mark.parametrize(
    ("ours", "plain", "shape"),
    [
        (our_rms_norm, plain_rms_norm, (POSITIONS, SIZE)),
        (our_rms_norm, plain_rms_norm, (1, HEADS, POSITIONS, SIZE)),
        (our_rope, plain_rope, (1, HEADS, POSITIONS, SIZE)),
        (TORCH.swiglu, plain_swiglu, (POSITIONS, SIZE)),
    ],
)


@CASES
def test_gradients_are_those_of_the_function(ours: Function, plain: Function, shape: tuple[int, ...]) -> None:
    assert torch.autograd.gradcheck(ours, (drawn(*shape).requires_grad_(),))


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd(
    ours: Function, plain: Function, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    states = drawn(*shape, dtype=dtype)
    found, expected = [], []
    for function, kept in ((ours, found), (plain, expected)):
        leaf = states.clone().requires_grad_()
        outputs = function(leaf)
        kept += [outputs, *torch.autograd.grad(outputs, leaf, drawn(*outputs.shape, dtype=dtype))]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == dtype
        assert (one - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_same_with_and_without_a_graph(
    ours: Function, plain: Function, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    states = drawn(*shape, dtype=dtype)
    assert torch.equal(ours(states.clone().requires_grad_()), ours(states))


def reference_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule, visible: torch.Tensor
) -> torch.Tensor:
    """softmax(scaling QKᵀ)V head by head, as its definition says."""
    outputs = torch.empty(*query.shape[:3], values.shape[3], dtype=query.dtype)
    sharing = query.shape[1] // keys.shape[1]
    for head in range(query.shape[1]):
        scores = query[:, head] @ keys[:, head // sharing].transpose(1, 2)
        scores = scores * (query.shape[3] ** -0.5 if rule.scaling is None else rule.scaling)
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        weights = torch.exp(scores) * visible
        sink = 0 if rule.sinks is None else torch.exp(rule.sinks[head])
        outputs[:, head] = weights / (weights.sum(-1, keepdim=True) + sink) @ values[:, head // sharing]
    return outputs


@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(None, None, None, None),
        AttentionRule(0.3, 4, None, None),
        AttentionRule(None, None, 2.0, None),
        AttentionRule(None, None, None, torch.tensor([0.1, -0.2, 0.3, 0.4], dtype=torch.float64)),
    ],
    ids=["plain", "window", "softcap", "sinks"],
)
@pytest.mark.parametrize(("rows", "count", "total"), [(1, 1, 7), (3, 1, 1), (1, 5, 5), (2, 3, 8)])
def test_attention_is_its_definition(rule: AttentionRule, rows: int, count: int, total: int) -> None:
    query = drawn(rows, 4, count, SIZE)
    keys, values = drawn(rows, 2, total, SIZE), drawn(rows, 2, total, SIZE + 2)
    positions = torch.arange(total)
    visible = causal_mask(positions[-count:], positions, rule.sliding_window)
    given = visible if rule.sliding_window is not None else None

    outputs = TORCH.attention(query, keys, values, rule, given)
    expected = reference_attention(query, keys, values, rule, visible)
    # Softmax is computed in float32: a score has SIZE terms, and an output as many as positions.
    assert_near(outputs.float(), expected.float(), SIZE + total)


def test_lora_is_added_to_the_columns_of_its_modules() -> None:
    inputs, down, up = drawn(POSITIONS, SIZE), drawn(3, SIZE), drawn(4, 2)
    outputs = torch.zeros(POSITIONS, 10, dtype=torch.float64)
    TORCH.add_lora(inputs, outputs, LoraUpdate(down, ((slice(5, 9), slice(1, 3), up),)))
    assert_near(outputs[:, 5:9], inputs @ down[1:].T @ up.T)
    assert not outputs[:, :5].any()
    assert not outputs[:, 9:].any()


def test_a_linear_layer_has_its_bias() -> None:
    linear = Linear(drawn(4, SIZE), drawn(4))
    inputs = drawn(POSITIONS, SIZE)
    assert_near(TORCH.linear(inputs, linear), inputs @ linear.weight.T + linear.bias)
