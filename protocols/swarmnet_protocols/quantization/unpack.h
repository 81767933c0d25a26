/* Unpacks weights of gguf's quantised formats to float32, block by block.
 *
 * The values equal those of gguf's own Python code: the order of operations is the same, and every
 * operation except the last is exact in float32.
 *
 * The loops have constant bounds and no branches, so that compilers vectorise them. gcc does not
 * vectorise conversions from half, and makes scalar code of loops that take bytes apart, except for
 * AVX-512. These two use intrinsics, which are up to eight times as fast. */

#ifndef SWARMNET_UNPACK_H
#define SWARMNET_UNPACK_H

#include <stdint.h>
#include <string.h>
#if defined __F16C__ || defined __AVX2__
#include <immintrin.h>
#endif

/* The numbers of the formats, as in formats.py: gguf's, and two of our own. */
enum {
    FP8 = 1000, INT4 = 1001,
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39
};

static inline float from_half(const uint8_t *bytes) {
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
#if defined __F16C__
    return _cvtsh_ss(bits);
#elif defined __aarch64__
    __fp16 half;
    memcpy(&half, &bits, sizeof half);
    return half;
#else
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, whole;
    float value;
    if (rest >= 0x7c00) {
        whole = 0x7f800000 | (rest & 0x3ff) << 13;
        memcpy(&value, &whole, sizeof value);
    } else { /* by way of a multiplication, which handles subnormal numbers */
        whole = rest << 13;
        memcpy(&value, &whole, sizeof value);
        value *= 0x1p112f;
    }
    memcpy(&whole, &value, sizeof whole);
    whole |= sign;
    memcpy(&value, &whole, sizeof value);
    return value;
#endif
}

static inline void unpack_f16(const uint8_t *in, int64_t count, float *out) {
    int64_t i = 0;
#if defined __F16C__
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(in + 2 * i))));
#endif
    for (; i < count; i++) out[i] = from_half(in + 2 * i);
}

static inline void unpack_bf16(const uint8_t *in, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, in + 2 * i, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

/* Eight weights of four bits, each shifted by this many bits in its byte: scale * (weight - zero) + plus. */
static inline void eight_weights(const uint8_t *in, int shift, int zero, float scale, float plus, float *restrict out) {
#if defined __AVX2__
    __m256i weights = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)in)), shift);
    weights = _mm256_sub_epi32(_mm256_and_si256(weights, _mm256_set1_epi32(15)), _mm256_set1_epi32(zero));
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(weights) * _mm256_set1_ps(scale) + _mm256_set1_ps(plus));
#else
    for (int i = 0; i < 8; i++) out[i] = scale * ((in[i] >> shift & 15) - zero) + plus;
#endif
}

/* Eight weights of five bits: four as above, the fifth of each in the low bits of high. */
static inline void eight_of_five_bits(const uint8_t *in, int shift, uint32_t high, int zero, float scale, float plus, float *restrict out) {
#if defined __AVX2__
    __m256i weights = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)in)), shift);
    __m256i fifth = _mm256_srlv_epi32(_mm256_set1_epi32((int)high), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    fifth = _mm256_slli_epi32(_mm256_and_si256(fifth, _mm256_set1_epi32(1)), 4);
    weights = _mm256_or_si256(_mm256_and_si256(weights, _mm256_set1_epi32(15)), fifth);
    weights = _mm256_sub_epi32(weights, _mm256_set1_epi32(zero));
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(weights) * _mm256_set1_ps(scale) + _mm256_set1_ps(plus));
#else
    for (int i = 0; i < 8; i++) out[i] = scale * ((int)((in[i] >> shift & 15) | (high >> i & 1) << 4) - zero) + plus;
#endif
}

