"""What fused layers compute between their products, with gradients written by hand where they are wanted.

Autograd's own keep more for them and go over the activations about twice as often. Gradients reach activations only: weights
are frozen.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm, silu

Angles = tuple[torch.Tensor, torch.Tensor]
"""Of each position the cosines, and the sines with the sign that they take in a rotation: both [1, 1, T, size]."""

Norm = tuple[tuple[int, ...], torch.Tensor, float]
"""Shape, weight and epsilon of an RMSNorm."""


def normed(states: torch.Tensor, norm: Norm) -> torch.Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich, 2019)."""
    if not states.requires_grad:
        return rms_norm(states, *norm)
    _, weight, epsilon = norm
    return _apply(_Normed, states, weight, epsilon)


def rotated(states: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotary embedding of [1, heads, T, size] (RoFormer, section 3.4.2), the halves of a head being its pairs."""
    return _apply(_Rotated, states, *angles) if states.requires_grad else _rotate(states, *angles)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of the halves (Shazeer, 2020): [T, 2 size] to [T, size]."""
    return _apply(_Gated, gate_up) if gate_up.requires_grad else _gate(gate_up)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    outputs: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return outputs


def _rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, -1)
    first_sines, second_sines = sines.chunk(2, -1)
    outputs = states * cosines
    first_outputs, second_outputs = outputs.chunk(2, -1)
    first_outputs.addcmul_(second, first_sines)
    second_outputs.addcmul_(first, second_sines)
    return outputs


def _gate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        precise = torch.promote_types(states.dtype, torch.float32)
        scale = states.to(precise).square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(states, scale, weight)
        return (states * scale).mul_(weight).to(states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        states, scale, weight = ctx.saved_tensors
        precise = states.to(scale.dtype)
        weighted: torch.Tensor = gradients.to(scale.dtype) * weight
        along = torch.linalg.vecdot(weighted, precise)[..., None] * scale**3 / states.shape[-1]
        return weighted.mul_(scale).addcmul_(precise, along, value=-1).to(states.dtype), None, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotate(states, cosines, sines)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The transpose of a rotation: each half takes the sines of the other.
        cosines, sines = ctx.saved_tensors
        first, second = sines.chunk(2, -1)
        return _rotate(gradients, cosines, torch.cat((second, first), -1)), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return _gate(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        outputs = torch.empty_like(gate_up)
        to_gate, to_up = outputs.chunk(2, -1)
        torch.mul(silu(gate), gradients, out=to_up)
        torch.ops.aten.silu_backward.grad_input(gradients * up, gate, grad_input=to_gate)
        return outputs
