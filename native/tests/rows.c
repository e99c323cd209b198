/* Rows against a plain reference, element by element; and descriptions that lie, also while they are read. What a row has no business with is fenced off (a
 * sanitizer watches), and every batch is as large as it has to be and no larger. */
#define _GNU_SOURCE
#include "../rows.h"
#include "check.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define FENCE(at, bytes) ASAN_POISON_MEMORY_REGION(at, bytes)
#define OPEN(at, bytes) ASAN_UNPOISON_MEMORY_REGION(at, bytes)
#else
#define FENCE(at, bytes) ((void)(at), (void)(bytes))
#define OPEN(at, bytes) ((void)(at), (void)(bytes))
#endif

enum { WORLDS = 2000, LIARS = 100, SCRIBBLED = 50000, MOST = 4, META = 1024, UNTOUCHED = 0xee };
static const struct { const char *packed; uint32_t itemsize; } dtypes[] = {{"\xa3|b1", 1}, {"\xa3<i2", 2}, {"\xa3<f4", 4}, {"\xa3<i8", 8}, {"\xa4<c16", 16}};
static uint64_t seed = 4;

/* A signature, and n requests of it in slots of their own: request, response, and a fence before and behind each. */
typedef struct {
    gw_port port;
    gw_rows what;
    gw_row rows[MOST];
    int n;
    char keys[GW_ROW_ARRAYS][3];
    uint32_t own[MOST][GW_ROW_DIMS];
    uint64_t taken[2 * MOST], batch_bytes[GW_ROW_ARRAYS];
} world;

static uint64_t extent_of(int64_t declared, const uint32_t *named) { return declared < 0 ? named[-1 - declared] : (uint64_t)declared; }

static uint64_t bytes_of(const gw_field *field, const uint32_t *named) {
    uint64_t bytes = field->itemsize;
    for (uint32_t k = 0; k < field->ndim; k++) bytes *= extent_of(field->shape[k], named);
    return bytes;
}

/* As msgpack writes it, or in more bytes than are needed. */
static unsigned char *put_extent(unsigned char *out, uint64_t extent, int spare) {
    int form = (extent < 0x80 ? 0 : extent <= 0xff ? 1 : extent <= 0xffff ? 2 : 3) + spare;
    if (form > 3) form = 3;
    if (form) *out++ = (unsigned char)(0xcb + form);
    for (int bytes = form ? 1 << (form - 1) : 1; bytes--;) *out++ = (unsigned char)(extent >> (8 * bytes));
    return out;
}

static uint32_t put_array(unsigned char *meta, const gw_field *field, const uint32_t *named, int spare) {
    unsigned char *out = meta;
    *out++ = 0x93;
    memcpy(out, field->dtype, field->dtype_bytes);
    out += field->dtype_bytes;
    *out++ = (unsigned char)(0x90 | field->ndim);
    for (uint32_t k = 0; k < field->ndim; k++) out = put_extent(out, extent_of(field->shape[k], named), spare);
    *out++ = 0xc2;
    return (uint32_t)(out - meta);
}

/* is_answer: those have their extensions in one form only. */
static uint32_t put_meta(unsigned char *meta, const gw_rows *what, const uint32_t *named, int is_answer, int spare) {
    if (!what->is_tree) return put_array(meta, &what->field[0], named, spare);
    unsigned char *out = meta, array[META];
    *out++ = (unsigned char)(0x80 | what->count);
    for (uint32_t f = 0; f < what->count; f++) {
        const gw_field *field = &what->field[f];
        uint32_t bytes = put_array(array, field, named, spare);
        memcpy(out, field->key, field->key_bytes);
        out += field->key_bytes;
        if (!is_answer && (bytes == 8 || bytes == 16)) *out++ = bytes == 8 ? 0xd7 : 0xd8;
        else *out++ = 0xc7, *out++ = (unsigned char)bytes;
        *out++ = 1;
        memcpy(out, array, bytes);
        out += bytes;
    }
    return (uint32_t)(out - meta);
}

static uint64_t total_of(const gw_rows *what, const uint32_t *named, uint32_t meta_bytes) {
    uint64_t total = meta_bytes;
    for (uint32_t f = 0; f < what->count; f++) total = gw_align(total) + bytes_of(&what->field[f], named);
    return total;
}

