/* Answers that come piece by piece: what the reader gets, what lies in a slot of an earlier life, what the next owner finds, and how much fits. */
#define _GNU_SOURCE
#include "stream_cases.h"

static void in_order(void) {
    int64_t a = submit(front, "a"), b = submit(front, "b"), ready = submit(front, "ready");
    EQUAL(gw_stream_open(r.owner, a, 4, 8), -ESTALE); /* not taken yet */
    EQUAL(admit(2), 2);
    EQUAL(taken[0], a);
    EQUAL(taken[2], b);
    EQUAL(gw_stream_open(r.owner, a, 4, 8) | gw_stream_open(r.owner, b, 4, 8), 0);
    EQUAL(gw_stream_wait(front, a, 0, 0, 0), -ETIMEDOUT);
    for (uint32_t k = 0; k < 4; k++) {
        char entries[16];
        int gone[2];
        make(entries, 1, k, 8);
        make(entries + 8, 2, k, 8);
        EQUAL(gw_stream_append(r.owner, (uint64_t[]){(uint64_t)a, (uint64_t)b}, (uint32_t[]){k, k}, entries, 2, 8, gone), 0);
        expect_written(a, 1, k + 1, 8);
        EQUAL(gw_stream_open(r.owner, a, 4, 8), k + 1); /* opened again, it stays as it is */
    }
    EQUAL(gw_stream_wait(front, b, 0, 0, LONG_NS), 4); /* who comes late finds all at once */
    expect_written(b, 2, 4, 8);
    EQUAL(gw_stream_end(r.owner, a, 2, (uint32_t[]){5, 4, 3}, NULL, 0), 0);
    EQUAL(gw_stream_wait(front, a, 4, 0, 0), -ETIMEDOUT); /* nothing is said before it is published */
    EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)a, 0}, 1), 0);
    EQUAL(gw_stream_wait(front, a, 3, 0, 0), 4);
    EQUAL(gw_stream_wait(front, a, 4, 0, 0), GW_DELIVERED);
    EQUAL(gw_stream_wait(front, a, UINT32_MAX, 0, 0), GW_DELIVERED);
    EQUAL(log_of(a)->finish, 2);
    EQUAL(log_of(a)->counts[0] * 100 + log_of(a)->counts[1] * 10 + log_of(a)->counts[2], 543);
    EQUAL(log_of(a)->error_bytes, 0);
    EQUAL(append_to(a, 1, 4, 8), 1); /* it has ended */
    EQUAL(gw_stream_open(r.owner, a, 4, 8), -ESTALE);
    EQUAL(gw_stream_end(r.owner, a, 2, no_counts, NULL, 0), -ESTALE);
    expect_written(a, 1, 4, 8);
    release(a);
    EQUAL(gw_stream_wait(front, a, 0, 0, LONG_NS), -ESTALE);
    EQUAL(end(b), 0);
    release(b);
    EQUAL(gw_cancel(front, ready), 0);
    EQUAL(gw_stream_open(r.owner, -1, 4, 8), -EINVAL);
    EQUAL(gw_stream_open(r.owner, CAPACITY, 4, 8), -EINVAL);
    EQUAL(gw_stream_end(r.owner, CAPACITY, 1, no_counts, NULL, 0), -EINVAL);
    EQUAL(gw_stream_copy(r.owner, CAPACITY, NULL, 0, 8), -EINVAL);
    EQUAL(gw_stream_wait(front, CAPACITY, 0, 0, LONG_NS), -EINVAL);
    EQUAL(r.owner->header->stats.completed, 2);
}

/* A slot's next request finds the log of the last one there, and must not take it for its own. */
static void two_lives(void) {
    int64_t first = begin(front);
    EQUAL(gw_stream_open(r.owner, first, 6, 8), 0);
    for (uint32_t k = 0; k < 6; k++) append_to(first, 1, k, 8);
    EQUAL(gw_stream_end(r.owner, first, 3, (uint32_t[]){1, 2, 3}, "broken", 6), 0);
    EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)first, 0}, 1), 0);
    release(first);
    int64_t second = submit(front, "x");
    EQUAL(gw_slot_of(second), gw_slot_of(first));
    EQUAL(gw_stream_wait(front, second, 0, 0, 0), -ETIMEDOUT);
    EQUAL(admit(1), 1);
    EQUAL(gw_stream_wait(front, second, 0, 0, 0), -ETIMEDOUT);
    EQUAL(gw_stream_wait(front, first, 0, 0, LONG_NS), -ESTALE);
    EQUAL(gw_stream_open(r.owner, first, 6, 8), -ESTALE);
    EQUAL(append_to(first, 1, 5, 8), 1);
    EQUAL(gw_stream_open(r.owner, second, 6, 8), 0);
    EQUAL(gw_stream_wait(front, second, 0, 0, 0), -ETIMEDOUT);
    EQUAL(log_of(second)->finish | log_of(second)->error_bytes | log_of(second)->counts[0] | log_of(second)->counts[1] | log_of(second)->counts[2], 0);
    append_to(second, 2, 0, 8);
    expect_written(second, 2, 1, 8);
    EQUAL(end(second), 0);
    expect_written(second, 2, 1, 8);
    EQUAL(gw_stream_wait(front, second, 1, 0, 0), GW_DELIVERED);
    release(second);
}

