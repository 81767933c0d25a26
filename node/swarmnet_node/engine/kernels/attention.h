/* Attention of a few queries to the cached keys and values of their sequence, with the same bits on every
 * processor and whatever queries are computed together. */

#ifndef SWARMNET_ATTENTION_H
#define SWARMNET_ATTENTION_H

#include "product.h"
#include "transcendentals.h"

/* QUERIES: most queries that read the keys of their head together. PART: most queries that a thread
 * takes at once: later positions of a prompt take longer, so threads take turns. */
enum { QUERIES = 4, PART = 64 };
/* Vectors of values whose sums for all queries stay in registers. */
enum { MIXED = WIDTH == 16 ? 4 : 2 };

/* The positions [first, end) that a query sees. */
typedef range visible;

/* Bounds scores to (-cap, cap). */
static void cap_scores(float *scores, int64_t count, float cap) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) scores[i] = hyperbolic_tangent(scores[i] / cap) * cap;
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

/* Adds to some columns of out [queries][size] a product of weights [queries][stride] with the first values
 * [count][size]: a few vectors of columns. Values are added in their order. queries and vectors are compile-time
 * constants, so that the sums stay in registers. */
static inline __attribute__((always_inline)) void mix_columns(const float *weights, int64_t stride, const float *values,
                                                              int64_t count, int64_t size, const int queries,
                                                              const int vectors, float *restrict out) {
    floats sums[QUERIES][MIXED];
    for (int q = 0; q < queries; q++) memcpy(sums[q], out + q * size, vectors * sizeof(floats));
    for (int64_t p = 0; p < count; p++)
        for (int v = 0; v < vectors; v++) {
            floats value = *(const floats *)(values + p * size + v * WIDTH);
            for (int q = 0; q < queries; q++)
                sums[q][v] = fused_floats(weights[q * stride + p] - (floats){0}, value, sums[q][v]);
        }
    for (int q = 0; q < queries; q++) memcpy(out + q * size, sums[q], vectors * sizeof(floats));
}

/* Adds the product of weights [queries][stride] with the first values [count][size] to out [queries][size]. */
static inline __attribute__((always_inline)) void mix(const float *weights, int64_t stride, const float *values, int64_t count,
                                                      int64_t size, const int queries, float *restrict out) {
    int64_t i = 0;
    for (; i + MIXED * WIDTH <= size; i += MIXED * WIDTH)
        mix_columns(weights, stride, values + i, count, size, queries, MIXED, out + i);
    for (; i + WIDTH <= size; i += WIDTH) mix_columns(weights, stride, values + i, count, size, queries, 1, out + i);
    for (int q = 0; q < queries; q++)
        for (int64_t p = 0; p < count; p++)
            for (int64_t j = i; j < size; j++)
                out[q * size + j] = fused(weights[q * stride + p], values[p * size + j], out[q * size + j]);
}

/* As mix, for one query and positions [first, end). */
static void mix_one(const float *weights, const float *values, int64_t first, int64_t end, int64_t size, float *restrict out) {
    for (int64_t p = first; p < end; p++)
        for (int64_t i = 0; i < size; i++) out[i] = fused(weights[p], values[p * size + i], out[i]);
}

/* Attention of queries [queries][size] that share a key head, to out [queries][size]. Neither the first position
 * that a query sees nor its last is before that of the query before it. cap: bound of the scores, or 0. */
static void attend(const float *query, int64_t queries, const float *keys, const float *values, int64_t size,
                   const visible *seen, float cap, float *scores, float *out) {
    /* All queries see the positions in common. Scores begin with the first position that any query sees. */
    int64_t first = seen[0].first, stride = seen[queries - 1].end - first;
    range common = {seen[queries - 1].first - first, seen[0].end - first};
    common.end = most(common.first, common.end);
    float totals[QUERIES];
    keys += first * size;
    values += first * size;
    dense_product(keys, query, size, queries, (range){0, stride}, scores, stride);
    memset(out, 0, queries * size * sizeof *out);
    for (int64_t q = 0; q < queries; q++) {
        float *its = scores + q * stride;
        int64_t from = seen[q].first - first, end = seen[q].end - first;
        if (cap > 0) cap_scores(its + from, end - from, cap);
        totals[q] = exponentials(its + from, end - from);
        mix_one(its, values, from, least(common.first, end), size, out + q * size);
    }
    const float *weights = scores + common.first, *shared = values + common.first * size;
#define MIX(n)                                                                                 \
    case n: mix(weights, stride, shared, common.end - common.first, size, n, out); break;
    switch (queries) { MIX(1) MIX(2) MIX(3) MIX(4) }
    for (int64_t q = 0; q < queries; q++, out += size) {
        mix_one(scores + q * stride, values, common.end, seen[q].end - first, size, out);
        for (int64_t i = 0; i < size; i++) out[i] /= totals[q];
    }
}

#endif
