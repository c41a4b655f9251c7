/* Quantised GEMM on an x86 CPU with weights of 4 or 8 bits in groups: see _integer_cpu_linear.py, which compiles
 * and calls this. Compile with -ffp-contract=off: multiplications and additions must be rounded separately, or
 * the bits would depend on the compiler.
 *
 * A tile holds 8 outputs, one in each lane of a vector. For each group of 32 inputs it has, one after the
 * other, 8 scales and, of 4 bits, 8 minimums in float16, then the codes. Codes of 8 bits: 8 vectors, vector k
 * has inputs 4 k to 4 k + 3 of output 0, of output 1, ... Codes of 4 bits: 4 vectors of such vectors 2 k (low
 * halves of the bytes) and 2 k + 1 (high halves).
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_library.h"

enum { GROUP = 32, OUTPUTS = 8, VECTORS = 8, VECTOR_BYTES = 32, HALVES_BYTES = 16, ROWS_AT_ONCE = 4 };

/* A row's group of inputs: the values are scale * codes, and `sum` is their sum. */
typedef struct {
    float scale, sum;
    int8_t codes[GROUP];
} Inputs;

/* The epilogue, row by row: the bias; then either silu of the first half times the second half, written to
 * `result` [rows, num_outputs / 2], or the residual addition and its norm, written to `result` [rows,
 * num_outputs]. */
typedef struct {
    const float *bias; /* [num_outputs]; NULL: none */
    float *result;     /* NULL: the product is all */
    float *residual;   /* [rows, num_outputs]; NULL: a gate */
    const float *norm_weight; /* [num_outputs] */
    float epsilon, offset;    /* offset: added to the weight */
} Epilogue;

typedef struct {
    const float *x;
    ptrdiff_t rows, num_inputs, x_stride, num_outputs;
    const uint8_t *tiles;
    float *out;
    int bits;
    Inputs *inputs; /* [rows, groups] */
    const Epilogue *epilogue;
} Product;

/* Returns the bytes of a group of a tile. */
static ptrdiff_t group_bytes(int bits) {
    return bits == 4 ? 2 * HALVES_BYTES + VECTORS / 2 * VECTOR_BYTES : HALVES_BYTES + VECTORS * VECTOR_BYTES;
}

static ptrdiff_t groups_of(const Product *p) { return (p->num_inputs + GROUP - 1) / GROUP; }

/* Computes the share of the calling thread. The runtime may start fewer threads than requested. */
static void share_of(ptrdiff_t count, ptrdiff_t *first, ptrdiff_t *last) {
    ptrdiff_t number = thread_number(), threads = number_of_threads();
    *first = count * number / threads;
    *last = count * (number + 1) / threads;
}

/* The largest absolute value becomes 127; a group of values below 1e-30 becomes zeros. A group with an
 * infinity or a NaN gets a scale of NaN, and so do all outputs of its row. */
static void round_group(const float *x, ptrdiff_t count, Inputs *to) {
    float values[GROUP] = {0};
    uint32_t bits[GROUP], largest_bits = 0;
    memcpy(values, x, (size_t)count * sizeof(float));
    memcpy(bits, values, sizeof bits);
    for (int i = 0; i < GROUP; i++) {
        uint32_t absolute = bits[i] & 0x7fffffff; /* grows with the absolute value, and NaN is above all */
        largest_bits = absolute > largest_bits ? absolute : largest_bits;
    }
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    int is_finite = largest_bits < 0x7f800000, is_rounded = is_finite && largest >= 1e-30f;
    float inverse = is_rounded ? 127 / largest : 0;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) {
        float shifted = (is_rounded ? values[i] : 0) * inverse + 0x1.8p23f; /* rounds half to even */
        int32_t code;
        memcpy(&code, &shifted, sizeof code);
        code -= 0x4b400000;
        to->codes[i] = (int8_t)code;
        sum += code;
    }
    to->scale = is_rounded ? largest / 127 : is_finite ? 0 : NAN;
    to->sum = to->scale * (float)sum;
}

/* Adds to each of 8 sums the products of 4 pairs; weights are not negative. */
static inline __m256i add_products(__m256i sums, __m256i weights, __m256i inputs) {
#ifdef __AVX512VNNI__
    return _mm256_dpbusd_epi32(sums, weights, inputs);
#else
    __m256i pairs = _mm256_maddubs_epi16(weights, inputs);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

static inline __m256i four_inputs(const Inputs *inputs, int vector) {
    int32_t four;
    memcpy(&four, inputs->codes + 4 * vector, sizeof four);
    return _mm256_set1_epi32(four);
}

static inline __m256 halves(const uint8_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}

static inline __m256 scaled(__m256i sums, __m256 weight_scales, const Inputs *inputs) {
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), weight_scales), _mm256_set1_ps(inputs->scale));
}

