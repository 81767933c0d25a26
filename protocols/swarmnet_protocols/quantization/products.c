/* Products with packed matrices, and what loading needs of them, by several threads. products.py declares the
 * same structs. */

#include <stdlib.h>

#include "packed_product.h"

/* The product of x [rows][inputs] with a matrix [outputs][inputs], to out [rows][outputs]. Returns whether there was
 * enough memory for split activations of ROWS rows. */
int64_t multiply(const linear *of, int64_t outputs, const float *x, int64_t rows, int64_t threads, float *out) {
    activations *parts = NULL;
    if (takes_split(*of) && !(parts = malloc(least(rows, ROWS) * of->inputs * sizeof *x))) return 0;
#pragma omp parallel num_threads(threads)
    for (int64_t row = 0, count; row < rows; row += count) {
        count = least(ROWS, rows - row);
        const float *its = x + row * of->inputs;
        if (parts) {
#pragma omp barrier
            split(its, share(count * (of->inputs / 32)), parts);
#pragma omp barrier
        }
        product(packed_product, *of, its, parts, count, share_outputs(outputs), out + row * outputs, outputs);
    }
    free(parts);
    return 1;
}

/* Whether products of many rows are as fast as torch's. Plain C takes dozens of times as long. */
int64_t takes_many_rows(void) { return HAS_DOTS; }

/* Interleaves the rows of a segment, with this many columns, into whole groups (interleaved.h). */
void interleave(const segment *from, int64_t columns, int64_t threads, uint8_t *to) {
    const layout *of = layout_of(from->format);
#pragma omp parallel for num_threads(threads)
    for (int64_t group = 0; group < from->outputs; group += GROUP)
        for (int64_t block = 0; block < columns / of->weights; block++)
            interleave_block(of, from->rows + group * from->row_bytes, from->row_bytes, from->outputs - group, block,
                             to + group * from->row_bytes + block * GROUP * of->bytes);
}

/* Rows of a segment, with this many columns, as float32: count of them from the first on, or those with the numbers
 * in chosen. Returns whether all of them exist; otherwise nothing is unpacked. */
int64_t unpack_rows(const segment *of, int64_t columns, int64_t first, int64_t count, const int64_t *chosen, int64_t threads,
                    float *out) {
    for (int64_t i = 0; i < count; i++) {
        int64_t row = chosen ? chosen[i] : first + i;
        if (row < 0 || row >= of->outputs) return 0;
    }
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        int64_t row = chosen ? chosen[i] : first + i;
        if (of->interleaved)
            unpack_interleaved(of->format, of->rows + row / GROUP * GROUP * of->row_bytes, (int)(row % GROUP), columns,
                               out + i * columns);
        else
            unpack(of->format, of->rows + row * of->row_bytes, columns, out + i * columns);
    }
    return 1;
}

/* Sets the number of bytes from the weights that a product multiplies to those that it fetches meanwhile. */
void fetch_ahead(int64_t bytes) { ahead = bytes; }

/* The least seconds, of a few tries, of one thread's product of some rows with a matrix of this format and this many outputs,
 * whose weights are fetched `bytes` ahead. NaN without memory for it. The weights stay in memory for the next call.
 * measured_targets.py calls it. */
double pace(int64_t format, int64_t row_bytes, int64_t rows, int64_t outputs, int64_t bytes) {
    enum { COLUMNS_OF_PACE = 2048, TRIES = 4 };
    static uint8_t *weights;
    static int64_t size;
    if (size < outputs * row_bytes) {
        free(weights);
        size = outputs * row_bytes;
        if ((weights = malloc(size))) memset(weights, 0x3c, size); /* scales and numbers of every format become ordinary ones */
    }
    float *x = malloc(rows * COLUMNS_OF_PACE * sizeof *x), *out = malloc(rows * outputs * sizeof *out);
    double least_s = NAN;
    if (weights && x && out) {
        for (int64_t i = 0; i < rows * COLUMNS_OF_PACE; i++) x[i] = (float)(i % 7 - 3);
        segment matrix = {weights, format, row_bytes, outputs, layout_of(format) != NULL};
        linear of = {&matrix, NULL, 1, COLUMNS_OF_PACE};
        fetch_ahead(bytes);
        for (int try = 0; try < TRIES; try++) {
            double start = omp_get_wtime();
            if (!multiply(&of, outputs, x, rows, 1, out)) break;
            least_s = fmin(omp_get_wtime() - start, least_s); /* fmin takes the other number for NaN */
        }
    }
    free(x);
    free(out);
    return least_s;
}

/* Multiplies small integers as float32 and as Q8_0, in rows and interleaved. native_code.py calls it. */
int trial(void) {
    enum { INPUTS = 64, THIRD = 21, ROW_BYTES = INPUTS / 32 * 34, X_ROWS = 11, OUTPUTS_OF_X = 3 * THIRD };
    static float dense[THIRD][INPUTS], x[X_ROWS][INPUTS], out[X_ROWS][OUTPUTS_OF_X];
    static uint8_t blocks[THIRD][INPUTS / 32][34], groups[2 * GROUP * ROW_BYTES];
    for (int o = 0; o < THIRD; o++)
        for (int i = 0; i < INPUTS; i++) {
            dense[o][i] = (o * 7 + i * 3) % 11 - 5;
            blocks[o][i / 32][1] = 0x3c; /* a scale of one */
            blocks[o][i / 32][2 + i % 32] = (uint8_t)(int8_t)dense[o][i];
        }
    for (int r = 0; r < X_ROWS; r++)
        for (int i = 0; i < INPUTS; i++) x[r][i] = (r * 5 + i) % 7 - 3;
    segment segments[] = {{(uint8_t *)dense, F32, sizeof *dense, THIRD, 0}, {(uint8_t *)blocks, Q8_0, ROW_BYTES, THIRD, 0},
                          {groups, Q8_0, ROW_BYTES, THIRD, 1}};
    linear of = {segments, NULL, 3, INPUTS};
    interleave(segments + 1, INPUTS, 1, groups);
    if (!multiply(&of, OUTPUTS_OF_X, *x, X_ROWS, 1, *out)) return 1;
    for (int r = 0; r < X_ROWS; r++)
        for (int o = 0; o < OUTPUTS_OF_X; o++) {
            float sum = 0;
            for (int i = 0; i < INPUTS; i++) sum += dense[o % THIRD][i] * x[r][i];
            if (!(fabsf(sum - out[r][o]) < (o < THIRD ? 1e-30f : 1e-3f))) return 1;
        }
    return 0;
}
