/* Shared by the C sources: see _cpu_library.py. The threads are those of the OpenMP runtime that PyTorch has
 * loaded. */
#include <immintrin.h>
#include <stddef.h>

enum { LANES = 8 };

typedef void (*Task)(void *);
static void (*start_threads)(Task, void *, unsigned, unsigned);
static int (*thread_number)(void), (*number_of_threads)(void);

/* Takes GOMP_parallel, omp_get_thread_num and omp_get_num_threads. */
void use_threads(void *start, void *number, void *count) {
    start_threads = (void (*)(Task, void *, unsigned, unsigned))start;
    thread_number = (int (*)(void))number;
    number_of_threads = (int (*)(void))count;
}

static void run(Task share, void *data, int threads) {
    if (threads > 1)
        start_threads(share, data, (unsigned)threads, 0);
    else
        share(data);
}

static inline float sum_of(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* exp(x) of x <= 0 as 2 ** n * p(r), where x = n ln 2 + r; about 2 units in the last place. Below -87: 0. */
static inline __m256 exponential(__m256 x) {
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693145752f), x); /* ln 2 in two parts */
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(1.42860677e-6f), r);
    __m256 p = _mm256_set1_ps(1.0f / 720);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    __m256 is_large = _mm256_cmp_ps(x, _mm256_set1_ps(-87), _CMP_NLT_UQ); /* true of NaN, which stays one */
    return _mm256_and_ps(is_large, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}
