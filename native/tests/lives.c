/* Requests that live and answer: order, room and quotas, waiting and waking, deadlines. */
#define _GNU_SOURCE
#include "cases.h"

static void whole_life(void) {
    struct { char meta[3]; char data[70]; } sent = {"abc", "data"};
    _Alignas(GW_LINE) char into[3 * GW_LINE];
    int64_t ticket = gw_submit(front, GW_KIND_ARRAY, sent.meta, 3, sent.data, 60, 0, 0);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(gw_backlog(r.owner)->ticket, ticket);
    uint64_t taken[2];
    EQUAL(gw_take(r.owner, 1, 1, taken), 1);
    EQUAL(taken[1], gw_describe(GW_KIND_ARRAY, 3, GW_LINE + 60));
    const char *area = gw_request_area(r.owner, gw_slot_of(ticket));
    EQUAL((uintptr_t)area % GW_LINE, 0);
    CHECK(!memcmp(area, sent.meta, 3) && !memcmp(area + GW_LINE, sent.data, 60));
    EQUAL(gw_answer(r.owner, ticket, GW_KIND_TREE, "xy", 2, area + GW_LINE, 60), 0);
    EQUAL(gw_wait(front, ticket, 0, LONG_NS), gw_describe(GW_KIND_TREE, 2, GW_LINE + 60));
    const gw_slot *slot = rig_slot(&r, ticket);
    CHECK(slot->enqueue_ns <= slot->collect_ns && slot->collect_ns <= slot->dispatch_ns && slot->dispatch_ns <= slot->done_ns);
    EQUAL(gw_receive(front, ticket, AREA + 1, into, 0), -EILSEQ); /* nothing changed: the slot is still ours */
    EQUAL(gw_receive(front, ticket, AREA, into, 1), -EILSEQ);
    EQUAL(gw_receive(front, ticket, 1, into, UINT64_MAX), -EILSEQ);
    EQUAL(gw_receive(front, ticket, GW_LINE, into + 1, 60), 0);
    EQUAL(memcmp(into + 1, sent.data, 60), 0);
    gw_overview o;
    gw_read_header(r.owner, &o);
    EQUAL(o.in_use, 0);
    EQUAL(r.owner->header->stats.completed, 1);
    EQUAL(r.owner->header->stats.reasons[1], 1);
}

static void too_large(void) {
    char big[AREA + 1] = {0};
    EQUAL(gw_submit(front, GW_KIND_BYTES, NULL, 0, big, AREA + 1, 0, 0), -EMSGSIZE);
    EQUAL(gw_submit(front, GW_KIND_BYTES, big, 1, big, AREA - GW_LINE + 1, 0, 0), -EMSGSIZE);
    EQUAL(front->inflight, 0);
    int64_t exact = gw_submit(front, GW_KIND_BYTES, NULL, 0, big, AREA, 0, 0), empty = gw_submit(front, GW_KIND_BYTES, NULL, 0, NULL, 0, 0, 0);
    gw_collect(r.owner, 0);
    uint64_t taken[4];
    EQUAL(gw_take(r.owner, 2, 0, taken), 2);
    EQUAL(gw_answer(r.owner, exact, GW_KIND_BYTES, NULL, 0, big, AREA + 1), -EMSGSIZE);
    EQUAL(gw_answer(r.owner, exact, GW_KIND_BYTES, big, AREA + 1, NULL, 0), -EMSGSIZE);
    EQUAL(gw_phase(r.owner, exact), GW_RUNNING); /* still to be answered */
    EQUAL(gw_answer(r.owner, exact, GW_KIND_BYTES, NULL, 0, big, AREA) | gw_answer(r.owner, empty, GW_KIND_BYTES, NULL, 0, NULL, 0), 0);
    EQUAL(gw_total_of((uint64_t)gw_poll(front, exact)), AREA);
    EQUAL(gw_total_of((uint64_t)gw_poll(front, empty)), 0);
    EQUAL(gw_release(front, exact) | gw_release(front, empty), 0);
}