static void the_next_owner_goes_on(void) {
    int64_t ticket = begin(front), untaken = begin(other);
    char copy[FITTING(8) * 8];
    EQUAL(gw_stream_open(r.owner, ticket, 5, 8) | gw_stream_open(r.owner, untaken, 5, 8), 0);
    for (uint32_t k = 0; k < 3; k++) append_to(ticket, 1, k, 8);
    append_to(untaken, 2, 0, 8);
    memset((char *)(log_of(ticket) + 1) + 3 * 8, 0x55, 4); /* killed in the middle of an entry */
    EQUAL(gw_untake(r.owner, untaken), 0);                  /* and this one it had handed back */
    expect_written(ticket, 1, 3, 8);
    rig_new_owner(&r);
    EQUAL(gw_recover(r.owner, 3, GW_KIND_DIED), 1);
    expect_written(ticket, 1, 3, 8); /* while it is queued, and there is nobody */
    EQUAL(admit(CAPACITY), 2);
    EQUAL(gw_batches_running(r.owner), 0);
    EQUAL(gw_stream_open(r.owner, ticket, 5, 8), 3);
    EQUAL(gw_stream_copy(r.owner, ticket, copy, 3, 8), 0);
    expect_entries(copy, 1, 0, 3, 8);
    EQUAL(gw_stream_open(r.owner, untaken, 5, 8), 1);
    append_to(ticket, 1, 3, 8);
    expect_written(ticket, 1, 4, 8);
    EQUAL(gw_stream_open(r.owner, ticket, 4, 8), 4); /* just as many as it may have */
    EQUAL(gw_stream_copy(r.owner, ticket, copy, FITTING(8) + 1, 8), -EINVAL);
    EQUAL(gw_stream_copy(r.owner, ticket, copy, FITTING(8), 8), 0);
    EQUAL(end(ticket), 0);
    release(ticket);
    EQUAL(gw_stream_open(r.owner, untaken, 5, 4), 0); /* what is no log of such entries was not written by an owner */
    EQUAL(append_to(untaken, 2, 0, 4), 0);
    EQUAL(gw_stream_open(r.owner, untaken, 0, 4), 0); /* nor one with more than there may be */
    EQUAL(log_of(untaken)->written, 0);
    EQUAL(end(untaken), 0);
    EQUAL(gw_release(other, untaken), 0);
    EQUAL(r.owner->header->stats.requeued, 1);
}

/* Tried too often, it is answered without an owner: its reader gets what there was, and then how it ended. */
static void the_last_owner_dies(void) {
    int64_t ticket = begin(front);
    EQUAL(gw_stream_open(r.owner, ticket, 5, 8), 0);
    gw_begin_step(r.owner, (uint64_t[]){(uint64_t)ticket}, 1);
    append_to(ticket, 1, 0, 8);
    rig_new_owner(&r);
    EQUAL(gw_recover(r.owner, 1, GW_KIND_DIED), 0);
    expect_written(ticket, 1, 1, 8);
    EQUAL(gw_stream_wait(front, ticket, 1, 0, LONG_NS), GW_DELIVERED);
    EQUAL(gw_poll(front, ticket), gw_describe(GW_KIND_DIED, 0, 0));
    EQUAL(gw_release(front, ticket), 0);
}

/* Between two steps, where nothing is to be run twice: what has sent something ends, as it would have in a step; what has not is queued again. */
static void where_nothing_runs_twice(void) {
    int64_t sent = begin(front), silent = begin(front);
    EQUAL(gw_stream_open(r.owner, sent, 5, 8), 0);
    EQUAL(gw_stream_open(r.owner, silent, 5, 8), 0);
    uint64_t both[] = {(uint64_t)sent, (uint64_t)silent};
    gw_begin_step(r.owner, both, 2);
    append_to(sent, 1, 0, 8);
    gw_end_step(r.owner, both, 2, 2, 0);
    rig_new_owner(&r);
    EQUAL(gw_recover(r.owner, 1, GW_KIND_DIED), 1);
    expect_written(sent, 1, 1, 8);
    EQUAL(gw_stream_wait(front, sent, 1, 0, LONG_NS), GW_DELIVERED);
    EQUAL(gw_poll(front, sent), gw_describe(GW_KIND_DIED, 0, 0));
    EQUAL(gw_phase(front, silent), GW_READY);
    EQUAL(gw_release(front, sent), 0);
    EQUAL(gw_cancel(front, silent), 0);
}

