/* Batches on their way: which end is whose, what is counted of whom, what runs alone; and nudges, of which none may be lost. */
#define _GNU_SOURCE
#include "cases.h"

enum { PREDICTED_NS = 1000000000, NUDGES = 20000 };
static uint64_t taken[3][2 * CAPACITY];

static gw_stats *stats(void) { return &r.owner->header->stats; }
static uint64_t stamp(void) { return r.owner->header->batch_started_ns; }
static uint64_t free_at(void) { return r.owner->header->free_at_ns; }

/* One request, taken as a batch of its own. */
static int64_t begin(int k, uint32_t reason, uint64_t predicted_ns) {
    int64_t ticket = submit(front, "x");
    gw_collect(r.owner, 0);
    EQUAL(gw_take(r.owner, 1, reason, taken[k]), 1);
    EQUAL(taken[k][0], ticket);
    gw_note_batch(r.owner, predicted_ns, 0, 0);
    return ticket;
}

static int end(int k, int n) {
    for (int i = 0; i < n; i++) gw_respond(r.owner, (int64_t)taken[k][2 * i], GW_KIND_STR, NULL, 0, "y", 1);
    return gw_finish(r.owner, taken[k], n);
}

static void release(int64_t ticket) {
    EQUAL(gw_wait(front, ticket, 0, LONG_NS), gw_describe(GW_KIND_STR, 0, 1));
    EQUAL(gw_release(front, ticket), 0);
}

/* Each has the device from the end of the one before on: that is what a prediction is about, and what it is stamped with. */
static void in_turn(void) {
    int64_t tickets[3];
    uint64_t run_ns = 0;
    for (int k = 0; k < 3; k++) {
        tickets[k] = begin(k, (uint32_t)k + 1, PREDICTED_NS);
        EQUAL(gw_batches_running(r.owner), k + 1);
        EQUAL(stamp(), rig_slot(&r, tickets[0])->dispatch_ns);
    }
    for (int k = 0; k < 3; k++) {
        EQUAL(end(k, 1), 0);
        uint64_t ended = rig_slot(&r, tickets[k])->done_ns;
        run_ns += ended - rig_slot(&r, tickets[k])->dispatch_ns;
        EQUAL(stamp(), k < 2 ? ended : 0);
        EQUAL(stats()->batches, k + 1);
        EQUAL(stats()->reasons[k + 1], 1);
        EQUAL(stats()->run.n, k + 1);
        EQUAL(stats()->run.sum_ns, run_ns);
        EQUAL(stats()->predicted, k + 1);
        EQUAL(stats()->ran_ns, ended - rig_slot(&r, tickets[0])->dispatch_ns);
    }
    CHECK(run_ns > stats()->ran_ns);
    EQUAL(stats()->batch_sizes[1], 3);
    EQUAL(stats()->predicted_ns, 3ull * PREDICTED_NS);
    EQUAL(stats()->overruns, 0);
    for (int k = 0; k < 3; k++) release(tickets[k]);
    int64_t late = begin(0, 0, 1); /* nobody is that fast */
    end(0, 1);
    EQUAL(stats()->overruns, 1);
    release(late);
}

/* When the device should be free: what the oldest has left, and all of the others. */
static void free_again(void) {
    int64_t tickets[3];
    EQUAL(free_at(), 0);
    for (int k = 0; k < 3; k++) tickets[k] = begin(k, 0, PREDICTED_NS);
    EQUAL(free_at(), rig_slot(&r, tickets[0])->dispatch_ns + 3ull * PREDICTED_NS);
    end(0, 1); /* much earlier than was predicted */
    EQUAL(free_at(), stamp() + 2ull * PREDICTED_NS);
    end(1, 1);
    EQUAL(free_at(), stamp() + PREDICTED_NS);
    end(2, 1);
    EQUAL(free_at(), 0);
    for (int k = 0; k < 3; k++) release(tickets[k]);
    tickets[0] = begin(0, 0, PREDICTED_NS);
    tickets[1] = begin(1, 0, 0); /* nothing is known of it */
    EQUAL(free_at(), stamp() + PREDICTED_NS);
    end(0, 1);
    end(1, 1);
    EQUAL(free_at(), 0);
    tickets[2] = begin(2, 0, 1);
    uint64_t before = gw_now();
    int64_t last = begin(0, 0, PREDICTED_NS); /* the other should have ended by now */
    CHECK(free_at() >= before + PREDICTED_NS && free_at() <= gw_now() + PREDICTED_NS);
    end(2, 1);
    end(0, 1);
    EQUAL(free_at(), 0);
    for (int k = 0; k < 3; k++) release(tickets[k]);
    release(last);
}

