"""A head on its packed weight against the same head by torch."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_head import PackedHead, pack_head
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import Products
from tests.support.compiled import compiled_products
from tests.support.gguf.packed_matrices import loaded_copy, random_matrix
from tests.support.models.rounding import NEAR, assert_product

INPUTS, OUTPUTS = 256, 37
FORMATS = [Format.Q8_0, Format.Q4_1, Format.Q6_K, Format.BF16]


class Tied(nn.Module):
    """A model whose head and embeddings are one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(*weight.shape)
        self.head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.head.weight = self.embeddings.weight = nn.Parameter(weight, requires_grad=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def set_output_embeddings(self, head: nn.Linear) -> None:
        self.head = head


@pytest.fixture(scope="module")
def products() -> Products:
    return compiled_products()


def stored(format: Format, seed: int) -> PackedTensor:
    return random_matrix(format, OUTPUTS, INPUTS, seed, 0.1)


def packed(matrix: PackedTensor, products: Products) -> Tied:
    model = Tied(matrix.dequantize())
    pack_head(model, {"embeddings.weight": loaded_copy(matrix, products)}, products)
    assert isinstance(model.head, PackedHead)
    return model


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of hidden states in each product with a packed weight."""
    asked: list[int] = []
    original = Products.linear

    def counted(self: Products, inputs: torch.Tensor, weight: PackedTensor, bias: Any = None) -> torch.Tensor:
        asked.append(inputs.numel() // INPUTS)
        return original(self, inputs, weight, bias)

    monkeypatch.setattr(Products, "linear", counted)
    return asked


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("threads", [1, 3])
def test_hidden_states_are_multiplied_by_the_packed_weight(
    format: Format, threads: int, products: Products, times: list[int]
) -> None:
    matrix = stored(format, 0)
    model = packed(matrix, products)
    torch.set_num_threads(threads)
    try:
        for shape in ((), (1,), (3,), (2, 2), (1, 1), (100,)):
            given = rows(*shape)
            assert_product(model.head(given), given, matrix.dequantize())
        strided = rows(2, 2)[:, 0]
        assert_product(model.head(strided), strided, matrix.dequantize())
    finally:
        torch.set_num_threads(1)
    assert times == [1, 1, 3, 4, 1, 100, 2]
    assert model.head(rows(0)).shape == (0, OUTPUTS)


def test_a_weight_that_is_not_stored_in_fewer_bytes_is_left(products: Products) -> None:
    matrix = stored(Format.F32, 1)
    model = Tied(matrix.dequantize())
    for found in ({}, {"other.weight": stored(Format.BF16, 1)}, {"head.weight": matrix}):
        pack_head(model, found, products)
        assert type(model.head) is nn.Linear


@torch.inference_mode()
def test_a_weight_without_a_version_is_left_as_it_is(products: Products) -> None:
    matrix = stored(Format.BF16, 0)
    model = Tied(matrix.dequantize().clone())
    pack_head(model, {"head.weight": matrix}, products)
    assert type(model.head) is nn.Linear


def test_a_head_with_a_bias_and_a_model_without_a_head_are_not_packed(products: Products) -> None:
    matrix = stored(Format.BF16, 0)
    model = Tied(matrix.dequantize())
    model.head.bias = nn.Parameter(torch.ones(OUTPUTS))
    pack_head(model, {"head.weight": matrix}, products)
    assert type(model.head) is nn.Linear
    pack_head(SimpleNamespace(get_output_embeddings=lambda: None), {"head.weight": matrix}, products)


def test_without_a_compiler_the_head_is_left_as_it_is() -> None:
    matrix = stored(Format.BF16, 0)
    model = Tied(matrix.dequantize())
    pack_head(model, {"head.weight": matrix}, Products(None))
    assert type(model.head) is nn.Linear


def optimise(model: Tied) -> None:
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.head(rows(1)).sum().backward()
    optimizer.step()


def merge(model: Tied) -> None:
    """Change the head as PEFT does when it merges an adapter."""
    model.head.weight.data = model.head.weight.data + 1


def merge_in_place(model: Tied) -> None:
    model.head.weight.data += 1


def load_state(model: Tied) -> None:
    model.load_state_dict(
        {"head.weight": torch.ones(OUTPUTS, INPUTS), "embeddings.weight": torch.ones(OUTPUTS, INPUTS)}
    )


def replace(model: Tied) -> None:
    model.head.weight = nn.Parameter(torch.ones(OUTPUTS, INPUTS))


def add_through_embeddings(model: Tied) -> None:
    with torch.inference_mode():
        model.embeddings.weight.add_(1)


def add_to_a_view(model: Tied) -> None:
    with torch.no_grad():
        model.head.weight.detach()[2:5].mul_(2)


@pytest.mark.parametrize(
    "change",
    [optimise, merge, merge_in_place, load_state, replace, add_through_embeddings, add_to_a_view],
    ids=lambda change: change.__name__,
)
def test_a_change_of_the_weight_is_noticed(
    change: Callable[[Tied], None], products: Products, times: list[int]
) -> None:
    model = packed(stored(Format.BF16, 3), products)
    before = model.head(rows(2)).detach()
    assert times == [2]
    change(model)
    with torch.no_grad():
        after = model.head(rows(2))
    assert (after - before).norm() > NEAR * before.norm()
    assert torch.equal(after, nn.functional.linear(rows(2), model.head.weight))
    assert not model.head.is_packed


def test_gradients_flow_through_torch(products: Products, times: list[int]) -> None:
    model = packed(stored(Format.Q8_0, 4), products)
    given = rows(2).requires_grad_()
    model.head(given).sum().backward()
    assert_product(given.grad, torch.ones(2, OUTPUTS), model.head.weight.T)
    with torch.no_grad():
        model.head(given)
    assert times == [2]


def test_a_copy_is_a_plain_layer_of_its_own(products: Products) -> None:
    """PEFT copies the head that an adapter replaces."""
    model = packed(stored(Format.Q8_0, 5), products)
    twin = copy.deepcopy(model.head)
    assert type(twin) is nn.Linear
    assert model.head.is_packed
    with torch.no_grad():
        twin.weight.zero_()
    assert model.head(rows(1)).any()


def test_packing_the_head_keeps_names_and_weights_of_the_model(products: Products) -> None:
    matrix = stored(Format.Q8_0, 6)
    model, plain = packed(matrix, products), Tied(matrix.dequantize())
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        name for name, _ in plain.named_parameters(remove_duplicate=False)
    ]
    assert model.head.weight is model.embeddings.weight
    for name, values in model.state_dict().items():
        assert torch.equal(values, plain.state_dict()[name])
    assert model.head.is_packed