/* `rows` is constant where this is called, so that sums are in registers. */
static inline __attribute__((always_inline)) const uint8_t *add_group_of_4_bits(
    __m256 *sums, const uint8_t *tile, const Inputs *const *inputs, const int rows) {
    __m256 scales = halves(tile), minimums = halves(tile + HALVES_BYTES);
    __m256i within[ROWS_AT_ONCE];
    for (int row = 0; row < rows; row++) within[row] = _mm256_setzero_si256();
    tile += 2 * HALVES_BYTES;
    for (int vector = 0; vector < VECTORS; vector += 2, tile += VECTOR_BYTES) {
        __m256i both = _mm256_loadu_si256((const __m256i *)tile), mask = _mm256_set1_epi8(15);
        __m256i low = _mm256_and_si256(both, mask), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
        for (int row = 0; row < rows; row++) {
            __m256i first = four_inputs(inputs[row], vector), second = four_inputs(inputs[row], vector + 1);
#ifdef __AVX512VNNI__
            within[row] = add_products(add_products(within[row], low, first), high, second);
#else /* 16 bits hold 16 products of at most 15 * 127 */
            __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second));
            within[row] = _mm256_add_epi16(within[row], pairs);
#endif
        }
    }
    for (int row = 0; row < rows; row++) {
#ifndef __AVX512VNNI__
        within[row] = _mm256_madd_epi16(within[row], _mm256_set1_epi16(1));
#endif
        sums[row] = _mm256_add_ps(sums[row], scaled(within[row], scales, inputs[row]));
        sums[row] = _mm256_add_ps(sums[row], _mm256_mul_ps(minimums, _mm256_set1_ps(inputs[row]->sum)));
    }
    return tile;
}

static inline __attribute__((always_inline)) const uint8_t *add_group_of_8_bits(
    __m256 *sums, const uint8_t *tile, const Inputs *const *inputs, const int rows) {
    __m256 scales = halves(tile);
    __m256i within[ROWS_AT_ONCE];
    for (int row = 0; row < rows; row++) within[row] = _mm256_setzero_si256();
    tile += HALVES_BYTES;
    for (int vector = 0; vector < VECTORS; vector++, tile += VECTOR_BYTES) {
        __m256i codes = _mm256_loadu_si256((const __m256i *)tile), absolute = _mm256_abs_epi8(codes);
        for (int row = 0; row < rows; row++) {
            __m256i signed_inputs = _mm256_sign_epi8(four_inputs(inputs[row], vector), codes);
            within[row] = add_products(within[row], absolute, signed_inputs);
        }
    }
    for (int row = 0; row < rows; row++)
        sums[row] = _mm256_add_ps(sums[row], scaled(within[row], scales, inputs[row]));
    return tile;
}

static inline __attribute__((always_inline)) const uint8_t *multiply_rows(
    const Product *p, const uint8_t *tile, ptrdiff_t first_output, ptrdiff_t first_row, const int rows, const int bits) {
    const Inputs *inputs[ROWS_AT_ONCE];
    __m256 sums[ROWS_AT_ONCE];
    for (int row = 0; row < rows; row++) {
        inputs[row] = p->inputs + (first_row + row) * groups_of(p);
        sums[row] = _mm256_setzero_ps();
    }
    for (ptrdiff_t group = groups_of(p); group > 0; group--) {
        tile = bits == 4 ? add_group_of_4_bits(sums, tile, inputs, rows) : add_group_of_8_bits(sums, tile, inputs, rows);
        for (int row = 0; row < rows; row++) inputs[row]++;
    }
    ptrdiff_t count = p->num_outputs - first_output < OUTPUTS ? p->num_outputs - first_output : OUTPUTS;
    for (int row = 0; row < rows; row++) {
        float eight[OUTPUTS];
        _mm256_storeu_ps(eight, sums[row]);
        memcpy(p->out + (first_row + row) * p->num_outputs + first_output, eight, (size_t)count * sizeof(float));
    }
    return tile;
}

static inline __attribute__((always_inline)) void multiply_tiles(
    const Product *p, ptrdiff_t first_tile, ptrdiff_t last_tile, const int bits) {
    ptrdiff_t tile_bytes = groups_of(p) * group_bytes(bits);
    for (ptrdiff_t index = first_tile; index < last_tile; index++) {
        const uint8_t *tile = p->tiles + index * tile_bytes;
        ptrdiff_t row = 0, output = index * OUTPUTS;
        for (; row + 4 <= p->rows; row += 4) multiply_rows(p, tile, output, row, 4, bits);
        switch (p->rows - row) {
        case 3: multiply_rows(p, tile, output, row, 3, bits); break;
        case 2: multiply_rows(p, tile, output, row, 2, bits); break;
        case 1: multiply_rows(p, tile, output, row, 1, bits); break;
        }
    }
}

