/* Products of a few rows of float32 with a matrix whose rows may be packed (unpack.h).
 *
 * A product of one row takes as long as reading the matrix from memory. So packed weights are read as
 * they are stored, and unpacked into the processor's cache, a few outputs at a time. Sums are float32.
 * A sum does not depend on the other rows of the product. */

#ifndef SWARMNET_PRODUCT_H
#define SWARMNET_PRODUCT_H

#include "lanes.h"
#include "unpack.h"

/* Rows of one format, each of whole blocks, one after another. */
typedef struct {
    const uint8_t *rows;
    int64_t format, row_bytes, outputs;
} segment;

/* A matrix [outputs][inputs], its segments one after another, and a bias. */
typedef struct {
    const segment *segments;
    const float *bias; /* [outputs], or NULL */
    int64_t count, inputs;
} linear;

typedef struct {
    int64_t first, end;
} range;

/* The registers hold the sums of OUTPUTS outputs for half of TILE_ROWS rows, or of half the outputs for
 * all rows. */
#if defined __AVX512F__
enum { OUTPUTS = 4, TILE_ROWS = 8 };
#else
enum { OUTPUTS = 4, TILE_ROWS = 2 };
#endif
/* Columns that are unpacked at a time, a multiple of every format's block. OUTPUTS times these floats
 * take 64 KiB on a thread's stack. Whole rows might not fit: a model chooses their width. With fewer
 * columns, short pieces cost more than they save. */
enum { COLUMNS = 4096 };

/* The smaller and the larger of two numbers. */
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

/* A tile of a product: at most OUTPUTS outputs of at most TILE_ROWS rows. Both are compile-time
 * constants, so that the sums stay in registers. There are enough sums to hide the latency of one.
 * A sum does not depend on what else is in its tile. Rows of x are pitch floats apart. With add, the
 * sums are added to out.
 *
 * Weights are prefetched from the given number of floats ahead (0: no prefetch). Otherwise memory
 * would be idle during the arithmetic of several rows. A prefetch beyond the end of the weights has no
 * effect. */
static inline __attribute__((always_inline)) void tile(const float *weights, int64_t ahead, const float *x, int64_t pitch,
                                                       int64_t size, const int outputs, const int rows, int add,
                                                       float *out, int64_t stride) {
    lanes sums[TILE_ROWS][OUTPUTS] = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        lanes of_outputs[OUTPUTS];
        for (int o = 0; o < outputs; o++) {
            if (ahead) __builtin_prefetch(weights + ahead + o * size + i);
            of_outputs[o] = lanes_at(weights + o * size + i);
        }
        for (int r = 0; r < rows; r++) {
            lanes of_row = lanes_at(x + r * pitch + i);
            for (int o = 0; o < outputs; o++) sums[r][o] = fused_lanes(of_outputs[o], of_row, sums[r][o]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++) {
            if (i < size)
                sums[r][o] = fused_lanes(first_lanes(weights + o * size + i, size - i), first_lanes(x + r * pitch + i, size - i), sums[r][o]);
            float sum = sum_of_lanes(sums[r][o]);
            out[r * stride + o] = add ? out[r * stride + o] + sum : sum;
        }
}

static void tiles(const float *weights, int64_t ahead, const float *x, int64_t pitch, int64_t size, int64_t rows, int add,
                  float *out, int64_t stride) {
#define TILES(n)                                                                                       \
    case n:                                                                                            \
        if (n <= TILE_ROWS / 2) {                                                                      \
            tile(weights, ahead, x, pitch, size, OUTPUTS, n, add, out, stride);                        \
        } else if (n <= TILE_ROWS) {                                                                   \
            const int half = OUTPUTS / 2;                                                              \
            tile(weights, ahead, x, pitch, size, half, n, add, out, stride);                           \
            tile(weights + half * size, ahead, x, pitch, size, half, n, add, out + half, stride);      \
        }                                                                                              \
        break;
    switch (rows) { TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) TILES(7) TILES(8) }
}

/* Some outputs of a product, at most OUTPUTS, with weights [outputs][size], from x [rows][pitch] to out [rows][stride]. */
static void few_outputs(const float *weights, int64_t outputs, int64_t ahead, const float *x, int64_t pitch, int64_t size,
                        int64_t rows, int add, float *out, int64_t stride) {
    if (outputs == OUTPUTS)
        for (int64_t row = 0; row < rows; row += TILE_ROWS)
            tiles(weights, row ? 0 : ahead, x + row * pitch, pitch, size, least(rows - row, TILE_ROWS), add, out + row * stride,
                  stride);
    else
        for (int64_t output = 0; output < outputs; output++)
            for (int64_t row = 0; row < rows; row++)
                tile(weights + output * size, 0, x + row * pitch, pitch, size, 1, 1, add, out + row * stride + output, stride);
}

/* The outputs of a matrix [..][size] of float32 in the range mine, from x [rows][size] to out [rows][stride]. Weights are read once for
 * all rows. */
static void dense_product(const float *weights, const float *x, int64_t size, int64_t rows, range mine, float *out,
                          int64_t stride) {
    for (int64_t output = mine.first, next; output < mine.end; output = next) {
        next = least(output + OUTPUTS, mine.end);
        few_outputs(weights + output * size, next - output, OUTPUTS * size, x, size, size, rows, 0, out + output, stride);
    }
}

/* As dense_product, with packed rows. */
static void packed_product(const segment *of, const float *x, int64_t size, int64_t rows, range mine, float *out,
                           int64_t stride) {
    float weights[OUTPUTS * COLUMNS] __attribute__((aligned(64)));
    for (int64_t output = mine.first, next; output < mine.end; output = next) {
        next = least(output + OUTPUTS, mine.end);
        for (int64_t first = 0, count; first < size; first += count) {
            count = least(COLUMNS, size - first);
            int64_t skipped = of->row_bytes * first / size;
            for (int64_t i = output; i < next; i++)
                unpack(of->format, of->rows + i * of->row_bytes + skipped, count, weights + (i - output) * count);
            few_outputs(weights, next - output, 0, x + first, size, count, rows, first > 0, out + output, stride);
        }
    }
}

/* The outputs of a product in the range mine, from x [rows][inputs] to out [rows][stride]. */
static void product(linear of, const float *x, int64_t rows, range mine, float *out, int64_t stride) {
    int64_t first = 0; /* of a segment's outputs */
    for (const segment *s = of.segments; s < of.segments + of.count; first += s->outputs, s++) {
        range its = {most(mine.first - first, 0), least(mine.end - first, s->outputs)};
        if (its.first >= its.end) continue;
        if (s->format == F32)
            dense_product((const float *)s->rows, x, of.inputs, rows, its, out + first, stride);
        else
            packed_product(s, x, of.inputs, rows, its, out + first, stride);
    }
    for (int64_t row = 0; of.bias && row < rows; row++)
        for (int64_t output = mine.first; output < mine.end; output++) out[row * stride + output] += of.bias[output];
}

#endif
