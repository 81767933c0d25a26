/* Products of float32 activations with matrices whose rows may be packed: exact integers inside blocks of 32,
 * then one fixed sequence of operations on float32. So an output has the same bits on every processor, with
 * any number of threads, and whatever other rows and outputs are computed with it.
 *
 * 1. split() turns each block of 32 activations into a scale and 24-bit integers, each in three signed bytes.
 * 2. unpack_piece() (interleaved.h) turns 32 weights of 16 outputs into codes of 8 bits, scales and offsets.
 * 3. add_piece() (packed_product.h) multiplies: its integers are exact, so kernels for any processor agree.
 *
 * The method is that of Ozaki et al. 2012, where one factor is integers already. Its error is that of float32.
 * Weights of 16 and 32 bits and FP8 are multiplied as float32: sixteen sums (column modulo 16) by fused
 * operations, which are then added in one order. */

#ifndef SWARMNET_PRODUCT_H
#define SWARMNET_PRODUCT_H

#include <float.h>
#include <omp.h>

#include "interleaved.h"

/* Rows of one format, each of whole blocks, one after another, or interleaved in groups (interleaved.h). */
typedef struct {
    const uint8_t *rows;
    int64_t format, row_bytes, outputs, interleaved;
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

/* A block of 32 activations, as many bytes as they have as float32. Activation k is
 *   scale * (65536 * planes[0][k] + 256 * planes[1][k] + planes[2][k]).
 * The sums of halves are of the activations themselves, of 256 * planes[0] + planes[1], and of planes[2]. */
typedef struct {
    int8_t planes[3][32];
    float scale, sum[2];
    int32_t high[2], low[2], unused;
} activations;

/* Rows that are multiplied with packed weights while these are in the cache. */
enum { ROWS = 64 };
/* Registers hold sums of OUTPUTS outputs for TILE_ROWS rows of a product of float32. COLUMNS of its weights, a multiple of
 * every format's block, stay in the nearest cache while they are multiplied with all rows. */
enum { OUTPUTS = 4, TILE_ROWS = WIDTH == 16 ? 4 : 2, COLUMNS = 1024 };

/* The smaller and the larger of two numbers. */
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }

/* The part of count items that this thread computes. */
static range share(int64_t count) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return (range){count * thread / threads, count * (thread + 1) / threads};
}

/* The part of count outputs: whole groups, except for the last one. */
static range share_outputs(int64_t count) {
    range groups = share((count + GROUP - 1) / GROUP);
    return (range){least(groups.first * GROUP, count), least(groups.end * GROUP, count)};
}

