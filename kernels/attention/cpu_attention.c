/* Rotary embedding and attention over the paged cache on an x86 CPU: see _cpu_attention.py, which compiles and
 * calls this. Compile with -ffp-contract=off. What is computed for a query depends on the number of keys that
 * it sees and on nothing else.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_library.h"

enum { MAX_GROUP = 16, MAX_VECTORS = 32 };

typedef struct {
    const float *query; /* [tokens, heads, dim], with strides of tokens and heads */
    ptrdiff_t token_stride, head_stride;
    const float *keys, *values; /* [blocks, block_size, kv_heads, dim] */
    const int64_t *table;       /* [rows, max_blocks]; -1 where there is no block */
    ptrdiff_t table_stride, max_blocks;
    const int64_t *starts; /* [rows] */
    float *out;            /* [tokens, heads, dim] */
    ptrdiff_t rows, window, kv_heads, group, dim, block_size, first_position, most_keys;
    float scale;
    int failed;
} Attention;

/* Walks through the keys or values of one head, position after position. */
typedef struct {
    const float *at;
    ptrdiff_t position, left; /* of its block */
} Entries;

static inline const float *next(Entries *e, const Attention *a, const float *cache, const int64_t *blocks, ptrdiff_t head) {
    if (e->left == 0) {
        ptrdiff_t index = e->position / a->block_size, offset = e->position % a->block_size;
        int64_t block = index < a->max_blocks && blocks[index] > 0 ? blocks[index] : 0;
        e->at = cache + ((block * a->block_size + offset) * a->kv_heads + head) * a->dim;
        e->left = a->block_size - offset;
    } else {
        e->at += a->kv_heads * a->dim;
    }
    e->position++;
    e->left--;
    return e->at;
}

/* The query heads that share one key head. scores: [group, most_keys]. `vectors` of a head: constant where this
 * is called for the usual sizes, so that sums are in registers. */
static inline __attribute__((always_inline)) void attend(
    const Attention *a, ptrdiff_t token, ptrdiff_t head, float *scores, const ptrdiff_t vectors) {
    ptrdiff_t row = token / a->window, position = a->starts[row] + token % a->window;
    ptrdiff_t first = a->first_position, count = position + 1 - first;
    const int64_t *blocks = a->table + row * a->table_stride;
    const float *query = a->query + token * a->token_stride + head * a->group * a->head_stride;
    float *out = a->out + (token * a->kv_heads + head) * a->group * a->dim;
    if (count <= 0) {
        memset(out, 0, (size_t)(a->group * a->dim) * sizeof(float));
        return;
    }
    Entries keys = {NULL, first, 0};
    for (ptrdiff_t key = 0; key < count; key++) {
        const float *at = next(&keys, a, a->keys, blocks, head);
        for (ptrdiff_t own = 0; own < a->group; own++) {
            __m256 sums = _mm256_setzero_ps();
            for (ptrdiff_t v = 0; v < vectors; v++)
                sums = _mm256_fmadd_ps(_mm256_loadu_ps(query + own * a->head_stride + v * LANES), _mm256_loadu_ps(at + v * LANES), sums);
            scores[own * a->most_keys + key] = sum_of(sums) * a->scale;
        }
    }
    float totals[MAX_GROUP];
    for (ptrdiff_t own = 0; own < a->group; own++) {
        float *line = scores + own * a->most_keys, largest = line[0];
        for (ptrdiff_t key = 1; key < count; key++) largest = line[key] > largest ? line[key] : largest;
        for (ptrdiff_t key = count; key % LANES != 0; key++) line[key] = -INFINITY;
        __m256 total = _mm256_setzero_ps();
        for (ptrdiff_t key = 0; key < count; key += LANES) {
            __m256 weights = exponential(_mm256_sub_ps(_mm256_loadu_ps(line + key), _mm256_set1_ps(largest)));
            total = _mm256_add_ps(total, weights);
            _mm256_storeu_ps(line + key, weights);
        }
        totals[own] = sum_of(total);
    }
    for (ptrdiff_t own = 0; own < a->group; own++) {
        Entries values = {NULL, first, 0};
        __m256 sums[MAX_VECTORS];
        for (ptrdiff_t v = 0; v < vectors; v++) sums[v] = _mm256_setzero_ps();
        for (ptrdiff_t key = 0; key < count; key++) {
            const float *at = next(&values, a, a->values, blocks, head);
            __m256 weight = _mm256_set1_ps(scores[own * a->most_keys + key]);
            for (ptrdiff_t v = 0; v < vectors; v++) sums[v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(at + v * LANES), sums[v]);
        }
        for (ptrdiff_t v = 0; v < vectors; v++)
            _mm256_storeu_ps(out + own * a->dim + v * LANES, _mm256_div_ps(sums[v], _mm256_set1_ps(totals[own])));
    }
}

