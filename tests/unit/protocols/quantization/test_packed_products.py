"""Packed matrices have the values of gguf's own dequantisation, and products with them those of the
dequantised weights."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmnet_protocols.arrays import Array
from swarmnet_protocols.quantization import products as products_module
from swarmnet_protocols.quantization.formats import BLOCKS, WHOLE_ROWS, Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor, Segment
from swarmnet_protocols.quantization.products import Products
from swarmnet_protocols.quantization.unpack import unpack
from tests.support.compiled import compiled_products
from tests.support.gguf.packed_matrices import loaded_copy, random_matrix
from tests.support.models.rounding import assert_product

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def products() -> Products:
    return compiled_products()


@pytest.mark.parametrize("rows", [7, 16, 43])
@pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)
def test_native_code_unpacks_exactly_what_python_does(
    products: Products, format: Format, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_module, "INTERLEAVED_BYTES", 1)
    matrix = random_matrix(format, rows, 512)
    expected = matrix.dequantize()
    some = torch.tensor([rows - 1, 0, 0, 5])
    for each in (matrix, loaded_copy(matrix, products)):
        assert each.shape == (rows, 512)
        assert torch.equal(products.dequantize(each), expected)
        assert torch.equal(products.select(each, some), expected[some])
        with pytest.raises(IndexError):
            products.select(each, torch.tensor([0, rows]))


@pytest.mark.parametrize("draw", range(3))
@pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)
def test_torch_unpacks_exactly_what_gguf_does(format: Format, draw: int) -> None:
    matrix = random_matrix(format, 7, 512, draw)
    [segment] = matrix.segments
    unpacked = unpack(format, segment.tensor)
    # to the bit
    assert torch.equal(unpacked.view(torch.int32), matrix.dequantize().view(torch.int32))
    assert torch.equal(unpack(format, segment.tensor[2:5]), unpacked[2:5])


@pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)
def test_another_device_than_the_cpu_multiplies_in_its_own_memory(
    products: Products, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device computes shapes and refuses tensors of the CPU. Several panels, so that they
    are joined."""
    monkeypatch.setattr(products_module, "ACCELERATOR_PANEL_BYTES", 5 * 512 * 4)
    matrix = random_matrix(format, 43, 512).to(torch.device("meta"))
    inputs = torch.empty(3, 512, device="meta", dtype=torch.bfloat16)
    outputs = products.linear(inputs, matrix, torch.empty(43, device="meta", dtype=torch.bfloat16))
    assert (outputs.shape, outputs.dtype, outputs.device.type) == ((3, 43), torch.bfloat16, "meta")
    assert products.back(outputs, matrix).shape == inputs.shape
    assert products.dequantize(matrix).device.type == "meta"


def test_an_accelerator_takes_plain_numbers_as_ordinary_tensors(products: Products) -> None:
    meta = torch.device("meta")
    for format, dtype in (
        (Format.BF16, torch.bfloat16),
        (Format.F16, torch.float16),
        (Format.F32, torch.float32),
    ):
        matrix = random_matrix(format, 4, 64)
        assert isinstance(products.loaded(matrix, CPU), PackedTensor)
        loaded = products.loaded(matrix, meta)
        assert isinstance(loaded, torch.Tensor)
        assert (loaded.dtype, loaded.shape) == (dtype, (4, 64))
    assert isinstance(products.loaded(random_matrix(Format.Q4_0, 4, 64), meta), PackedTensor)


def test_every_number_of_16_bits_is_read_as_numpy_does(products: Products) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(1, -1)
    matrix = PackedTensor.of(Format.F16, halves.view(torch.uint8))
    expected = halves.view(torch.float16).float()
    assert torch.equal(products.dequantize(matrix).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_every_scale_of_mxfp4_is_read_as_gguf_does(products: Products) -> None:
    data = torch.full((255, 17), 0x21, dtype=torch.uint8)
    data[:, 0] = torch.arange(255)
    matrix = PackedTensor.of(Format.MXFP4, data)
    assert torch.equal(products.dequantize(matrix), matrix.dequantize())
    assert torch.equal(unpack(Format.MXFP4, data), matrix.dequantize())


@pytest.mark.matrix
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("rows", [1, 3, 8, 13, 65])
@pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)
def test_products_equal_those_of_the_dequantised_weights(
    products: Products, format: Format, rows: int, native: bool
) -> None:
    used = products if native else Products(None)
    matrix = random_matrix(format, 43, 768)
    inputs, bias = torch.randn(rows, 768), torch.randn(43)
    weight = matrix.dequantize()
    assert_product(used.linear(inputs, matrix, bias), inputs, weight, bias)
    gradients = torch.randn(rows, 43)
    assert_product(used.back(gradients, matrix), gradients, weight.T)


@pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(products: Products, format: Format) -> None:
    matrix = loaded_copy(random_matrix(format, 43, 768), products)
    inputs = torch.randn(150, 768)
    alone = torch.stack([products.linear(row, matrix) for row in inputs])
    for count in (2, 9, 64, 65, 150):
        assert torch.equal(products.linear(inputs[:count], matrix), alone[:count])


def test_plain_c_multiplies_few_rows_only() -> None:
    """With many rows it takes dozens of times as long as torch."""
    products = compiled_products("plain")
    matrix = loaded_copy(random_matrix(Format.Q4_1, 43, 768), products)
    inputs = torch.randn(9, 768)
    assert torch.equal(products.linear(inputs, matrix), products._by_panels(inputs, matrix, None))
    assert np.array_equal(products.linear(inputs[:4], matrix), products.multiply(inputs[:4].numpy(), matrix))


def test_a_matrix_is_interleaved_where_it_is(products: Products) -> None:
    matrix = random_matrix(Format.Q4_0, 48, 512)
    [before], values = matrix.segments, matrix.dequantize()
    loaded = products.loaded(matrix, CPU)
    assert isinstance(loaded, PackedTensor)
    [after] = loaded.segments
    assert np.shares_memory(after.data, before.data)
    assert torch.equal(products.dequantize(loaded), values)
    assert products.loaded(loaded, CPU).segments == loaded.segments