static void oldest_first(void) {
    int64_t a = gw_claim(front), b = submit(other, "b"), c = submit(front, "c");
    EQUAL(gw_collect(r.owner, 0), 2);
    EQUAL(gw_publish(front, a, gw_describe(GW_KIND_STR, 0, 0), 0, 0), 0); /* claimed first, published last */
    EQUAL(gw_cancel(other, b), 0);
    int64_t d = submit(other, "d");
    EQUAL(gw_collect(r.owner, 0), 3);
    const gw_item *queue = gw_backlog(r.owner);
    EQUAL(queue[0].ticket, c);
    EQUAL(queue[1].ticket, a);
    EQUAL(queue[2].ticket, d);
    EQUAL(gw_cancel(front, a), 0);
    EQUAL(serve(1), 1);
    EQUAL(gw_poll(front, c), gw_describe(GW_KIND_STR, 0, 1));
    EQUAL(gw_poll(other, d), -EINPROGRESS);
    EQUAL(serve(CAPACITY), 1); /* passes over the cancelled one */
    EQUAL(gw_release(front, c) | gw_release(other, d), 0);
}

static void untaken_keeps_its_place(void) {
    int64_t a = submit(front, "a"), b = submit(front, "b");
    uint64_t taken[2];
    EQUAL(gw_collect(r.owner, 0), 2);
    EQUAL(gw_take(r.owner, 1, 1, taken), 1);
    EQUAL(gw_untake(r.owner, a), 0);
    EQUAL(gw_collect(r.owner, 0), 2);
    EQUAL(gw_backlog(r.owner)[0].ticket, a);
    EQUAL(serve(2), 2);
    EQUAL(gw_release(front, a) | gw_release(front, b), 0);
}

static void room_and_quotas(void) {
    int64_t held[CAPACITY];
    gw_set_policy(r.owner, GW_REJECT, GW_PARK, 2, CAPACITY, 0, 1); /* two joined: two slots each */
    for (int k = 0; k < 2; k++) held[k] = gw_claim(front);
    EQUAL(gw_claim(front), -EDQUOT);
    EQUAL(gw_claim_wait(front, 1), -ETIMEDOUT);
    for (int k = 2; k < 4; k++) held[k] = gw_claim(other);
    EQUAL(gw_claim(other), -EDQUOT);
    EQUAL(gw_cancel(front, held[0]), 0);
    held[0] = gw_claim(front); /* a quota's room comes back with the slot */
    CHECK(held[0] >= 0);
    EQUAL(gw_leave(other), 0);
    EQUAL(gw_reap(r.owner, 2), 2);
    for (int k = 2; k < 4; k++) held[k] = gw_claim(front); /* alone: all of them */
    EQUAL(gw_claim(front), -EAGAIN);
    EQUAL(gw_claim_wait(front, 1), -ETIMEDOUT);
    EQUAL(r.owner->header->space_wanted[0], 0);
    for (int k = 0; k < CAPACITY; k++) EQUAL(gw_cancel(front, held[k]), 0);
}

static void state_of_the_owner(void) {
    static const struct { uint32_t state; int result; } table[] = {
        {GW_DRAINING, -ESHUTDOWN}, {GW_STOPPED, -ENOTCONN}, {GW_SUPERSEDED, -ENOTCONN}};
    for (int k = 0; k < 3; k++) {
        gw_set_state(r.owner, table[k].state);
        EQUAL(gw_claim(front), table[k].result);
        EQUAL(gw_claim_wait(front, gw_now() + LONG_NS), table[k].result);
        EQUAL(submit(front, "x"), table[k].result);
    }
    gw_set_state(r.owner, GW_STARTING); /* requests may queue while the model loads */
    EQUAL(gw_cancel(front, submit(front, "x")), 0);
    EQUAL(gw_claim(r.owner), -ENOTCONN); /* not joined */
    EQUAL(gw_publish(r.owner, 0, 0, 0, 0), -ECHILD);
}

static void *claim_wait(void *w) { return ((waiting *)w)->result = gw_claim_wait(((waiting *)w)->port, gw_now() + LONG_NS), NULL; }
static void *collect(void *w) { return ((waiting *)w)->result = gw_collect(r.owner, gw_now() + LONG_NS), NULL; }

