"""How far results may be from each other: bounds from the number and the size of the terms.

Every processor adds the terms of a product in an order of its own. Any order of ``n`` terms errs by
at most n u / (1 - n u) times the sum of their absolute values, where u is the unit roundoff (N. J.
Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002, section 3.1). A fixed
tolerance says how one processor rounds. These bounds hold on all processors.
"""

import torch

UNIT = 2.0**-24
"""The unit roundoff of float32."""
UNITS = {torch.float32: UNIT, torch.float64: 2.0**-53}
TINY_TERMS = 1000
"""Terms that one output of a tiny test model depends on, one after another: six blocks with inner
products of 32 channels (three times), 8 of a head, up to 40 positions and 64 of an MLP. Less would
ask some processors for more than float32 has. Ten times more would hide a step in half
precision."""
NEAR = 2 * TINY_TERMS * UNIT
"""Relative distance of two results of a tiny model: both are rounded. It is 1.2e-4, a quarter of
the unit roundoff of float16."""


def assert_product(
    found: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Assert that ``found`` is ``inputs`` [..., K] times ``weight`` [N, K] plus ``bias``, in
    float32.

    The true product is computed in float64. Each number has a bound of its own.
    """
    values, matrix = inputs.double(), weight.double()
    expected, sizes = values @ matrix.T, values.abs() @ matrix.abs().T
    terms = weight.shape[1]
    if bias is not None:
        expected, sizes, terms = expected + bias, sizes + bias.double().abs(), terms + 1
    assert found.shape == expected.shape
    errors = (found.double() - expected).abs()
    assert (errors <= terms * UNIT / (1 - terms * UNIT) * sizes).all(), f"{errors.max():.2e} off"


def assert_sum(found: torch.Tensor, terms: torch.Tensor, others: int = 1) -> None:
    """Assert that ``found``, in float32, is the sum of ``terms`` [n, ...] over the first dimension.

    ``others`` counts the operations that make a term, and the operations after the sum. Each of
    them rounds.
    """
    values = terms.double()
    rounding = (len(terms) + others) * UNIT
    errors = (found.double() - values.sum(0)).abs()
    assert found.shape == errors.shape
    assert (errors <= rounding / (1 - rounding) * values.abs().sum(0)).all(), f"{errors.max():.2e} off"


def assert_near(found: torch.Tensor, expected: torch.Tensor, terms: int = TINY_TERMS) -> None:
    """Assert that two results of one network differ by no more than their rounding.

    ``terms`` enter a result one after another along the network's longest path. The distance is
    relative to the norm of ``expected``, since a small channel has the errors of large ones.
    """
    assert found.shape == expected.shape
    distance, size = (found - expected).double().norm(), expected.double().norm()
    assert distance <= 2 * terms * UNITS[found.dtype] * size, f"{distance / size:.2e} apart"
