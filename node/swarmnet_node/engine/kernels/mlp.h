/* The part of a block after attention: activations, gates, and mixtures of experts (Shazeer et al. 2017). All sums have
 * one order, so a row has the same bits alone or among others, on every processor. */

#ifndef SWARMNET_MLP_H
#define SWARMNET_MLP_H

#include "attention.h" /* its softmax */

enum { SILU, GELU_TANH, GELU, SQUARED_RELU };

/* Routed experts. Each row goes to `chosen` of `count` experts. */
typedef struct {
    linear router;           /* its outputs are a logit of each expert */
    const linear *experts;   /* of each expert: gate and up, then down */
    const float *correction; /* [count]: added to scores where experts are chosen, not where they are weighted; or NULL */
    int64_t count, chosen, inner; /* count: 0 if the layer has no such experts */
    int64_t sigmoid;         /* whether scores are sigmoids of logits; otherwise their softmax */
    int64_t normalised;      /* whether the weights of a row's experts are divided by their sum */
    float scale;             /* of the weights */
} mixture;

static inline float silu(float x) { return x / (1 + exponential(-x)); }
static inline float sigmoid(float x) { return 1 / (1 + exponential(-x)); }
/* (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)). */
static inline float gelu_tanh(float x) { return x / (1 + exponential(-1.59576912f * (x + 0.044715f * x * x * x))); }
static inline float gelu(float x) { return x * normal_probability(x); }
static inline float squared_relu(float x) { return (x < 0 ? 0 : x) * (x < 0 ? 0 : x); }

/* Applies an activation to values of x, in place. */
static void activate(int64_t activation, range values, float *x) {
#define EACH(of)                                                                         \
    _Pragma("omp simd") for (int64_t i = values.first; i < values.end; i++) x[i] = of(x[i]); \
    break
    switch (activation) {
    case SILU: EACH(silu);
    case GELU_TANH: EACH(gelu_tanh);
    case GELU: EACH(gelu);
    case SQUARED_RELU: EACH(squared_relu);
    }
}

/* Chooses different experts for a row by its logits: highest score first, the first expert among equals. A score that is
 * NaN counts as the lowest. Writes numbers and weights of the experts. scores: scratch memory, [2][count]. */
static void choose(const mixture *m, const float *logits, float *scores, int32_t *experts, float *weights) {
    float *keys = scores + m->count, total = 1, sum = 0;
    memcpy(scores, logits, m->count * sizeof *scores);
    if (m->sigmoid)
        for (int64_t e = 0; e < m->count; e++) scores[e] = sigmoid(scores[e]);
    else
        total = exponentials(scores, m->count);
    for (int64_t e = 0; e < m->count; e++) {
        keys[e] = m->correction ? scores[e] / total + m->correction[e] : logits[e];
        if (keys[e] != keys[e]) keys[e] = -INFINITY; /* NaN marks an expert that is chosen */
    }
    for (int64_t i = 0; i < m->chosen; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < m->count; e++)
            if (keys[e] == keys[e] && (best < 0 || keys[e] > keys[best])) best = e;
        keys[best] = NAN;
        experts[i] = (int32_t)best;
        weights[i] = scores[best];
        sum += scores[best];
    }
    for (int64_t i = 0; i < m->chosen; i++) weights[i] = weights[i] / (m->normalised ? sum : total) * m->scale;
}

/* A thread's memory for the experts of some rows. */
typedef struct {
    packed_function *packed; /* as in step */
    int32_t *experts; /* [rows][chosen] */
    float *weights;   /* [rows][chosen] */
    float *scores;    /* [2][count] */
    float *x;         /* [ROWS][inputs of a product] */
    activations *parts; /* of x */
    float *out;       /* [ROWS][outputs of a product] */
} routed;

