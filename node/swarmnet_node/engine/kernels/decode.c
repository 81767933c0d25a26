/* One decode step: a few new positions of some sequences through all decoder layers of the Llama
 * shape, in float32, with the LoRA updates of each sequence's adapter.
 *
 * The step is one OpenMP parallel region. Each thread computes a share of the outputs of every
 * product. A barrier separates writes from reads by other threads. native_backend.py declares the
 * same structs, and fills them with pointers to torch's memory.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "product.h"

typedef struct {
    const float *weight; /* [size], or NULL if the layer has no such norm */
    float eps;
} norm;

typedef struct {
    /* qkv: outputs of all query heads, then key heads, then value heads */
    linear qkv, output, gate_up, down;
    norm attention_norm, query_norm, key_norm, mlp_norm;
    int64_t heads, key_heads, inner;
    float scaling;
} layer;

typedef struct {
    int64_t layers, hidden_size, head_size;
    /* Sizes of scratch memory: one part that all threads share, then one part for each thread */
    int64_t shared_floats, thread_floats;
    /* rows: new positions; ranks: largest sum of ranks of any update */
    int64_t rows, threads, ranks;
} step;

/* The B of one LoRA pair (Hu et al. 2021, equation 3). It changes outputs
 * [first, first + outputs) of a product. */
typedef struct {
    const float *weight; /* [outputs][ranks] */
    int64_t first, outputs, first_rank, ranks;
} up;

typedef struct {
    const float *down; /* [ranks][inputs]: the A of all pairs, one after another */
    const up *ups;
    int64_t ranks, pairs;
} update;

enum { QKV, OUTPUT, GATE_UP, DOWN, PRODUCTS };

/* The new position of one row. Rows of one sequence follow each other: rows of them from first on,
 * with the same caches. */
typedef struct {
    int64_t position, capacity, first, rows;
    const float *angles;  /* [2][head_size]: cosines and sines */
    float *const *caches; /* keys and values [key_heads][capacity][head_size] of each layer */
    const update *updates; /* [layers][PRODUCTS], or NULL */
} new_position;

/* QUERIES: most queries that read the keys of their head together. PART: most queries that a thread
 * takes at once: later positions of a prompt take longer, so threads take turns. */
enum { QUERIES = 4, PART = 64 };
/* Vectors of values whose sums for all queries stay in registers. */
enum { MIXED = WIDTH == 16 ? 4 : 2 };

static float dot(const float *a, const float *b, int64_t size) {
    lanes sum = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum = fused_lanes(lanes_at(a + i), lanes_at(b + i), sum);
    if (i < size) sum = fused_lanes(first_lanes(a + i, size - i), first_lanes(b + i, size - i), sum);
    return sum_of_lanes(sum);
}

/* Prepares a product with x [rows][inputs]: splits x into parts, and multiplies it with the A of the
 * product's LoRA updates, into low [rows][ranks]. Ends with a barrier if there is anything to do. */
static void prepare(const step *s, const new_position *positions, int64_t which, linear of, const float *x, activations *parts,
                    float *low) {
    int any = takes_split(of);
    int64_t inputs = of.inputs;
    if (any) split(x, share(s->rows * (inputs / 32)), parts);
    for (int64_t row = 0; row < s->rows; row++) {
        if (!positions[row].updates || !positions[row].updates[which].pairs) continue;
        const update *of = positions[row].updates + which;
        dense_product(of->down, x + row * inputs, inputs, 1, share(of->ranks), low + row * s->ranks, s->ranks);
        any = 1;
    }
    if (any) {
#pragma omp barrier
    }
}

/* Computes a product with its LoRA updates. parts and low are the results of prepare for x. */
static void adapted(const step *s, const new_position *positions, int64_t which, linear of, const float *x,
                    const activations *parts, const float *low, range mine, float *out, int64_t stride) {
    product(of, x, parts, s->rows, mine, out, stride);
    for (int64_t row = 0; row < s->rows; row++, low += s->ranks, out += stride) {
        if (!positions[row].updates) continue;
        const update *added = positions[row].updates + which;
        for (const up *u = added->ups; u < added->ups + added->pairs; u++) {
            int64_t end = least(u->first + u->outputs, mine.end);
            for (int64_t output = u->first > mine.first ? u->first : mine.first; output < end; output++)
                out[output] += dot(u->weight + (output - u->first) * u->ranks, low + u->first_rank, u->ranks);
        }
    }
}