static void attend_share(void *given) {
    Attention *a = given;
    float *scores = malloc((size_t)(a->group * a->most_keys) * sizeof(float));
    if (scores == NULL) {
        a->failed = 1;
        return;
    }
    for (ptrdiff_t task = thread_number(); task < a->rows * a->window * a->kv_heads; task += number_of_threads())
        switch (a->dim / LANES) {
        case 8: attend(a, task / a->kv_heads, task % a->kv_heads, scores, 8); break;
        case 16: attend(a, task / a->kv_heads, task % a->kv_heads, scores, 16); break;
        default: attend(a, task / a->kv_heads, task % a->kv_heads, scores, a->dim / LANES);
        }
    free(scores);
}

/* Returns 0, or 1 if there is no memory. */
int attention(const float *query, ptrdiff_t token_stride, ptrdiff_t head_stride, const float *keys, const float *values,
              const int64_t *table, ptrdiff_t table_stride, ptrdiff_t max_blocks, const int64_t *starts, float *out,
              ptrdiff_t rows, ptrdiff_t window, ptrdiff_t kv_heads, ptrdiff_t group, ptrdiff_t dim, ptrdiff_t block_size,
              ptrdiff_t first_position, float scale, int threads) {
    ptrdiff_t most = 0;
    for (ptrdiff_t row = 0; row < rows; row++) most = starts[row] + window > most ? starts[row] + window : most;
    most = (most + LANES - 1) / LANES * LANES;
    Attention a = {query, token_stride, head_stride, keys, values, table, table_stride, max_blocks, starts, out,
                   rows, window, kv_heads, group, dim, block_size, first_position, most, scale, 0};
    run(attend_share, &a, rows * window * most * kv_heads * group < 4096 ? 1 : threads);
    return a.failed;
}

/* Turns dimension i of each head with dimension i + rotary_dim / 2, in place. */
static void turn(float *heads, ptrdiff_t head_stride, ptrdiff_t count, const float *cosines, ptrdiff_t half) {
    const float *sines = cosines + half;
    for (ptrdiff_t head = 0; head < count; head++, heads += head_stride)
        for (ptrdiff_t i = 0; i < half; i++) {
            float first = heads[i], second = heads[i + half];
            heads[i] = first * cosines[i] - second * sines[i];
            heads[i + half] = second * cosines[i] + first * sines[i];
        }
}

/* Turns queries and keys and writes keys and values to their slots of the cache; -1: not written. */
void rope_append(float *query, float *key, const float *value, ptrdiff_t query_token_stride, ptrdiff_t query_head_stride,
                 ptrdiff_t token_stride, ptrdiff_t tokens, ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t dim,
                 const int64_t *positions, const float *cos_sin, ptrdiff_t rotary_dim, float *keys, float *values,
                 const int64_t *slots) {
    for (ptrdiff_t token = 0; token < tokens; token++) {
        const float *cosines = cos_sin + positions[token] * rotary_dim;
        turn(query + token * query_token_stride, query_head_stride, heads, cosines, rotary_dim / 2);
        turn(key + token * token_stride, dim, kv_heads, cosines, rotary_dim / 2);
        if (slots[token] < 0) continue;
        size_t bytes = (size_t)(kv_heads * dim) * sizeof(float);
        memcpy(keys + slots[token] * kv_heads * dim, key + token * token_stride, bytes);
        memcpy(values + slots[token] * kv_heads * dim, value + token * token_stride, bytes);
    }
}
