#include "rows.h"
#include <string.h>

/* Reading descriptions. A cursor that ran over its end stays there, and `bad` says so: looked at once, at the end. */
typedef struct { const unsigned char *at, *end; int bad; } cursor;

static uint32_t byte(cursor *c) {
    if (c->at < c->end) return *c->at++;
    c->bad = 1;
    return 0;
}

static void expect(cursor *c, const char *bytes, uint32_t n) {
    if ((uint64_t)(c->end - c->at) < n || memcmp(c->at, bytes, n)) c->bad = 1;
    else c->at += n;
}

static uint64_t big_endian(cursor *c, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | byte(c);
    return value;
}

static uint64_t unsigned_integer(cursor *c) {
    uint32_t tag = byte(c);
    if (tag < 0x80) return tag;
    if (tag >= 0xcc && tag <= 0xce) return big_endian(c, 1 << (tag - 0xcc));
    c->bad = 1; /* no extent has 64 bits */
    return 0;
}

/* Bytes of an extension of type 1, which is an array's description inside of a document (payload/arrays.py: ARRAY). */
static uint64_t extension(cursor *c) {
    uint32_t tag = byte(c);
    uint64_t bytes = tag >= 0xd4 && tag <= 0xd8 ? 1u << (tag - 0xd4) : tag == 0xc7 ? byte(c) : (c->bad = 1, 0);
    if (byte(c) != 1) c->bad = 1;
    return bytes;
}

/* A field's description: array(dtype, array of extents, in Fortran order?). -> bytes of its elements; extents: those of named dimensions, 0 while unknown. */
static uint64_t description(cursor *c, const gw_rows *what, const gw_field *field, uint32_t *extents) {
    uint64_t bytes = field->itemsize;
    if (byte(c) != 0x93) c->bad = 1;
    expect(c, field->dtype, field->dtype_bytes);
    if (byte(c) != (0x90 | field->ndim)) c->bad = 1;
    for (uint32_t k = 0; k < field->ndim; k++) {
        uint64_t extent = unsigned_integer(c);
        int64_t wanted = field->shape[k];
        if (wanted >= 0) {
            if (extent != (uint64_t)wanted) c->bad = 1;
        } else {
            uint32_t *named = &extents[-1 - wanted], most = what->most[-1 - wanted];
            if (!extent || (most && extent > most) || (*named && *named != extent)) c->bad = 1;
            *named = (uint32_t)extent;
        }
        if (__builtin_mul_overflow(bytes, extent, &bytes)) c->bad = 1;
    }
    if (byte(c) != 0xc2) c->bad = 1; /* in C order */
    return bytes;
}

/* Whether all integers are in range. Negative ones are large as unsigned ones. What a hostile client changes after this look, its own request suffers for. */
static int all_below(const char *at, uint64_t bytes, uint32_t itemsize, uint64_t below) {
    uint64_t largest = 0;
    for (uint64_t k = 0; k < bytes; k += itemsize) {
        uint64_t value = 0;
        memcpy(&value, at + k, itemsize); /* little endian, as all that we run on */
        largest = value > largest ? value : largest;
    }
    return largest < below;
}

static int read_row(const gw_port *port, const gw_rows *what, uint64_t ticket, uint64_t request, gw_row *row) {
    uint64_t total = gw_total_of(request), at = gw_align(gw_meta_of(request));
    const char *area = gw_request_area(port, gw_slot_of((int64_t)ticket));
    if (request == UINT64_MAX || gw_kind_of(request) != (what->is_tree ? GW_KIND_TREE : GW_KIND_ARRAY)) return 0;
    /* Copied once: a hostile client may still be writing it. */
    unsigned char meta[1024];
    uint32_t meta_bytes = gw_meta_of(request);
    if (meta_bytes > sizeof meta || total > port->request_bytes || meta_bytes > total) return 0;
    memcpy(meta, area, meta_bytes);
    cursor c = {meta, meta + meta_bytes, 0};
    memset(row->extents, 0, sizeof row->extents);
    if (what->is_tree && byte(&c) != (0x80 | what->count)) return 0;
    for (uint32_t f = 0; f < what->count && !c.bad; f++) {
        const gw_field *field = &what->field[f];
        const unsigned char *end = NULL;
        if (what->is_tree) {
            expect(&c, field->key, field->key_bytes);
            uint64_t bytes = extension(&c);
            end = c.at + bytes;
        }
        uint64_t bytes = description(&c, what, field, row->extents);
        if (end && c.at != end) c.bad = 1;
        if (at > total || bytes > total - at) c.bad = 1;
        row->source[f] = area + at;
        if (field->below && !c.bad && !all_below(area + at, bytes, field->itemsize, field->below)) c.bad = 1;
        at = gw_align(at + bytes);
    }
    return !c.bad && c.at == c.end;
}