static void make_field(world *w, uint32_t f, uint32_t dims) {
    gw_field *field = &w->what.field[f];
    uint32_t dtype = below(&seed, 5);
    char *key = w->keys[f];
    key[0] = (char)0xa2, key[1] = (char)('a' + below(&seed, 26)), key[2] = (char)('0' + f);
    field->key = key, field->key_bytes = 3;
    field->dtype = dtypes[dtype].packed, field->dtype_bytes = (uint32_t)strlen(field->dtype), field->itemsize = dtypes[dtype].itemsize;
    field->ndim = below(&seed, 3) ? below(&seed, 4) : below(&seed, GW_ROW_DIMS + 1);
    int named = -1;
    for (uint32_t k = 0; k < field->ndim; k++) {
        int d = dims && below(&seed, 2) ? (int)below(&seed, dims) : -1;
        field->shape[k] = d < 0 ? 1 + (int)below(&seed, field->ndim > 4 ? 2 : 4) : -1 - d;
        if (named < 0) named = d;
    }
    for (uint32_t k = 0; k < sizeof field->pad; k++) field->pad[k] = below(&seed, 2) ? 0 : (char)next_random(&seed);
    if (below(&seed, 3) == 0) memset(field->pad, (int)below(&seed, 256), sizeof field->pad);
    if (named >= 0) field->counted = (uint32_t)named;
}

/* Only what a field has is a dimension that a request says an extent of. */
static int is_used(const gw_rows *what, uint32_t d) {
    for (uint32_t f = 0; f < what->count; f++)
        for (uint32_t k = 0; k < what->field[f].ndim; k++)
            if (what->field[f].shape[k] == -1 - (int64_t)d) return 1;
    return 0;
}

static char *request_area(world *w, int i) { return gw_request_area(&w->port, (uint32_t)i); }
static char *response_area(world *w, int i) { return gw_response_area(&w->port, (uint32_t)i); }

/* Open: the requests, or the responses. */
static void fence(world *w, int responses) {
    for (int i = 0; i < w->n; i++) {
        FENCE(response_area(w, i), w->port.response_bytes), FENCE(request_area(w, i), w->port.request_bytes);
        OPEN(responses ? response_area(w, i) : request_area(w, i), responses ? w->port.response_bytes : w->port.request_bytes);
    }
}

static void open_world(world *w) {
    memset(w, 0, sizeof *w);
    gw_rows *what = &w->what;
    what->is_tree = below(&seed, 4) != 0;
    what->count = what->is_tree ? 1 + below(&seed, 4) : 1;
    what->dims = below(&seed, 5);
    for (uint32_t f = 0; f < what->count; f++) make_field(w, f, what->dims);
    w->n = 1 + (int)below(&seed, MOST);
    uint64_t room = 0;
    unsigned char meta[META];
    int spare = below(&seed, 2) ? 0 : (int)below(&seed, 3);
    for (int i = 0; i < w->n; i++) {
        for (uint32_t d = 0; d < what->dims; d++) w->own[i][d] = is_used(what, d) ? 1 + below(&seed, 3) : 0;
        uint32_t bytes = put_meta(meta, what, w->own[i], 0, spare);
        uint64_t total = total_of(what, w->own[i], bytes);
        w->taken[2 * i] = (uint64_t)i | 5 << GW_SLOT_BITS;
        w->taken[2 * i + 1] = gw_describe(what->is_tree ? GW_KIND_TREE : GW_KIND_ARRAY, bytes, total);
        if (room < total) room = total;
    }
    w->port.capacity = (uint32_t)w->n;
    w->port.request_bytes = gw_align(room);
    w->port.response_bytes = gw_align(room) - (below(&seed, 4) ? 0 : GW_LINE);
    w->port.slots = aligned_alloc(GW_LINE, sizeof(gw_slot) * (size_t)w->n);
    memset(w->port.slots, 0, sizeof(gw_slot) * (size_t)w->n);
    uint64_t areas = (uint64_t)w->n * (w->port.request_bytes + w->port.response_bytes);
    w->port.areas = aligned_alloc(GW_LINE, areas);
    for (uint64_t k = 0; k < areas; k++) w->port.areas[k] = (char)next_random(&seed);
    for (int i = 0; i < w->n; i++) put_meta((unsigned char *)request_area(w, i), what, w->own[i], 0, spare);
    fence(w, 0);
}

static void close_world(world *w) {
    OPEN(w->port.areas, (uint64_t)w->n * (w->port.request_bytes + w->port.response_bytes));
    free(w->port.areas);
    free(w->port.slots);
}

