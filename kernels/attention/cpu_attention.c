/* Rotary embedding and attention over the paged KV cache on an x86 CPU: see _cpu_attention.py, which compiles and
 * calls this. Compile with -ffp-contract=off. The order of a query's sums depends on its number of visible keys
 * alone.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cpu_library.h"

/* All queries of a task read a tile of keys, or of values, before the next tile. */
enum { TILE_QUERIES = 48, TILE_KEYS = 64, WIDTH = 8 };

typedef struct {
    const float *query; /* [tokens, heads, dim], with strides of tokens and heads */
    ptrdiff_t token_stride, head_stride;
    const float *keys, *values; /* [blocks, block_size, kv_heads, dim] */
    const int64_t *table;       /* [rows, max_blocks]; -1 where there is no block */
    ptrdiff_t table_stride, max_blocks;
    const int64_t *starts; /* [rows] */
    float *out;            /* [tokens, heads, dim] */
    ptrdiff_t rows, window, kv_heads, group, dim, block_size, first_position, tile_tokens;
    float scale;
} Attention;

/* Iterates over the keys or values of one head, position by position. */
typedef struct {
    const float *at;
    ptrdiff_t position, left; /* left: positions left in its block */
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

static inline ptrdiff_t smaller(ptrdiff_t one, ptrdiff_t other) { return one < other ? one : other; }

/* [sum of one, sum of other], as four partial sums each. */
static inline __m256 halves_added(__m256 one, __m256 other) {
    return _mm256_add_ps(_mm256_permute2f128_ps(one, other, 0x20), _mm256_permute2f128_ps(one, other, 0x31));
}

static inline __m256 pairs_added(__m256 one, __m256 other) {
    return _mm256_add_ps(_mm256_shuffle_ps(one, other, 0x44), _mm256_shuffle_ps(one, other, 0xee));
}

/* Returns the eight sums of eight vectors, each added as `sum_of` does. */
static inline __m256 sums_of(const __m256 *v) {
    __m256 low = pairs_added(halves_added(v[0], v[4]), halves_added(v[1], v[5]));
    __m256 high = pairs_added(halves_added(v[2], v[6]), halves_added(v[3], v[7]));
    return _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd));
}

/* Writes the scores of one query and eight keys. */
static inline void score(const float *query, const float *const *keys, ptrdiff_t dim, float scale, float *scores) {
    __m256 sums[LANES];
    for (int key = 0; key < LANES; key++) sums[key] = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < dim; i += LANES) {
        __m256 own = _mm256_loadu_ps(query + i);
        for (int key = 0; key < LANES; key++) sums[key] = _mm256_fmadd_ps(own, _mm256_loadu_ps(keys[key] + i), sums[key]);
    }
    _mm256_storeu_ps(scores, _mm256_mul_ps(sums_of(sums), _mm256_set1_ps(scale)));
}

/* A query's sums over the preceding keys: its result is out / total. */
typedef struct {
    const float *query;
    float *out;
    ptrdiff_t count; /* visible keys */
    float largest, total;
} Query;

/* Replaces a tile's scores by exp(score - the largest score so far). Returns the factor of the query's sums so far. */
static __m256 exponentials(float *scores, ptrdiff_t count, Query *q) {
    float before = q->largest, all[LANES];
    __m256 largest = _mm256_set1_ps(before), sums = _mm256_setzero_ps();
    for (ptrdiff_t key = count; key % LANES != 0; key++) scores[key] = -INFINITY;
    for (ptrdiff_t key = 0; key < count; key += LANES) largest = _mm256_max_ps(_mm256_loadu_ps(scores + key), largest);
    _mm256_storeu_ps(all, largest);
    for (int lane = 0; lane < LANES; lane++) q->largest = all[lane] > q->largest ? all[lane] : q->largest;
    largest = _mm256_set1_ps(q->largest);
    for (ptrdiff_t key = 0; key < count; key += LANES) {
        __m256 weights = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + key), largest));
        sums = _mm256_add_ps(sums, weights);
        _mm256_storeu_ps(scores + key, weights);
    }
    __m256 factor = exponential(_mm256_sub_ps(_mm256_set1_ps(before), largest));
    q->total = q->total * _mm256_cvtss_f32(factor) + sum_of(sums);
    return factor;
}

/* Adds a tile's weighted values to `vectors` vectors of a result. `vectors` is constant, so that sums are in registers. */
static inline __attribute__((always_inline)) void add_values(
    float *out, __m256 factor, const float *weights, const float *const *values, ptrdiff_t count, const int vectors) {
    __m256 sums[WIDTH];
    for (int v = 0; v < vectors; v++) sums[v] = _mm256_mul_ps(_mm256_loadu_ps(out + v * LANES), factor);
    for (ptrdiff_t key = 0; key < count; key++) {
        __m256 weight = _mm256_set1_ps(weights[key]);
        for (int v = 0; v < vectors; v++) sums[v] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(values[key] + v * LANES), sums[v]);
    }
    for (int v = 0; v < vectors; v++) _mm256_storeu_ps(out + v * LANES, sums[v]);
}