/* The sum of 16 activations: eight sums of two, then a tree. */
static inline float sum_of_half(const float *x) {
    float sums[8];
    for (int i = 0; i < 8; i++) sums[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; i++) sums[i] += sums[i + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* Splits the blocks of 32 activations in a range. A block that is not finite becomes NaN. */
static void split(const float *x, range blocks, activations *to) {
    const float top = 127.0f * 65536 - 33152; /* so that no integer needs a fourth byte, however it is rounded */
    x += 32 * blocks.first;
    to += blocks.first;
    for (int64_t block = blocks.first; block < blocks.end; block++, x += 32, to++) {
        uint32_t bits[32], largest = 0;
        memcpy(bits, x, sizeof bits);
        for (int i = 0; i < 32; i++) largest = (bits[i] & 0x7fffffff) > largest ? bits[i] & 0x7fffffff : largest;
        if (largest >= 0x7f800000) {
            memset(to, 0, sizeof *to);
            to->scale = to->sum[0] = to->sum[1] = NAN;
            continue;
        }
        float scale;
        memcpy(&scale, &largest, sizeof scale);
        scale = scale / top < FLT_MIN ? FLT_MIN : scale / top;
        int32_t values[32];
        for (int i = 0; i < 32; i += WIDTH) *(ints *)(values + i) = nearest(*(const floats *)(x + i) / scale);
        for (int i = 0; i < 32; i++) {
            int8_t low = (int8_t)values[i];
            to->planes[2][i] = low;
            values[i] = (values[i] - low) >> 8;
        }
        for (int i = 0; i < 32; i++) {
            int8_t middle = (int8_t)values[i];
            to->planes[1][i] = middle;
            to->planes[0][i] = (int8_t)((values[i] - middle) >> 8);
        }
        to->scale = scale;
        for (int half = 0; half < 2; half++) {
            int32_t high = 0, low = 0;
            for (int i = 16 * half; i < 16 * half + 16; i++) {
                high += values[i];
                low += to->planes[2][i];
            }
            to->high[half] = high;
            to->low[half] = low;
            to->sum[half] = sum_of_half(x + 16 * half);
        }
    }
}

/* WIDTH weights of 16 or 32 bits. */
ALWAYS floats weights_at(const int64_t format, const uint8_t *in) {
    switch (format) {
    case F16: return halves(in, 0, 0);
    case BF16: return (floats)(__builtin_convertvector(*(const shorts *)in, words) << 16);
    default: return *(const floats *)in;
    }
}

/* Adds to the lanes of sums [rows][OUTPUTS] the products of `count` columns, a multiple of LANES. Rows of weights are
 * row_bytes apart, those of x pitch floats. Weights `ahead` bytes later are fetched meanwhile. format, outputs and rows are
 * compile-time constants, so that sums stay in registers. */
ALWAYS void tile(const int64_t format, const uint8_t *weights, int64_t row_bytes, int64_t ahead, const float *x, int64_t pitch,
                 int64_t count, const int outputs, const int rows, lanes (*sums)[OUTPUTS]) {
    for (int part = 0; part < PARTS; part++) {
        floats sum[TILE_ROWS][OUTPUTS];
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) sum[r][o] = sums[r][o].parts[part];
        for (int64_t i = part * WIDTH; i < count; i += LANES) {
            floats its[OUTPUTS];
            for (int o = 0; o < outputs; o++) {
                const uint8_t *in = weights + o * row_bytes + i * (format == F32 ? 4 : 2);
                __builtin_prefetch(in + ahead);
                its[o] = weights_at(format, in);
            }
            for (int r = 0; r < rows; r++)
                for (int o = 0; o < outputs; o++) sum[r][o] = fused_floats(its[o], *(const floats *)(x + r * pitch + i), sum[r][o]);
        }
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) sums[r][o].parts[part] = sum[r][o];
    }
}

/* As tile, for any number of rows. The first tile fetches the next outputs' weights. */
ALWAYS void tiles(const int64_t format, const uint8_t *weights, int64_t row_bytes, const float *x, int64_t pitch, int64_t count,
                  const int outputs, int64_t rows, lanes (*sums)[OUTPUTS]) {
    int64_t ahead = OUTPUTS * row_bytes;
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS, x += TILE_ROWS * pitch, sums += TILE_ROWS)
        tile(format, weights, row_bytes, ahead, x, pitch, count, outputs, TILE_ROWS, sums), ahead = 0;
    for (; rows; rows--, x += pitch, sums++) tile(format, weights, row_bytes, ahead, x, pitch, count, outputs, 1, sums), ahead = 0;
}

/* The outputs of a matrix in the range mine, for at most ROWS rows of x, to out [rows][stride]. Column k enters sum k % 16
 * of its output; missing columns count as zeros. */
