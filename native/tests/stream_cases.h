/* What the tests of answers piece by piece share: an owner that admits and appends, who knows each entry, and segments with room for logs. */
#ifndef GPUWORKER_TESTS_STREAM_H
#define GPUWORKER_TESTS_STREAM_H
#include "cases.h"

enum { ROOM = 1024, HEAD = 64 };
#define FITTING(entry_bytes) ((ROOM - HEAD - (int)GW_STREAM_ERROR) / (entry_bytes)) /* entries */
static const uint32_t no_counts[3];

static uint64_t taken[2 * CAPACITY];

static inline int admit(int n) {
    gw_collect(r.owner, 0);
    return gw_admit(r.owner, n, taken);
}

static inline int64_t begin(gw_port *port) { /* a request that has been taken */
    int64_t ticket = submit(port, "x");
    CHECK(ticket >= 0);
    EQUAL(admit(1), 1);
    EQUAL(taken[0], ticket);
    return ticket;
}

/* Entry k of an answer, of any size: bytes that no other entry has in a row. */
static inline void make(char *entry, uint64_t id, uint32_t k, uint32_t entry_bytes) {
    for (uint32_t j = 0; j < entry_bytes; j++) entry[j] = (char)(id * 131 + k * 7 + j * 29 + (k >> 8));
}

static inline int append_to(int64_t ticket, uint64_t id, uint32_t k, uint32_t entry_bytes) {
    char entry[80];
    uint64_t one = (uint64_t)ticket;
    int gone = -1;
    make(entry, id, k, entry_bytes);
    return gw_stream_append(r.owner, &one, &k, entry, 1, entry_bytes, &gone);
}

static inline int end(int64_t ticket) {
    EQUAL(gw_stream_end(r.owner, ticket, 1, no_counts, NULL, 0), 0);
    return gw_finish(r.owner, (uint64_t[]){(uint64_t)ticket, 0}, 1);
}

static inline gw_stream *log_of(int64_t ticket) { return (gw_stream *)gw_response_area(front, gw_slot_of(ticket)); }

static inline void expect_entries(const char *entries, uint64_t id, uint32_t from, uint32_t to, uint32_t entry_bytes) {
    char entry[80];
    for (uint32_t k = from; k < to; k++) {
        make(entry, id, k, entry_bytes);
        EQUAL(memcmp(entries + k * entry_bytes, entry, entry_bytes), 0);
    }
}
static inline void expect_written(int64_t ticket, uint64_t id, uint32_t n, uint32_t entry_bytes) {
    if (n) EQUAL(gw_stream_wait(front, ticket, n - 1, 0, LONG_NS), n);
    EQUAL(gw_stream_wait(front, ticket, n, 0, 0) == -ETIMEDOUT || gw_phase(front, ticket) == GW_DONE, 1);
    expect_entries((const char *)(log_of(ticket) + 1), id, 0, n, entry_bytes);
}

static inline void release(int64_t ticket) {
    EQUAL(gw_poll(front, ticket), gw_describe(GW_KIND_STREAM, 0, r.owner->response_bytes));
    EQUAL(gw_release(front, ticket), 0);
}

/* Whatever lies around the log of a slot stays as it is. */
static inline void guard(int64_t ticket, int check) {
    uint32_t slot = gw_slot_of(ticket);
    for (uint32_t i = 0; i < CAPACITY; i++) {
        char *request = gw_request_area(front, i);
        for (uint64_t at = 0; at < 2 * front->response_bytes; at++) {
            if (i == slot && at >= front->response_bytes) continue;
            if (check) EQUAL(request[at], 0x3c);
            else request[at] = 0x3c;
        }
    }
}

typedef struct { named_case named; uint64_t area_bytes; } stream_case;

static inline void run_stream_cases(const stream_case *cases, size_t n) {
    for (size_t k = 0; k < n; k++) {
        context = cases[k].named.name;
        r = rig_open(CAPACITY, PARTICIPANTS, cases[k].area_bytes);
        front = rig_join(&r, 1);
        other = rig_join(&r, 2);
        cases[k].named.run();
        EQUAL(gw_count(r.owner, GW_FREE), CAPACITY);
        port_close(front);
        port_close(other);
        rig_close(&r);
    }
}

#endif
