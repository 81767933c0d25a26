/* One step: new positions of some sequences through all decoder layers, in float32, with the LoRA updates of each
 * sequence's adapter. What a layer computes is data: layer has the options of all families that block_shapes.py
 * lists.
 *
 * The step is one OpenMP parallel region. Each thread computes a share of the outputs of every
 * product. A barrier separates writes from reads by other threads. native_backend.py declares the
 * same structs, and fills them with pointers to the memory of arrays.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "mlp.h"

typedef struct {
    const float *weight; /* NULL if the layer has no such norm */
    const float *bias;   /* or NULL */
    int64_t size;        /* values that are normed together */
    int64_t stride;      /* weights from one head to the next: 0 if all heads have the same */
    int64_t centred;     /* whether it is a LayerNorm */
    float eps;
} norm;

/* A rotary embedding of the first 2 * pairs components of a head. */
typedef struct {
    const float *frequencies; /* [pairs]: radians from one position to the next */
    int64_t pairs;
    int64_t interleaved; /* whether a pair is two neighbours; otherwise its second is pairs components later */
    float scale;
} rotary;

typedef struct {
    /* qkv: outputs of all query heads, then key heads, then value heads; gate_up: of the gate, if there is one,
     * then of the up projection, then a logit of the MLP's share if it has one. A layer with a mixture may lack the
     * MLP: then its products have no segments, and inner is 0. */
    linear qkv, output, gate_up, down;
    mixture mixture; /* added to the outputs of the MLP */
    /* Norms of the inputs of attention and MLP, of their outputs, and of heads. Norms of heads whose size is that
     * of all heads take these together. */
    norm attention_norm, mlp_norm, attention_out_norm, mlp_out_norm, query_norm, key_norm, value_norm;
    int64_t heads, key_heads, head_size, inner;
    int64_t rotary;     /* index of the embedding, or -1 */
    int64_t window;     /* positions that a query sees, or 0 for all */
    int64_t activation; /* SILU or another */
    int64_t gated, parallel; /* parallel: the MLP has the inputs of attention, not its outputs */
    int64_t shares;          /* whether the MLP's outputs are multiplied by the sigmoid of their logit */
    float scaling, softcap, residual, scale; /* scale: of the layer's outputs */
} layer;

typedef struct {
    packed_function *packed; /* of the library of products.c */
    const rotary *rotaries;
    int64_t layers, hidden_size, rotary_count, angle_floats; /* angle_floats: of all angles of a position */
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
    float *const *caches; /* keys and values [key_heads][capacity][head_size] of each layer */
    const update *updates; /* [layers][PRODUCTS], or NULL */
    float query_scale;     /* of the queries at this position */
} new_position;

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
    product(s->packed, of, x, parts, s->rows, mine, out, stride);
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

typedef struct {
    float mean, scale;
} moments;

/* The mean of x (0 for an RMSNorm), and what its values are multiplied with. */
static moments moments_of(norm of, const float *x) {
    lanes sum = {0}, squares = {0};
    float mean = 0, last[LANES];
    int64_t size = of.size, whole = size / LANES * LANES;
    if (of.centred) {
        for (int64_t i = 0; i < whole; i += LANES) sum = added_lanes(sum, lanes_at(x + i));
        mean = sum_of_lanes(added_lanes(sum, first_lanes(x + whole, size - whole))) / size;
    }
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes each = added_lanes(lanes_at(x + i), all_lanes(-mean));
        squares = fused_lanes(each, each, squares);
    }
    for (int i = 0; i < LANES; i++) last[i] = whole + i < size ? x[whole + i] - mean : 0;
    squares = fused_lanes(lanes_at(last), lanes_at(last), squares);
    return (moments){mean, 1 / sqrtf(sum_of_lanes(squares) / size + of.eps)};
}