/* Answers go out whatever the order; but who is overtaken has been given up, and counts as no batch. */
static void overtaken(void) {
    int64_t tickets[3];
    for (int k = 0; k < 3; k++) tickets[k] = begin(k, 0, PREDICTED_NS);
    end(1, 1);
    EQUAL(gw_batches_running(r.owner), 1);
    EQUAL(stats()->batches, 1);
    EQUAL(stamp(), rig_slot(&r, tickets[1])->done_ns);
    end(0, 1);
    EQUAL(gw_batches_running(r.owner), 1);
    EQUAL(stats()->batches, 1);
    EQUAL(stats()->completed, 2);
    EQUAL(stamp(), rig_slot(&r, tickets[1])->done_ns);
    end(2, 1);
    EQUAL(stats()->batches, 2);
    EQUAL(stamp(), 0);
    EQUAL(gw_end_batch(r.owner, (uint64_t)tickets[2]).size, 0); /* told before */
    EQUAL(gw_finish(r.owner, taken[2], 1), 0);
    EQUAL(gw_finish(r.owner, NULL, 0), 0);
    EQUAL(stats()->batches, 2);
    for (int k = 0; k < 3; k++) release(tickets[k]);
}

/* More than there is room for: the oldest are given up; and the counters wrap. */
static void more_than_fit(void) {
    gw_port *owner = r.owner;
    owner->begun = owner->ended = UINT32_MAX - 3;
    for (uint32_t k = 0; k < GW_MAX_DEPTH + 3; k++) {
        gw_begin_batch(owner, (gw_batch){.first = 100 + k, .size = k + 1}, 1000 + k);
        EQUAL(gw_batches_running(owner), k < GW_MAX_DEPTH ? k + 1 : GW_MAX_DEPTH);
        EQUAL(stamp(), 1000);
    }
    for (uint32_t k = 0; k < 3; k++) EQUAL(gw_end_batch(owner, 100 + k).size, 0);
    for (uint32_t k = 3; k < GW_MAX_DEPTH + 3; k += 2) {
        EQUAL(gw_end_batch(owner, 100 + k).size, k + 1);
        EQUAL(gw_batches_running(owner), GW_MAX_DEPTH + 2 - k);
    }
    EQUAL(gw_end_batch(owner, 100 + GW_MAX_DEPTH + 2).size, GW_MAX_DEPTH + 3);
    EQUAL(gw_batches_running(owner), 0);
    gw_stamp_running(owner, 5000);
    EQUAL(stamp(), 0);
}

/* A batch ends also when nobody is left in it. */
static void nobody_left(void) {
    int64_t a = submit(front, "a"), b = submit(front, "b");
    gw_collect(r.owner, 0);
    EQUAL(gw_take(r.owner, 2, 0, taken[0]), 2);
    gw_note_batch(r.owner, PREDICTED_NS, 0, 0);
    EQUAL(gw_cancel(front, a), 1);
    EQUAL(end(0, 2), 1);
    EQUAL(stats()->batch_sizes[2], 1);
    EQUAL(stats()->completed, 1);
    EQUAL(stats()->abandoned, 1);
    release(b);
    int64_t c = begin(0, 0, PREDICTED_NS), d = begin(1, 0, PREDICTED_NS);
    EQUAL(gw_cancel(front, c) & gw_cancel(front, d), 1);
    EQUAL(end(0, 1), 1);
    EQUAL(stats()->batches, 2);
    EQUAL(gw_batches_running(r.owner), 1);
    EQUAL(end(1, 1), 1);
    EQUAL(stats()->batches, 3);
    EQUAL(stamp() | free_at(), 0);
    c = begin(0, 0, PREDICTED_NS);
    gw_slot *slot = &r.owner->slots[gw_slot_of(c)];
    slot->word = gw_word(gw_life_of(c), 0, GW_FREE); /* somebody scribbled */
    EQUAL(end(0, 1), 0);
    EQUAL(stats()->batches, 3);
    EQUAL(gw_batches_running(r.owner), 0);
    EQUAL(stamp() | free_at(), 0);
}

