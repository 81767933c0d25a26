/* Products of a few rows with a weight whose float32 values can be stored exactly in fewer bytes. Reading the weight from memory
 * bounds the time of such products. A weight is stored as blocks (32 integers of 8 bits with one scale, as gguf's Q8_0) or as halves
 * (bfloat16). packed.py declares the same struct. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined __AVX2__
#include <immintrin.h>
#endif

enum { BLOCK = 32, EIGHT = 8 };
typedef float eight_floats __attribute__((vector_size(EIGHT * sizeof(float)), aligned(sizeof(float))));

typedef struct {
    const int8_t *blocks; /* [outputs][inputs], or NULL */
    const float *scales;  /* [outputs][inputs / BLOCK], of blocks */
    const uint16_t *halves; /* [outputs][inputs], or NULL */
    int64_t outputs, inputs;
} packed;

/* Returns 1 if each of the blocks of weight is exactly integers times a scale, which are then in values and scales; else 0. */
int pack_blocks(const float *weight, int64_t blocks, int8_t *values, float *scales) {
    for (int64_t block = 0; block < blocks; block++, weight += BLOCK, values += BLOCK) {
        float largest = 0;
        int wrong = 0;
        for (int i = 0; i < BLOCK; i++) largest = fmaxf(largest, fabsf(weight[i]));
        float scale = scales[block] = largest / INT8_MAX, inverse = scale > 0 ? 1 / scale : 0;
        if (!isfinite(inverse) || !isfinite(scale)) return 0;
        for (int i = 0; i < BLOCK; i++) {
            float value = rintf(weight[i] * inverse);
            values[i] = (int8_t)(value == value ? value : 0); /* NaN is no integer, and equals nothing below */
            wrong |= !(values[i] * scale == weight[i]);
        }
        if (wrong) return 0;
    }
    return 1;
}

/* Returns 1 if each of the count floats is exactly a bfloat16, which are then in values; else 0. */
int pack_halves(const float *weight, int64_t count, uint16_t *values) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, weight + i, sizeof bits);
        if (bits & UINT16_MAX) return 0;
        values[i] = bits >> 16;
    }
    return 1;
}

static float total(const float *parts) {
    float sum = 0;
    for (int i = 0; i < BLOCK; i++) sum += parts[i];
    return sum;
}

/* With an intrinsic, because gcc converts only four bytes at once. */
static inline eight_floats to_floats(const int8_t *values) {
    eight_floats floats;
#if defined __AVX2__
    floats = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)values)));
#else
    for (int i = 0; i < EIGHT; i++) floats[i] = values[i];
#endif
    return floats;
}

static float dot_blocks(const int8_t *values, const float *scales, const float *x, int64_t size) {
    eight_floats parts[BLOCK / EIGHT] = {0};
    for (int64_t i = 0; i < size; i += BLOCK, scales++)
        for (int j = 0; j < BLOCK / EIGHT; j++)
            parts[j] += *scales * (to_floats(values + i + j * EIGHT) * *(const eight_floats *)(x + i + j * EIGHT));
    float all[BLOCK];
    memcpy(all, parts, sizeof all);
    return total(all);
}

static float dot_halves(const uint16_t *values, const float *x, int64_t size) {
    float parts[BLOCK] = {0};
    for (int64_t i = 0; i < size; i += BLOCK)
        for (int j = 0; j < BLOCK; j++) {
            uint32_t bits = (uint32_t)values[i + j] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            parts[j] += value * x[i + j];
        }
    return total(parts);
}

/* The product of x [rows][inputs] with a packed weight, to out [rows][outputs]. */
void times(const packed *of, const float *x, int64_t rows, int64_t threads, float *out) {
    int64_t size = of->inputs;
#pragma omp parallel for num_threads(threads)
    for (int64_t output = 0; output < of->outputs; output++)
        for (int64_t row = 0, first = output * size; row < rows; row++)
            out[row * of->outputs + output] =
                of->blocks ? dot_blocks(of->blocks + first, of->scales + first / BLOCK, x + row * size, size)
                           : dot_halves(of->halves + first, x + row * size, size);
}

/* Multiplies small integers, where every sum is exact, from blocks and from halves. native_code.py calls it. */
int trial(void) {
    enum { OUTPUTS = 5, INPUTS = 2 * BLOCK, ROWS = 2 };
    static float weight[OUTPUTS][INPUTS], scales[OUTPUTS][INPUTS / BLOCK], x[ROWS][INPUTS], out[ROWS][OUTPUTS];
    static int8_t blocks[OUTPUTS][INPUTS];
    static uint16_t halves[OUTPUTS][INPUTS];
    for (int i = 0; i < INPUTS; i++) {
        for (int o = 0; o < OUTPUTS; o++) weight[o][i] = i % BLOCK ? (float)((o * 7 + i * 3) % 11 - 5) : INT8_MAX;
        for (int r = 0; r < ROWS; r++) x[r][i] = (float)((r * 5 + i) % 7 - 3);
    }
    if (!pack_blocks(*weight, OUTPUTS * INPUTS / BLOCK, *blocks, *scales) || !pack_halves(*weight, OUTPUTS * INPUTS, *halves)) return 1;
    packed forms[] = {{*blocks, *scales, NULL, OUTPUTS, INPUTS}, {NULL, NULL, *halves, OUTPUTS, INPUTS}};
    for (int form = 0; form < 2; form++) {
        times(forms + form, *x, ROWS, 1, *out);
        for (int r = 0; r < ROWS; r++)
            for (int o = 0; o < OUTPUTS; o++) {
                float sum = 0;
                for (int i = 0; i < INPUTS; i++) sum += weight[o][i] * x[r][i];
                if (sum != out[r][o]) return 1;
            }
    }
    return 0;
}
