/* Products with packed segments: the part of product.h that has code for each format. products.c compiles it, and other
 * libraries call packed_product by its address. */

#ifndef SWARMNET_PACKED_PRODUCT_H
#define SWARMNET_PACKED_PRODUCT_H

#include "product.h"

/* What products need to know of a format. Compile-time constants where they are used. */
typedef struct {
    int bits;     /* of a code */
    int halves;   /* scales of a piece and output */
    int zero;     /* the same for all outputs, or ITS_OWN */
    int offsets;  /* whether weights have offsets */
} kind;
enum { ITS_OWN = -1 };

ALWAYS kind kind_of(const int64_t format) {
    switch (format) {
    case Q4_0: return (kind){4, 1, 8, 0};
    case Q4_1: case Q4_K: return (kind){4, 1, 0, 1};
    case Q5_0: case MXFP4: return (kind){5, 1, 16, 0};
    case Q5_1: case Q5_K: return (kind){5, 1, 0, 1};
    case Q2_K: return (kind){4, 2, 0, 1};
    case Q3_K: return (kind){4, 2, 4, 0};
    case Q6_K: return (kind){6, 2, 32, 0};
    case INT4: return (kind){4, 1, ITS_OWN, 0};
    default: return (kind){8, 1, ZERO_OF_BYTES, 0}; /* Q8_0, IQ4_NL, IQ4_XS */
    }
}

/* Adds to sums the products of a piece with its block of x in some rows, which are pitch blocks apart. This is the
 * definition of the product: kernels differ in dots() alone. All integers are exact: below 32 * 255 * 128 * 257 < 2^29.
 * rows is a compile-time constant, at most 4. */
ALWAYS void add_piece(const kind of, const piece *p, const activations *x, int64_t pitch, const int rows, floats *sums) {
#pragma GCC unroll 2
    for (int half = 0; half < of.halves; half++) {
        const int8_t *values[12];
        ints found[12];
#pragma GCC unroll 12
        for (int v = 0; v < 3 * rows; v++) values[v] = x[v / 3 * pitch].planes[v % 3] + 16 * half;
        dots(p->codes + 4 * half, values, 3 * rows, of.halves == 2 ? 4 : 8, of.bits, found);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const activations *a = x + r * pitch;
            ints high = found[3 * r] * 256 + found[3 * r + 1], low = found[3 * r + 2];
            if (of.zero) {
                int32_t all_high = a->high[half], all_low = a->low[half];
                if (of.halves == 1) all_high += a->high[1], all_low += a->low[1];
                if (of.zero == ITS_OWN) {
                    high -= p->zero * all_high;
                    low -= p->zero * all_low;
                } else {
                    high -= of.zero * all_high;
                    low -= of.zero * all_low;
                }
            }
            floats value = fused_floats(to_floats(high), (floats){0} + 256.0f, to_floats(low));
            sums[r] = fused_floats(value * a->scale, p->scale[half], sums[r]);
            if (of.offsets) {
                float all = of.halves == 1 ? a->sum[0] + a->sum[1] : a->sum[half];
                sums[r] = fused_floats(p->offset[half], (floats){0} + all, sums[r]);
            }
        }
    }
}

/* As add_piece, for several pieces. */
ALWAYS void add_pieces(const kind of, const piece *p, int64_t count, const activations *x, int64_t pitch, const int rows,
                       float (*sums)[GROUP]) {
    floats sum[4];
    for (int r = 0; r < rows; r++) sum[r] = *(const floats *)sums[r];
    for (int64_t i = 0; i < count; i++) add_piece(of, p + i, x + i, pitch, rows, sum);
    for (int r = 0; r < rows; r++) *(floats *)sums[r] = sum[r];
}

/* Adds to sums [rows][GROUP] the products of `count` pieces of interleaved blocks, for outputs from `at` on. Pieces stay in
 * registers. rows is a compile-time constant, at most 4. */
ALWAYS void add_few(const int64_t format, const uint8_t *in, int64_t count, const activations *x, int64_t pitch, const int rows, int at,
                    float (*sums)[GROUP]) {
    const int a_block = layout_of(format)->weights / 32, bytes = GROUP * layout_of(format)->bytes;
    floats sum[4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) sum[r] = *(const floats *)(sums[r] + at);
    for (int i = 0; i < count; i++) {
        piece p;
        unpack_piece(format, in + i / a_block * bytes, i % a_block, at, &p);
        add_piece(kind_of(format), &p, x + i, pitch, rows, sum);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) *(floats *)(sums[r] + at) = sum[r];
}

