/* Attention of decode rows on a CPU, straight from the blocks: nothing is copied together first, and no slot behind a row's end is read. Each key is read once for
 * all queries that share it. What a row gets depends on the row alone, bit for bit, whatever its batch-mates, the width of the table and the number of threads.
 *
 * Threads are those of the OpenMP runtime that the caller's tensor library has, so that there are never more of them than it was told. What they share: the
 * description, which nobody writes while they run, and the counter from which each takes the next piece of work. Pieces write to different parts of the output,
 * and the end of the parallel region is what makes them visible to the caller. So the counter needs no order.
 */
#include "paged_decode.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define GROUP 4                  /* queries that are computed together: their sums fit into registers */
#define SCRATCH 4096             /* floats of all queries, and as many of all sums, of what one thread is at: they stay in the nearest caches */
#define ALONE_BYTES (192 << 10) /* of keys and values: what is read in less time than other threads take to begin */

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(I, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE /* gcc before 12 */
#define SHUFFLE(I, a, b, ...) __builtin_shuffle(a, b, (I){__VA_ARGS__})
#endif

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#define LANES 4 /* SSE2, NEON, or whatever the compiler makes of it */
#define TARGET
#include "paged_decode_lanes.h"
#ifdef __x86_64__
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include "paged_decode_lanes.h"
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#include "paged_decode_lanes.h"
#endif

typedef void heads_fn(const gw_decode *, int64_t row, int64_t first, int64_t count);

typedef struct {
    const gw_decode *what;
    heads_fn *heads;
    int64_t share, shares; /* queries' heads of a piece of work, and pieces of a row */
    _Atomic int64_t next;  /* row * shares + which of them */
} gw_job;

/* How many floats this processor computes at once for such widths, at most 4, 8 or 16 as at_most says; 0: it cannot do such widths. */
int gw_decode_lanes(int64_t key_width, int64_t value_width, uint32_t element_bytes, uint32_t at_most) {
    if (key_width < 1 || value_width < 1 || key_width > GW_DECODE_MAX_WIDTH || value_width > GW_DECODE_MAX_WIDTH) return 0;
    if (element_bytes != GW_DECODE_BF16 && element_bytes != GW_DECODE_FP32) return 0;
    const int64_t both = key_width | value_width;
#ifdef __x86_64__
    if (both % 32 == 0 && at_most >= 16 && __builtin_cpu_supports("avx512f")) return 16;
    if (both % 16 == 0 && at_most >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 8;
#endif
    return both % 8 == 0 && at_most >= 4 ? 4 : 0;
}

static void work(void *data) {
    gw_job *job = data;
    const gw_decode *d = job->what;
    for (;;) {
        const int64_t piece = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (piece >= d->rows * job->shares) return;
        const int64_t first = piece % job->shares * job->share, left = d->heads - first;
        job->heads(d, piece / job->shares, first, left < job->share ? left : job->share);
    }
}

/* -> 0; -1: a number of a block or a length that cannot be, found before anything is read; -2: widths or a dtype that gw_decode_lanes has 0 for. */
int gw_paged_decode(const gw_decode *d) {
    const int lanes = gw_decode_lanes(d->key_width, d->value_width, d->element_bytes, d->most_lanes);
    if (!lanes || d->key_heads < 1 || d->heads < 1 || d->heads % d->key_heads || d->block_tokens < 1) return -2;
    int64_t seen = 0;
    for (int64_t row = 0; row < d->rows; row++) {
        const int64_t length = d->lengths[row], *table = d->table + row * d->table_width;
        if (length < 1 || (length - 1) / d->block_tokens >= d->table_width) return -1;
        for (int64_t i = 0; i <= (length - 1) / d->block_tokens; i++)
            if (table[i] < 0 || table[i] >= d->block_count) return -1;
        seen += d->window > 0 && d->window < length ? d->window : length;
    }
    gw_job job = {.what = d, .heads = heads_4};
#ifdef __x86_64__
    if (lanes == 8) job.heads = heads_8;
    if (lanes == 16) job.heads = heads_16;
#endif
    atomic_init(&job.next, 0);
    const int64_t widest = d->key_width > d->value_width ? d->key_width : d->value_width, group = d->heads / d->key_heads;
    const int is_much = seen * d->key_heads * (d->key_width + d->value_width) * d->element_bytes > ALONE_BYTES;
    const uint32_t threads = d->parallel && is_much ? d->threads : 1;
    job.share = SCRATCH / widest; /* of a row; with few rows for many threads, of one head of keys */
    if (threads > 1 && d->rows < 4 * (int64_t)threads) job.share = job.share < group ? job.share : group;
    if (job.share > group) job.share -= job.share % group;
    job.shares = (d->heads + job.share - 1) / job.share;
    if (threads > 1)
        d->parallel(work, &job, threads, 0);
    else
        work(&job);
    return 0;
}

/* Puts keys and values into their slots. -> 0; -1: a slot that there is not, found before anything is written. */
int gw_paged_write(const gw_decode *d) {
    const int64_t width = d->key_width + d->value_width, bytes = d->element_bytes;
    for (int64_t t = 0; t < d->tokens; t++)
        if (d->slots[t] < 0 || d->slots[t] >= d->block_count * d->block_tokens) return -1;
    for (int64_t t = 0; t < d->tokens; t++)
        for (int64_t head = 0; head < d->key_heads; head++) {
            char *into = (char *)d->blocks + (d->slots[t] * d->key_heads + head) * width * bytes;
            memcpy(into, (const char *)d->key + (t * d->key_token + head * d->key_head) * bytes, (size_t)(d->key_width * bytes));
            memcpy(into + d->key_width * bytes, (const char *)d->value + (t * d->value_token + head * d->value_head) * bytes, (size_t)(d->value_width * bytes));
        }
    return 0;
}
