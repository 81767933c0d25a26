/* Exact integers for products: sums of byte products, for each kind of processor, and rounding. */

#ifndef SWARMNET_DOTS_H
#define SWARMNET_DOTS_H

#include <math.h>

#include "lanes.h"

#define ALWAYS static inline __attribute__((always_inline))

/* Integers in a register that has room for as many floats. */
typedef int32_t ints __attribute__((vector_size(WIDTH * sizeof(int32_t)), aligned(sizeof(int32_t))));

/* Four bytes as one integer, the first in its lowest bits. */
typedef uint32_t four_bytes __attribute__((aligned(1), may_alias));

ALWAYS floats to_floats(ints x) { return __builtin_convertvector(x, floats); }

/* The nearest integers, even ones for halves. */
ALWAYS ints nearest(floats x) {
#if defined __AVX512F__
    return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined __AVX2__
    return (ints)_mm256_cvtps_epi32((__m256)x);
#else
    ints found;
    for (int i = 0; i < WIDTH; i++) found[i] = (int32_t)lrintf(x[i]);
    return found;
#endif
}

/* Sums of products of unsigned codes with signed bytes, exact: lane i of the result is the sum over u < units
 * and j < 4 of codes[64 * u + 4 * i + j] * values[4 * u + j]. units and bits, the width of a code, are
 * compile-time constants; units is at most 8. */
ALWAYS ints dots(const uint8_t *codes, const int8_t *values, const int units, const int bits) {
    ints sums = {0};
    const four_bytes *fours = (const four_bytes *)values;
    (void)fours;
#if defined __AVX512VNNI__
    (void)bits;
#pragma GCC unroll 8
    for (int u = 0; u < units; u++)
        sums = (ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_loadu_si512(codes + 64 * u), _mm512_set1_epi32((int)fours[u]));
#elif defined __AVXVNNI__ && !defined __AVX512F__
    (void)bits;
#pragma GCC unroll 8
    for (int u = 0; u < units; u++)
        sums = (ints)_mm256_dpbusd_avx_epi32((__m256i)sums, _mm256_loadu_si256((const __m256i *)(codes + 64 * u)), _mm256_set1_epi32((int)fours[u]));
#elif defined __AVX2__ && !defined __AVX512F__
    /* maddubs adds two products in 16 bits, and saturates. So many units fit: 2 * units * 128 * (2 ** bits - 1) < 2 ** 15.
     * Codes of 8 bits are taken as 16 times their high four bits, plus their low ones. */
    const int fit = bits == 5 ? 4 : bits == 6 ? 2 : 8;
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    for (int u = 0; u < units; u += fit) {
        __m256i sum = _mm256_setzero_si256(), high = sum;
#pragma GCC unroll 8
        for (int i = u; i < (units < u + fit ? units : u + fit); i++) {
            __m256i code = _mm256_loadu_si256((const __m256i *)(codes + 64 * i)), four = _mm256_set1_epi32((int)fours[i]);
            if (bits == 8) {
                high = _mm256_add_epi16(high, _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(code, 4), low), four));
                code = _mm256_and_si256(code, low);
            }
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(code, four));
        }
        sums += (ints)_mm256_madd_epi16(sum, ones);
        if (bits == 8) sums += (ints)_mm256_slli_epi32(_mm256_madd_epi16(high, ones), 4);
    }
#else
    (void)bits;
#pragma GCC unroll 1
    for (int u = 0; u < units; u++)
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < 4; j++) sums[i] += codes[64 * u + 4 * i + j] * values[4 * u + j];
#endif
    return sums;
}

#endif
