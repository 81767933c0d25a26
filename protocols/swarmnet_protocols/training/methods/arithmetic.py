"""Elementwise float32 arithmetic that gives the same bits on every machine."""

from collections.abc import Iterator

import torch

_CHUNK = 1 << 15
"""Number of values computed at a time.

With more, the float64 intermediates would not fit the cache, and torch would use several threads.
"""


def add_scaled(a: torch.Tensor, alpha: float, b: torch.Tensor) -> torch.Tensor:
    """Return a + alpha * b, float32 [n], with alpha rounded to float32.

    ``torch.add(a, b, alpha=alpha)`` rounds once on a CPU with fused multiply-add and twice on
    others. Here the product is exact in float64. The sum is rounded to float64 and then to float32.
    That equals the fused result, except for about one sum in 2**29: float64 rounds such a sum to
    the midpoint of two float32 numbers.
    """
    factor = torch.tensor(alpha, dtype=torch.float32).item()
    out = torch.empty_like(a)
    for part in in_parts(len(a)):
        out[part] = b[part].double().mul_(factor).add_(a[part])
    return out


def nesterov_(
    weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, lr: float, mu: float
) -> None:
    """Change weights and momentum in place by one step of ``torch.optim.SGD(nesterov=True)``.

    v <- mu v + g; θ <- θ - lr (g + mu v).
    """
    for part in in_parts(len(weights)):
        momentum[part] = momentum[part] * mu + gradient[part]
        weights[part] = add_scaled(weights[part], -lr, add_scaled(gradient[part], mu, momentum[part]))


def in_parts(count: int) -> Iterator[slice]:
    """Yield the parts of a vector ``[count]`` that are computed one after another.

    An outer step in place then needs no second vector.
    """
    for start in range(0, count, _CHUNK):
        yield slice(start, start + _CHUNK)