/* As add_few, for all outputs and any number of rows. There are at most BLOCK_WEIGHTS weights of an output. */
ALWAYS void add_blocks(const int64_t format, const uint8_t *in, int64_t count, const activations *x, int64_t pitch, int64_t rows,
                       float (*sums)[GROUP]) {
    const kind of = kind_of(format);
    const int a_block = layout_of(format)->weights / 32, bytes = GROUP * layout_of(format)->bytes;
    for (int at = 0; at < GROUP; at += WIDTH)
        if (rows == 1) add_few(format, in, count, x, pitch, 1, at, sums);
        else if (HAS_DOTS && rows == 2) add_few(format, in, count, x, pitch, 2, at, sums);
        else if (HAS_DOTS && rows == 4) add_few(format, in, count, x, pitch, 4, at, sums);
        else {
            piece ready[BLOCK_WEIGHTS / 32];
            for (int i = 0; i < count; i++) unpack_piece(format, in + i / a_block * bytes, i % a_block, at, ready + i);
            int64_t r = 0;
            for (; HAS_DOTS && r + 4 <= rows; r += 4)
                add_pieces(of, ready, count, x + r * pitch, pitch, 4, (float (*)[GROUP])(sums[r] + at));
            for (; r < rows; r++) add_pieces(of, ready, count, x + r * pitch, pitch, 1, (float (*)[GROUP])(sums[r] + at));
        }
}

/* Bytes from the weights that are multiplied to those that are fetched meanwhile. With 0, a block is fetched in ascending
 * order before its fields are read in the order of its format, and the processor fetches the next ones by itself. */
static int64_t ahead;

/* As packed_product, for one format. */
ALWAYS void product_of_format(const int64_t format, const segment *s, const activations *x, int64_t size, int64_t rows, range mine,
                              float *out, int64_t stride) {
    const layout *of = layout_of(format);
    uint8_t blocks[GROUP * LARGEST_BLOCK];
    float sums[ROWS][GROUP] __attribute__((aligned(64)));
    for (int64_t group = mine.first / GROUP * GROUP; group < mine.end; group += GROUP) {
        const uint8_t *in = s->rows + group * s->row_bytes;
        memset(sums, 0, rows * sizeof *sums);
        for (int64_t first = 0, step; first < size; first += step) {
            step = s->interleaved ? least(BLOCK_WEIGHTS, size - first) : of->weights;
            const uint8_t *its = in + first / of->weights * GROUP * of->bytes;
            if (s->interleaved)
                for (int i = 0; i < step / of->weights * GROUP * of->bytes; i += 64) __builtin_prefetch(its + ahead + i);
            else {
                interleave_block(of, in, s->row_bytes, s->outputs - group, first / of->weights, blocks);
                its = blocks;
            }
            add_blocks(format, its, step / 32, x + first / 32, size / 32, rows, sums);
        }
        int64_t from = most(mine.first, group), end = least(mine.end, group + GROUP);
        for (int64_t row = 0; row < rows; row++)
            memcpy(out + row * stride + from, sums[row] + (from - group), (end - from) * sizeof *out);
    }
}

/* The outputs of a packed segment in the range mine, for at most ROWS rows of x, to out [rows][stride]. */
void packed_product(const segment *s, const activations *x, int64_t size, int64_t rows, range mine, float *out, int64_t stride) {
#define PRODUCT(format) \
    case format: product_of_format(format, s, x, size, rows, mine, out, stride); break;
    switch (s->format) {
        PRODUCT(Q4_0) PRODUCT(Q4_1) PRODUCT(Q5_0) PRODUCT(Q5_1) PRODUCT(Q8_0) PRODUCT(Q2_K) PRODUCT(Q3_K) PRODUCT(Q4_K)
        PRODUCT(Q5_K) PRODUCT(Q6_K) PRODUCT(IQ4_NL) PRODUCT(IQ4_XS) PRODUCT(MXFP4) PRODUCT(INT4)
    }
}

#endif
