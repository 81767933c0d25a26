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

/* Multiplies small integers as float32 and as Q8_0, where every sum is exact. native_code.py calls it. */
int trial(void) {
    enum { INPUTS = 64, HALF = 21, ROWS = 11 };
    static float dense[HALF][INPUTS], x[ROWS][INPUTS], out[ROWS][2 * HALF];
    static uint8_t blocks[HALF][INPUTS / 32][34];
    for (int o = 0; o < HALF; o++)
        for (int i = 0; i < INPUTS; i++) {
            dense[o][i] = (o * 7 + i * 3) % 11 - 5;
            blocks[o][i / 32][1] = 0x3c; /* a scale of one */
            blocks[o][i / 32][2 + i % 32] = (uint8_t)(int8_t)dense[o][i];
        }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < INPUTS; i++) x[r][i] = (r * 5 + i) % 7 - 3;
    segment segments[] = {{(uint8_t *)dense, F32, sizeof *dense, HALF}, {(uint8_t *)blocks, Q8_0, sizeof *blocks, HALF}};
    linear of = {segments, NULL, 2, INPUTS};
    multiply(&of, 2 * HALF, *x, ROWS, 1, *out);
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < 2 * HALF; o++) {
            float sum = 0;
            for (int i = 0; i < INPUTS; i++) sum += dense[o % HALF][i] * x[r][i];
            if (sum != out[r][o]) return 1;
        }
    return 0;
}