static void claimers_are_woken(void) {
    int64_t held[CAPACITY];
    for (int k = 0; k < CAPACITY; k++) held[k] = submit(front, "x");
    gw_collect(r.owner, 0);
    EQUAL(serve(1), 1);
    for (int how = 0; how < 3; how++) {
        waiting w = {.port = other};
        pthread_t thread;
        pthread_create(&thread, NULL, claim_wait, &w);
        while (!r.owner->header->space_wanted[0]) sched_yield();
        if (how == 0) EQUAL(gw_release(front, held[0]), 0);
        if (how == 1) EQUAL(gw_cancel(front, held[1]), 0);
        if (how == 2) EQUAL(gw_reap(r.owner, front->me), 2);
        pthread_join(thread, NULL);
        CHECK(w.result >= 0);
        EQUAL(r.owner->header->space_wanted[0], 0);
        if (how == 2) EQUAL(gw_reap(r.owner, other->me), 3);
    }
}

static void waiters_are_woken(void) {
    gw_set_wake(front, GW_PARK);
    for (int how = 0; how < 3; how++) {
        waiting w = {.port = front, .ticket = submit(front, "x")};
        pthread_t thread;
        pthread_create(&thread, NULL, wait_response, &w);
        EQUAL(gw_collect(r.owner, 0), 1);
        if (how == 0) EQUAL(serve(1), 1);
        if (how == 1) EQUAL(gw_cancel(front, w.ticket), 0);
        if (how == 2) EQUAL(gw_refuse(r.owner, w.ticket, GW_KIND_DRAINING), 0);
        pthread_join(thread, NULL);
        EQUAL(w.result, how == 0 ? (int64_t)gw_describe(GW_KIND_STR, 0, 1) : how == 1 ? -ESTALE : (int64_t)gw_describe(GW_KIND_DRAINING, 0, 0));
        if (how != 1) EQUAL(gw_release(front, w.ticket), 0);
    }
}

/* Somebody else's cancel frees the slot under a waiter, and its next life begins before that waiter looks: it must not take the next one's wake. */
static void a_stale_waiter_takes_nobodys_wake(void) {
    gw_set_wake(front, GW_PARK);
    gw_set_wake(other, GW_PARK);
    waiting stale = {.port = front, .ticket = submit(front, "x")}, live = {.port = other};
    pthread_t first, second;
    pthread_create(&first, NULL, wait_response, &stale);
    until_asleep(&stale);
    _Atomic uint64_t *word = &r.owner->slots[gw_slot_of(stale.ticket)].word;
    atomic_store(word, gw_freed(*word)); /* the canceller was stopped between its CAS and its post */
    atomic_store(&other->home, gw_slot_of(stale.ticket));
    live.ticket = submit(other, "y");
    EQUAL(gw_slot_of(live.ticket), gw_slot_of(stale.ticket));
    pthread_create(&second, NULL, wait_response, &live);
    until_asleep(&live);
    uint64_t start = gw_now();
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1); /* one post: both are woken */
    pthread_join(first, NULL);
    EQUAL(stale.result, -ESTALE);
    pthread_join(second, NULL);
    EQUAL(live.result, gw_describe(GW_KIND_STR, 0, 1));
    CHECK(gw_now() - start < LONG_NS);
    EQUAL(gw_release(other, live.ticket), 0);
}

static void sleeping_owner_is_woken(void) {
    gw_set_wake(r.owner, GW_PARK);
    for (int how = 0; how < 2; how++) {
        waiting w = {0};
        pthread_t thread;
        pthread_create(&thread, NULL, collect, &w);
        while (!r.owner->header->owner_asleep) sched_yield();
        int64_t ticket = how ? submit(front, "x") : 0;
        if (!how) gw_bell(r.owner);
        pthread_join(thread, NULL);
        EQUAL(w.result, how);
        if (how) EQUAL(gw_cancel(front, ticket), 0);
    }
    EQUAL(r.owner->header->owner_asleep, 0);
    EQUAL(r.owner->header->stats.parks, 2);
    EQUAL(r.owner->header->stats.late_wakes, 0);
}

static int64_t submit_late(gw_port *port, uint64_t deadline_ns) { return gw_submit(port, GW_KIND_STR, NULL, 0, "late", 4, deadline_ns, 0); }

