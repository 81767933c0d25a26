"""A head on its packed weight against the same head by torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swarmnet_client.model.packed import BLOCK, MAX_ROWS, Native, PackedHead, PackedWeight, pack_head
from tests.support.models.rounding import assert_product

INPUTS, OUTPUTS = 3 * BLOCK, 37


def q8_0(seed: int) -> torch.Tensor:
    """Values that gguf's Q8_0 represents exactly: in every block one value is 127 or -127 times a
    scale of 11 bits, or all are zero."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(-126, 127, (OUTPUTS, INPUTS // BLOCK, BLOCK), generator=rng).float()
    values[..., 5] = 127 * torch.randint(0, 2, values.shape[:-1], generator=rng).mul(2).sub(1)
    scales = torch.rand(*values.shape[:-1], 1, generator=rng).half().float()
    scales[0] = 0
    return (values * scales).view(OUTPUTS, INPUTS)


def bfloat16(seed: int) -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


KINDS: dict[str, Callable[[int], torch.Tensor]] = {"Q8_0": q8_0, "bfloat16": bfloat16}


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


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    if Native.load(folder) is None:
        pytest.skip("no compiler, or torch has no libgomp of its own")
    return folder


def packed(weight: torch.Tensor, cache: Path) -> Tied:
    model = Tied(weight)
    pack_head(model, cache)
    assert isinstance(model.head, PackedHead)
    return model


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each request to the packed weights."""
    asked: list[int] = []
    original = PackedWeight.times

    def counted(self: PackedWeight, given: torch.Tensor) -> torch.Tensor:
        asked.append(len(given))
        return original(self, given)

    monkeypatch.setattr(PackedWeight, "times", counted)
    return asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_few_rows_are_multiplied_by_the_packed_weight(
    kind: str, threads: int, cache: Path, times: list[int]
) -> None:
    weight = KINDS[kind](0)
    model = packed(weight, cache)
    torch.set_num_threads(threads)
    try:
        for shape in ((), (1,), (3,), (2, 2), (1, 1)):
            given = rows(*shape)
            assert_product(model.head(given), given, weight)
        strided = rows(2, 2)[:, 0]
        assert_product(model.head(strided), strided, weight)
    finally:
        torch.set_num_threads(1)
    assert times == [1, 1, 3, 4, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_and_none_are_left_to_torch(kind: str, cache: Path, times: list[int]) -> None:
    weight = KINDS[kind](1)
    model = packed(weight, cache)
    assert torch.equal(model.head(rows(MAX_ROWS + 1)), nn.functional.linear(rows(MAX_ROWS + 1), weight))
    assert model.head(rows(0)).shape == (0, OUTPUTS)
    assert times == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda weight: weight[3, 4].add_(1e-3), "one value is not an integer times the scale"),
        (lambda weight: weight[36, 95].fill_(torch.inf), "not finite"),
        (lambda weight: weight[0, 0].fill_(torch.nan), "not a number, in a block of zeros"),
        (lambda weight: weight[1, :BLOCK].mul_(1e-44), "a scale without an inverse"),
    ],
)
def test_a_weight_of_other_values_is_left_as_it_is(
    change: Callable[[torch.Tensor], Any], why: str, cache: Path
) -> None:
    weight = q8_0(2)
    change(weight)
    model = Tied(weight)
    pack_head(model, cache)
    assert type(model.head) is nn.Linear, why


@pytest.mark.parametrize(
    "weight",
    [bfloat16(0)[:, :-1], bfloat16(0).bfloat16(), bfloat16(0).double()],
    ids=["width", "half", "double"],
)
def test_a_weight_of_another_form_is_left_as_it_is(weight: torch.Tensor, cache: Path) -> None:
    model = Tied(weight.contiguous())
    pack_head(model, cache)
    assert type(model.head) is nn.Linear


@torch.inference_mode()
def test_a_weight_without_a_version_is_left_as_it_is(cache: Path) -> None:
    model = Tied(bfloat16(0).clone())
    pack_head(model, cache)
    assert type(model.head) is nn.Linear


def test_a_head_with_a_bias_and_a_model_without_a_head_are_not_packed(cache: Path) -> None:
    model = Tied(bfloat16(0))
    model.head.bias = nn.Parameter(torch.ones(OUTPUTS))
    pack_head(model, cache)
    assert type(model.head) is nn.Linear
    pack_head(SimpleNamespace(get_output_embeddings=lambda: None), cache)


def test_without_a_compiler_the_head_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    model = Tied(bfloat16(0))
    pack_head(model, tmp_path)
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
    model.load_state_dict({"head.weight": bfloat16(9), "embeddings.weight": bfloat16(9)})


def replace(model: Tied) -> None:
    model.head.weight = nn.Parameter(bfloat16(9))


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
    change: Callable[[Tied], None], cache: Path, times: list[int]
) -> None:
    model = packed(bfloat16(3), cache)
    before = model.head(rows(2)).detach()
    assert times == [2]
    change(model)
    with torch.no_grad():
        after = model.head(rows(2))
    assert not torch.allclose(after, before)
    assert torch.equal(after, nn.functional.linear(rows(2), model.head.weight))
    assert not model.head.is_packed


def test_gradients_flow_through_torch(cache: Path, times: list[int]) -> None:
    model = packed(q8_0(4), cache)
    given = rows(2).requires_grad_()
    model.head(given).sum().backward()
    assert torch.allclose(given.grad, model.head.weight.sum(0).expand(2, -1), atol=1e-4)
    with torch.no_grad():
        model.head(given)
    assert times == [2]


def test_a_copy_is_a_plain_layer_of_its_own(cache: Path) -> None:
    """PEFT copies the head that an adapter replaces."""
    model = packed(q8_0(5), cache)
    twin = copy.deepcopy(model.head)
    assert type(twin) is nn.Linear
    assert model.head.is_packed
    with torch.no_grad():
        twin.weight.zero_()
    assert model.head(rows(1)).any()


def test_packing_the_head_keeps_names_and_weights_of_the_model(cache: Path) -> None:
    weight = q8_0(6)
    model, plain = packed(weight.clone(), cache), Tied(weight)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == [
        name for name, _ in plain.named_parameters(remove_duplicate=False)
    ]
    assert model.head.weight is model.embeddings.weight
    for name, values in model.state_dict().items():
        assert torch.equal(values, plain.state_dict()[name])
    assert model.head.is_packed