int gw_read_rows(const gw_port *port, gw_rows *what, const uint64_t *taken, int n, gw_row *rows, int *odd) {
    int odds = 0;
    memset(what->largest, 0, sizeof what->largest);
    what->cells = 0;
    for (int i = 0; i < n; i++) {
        if (!read_row(port, what, taken[2 * i], taken[2 * i + 1], &rows[i])) {
            odd[odds++] = i;
            continue;
        }
        uint64_t cells = 1;
        for (uint32_t d = 0; d < what->dims; d++) {
            uint32_t extent = rows[i].extents[d];
            if (what->largest[d] < extent) what->largest[d] = extent;
            cells *= extent;
        }
        what->cells += cells;
    }
    return odds;
}

static void fill(char *into, uint64_t bytes, const char *pad, uint32_t itemsize) {
    uint32_t k = 1;
    while (k < itemsize && pad[k] == pad[0]) k++;
    if (k == itemsize) {
        memset(into, pad[0], bytes);
        return;
    }
    uint64_t done = itemsize < bytes ? itemsize : bytes;
    memcpy(into, pad, done);
    for (; done < bytes; done *= 2) memcpy(into + done, into, done < bytes - done ? done : bytes - done); /* what is filled fills as much again */
}

/* A field's extents in a request and in the padded batch, and how many of the trailing dimensions lie in one piece in both. */
typedef struct { uint32_t ndim; uint64_t itemsize, own[GW_ROW_DIMS], padded[GW_ROW_DIMS], row_bytes; } block;

static uint64_t extent_of(int64_t extent, const uint32_t *named) { return extent >= 0 ? (uint64_t)extent : named[-1 - extent]; }

static block block_of(const gw_field *field, const uint32_t *own, const uint32_t *padded) {
    block b = {.ndim = field->ndim, .itemsize = field->itemsize, .row_bytes = field->itemsize};
    for (uint32_t k = 0; k < field->ndim; k++) {
        b.own[k] = extent_of(field->shape[k], own);
        b.padded[k] = extent_of(field->shape[k], padded);
        b.row_bytes *= b.padded[k];
    }
    while (b.ndim && b.own[b.ndim - 1] == b.padded[b.ndim - 1]) b.itemsize *= b.own[--b.ndim];
    return b;
}

/* Copies what a request has of dimensions k.. into the padded block at `into`, and fills the rest. -> where the request goes on. */
static const char *spread(const block *b, uint32_t k, char *into, const char *from, const gw_field *field) {
    uint64_t stride = b->itemsize;
    for (uint32_t d = k + 1; d < b->ndim; d++) stride *= b->padded[d];
    if (k == b->ndim) {
        memcpy(into, from, b->itemsize);
        return from + b->itemsize;
    }
    if (k + 1 == b->ndim) {
        memcpy(into, from, b->own[k] * stride);
        from += b->own[k] * stride;
    } else {
        for (uint64_t i = 0; i < b->own[k]; i++) from = spread(b, k + 1, into + i * stride, from, field);
    }
    fill(into + b->own[k] * stride, (b->padded[k] - b->own[k]) * stride, field->pad, field->itemsize);
    return from;
}

/* The inverse: copies out what is not padding. */
static char *pick(const block *b, uint32_t k, char *into, const char *from) {
    uint64_t stride = b->itemsize;
    for (uint32_t d = k + 1; d < b->ndim; d++) stride *= b->padded[d];
    if (k >= b->ndim || k + 1 == b->ndim) {
        uint64_t bytes = k >= b->ndim ? b->itemsize : b->own[k] * stride;
        memcpy(into, from, bytes);
        return into + bytes;
    }
    for (uint64_t i = 0; i < b->own[k]; i++) into = pick(b, k + 1, into, from + i * stride);
    return into;
}

static void count(const gw_field *field, const gw_rows *into, uint64_t row, uint64_t own) {
    uint64_t padded = field->mask ? into->extents[field->counted] : 0;
    for (uint64_t i = 0; i < padded; i++) field->mask[row * padded + i] = i < own;
    if (field->lengths) field->lengths[row] = (int64_t)own;
}