/* Some values of RMSNorm (Zhang and Sennrich 2019, equation 4) or LayerNorm (Ba et al. 2016, equation 4). */
static void norm_values(norm of, moments m, const float *x, range values, float *out) {
    for (int64_t i = values.first; i < values.end; i++) out[i] = (x[i] - m.mean) * m.scale * of.weight[i];
    for (int64_t i = values.first; of.bias && i < values.end; i++) out[i] += of.bias[i];
}

/* Norms x [count][size]. Copies it if there is no norm. */
static void normalise(norm of, const float *x, int64_t size, float *out, int64_t count) {
    if (!of.weight) memcpy(out, x, count * size * sizeof *out);
    for (int64_t row = 0; of.weight && row < count; row++, x += size, out += size)
        norm_values(of, moments_of(of, x), x, (range){0, size}, out);
}

/* The cosines [pairs] and the sines of each embedding and row, to angles [rotaries][rows][2][pairs]. */
static void set_angles(const step *s, const new_position *positions, float *angles) {
    range mine = share(s->rows);
    for (const rotary *of = s->rotaries; of < s->rotaries + s->rotary_count; angles += s->rows * 2 * of->pairs, of++)
        for (int64_t row = mine.first; row < mine.end; row++) {
            float *cosines = angles + row * 2 * of->pairs, *sines = cosines + of->pairs;
            for (int64_t i = 0; i < of->pairs; i++) {
                cosine_and_sine((float)positions[row].position * of->frequencies[i], cosines + i, sines + i);
                cosines[i] *= of->scale;
                sines[i] *= of->scale;
            }
        }
}

/* Rotates pairs of components: pair i is components i * next and i * next + apart. */
ALWAYS void rotate_pairs(float *x, const float *cosines, const float *sines, int64_t pairs, int64_t next, int64_t apart) {
    for (int64_t i = 0; i < pairs; i++) {
        float first = x[i * next], second = x[i * next + apart];
        x[i * next] = first * cosines[i] - second * sines[i];
        x[i * next + apart] = second * cosines[i] + first * sines[i];
    }
}

/* Rotary embedding (RoFormer, section 3.4.2) of a head in row. */
static void rotate(const step *s, int64_t which, int64_t row, const float *angles, float *x) {
    const rotary *of = s->rotaries;
    for (; which; which--, of++) angles += s->rows * 2 * of->pairs;
    const float *cosines = angles + row * 2 * of->pairs, *sines = cosines + of->pairs;
    if (of->interleaved)
        rotate_pairs(x, cosines, sines, of->pairs, 2, 1);
    else
        rotate_pairs(x, cosines, sines, of->pairs, 1, of->pairs);
}

/* Norms and rotates the heads in states [rows][query, key and value heads][head_size], scales
 * queries, and writes keys and values to the caches. */
static void finish_heads(const step *s, const layer *l, const new_position *positions, int64_t index, const float *angles,
                         float *states) {
    int64_t size = l->head_size, keys = l->heads, values = keys + l->key_heads, all = values + l->key_heads;
    int together = l->query_norm.weight && l->query_norm.size > size;
    if (together) {
        range rows = share(s->rows);
        for (int64_t row = rows.first; row < rows.end; row++) {
            float *queries = states + row * all * size;
            normalise(l->query_norm, queries, keys * size, queries, 1);
            normalise(l->key_norm, queries + keys * size, (values - keys) * size, queries + keys * size, 1);
        }
#pragma omp barrier
    }
    range mine = share(s->rows * all);
    for (int64_t i = mine.first; i < mine.end; i++) {
        int64_t row = i / all, head = i % all;
        const new_position *of = positions + row;
        float *x = states + i * size;
        norm its = head < keys ? l->query_norm : head < values ? l->key_norm : l->value_norm;
        if (its.weight && !(together && head < values)) {
            its.weight += (head < keys ? head : head - keys) * its.stride;
            normalise(its, x, size, x, 1);
        }
        if (head < values && l->rotary >= 0) rotate(s, l->rotary, row, angles, x);
        if (head < keys) {
            float scaling = l->scaling * of->query_scale;
            for (int64_t j = 0; j < size; j++) x[j] *= scaling;
        } else {
            int64_t place = (head < values ? head - keys : head - values) * of->capacity + of->position;
            memcpy(of->caches[2 * index + (head >= values)] + place * size, x, size * sizeof *x);
        }
    }
}