static void tried_before(int64_t ticket) { r.owner->slots[gw_slot_of(ticket)].attempts = 1; }

static int take_any(int k) {
    int queued = gw_collect(r.owner, 0);
    uint64_t all[2 * CAPACITY];
    for (int i = 0; i < queued; i++) all[i] = gw_backlog(r.owner)[i].ticket;
    if (k) return gw_take(r.owner, CAPACITY, 0, taken[k]);
    int n = gw_take_these(r.owner, all, queued, 0, taken[k]);
    for (int i = 0; i < queued; i++) gw_put_back(r.owner, (int64_t)all[i]);
    return n;
}

/* What was running when an owner died shares the device with nothing: not in its batch, nor before or behind it. k: by gw_take_these, gw_take. */
static void suspects_run_alone(void) {
    for (int k = 0; k < 2; k++) {
        int64_t first = submit(front, "first"), suspect = submit(front, "suspect"), second = submit(front, "suspect"), last;
        tried_before(suspect);
        tried_before(second);
        EQUAL(take_any(k), 1);
        EQUAL(taken[k][0], first);
        EQUAL(gw_runs_alone(r.owner), 0);
        EQUAL(take_any(k), 0);
        EQUAL(end(k, 1), 0);
        EQUAL(take_any(k), 1);
        EQUAL(taken[k][0], suspect);
        EQUAL(gw_runs_alone(r.owner), 1);
        last = submit(front, "last");
        EQUAL(take_any(k), 0);
        EQUAL(gw_batches_running(r.owner), 1);
        EQUAL(gw_untake(r.owner, suspect), 0); /* not run after all: its batch has ended once that is told */
        EQUAL(gw_finish(r.owner, taken[k], 1), 0);
        EQUAL(gw_batches_running(r.owner), 0);
        EQUAL(stamp(), 0);
        for (int left = 2; left; left--) {
            EQUAL(take_any(k), 1);
            CHECK(taken[k][0] == (uint64_t)suspect || taken[k][0] == (uint64_t)second);
            EQUAL(take_any(k), 0);
            EQUAL(end(k, 1), 0);
        }
        EQUAL(take_any(k), 1);
        EQUAL(taken[k][0], last);
        EQUAL(end(k, 1), 0);
        release(first), release(suspect), release(second), release(last);
    }
}

static void untaken_in_between(void) {
    int64_t a = submit(front, "a"), b = submit(front, "b");
    gw_collect(r.owner, 0);
    EQUAL(gw_take(r.owner, 2, 0, taken[0]), 2);
    int64_t c = begin(1, 0, 0);
    EQUAL(gw_untake(r.owner, a), 0);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(gw_take(r.owner, 1, 0, taken[2]), 1);
    EQUAL(taken[2][0], a);
    EQUAL(gw_batches_running(r.owner), 3);
    gw_respond(r.owner, b, GW_KIND_STR, NULL, 0, "y", 1);
    EQUAL(gw_finish(r.owner, taken[0] + 2, 1), 0); /* that of b alone is no batch that began */
    EQUAL(gw_batches_running(r.owner), 3);
    release(b);
    end(1, 1);
    end(2, 1);
    EQUAL(gw_batches_running(r.owner), 0);
    EQUAL(stats()->batches, 2);
    release(a), release(c);
}

/* A look at a queued request takes the stamp for its time, and gives it back to the batch that runs. */
static void looks(void) {
    for (int running = 0; running < 2; running++) {
        int64_t batch = running ? begin(0, 0, 0) : -1, queued = submit(front, "x");
        uint64_t before = stamp();
        EQUAL(before != 0, running);
        int attempts = gw_begin_look(r.owner, queued);
        EQUAL(attempts, 0);
        CHECK(stamp() > before);
        gw_end_look(r.owner, queued, attempts);
        EQUAL(stamp(), before);
        EQUAL(rig_slot(&r, queued)->attempts, 0);
        attempts = gw_begin_look(r.owner, queued);
        if (running) end(0, 1), release(batch);
        EQUAL(gw_cancel(front, queued), 0);
        gw_end_look(r.owner, queued, attempts);
        EQUAL(stamp(), 0);
    }
}

