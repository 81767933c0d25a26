/* Interleaved rows: 16 outputs side by side, so that products need no sum across the lanes of a register.
 *
 * A group is 16 rows of a matrix, and takes as many bytes as they do. Of each block of weights it has the 16
 * blocks of its rows, field by field: the first unit of a field in all rows, then the second. A unit is a
 * 16-bit scale, or four bytes of codes. A matrix whose number of rows is no multiple of 16 is padded with
 * zeros. Formats of whole numbers (F32, F16, BF16) and FP8 are never interleaved. */

#ifndef SWARMNET_INTERLEAVED_H
#define SWARMNET_INTERLEAVED_H

#include "dots.h"
#include "unpack.h"

enum { GROUP = 16, LARGEST_BLOCK = 210, BLOCK_WEIGHTS = 256 };

/* Codes and scales of 32 weights of 16 outputs: weight k of an output is
 *   scale[k / 16] * (code - zero) + offset[k / 16],
 * the same for both halves in most formats. */
typedef struct {
    uint32_t codes[8 * GROUP] __attribute__((aligned(64))); /* [k / 4][output], k % 4 from the lowest bits */
    float scale[2][GROUP], offset[2][GROUP];
    int32_t zero[GROUP];
} __attribute__((aligned(64))) piece;

/* What a format's blocks are made of. Fields have these sizes in bytes, one after another. */
typedef struct {
    int weights, bytes;
    struct {
        int bytes, unit;
    } fields[3];
} layout;

/* The units of fifth bits have 32 bits, whose bit k belongs to weight k. Interleaved, bit k / 4 of byte k % 4 does. */
enum { FIFTH_BITS = 5 };

static inline const layout *layout_of(int64_t format) {
    static const layout q4_0 = {32, 18, {{2, 2}, {16, 4}}}, q4_1 = {32, 20, {{4, 2}, {16, 4}}},
                        q5_0 = {32, 22, {{2, 2}, {4, FIFTH_BITS}, {16, 4}}}, q5_1 = {32, 24, {{4, 2}, {4, FIFTH_BITS}, {16, 4}}},
                        q8_0 = {32, 34, {{2, 2}, {32, 4}}}, q2_k = {256, 84, {{80, 4}, {4, 2}}},
                        q3_k = {256, 110, {{108, 4}, {2, 2}}}, q4_k = {256, 144, {{4, 2}, {140, 4}}},
                        q5_k = {256, 176, {{4, 2}, {172, 4}}}, q6_k = {256, 210, {{208, 4}, {2, 2}}},
                        iq4_xs = {256, 136, {{4, 2}, {132, 4}}}, mxfp4 = {32, 17, {{1, 1}, {16, 4}}},
                        int4 = {64, 37, {{4, 4}, {1, 1}, {32, 4}}};
    switch (format) {
    case Q4_0: case IQ4_NL: return &q4_0;
    case Q4_1: return &q4_1;
    case Q5_0: return &q5_0;
    case Q5_1: return &q5_1;
    case Q8_0: return &q8_0;
    case Q2_K: return &q2_k;
    case Q3_K: return &q3_k;
    case Q4_K: return &q4_k;
    case Q5_K: return &q5_k;
    case Q6_K: return &q6_k;
    case IQ4_XS: return &iq4_xs;
    case MXFP4: return &mxfp4;
    case INT4: return &int4;
    default: return NULL;
    }
}

/* Copies the units of a field between a row's block and its place in a group, which has stride bytes from unit to unit. */
ALWAYS void copy_field(const uint8_t *from, int64_t from_stride, uint8_t *to, int64_t to_stride, int bytes, const int unit) {
    for (int i = 0; i < bytes; i += unit, from += from_stride, to += to_stride) memcpy(to, from, unit);
}

/* Bits of one order into the other one: see FIFTH_BITS. */
static inline void copy_fifth_bits(const uint8_t *from, uint8_t *to, int interleaves) {
    uint32_t in, out = 0;
    memcpy(&in, from, sizeof in);
    for (int k = 0; k < 32; k++) {
        int place = 8 * (k % 4) + k / 4;
        out |= interleaves ? (in >> k & 1) << place : (in >> place & 1) << k;
    }
    memcpy(to, &out, sizeof out);
}