/* RMSNorm (Zhang and Sennrich 2019, equation 4). */
static void normalise(norm of, const float *x, int64_t size, float *out, int64_t count) {
    for (int64_t row = 0; row < count; row++, x += size, out += size) {
        float scale = 1 / sqrtf(dot(x, x, size) / size + of.eps);
        for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * of.weight[i];
    }
}

/* Rotary embedding (RoFormer, section 3.4.2). Component i of a head is paired with i + size / 2. */
static void rotate(float *x, const float *cosines, const float *sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

/* exp(x) within one unit in the last place (Cephes, expf). Unlike libm's, compilers can vectorise
 * it, and it is the same everywhere. x is clamped to [-87, 88]. */
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

/* Replaces scores by their exponentials, relative to the highest. Returns the sum. */
static float exponentials(float *scores, int64_t count) {
    float highest = -INFINITY;
    lanes total = {0};
    int64_t p = 0;
#pragma omp simd reduction(max : highest) /* the order of comparisons changes nothing */
    for (int64_t i = 0; i < count; i++) highest = scores[i] > highest ? scores[i] : highest;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) scores[i] = exponential(scores[i] - highest);
    for (; p + LANES <= count; p += LANES) total = added_lanes(total, lanes_at(scores + p));
    return sum_of_lanes(added_lanes(total, first_lanes(scores + p, count - p)));
}

/* Some columns of a product of weights [queries][stride] with the first values [count][size]: a few
 * vectors of columns. Values are added in their order. queries and vectors are compile-time constants,
 * so that the sums stay in registers. */
static inline __attribute__((always_inline)) void mix_columns(const float *weights, int64_t stride, const float *values,
                                                              int64_t count, int64_t size, const int queries,
                                                              const int vectors, float *restrict out) {
    floats sums[QUERIES][MIXED] = {0};
    for (int64_t p = 0; p < count; p++)
        for (int v = 0; v < vectors; v++) {
            floats value = *(const floats *)(values + p * size + v * WIDTH);
            for (int q = 0; q < queries; q++)
                sums[q][v] = fused_floats(weights[q * stride + p] - (floats){0}, value, sums[q][v]);
        }
    for (int q = 0; q < queries; q++) memcpy(out + q * size, sums[q], vectors * sizeof(floats));
}

/* Multiplies weights [queries][stride] with the first values [count][size]. */
static inline __attribute__((always_inline)) void mix(const float *weights, int64_t stride, const float *values, int64_t count,
                                                      int64_t size, const int queries, float *restrict out) {
    int64_t i = 0;
    for (; i + MIXED * WIDTH <= size; i += MIXED * WIDTH)
        mix_columns(weights, stride, values + i, count, size, queries, MIXED, out + i);
    for (; i + WIDTH <= size; i += WIDTH) mix_columns(weights, stride, values + i, count, size, queries, 1, out + i);
    for (int q = 0; q < queries; q++) {
        memset(out + q * size + i, 0, (size - i) * sizeof *out);
        for (int64_t p = 0; p < count; p++)
            for (int64_t j = i; j < size; j++)
                out[q * size + j] = fused(weights[q * stride + p], values[p * size + j], out[q * size + j]);
    }
}

/* Attention of queries [queries][size] that share a key head, to out [queries][size]. Query q sees
 * counts[q] positions, at least as many as the query before. */
static void attend(const float *query, int64_t queries, const float *keys, const float *values, int64_t size,
                   const int64_t *counts, float *scores, float *out) {
    int64_t fewest = counts[0], stride = counts[queries - 1];
    float totals[QUERIES];
    dense_product(keys, query, size, queries, (range){0, stride}, scores, stride);
    for (int64_t q = 0; q < queries; q++) totals[q] = exponentials(scores + q * stride, counts[q]);
#define MIX(n)                                                      \
    case n: mix(scores, stride, values, fewest, size, n, out); break;
    switch (queries) { MIX(1) MIX(2) MIX(3) MIX(4) }
    for (int64_t q = 0; q < queries; q++, out += size) {
        for (int64_t p = fewest; p < counts[q]; p++)
            for (int64_t i = 0; i < size; i++) out[i] = fused(scores[q * stride + p], values[p * size + i], out[i]);
        for (int64_t i = 0; i < size; i++) out[i] /= totals[q];
    }
}

/* Norms and rotates the heads in states [rows][query, key and value heads][head_size], scales
 * queries, and writes keys and values to the caches. */