@pytest.mark.parametrize("format", [Format.Q8_0, Format.Q6_K, Format.BF16, Format.INT4])
def test_rows_of_any_width_take_little_of_a_threads_stack(products: Products, format: Format) -> None:
    """A model chooses the width of its rows; four of these have more bytes as float32 than the
    stack of this thread."""
    columns = (1 << 16) + 256
    matrix, inputs = random_matrix(format, 6, columns), torch.randn(3, columns)
    found: list[torch.Tensor] = []

    def multiply() -> None:
        torch.set_num_threads(1)
        found.append(products.linear(inputs, matrix))

    before, threads = threading.stack_size(512 << 10), torch.get_num_threads()
    try:
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
        torch.set_num_threads(threads)
    assert torch.equal(found[0], products.linear(inputs, matrix))
    assert_product(found[0], inputs, matrix.dequantize())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_of_several_formats_are_one_matrix(products: Products, threads: int) -> None:
    parts = [
        random_matrix(format, rows, 512)
        for format, rows in ((Format.Q4_K, 5), (Format.Q4_K, 6), (Format.Q6_K, 9), (Format.F32, 2))
    ]
    matrix = PackedTensor.joined(parts)
    assert [len(segment.data) for segment in matrix.segments] == [11, 9, 2]
    assert matrix.nbytes == sum(part.nbytes for part in parts)
    expected = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(products.dequantize(matrix), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = torch.randn(3, 512)
        assert_product(products.linear(inputs, matrix), inputs, expected)
    finally:
        torch.set_num_threads(before)
    for piece, part in zip(matrix.split([5, 6, 9, 2]), parts, strict=True):
        assert torch.equal(piece.dequantize(), part.dequantize())


def test_selected_rows_are_copied_as_they_are_packed() -> None:
    matrix = random_matrix(Format.Q8_0, 6, 64)
    order = np.array([5, 0, 0, 3])
    assert torch.equal(matrix.select(order).dequantize(), matrix.dequantize()[order])


@pytest.mark.parametrize(
    ("format", "data"),
    [
        (Format.Q4_0, np.zeros((2, 17), np.uint8)),
        (Format.Q4_0, np.zeros(36, np.uint8)),
        (Format.Q4_0, np.zeros((2, 18))),
    ],
)
def test_bytes_that_are_no_whole_blocks_are_refused(format: Format, data: Array) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Segment(format, data)


@pytest.mark.parametrize(
    ("format", "groups", "rows"),
    [
        (Format.Q4_0, 2, 33),
        (Format.Q4_0, 2, 16),
        (Format.Q4_0, 0, -1),
        (Format.F16, 1, 16),
        (Format.FP8, 1, 3),
    ],
)
def test_groups_that_hold_other_rows_are_refused(format: Format, groups: int, rows: int) -> None:
    data = torch.zeros(groups, 16 * BLOCKS[format][1], dtype=torch.uint8)
    with pytest.raises(ValueError, match="bytes"):
        Segment(format, data, rows)


@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("format", list(Format), ids=lambda format: format.name)
def test_any_number_of_rows_and_blocks_is_multiplied(
    products: Products, format: Format, outputs: int
) -> None:
    for blocks in (1, 3):
        columns = 32 * blocks if format in WHOLE_ROWS - {Format.FP8} else BLOCKS[format][0] * blocks
        matrix = random_matrix(format, outputs, columns)
        weight = matrix.dequantize()
        for each in (matrix, loaded_copy(matrix, products)):
            for rows in (0, 1, 5):
                inputs = torch.randn(rows, columns)
                assert_product(products.linear(inputs, each), inputs, weight)
            assert torch.equal(products.dequantize(each), weight)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("columns", [0, 32, 255, 512])
def test_inputs_of_another_width_are_refused(products: Products, native: bool, columns: int) -> None:
    used = products if native else Products(None)
    with pytest.raises(ValueError, match=f"{columns} columns for 256"):
        used.linear(torch.zeros(8, columns), random_matrix(Format.Q4_0, 3, 256))


def test_memory_that_c_cannot_read_is_refused(products: Products, tmp_path: Path) -> None:
    matrix = PackedTensor.of(Format.Q4_0, torch.zeros(18, 4, dtype=torch.uint8).T)
    with pytest.raises(ValueError, match="contiguous"):
        products.dequantize(matrix)


def test_rows_of_several_formats_are_selected_in_any_order() -> None:
    matrix = PackedTensor.joined(
        [random_matrix(Format.Q8_0, 5, 256), random_matrix(Format.Q4_K, 4, 256, seed=1)]
    )
    rows = np.array([8, 0, 1, 5, 4, 4, 7])
    assert torch.equal(matrix.select(rows).dequantize(), matrix.dequantize()[rows])


HALF_BLOCKS = np.arange(512).reshape(4, 128)[[2, 0, 3, 1]].ravel()
"""An order of columns that tears the blocks of K formats, and no others."""


@pytest.mark.parametrize("format", [Format.F32, Format.F16, Format.Q8_0, Format.Q4_K, Format.Q6_K])
def test_columns_change_their_order_without_another_rounding(products: Products, format: Format) -> None:
    matrix = PackedTensor.joined([random_matrix(format, 3, 512), random_matrix(Format.Q4_0, 2, 512)])
    moved = matrix.select_columns(HALF_BLOCKS)
    assert (moved.inputs is None) == (BLOCKS[format][0] <= 128)
    expected = matrix.dequantize()[:, HALF_BLOCKS]
    for each in (moved, moved.to(torch.device("cpu"))):
        assert torch.equal(each.dequantize(), expected)
        assert torch.equal(products.dequantize(each), expected)
    rows = np.array([4, 0])
    assert torch.equal(moved.select(rows).dequantize(), expected[rows])
    assert torch.equal(moved.rows(1, 5).dequantize(), expected[1:5])
    assert torch.equal(moved.select_columns(HALF_BLOCKS).dequantize(), expected[:, HALF_BLOCKS])
    for count in (2, 65):
        inputs = torch.randn(count, 512)
        assert_product(products.linear(inputs, moved), inputs, expected)
        gradients = torch.randn(count, 5)
        assert_product(products.back(gradients, moved), gradients, expected.T)


def test_native_code_reads_no_matrix_with_another_order_of_columns() -> None:
    matrix = random_matrix(Format.Q4_K, 3, 512).select_columns(HALF_BLOCKS)
    with pytest.raises(ValueError, match="orders"):
        PackedTensor.joined([matrix, matrix])
    with pytest.raises(ValueError, match="orders"):
        PackedTensor.taking_turns([matrix, matrix])
    with pytest.raises(ValueError, match="their order"):
        products_module.native_segments(matrix)