static void float_product(const segment *of, const float *x, int64_t size, int64_t rows, range mine, float *out, int64_t stride) {
    float weights[OUTPUTS][COLUMNS] __attribute__((aligned(64))), rest[ROWS][LANES];
    lanes sums[ROWS][OUTPUTS];
    for (int64_t row = 0; row < rows && size % LANES; row++) {
        memset(rest[row], 0, sizeof *rest);
        memcpy(rest[row], x + row * size + size / LANES * LANES, size % LANES * sizeof *x);
    }
    for (int64_t output = mine.first, outputs; output < mine.end; output += outputs) {
        outputs = mine.end - output < OUTPUTS ? 1 : OUTPUTS;
        memset(sums, 0, rows * sizeof *sums);
        for (int64_t first = 0, count, whole; first < size; first += count) {
            count = least(COLUMNS, size - first), whole = count / LANES * LANES;
            const uint8_t *in = of->rows + output * of->row_bytes + of->row_bytes * first / size;
            const float *its = x + first;
#define TILES(format, in, row_bytes)                                                                   \
    if (outputs == OUTPUTS) tiles(format, in, row_bytes, its, size, whole, OUTPUTS, rows, sums);       \
    else tiles(format, in, row_bytes, its, size, whole, 1, rows, sums);
            if (of->format == F32) {
                TILES(F32, in, of->row_bytes)
            } else if (of->format == F16) {
                TILES(F16, in, of->row_bytes)
            } else if (of->format == BF16) {
                TILES(BF16, in, of->row_bytes)
            } else {
                for (int64_t o = 0; o < outputs; o++) unpack(of->format, in + o * of->row_bytes, whole, weights[o]);
                TILES(F32, (const uint8_t *)*weights, sizeof *weights)
            }
            if (whole < count)
                for (int64_t o = 0; o < outputs; o++) {
                    float last[LANES] = {0};
                    unpack(of->format, in + o * of->row_bytes + of->row_bytes * whole / size, count - whole, last);
                    for (int64_t row = 0; row < rows; row++)
                        sums[row][o] = fused_lanes(lanes_at(last), lanes_at(rest[row]), sums[row][o]);
                }
        }
        for (int64_t row = 0; row < rows; row++)
            for (int64_t o = 0; o < outputs; o++) out[row * stride + output + o] = sum_of_lanes(sums[row][o]);
    }
}

/* As float_product, with a matrix [..][size] of float32 and any number of rows. */
static void dense_product(const float *weights, const float *x, int64_t size, int64_t rows, range mine, float *out,
                          int64_t stride) {
    segment of = {(const uint8_t *)weights, F32, size * sizeof *weights, 0, 0};
    for (int64_t row = 0; row < rows; row += ROWS)
        float_product(&of, x + row * size, size, least(ROWS, rows - row), mine, out + row * stride, stride);
}

/* packed_product in packed_product.h. Its code takes seconds to compile, so only the library of products.c has it. */
typedef void packed_function(const segment *s, const activations *x, int64_t size, int64_t rows, range mine, float *out,
                             int64_t stride);

/* Whether a product needs split activations. */
static inline int takes_split(linear of) {
    for (const segment *s = of.segments; s < of.segments + of.count; s++)
        if (layout_of(s->format)) return 1;
    return 0;
}

/* The outputs of a product in the range mine, from x [rows][inputs] to out [rows][stride]. parts are x, split, if
 * takes_split() holds. Ranges that begin and end at multiples of GROUP cost least. */
static void product(packed_function *packed, linear of, const float *x, const activations *parts, int64_t rows, range mine, float *out,
                    int64_t stride) {
    int64_t first = 0; /* of a segment's outputs */
    for (const segment *s = of.segments; s < of.segments + of.count; first += s->outputs, s++) {
        range its = {most(mine.first - first, 0), least(mine.end - first, s->outputs)};
        if (its.first >= its.end) continue;
        for (int64_t row = 0; row < rows; row += ROWS) {
            int64_t count = least(ROWS, rows - row);
            float *to = out + row * stride + first;
            if (layout_of(s->format)) packed(s, parts + row * (of.inputs / 32), of.inputs, count, its, to, stride);
            else float_product(s, x + row * of.inputs, of.inputs, count, its, to, stride);
        }
    }
    for (int64_t row = 0; of.bias && row < rows; row++)
        for (int64_t output = mine.first; output < mine.end; output++) out[row * stride + output] += of.bias[output];
}

#endif
