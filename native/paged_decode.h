/* Attention of decode rows on a CPU: one new token of each of several sequences, over keys and values that stay where the paged cache has them. */
#ifndef GPUWORKER_PAGED_DECODE_H
#define GPUWORKER_PAGED_DECODE_H
#include <stdint.h>

#define GW_DECODE_MAX_WIDTH 512 /* of keys and of values, in elements */
#define GW_DECODE_BF16 2        /* `element_bytes`, which say the dtype, too */
#define GW_DECODE_FP32 4

/* How an OpenMP runtime begins a parallel region (GOMP_parallel of libgomp; libomp has it, too): runs work(data) on so many threads, the caller among them. */
typedef void gw_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Strides and widths are in elements, and no last dimension has a stride but 1. Pointers are aligned to elements, no more. */
typedef struct gw_decode {
    void *blocks;              /* [block_count, block_tokens, key_heads, key_width + value_width], contiguous */
    int64_t block_count, block_tokens, key_heads, key_width, value_width;
    uint32_t element_bytes;    /* of blocks, query, key, value and output: GW_DECODE_BF16 or GW_DECODE_FP32 */

    const void *key, *value;   /* [tokens, key_heads, width]: what gw_paged_write puts into slots[tokens] */
    int64_t key_token, key_head, value_token, value_head;
    const int64_t *slots;      /* slot s is in block s / block_tokens */
    int64_t tokens;

    const void *query;         /* [rows, heads, key_width]; heads is a multiple of key_heads */
    void *output;              /* [rows, heads, value_width], contiguous */
    int64_t rows, heads, query_row, query_head;
    const int64_t *table;      /* [rows, table_width]: numbers of each row's blocks */
    const int64_t *lengths;    /* [rows]: tokens that a row sees, 1 to table_width * block_tokens */
    int64_t table_width, window; /* window: only so many of the last ones; 0 = all */
    float scale;
    uint32_t threads, most_lanes; /* most_lanes: see gw_decode_lanes */
    gw_parallel *parallel;     /* NULL: on the caller's thread, whatever `threads` says */
} gw_decode;

int gw_paged_write(const gw_decode *what);
int gw_paged_decode(const gw_decode *what);
int gw_decode_lanes(int64_t key_width, int64_t value_width, uint32_t element_bytes, uint32_t at_most);
#endif