static void open_batch(world *w, uint64_t rows, uint32_t spare) {
    gw_rows *what = &w->what;
    what->rows = rows;
    for (uint32_t d = 0; d < what->dims; d++) what->extents[d] = what->largest[d] + (spare ? below(&seed, spare) : 0);
    for (uint32_t f = 0; f < what->count; f++) {
        gw_field *field = &what->field[f];
        field->batch = malloc(w->batch_bytes[f] = rows * bytes_of(field, what->extents));
        memset(field->batch, UNTOUCHED, w->batch_bytes[f]);
        int has_named = is_used(what, field->counted) && what->extents[field->counted];
        field->mask = has_named && below(&seed, 2) ? malloc(rows * what->extents[field->counted] * 8) : NULL;
        field->lengths = has_named && below(&seed, 2) ? malloc(rows * 8) : NULL;
    }
}

static void close_batch(world *w) {
    for (uint32_t f = 0; f < w->what.count; f++) free(w->what.field[f].batch), free(w->what.field[f].mask), free(w->what.field[f].lengths);
}

/* Every element of a field's batch is the one of its row, or padding. */
static void check_field(const world *w, const gw_field *field, int n) {
    uint64_t row_bytes = bytes_of(field, w->what.extents);
    for (uint64_t i = 0; i < w->what.rows; i++) {
        const gw_row *row = i < (uint64_t)n ? &w->rows[i] : NULL;
        const char *next = row ? row->source[field - w->what.field] : NULL;
        for (uint64_t at = 0; at < row_bytes; at += field->itemsize) {
            int inside = row != NULL;
            uint64_t rest = at / field->itemsize;
            for (uint32_t k = field->ndim; k--; ) {
                uint64_t padded = extent_of(field->shape[k], w->what.extents);
                if (row && rest % padded >= extent_of(field->shape[k], row->extents)) inside = 0;
                rest /= padded;
            }
            EQUAL(memcmp(field->batch + i * row_bytes + at, inside ? next : field->pad, field->itemsize), 0);
            if (inside) next += field->itemsize;
        }
        uint64_t own = row ? row->extents[field->counted] : 1, padded = w->what.extents[field->counted];
        for (uint64_t k = 0; field->mask && k < padded; k++) EQUAL(field->mask[i * padded + k], k < own);
        if (field->lengths) EQUAL(field->lengths[i], own);
    }
}

static void check_answers(world *w) {
    uint64_t before[MOST];
    for (int i = 0; i < w->n; i++) {
        gw_slot *slot = &w->port.slots[i];
        static const uint32_t phases[] = {GW_RUNNING, GW_RUNNING, GW_ABANDONED, GW_DONE, GW_FREE};
        slot->word = gw_word(5, 1, phases[below(&seed, 5)]);
        if (below(&seed, 8) == 0) slot->word = gw_word(6, 1, GW_RUNNING); /* of its next life */
        slot->response = before[i] = next_random(&seed);
    }
    fence(w, 1);
    for (int i = 0; i < w->n; i++) memset(response_area(w, i), UNTOUCHED, w->port.response_bytes);
    int odd[MOST], odds = gw_scatter(&w->port, &w->what, w->rows, w->taken, w->n, odd);
    for (int i = 0, k = 0; i < w->n; i++) {
        unsigned char meta[META];
        uint32_t bytes = put_meta(meta, &w->what, w->rows[i].extents, 1, 0);
        uint64_t total = total_of(&w->what, w->rows[i].extents, bytes), at = bytes;
        const gw_slot *slot = &w->port.slots[i];
        const char *area = response_area(w, i);
        int taken = gw_is_taken(slot, (int64_t)w->taken[2 * i]);
        if (taken && total > w->port.response_bytes) {
            CHECK(k < odds);
            EQUAL(odd[k++], i);
        }
        if (!taken || total > w->port.response_bytes) { /* nothing happened */
            EQUAL(slot->response, before[i]);
            for (uint64_t b = 0; b < w->port.response_bytes; b++) EQUAL((unsigned char)area[b], UNTOUCHED);
            continue;
        }
        EQUAL(slot->response, gw_describe(w->what.is_tree ? GW_KIND_TREE : GW_KIND_ARRAY, bytes, total));
        EQUAL(memcmp(area, meta, bytes), 0);
        OPEN(request_area(w, i), w->port.request_bytes);
        for (uint32_t f = 0; f < w->what.count; f++) { /* the batch holds what was gathered: it comes back */
            at = gw_align(at);
            EQUAL(memcmp(area + at, w->rows[i].source[f], bytes_of(&w->what.field[f], w->rows[i].extents)), 0);
            at += bytes_of(&w->what.field[f], w->rows[i].extents);
        }
        for (; at < w->port.response_bytes; at++) EQUAL((unsigned char)area[at], UNTOUCHED);
        EQUAL(i + 1 < w->n || k == odds, 1);
    }
    fence(w, 0);
}