static void multiply_share(void *given) {
    const Product *p = given;
    ptrdiff_t first, last;
    share_of((p->num_outputs + OUTPUTS - 1) / OUTPUTS, &first, &last);
    if (p->bits == 4)
        multiply_tiles(p, first, last, 4);
    else
        multiply_tiles(p, first, last, 8);
}

static void round_share(void *given) {
    const Product *p = given;
    ptrdiff_t groups = groups_of(p), row, last;
    for (share_of(p->rows, &row, &last); row < last; row++)
        for (ptrdiff_t group = 0; group < groups; group++) {
            ptrdiff_t left = p->num_inputs - group * GROUP;
            round_group(p->x + row * p->x_stride + group * GROUP, left < GROUP ? left : GROUP, p->inputs + row * groups + group);
        }
}

static void multiply_gate(float *result, const float *gate, const float *up) {
    __m256 x = _mm256_loadu_ps(gate), sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1);
    __m256 e = exponential(_mm256_or_ps(x, sign)); /* of -|x| */
    __m256 factor = _mm256_blendv_ps(one, e, x);   /* silu(x) is x / (1 + e), or x e / (1 + e) if x < 0 */
    __m256 silu = _mm256_div_ps(_mm256_mul_ps(x, factor), _mm256_add_ps(one, e));
    _mm256_storeu_ps(result, _mm256_mul_ps(silu, _mm256_loadu_ps(up)));
}

static void gate_row(float *result, const float *product, ptrdiff_t count) {
    ptrdiff_t i = 0;
    for (; i + LANES <= count; i += LANES) multiply_gate(result + i, product + i, product + count + i);
    if (i < count) {
        float gate[LANES] = {0}, up[LANES] = {0}, last[LANES];
        size_t bytes = (size_t)(count - i) * sizeof(float);
        memcpy(gate, product + i, bytes);
        memcpy(up, product + count + i, bytes);
        multiply_gate(last, gate, up);
        memcpy(result + i, last, bytes);
    }
}

static void add_and_norm_row(const Epilogue *e, float *result, float *residual, const float *product, ptrdiff_t count) {
    __m256 squares = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < count; i++) residual[i] += product[i];
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        float own[LANES] = {0};
        memcpy(own, residual + i, (size_t)(count - i < LANES ? count - i : LANES) * sizeof(float));
        squares = _mm256_fmadd_ps(_mm256_loadu_ps(own), _mm256_loadu_ps(own), squares);
    }
    float factor = 1 / sqrtf(sum_of(squares) / (float)count + e->epsilon);
    for (ptrdiff_t i = 0; i < count; i++) result[i] = residual[i] * factor * (e->norm_weight[i] + e->offset);
}

static void finish_share(void *given) {
    const Product *p = given;
    const Epilogue *e = p->epilogue;
    ptrdiff_t row, last, count = p->num_outputs;
    for (share_of(p->rows, &row, &last); row < last; row++) {
        float *product = p->out + row * count;
        for (ptrdiff_t i = 0; e->bias != NULL && i < count; i++) product[i] += e->bias[i];
        if (e->result != NULL && e->residual != NULL)
            add_and_norm_row(e, e->result + row * count, e->residual + row * count, product, count);
        else if (e->result != NULL)
            gate_row(e->result + row * (count / 2), product, count / 2);
    }
}

/* Writes x W^T to out, [rows, num_outputs], and computes the epilogue. x: [rows, num_inputs], rows x_stride
 * apart. Returns 0, or 1 if there is no memory. */
int multiply(const float *x, ptrdiff_t rows, ptrdiff_t num_inputs, ptrdiff_t x_stride, const uint8_t *tiles,
             ptrdiff_t num_outputs, int bits, float *out, int threads, const float *bias, float *result,
             float *residual, const float *norm_weight, float epsilon, float offset) {
    Epilogue epilogue = {bias, result, residual, norm_weight, epsilon, offset};
    Product p = {x, rows, num_inputs, x_stride, num_outputs, tiles, out, bits, NULL, &epilogue};
    p.inputs = malloc((size_t)(rows * groups_of(&p)) * sizeof(Inputs));
    if (p.inputs == NULL) return 1;
    run(round_share, &p, rows < 4 * threads ? 1 : threads);
    run(multiply_share, &p, threads);
    if (bias != NULL || result != NULL) run(finish_share, &p, rows < 4 * threads ? 1 : threads);
    free(p.inputs);
    return 0;
}