/* Eight weights of five bits, the fifth of each in one bit of a byte of high: scale * weight - minus. */
static inline void eight_with_bit(const uint8_t *in, int shift, const uint8_t *high, int bit, float scale, float minus, float *restrict out) {
#if defined __AVX2__
    __m256i weights = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)in)), shift);
    __m256i fifth = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)high)), bit);
    fifth = _mm256_slli_epi32(_mm256_and_si256(fifth, _mm256_set1_epi32(1)), 4);
    weights = _mm256_or_si256(_mm256_and_si256(weights, _mm256_set1_epi32(15)), fifth);
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(weights) * _mm256_set1_ps(scale) - _mm256_set1_ps(minus));
#else
    for (int i = 0; i < 8; i++) out[i] = scale * ((in[i] >> shift & 15) | (high[i] >> bit & 1) << 4) - minus;
#endif
}

/* Eight weights of two bits, each shifted by this many bits in its byte: scale * weight - minus. */
static inline void eight_of_two_bits(const uint8_t *in, int shift, float scale, float minus, float *restrict out) {
#if defined __AVX2__
    __m256i weights = _mm256_srli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)in)), shift);
    weights = _mm256_and_si256(weights, _mm256_set1_epi32(3));
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(weights) * _mm256_set1_ps(scale) - _mm256_set1_ps(minus));
#else
    for (int i = 0; i < 8; i++) out[i] = scale * (in[i] >> shift & 3) - minus;
#endif
}

/* Eight weights that are signed bytes, times scale. */
static inline void eight_bytes(const uint8_t *in, float scale, float *restrict out) {
#if defined __AVX2__
    __m256i weights = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)in));
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(weights) * _mm256_set1_ps(scale));
#else
    for (int i = 0; i < 8; i++) out[i] = scale * (int8_t)in[i];
#endif
}

/* 32 weights in 16 bytes: the first 16 are the low four bits, the others the high ones. */
static inline void unpack_nibbles(const uint8_t *in, int zero, float scale, float plus, float *restrict out) {
    for (int i = 0; i < 16; i += 8) {
        eight_weights(in + i, 0, zero, scale, plus, out + i);
        eight_weights(in + i, 4, zero, scale, plus, out + i + 16);
    }
}

static inline void unpack_q4_0(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 18, out += 32) unpack_nibbles(in + 2, 8, from_half(in), -0.0f, out);
}

static inline void unpack_q4_1(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 20, out += 32) unpack_nibbles(in + 4, 0, from_half(in), from_half(in + 2), out);
}

/* 32 weights of five bits: nibbles as above, and the fifth bit of each in high. */
static inline void unpack_five_bits(const uint8_t *in, const uint8_t *fifth, int zero, float scale, float plus, float *restrict out) {
    uint32_t high;
    memcpy(&high, fifth, sizeof high);
    for (int i = 0; i < 16; i += 8) {
        eight_of_five_bits(in + i, 0, high >> i, zero, scale, plus, out + i);
        eight_of_five_bits(in + i, 4, high >> (i + 16), zero, scale, plus, out + i + 16);
    }
}

static inline void unpack_q5_0(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 22, out += 32) unpack_five_bits(in + 6, in + 2, 16, from_half(in), -0.0f, out);
}

static inline void unpack_q5_1(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 24, out += 32) unpack_five_bits(in + 8, in + 4, 0, from_half(in), from_half(in + 2), out);
}

static inline void unpack_q8_0(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 34, out += 32) {
        float scale = from_half(in);
        for (int i = 0; i < 32; i += 8) eight_bytes(in + 2 + i, scale, out + i);
    }
}

/* The 6-bit scale and minimum of group j of 8, in the 12 bytes that Q4_K and Q5_K have for them. */
static inline void scale_and_min(const uint8_t *in, int j, int *scale, int *least) {
    if (j < 4) {
        *scale = in[j] & 63;
        *least = in[j + 4] & 63;
    } else {
        *scale = (in[j + 4] & 15) | in[j - 4] >> 6 << 4;
        *least = in[j + 4] >> 4 | in[j] >> 6 << 4;
    }
}

static inline void unpack_q2_k(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 84, out += 256) {
        float scale = from_half(in + 80), least = from_half(in + 82);
        for (int j = 0; j < 16; j++) { /* groups: two of each 32 bytes and each pair of bits */
            const uint8_t *digits = in + 16 + j / 8 * 32 + j % 2 * 16;
            float by = scale * (in[j] & 15), minus = least * (in[j] >> 4);
            for (int i = 0; i < 16; i += 8) eight_of_two_bits(digits + i, j % 8 / 2 * 2, by, minus, out + 16 * j + i);
        }
    }
}

