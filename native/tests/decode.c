/* Attention of decode rows (paged_decode.c), in memory that ends where the cache, the table and the queries end, and on threads that start together: the sanitizers
 * see what reads too far, or is written by two. */
#define _GNU_SOURCE
#include "check.h"

#include "../paged_decode.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 5, BLOCKS = 40, LONGEST = 100, THREADS = 4 };

typedef struct {
    void (*run)(void *);
    void *data;
    pthread_barrier_t *start;
} part;

static int shared; /* calls that more than one thread has worked at */

static void *begin(void *data) {
    part *p = data;
    pthread_barrier_wait(p->start);
    p->run(p->data);
    return NULL;
}

static void parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags) {
    pthread_t others[THREADS];
    pthread_barrier_t start;
    part p = {run, data, &start};
    EQUAL(flags, 0);
    EQUAL(threads, THREADS);
    pthread_barrier_init(&start, NULL, threads);
    for (unsigned i = 1; i < threads; i++) EQUAL(pthread_create(&others[i], NULL, begin, &p), 0);
    begin(&p);
    for (unsigned i = 1; i < threads; i++) pthread_join(others[i], NULL);
    pthread_barrier_destroy(&start);
    shared++;
}

static double power_of_e(double x) { /* without libm */
    double sum = 1, term = 1;
    for (int i = 1; i < 16; i++) sum += term *= x / 1024 / i;
    for (int i = 0; i < 10; i++) sum *= sum;
    return sum;
}

static double value(const void *array, int64_t i, uint32_t bytes) {
    float found;
    if (bytes == GW_DECODE_FP32) return ((const float *)array)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)array)[i] << 16;
    memcpy(&found, &bits, sizeof found);
    return found;
}

static void *numbers(uint64_t *state, int64_t n, uint32_t bytes) { /* -1 to 1 */
    char *array = malloc((size_t)(n * bytes));
    for (int64_t i = 0; i < n; i++) {
        const float x = (float)below(state, 2001) / 1000 - 1;
        memcpy(array + i * bytes, (const char *)&x + 4 - bytes, bytes); /* the upper half is its bfloat16 */
    }
    return array;
}

/* One head of one row, as the definition has it, against what was found. */
static void compare(const gw_decode *d, int64_t row, int64_t h) {
    const int64_t width = d->key_width + d->value_width, end = d->lengths[row], first = d->window && d->window < end ? end - d->window : 0;
    double total = 0, sums[GW_DECODE_MAX_WIDTH] = {0};
    for (int64_t t = first; t < end; t++) {
        const int64_t slot = d->table[row * d->table_width + t / d->block_tokens] * d->block_tokens + t % d->block_tokens;
        const int64_t at = (slot * d->key_heads + h / (d->heads / d->key_heads)) * width;
        double score = 0;
        for (int64_t i = 0; i < d->key_width; i++)
            score += value(d->query, row * d->query_row + h * d->query_head + i, d->element_bytes) * value(d->blocks, at + i, d->element_bytes);
        const double weight = power_of_e(score * d->scale);
        total += weight;
        for (int64_t i = 0; i < d->value_width; i++) sums[i] += weight * value(d->blocks, at + d->key_width + i, d->element_bytes);
    }
    for (int64_t i = 0; i < d->value_width; i++) {
        const double error = sums[i] / total - value(d->output, (row * d->heads + h) * d->value_width + i, d->element_bytes);
        CHECK(error < 0.005 && error > -0.005);
    }
}

static void one(uint64_t *state, uint32_t bytes, uint32_t lanes, uint32_t threads) {
    static const int64_t widths[] = {8, 16, 32, 64, 96};
    int64_t *table = malloc(ROWS * (LONGEST / 8 + 1) * sizeof *table), *lengths = malloc(ROWS * sizeof *lengths);
    gw_decode d = {.block_count = BLOCKS, .block_tokens = 8 + below(state, 2) * 8, .key_heads = 1 + below(state, 3), .element_bytes = bytes, .rows = ROWS,
                   .table = table, .lengths = lengths, .table_width = LONGEST / 8 + 1, .window = below(state, 2) * (1 + below(state, LONGEST)),
                   .scale = 0.3f, .threads = threads, .most_lanes = lanes, .parallel = parallel};
    d.key_width = widths[below(state, 5)], d.value_width = widths[below(state, 5)], d.heads = d.key_heads * (1 + below(state, 6));
    d.query_head = d.key_width, d.query_row = d.heads * d.key_width;
    const int64_t all = BLOCKS * d.block_tokens * d.key_heads * (d.key_width + d.value_width);
    void *blocks = numbers(state, all, bytes), *query = numbers(state, ROWS * d.query_row, bytes), *output = malloc((size_t)(ROWS * d.heads * d.value_width * bytes));
    d.blocks = blocks, d.query = query, d.output = output;
    for (int64_t i = 0; i < ROWS * d.table_width; i++) table[i] = below(state, 8) ? below(state, BLOCKS) : BLOCKS - 1;
    for (int64_t i = 0; i < ROWS; i++) lengths[i] = 1 + below(state, LONGEST);
    EQUAL(gw_paged_decode(&d), 0);
    for (int64_t row = 0; row < ROWS; row++)
        for (int64_t h = 0; h < d.heads; h++) compare(&d, row, h);
    const int64_t was = table[0];
    for (int64_t wrong = -1; wrong <= BLOCKS; wrong += BLOCKS + 1) {
        table[0] = wrong;
        EQUAL(gw_paged_decode(&d), -1);
    }
    table[0] = was, lengths[ROWS - 1] = d.table_width * d.block_tokens + 1;
    EQUAL(gw_paged_decode(&d), -1);
    free(blocks), free(query), free(output), free(table), free(lengths);
}

int main(void) {
    uint64_t state = 1;
    for (int i = 0; i < 60; i++)
        for (uint32_t lanes = 4; lanes <= 16; lanes *= 2) one(&state, i % 2 ? GW_DECODE_BF16 : GW_DECODE_FP32, lanes, i % 3 ? THREADS : 1);
    CHECK(shared > 10);
    return 0;
}
