/* Products with packed matrices, and their unpacking, by several threads. products.py declares the same structs. */

#include <omp.h>

#include "product.h"

static range share(int64_t count) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return (range){count * thread / threads, count * (thread + 1) / threads};
}

/* The product of x [rows][inputs] with a matrix [outputs][inputs], to out [rows][outputs]. */
void multiply(const linear *of, int64_t outputs, const float *x, int64_t rows, int64_t threads, float *out) {
#pragma omp parallel num_threads(threads)
    product(*of, x, rows, share(outputs), out, outputs);
}

/* Rows [first, end) of a segment as float32. */
void unpack_rows(const segment *of, int64_t size, int64_t first, int64_t end, int64_t threads, float *out) {
#pragma omp parallel for num_threads(threads)
    for (int64_t row = first; row < end; row++)
        unpack(of->format, of->rows + row * of->row_bytes, size, out + (row - first) * size);
}