static inline void unpack_q3_k(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 110, out += 256) {
        uint8_t weights[256]; /* signed bytes */
        for (int j = 0; j < 8; j++) {
            const uint8_t *low = in + 32 + j / 4 * 32;
            for (int i = 0; i < 32; i++) weights[32 * j + i] = ((low[i] >> j % 4 * 2 & 3) | (in[i] >> j & 1) << 2) - 4;
        }
        float scale = from_half(in + 108);
        for (int j = 0; j < 16; j++) { /* groups with a scale of 6 bits each */
            int low = in[96 + j % 8] >> j / 8 * 4 & 15, high = in[104 + j % 4] >> j / 4 * 2 & 3;
            float by = scale * ((low | high << 4) - 32);
            for (int i = 0; i < 16; i += 8) eight_bytes(weights + 16 * j + i, by, out + 16 * j + i);
        }
    }
}

static inline void unpack_q4_k(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 144, out += 256) {
        float scale = from_half(in), least = from_half(in + 2);
        for (int j = 0; j < 8; j++) {
            const uint8_t *nibbles = in + 16 + j / 2 * 32;
            int s, m, shift = j % 2 * 4;
            scale_and_min(in + 4, j, &s, &m);
            float by = scale * s, minus = least * m;
            for (int i = 0; i < 32; i += 8) eight_weights(nibbles + i, shift, 0, by, -minus, out + 32 * j + i);
        }
    }
}

static inline void unpack_q5_k(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 176, out += 256) {
        float scale = from_half(in), least = from_half(in + 2);
        const uint8_t *high = in + 16;
        for (int j = 0; j < 8; j++) {
            const uint8_t *nibbles = in + 48 + j / 2 * 32;
            int s, m, shift = j % 2 * 4;
            scale_and_min(in + 4, j, &s, &m);
            float by = scale * s, minus = least * m;
            for (int i = 0; i < 32; i += 8)
                eight_with_bit(nibbles + i, shift, high + i, j, by, minus, out + 32 * j + i);
        }
    }
}

static inline void unpack_q6_k(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 210, out += 256) {
        uint8_t weights[256]; /* signed bytes */
        for (int half = 0; half < 2; half++) {
            const uint8_t *low = in + 64 * half, *high = in + 128 + 32 * half;
            uint8_t *to = weights + 128 * half;
            for (int i = 0; i < 32; i++) {
                to[i] = ((low[i] & 15) | (high[i] & 3) << 4) - 32;
                to[i + 32] = ((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4) - 32;
                to[i + 64] = (low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32;
                to[i + 96] = (low[i + 32] >> 4 | high[i] >> 6 << 4) - 32;
            }
        }
        float scale = from_half(in + 208);
        for (int j = 0; j < 16; j++) { /* groups with a scale each */
            float by = scale * (int8_t)in[192 + j];
            for (int i = 0; i < 16; i += 8) eight_bytes(weights + 16 * j + i, by, out + 16 * j + i);
        }
    }
}

/* 32 weights in 16 bytes, each an index into a table of signed bytes: first the low four bits of all
 * bytes, then the high ones. */
static inline void unpack_places(const uint8_t *in, const int8_t *table, float scale, float *restrict out) {
    uint8_t weights[32];
#if defined __AVX2__
    __m128i bytes = _mm_loadu_si128((const __m128i *)in), values = _mm_loadu_si128((const __m128i *)table), low = _mm_set1_epi8(15);
    _mm_storeu_si128((__m128i *)weights, _mm_shuffle_epi8(values, _mm_and_si128(bytes, low)));
    _mm_storeu_si128((__m128i *)(weights + 16), _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(bytes, 4), low)));
#else
    for (int i = 0; i < 16; i++) {
        weights[i] = (uint8_t)table[in[i] & 15];
        weights[i + 16] = (uint8_t)table[in[i] >> 4];
    }