static void finish_heads(const step *s, const layer *l, const new_position *positions, int64_t index, float *states) {
    int64_t size = s->head_size, keys = l->heads, values = keys + l->key_heads, all = values + l->key_heads;
    range mine = share(s->rows * all);
    for (int64_t i = mine.first; i < mine.end; i++) {
        const new_position *of = positions + i / all;
        int64_t head = i % all;
        float *x = states + i * size;
        if (head < values) {
            norm its = head < keys ? l->query_norm : l->key_norm;
            if (its.weight) normalise(its, x, size, x, 1);
            rotate(x, of->angles, of->angles + size, size);
        }
        if (head < keys) {
            for (int64_t j = 0; j < size; j++) x[j] *= l->scaling;
        } else {
            int64_t row = (head < values ? head - keys : head - values) * of->capacity + of->position;
            memcpy(of->caches[2 * index + (head >= values)] + row * size, x, size * sizeof *x);
        }
    }
}

/* Attention of the queries in states. The output [rows][heads][head_size] follows states in
 * memory. Queries of a sequence that share a key head follow each other, so that a few of them read
 * its keys together. */
static void attention(const step *s, const layer *l, const new_position *positions, int64_t index, const float *states,
                      float *out, float *scratch) {
    int64_t size = s->head_size, all = l->heads + 2 * l->key_heads, sharers = l->heads / l->key_heads;
    int64_t total = s->rows * l->heads, threads = omp_get_num_threads(), part = least((total + threads - 1) / threads, PART);
    float *query = scratch, *mixed = query + QUERIES * size, *scores = mixed + QUERIES * size;
    for (int64_t first = omp_get_thread_num() * part; first < total; first += threads * part)
        for (int64_t i = first, end = least(first + part, total), queries; i < end; i += queries) {
            const new_position *of = positions + i / l->heads;
            int64_t together = of->rows * sharers, of_sequence = i - of->first * l->heads;
            int64_t key_head = of_sequence / together, of_key = of_sequence % together, from = key_head * of->capacity * size;
            int64_t counts[QUERIES], places[QUERIES];
            queries = least(together - of_key, least(end - i, QUERIES));
            for (int64_t q = 0; q < queries; q++) {
                int64_t row = of->first + (of_key + q) / sharers, head = key_head * sharers + (of_key + q) % sharers;
                counts[q] = positions[row].position + 1;
                places[q] = row * l->heads + head;
                memcpy(query + q * size, states + (row * all + head) * size, size * sizeof *query);
            }
            attend(query, queries, of->caches[2 * index] + from, of->caches[2 * index + 1] + from, size, counts, scores, mixed);
            for (int64_t q = 0; q < queries; q++) memcpy(out + places[q] * size, mixed + q * size, size * sizeof *out);
        }
}

/* SwiGLU (Shazeer 2020) of the gate_up product, into out [rows][inner]. */
static void swiglu(const step *s, const layer *l, const new_position *positions, int64_t index, const float *x,
                   activations *parts, float *low, float *gates_ups, float *out) {
    range gates = share_outputs(l->inner), ups = {gates.first + l->inner, gates.end + l->inner};
    int64_t which = index * PRODUCTS + GATE_UP;
    prepare(s, positions, which, l->gate_up, x, parts, low);
    adapted(s, positions, which, l->gate_up, x, parts, low, gates, gates_ups, 2 * l->inner);
    adapted(s, positions, which, l->gate_up, x, parts, low, ups, gates_ups, 2 * l->inner);
    for (int64_t row = 0; row < s->rows; row++, gates_ups += 2 * l->inner, out += l->inner) {
#pragma omp simd
        for (int64_t i = gates.first; i < gates.end; i++)
            out[i] = gates_ups[i] / (1 + exponential(-gates_ups[i])) * gates_ups[i + l->inner];
    }
}

/* Adds a product with its LoRA updates to hidden. */
static void add_product(const step *s, const new_position *positions, int64_t which, linear of, const float *x,
                        activations *parts, float *low, float *scratch, float *hidden) {
    range mine = share_outputs(s->hidden_size);
    prepare(s, positions, which, of, x, parts, low);
    adapted(s, positions, which, of, x, parts, low, mine, scratch, s->hidden_size);
    for (int64_t row = 0; row < s->rows; row++, scratch += s->hidden_size, hidden += s->hidden_size)
        for (int64_t i = mine.first; i < mine.end; i++) hidden[i] += scratch[i];
}

/* Replaces hidden [rows][hidden_size] by the output of all layers, and writes keys and values to the
 * caches. Each thread's scratch memory has room for [rows][hidden_size] and
 * [QUERIES][largest position + 1 + 2 * head_size] floats. */