static void rows_that_are_right(void) {
    for (int k = 0; k < WORLDS; k++) {
        world w;
        int odd[MOST];
        open_world(&w);
        EQUAL(gw_read_rows(&w.port, &w.what, w.taken, w.n, w.rows, odd), 0);
        uint64_t cells = 0;
        uint32_t largest[GW_ROW_DIMS] = {0};
        for (int i = 0; i < w.n; i++) {
            uint64_t product = 1;
            for (uint32_t d = 0; d < w.what.dims; d++) {
                EQUAL(w.rows[i].extents[d], w.own[i][d]);
                if (largest[d] < w.own[i][d]) largest[d] = w.own[i][d];
                product *= w.own[i][d];
            }
            cells += product;
        }
        EQUAL(memcmp(w.what.largest, largest, sizeof largest), 0);
        EQUAL(w.what.cells, cells);
        open_batch(&w, (uint64_t)w.n + below(&seed, 3), 3);
        gw_gather(&w.what, w.rows, w.n);
        for (uint32_t f = 0; f < w.what.count; f++) check_field(&w, &w.what.field[f], w.n);
        check_answers(&w);
        memset(w.what.field[0].batch, UNTOUCHED, w.batch_bytes[0]); /* and a batch of padding alone */
        gw_gather(&w.what, w.rows, 0);
        for (uint32_t f = 0; f < w.what.count; f++) check_field(&w, &w.what.field[f], 0);
        close_batch(&w);
        close_world(&w);
    }
}

/* Whatever it says: it is odd, or it lies within its area and is gathered as any other. */
static int read_liar(world *w, int also_gather) {
    int odd[1], odds = gw_read_rows(&w->port, &w->what, w->taken, 1, w->rows, odd);
    if (odds) {
        EQUAL(odds, 1);
        EQUAL(odd[0], 0);
        EQUAL(w->what.cells, 0);
        return 0;
    }
    const char *area = request_area(w, 0), *last = area + gw_meta_of(w->taken[1]);
    uint64_t total = gw_total_of(w->taken[1]);
    CHECK(total <= w->port.request_bytes);
    for (uint32_t d = 0; d < w->what.dims; d++) {
        EQUAL(w->rows[0].extents[d] != 0, is_used(&w->what, d));
        CHECK(!w->what.most[d] || w->rows[0].extents[d] <= w->what.most[d]);
    }
    for (uint32_t f = 0; f < w->what.count; f++) {
        const char *source = w->rows[0].source[f];
        EQUAL((source - area) % GW_LINE, 0);
        CHECK(source >= last);
        last = source + bytes_of(&w->what.field[f], w->rows[0].extents);
        CHECK(last <= area + total);
    }
    if (also_gather) {
        open_batch(w, 2, 2);
        gw_gather(&w->what, w->rows, 1);
        for (uint32_t f = 0; f < w->what.count; f++) check_field(w, &w->what.field[f], 1);
        close_batch(w);
    }
    return 1;
}

static uint64_t read_anyway = 0, called_odd = 0;
static void lie(world *w) { *(read_liar(w, below(&seed, 32) == 0) ? &read_anyway : &called_odd) += 1; }

static void rows_that_lie(void) {
    for (int k = 0; k < LIARS; k++) {
        world w;
        open_world(&w);
        for (uint32_t d = 0; d < w.what.dims; d++) w.what.most[d] = below(&seed, 2) ? w.own[0][d] : 0;
        unsigned char *area = (unsigned char *)request_area(&w, 0);
        uint64_t said = w.taken[1], total = gw_total_of(said);
        uint32_t kind = gw_kind_of(said), bytes = gw_meta_of(said);
        EQUAL(read_liar(&w, 1), 1);
        for (uint32_t at = 0; at < bytes; at++) {
            unsigned char kept = area[at];
            for (int value = 0; value < 256; value++) area[at] = (unsigned char)value, lie(&w);
            area[at] = kept;
        }
        for (uint32_t meta = 0; meta <= 2 * META; meta++) { /* cut, or with something behind it; beyond its area at last */
            w.taken[1] = gw_describe(kind, meta, total);
            EQUAL(read_liar(&w, 0), meta == bytes);
        }
        for (uint64_t less = 0; less <= w.port.request_bytes + 8; less++) {
            w.taken[1] = gw_describe(kind, bytes, less);
            EQUAL(read_liar(&w, 0), less >= total && less <= w.port.request_bytes);
        }
        for (uint32_t other = 0; other < 128; other++) {
            w.taken[1] = gw_describe(other, bytes, total);
            EQUAL(read_liar(&w, 0), other == kind);
        }
        w.taken[1] = UINT64_MAX; /* as gw_take says of one that exceeds its area */
        EQUAL(read_liar(&w, 0), 0);
        for (int patched = 0; patched < 2000; patched++) {
            unsigned char kept[META];
            memcpy(kept, area, bytes);
            for (uint32_t times = 1 + below(&seed, 3); times--;) area[below(&seed, bytes)] = (unsigned char)next_random(&seed);
            w.taken[1] = below(&seed, 4) ? said : gw_describe(kind, bytes + below(&seed, 3) - 1, below(&seed, 2) ? total : next_random(&seed));
            lie(&w);
            memcpy(area, kept, bytes);
        }
        close_world(&w);
    }
    CHECK(read_anyway > 1000 && called_odd > 100000);
}

