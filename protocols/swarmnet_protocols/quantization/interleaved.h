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

/* Codes and scales of 32 weights of WIDTH outputs: weight k of an output is
 *   scale[k / 16] * (code - zero) + offset[k / 16],
 * the same for both halves in most formats. */
typedef struct {
    words codes[8]; /* [k / 4][output], k % 4 from the lowest bits */
    floats scale[2], offset[2];
    ints zero;
} piece;

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

/* The pieces of an interleaved block, from here on. `first` is the number of bytes that come before a field in a row's
 * block, and `at` the first of WIDTH outputs. */

/* Number `unit` of a field's integers of four bytes. */
ALWAYS words word(const uint8_t *in, int first, int unit, int at) {
    return *(const words *)(in + GROUP * first + 4 * (GROUP * unit + at));
}

ALWAYS floats halves(const uint8_t *in, int first, int at) {
    in += GROUP * first + 2 * at;
#if defined __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)in));
#elif defined __F16C__
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)in));
#elif defined __aarch64__
    return (floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(in)));
#else
    float found[WIDTH];
    unpack_f16(in, WIDTH, found);
    return *(const floats *)found;
#endif
}

/* Four codes are handled at a time, since compilers have no good code for shifts of bytes. */
#define EVERY(byte) ((byte) * 0x01010101u)

ALWAYS void low_then_high(const uint8_t *in, int first, int at, words *codes) {
    for (int u = 0; u < 4; u++) {
        codes[u] = word(in, first, u, at) & EVERY(15);
        codes[u + 4] = word(in, first, u, at) >> 4 & EVERY(15);
    }
}

/* As low_then_high, with fifth bits: bit u of a byte belongs to unit u. */
ALWAYS void with_fifth_bits(const uint8_t *in, int fifth, int at, words *codes) {
    low_then_high(in, fifth + 4, at, codes);
    for (int u = 0; u < 8; u++) codes[u] |= (word(in, fifth, 0, at) >> u & EVERY(1)) << 4;
}

/* Places in a table of 16 bytes become its entries plus zero. */
ALWAYS void look_up(words *codes, const int8_t *table, int zero) {
    uint8_t entries[16] __attribute__((aligned(16)));
    for (int i = 0; i < 16; i++) entries[i] = (uint8_t)(table[i] + zero);
    for (int u = 0; u < 8; u++) {
#if defined __AVX512BW__
        codes[u] = (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(*(const __m128i *)entries), (__m512i)codes[u]);
#elif defined __AVX2__
        codes[u] = (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i *)entries), (__m256i)codes[u]);
#elif defined __aarch64__
        codes[u] = (words)vqtbl1q_u8(vld1q_u8(entries), (uint8x16_t)codes[u]);
#else
        uint8_t places[4 * WIDTH];
        memcpy(places, codes + u, sizeof places);
        for (int i = 0; i < 4 * WIDTH; i++) places[i] = entries[places[i]];
        memcpy(codes + u, places, sizeof places);
#endif
    }
}

/* The scale and offset of Q4_K and Q5_K: multiples of two halves, in 6 bits (unpack.h). */
ALWAYS void scale_and_offset(const uint8_t *in, int j, int at, piece *to) {
    words one = word(in, 4, 0, at) >> j % 4 * 8, other = word(in, 4, 1, at) >> j % 4 * 8, rest = word(in, 4, 2, at) >> j % 4 * 8;
    words scale = j < 4 ? one & 63 : (rest & 15) | (one >> 6 & 3) << 4;
    words least = j < 4 ? other & 63 : (rest >> 4 & 15) | (other >> 6 & 3) << 4;
    to->scale[0] = halves(in, 0, at) * to_floats((ints)scale);
    to->offset[0] = -(halves(in, 2, at) * to_floats((ints)least));
}