/* Attention of the queries in states. The output [rows][heads][head_size] follows states in
 * memory. Queries of a sequence that share a key head follow each other, so that a few of them read
 * its keys together. */
static void attention(const step *s, const layer *l, const new_position *positions, int64_t index, const float *states,
                      float *out, float *scratch) {
    int64_t size = l->head_size, all = l->heads + 2 * l->key_heads, sharers = l->heads / l->key_heads;
    int64_t total = s->rows * l->heads, threads = omp_get_num_threads(), part = least((total + threads - 1) / threads, PART);
    float *query = scratch, *mixed = query + QUERIES * size, *scores = mixed + QUERIES * size;
    for (int64_t first = omp_get_thread_num() * part; first < total; first += threads * part)
        for (int64_t i = first, end = least(first + part, total), queries; i < end; i += queries) {
            const new_position *of = positions + i / l->heads;
            int64_t together = of->rows * sharers, of_sequence = i - of->first * l->heads;
            int64_t key_head = of_sequence / together, of_key = of_sequence % together, from = key_head * of->capacity * size;
            int64_t places[QUERIES];
            visible seen[QUERIES];
            queries = least(together - of_key, least(end - i, QUERIES));
            for (int64_t q = 0; q < queries; q++) {
                int64_t row = of->first + (of_key + q) / sharers, head = key_head * sharers + (of_key + q) % sharers;
                seen[q].end = positions[row].position + 1;
                seen[q].first = l->window ? most(seen[q].end - l->window, 0) : 0;
                places[q] = row * l->heads + head;
                memcpy(query + q * size, states + (row * all + head) * size, size * sizeof *query);
            }
            attend(query, queries, of->caches[2 * index] + from, of->caches[2 * index + 1] + from, size, seen, l->softcap, scores,
                   mixed);
            for (int64_t q = 0; q < queries; q++) memcpy(out + places[q] * size, mixed + q * size, size * sizeof *out);
        }
}

static int64_t gate_up_outputs(const layer *l) { return (1 + l->gated) * l->inner + l->shares; }

/* The inputs of an MLP's down projection, to out [rows][inner]: activated values, or those of a gate (Shazeer 2020)
 * times the up projection. */
static void inner_values(const step *s, const layer *l, const new_position *positions, int64_t index, const float *x,
                         activations *parts, float *low, float *gates_ups, float *out) {
    range mine = share_outputs(l->inner), ups = {mine.first + l->inner, mine.end + l->inner};
    int64_t which = index * PRODUCTS + GATE_UP, stride = gate_up_outputs(l);
    int is_last = omp_get_thread_num() == omp_get_num_threads() - 1;
    prepare(s, positions, which, l->gate_up, x, parts, low);
    adapted(s, positions, which, l->gate_up, x, parts, low, mine, gates_ups, stride);
    if (l->gated) adapted(s, positions, which, l->gate_up, x, parts, low, ups, gates_ups, stride);
    if (l->shares && is_last)
        adapted(s, positions, which, l->gate_up, x, parts, low, (range){stride - 1, stride}, gates_ups, stride);
    for (int64_t row = 0; row < s->rows; row++, gates_ups += stride, out += l->inner) {
        activate(l->activation, mine, gates_ups);
        if (l->gated)
            for (int64_t i = mine.first; i < mine.end; i++) out[i] = gates_ups[i] * gates_ups[i + l->inner];
        else
            memcpy(out + mine.first, gates_ups + mine.first, (mine.end - mine.first) * sizeof *out);
    }
}

/* Adds what a branch of a layer computed, normed and times residual, to hidden, and multiplies the sum by scale.
 * normed: this thread's [rows][hidden_size]. */
