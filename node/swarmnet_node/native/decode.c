/* One new position of one sequence through decoder layers of the Llama shape, in float32.
 *
 * The whole step is one parallel region. Each thread computes a share of the rows of every product, and a barrier stands
 * before every reader of what others wrote. The structures have twins in decode.py.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const float *weight; /* [outputs][inputs] */
    const float *bias;   /* [outputs], or NULL */
} linear;

typedef struct {
    const float *weight; /* [size], or NULL where a layer has no such norm */
    float eps;
} norm;

typedef struct {
    linear qkv, output, gate_up, down; /* qkv: the rows of all query heads, then of keys, then of values */
    norm before_attention, of_queries, of_keys, before_mlp;
    int64_t heads, key_heads, inner;
    float scaling;
} layer;

typedef struct {
    int64_t layers, hidden_size, head_size;
    int64_t shared_floats, thread_floats; /* of the scratch: one part for all, then one for each thread */
    int64_t position, capacity;
    int64_t threads;
} step;

typedef struct {
    int64_t first, end;
} range;

static range share(int64_t count) {
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return (range){count * thread / threads, count * (thread + 1) / threads};
}

static float dot(const float *a, const float *b, int64_t size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

/* Four rows at once: one sum alone waits for the latency of its own additions. */
static void four_dots(const float *rows, const float *x, int64_t size, float *out) {
    const float *second = rows + size, *third = second + size, *fourth = third + size;
    float a = 0, b = 0, c = 0, d = 0;
#pragma omp simd reduction(+ : a, b, c, d)
    for (int64_t i = 0; i < size; i++) {
        a += rows[i] * x[i];
        b += second[i] * x[i];
        c += third[i] * x[i];
        d += fourth[i] * x[i];
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

static void product(linear of, const float *x, int64_t size, range rows, float *out) {
    int64_t row = rows.first;
    for (; row + 4 <= rows.end; row += 4) four_dots(of.weight + row * size, x, size, out + row);
    for (; row < rows.end; row++) out[row] = dot(of.weight + row * size, x, size);
    if (of.bias)
        for (row = rows.first; row < rows.end; row++) out[row] += of.bias[row];
}

/* RMSNorm (Zhang and Sennrich 2019, equation 4). */
static void normalise(norm of, const float *x, int64_t size, float *out) {
    float scale = 1 / sqrtf(dot(x, x, size) / size + of.eps);
    for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * of.weight[i];
}

/* Rotary embedding (RoFormer, section 3.4.2), the halves of a head being its pairs. */
static void rotate(float *x, const float *cosines, const float *sines, int64_t size) {
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosines[i] - second * sines[i];
        x[i + half] = second * cosines[i + half] + first * sines[i + half];
    }
}

static void attend(const float *query, const float *keys, const float *values, int64_t size, int64_t count,
                   float scaling, float *scores, float *restrict out) {
    float highest = -INFINITY, total = 0;
    product((linear){keys, NULL}, query, size, (range){0, count}, scores);
#pragma omp simd reduction(max : highest)
    for (int64_t p = 0; p < count; p++) {
        scores[p] *= scaling;
        highest = scores[p] > highest ? scores[p] : highest;
    }
    for (int64_t p = 0; p < count; p++) {
        scores[p] = expf(scores[p] - highest);
        total += scores[p];
    }
    memset(out, 0, size * sizeof *out);
    for (int64_t p = 0; p < count; p++) {
        float weight = scores[p] / total;
        for (int64_t i = 0; i < size; i++) out[i] += weight * values[p * size + i];
    }
}

/* Heads to their final form, and the new keys and values [key heads][capacity][size] into the cache. */
static void place_heads(const step *s, const layer *l, const float *angles, float *states, float *const cache[2]) {
    int64_t size = s->head_size, keys = l->heads, values = keys + l->key_heads;
    range mine = share(values + l->key_heads);
    for (int64_t head = mine.first; head < mine.end; head++) {
        float *x = states + head * size;
        if (head < values) {
            norm of = head < keys ? l->of_queries : l->of_keys;
            if (of.weight) normalise(of, x, size, x);
            rotate(x, angles, angles + size, size);
        }
        if (head >= keys) {
            int64_t row = (head < values ? head - keys : head - values) * s->capacity + s->position;
            memcpy(cache[head >= values] + row * size, x, size * sizeof *x);
        }
    }
}

static void attention(const step *s, const layer *l, const float *queries, float *const cache[2], float *scores,
                      float *out) {
    int64_t size = s->head_size, sharers = l->heads / l->key_heads;
    range mine = share(l->heads);
    for (int64_t head = mine.first; head < mine.end; head++) {
        int64_t from = head / sharers * s->capacity * size;
        attend(queries + head * size, cache[0] + from, cache[1] + from, size, s->position + 1, l->scaling, scores,
               out + head * size);
    }
}

static void gated(const step *s, const layer *l, const float *x, float *gates_ups) {
    range gates = share(l->inner), ups = {gates.first + l->inner, gates.end + l->inner};
    product(l->gate_up, x, s->hidden_size, gates, gates_ups);
    product(l->gate_up, x, s->hidden_size, ups, gates_ups);
    for (int64_t i = gates.first; i < gates.end; i++) {
        float gate = gates_ups[i];
        gates_ups[i] = gate / (1 + expf(-gate)) * gates_ups[i + l->inner];
    }
}

static void add_product(linear of, const float *x, int64_t size, int64_t rows, float *scratch, float *hidden) {
    range mine = share(rows);
    product(of, x, size, mine, scratch);
    for (int64_t row = mine.first; row < mine.end; row++) hidden[row] += scratch[row];
}

/* hidden [hidden_size] becomes the output. angles: [2][head_size], cosines and sines of the position. caches: keys and
 * values of every layer, written at the position. A thread's scratch holds [hidden_size] and [capacity]. */
void decode(const step *s, const layer *layers, float *const *caches, const float *angles, float *scratch,
            float *hidden) {
#pragma omp parallel num_threads(s->threads)
    {
        float *normed = scratch + s->shared_floats + omp_get_thread_num() * s->thread_floats;
        float *scores = normed + s->hidden_size;
        for (int64_t index = 0; index < s->layers; index++) {
            const layer *l = layers + index;
            float *const *cache = caches + 2 * index;
            int64_t width = l->heads * s->head_size;
            float *states = scratch, *attended = states + width + 2 * l->key_heads * s->head_size;
            float *gates_ups = attended + width, *added = gates_ups + 2 * l->inner;
            normalise(l->before_attention, hidden, s->hidden_size, normed);
            product(l->qkv, normed, s->hidden_size, share(attended - states), states);
#pragma omp barrier
            place_heads(s, l, angles, states, cache);
#pragma omp barrier
            attention(s, l, states, cache, scores, attended);
#pragma omp barrier
            add_product(l->output, attended, width, s->hidden_size, added, hidden);
#pragma omp barrier
            normalise(l->before_mlp, hidden, s->hidden_size, normed);
            gated(s, l, normed, gates_ups);
#pragma omp barrier
            add_product(l->down, gates_ups, l->inner, s->hidden_size, added, hidden);
#pragma omp barrier
        }
    }
}
