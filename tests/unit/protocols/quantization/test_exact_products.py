"""Products in C have the same bits for every processor, layout, number of threads and of rows, and
are as accurate as float32."""

import ctypes
from collections.abc import Iterator, Mapping

import pytest
import torch

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.machine import native_code
from swarmnet_protocols.quantization.formats import BLOCKS, WHOLE_ROWS, Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import HEADERS, SOURCE, NativeLinear, NativeSegment, declare
from tests.support.gguf.packed_matrices import HALVES, random_matrix
from tests.support.models.rounding import UNIT

every_format = pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)


class Matrix:
    """A matrix of one segment as C reads it, from ``interleaved`` groups or rows."""

    def __init__(self, matrix: PackedTensor, groups: torch.Tensor | None = None) -> None:
        [segment] = matrix.segments
        self.outputs, self.inputs = matrix.shape
        self._data = segment.tensor if groups is None else groups
        row_bytes = segment.data.shape[1]
        self.segment = NativeSegment(
            self._data.data_ptr(), int(segment.format), row_bytes, self.outputs, int(groups is not None)
        )


class Library:
    """The C code for one target."""

    def __init__(self, target: str) -> None:
        code = native_code.load(SOURCE, default_cache_dir(), headers=HEADERS, target=target)
        assert code is not None
        self._code = code
        declare(code)

    def interleaved(self, matrix: PackedTensor, threads: int = 1) -> Matrix:
        rows = Matrix(matrix)
        groups = torch.empty(-(-rows.outputs // 16), 16 * rows.segment.row_bytes, dtype=torch.uint8)
        self._code.interleave(ctypes.byref(rows.segment), rows.inputs, threads, groups.data_ptr())
        return Matrix(matrix, groups)

    def product(self, x: torch.Tensor, matrix: Matrix, threads: int = 1) -> torch.Tensor:
        out = torch.full((len(x), matrix.outputs), torch.nan)
        linear = NativeLinear(ctypes.addressof(matrix.segment), None, 1, matrix.inputs)
        pointers = (x.data_ptr(), len(x), threads, out.data_ptr())
        assert self._code.multiply(ctypes.byref(linear), matrix.outputs, *pointers)
        return out

    def unpacked(self, matrix: Matrix, first: int, rows: int | torch.Tensor) -> torch.Tensor | None:
        count, chosen = (rows, None) if isinstance(rows, int) else (len(rows), rows.data_ptr())
        out = torch.full((count, matrix.inputs), torch.nan)
        done = self._code.unpack_rows(
            *(ctypes.byref(matrix.segment), matrix.inputs, first, count, chosen, 2, out.data_ptr())
        )
        return out if done else None


@pytest.fixture(scope="module")
def libraries() -> dict[str, Library]:
    """The libraries of the targets that this machine has, by target."""
    return {target.name: Library(target.name) for target in native_code.targets()}


def forms(libraries: Mapping[str, Library], matrix: PackedTensor) -> Iterator[Matrix]:
    """The matrix in rows, and interleaved if its format can be."""
    yield Matrix(matrix)
    if matrix.segments[0].format not in WHOLE_ROWS:
        yield libraries["plain"].interleaved(matrix)


def activations(rows: int, columns: int) -> torch.Tensor:
    """Random activations, some of them twenty times larger than the others."""
    torch.manual_seed(rows * columns)
    return torch.randn(rows, columns) * torch.where(torch.rand(rows, columns) < 0.02, 20.0, 1.0)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32)


@every_format
@pytest.mark.parametrize(("outputs", "columns"), [(16, 256), (43, 512), (5, 1280)])
def test_every_target_gives_the_bits_of_plain_c(
    libraries: Mapping[str, Library], format: Format, outputs: int, columns: int
) -> None:
    matrix = random_matrix(format, outputs, columns)
    for rows in (1, 2, 3, 4, 5, 8, 17, 64, 65):
        x = activations(rows, columns)
        expected = bits(libraries["plain"].product(x, Matrix(matrix)))
        for form in forms(libraries, matrix):
            for name, library in libraries.items():
                found = library.product(x, form, threads=1 + rows % 4)
                assert torch.equal(bits(found), expected), (name, rows, form.segment.interleaved)


@every_format
def test_a_product_errs_no_more_than_a_loop_of_float32(
    libraries: Mapping[str, Library], format: Format
) -> None:
    """One that is wrong by 2 ** -20 errs more."""
    matrix, x = random_matrix(format, 48, 256), activations(64, 256)
    weight = matrix.dequantize()
    exact = x.double() @ weight.double().T
    loop = torch.zeros(64, 48)
    for column in range(256):
        loop += x[:, column, None] * weight[:, column]
    found = libraries["plain"].product(x, Matrix(matrix))
    assert (found - exact).norm() <= (loop - exact).norm()
    assert (found * (1 + 2.0**-20) - exact).norm() > (loop - exact).norm()


@every_format
def test_interleaved_rows_have_the_same_values(libraries: Mapping[str, Library], format: Format) -> None:
    matrix = random_matrix(format, 43, 512)
    expected = matrix.dequantize()
    chosen = torch.tensor([42, 0, 17, 17, 16])
    for form in forms(libraries, matrix):
        for library in libraries.values():
            assert torch.equal(library.unpacked(form, 0, 43), expected)
            assert torch.equal(library.unpacked(form, 13, 9), expected[13:22])
            assert torch.equal(library.unpacked(form, 0, chosen), expected[chosen])
            for missing in (torch.tensor([0, 43]), torch.tensor([-1])):
                assert library.unpacked(form, 0, missing) is None
            assert library.unpacked(form, 40, 4) is None


@pytest.mark.parametrize(
    "format", [each for each in Format if each not in WHOLE_ROWS], ids=lambda each: each.name
)
def test_every_target_interleaves_equally(libraries: Mapping[str, Library], format: Format) -> None:
    """In as many bytes as the rows of whole groups."""
    matrix = random_matrix(format, 35, 256)
    expected = libraries["plain"].interleaved(matrix)._data
    assert expected.shape == (3, 16 * matrix.segments[0].data.shape[1])
    for library in libraries.values():
        assert torch.equal(library.interleaved(matrix, threads=3)._data, expected)


@pytest.mark.parametrize("bits_of_scale", [0x0001, 0x03FF, 0x7BFF, 0xFBFF, 0x0000, 0x8000])
@pytest.mark.parametrize("code", [0x00, 0xFF, 0x80])
@pytest.mark.parametrize("format", list(HALVES), ids=lambda format: format.name)
def test_the_largest_and_smallest_weights(
    libraries: Mapping[str, Library], format: Format, code: int, bits_of_scale: int
) -> None:
    """Scales that are subnormal, the largest, or zero, with all bits of codes set or none."""
    weights, block_bytes = BLOCKS[format]
    blocks = torch.full((17, 512 // weights, block_bytes), code, dtype=torch.uint8)
    for at in HALVES[format]:
        blocks[..., at], blocks[..., at + 1] = bits_of_scale & 255, bits_of_scale >> 8
    if format == Format.F16:
        blocks = blocks[..., :2].contiguous()
    matrix = PackedTensor.of(format, blocks.view(17, -1))
    x = torch.full((3, 512), 3.0e4)
    x[1] = -x[1]
    x[2] = activations(1, 512) * 1e-30
    assert_equal_and_exact(libraries, matrix, x)


@every_format
def test_the_largest_and_smallest_activations(libraries: Mapping[str, Library], format: Format) -> None:
    matrix, x = random_matrix(format, 17, 512), activations(6, 512)
    x[0] *= 1e30
    x[1] *= 1e-36
    x[2] = 0
    x[3, 256:] = 0
    x[4, ::2] *= 1e-10
    x[5] = -0.0
    assert_equal_and_exact(libraries, matrix, x)


def assert_equal_and_exact(libraries: Mapping[str, Library], matrix: PackedTensor, x: torch.Tensor) -> None:
    expected = libraries["plain"].product(x, Matrix(matrix))
    for form in forms(libraries, matrix):
        for library in libraries.values():
            assert torch.equal(bits(library.product(x, form)), bits(expected))
    weight = matrix.dequantize().double()
    exact, sizes = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    # Activations are multiples of 2 ** -126 at least, and are rounded to the nearest one.
    smallest = 2.0**-127 * weight.abs().sum(1)
    blocks = x.double().view(len(x), -1, 32)
    rounding = blocks.abs().amax(2, keepdim=True).expand_as(blocks).flatten(1) @ weight.abs().T * 2.0**-23
    assert ((expected - exact).abs() <= x.shape[1] * UNIT * sizes + smallest + rounding).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@every_format
def test_numbers_that_are_not_finite_are_seen_in_every_output(
    libraries: Mapping[str, Library], format: Format, value: float
) -> None:
    """Whoever gets the outputs refuses them."""
    matrix, x = random_matrix(format, 17, 512), activations(3, 512)
    clean = libraries["plain"].product(x, Matrix(matrix))
    x[1, 300] = value
    for form in forms(libraries, matrix):
        for library in libraries.values():
            found = library.product(x, form)
            assert torch.equal(found[::2], clean[::2])
            if format not in WHOLE_ROWS:
                assert found[1].isnan().all()
            else:
                assert not found[1].isfinite().any()