/* Piece number j of an interleaved block. */
ALWAYS void unpack_piece(const int64_t format, const uint8_t *in, int j, int at, piece *to) {
    switch (format) {
    case Q4_0: case IQ4_NL:
        to->scale[0] = halves(in, 0, at);
        low_then_high(in, 2, at, to->codes);
        if (format == IQ4_NL) look_up(to->codes, iq4_table, ZERO_OF_BYTES);
        break;
    case Q4_1:
        to->scale[0] = halves(in, 0, at);
        to->offset[0] = halves(in, 2, at);
        low_then_high(in, 4, at, to->codes);
        break;
    case Q5_0:
        to->scale[0] = halves(in, 0, at);
        with_fifth_bits(in, 2, at, to->codes);
        break;
    case Q5_1:
        to->scale[0] = halves(in, 0, at);
        to->offset[0] = halves(in, 2, at);
        with_fifth_bits(in, 4, at, to->codes);
        break;
    case Q8_0:
        to->scale[0] = halves(in, 0, at);
        for (int u = 0; u < 8; u++) to->codes[u] = word(in, 2, u, at) ^ EVERY(ZERO_OF_BYTES);
        break;
    case IQ4_XS: {
        words high;
        for (int i = 0; i < WIDTH; i++) high[i] = in[2 * (GROUP + at + i)] | in[2 * (GROUP + at + i) + 1] << 8;
        words scale = (word(in, 4, 0, at) >> 4 * j & 15) | (high >> 2 * j & 3) << 4;
        to->scale[0] = halves(in, 0, at) * to_floats((ints)scale - 32);
        low_then_high(in, 8 + 16 * j, at, to->codes);
        look_up(to->codes, iq4_table, ZERO_OF_BYTES);
        break;
    }
    case MXFP4: {
        float scales[WIDTH];
        for (int i = 0; i < WIDTH; i++) scales[i] = mxfp4_scale(in[at + i]);
        to->scale[0] = *(const floats *)scales;
        low_then_high(in, 1, at, to->codes);
        look_up(to->codes, e2m1_doubled, 16);
        break;
    }
    case INT4:
        to->scale[0] = *(const floats *)(in + 4 * at);
        for (int i = 0; i < WIDTH; i++) to->zero[i] = in[4 * GROUP + at + i];
        for (int u = 0; u < 8; u++) to->codes[u] = word(in, 5, u, at) >> 4 * j & EVERY(15);
        break;
    case Q2_K: /* a scale and an offset for 16 weights */
        for (int half = 0; half < 2; half++) {
            words both = word(in, 0, j / 2, at) >> (j % 2 * 2 + half) * 8 & 255;
            to->scale[half] = halves(in, 80, at) * to_floats((ints)(both & 15));
            to->offset[half] = -(halves(in, 82, at) * to_floats((ints)(both >> 4)));
        }
        for (int u = 0; u < 8; u++) to->codes[u] = word(in, 16 + j / 4 * 32, u, at) >> j % 4 * 2 & EVERY(3);
        break;
    case Q3_K: /* a scale of 6 bits for 16 weights */
        for (int half = 0; half < 2; half++) {
            int group = 2 * j + half;
            words low = word(in, 96, group % 8 / 4, at) >> (group % 4 * 8 + group / 8 * 4) & 15;
            words high = word(in, 104, 0, at) >> (group % 4 * 8 + group / 4 * 2) & 3;
            to->scale[half] = halves(in, 108, at) * to_floats((ints)(low | high << 4) - 32);
        }
        for (int u = 0; u < 8; u++)
            to->codes[u] = (word(in, 32 + j / 4 * 32, u, at) >> j % 4 * 2 & EVERY(3)) | (word(in, 0, u, at) >> j & EVERY(1)) << 2;
        break;
    case Q4_K:
        scale_and_offset(in, j, at, to);
        for (int u = 0; u < 8; u++) to->codes[u] = word(in, 16 + j / 2 * 32, u, at) >> j % 2 * 4 & EVERY(15);
        break;
    case Q5_K:
        scale_and_offset(in, j, at, to);
        for (int u = 0; u < 8; u++)
            to->codes[u] = (word(in, 48 + j / 2 * 32, u, at) >> j % 2 * 4 & EVERY(15)) | (word(in, 16, u, at) >> j & EVERY(1)) << 4;
        break;
    case Q6_K: /* a scale for 16 weights */
        for (int half = 0; half < 2; half++) {
            ints scale = (ints)(word(in, 192, j / 2, at) << (24 - (j % 2 * 2 + half) * 8)) >> 24;
            to->scale[half] = halves(in, 208, at) * to_floats(scale);
        }
        for (int u = 0; u < 8; u++) {
            words low = word(in, j / 4 * 64 + j % 2 * 32, u, at) >> j % 4 / 2 * 4 & EVERY(15);
            to->codes[u] = low | (word(in, 128 + j / 4 * 32, u, at) >> j % 4 * 2 & EVERY(3)) << 4;
        }
        break;
    }
}

#endif