/* Copies the block of one row to its place in the interleaved block, or from there. */
static inline void copy_block(const layout *of, const uint8_t *from, uint8_t *to, int row, int interleaves) {
    for (int f = 0, first = 0; f < 3 && of->fields[f].bytes; first += of->fields[f].bytes, f++) {
        int bytes = of->fields[f].bytes, unit = of->fields[f].unit == FIFTH_BITS ? 4 : of->fields[f].unit;
        int64_t group = (int64_t)GROUP * first + row * unit;
        const uint8_t *in = from + (interleaves ? first : group);
        uint8_t *out = to + (interleaves ? group : first);
        int64_t in_stride = interleaves ? unit : GROUP * unit, out_stride = interleaves ? GROUP * unit : unit;
        if (of->fields[f].unit == FIFTH_BITS) copy_fifth_bits(in, out, interleaves);
        else if (unit == 4) copy_field(in, in_stride, out, out_stride, bytes, 4);
        else if (unit == 2) copy_field(in, in_stride, out, out_stride, bytes, 2);
        else copy_field(in, in_stride, out, out_stride, bytes, 1);
    }
}

/* Block number `block` of 16 rows, or of as many as there are: interleaved. */
static inline void interleave_block(const layout *of, const uint8_t *rows, int64_t row_bytes, int64_t count, int64_t block, uint8_t *to) {
    if (count < GROUP) memset(to, 0, GROUP * of->bytes);
    for (int row = 0; row < count && row < GROUP; row++)
        copy_block(of, rows + row * row_bytes + block * of->bytes, to, row, 1);
}

static inline void unpack_interleaved(int64_t format, const uint8_t *group, int row, int64_t size, float *out) {
    const layout *of = layout_of(format);
    uint8_t block[LARGEST_BLOCK];
    for (int64_t i = 0; i < size; i += of->weights, group += GROUP * of->bytes, out += of->weights) {
        copy_block(of, group, block, row, 0);
        unpack(format, block, of->weights, out);
    }
}

/* The pieces of an interleaved block, from here on. */

static inline void halves(const uint8_t *in, float *out) { unpack_f16(in, GROUP, out); }

/* Number i of the integers of four bytes in memory. */
ALWAYS uint32_t word(const uint8_t *in, int i) { return ((const four_bytes *)in)[i]; }

/* Codes are handled four at a time, since compilers have no good code for shifts of bytes. Of 16 weights there are
 * HALF integers of four codes, of 32 there are WHOLE. */
enum { HALF = 4 * GROUP, WHOLE = 2 * HALF };
#define EVERY(byte) ((byte) * 0x01010101u)

static inline void low_then_high(const uint8_t *restrict in, uint32_t *restrict codes) {
    for (int i = 0; i < HALF; i++) codes[i] = word(in, i) & EVERY(15);
    for (int i = 0; i < HALF; i++) codes[i + HALF] = word(in, i) >> 4 & EVERY(15);
}

/* As low_then_high, with fifth bits: bit u of a byte belongs to unit u. */
static inline void with_fifth_bits(const uint8_t *in, const uint8_t *fifth, uint32_t *restrict codes) {
    for (int u = 0; u < 4; u++, in += 4 * GROUP, codes += GROUP)
        for (int i = 0; i < GROUP; i++) {
            codes[i] = (word(in, i) & EVERY(15)) | (word(fifth, i) >> u & EVERY(1)) << 4;
            codes[i + HALF] = (word(in, i) >> 4 & EVERY(15)) | (word(fifth, i) >> (u + 4) & EVERY(1)) << 4;
        }
}

static inline void pieces_q4_0(const uint8_t *in, piece *to) {
    halves(in, to->scale[0]);
    low_then_high(in + 2 * GROUP, to->codes);
}

static inline void pieces_q4_1(const uint8_t *in, piece *to) {
    halves(in, to->scale[0]);
    halves(in + 2 * GROUP, to->offset[0]);
    low_then_high(in + 4 * GROUP, to->codes);
}

static inline void pieces_q5_0(const uint8_t *in, piece *to) {
    halves(in, to->scale[0]);
    with_fifth_bits(in + 6 * GROUP, in + 2 * GROUP, to->codes);
}