/* Divides a thread's memory. experts_floats() of native_layers.py adds up the sizes of the parts. */
static routed routed_at(packed_function *packed, const mixture *m, int64_t rows, int64_t inputs, float *memory) {
    int64_t all = rows * m->chosen, widest = least(rows, ROWS) * most(inputs, m->inner);
    float *weights = memory + all, *scores = weights + all, *x = scores + 2 * m->count, *parts = x + widest;
    return (routed){packed, (int32_t *)memory, weights, scores, x, (activations *)parts, parts + widest};
}

/* Whether products with experts need split activations. which: 0 for gate and up, 1 for down. */
static int experts_take_split(const mixture *m, int64_t which) {
    for (int64_t e = 0; e < m->count; e++)
        if (takes_split(m->experts[2 * e + which])) return 1;
    return 0;
}

/* Multiplies the next rows of an expert, at most ROWS, with one of its matrices. Row i goes to places[i] of the `all`
 * places [rows][chosen]. Each row of x has `sharers` places. Outputs in the ranges mine and others go to
 * r->out [..][stride]. Returns the number of rows. *next is the first place to look at, here and in the next call. */
static int64_t expert_product(const routed *r, int64_t all, int64_t expert, linear of, const float *x, const activations *parts,
                              int64_t sharers, range mine, range others, int64_t stride, int64_t *next, int64_t *places) {
    int64_t count = 0, blocks = of.inputs / 32;
    for (; *next < all && count < ROWS; ++*next)
        if (r->experts[*next] == expert) places[count++] = *next;
    if (!count) return 0; /* a product reads its weights */
    for (int64_t i = 0; i < count; i++) {
        int64_t row = places[i] / sharers;
        memcpy(r->x + i * of.inputs, x + row * of.inputs, of.inputs * sizeof *x);
        if (parts) memcpy(r->parts + i * blocks, parts + row * blocks, blocks * sizeof *parts);
    }
    product(r->packed, of, r->x, r->parts, count, mine, r->out, stride);
    product(r->packed, of, r->x, r->parts, count, others, r->out, stride);
    return count;
}

/* The inputs of the down projections of all chosen experts, to out [rows][chosen][inner]: this thread's share of them.
 * parts: those of x [rows][inputs], or NULL if no product takes them. */
static void expert_inner(const mixture *m, int64_t activation, const routed *r, const float *x, const activations *parts,
                         int64_t rows, float *out) {
    range mine = share_outputs(m->inner), ups = {mine.first + m->inner, mine.end + m->inner};
    for (int64_t e = 0; e < m->count; e++)
        for (int64_t next = 0, count, all = rows * m->chosen; next < all;) {
            int64_t places[ROWS];
            count = expert_product(r, all, e, m->experts[2 * e], x, parts, m->chosen, mine, ups, 2 * m->inner, &next, places);
            for (int64_t i = 0; i < count; i++) {
                float *gates = r->out + i * 2 * m->inner, *to = out + places[i] * m->inner;
                activate(activation, mine, gates);
                for (int64_t j = mine.first; j < mine.end; j++) to[j] = gates[j] * gates[j + m->inner];
            }
        }
}

/* Adds to this thread's share of sums [rows][outputs] the weighted outputs of experts, in the order of their numbers. x:
 * [rows][chosen][inner]; parts: as in expert_inner. */
static void add_experts(const mixture *m, const routed *r, const float *x, const activations *parts, int64_t rows,
                        int64_t outputs, float *sums) {
    range mine = share_outputs(outputs), none = {0, 0};
    for (int64_t e = 0; e < m->count; e++)
        for (int64_t next = 0, count, all = rows * m->chosen; next < all;) {
            int64_t places[ROWS];
            count = expert_product(r, all, e, m->experts[2 * e + 1], x, parts, 1, mine, none, outputs, &next, places);
            for (int64_t i = 0; i < count; i++) {
                float weight = r->weights[places[i]], *sum = sums + places[i] / m->chosen * outputs;
                for (int64_t j = mine.first; j < mine.end; j++) sum[j] += weight * r->out[i * outputs + j];
            }
        }
}

#endif
