/* Requests of a batch as rows of padded arrays, and rows of arrays as responses: one call for a whole batch each way. The descriptions of arrays are those of
 * gpuworker/payload (arrays.py, tree.py): msgpack, written by clients that nobody trusts. */
#ifndef GPUWORKER_ROWS_H
#define GPUWORKER_ROWS_H
#include "ring.h"

#define GW_ROW_ARRAYS 8
#define GW_ROW_DIMS 8

/* One array that every request (or response) has. A negative extent -1 - d stands for named dimension d. */
typedef struct gw_field {
    const char *key;              /* its name in a request of several arrays; the description of its dtype as msgpack */
    uint32_t key_bytes;
    const char *dtype;
    uint32_t dtype_bytes;
    uint32_t ndim, itemsize;
    int64_t shape[GW_ROW_DIMS];
    char *batch;                  /* [rows, ...], padded, C order */
    char pad[16];                 /* one padding element: `itemsize` bytes */
    int64_t *mask, *lengths;      /* [rows, extent] of 1 and 0, and [rows], over named dimension `counted`; NULL where not wanted */
    uint32_t counted;
    uint64_t below;               /* integers of it go from 0 to below - 1; 0 = any values */
} gw_field;

/* What all requests of a handler look like. A batch is `rows` long with named dimensions of extents[]; most[]: the largest that a request may have, 0 = any. */
typedef struct gw_rows {
    uint32_t count, dims;         /* fields; named dimensions */
    int is_tree;                  /* a request is a dict of its fields in this order, not the one array itself */
    uint64_t rows;
    uint32_t extents[GW_ROW_DIMS], most[GW_ROW_DIMS];
    uint32_t largest[GW_ROW_DIMS]; /* by gw_read_rows: of the requests that it has read, the odd ones left out; and their elements, by named dimensions alone */
    uint64_t cells;
    gw_field field[GW_ROW_ARRAYS];
} gw_rows;

/* One request: where the elements of each field lie, and its named extents. Private to the owner: checked once, then used, whatever the slot says by then. */
typedef struct gw_row {
    const char *source[GW_ROW_ARRAYS];
    uint32_t extents[GW_ROW_DIMS];
} gw_row;

/* Reads `n` requests, taken as gw_take says, into rows. odd[0..result): indices of those that are no such request as plainly as most are, which is for others to
 * look at and put into their rows, or to refuse. */
int gw_read_rows(const gw_port *port, gw_rows *what, const uint64_t *taken, int n, gw_row *rows, int *odd);

/* Fills the batch: row i from rows[i] for i < n, and padding in all else. */
void gw_gather(const gw_rows *into, const gw_row *rows, int n);

/* Writes row i of the fields' batch, cut to the extents of rows[i], as the response to request i. odd[0..result): those that do not fit a response area. */
int gw_scatter(gw_port *port, const gw_rows *from, const gw_row *rows, const uint64_t *taken, int n, int *odd);
#endif