static inline void pieces_q5_1(const uint8_t *in, piece *to) {
    halves(in, to->scale[0]);
    halves(in + 2 * GROUP, to->offset[0]);
    with_fifth_bits(in + 8 * GROUP, in + 4 * GROUP, to->codes);
}

/* Signed bytes, 128 more. */
static inline void pieces_q8_0(const uint8_t *restrict in, piece *restrict to) {
    halves(in, to->scale[0]);
    for (int i = 0; i < WHOLE; i++) to->codes[i] = word(in + 2 * GROUP, i) ^ EVERY(128);
}

/* Places in a table of 16 bytes, which become its entries plus zero. */
static inline void look_up(uint32_t *codes, const int8_t *table, int zero) {
    uint8_t entries[16] __attribute__((aligned(16))), *places = (uint8_t *)codes;
    for (int i = 0; i < 16; i++) entries[i] = (uint8_t)(table[i] + zero);
#if defined __AVX2__
    __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)entries));
    for (int i = 0; i < 4 * WHOLE; i += 32)
        _mm256_store_si256((__m256i *)(places + i), _mm256_shuffle_epi8(both, _mm256_load_si256((const __m256i *)(places + i))));
#else
    for (int i = 0; i < 4 * WHOLE; i++) places[i] = entries[places[i]];
#endif
}

static inline void pieces_iq4_nl(const uint8_t *in, piece *to) {
    pieces_q4_0(in, to);
    look_up(to->codes, iq4_table, 128);
}

static inline void pieces_iq4_xs(const uint8_t *in, piece *to) {
    float scale[GROUP];
    halves(in, scale);
    for (int j = 0; j < 8; j++, to++) {
        for (int i = 0; i < GROUP; i++) {
            uint16_t high;
            memcpy(&high, in + 2 * GROUP + 2 * i, sizeof high);
            int low = word(in + 4 * GROUP, i) >> 4 * j & 15;
            to->scale[0][i] = scale[i] * (float)((low | (high >> 2 * j & 3) << 4) - 32);
        }
        low_then_high(in + (8 + 16 * j) * GROUP, to->codes);
        look_up(to->codes, iq4_table, 128);
    }
}

static inline void pieces_mxfp4(const uint8_t *in, piece *to) {
    for (int i = 0; i < GROUP; i++) to->scale[0][i] = mxfp4_scale(in[i]);
    low_then_high(in + GROUP, to->codes);
    look_up(to->codes, e2m1_doubled, 16);
}

static inline void pieces_int4(const uint8_t *restrict in, piece *restrict to) {
    for (int half = 0; half < 2; half++, to++) {
        memcpy(to->scale[0], in, sizeof to->scale[0]);
        for (int i = 0; i < GROUP; i++) to->zero[i] = in[4 * GROUP + i];
        for (int i = 0; i < WHOLE; i++) to->codes[i] = word(in + 5 * GROUP, i) >> 4 * half & EVERY(15);
    }
}

static inline void pieces_q2_k(const uint8_t *restrict in, piece *restrict to) {
    float scale[GROUP], least[GROUP];
    halves(in + 80 * GROUP, scale);
    halves(in + 82 * GROUP, least);
    for (int j = 0; j < 16; j++) /* groups of 16 weights */
        for (int i = 0; i < GROUP; i++) {
            int both = word(in + j / 4 * 4 * GROUP, i) >> j % 4 * 8 & 255;
            to[j / 2].scale[j % 2][i] = scale[i] * (float)(both & 15);
            to[j / 2].offset[j % 2][i] = -(least[i] * (float)(both >> 4));
        }
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < WHOLE; i++) to[j].codes[i] = word(in + (16 + j / 4 * 32) * GROUP, i) >> j % 4 * 2 & EVERY(3);
}

static inline void pieces_q3_k(const uint8_t *restrict in, piece *restrict to) {
    float scale[GROUP];
    halves(in + 108 * GROUP, scale);
    for (int j = 0; j < 16; j++) /* groups of 16 weights, with a scale of 6 bits each */
        for (int i = 0; i < GROUP; i++) {
            int low = word(in + (96 + j % 8 / 4 * 4) * GROUP, i) >> (j % 4 * 8 + j / 8 * 4) & 15;
            int high = word(in + 104 * GROUP, i) >> (j % 4 * 8 + j / 4 * 2) & 3;
            to[j / 2].scale[j % 2][i] = scale[i] * (float)((low | high << 4) - 32);
        }
    for (int j = 0; j < 8; j++) {
        const uint8_t *low = in + (32 + j / 4 * 32) * GROUP;
        for (int i = 0; i < WHOLE; i++) to[j].codes[i] = (word(low, i) >> j % 4 * 2 & EVERY(3)) | (word(in, i) >> j & EVERY(1)) << 2;
    }
}