typedef struct {
    const float *weight; /* [num_outputs, num_inputs] */
    ptrdiff_t num_outputs, num_inputs;
    int bits;
    uint8_t *tiles;
} Rounding;

static inline void round_output(const float *values, int bits, uint8_t *tile, int output) {
    __m256 parts[GROUP / LANES], least = _mm256_loadu_ps(values), largest = least, is_nan = _mm256_setzero_ps();
    for (int i = 0; i < GROUP / LANES; i++) {
        parts[i] = _mm256_loadu_ps(values + i * LANES);
        is_nan = _mm256_or_ps(is_nan, _mm256_cmp_ps(parts[i], parts[i], _CMP_UNORD_Q));
        least = _mm256_min_ps(least, parts[i]);
        largest = _mm256_max_ps(largest, parts[i]);
    }
    float low[LANES], high[LANES];
    _mm256_storeu_ps(low, least);
    _mm256_storeu_ps(high, largest);
    for (int lane = 1; lane < LANES; lane++) {
        low[0] = low[lane] < low[0] ? low[lane] : low[0];
        high[0] = high[lane] > high[0] ? high[lane] : high[0];
    }
    float whole = bits == 4 ? (high[0] - low[0]) / 15 : fmaxf(fabsf(low[0]), fabsf(high[0])) / 127;
    if (_mm256_movemask_ps(is_nan) != 0) whole = NAN; /* and so is each output */
    uint16_t scale = _cvtss_sh(whole, _MM_FROUND_TO_NEAREST_INT), minimum = 0;
    memcpy(tile + 2 * output, &scale, sizeof scale);
    if (bits == 4) {
        minimum = _cvtss_sh(low[0], _MM_FROUND_TO_NEAREST_INT);
        memcpy(tile + HALVES_BYTES + 2 * output, &minimum, sizeof minimum);
    }
    float step = _cvtsh_ss(scale);
    __m256 steps = _mm256_set1_ps(step == 0 ? INFINITY : step), shift = _mm256_set1_ps(_cvtsh_ss(minimum));
    __m256 first = _mm256_set1_ps(bits == 4 ? 0 : -127), last = _mm256_set1_ps(bits == 4 ? 15 : 127);
    int32_t codes[GROUP];
    for (int i = 0; i < GROUP / LANES; i++) {
        __m256 code = _mm256_div_ps(_mm256_sub_ps(parts[i], shift), steps);
        code = _mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        code = _mm256_min_ps(_mm256_max_ps(code, first), last);
        _mm256_storeu_si256((__m256i *)(codes + i * LANES), _mm256_cvtps_epi32(code));
    }
    uint8_t *to = tile + (bits == 4 ? 2 : 1) * HALVES_BYTES + 4 * output;
    for (int vector = 0; vector < VECTORS; vector += bits == 4 ? 2 : 1, to += VECTOR_BYTES)
        for (int i = 0; i < 4; i++) {
            int32_t code = codes[4 * vector + i];
            to[i] = (uint8_t)(bits == 4 ? code | codes[4 * vector + 4 + i] << 4 : code);
        }
}

static void round_tiles(void *given) {
    const Rounding *r = given;
    ptrdiff_t groups = (r->num_inputs + GROUP - 1) / GROUP, index, last;
    for (share_of((r->num_outputs + OUTPUTS - 1) / OUTPUTS, &index, &last); index < last; index++)
        for (ptrdiff_t group = 0; group < groups; group++) {
            uint8_t *tile = r->tiles + (index * groups + group) * group_bytes(r->bits);
            ptrdiff_t left = r->num_inputs - group * GROUP, count = left < GROUP ? left : GROUP;
            for (int output = 0; output < OUTPUTS; output++) {
                float values[GROUP] = {0};
                ptrdiff_t row = index * OUTPUTS + output;
                if (row < r->num_outputs)
                    memcpy(values, r->weight + row * r->num_inputs + group * GROUP, (size_t)count * sizeof(float));
                round_output(values, r->bits, tile, output);
            }
        }
}

/* Rounds a weight, [num_outputs, num_inputs], to the nearest codes. */
void round_weight(const float *weight, ptrdiff_t num_outputs, ptrdiff_t num_inputs, int bits, uint8_t *tiles, int threads) {
    Rounding r = {weight, num_outputs, num_inputs, bits, tiles};
    run(round_tiles, &r, num_outputs * num_inputs < 1 << 16 ? 1 : threads);
}