static void deadlines(void) {
    uint64_t now = gw_now();
    int64_t none = submit_late(front, 0), past = submit_late(front, now), far = submit_late(front, now + LONG_NS);
    EQUAL(gw_wait(front, far, now, LONG_NS), -ETIMEDOUT);
    EQUAL(gw_expire(r.owner, now - 1), 0);
    EQUAL(gw_expire(r.owner, now), 1);
    EQUAL(gw_expire(r.owner, now), 0);
    EQUAL(kind_of(front, past), GW_KIND_EXPIRED);
    int64_t at_take = submit_late(front, now);
    EQUAL(gw_collect(r.owner, 0), 3);
    EQUAL(serve(CAPACITY), 2); /* it is answered and not run */
    EQUAL(kind_of(front, at_take), GW_KIND_EXPIRED);
    EQUAL(r.owner->header->stats.expired, 2);
    EQUAL(gw_release(front, none) | gw_release(front, past) | gw_release(front, far) | gw_release(front, at_take), 0);
}

/* An owner that keeps the queue itself is told what came and what went, and takes whom it likes. */
static void chosen_from_the_news(void) {
    gw_set_scheduling(r.owner, GW_ADMIT_ALL, 0, 0, 0, 0, 1);
    int64_t a = submit(front, "a"), b = submit(other, "b"), c = gw_submit(front, GW_KIND_STR, NULL, 0, "c", 1, 0, gw_terms(5000, 77, 3));
    const gw_item *arrived;
    const uint64_t *gone;
    int departures;
    EQUAL(gw_collect(r.owner, 0), 3);
    EQUAL(gw_news(r.owner, &arrived, &gone, &departures), 3);
    EQUAL(departures, 0);
    EQUAL(arrived[1].ticket, b);
    EQUAL(arrived[1].participant, other->me);
    EQUAL(gw_budget_of(arrived[2].terms), 5000000);
    EQUAL(gw_length_of(arrived[2].terms), 77);
    EQUAL(gw_kind_of((uint64_t)gw_peek(r.owner, a)), GW_KIND_STR);
    EQUAL(gw_cancel(front, a), 0);
    EQUAL(gw_peek(r.owner, a), -ESTALE);
    EQUAL(gw_collect(r.owner, 0), 2);
    EQUAL(gw_news(r.owner, &arrived, &gone, &departures), 0);
    EQUAL(departures, 1);
    EQUAL(gone[0], a);
    r.owner->slots[gw_slot_of(b)].attempts = 1; /* it ran when an owner died: a batch of its own */
    uint64_t taken[4], wanted[] = {(uint64_t)c, (uint64_t)b};
    EQUAL(gw_take_these(r.owner, wanted, 2, 0, taken), 1);
    EQUAL(taken[0], c);
    EQUAL(gw_put_back(r.owner, c), -ESTALE); /* it was taken */
    EQUAL(gw_put_back(r.owner, b), 0);
    EQUAL(gw_answer(r.owner, c, GW_KIND_STR, NULL, 0, "c", 1), 0);
    EQUAL(rig_slot(&r, c)->due_ns, rig_slot(&r, c)->enqueue_ns + 5000000);
    gw_collect(r.owner, 0);
    EQUAL(gw_news(r.owner, &arrived, &gone, &departures), 1);
    EQUAL(arrived[0].ticket, b);
    EQUAL(gw_refuse_with(r.owner, b, GW_KIND_LATE, "why", 3), 0);
    EQUAL(gw_poll(other, b), gw_describe(GW_KIND_LATE, 0, 3));
    EQUAL(memcmp(gw_response_area(other, gw_slot_of(b)), "why", 3), 0);
    EQUAL(gw_refuse_with(r.owner, b, GW_KIND_LATE, taken, GW_MAX_REFUSAL + 1), -EMSGSIZE);
    EQUAL(gw_collect(r.owner, 0), 0);
    EQUAL(gw_news(r.owner, &arrived, &gone, &departures), 0);
    EQUAL(departures, 0); /* who was refused is no news */
    EQUAL(gw_release(front, c) | gw_release(other, b), 0);
}

static const named_case cases[] = {
    CASE(whole_life), CASE(too_large), CASE(oldest_first), CASE(untaken_keeps_its_place), CASE(room_and_quotas), CASE(state_of_the_owner),
    CASE(claimers_are_woken), CASE(waiters_are_woken), CASE(a_stale_waiter_takes_nobodys_wake), CASE(sleeping_owner_is_woken), CASE(deadlines),
    CASE(chosen_from_the_news)};

int main(void) { return run_cases("lives", cases, sizeof cases / sizeof *cases); }