/* Scales and offsets of Q4_K and Q5_K: for each of 8 groups, a multiple of each of two halves, in 6 bits (unpack.h). */
static inline void scales_and_mins(const uint8_t *restrict in, piece *restrict to) {
    float scale[GROUP], least[GROUP];
    halves(in, scale);
    halves(in + 2 * GROUP, least);
    const uint8_t *words = in + 4 * GROUP;
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < GROUP; i++) {
            uint32_t one = word(words, i) >> j % 4 * 8, other = word(words + 4 * GROUP, i) >> j % 4 * 8;
            uint32_t rest = word(words + 8 * GROUP, i) >> j % 4 * 8;
            int s = j < 4 ? one & 63 : (rest & 15) | (one >> 6 & 3) << 4;
            int m = j < 4 ? other & 63 : (rest >> 4 & 15) | (other >> 6 & 3) << 4;
            to[j].scale[0][i] = scale[i] * (float)s;
            to[j].offset[0][i] = -(least[i] * (float)m);
        }
}

static inline void pieces_q4_k(const uint8_t *restrict in, piece *restrict to) {
    scales_and_mins(in, to);
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < WHOLE; i++) to[j].codes[i] = word(in + (16 + j / 2 * 32) * GROUP, i) >> j % 2 * 4 & EVERY(15);
}

static inline void pieces_q5_k(const uint8_t *restrict in, piece *restrict to) {
    scales_and_mins(in, to);
    for (int j = 0; j < 8; j++) {
        const uint8_t *low = in + (48 + j / 2 * 32) * GROUP, *high = in + 16 * GROUP;
        for (int i = 0; i < WHOLE; i++) to[j].codes[i] = (word(low, i) >> j % 2 * 4 & EVERY(15)) | (word(high, i) >> j & EVERY(1)) << 4;
    }
}

static inline void pieces_q6_k(const uint8_t *restrict in, piece *restrict to) {
    float scale[GROUP];
    halves(in + 208 * GROUP, scale);
    for (int j = 0; j < 16; j++) /* groups of 16 weights, with a scale each */
        for (int i = 0; i < GROUP; i++) {
            int32_t times = (int32_t)(word(in + (192 + j / 4 * 4) * GROUP, i) << (24 - j % 4 * 8)) >> 24;
            to[j / 2].scale[j % 2][i] = scale[i] * (float)times;
        }
    for (int j = 0; j < 8; j++) {
        const uint8_t *low = in + (j / 4 * 64 + j % 2 * 32) * GROUP, *high = in + (128 + j / 4 * 32) * GROUP;
        for (int i = 0; i < WHOLE; i++) to[j].codes[i] = (word(low, i) >> j % 4 / 2 * 4 & EVERY(15)) | (word(high, i) >> j % 4 * 2 & EVERY(3)) << 4;
    }
}

/* The pieces of an interleaved block: as many as it has times 32 weights. */
static inline void pieces(int64_t format, const uint8_t *in, piece *to) {
    switch (format) {
    case Q4_0: pieces_q4_0(in, to); break;
    case Q4_1: pieces_q4_1(in, to); break;
    case Q5_0: pieces_q5_0(in, to); break;
    case Q5_1: pieces_q5_1(in, to); break;
    case Q8_0: pieces_q8_0(in, to); break;
    case Q2_K: pieces_q2_k(in, to); break;
    case Q3_K: pieces_q3_k(in, to); break;
    case Q4_K: pieces_q4_k(in, to); break;
    case Q5_K: pieces_q5_k(in, to); break;
    case Q6_K: pieces_q6_k(in, to); break;
    case IQ4_NL: pieces_iq4_nl(in, to); break;
    case IQ4_XS: pieces_iq4_xs(in, to); break;
    case MXFP4: pieces_mxfp4(in, to); break;
    case INT4: pieces_int4(in, to); break;
    }
}

#endif