static void add_branch(const step *s, norm after, float residual, float scale, const float *added, float *normed, float *hidden) {
    range mine = share_outputs(s->hidden_size);
    if (after.weight) {
#pragma omp barrier
        for (int64_t row = 0, at = 0; row < s->rows; row++, at += s->hidden_size)
            norm_values(after, moments_of(after, added + at), added + at, mine, normed + at);
        added = normed;
    }
    for (int64_t row = 0; row < s->rows; row++, added += s->hidden_size, hidden += s->hidden_size)
        for (int64_t i = mine.first; i < mine.end; i++) hidden[i] = (hidden[i] + added[i] * residual) * scale;
}

/* A product with the hidden size as outputs, with its LoRA updates: this thread's share. */
static void back_product(const step *s, const new_position *positions, int64_t which, linear of, const float *x,
                         activations *parts, float *low, float *out) {
    prepare(s, positions, which, of, x, parts, low);
    adapted(s, positions, which, of, x, parts, low, share_outputs(s->hidden_size), out, s->hidden_size);
}

/* Chooses experts for x [rows][hidden_size], and computes the inputs of their down projections. logits, parts and inner are
 * shared by all threads. The caller waits for them. */
static void mixture_inner(const step *s, const layer *l, const float *x, activations *parts, float *logits, routed r, float *inner) {
    const mixture *m = &l->mixture;
    int takes = takes_split(m->router) || experts_take_split(m, 0);
    if (takes) {
        split(x, share(s->rows * (s->hidden_size / 32)), parts);
#pragma omp barrier
    }
    product(s->packed, m->router, x, parts, s->rows, share_outputs(m->count), logits, m->count);
#pragma omp barrier
    for (int64_t row = 0, at = 0; row < s->rows; row++, at += m->chosen)
        choose(m, logits + row * m->count, r.scores, r.experts + at, r.weights + at);
    expert_inner(m, l->activation, &r, x, takes ? parts : NULL, s->rows, inner);
}

/* Adds the outputs of the experts to this thread's share of the MLP's outputs. */
static void add_mixture(const step *s, const layer *l, const float *gates_ups, const float *inner, activations *parts, routed r,
                        float *outputs) {
    const mixture *m = &l->mixture;
    range mine = share_outputs(s->hidden_size);
    int takes = experts_take_split(m, 1);
    if (takes) {
        split(inner, share(s->rows * m->chosen * (m->inner / 32)), parts);
#pragma omp barrier
    }
    for (int64_t row = 0; row < s->rows; row++) {
        float *its = outputs + row * s->hidden_size;
        float its_share = l->shares ? sigmoid(gates_ups[(row + 1) * gate_up_outputs(l) - 1]) : 1;
        for (int64_t i = mine.first; i < mine.end; i++) its[i] = l->inner ? its[i] * its_share : 0;
    }
    add_experts(m, &r, inner, takes ? parts : NULL, s->rows, s->hidden_size, outputs);
}

/* Replaces hidden [rows][hidden_size] by the output of all layers, and writes keys and values to the
 * caches. Each thread's scratch memory begins with [rows][hidden_size] floats. Attention, with
 * [QUERIES][largest position + 1 + 2 * head_size] floats, and then the parts of routed_at() use the rest. */
