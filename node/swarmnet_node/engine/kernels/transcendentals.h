/* exp, tanh, the normal distribution, sine and cosine, without libm: compilers can vectorise them, and their
 * bits are the same on every processor. test_transcendentals.py has the bounds of their errors. Units are those
 * in the last place of float32. */

#ifndef SWARMNET_TRANSCENDENTALS_H
#define SWARMNET_TRANSCENDENTALS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* exp(x), within one unit (Cephes, expf). x is clamped to [-87, 88]. */
static inline float exponential(float x) {
    /* Adding this number rounds to an integer: no bit is left for the fraction. */
    const float rounds = 3 << 22;
    uint32_t power, bits;
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float sum = x * 1.44269504f + rounds, whole = sum - rounds;
    float y, left = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    y = 1.9875691500e-4f * left + 1.3981999507e-3f;
    y = y * left + 8.3334519073e-3f;
    y = y * left + 4.1665795894e-2f;
    y = y * left + 1.6666665459e-1f;
    y = y * left + 5.0000001201e-1f;
    y = y * left * left + left + 1;
    memcpy(&power, &sum, sizeof power);
    memcpy(&bits, &y, sizeof bits);
    bits += power << 23; /* multiplies by two to the power of whole */
    memcpy(&y, &bits, sizeof y);
    return y;
}

/* tanh(x), within two units (Cephes, tanhf). */
static inline float hyperbolic_tangent(float x) {
    float square = x * x, far = 1 - 2 / (exponential(2 * fabsf(x)) + 1), near = -5.70498872745e-3f;
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    return fabsf(x) < 0.625f ? near : copysignf(far, x);
}

/* The probability that a normal variable is below x: (1 + erf(x / sqrt(2))) / 2, within 2 ** -23. The two
 * approximations of erf are those of N. Juffa. */
static inline float normal_probability(float x) {
    float y = x * 0.70710678f, size = fabsf(y), square = y * y;
    float near = -5.96761703e-4f, far = -1.72853470e-5f;
    near = near * square + 4.99119423e-3f;
    near = near * square - 2.67681349e-2f;
    near = near * square + 1.12819925e-1f;
    near = near * square - 3.76125336e-1f;
    near = near * square + 1.28379166e-1f;
    near = near * y + y;
    far = far * size + 3.83197126e-4f;
    far = far * size - 3.88396438e-3f;
    far = far * size + 2.42546219e-2f;
    far = far * size - 1.06777877e-1f;
    far = far * size - 6.34846687e-1f;
    far = far * size - 1.28717512e-1f;
    far = exponential(far * size - size) / 2;
    return size < 0.927734375f ? 0.5f + near / 2 : x < 0 ? far : 1 - far;
}

/* The cosine and the sine of an angle, each within one unit while the angle is below 2 ** 20. A multiple of a
 * quarter turn is taken away in double precision; the rest has the polynomials of FreeBSD's k_cosf.c and k_sinf.c. */
static inline void cosine_and_sine(float angle, float *cosine, float *sine) {
    const double rounds = 3LL << 51; /* as in exponential */
    double sum = angle * 6.36619772367581382433e-01 + rounds, turns = sum - rounds;
    double x = angle - turns * 1.57079631090164184570 - turns * 1.58932547735281966916e-08;
    double z = x * x, of_cosine = 0x199342e0ee5069.0p-68, of_sine = 0x16cd878c3b46a7.0p-71;
    of_cosine = of_cosine * z - 0x16c087e80f1e27.0p-62;
    of_cosine = of_cosine * z + 0x155553e1053a42.0p-57;
    of_cosine = of_cosine * z - 0x1ffffffd0c5e81.0p-54;
    of_cosine = of_cosine * z + 1;
    of_sine = of_sine * z - 0x1a00f9e2cae774.0p-65;
    of_sine = of_sine * z + 0x111110896efbb2.0p-59;
    of_sine = of_sine * z - 0x15555554cbac77.0p-55;
    of_sine = of_sine * z * x + x;
    uint64_t quarter;
    memcpy(&quarter, &sum, sizeof quarter);
    double first = quarter & 1 ? of_sine : of_cosine, second = quarter & 1 ? of_cosine : of_sine;
    *cosine = (float)((quarter + 1) & 2 ? -first : first);
    *sine = (float)(quarter & 2 ? -second : second);
}

#endif