/* Computes tokens of a row's window from `first` on, for the query heads that share one key head. */
static void attend(const Attention *a, ptrdiff_t row, ptrdiff_t first, ptrdiff_t head) {
    ptrdiff_t number = smaller(a->tile_tokens, a->window - first) * a->group, dim = a->dim, most = 0;
    const int64_t *blocks = a->table + row * a->table_stride;
    Query queries[TILE_QUERIES];
    for (ptrdiff_t i = 0; i < number; i++) {
        ptrdiff_t in_window = first + i / a->group, token = row * a->window + in_window, own = head * a->group + i % a->group;
        Query *q = queries + i;
        q->query = a->query + token * a->token_stride + own * a->head_stride;
        q->out = a->out + (token * a->kv_heads * a->group + own) * dim;
        q->count = a->starts[row] + in_window + 1 - a->first_position;
        q->largest = -INFINITY;
        q->total = 0;
        memset(q->out, 0, (size_t)dim * sizeof(float));
        most = q->count > most ? q->count : most;
    }
    Entries keys = {NULL, a->first_position, 0}, values = keys;
    for (ptrdiff_t begin = 0; begin < most; begin += TILE_KEYS) {
        const float *keys_at[TILE_KEYS], *values_at[TILE_KEYS];
        ptrdiff_t found = smaller(TILE_KEYS, most - begin);
        for (ptrdiff_t key = 0; key < found; key++) {
            keys_at[key] = next(&keys, a, a->keys, blocks, head);
            values_at[key] = next(&values, a, a->values, blocks, head);
        }
        for (ptrdiff_t key = found; key % LANES != 0; key++) keys_at[key] = keys_at[0]; /* read, and not used */
        __m256 factors[TILE_QUERIES];
        float scores[TILE_QUERIES][TILE_KEYS];
        for (ptrdiff_t i = 0; i < number; i++) {
            ptrdiff_t count = smaller(found, queries[i].count - begin);
            for (ptrdiff_t key = 0; key < count; key += LANES)
                score(queries[i].query, keys_at + key, dim, a->scale, scores[i] + key);
            if (count > 0) factors[i] = exponentials(scores[i], count, queries + i);
        }
        for (ptrdiff_t d = 0, width; d < dim; d += width * LANES) {
            width = dim - d >= WIDTH * LANES ? WIDTH : dim - d >= WIDTH / 2 * LANES ? WIDTH / 2 : 1;
            for (ptrdiff_t i = 0; i < number; i++) {
                ptrdiff_t count = smaller(found, queries[i].count - begin);
                if (count <= 0) continue;
                float *out = queries[i].out + d;
                switch (width) {
                case WIDTH: add_values(out, factors[i], scores[i], values_at, count, WIDTH); break;
                case WIDTH / 2: add_values(out, factors[i], scores[i], values_at, count, WIDTH / 2); break;
                default: add_values(out, factors[i], scores[i], values_at, count, 1);
                }
            }
            for (ptrdiff_t key = 0; key < found; key++) values_at[key] += width * LANES;
        }
    }
    for (ptrdiff_t i = 0; i < number; i++)
        for (ptrdiff_t d = 0; d < (queries[i].count > 0 ? dim : 0); d += LANES) {
            float *out = queries[i].out + d;
            _mm256_storeu_ps(out, _mm256_div_ps(_mm256_loadu_ps(out), _mm256_set1_ps(queries[i].total)));
        }
}

static ptrdiff_t tiles_of(const Attention *a) { return (a->window + a->tile_tokens - 1) / a->tile_tokens; }

static void attend_share(void *given) {
    const Attention *a = given;
    ptrdiff_t tiles = tiles_of(a);
    for (ptrdiff_t task = thread_number(); task < a->rows * tiles * a->kv_heads; task += number_of_threads())
        attend(a, task / a->kv_heads / tiles, task / a->kv_heads % tiles * a->tile_tokens, task % a->kv_heads);
}

/* group: at most TILE_QUERIES. */
void attention(const float *query, ptrdiff_t token_stride, ptrdiff_t head_stride, const float *keys, const float *values,
               const int64_t *table, ptrdiff_t table_stride, ptrdiff_t max_blocks, const int64_t *starts, float *out,
               ptrdiff_t rows, ptrdiff_t window, ptrdiff_t kv_heads, ptrdiff_t group, ptrdiff_t dim, ptrdiff_t block_size,
               ptrdiff_t first_position, float scale, int threads) {
    ptrdiff_t most = 0;
    for (ptrdiff_t row = 0; row < rows; row++) most = starts[row] + window > most ? starts[row] + window : most;
    Attention a = {query, token_stride, head_stride, keys, values, table, table_stride, max_blocks, starts, out,
                   rows, window, kv_heads, group, dim, block_size, first_position, TILE_QUERIES / group, scale};
    /* Few tokens have smaller tiles, so that every thread gets some. */
    while (a.tile_tokens > 1 && rows * tiles_of(&a) * kv_heads < 2 * threads) a.tile_tokens = (a.tile_tokens + 1) / 2;
    run(attend_share, &a, rows * window * most * kv_heads * group < 4096 ? 1 : threads);
}

/* Rotates dimension i of each head with dimension i + rotary_dim / 2, in place. */
static void turn(float *heads, ptrdiff_t head_stride, ptrdiff_t count, const float *cosines, ptrdiff_t half) {
    const float *sines = cosines + half;
    for (ptrdiff_t head = 0; head < count; head++, heads += head_stride)
        for (ptrdiff_t i = 0; i < half; i++) {
            float first = heads[i], second = heads[i + half];
            heads[i] = first * cosines[i] - second * sines[i];
            heads[i + half] = second * cosines[i] + first * sines[i];
        }
}

/* Rotates queries and keys and writes keys and values to their slots of the cache; slot -1: not written. */
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