/* Requests that run for many steps are taken whoever they are, and none of that is a batch. */
static void admitted(void) {
    gw_port *owner = r.owner;
    EQUAL(gw_admit(owner, CAPACITY, taken[0]), 0);
    int64_t first = submit(front, "first"), suspect = submit(front, "suspect"), second = submit(other, "suspect");
    int64_t late = gw_submit(other, GW_KIND_STR, NULL, 0, "late", 4, 1, 0);
    tried_before(suspect);
    tried_before(second);
    EQUAL(gw_collect(owner, 0), 4);
    EQUAL(gw_admit(owner, 0, taken[0]), 0);
    EQUAL(gw_admit(owner, -1, taken[0]), 0);
    EQUAL(gw_admit(owner, 1, taken[0]), 1);
    EQUAL(taken[0][0], first);
    EQUAL(taken[0][1], gw_describe(GW_KIND_STR, 0, 5));
    EQUAL(owner->queued, 3);
    EQUAL(gw_cancel(other, second), 0);
    EQUAL(gw_admit(owner, CAPACITY, taken[1]), 1); /* one was withdrawn, and one is late */
    EQUAL(taken[1][0], suspect);
    EQUAL(owner->queued, 0);
    EQUAL(kind_of(other, late), GW_KIND_EXPIRED);
    EQUAL(gw_release(other, late), 0);
    EQUAL(gw_batches_running(owner) | gw_runs_alone(owner), 0);
    EQUAL(gw_free_strays(owner), 0); /* the keeper knows that they run */
    EQUAL(gw_phase(owner, first) | gw_phase(owner, suspect), GW_RUNNING);
    second = submit(other, "second");
    front->slots[gw_slot_of(second)].request = gw_describe(GW_KIND_STR, 0, AREA + 1); /* more than there is */
    EQUAL(gw_collect(owner, 0), 1);
    EQUAL(gw_admit(owner, CAPACITY, taken[2]), 1); /* joins them */
    EQUAL(taken[2][0], second);
    EQUAL(taken[2][1], UINT64_MAX);
    EQUAL(gw_untake(owner, suspect), 0); /* it waits again, and is taken again */
    EQUAL(gw_collect(owner, 0), 1);
    EQUAL(gw_admit(owner, CAPACITY, taken[1]), 1);
    EQUAL(taken[1][0], suspect);
    EQUAL(gw_cancel(front, suspect), 1);
    EQUAL(gw_finish(owner, taken[1], 1), 1);
    EQUAL(end(2, 1) | end(0, 1), 0);
    for (uint32_t i = 0; i < CAPACITY; i++) EQUAL(owner->running[i], GW_NO_TICKET);
    EQUAL(stats()->batches | stats()->run.n | stats()->reasons[0], 0);
    EQUAL(stats()->completed * 100 + stats()->abandoned * 10 + stats()->expired, 211);
    EQUAL(stats()->queue_wait.n, 3);
    EQUAL(stamp() | free_at(), 0);
    release(first);
    EQUAL(gw_release(other, second), 0);
}

