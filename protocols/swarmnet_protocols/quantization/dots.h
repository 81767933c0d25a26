/* Exact integers for products: sums of byte products, for each kind of processor, and rounding. */

#ifndef SWARMNET_DOTS_H
#define SWARMNET_DOTS_H

#include <math.h>

#include "lanes.h"

/* HAS_DOTS: whether the processor has instructions for dots(). SIGNED: whether they take signed codes, so that codes of 8
 * bits are signed bytes, and not those plus 128. */
#if defined __ARM_FEATURE_DOTPROD
enum { HAS_DOTS = 1, SIGNED = 1 };
#elif defined __AVX2__
enum { HAS_DOTS = 1, SIGNED = 0 };
#else
enum { HAS_DOTS = 0, SIGNED = 0 };
#endif
/* What is added to signed bytes to make codes. */
enum { ZERO_OF_BYTES = SIGNED ? 0 : 128 };

#define ALWAYS static inline __attribute__((always_inline))

/* Integers in a register that has room for as many floats. */
typedef int32_t ints __attribute__((vector_size(WIDTH * sizeof(int32_t)), aligned(sizeof(int32_t))));

/* As many integers of four bytes: codes of weights. */
typedef uint32_t words __attribute__((vector_size(WIDTH * sizeof(uint32_t)), aligned(sizeof(uint32_t)), may_alias));

/* As many integers of two bytes. */
typedef uint16_t shorts __attribute__((vector_size(WIDTH * sizeof(uint16_t)), aligned(sizeof(uint16_t)), may_alias));

/* Four bytes as one integer, the first in its lowest bits. */
typedef uint32_t four_bytes __attribute__((aligned(1), may_alias));

ALWAYS floats to_floats(ints x) { return __builtin_convertvector(x, floats); }

/* The nearest integers, even ones for halves. */
ALWAYS ints nearest(floats x) {
#if defined __AVX512F__
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined __AVX2__
    return (ints)_mm256_cvtps_epi32((__m256)x);
#elif defined __aarch64__
    return (ints)vcvtnq_s32_f32((float32x4_t)x);
#else
    ints found;
    for (int i = 0; i < WIDTH; i++) found[i] = (int32_t)lrintf(x[i]);
    return found;
#endif
}

#if defined __AVX2__ && !defined __AVX512F__
/* As dots(), for 8 units and codes of 8 bits, for which maddubs would saturate: values and codes take 16 bits. values are
 * the three planes of each row (product.h). The first two become one number, whose sum is that of the second plane: split()
 * leaves room for it in 16 bits. */
ALWAYS void wide_dots(const words *codes, const int8_t *const *values, const int count, ints *sums) {
    const __m256i low_bytes = _mm256_set1_epi16(255);
    /* Of each row and unit: values 0 and 2, then 1 and 3, of the first two planes; and so of the third. */
    int32_t pairs[4][4][8];
#pragma GCC unroll 4
    for (int v = 0; v < count; v += 3) {
        __m256i plane[3], wide[4];
        for (int i = 0; i < 3; i++) plane[i] = _mm256_loadu_si256((const __m256i *)values[v + i]);
        wide[0] = _mm256_add_epi16(_mm256_slli_epi16(plane[0], 8), _mm256_srai_epi16(_mm256_slli_epi16(plane[1], 8), 8));
        wide[1] = _mm256_add_epi16(_mm256_andnot_si256(low_bytes, plane[0]), _mm256_srai_epi16(plane[1], 8));
        wide[2] = _mm256_srai_epi16(_mm256_slli_epi16(plane[2], 8), 8);
        wide[3] = _mm256_srai_epi16(plane[2], 8);
        memcpy(pairs[v / 3], wide, sizeof wide);
    }
#pragma GCC unroll 1
    for (int u = 0; u < 8; u++) {
        __m256i even = _mm256_and_si256((__m256i)codes[u], low_bytes), odd = _mm256_srli_epi16((__m256i)codes[u], 8);
#pragma GCC unroll 4
        for (int v = 0; v < count; v += 3) {
            sums[v + 1] += (ints)_mm256_madd_epi16(even, _mm256_set1_epi32(pairs[v / 3][0][u]));
            sums[v + 2] += (ints)_mm256_madd_epi16(even, _mm256_set1_epi32(pairs[v / 3][2][u]));
            sums[v + 1] += (ints)_mm256_madd_epi16(odd, _mm256_set1_epi32(pairs[v / 3][1][u]));
            sums[v + 2] += (ints)_mm256_madd_epi16(odd, _mm256_set1_epi32(pairs[v / 3][3][u]));
        }
    }
}
#endif

/* Sums of products of codes with signed bytes, exact: lane i of sums[v] is the sum over u < units and j < 4 of byte j of
 * codes[u][i] times values[v][4 * u + j]. count, units and bits, the width of a code, are compile-time constants; units is
 * at most 8. */
ALWAYS void dots(const words *codes, const int8_t *const *values, const int count, const int units, const int bits, ints *sums) {
    for (int v = 0; v < count; v++) sums[v] = (ints){0};
#if defined __AVX512VNNI__ || (defined __AVXVNNI__ && !defined __AVX512F__)
    (void)bits;
    /* An addition waits for the one before it to the same sum, so it comes after those to all others. */
#pragma GCC unroll 8
    for (int u = 0; u < units; u++)
#pragma GCC unroll 12
        for (int v = 0; v < count; v++) {
            int four = (int)*(const four_bytes *)(values[v] + 4 * u);
#if defined __AVX512F__
            sums[v] = (ints)_mm512_dpbusd_epi32((__m512i)sums[v], (__m512i)codes[u], _mm512_set1_epi32(four));
#else
            sums[v] = (ints)_mm256_dpbusd_avx_epi32((__m256i)sums[v], (__m256i)codes[u], _mm256_set1_epi32(four));
#endif
        }
#elif defined __AVX2__ && !defined __AVX512F__
    if (bits == 8) {
        wide_dots(codes, values, count, sums);
        return;
    }
    /* maddubs adds two products in 16 bits, and saturates. So many units fit: 2 * units * 128 * (2 ** bits - 1) < 2 ** 15. */
    const int fit = bits == 5 ? 4 : bits == 6 ? 2 : 8;
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 12
    for (int v = 0; v < count; v++)
        for (int u = 0; u < units; u += fit) {
            __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int i = u; i < (units < u + fit ? units : u + fit); i++) {
                __m256i four = _mm256_set1_epi32((int)*(const four_bytes *)(values[v] + 4 * i));
                sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16((__m256i)codes[i], four));
            }
            sums[v] += (ints)_mm256_madd_epi16(sum, ones);
        }
#elif defined __ARM_FEATURE_DOTPROD
    (void)bits;
#pragma GCC unroll 8
    for (int u = 0; u < units; u++)
#pragma GCC unroll 12
        for (int v = 0; v < count; v++) {
            int8x16_t four = vreinterpretq_s8_u32(vdupq_n_u32(*(const four_bytes *)(values[v] + 4 * u)));
            sums[v] = (ints)vdotq_s32((int32x4_t)sums[v], (int8x16_t)codes[u], four);
        }
#else
    (void)bits;
#pragma GCC unroll 1
    for (int v = 0; v < count; v++)
        for (int u = 0; u < units; u++)
            for (int i = 0; i < WIDTH; i++)
                for (int j = 0; j < 4; j++) sums[v][i] += (int32_t)(codes[u][i] >> 8 * j & 255) * values[v][4 * u + j];
#endif
}

#endif