/* Extents whose product, in 64 bits, is small again. */
static void products_that_wrap(void) {
    static const uint32_t extents[][3] = {{1u << 31, 1u << 31, 1}, {1u << 30, 1u << 30, 4}, {1u << 31, 1u << 31, 1u << 31}, {1, 1u << 31, 1u << 31},
                                          {UINT32_MAX, UINT32_MAX, UINT32_MAX}, {0xaaaaaaab, 0xc0000001, 1u << 31}};
    for (size_t k = 0; k < sizeof extents / sizeof *extents; k++) {
        world w = {.n = 1, .what = {.count = 1, .dims = 3}, .taken = {0}};
        w.what.field[0] = (gw_field){.dtype = "\xa3<f4", .dtype_bytes = 4, .ndim = 3, .itemsize = 4, .shape = {-1, -2, -3}};
        w.port = (gw_port){.capacity = 1, .request_bytes = 4 * GW_LINE, .areas = aligned_alloc(GW_LINE, 4 * GW_LINE)};
        uint32_t bytes = put_meta((unsigned char *)w.port.areas, &w.what, extents[k], 0, 0);
        w.taken[1] = gw_describe(GW_KIND_ARRAY, bytes, 2 * GW_LINE);
        EQUAL(read_liar(&w, 1), 0);
        free(w.port.areas);
    }
}

/* A data race by design, which ThreadSanitizer is not told of: what is read of a slot that is still being written may be anything. */
typedef struct { volatile unsigned char *area; const unsigned char *metas[2]; uint32_t bytes; _Atomic int over; } scribbler;
__attribute__((no_sanitize("thread"))) static void *scribble(void *argument) {
    scribbler *s = argument;
    uint64_t mine = 1;
    while (!s->over) {
        const unsigned char *meta = s->metas[below(&mine, 2)];
        for (uint32_t k = 0; k < s->bytes; k++) s->area[k] = meta[k];
        if (below(&mine, 2)) s->area[below(&mine, s->bytes)] = (unsigned char)next_random(&mine);
    }
    return NULL;
}

static void while_it_is_read(void) {
    world w = {0};
    do { /* one with an extent to lie about */
        if (w.port.areas) close_world(&w);
        open_world(&w);
    } while (!w.what.is_tree || !is_used(&w.what, 0));
    unsigned char large[META];
    uint32_t other[GW_ROW_DIMS];
    memcpy(other, w.own[0], sizeof other);
    other[0] = 0x7f; /* as long a description, of more than there is */
    uint32_t bytes = gw_meta_of(w.taken[1]);
    unsigned char right[META];
    memcpy(right, request_area(&w, 0), bytes);
    memcpy(large, right, bytes);
    put_meta(large, &w.what, other, 0, 0);
    scribbler s = {(unsigned char *)request_area(&w, 0), {right, large}, bytes, 0};
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, scribble, &s));
    uint64_t reads = 0;
    for (int k = 0; k < SCRIBBLED; k++) reads += (uint64_t)read_liar(&w, 1);
    s.over = 1;
    pthread_join(thread, NULL);
    CHECK(reads < SCRIBBLED);
    close_world(&w);
}

int main(void) {
    context = "rows_that_are_right";
    rows_that_are_right();
    context = "rows_that_lie";
    rows_that_lie();
    context = "products_that_wrap";
    products_that_wrap();
    context = "while_it_is_read";
    while_it_is_read();
    printf("rows: %d signatures; %llu lies called odd, %llu read as what they say\n", WORLDS, (unsigned long long)called_odd, (unsigned long long)read_anyway);
    return 0;
}