/* A step is a batch in the statistics, and has a beginning that a watchdog can see. Who leaves in the middle does not end it. */
static void steps(void) {
    static const uint32_t sizes[] = {1, 3, 63, 64, 4096, 0}, buckets[] = {1, 3, 63, 64, 70, 0};
    int64_t ticket = submit(front, "x");
    gw_collect(r.owner, 0);
    EQUAL(gw_admit(r.owner, 1, taken[0]), 1);
    uint64_t run_ns = 0;
    for (uint32_t k = 0; k < 6; k++) {
        uint64_t before = gw_now();
        gw_begin_step(r.owner, (uint64_t[]){(uint64_t)ticket}, 1);
        uint64_t began = stamp();
        CHECK(began >= before && began <= gw_now());
        if (k == 1) {
            EQUAL(end(0, 1), 0);
            release(ticket);
            ticket = submit(front, "x"); /* and somebody comes */
            gw_collect(r.owner, 0);
            EQUAL(gw_admit(r.owner, 1, taken[0]), 1);
            EQUAL(stamp(), began);
            EQUAL(stats()->batches, 1);
        }
        gw_end_step(r.owner, (uint64_t[]){(uint64_t)ticket}, 1, sizes[k], k % 2);
        EQUAL(stamp(), 0);
        EQUAL(stats()->batches, k + 1);
        EQUAL(stats()->run.n, k + 1);
        EQUAL(stats()->batch_sizes[buckets[k]], 1);
        EQUAL(stats()->reasons[k % 2], k / 2 + 1);
        CHECK(stats()->run.sum_ns >= run_ns && stats()->run.sum_ns - run_ns <= gw_now() - began);
        run_ns = stats()->run.sum_ns;
    }
    CHECK(run_ns > 0);
    EQUAL(stats()->predicted | stats()->overruns, 0);
    EQUAL(free_at(), 0);
    EQUAL(gw_batches_running(r.owner), 0);
    gw_begin_step(r.owner, (uint64_t[]){(uint64_t)ticket}, 1); /* its owner dies in it: that is not the next one's time */
    int64_t waiting = submit(front, "y");
    gw_collect(r.owner, 0);
    EQUAL(gw_admit(r.owner, 1, taken[1]), 1);
    rig_new_owner(&r);
    EQUAL(gw_recover(r.owner, 3, GW_KIND_DIED), 2);
    EQUAL(front->slots[gw_slot_of(ticket)].attempts * 10 + front->slots[gw_slot_of(waiting)].attempts, 10); /* the other one was in no step */
    EQUAL(gw_cancel(front, waiting), 0);
    EQUAL(stamp(), 0);
    gw_collect(r.owner, 0);
    EQUAL(gw_admit(r.owner, 1, taken[0]), 1);
    EQUAL(taken[0][0], ticket);
    EQUAL(end(0, 1), 0);
    EQUAL(stats()->batches, 6);
    release(ticket);
}

typedef struct { _Atomic int told, seen, over; int sleepers_only; } talk;
static talk t;

static int collect(void) {
    uint64_t until = gw_now() + LONG_NS;
    int queued = gw_collect(r.owner, until);
    CHECK(gw_now() < until);
    return queued;
}

/* Says something new, and nudges; and again at once, which comes while the owner is about to return. */
static void *nudge(void *argument) {
    (void)argument;
    for (int k = 1; k <= NUDGES; k++) {
        while (t.sleepers_only && !r.owner->header->owner_asleep) sched_yield();
        for (int twice = 0; twice < 2; twice++) {
            atomic_store_explicit(&t.told, 2 * k - 1 + twice, memory_order_relaxed);
            gw_nudge(r.owner);
        }
        while (atomic_load_explicit(&t.seen, memory_order_relaxed) < 2 * k) sched_yield();
    }
    return NULL;
}

static void nudges(void) {
    static const uint32_t modes[] = {GW_PARK, GW_ADAPTIVE, GW_BUSY};
    for (int mode = 0; mode < 3; mode++) {
        gw_set_wake(r.owner, modes[mode]);
        gw_nudge(r.owner);
        EQUAL(gw_collect(r.owner, 0), 0); /* waits for nothing: the nudge stays */
        EQUAL(collect(), 0);
        gw_nudge(r.owner);
        int64_t ticket = submit(front, "x");
        EQUAL(collect(), 1);
        EQUAL(collect(), 1); /* the nudge was not what ended the first */
        EQUAL(gw_cancel(front, ticket), 0);
        for (t.sleepers_only = 0; t.sleepers_only < (modes[mode] == GW_PARK ? 2 : 1); t.sleepers_only++) {
            t.told = t.seen = 0;
            pthread_t thread;
            CHECK(!pthread_create(&thread, NULL, nudge, NULL));
            for (int told = 0; told < 2 * NUDGES;) {
                EQUAL(collect(), 0);
                told = atomic_load_explicit(&t.told, memory_order_relaxed);
                atomic_store_explicit(&t.seen, told, memory_order_relaxed);
            }
            pthread_join(thread, NULL);
            gw_collect(r.owner, 1); /* a nudge that was about nothing new */
            atomic_store(&r.owner->nudged, 0);
        }
    }
}

static const named_case cases[] = {CASE(in_turn), CASE(free_again), CASE(overtaken), CASE(more_than_fit), CASE(nobody_left), CASE(suspects_run_alone),
                                   CASE(untaken_in_between), CASE(looks), CASE(admitted), CASE(steps), CASE(nudges)};

int main(void) { return run_cases("batches", cases, sizeof cases / sizeof *cases); }
