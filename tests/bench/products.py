"""Products with packed matrices against torch's products with the same weights in float32 and
bfloat16, in turn.

    python -m tests.bench.products [--rows 1 4 32 128 512] [--size 2048] [--formats Q4_1 ...] [--threads 2]

Prints one JSON object a format, with the processor and the target of the C code. It has the median
milliseconds of reading a packed matrix from memory, and of one product [rows, size] x [size, size].
``row_over_read``: the rate at which a product of one row reads its matrix, as a part of the rate of
reading alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.quantization.formats import Format
from swarmnet_protocols.quantization.packed_tensor import PackedTensor
from swarmnet_protocols.quantization.products import load_products
from tests.bench import results
from tests.support.gguf.packed_matrices import loaded_copy, random_matrix

REPEATS = 7
COLD_BYTES = 256 << 20
"""Total size of the matrices that products take in turn. So each product reads its matrix from
memory and not from a cache, as in a decoder."""


def median_ms(
    multiply: Callable[[torch.Tensor, Any], object], inputs: torch.Tensor, weights: Sequence[Any]
) -> float:
    """Median time of a product with one of ``weights``."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for weight in weights:
            multiply(inputs, weight)
        times.append((time.perf_counter() - start) / len(weights))
    return round(statistics.median(times) * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32, 128, 512])
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--formats", nargs="+", default=["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    products = load_products(default_cache_dir())
    size = options.size
    copies = max(1, COLD_BYTES // (4 * size * size))
    dense = [torch.randn(size, size) for _ in range(copies)]
    halves = [weight.bfloat16() for weight in dense]
    for name in options.formats:
        [segment] = random_matrix(Format[name], size, size).segments
        packed = [loaded_copy(PackedTensor((segment,)), products) for _ in range(copies)]
        numbers = [segment.tensor.clone().view(torch.int64) for _ in range(copies)]
        result: dict[str, Any] = {
            "bench": "products",
            "machine": results.machine(),
            "target": products.target,
            "format": name,
            "size": size,
            "threads": options.threads,
            "read_ms": median_ms(lambda _, matrix: matrix.sum(), torch.empty(0), numbers),
        }
        took: dict[int, float] = {}
        for rows in options.rows:
            inputs = torch.randn(rows, size)
            took[rows] = median_ms(products.linear, inputs, packed)
            result[f"rows_{rows}"] = {
                "packed_ms": took[rows],
                "float32_ms": median_ms(functional.linear, inputs, dense),
                "bfloat16_ms": median_ms(functional.linear, inputs.bfloat16(), halves),
            }
        if 1 in took:
            result["row_over_read"] = round(result["read_ms"] / took[1], 3)
            if 4 in took:
                result["four_rows_over_one"] = round(took[4] / took[1], 2)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
