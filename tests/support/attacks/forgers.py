"""Wrong outputs that a lying host may send: every check of outputs must refuse all of them."""

from collections.abc import Callable, Mapping

import torch

Forger = Callable[[torch.Tensor], torch.Tensor]
"""Turns true outputs [P, D] into false ones of the same shape."""


def rolled(outputs: torch.Tensor) -> torch.Tensor:
    """Wrong outputs of the same size as the true ones."""
    return torch.roll(outputs, 1, dims=-1)


def constant(outputs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(outputs)


def random(outputs: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(len(outputs)))
    return drawn * outputs.std(dim=-1, keepdim=True)


def one_huge_channel(outputs: torch.Tensor) -> torch.Tensor:
    """A norm shrinks all other channels to nothing."""
    forged = outputs.clone()
    forged[..., 3] = 1e6
    return forged


def a_large_channel(outputs: torch.Tensor) -> torch.Tensor:
    """One channel, ten times as large as the largest."""
    forged = outputs.clone()
    forged[..., 3] = 10 * outputs.abs().amax(dim=-1)
    return forged


def scaled(outputs: torch.Tensor) -> torch.Tensor:
    """A norm after it hides this."""
    return 2 * outputs


def negated(outputs: torch.Tensor) -> torch.Tensor:
    return -outputs


def some_signs(outputs: torch.Tensor) -> torch.Tensor:
    """The signs of every fourth channel."""
    forged = outputs.clone()
    forged[..., ::4] *= -1
    return forged


def nothing(outputs: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(outputs)


def stale(outputs: torch.Tensor) -> torch.Tensor:
    """Each position has the outputs of the one before; the first is right."""
    return torch.cat([outputs[:1], outputs[:-1]])


def replayed(outputs: torch.Tensor) -> torch.Tensor:
    """Every position has the outputs of the first."""
    return outputs[:1].expand_as(outputs)


FORGERS: Mapping[str, Forger] = {
    forger.__name__: forger
    for forger in (
        rolled,
        constant,
        random,
        one_huge_channel,
        a_large_channel,
        scaled,
        negated,
        some_signs,
        nothing,
        stale,
        replayed,
    )
}


def towards(direction: torch.Tensor, size: float) -> Forger:
    """A forger that adds ``size`` times the typical channel in the ``direction`` [D] of one
    token."""
    return lambda outputs: (
        outputs + size * outputs.abs().median(dim=-1, keepdim=True).values * direction.sign()
    )