#endif
    for (int i = 0; i < 32; i += 8) eight_bytes(weights + i, scale, out + i);
}

static const int8_t iq4_table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline void unpack_iq4_nl(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 18, out += 32) unpack_places(in + 2, iq4_table, from_half(in), out);
}

static inline void unpack_iq4_xs(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 136, out += 256) {
        float scale = from_half(in);
        for (int j = 0; j < 8; j++) { /* groups with a scale of 6 bits each */
            int low = in[4 + j / 2] >> j % 2 * 4 & 15, high = in[2 + j / 4] >> j % 4 * 2 & 3;
            unpack_places(in + 8 + 16 * j, iq4_table, scale * ((low | high << 4) - 32), out + 32 * j);
        }
    }
}

/* Half of two to the power of code - 127: below 2 that is a subnormal number. */
static inline float mxfp4_scale(uint8_t code) {
    uint32_t bits = code < 2 ? 0x00200000u << code : (uint32_t)(code - 1) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

static inline void unpack_mxfp4(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 17, out += 32) unpack_places(in + 1, e2m1_doubled, mxfp4_scale(in[0]), out);
}

static inline void unpack_fp8(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 132, out += 128) {
        float scale;
        memcpy(&scale, in, sizeof scale);
        for (int i = 0; i < 128; i++) {
            /* Exponent and fraction of E4M3 as those of a float, whose bias is 120 more. Without numbers that are subnormal as floats,
             * which some processors multiply slowly: below 8 the fraction is that of 2^-6, without its leading 1. */
            uint32_t low = in[4 + i] & 127, bits = (low << 20) + 0x3c000000u, below = -(uint32_t)(low < 8);
            float code, small;
            memcpy(&code, &bits, sizeof code);
            small = 2 * code - 0x1p-6f;
            uint32_t of_small;
            memcpy(&of_small, &small, sizeof small);
            bits = (of_small & below) | (bits & ~below) | (uint32_t)(in[4 + i] & 128) << 24;
            memcpy(&code, &bits, sizeof code);
            out[i] = code * scale;
        }
    }
}

static inline void unpack_int4(const uint8_t *in, int64_t blocks, float *restrict out) {
    for (; blocks--; in += 37, out += 64) {
        float scale;
        memcpy(&scale, in, sizeof scale);
        int zero = in[4];
        for (int i = 0; i < 32; i++) {
            out[i] = scale * ((in[5 + i] & 15) - zero);
            out[i + 32] = scale * ((in[5 + i] >> 4) - zero);
        }
    }
}

/* Unpacks one row of a matrix; its size is a multiple of the format's block. */
static inline void unpack(int64_t format, const uint8_t *in, int64_t size, float *restrict out) {
    switch (format) {
    case F32: memcpy(out, in, size * sizeof *out); break;
    case F16: unpack_f16(in, size, out); break;
    case BF16: unpack_bf16(in, size, out); break;
    case Q4_0: unpack_q4_0(in, size / 32, out); break;
    case Q4_1: unpack_q4_1(in, size / 32, out); break;
    case Q5_0: unpack_q5_0(in, size / 32, out); break;
    case Q5_1: unpack_q5_1(in, size / 32, out); break;
    case Q8_0: unpack_q8_0(in, size / 32, out); break;
    case Q2_K: unpack_q2_k(in, size / 256, out); break;
    case Q3_K: unpack_q3_k(in, size / 256, out); break;
    case Q4_K: unpack_q4_k(in, size / 256, out); break;
    case Q5_K: unpack_q5_k(in, size / 256, out); break;
    case Q6_K: unpack_q6_k(in, size / 256, out); break;
    case IQ4_NL: unpack_iq4_nl(in, size / 32, out); break;
    case IQ4_XS: unpack_iq4_xs(in, size / 256, out); break;
    case MXFP4: unpack_mxfp4(in, size / 32, out); break;
    case FP8: unpack_fp8(in, size / 128, out); break;
    case INT4: unpack_int4(in, size / 64, out); break;
    }
}

#endif