void gw_gather(const gw_rows *into, const gw_row *rows, int n) {
    for (uint32_t f = 0; f < into->count; f++) {
        const gw_field *field = &into->field[f];
        uint64_t row_bytes = block_of(field, into->extents, into->extents).row_bytes;
        for (int i = 0; i < n; i++) {
            block b = block_of(field, rows[i].extents, into->extents);
            spread(&b, 0, field->batch + (uint64_t)i * row_bytes, rows[i].source[f], field);
            count(field, into, (uint64_t)i, rows[i].extents[field->counted]);
        }
        if (into->rows <= (uint64_t)n) continue;
        fill(field->batch + (uint64_t)n * row_bytes, (into->rows - (uint64_t)n) * row_bytes, field->pad, field->itemsize);
        for (uint64_t i = (uint64_t)n; i < into->rows; i++) count(field, into, i, 1); /* one element long: a model that divides by a length finds none of 0 */
    }
}

/* Writing descriptions. The caller has seen to it that they fit. */
static unsigned char *write_extent(unsigned char *out, uint64_t extent) {
    int bytes = extent < 0x80 ? 0 : extent <= 0xff ? 1 : extent <= 0xffff ? 2 : 4;
    if (bytes) *out++ = (unsigned char)(bytes == 1 ? 0xcc : bytes == 2 ? 0xcd : 0xce);
    else *out++ = (unsigned char)extent;
    while (bytes--) *out++ = (unsigned char)(extent >> (8 * bytes));
    return out;
}

static unsigned char *write_description(unsigned char *out, const gw_field *field, const uint32_t *extents) {
    *out++ = 0x93;
    memcpy(out, field->dtype, field->dtype_bytes);
    out += field->dtype_bytes;
    *out++ = (unsigned char)(0x90 | field->ndim);
    for (uint32_t k = 0; k < field->ndim; k++) out = write_extent(out, extent_of(field->shape[k], extents));
    *out++ = 0xc2;
    return out;
}

static uint32_t write_meta(unsigned char *meta, const gw_rows *from, const uint32_t *extents) {
    unsigned char *out = meta;
    if (from->is_tree) *out++ = (unsigned char)(0x80 | from->count);
    for (uint32_t f = 0; f < from->count; f++) {
        const gw_field *field = &from->field[f];
        if (!from->is_tree) return (uint32_t)(write_description(out, field, extents) - meta);
        memcpy(out, field->key, field->key_bytes);
        out += field->key_bytes;
        unsigned char *head = out;
        out = write_description(out + 3, field, extents);
        head[0] = 0xc7;
        head[1] = (unsigned char)(out - head - 3);
        head[2] = 1;
    }
    return (uint32_t)(out - meta);
}

int gw_scatter(gw_port *port, const gw_rows *from, const gw_row *rows, const uint64_t *taken, int n, int *odd) {
    unsigned char meta[GW_ROW_ARRAYS * 320];
    int odds = 0;
    for (int i = 0; i < n; i++) {
        int64_t ticket = (int64_t)taken[2 * i];
        gw_slot *slot = gw_slot_at(port, ticket);
        if (!slot || !gw_is_taken(slot, ticket)) continue; /* nobody is left to answer, or somebody scribbled over the word */
        uint32_t meta_bytes = write_meta(meta, from, rows[i].extents);
        block blocks[GW_ROW_ARRAYS];
        uint64_t total = gw_align(meta_bytes), starts[GW_ROW_ARRAYS];
        for (uint32_t f = 0; f < from->count; f++) {
            blocks[f] = block_of(&from->field[f], rows[i].extents, from->extents);
            uint64_t bytes = from->field[f].itemsize;
            for (uint32_t k = 0; k < from->field[f].ndim; k++) bytes *= blocks[f].own[k];
            starts[f] = gw_align(total);
            total = starts[f] + bytes;
        }
        if (total > port->response_bytes) {
            odd[odds++] = i;
            continue;
        }
        char *area = gw_response_area(port, gw_slot_of(ticket));
        memcpy(area, meta, meta_bytes);
        for (uint32_t f = 0; f < from->count; f++) pick(&blocks[f], 0, area + starts[f], from->field[f].batch + (uint64_t)i * blocks[f].row_bytes);
        slot->response = gw_describe(from->is_tree ? GW_KIND_TREE : GW_KIND_ARRAY, meta_bytes, total);
    }
    return odds;
}