/* Answered as any other request: by an error of its own, or not taken at all. */
static void no_stream_at_all(void) {
    int64_t wrong = begin(front), refused = submit(front, "x");
    EQUAL(gw_answer(r.owner, wrong, GW_KIND_ERROR, NULL, 0, "no", 2), 0);
    EQUAL(gw_stream_wait(front, wrong, 0, 0, LONG_NS), GW_DELIVERED);
    EQUAL(gw_poll(front, wrong), gw_describe(GW_KIND_ERROR, 0, 2));
    EQUAL(gw_refuse_all(r.owner, GW_KIND_DRAINING), 1);
    EQUAL(gw_stream_wait(front, refused, 0, 0, LONG_NS), GW_DELIVERED);
    EQUAL(gw_stream_wait(other, refused, 0, 0, LONG_NS), -ESTALE); /* another's */
    EQUAL(gw_release(front, wrong) | gw_release(front, refused), 0);
}

static void limits(void) {
    static const uint32_t sizes[] = {4, 8, 80};
    EQUAL(gw_stream_bytes(0, 4), HEAD + GW_STREAM_ERROR);
    EQUAL(gw_stream_bytes(1, 4), HEAD + GW_LINE + GW_STREAM_ERROR);
    for (uint32_t s = 0; s < 3; s++) {
        uint32_t size = sizes[s], most = (uint32_t)FITTING((int)size), at;
        char into[ROOM];
        int64_t ticket = begin(front);
        guard(ticket, 0);
        EQUAL(gw_stream_open(r.owner, ticket, most + 1, size), -EMSGSIZE);
        EQUAL(gw_stream_open(r.owner, ticket, UINT32_MAX, size), -EMSGSIZE);
        EQUAL(gw_stream_open(r.owner, ticket, UINT32_MAX, UINT32_MAX), -EMSGSIZE);
        EQUAL(gw_stream_open(r.owner, ticket, 1, UINT32_MAX), -EMSGSIZE);
        EQUAL(gw_stream_open(r.owner, ticket, most, 0), -EINVAL);
        EQUAL(gw_stream_open(r.owner, ticket, 0, size), 0);
        EQUAL(gw_stream_open(r.owner, ticket, most, size), 0);
        for (at = 0; at < most; at++) EQUAL(append_to(ticket, 1, at, size), 0);
        const uint32_t beyond[] = {most, most + 1, UINT32_MAX - 1, UINT32_MAX};
        for (int k = 0; k < 4; k++) EQUAL(append_to(ticket, 1, beyond[k], size), 0); /* miscounted: nothing happens */
        EQUAL(gw_stream_open(r.owner, ticket, most, size), most);
        EQUAL(gw_stream_copy(r.owner, ticket, into, most, size), 0);
        expect_entries(into, 1, 0, most, size);
        EQUAL(gw_stream_copy(r.owner, ticket, into, UINT32_MAX, UINT32_MAX), -EINVAL);
        char error[GW_STREAM_ERROR];
        memset(error, 'e', sizeof error);
        EQUAL(gw_stream_end(r.owner, ticket, 3, no_counts, error, sizeof error), 0);
        expect_written(ticket, 1, most, size);
        EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)ticket, 0}, 1), 0);
        EQUAL(memcmp(gw_response_area(front, gw_slot_of(ticket)) + ROOM - GW_STREAM_ERROR, error, sizeof error), 0);
        EQUAL(log_of(ticket)->error_bytes, sizeof error);
        expect_written(ticket, 1, most, size);
        guard(ticket, 1);
        release(ticket);
    }
    int64_t nothing = begin(front); /* no entries at all */
    EQUAL(gw_stream_open(r.owner, nothing, 0, 4), 0);
    EQUAL(end(nothing), 0);
    EQUAL(gw_stream_wait(front, nothing, 0, 0, LONG_NS), GW_DELIVERED);
    release(nothing);
    r.owner->response_bytes -= GW_LINE; /* as if the areas were smaller */
    int64_t small = begin(front);
    EQUAL(gw_slot_of(small), 0); /* the others lie elsewhere then */
    EQUAL(gw_stream_open(r.owner, small, (uint32_t)FITTING(8), 8), -EMSGSIZE);
    EQUAL(gw_stream_open(r.owner, small, (uint32_t)FITTING(8) - 8, 8), 0);
    r.owner->response_bytes = HEAD + GW_STREAM_ERROR - GW_LINE; /* not even room for an error */
    guard(small, 0);
    EQUAL(gw_stream_open(r.owner, small, 0, 4), -EMSGSIZE);
    EQUAL(append_to(small, 1, 0, 4), 0);
    EQUAL(gw_stream_end(r.owner, small, 3, no_counts, "x", 1), -EMSGSIZE);
    guard(small, 1);
    r.owner->response_bytes = ROOM;
    EQUAL(end(small), 0);
    release(small);
}