void decode(const step *s, const layer *layers, const new_position *positions, float *scratch, float *hidden) {
#pragma omp parallel num_threads(s->threads)
    {
        float *normed = scratch + s->shared_floats + omp_get_thread_num() * s->thread_floats;
        float *scores = normed + s->rows * s->hidden_size, *angles = scratch;
        set_angles(s, positions, angles);
        for (int64_t index = 0; index < s->layers; index++) {
            const layer *l = layers + index;
            int64_t width = l->heads * l->head_size, states_width = width + 2 * l->key_heads * l->head_size;
            float *states = angles + s->rows * s->angle_floats, *attended = states + s->rows * states_width;
            float *gates_ups = attended + s->rows * width, *inner = gates_ups + s->rows * gate_up_outputs(l);
            float *added = inner + s->rows * l->inner, *logits = added + s->rows * s->hidden_size;
            const mixture *m = &l->mixture;
            int64_t mixed = m->chosen * m->inner;
            float *experts_inner = logits + s->rows * m->count, *widest = experts_inner + s->rows * mixed;
            activations *parts = (activations *)widest;
            float *low = widest + s->rows * most(most(s->hidden_size, mixed), most(width, l->inner));
            routed r = routed_at(s->packed, m, s->rows, s->hidden_size, scores);
            int64_t first = index * PRODUCTS;
            normalise(l->attention_norm, hidden, s->hidden_size, normed, s->rows);
            prepare(s, positions, first + QKV, l->qkv, normed, parts, low);
            adapted(s, positions, first + QKV, l->qkv, normed, parts, low, share_outputs(states_width), states, states_width);
#pragma omp barrier
            if (l->parallel) {
                normalise(l->mlp_norm, hidden, s->hidden_size, normed, s->rows);
                inner_values(s, l, positions, index, normed, parts, low, gates_ups, inner);
            }
            finish_heads(s, l, positions, index, angles, states);
#pragma omp barrier
            attention(s, l, positions, index, states, attended, scores);
#pragma omp barrier
            back_product(s, positions, first + OUTPUT, l->output, attended, parts, low, added);
            add_branch(s, l->attention_out_norm, l->residual, 1, added, normed, hidden);
#pragma omp barrier
            if (!l->parallel) {
                normalise(l->mlp_norm, hidden, s->hidden_size, normed, s->rows);
                if (m->count) mixture_inner(s, l, normed, parts, logits, r, experts_inner);
                if (m->count && l->inner) {
#pragma omp barrier
                }
                if (l->inner) inner_values(s, l, positions, index, normed, parts, low, gates_ups, inner);
#pragma omp barrier
            }
            if (l->inner) back_product(s, positions, first + DOWN, l->down, inner, parts, low, added);
            if (m->count && l->inner) {
#pragma omp barrier
            }
            if (m->count) add_mixture(s, l, gates_ups, experts_inner, parts, r, added);
            add_branch(s, l->mlp_out_norm, l->residual, l->scale, added, normed, hidden);
#pragma omp barrier
        }
    }
}

/* Computes three positions of one sequence through a layer of the Llama shape, one with all other options, and two with
 * experts. Their bits are the same on every processor. native_code.py calls it. */