void decode(const step *s, const layer *layers, const new_position *positions, float *scratch, float *hidden) {
#pragma omp parallel num_threads(s->threads)
    {
        float *normed = scratch + s->shared_floats + omp_get_thread_num() * s->thread_floats;
        float *scores = normed + s->rows * s->hidden_size;
        for (int64_t index = 0; index < s->layers; index++) {
            const layer *l = layers + index;
            int64_t width = l->heads * s->head_size, states_width = width + 2 * l->key_heads * s->head_size;
            float *states = scratch, *attended = states + s->rows * states_width;
            float *gates_ups = attended + s->rows * width, *inner = gates_ups + s->rows * 2 * l->inner;
            float *added = inner + s->rows * l->inner, *widest = added + s->rows * s->hidden_size;
            activations *parts = (activations *)widest;
            float *low = widest + s->rows * most(s->hidden_size, most(width, l->inner));
            int64_t first = index * PRODUCTS;
            normalise(l->attention_norm, hidden, s->hidden_size, normed, s->rows);
            prepare(s, positions, first + QKV, l->qkv, normed, parts, low);
            adapted(s, positions, first + QKV, l->qkv, normed, parts, low, share_outputs(states_width), states, states_width);
#pragma omp barrier
            finish_heads(s, l, positions, index, states);
#pragma omp barrier
            attention(s, l, positions, index, states, attended, scores);
#pragma omp barrier
            add_product(s, positions, first + OUTPUT, l->output, attended, parts, low, added, hidden);
#pragma omp barrier
            normalise(l->mlp_norm, hidden, s->hidden_size, normed, s->rows);
            swiglu(s, l, positions, index, normed, parts, low, gates_ups, inner);
#pragma omp barrier
            add_product(s, positions, first + DOWN, l->down, inner, parts, low, added, hidden);
#pragma omp barrier
        }
    }
}

/* Computes three positions of one sequence, whose bits are the same on every processor. native_code.py
 * calls it. */
int trial(void) {
    enum { HIDDEN = 40, SIZE = 22, HEADS = 3, INNER = 24, ROWS = 3, ALL = (HEADS + 2) * SIZE };
    static float weights[ALL + 2 * INNER][HIDDEN], back[HIDDEN][HEADS * SIZE], gains[HIDDEN], angles[2][SIZE];
    static float keys[ROWS][SIZE], values[ROWS][SIZE], scratch[8192], hidden[ROWS][HIDDEN];
    for (int i = 0; i < HIDDEN; i++) {
        gains[i] = 1 + (float)i / 64;
        for (int o = 0; o < ALL + 2 * INNER; o++) weights[o][i] = (float)((o * 7 + i * 3) % 11 - 5) / 16;
        for (int o = 0; o < HEADS * SIZE; o++) back[i][o] = (float)((o * 5 + i * 2) % 13 - 6) / 32;
        for (int r = 0; r < ROWS; r++) hidden[r][i] = (float)((r * 5 + i) % 7 - 3) / 3;
    }
    for (int i = 0; i < SIZE; i++) angles[0][i] = angles[1][i] = 0.75f;
    segment qkv = {.rows = (uint8_t *)weights, .row_bytes = sizeof *weights, .outputs = ALL};
    segment gate_up = {.rows = (uint8_t *)weights[ALL], .row_bytes = sizeof *weights, .outputs = 2 * INNER};
    segment output = {.rows = (uint8_t *)back, .row_bytes = sizeof *back, .outputs = HIDDEN};
    segment down = {.rows = (uint8_t *)back, .row_bytes = INNER * sizeof(float), .outputs = HIDDEN};
    norm of = {gains, 1e-5f}, none = {NULL, 0};
    layer l = {{&qkv, NULL, 1, HIDDEN}, {&output, NULL, 1, HEADS * SIZE}, {&gate_up, NULL, 1, HIDDEN}, {&down, NULL, 1, INNER},
               of, none, none, of, HEADS, 1, INNER, 0.25f};
    float *caches[] = {*keys, *values};
    new_position positions[ROWS];
    for (int r = 0; r < ROWS; r++) positions[r] = (new_position){r, ROWS, 0, ROWS, *angles, caches, NULL};
    step s = {1, HIDDEN, SIZE, 4096, 4096, ROWS, 1, 0};
    decode(&s, &l, positions, scratch, *hidden);
    uint64_t digest = 0xcbf29ce484222325; /* FNV-1a */
    for (const uint8_t *byte = (uint8_t *)hidden; byte < (uint8_t *)(hidden + ROWS); byte++) digest = (digest ^ *byte) * 0x100000001b3;
    return digest != 0x7a73c4b25b997dde;
}
