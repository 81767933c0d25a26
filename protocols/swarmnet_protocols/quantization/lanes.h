/* Sums of floats with the same bits on every processor.
 *
 * A sum of products is kept in sixteen lanes: lane i takes the values i, i + 16, i + 32 and so on, each
 * by one fused multiplication and addition. At the end one tree adds the lanes. Missing values at the
 * end count as zeros. So the order of operations depends neither on the width of the processor's
 * vectors, nor on what else is computed. */

#ifndef SWARMNET_LANES_H
#define SWARMNET_LANES_H

#include <stdint.h>
#include <string.h>
#if defined __AVX__
#include <immintrin.h>
#elif defined __aarch64__
#include <arm_neon.h>
#endif

/* WIDTH: floats of one vector register. */
#if defined __AVX512F__
enum { WIDTH = 16 };
#elif defined __AVX__
enum { WIDTH = 8 };
#else
enum { WIDTH = 4 };
#endif
enum { LANES = 16, PARTS = LANES / WIDTH };
typedef float floats __attribute__((vector_size(WIDTH * sizeof(float)), aligned(sizeof(float))));
typedef float four_floats __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float))));

typedef struct {
    floats parts[PARTS];
} lanes;

/* a * b + c, rounded once. */
static inline float fused(float a, float b, float c) {
#if defined __FMA__ || defined __aarch64__
    return __builtin_fmaf(a, b, c);
#else
    /* In double precision the product is exact. The sum is rounded to odd, which keeps the second
     * rounding right (Boldo and Melquiond 2008, section 3). */
    double product = (double)a * b, sum = product + c, of_c = sum - product;
    double lost = (product - (sum - of_c)) + (c - of_c);
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if ((lost > 0 || lost < 0) && !(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
#endif
}

static inline floats fused_floats(floats a, floats b, floats c) {
#if defined __AVX512F__
    return _mm512_fmadd_ps(a, b, c);
#elif defined __FMA__
    return _mm256_fmadd_ps(a, b, c);
#elif defined __aarch64__
    return vfmaq_f32(c, a, b);
#else
    for (int i = 0; i < WIDTH; i++) c[i] = fused(a[i], b[i], c[i]);
    return c;
#endif
}

static inline lanes lanes_at(const float *x) {
    lanes found;
    for (int i = 0; i < PARTS; i++) found.parts[i] = *(const floats *)(x + i * WIDTH);
    return found;
}

/* The first count floats, and zeros. */
static inline lanes first_lanes(const float *x, int64_t count) {
    float padded[LANES] = {0};
    memcpy(padded, x, count * sizeof *x);
    return lanes_at(padded);
}

static inline lanes fused_lanes(lanes a, lanes b, lanes c) {
    for (int i = 0; i < PARTS; i++) c.parts[i] = fused_floats(a.parts[i], b.parts[i], c.parts[i]);
    return c;
}

static inline lanes added_lanes(lanes a, lanes b) {
    for (int i = 0; i < PARTS; i++) a.parts[i] += b.parts[i];
    return a;
}

static inline lanes all_lanes(float x) {
    lanes found;
    for (int i = 0; i < PARTS; i++) found.parts[i] = x - (floats){0};
    return found;
}

static inline float sum_of_lanes(lanes x) {
    four_floats quarters[LANES / 4], sum;
    memcpy(quarters, &x, sizeof quarters);
    sum = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

#endif