int trial(void) {
    enum { HIDDEN = 40, SIZE = 22, HEADS = 3, INNER = 24, ROWS = 3, ALL = (HEADS + 2) * SIZE, EXPERTS = 5 };
    static float weights[ALL + 2 * INNER + 1][HIDDEN], back[HIDDEN][HEADS * SIZE], gains[HIDDEN], biases[HIDDEN];
    static float keys[4][ROWS][SIZE], values[4][ROWS][SIZE], scratch[8192], hidden[ROWS][HIDDEN];
    for (int i = 0; i < HIDDEN; i++) {
        gains[i] = 1 + (float)i / 64;
        biases[i] = (float)(i % 5 - 2) / 8;
        for (int o = 0; o <= ALL + 2 * INNER; o++) weights[o][i] = (float)((o * 7 + i * 3) % 11 - 5) / 16;
        for (int o = 0; o < HEADS * SIZE; o++) back[i][o] = (float)((o * 5 + i * 2) % 13 - 6) / 32;
        for (int r = 0; r < ROWS; r++) hidden[r][i] = (float)((r * 5 + i) % 7 - 3) / 3;
    }
    segment qkv = {.rows = (uint8_t *)weights, .row_bytes = sizeof *weights, .outputs = ALL};
    segment gate_up = {.rows = (uint8_t *)weights[ALL], .row_bytes = sizeof *weights, .outputs = 2 * INNER};
    segment output = {.rows = (uint8_t *)back, .row_bytes = sizeof *back, .outputs = HIDDEN};
    segment down = {.rows = (uint8_t *)back, .row_bytes = INNER * sizeof(float), .outputs = HIDDEN};
    norm rms = {.weight = gains, .size = HIDDEN, .eps = 1e-5f};
    norm centred = {.weight = gains, .bias = biases, .size = HIDDEN, .centred = 1, .eps = 1e-5f};
    norm of_head = {.weight = gains, .size = SIZE, .eps = 1e-5f};
    layer llama = {.qkv = {&qkv, NULL, 1, HIDDEN}, .output = {&output, NULL, 1, HEADS * SIZE}, .gate_up = {&gate_up, NULL, 1, HIDDEN},
                   .down = {&down, NULL, 1, INNER}, .attention_norm = rms, .mlp_norm = rms, .heads = HEADS, .key_heads = 1,
                   .head_size = SIZE, .inner = INNER, .gated = 1, .scaling = 0.25f, .residual = 1, .scale = 1};
    layer other = llama;
    other.attention_norm = other.mlp_norm = other.attention_out_norm = other.mlp_out_norm = centred;
    other.query_norm = other.key_norm = other.value_norm = of_head;
    other.rotary = other.parallel = 1;
    other.gated = 0;
    other.activation = GELU;
    other.window = 2;
    other.softcap = 3;
    other.residual = 0.5f;
    other.scale = 0.75f;
    segment router = {.rows = (uint8_t *)weights[20], .row_bytes = sizeof *weights, .outputs = EXPERTS};
    segment shared = gate_up, of_experts[EXPERTS][2];
    linear experts[EXPERTS][2];
    shared.outputs = 2 * INNER + 1;
    for (int e = 0; e < EXPERTS; e++) {
        of_experts[e][0] = (segment){.rows = (uint8_t *)weights[9 * e], .row_bytes = sizeof *weights, .outputs = 2 * INNER};
        of_experts[e][1] = (segment){.rows = (uint8_t *)(*back + 16 * e), .row_bytes = INNER * sizeof(float), .outputs = HIDDEN};
        experts[e][0] = (linear){of_experts[e], NULL, 1, HIDDEN};
        experts[e][1] = (linear){of_experts[e] + 1, NULL, 1, INNER};
    }
    layer mixed = llama, alone = llama;
    mixed.mixture = (mixture){{&router, NULL, 1, HIDDEN}, *experts, NULL, EXPERTS, 2, INNER, 0, 0, 1};
    mixed.gate_up.segments = &shared;
    mixed.shares = 1;
    alone.mixture = (mixture){{&router, NULL, 1, HIDDEN}, *experts, biases, EXPERTS, 3, INNER, 1, 1, 1.5f};
    alone.gate_up.count = alone.down.count = alone.inner = 0;
    layer layers[] = {llama, other, mixed, alone};
    float frequencies[SIZE / 2], *caches[8];
    for (int i = 0; i < 8; i++) caches[i] = i % 2 ? *values[i / 2] : *keys[i / 2];
    for (int i = 0; i < SIZE / 2; i++) frequencies[i] = 1 / (float)(i + 1);
    rotary rotaries[] = {{frequencies, SIZE / 2, 0, 1}, {frequencies, SIZE / 2 - 2, 1, 1.25f}};
    new_position positions[ROWS];
    for (int r = 0; r < ROWS; r++)
        positions[r] = (new_position){.position = r, .capacity = ROWS, .rows = ROWS, .caches = caches, .query_scale = 1.5f};
    step s = {.rotaries = rotaries, .layers = 4, .hidden_size = HIDDEN, .rotary_count = 2, .angle_floats = 2 * (SIZE - 2),
              .shared_floats = 4096, .thread_floats = 4096, .rows = ROWS, .threads = 1};
    decode(&s, layers, positions, scratch, *hidden);
    uint64_t digest = 0xcbf29ce484222325; /* FNV-1a */
    for (const uint8_t *byte = (uint8_t *)hidden; byte < (uint8_t *)(hidden + ROWS); byte++) digest = (digest ^ *byte) * 0x100000001b3;
    return digest != 0xcb62043d96789ecb;
}
