"""The bounds of ``rounding`` take any order of addition and refuse half precision."""

import pytest
import torch

from tests.support.models.rounding import UNIT, assert_near, assert_product, assert_sum

ROWS, COLUMNS, OUTPUTS = 3, 768, 37


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.parametrize("order", ["forwards", "backwards", "by size"])
def test_any_order_of_addition_is_within_the_bound(order: str) -> None:
    inputs, weight = drawn(ROWS, COLUMNS), drawn(OUTPUTS, COLUMNS)
    terms = inputs[:, None] * weight
    if order != "forwards":
        terms = terms.flip(-1) if order == "backwards" else terms.sort(-1).values
    total = torch.zeros(ROWS, OUTPUTS)
    for term in terms.unbind(-1):
        total = total + term
    assert_product(total, inputs, weight)


def test_one_wrong_number_of_a_product_is_refused() -> None:
    inputs, weight = drawn(ROWS, COLUMNS), drawn(OUTPUTS, COLUMNS)
    found = inputs @ weight.T
    found[1, 2] += 2 * COLUMNS * UNIT * (inputs[1].abs() @ weight[2].abs())
    with pytest.raises(AssertionError):
        assert_product(found, inputs, weight)


def test_one_wrong_number_of_a_sum_is_refused() -> None:
    terms = drawn(ROWS, COLUMNS)
    found = terms[2] + terms[0] + terms[1]
    assert_sum(found, terms)
    found[7] += 10 * UNIT * terms[:, 7].abs().sum()
    with pytest.raises(AssertionError):
        assert_sum(found, terms)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype: torch.dtype) -> None:
    inputs = drawn(ROWS, COLUMNS)
    with pytest.raises(AssertionError):
        assert_near(inputs.to(dtype).float(), inputs)
