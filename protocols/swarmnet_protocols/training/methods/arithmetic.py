"""Elementwise float32 arithmetic with the same bits on every machine."""

import torch

_CHUNK = 1 << 15
"""Values at a time: the float64 intermediates stay in the cache, and torch does not divide so few among threads."""


def add_scaled(a: torch.Tensor, alpha: float, b: torch.Tensor) -> torch.Tensor:
    """a + alpha * b, float32 [n], alpha taken as float32.

    ``torch.add(a, b, alpha=alpha)`` rounds once on a CPU with fused multiply-add and twice on others. Here the product
    is exact in float64 everywhere, and the sum is rounded there and then to float32: the fused result, but for the
    one sum in about 2**29 that float64 rounds to the midpoint of two float32 numbers.
    """
    factor = torch.tensor(alpha, dtype=torch.float32).item()
    out = torch.empty_like(a)
    for start in range(0, len(a), _CHUNK):
        part = slice(start, start + _CHUNK)
        out[part] = b[part].double().mul_(factor).add_(a[part])
    return out


def nesterov(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float, mu: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and momentum after v <- mu v + g; θ <- θ - lr (g + mu v): one step of ``torch.optim.SGD(nesterov=True)``."""
    stepped, moved = torch.empty_like(weights), torch.empty_like(momentum)
    for start in range(0, len(weights), _CHUNK):
        part = slice(start, start + _CHUNK)
        moved[part] = momentum[part] * mu + gradient[part]
        stepped[part] = add_scaled(weights[part], -lr, add_scaled(gradient[part], mu, moved[part]))
    return stepped, moved