static void errors(void) {
    char text[GW_STREAM_ERROR + 1];
    memset(text, 'x', sizeof text);
    const uint32_t lengths[] = {0, 1, GW_STREAM_ERROR, GW_STREAM_ERROR + 1, UINT32_MAX};
    for (int k = 0; k < 5; k++) {
        int64_t ticket = begin(front);
        EQUAL(gw_stream_open(r.owner, ticket, 4, 4), 0);
        append_to(ticket, 1, 0, 4);
        EQUAL(gw_stream_end(r.owner, ticket, 3, no_counts, text, lengths[k]), 0);
        EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)ticket, 0}, 1), 0);
        EQUAL(log_of(ticket)->error_bytes, k < 3 ? lengths[k] : 0); /* half of an error says nothing */
        if (k < 3) EQUAL(memcmp(gw_response_area(front, gw_slot_of(ticket)) + ROOM - GW_STREAM_ERROR, text, lengths[k]), 0);
        expect_written(ticket, 1, 1, 4);
        release(ticket);
    }
    EQUAL(r.owner->header->stats.completed, 5); /* the log says that they failed, not the ring */
}

static void nobody_waits(void) {
    int64_t kept = begin(front), left = begin(front), queued = submit(front, "queued");
    uint64_t tickets[] = {(uint64_t)left, UINT64_MAX, (uint64_t)kept, (uint64_t)queued, CAPACITY, 0};
    const uint32_t at[6] = {0};
    const int expected[] = {0, 1, 3, 4, 5};
    char entries[6 * 8] = "kept must get its own: the third", *its = entries + 2 * 8;
    int gone[6];
    EQUAL(gw_stream_open(r.owner, kept, 4, 8) | gw_stream_open(r.owner, left, 4, 8), 0);
    EQUAL(gw_stream_gone(r.owner, tickets, 1, gone), 0);
    EQUAL(gw_cancel(front, left), 1);
    EQUAL(gw_stream_wait(front, left, 0, 0, LONG_NS), -ESTALE);
    EQUAL(gw_stream_append(r.owner, tickets, at, entries, 6, 8, gone), 5);
    EQUAL(memcmp(gone, expected, sizeof expected), 0);
    memset(gone, 0, sizeof gone);
    EQUAL(gw_stream_gone(r.owner, tickets, 6, gone), 5);
    EQUAL(memcmp(gone, expected, sizeof expected), 0);
    EQUAL(gw_stream_gone(r.owner, tickets, 0, gone), 0);
    EQUAL(gw_stream_wait(front, kept, 0, 0, LONG_NS), 1);
    EQUAL(memcmp(log_of(kept) + 1, its, 8), 0);
    EQUAL(gw_phase(r.owner, left), GW_ABANDONED);
    EQUAL(gw_stream_open(r.owner, left, 4, 8), 0);                     /* it is still the owner's own, */
    EQUAL(gw_stream_end(r.owner, left, 1, no_counts, NULL, 0), 0);
    EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)left, 0}, 1), 1); /* until this */
    EQUAL(gw_phase(r.owner, left), GW_FREE);
    EQUAL(r.owner->header->stats.abandoned, 1);
    EQUAL(gw_cancel(front, queued), 0);
    EQUAL(gw_cancel(front, kept), 1);
    EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)kept, 0}, 1), 1);
}

static const stream_case cases[] = {
    {CASE(in_order), ROOM}, {CASE(two_lives), ROOM}, {CASE(the_next_owner_goes_on), ROOM}, {CASE(the_last_owner_dies), ROOM}, {CASE(where_nothing_runs_twice), ROOM},
    {CASE(no_stream_at_all), ROOM}, {CASE(limits), ROOM}, {CASE(errors), ROOM}, {CASE(nobody_waits), ROOM}};

int main(void) {
    run_stream_cases(cases, sizeof cases / sizeof *cases);
    printf("streams: %zu cases\n", sizeof cases / sizeof *cases);
    return 0;
}
