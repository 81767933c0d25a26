"""Functions of ``transcendentals.h`` against float64, with the same bits for every target."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from swarmnet_node.engine.kernels.native_backend import INCLUDED
from swarmnet_protocols.machine import native_code

TARGETS = [each.name for each in native_code.targets()]
SOURCE = """
#include "transcendentals.h"
#define EACH(name)                                                            \
    void all_##name(float *x, int64_t count) {                                \
        _Pragma("omp simd") for (int64_t i = 0; i < count; i++) x[i] = name(x[i]); \
    }
static inline float cosine(float x) { float found, other; cosine_and_sine(x, &found, &other); return found; }
static inline float sine(float x) { float found, other; cosine_and_sine(x, &other, &found); return found; }
EACH(exponential) EACH(hyperbolic_tangent) EACH(normal_probability) EACH(cosine) EACH(sine)
int trial(void) { return 0; }
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[ctypes.CDLL]:
    folder = tmp_path_factory.mktemp("transcendentals")
    source = folder / "all.c"
    source.write_text(SOURCE)
    found = [native_code.load(source, folder, headers=INCLUDED, target=target) for target in TARGETS]
    assert found
    return [each for each in found if each is not None]


def computed(libraries: list[ctypes.CDLL], name: str, x: torch.Tensor) -> torch.Tensor:
    """The values at ``x``, equal for all targets."""
    outputs = []
    for library in libraries:
        outputs.append(x.clone())
        getattr(library, f"all_{name}")(
            ctypes.c_void_p(outputs[-1].data_ptr()), ctypes.c_int64(len(outputs[-1]))
        )
    for each in outputs:
        assert torch.equal(each.nan_to_num(nan=123), outputs[0].nan_to_num(nan=123))
    return outputs[0]


def units_off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error in units in the last place of float32."""
    unit = 2.0 ** (torch.frexp(exact).exponent - 24).double()
    return float(((found.double() - exact).abs() / unit).max())


def test_the_exponential_is_within_one_unit_in_the_last_place(libraries: list[ctypes.CDLL]) -> None:
    x = torch.linspace(-87, 88, 100_000)
    found = computed(libraries, "exponential", x)
    assert units_off(found, x.double().exp()) < 1
    ends = computed(libraries, "exponential", torch.tensor([0.0, -1000.0, 1000.0, torch.nan]))
    assert ends[:3].tolist() == [1.0, *found[[0, -1]].tolist()]  # x is clamped
    assert ends[3].isnan()


def test_tanh_is_within_two_units_in_the_last_place(libraries: list[ctypes.CDLL]) -> None:
    x = torch.cat([torch.linspace(-10, 10, 100_001), torch.logspace(-30, 2, 10_000)])
    found = computed(libraries, "hyperbolic_tangent", x)
    x, found = x[x != 0], found[x != 0]
    assert units_off(found, x.double().tanh()) < 2
    assert found.abs().max() <= 1
    assert computed(libraries, "hyperbolic_tangent", torch.tensor([torch.nan])).isnan()


def test_probabilities_are_within_two_to_the_minus_23(libraries: list[ctypes.CDLL]) -> None:
    x = torch.cat([torch.linspace(-50, 50, 200_001), torch.tensor([-1e9, 1e9])])
    found = computed(libraries, "normal_probability", x).double()
    exact = torch.special.erfc(-x.double() * 0.5**0.5) / 2
    assert (found - exact).abs().max() < 2.0**-23
    assert computed(libraries, "normal_probability", torch.tensor([torch.nan])).isnan()


@pytest.mark.parametrize(("name", "true"), [("cosine", torch.cos), ("sine", torch.sin)])
def test_cosines_and_sines_are_within_one_unit_in_the_last_place(
    name: str, true: Callable[[torch.Tensor], torch.Tensor], libraries: list[ctypes.CDLL]
) -> None:
    """Also next to multiples of a quarter turn, up to the largest positions."""
    quarters = (torch.arange(1, 600_000, dtype=torch.float64) * torch.pi / 2).float()
    x = torch.cat(
        [
            torch.linspace(-4, 4, 100_000),
            *(
                torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2.0**power
                for power in (10, 20)
            ),
            quarters,
            quarters.nextafter(torch.tensor(torch.inf)),
        ]
    )
    assert units_off(computed(libraries, name, x), true(x.double())) < 1
    assert computed(libraries, name, torch.tensor([0.0])).tolist() == [float(name == "cosine")]
    assert computed(libraries, name, torch.tensor([torch.nan, torch.inf])).isnan().all()
