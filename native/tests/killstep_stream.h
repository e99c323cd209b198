/* Answers that come piece by piece: who writes them, who goes on after a dead writer, who reads them. The calls of gpuworker/generation. */
#ifndef GPUWORKER_TESTS_KILLSTEP_STREAM_H
#define GPUWORKER_TESTS_KILLSTEP_STREAM_H
#include "killstep_recovery.h"

enum { ENTRIES = 3, ENTRY_BYTES = 8, OLD_ID = DEAD_ID };
#define STREAMED gw_describe(GW_KIND_TREE, 0, PAYLOAD_BYTES)    /* what is asked for */
#define STREAM_OVER gw_describe(GW_KIND_STREAM, 0, STREAM_AREA) /* and how that is answered */

/* An entry follows from the one before it, so whoever goes on from a wrong one goes wrong. The first follows from the request's id. */
static uint64_t entry_after(uint64_t last) { return last * 6364136223846793005u + 1442695040888963407u; }
static void check_entries(const uint64_t *entries, uint64_t id, uint32_t n) {
    for (uint32_t k = 0; k < n; k++) EQUAL(entries[k], id = entry_after(id));
}

/* ---- an owner; without checks, which would be steps too ---- */

typedef struct { int64_t ticket; uint64_t last; uint32_t written; } live;
typedef struct { live of[CAPACITY]; int n; } lives;

static void leave_stream(gw_port *owner, lives *all, int k) {
    gw_finish(owner, (uint64_t[]){(uint64_t)all->of[k].ticket, 0}, 1);
    all->of[k] = all->of[--all->n];
}

static void join_streams(gw_port *owner, lives *all, const uint64_t *taken, int n) {
    for (int k = 0; k < n; k++) {
        if (taken[2 * k + 1] != STREAMED) {
            run_taken(owner, taken + 2 * k, 1);
            continue;
        }
        live *one = &all->of[all->n++];
        one->ticket = (int64_t)taken[2 * k];
        one->last = *(uint64_t *)gw_request_area(owner, gw_slot_of(one->ticket));
        ran[one->last % IDS]++;
        int64_t written = gw_stream_open(owner, one->ticket, ENTRIES, ENTRY_BYTES);
        uint64_t found[ENTRIES];
        if (written > 0) {
            gw_stream_copy(owner, one->ticket, found, (uint32_t)written, ENTRY_BYTES);
            one->last = found[written - 1];
        }
        one->written = (uint32_t)written;
    }
}

/* One step: those that nobody waits for leave, one more entry for each of the others, and those that have all of theirs end. */
static void step_streams_of(gw_port *owner, lives *all) {
    uint64_t tickets[CAPACITY], entries[CAPACITY];
    uint32_t at[CAPACITY];
    int gone[CAPACITY], n = 0;
    for (int k = 0; k < all->n; k++) tickets[k] = (uint64_t)all->of[k].ticket;
    for (int g = gw_stream_gone(owner, tickets, (uint32_t)all->n, gone); g--;) leave_stream(owner, all, gone[g]);
    for (int k = 0; k < all->n; k++) tickets[k] = (uint64_t)all->of[k].ticket;
    gw_begin_step(owner, tickets, (uint32_t)all->n);
    for (int k = all->n; k--;) {
        live *one = &all->of[k];
        if (one->written == ENTRIES) {
            gw_stream_end(owner, one->ticket, 2, (uint32_t[]){1, ENTRIES, 0}, NULL, 0);
            leave_stream(owner, all, k);
            continue;
        }
        tickets[n] = (uint64_t)one->ticket;
        at[n] = one->written++;
        entries[n++] = one->last = entry_after(one->last);
    }
    gw_end_step(owner, tickets, (uint32_t)n, (uint32_t)n, 0);
    gw_stream_append(owner, tickets, at, (const char *)entries, (uint32_t)n, ENTRY_BYTES, gone);
}

/* ---- in the victim ---- */

static void stream_all(void) {
    uint64_t taken[2 * CAPACITY];
    lives all = {.n = 0};
    while (gw_collect(mine, gw_now() + LONG_NS) <= 0) {}
    join_streams(mine, &all, taken, gw_admit(mine, CAPACITY, taken));
    while (all.n) step_streams_of(mine, &all);
    calls_over();
}

static void take_streams_over(void) {
    gw_set_state(mine, GW_STARTING);
    gw_set_owner(mine, 5, 5, 5);
    recover(mine);
    gw_set_state(mine, GW_SERVING);
    stream_all();
}

#define victim_has (*(_Atomic uint32_t *)(running + CAPACITY)) /* entries; shared */
static uint64_t has[ENTRIES];
static int64_t told;

static void read_until(int64_t ticket, uint32_t enough) {
    const uint64_t *entries = (const uint64_t *)(gw_response_area(mine, gw_slot_of(ticket)) + sizeof(gw_stream));
    for (uint32_t n = 0; n < enough; victim_has = n) {
        told = gw_stream_wait(mine, ticket, n, 0, LONG_NS);
        if (told == -ETIMEDOUT) continue;
        if (told < 0 || told == GW_DELIVERED) break;
        for (; n < told && n < ENTRIES; n++) has[n] = entries[n];
    }
}

static void read_to_its_end(int64_t ticket) {
    read_until(ticket, ENTRIES + 1);
    int64_t described = gw_poll(mine, ticket);
    int released = gw_release(mine, ticket);
    calls_over();
    int is_withdrawn = *report == 0 || *report == 1;
    EQUAL(told, is_withdrawn ? -ESTALE : GW_DELIVERED);
    EQUAL(described, is_withdrawn ? -ESTALE : (int64_t)STREAM_OVER);
    EQUAL(released, is_withdrawn ? -ESTALE : 0);
    if (!is_withdrawn) EQUAL(victim_has, ENTRIES);
    if (!is_withdrawn) check_entries(has, VICTIM_ID, ENTRIES);
}

static int64_t ask(void) { return gw_submit(mine, GW_KIND_TREE, NULL, 0, request, PAYLOAD_BYTES, 0, 0); }
static void read_stream(void) { read_to_its_end(ask()); }
static void read_alone(void) { read_to_its_end(my_ticket); }
static void join_and_ask(void) {
    join();
    my_ticket = ask();
}
static void stop_reading(void) { /* it has what it wanted */
    int64_t ticket = ask();
    read_until(ticket, 1);
    int outcome = gw_abandon(mine, ticket);
    calls_over();
    CHECK(outcome >= 0);
    check_entries(has, VICTIM_ID, victim_has);
}

/* ---- in the harness ---- */

static lives streams;
static struct { uint64_t id; _Atomic uint32_t has; } readers[WAITERS];

static int64_t ask_for(gw_port *port, uint64_t id) {
    uint64_t words[WORDS];
    fill(words, id);
    int64_t ticket = gw_submit(port, GW_KIND_TREE, NULL, 0, words, PAYLOAD_BYTES, 0, 0);
    CHECK(ticket > 0);
    return ticket;
}

/* Looks at what comes as it comes; -> the response, if all was right. */
static int64_t look_on(waiter *self) {
    const gw_stream *log = (const gw_stream *)gw_response_area(self->port, gw_slot_of(self->ticket));
    uint64_t entries[ENTRIES];
    for (uint32_t n = 0;; readers[self - waiters].has = n) {
        int64_t result = gw_stream_wait(self->port, self->ticket, n, 0, LONG_NS);
        if (result == -ETIMEDOUT && gw_now() < self->until_ns) continue;
        if (result < 0) return result;
        if (result == GW_DELIVERED) {
            EQUAL(n, ENTRIES);
            EQUAL(log->finish, 2);
            EQUAL(log->counts[1], ENTRIES);
            return gw_poll(self->port, self->ticket);
        }
        CHECK(result <= ENTRIES);
        memcpy(entries, log + 1, (size_t)result * ENTRY_BYTES);
        if (gw_poll(self->port, self->ticket) == -ESTALE) return -ESTALE; /* withdrawn, and the log may be another's by now */
        n = (uint32_t)result;
        check_entries(entries, readers[self - waiters].id, n);
    }
}
static void await_stream(int i, gw_port *port, uint64_t id) {
    readers[i].id = id;
    readers[i].has = 0;
    waiter_start(&waiters[i], look_on, port, ask_for(port, id));
    waiters[i].id = id;
    waiters[i].kind = GW_KIND_STREAM;
}

static uint32_t counted(int64_t ticket) {
    const gw_stream *log = (const gw_stream *)gw_response_area(r.owner, gw_slot_of(ticket));
    return log->life == gw_life_of(ticket) ? log->written : 0;
}

/* Who was asleep is told of each entry when it is there, and not only at the end. */
static void readers_have_it(void) {
    for (int i = 0; i < WAITERS; i++) {
        waiter *one = &waiters[i];
        uint64_t start = gw_now();
        while (one->busy && one->call == look_on && !one->withdrawn && !one->ended && readers[i].has < counted(one->ticket)) {
            sched_yield();
            in_time(start, "a reader that was to be told of an entry");
        }
        if (one->busy && one->call == look_on && !one->withdrawn && !one->ended) CHECK(counted(one->ticket) >= readers[i].has); /* what was sent stays sent */
    }
}

static int admit_streams(void) {
    uint64_t taken[2 * CAPACITY];
    gw_collect(r.owner, 0);
    int n = gw_admit(r.owner, CAPACITY, taken);
    join_streams(r.owner, &streams, taken, n);
    return n;
}
static int step_streams(void) {
    int n = admit_streams(), n_left = 0;
    int64_t left[CAPACITY];
    if (!streams.n) return n;
    for (int k = 0; k < streams.n; k++)
        if (gw_phase(r.owner, streams.of[k].ticket) == GW_ABANDONED) left[n_left++] = streams.of[k].ticket;
    step_streams_of(r.owner, &streams);
    while (n_left--) CHECK(gw_phase(r.owner, left[n_left]) != GW_ABANDONED); /* and take no more steps */
    EQUAL(r.owner->header->batch_started_ns, 0);
    readers_have_it();
    return 1;
}
static void serve_streams(void) { while (step_streams()) {} }

/* The victim sleeps, so it has read all that is there. */
static void feed_sleeper(void) {
    for (uint32_t i = 0; i < CAPACITY; i++) {
        uint64_t word = r.owner->slots[i].word;
        if (gw_participant_of(word) == VICTIM && gw_phase_of(word) == GW_RUNNING) EQUAL(victim_has, counted(gw_ticket(word, i)));
    }
    step_streams();
}

/* The slots that will be used have been used: each has the log of an earlier life in it, as long as any. */
static void slots_are_worn(void) {
    streams.n = 0;
    victim_has = 0;
    int64_t old[] = {ask_for(w.patient, OLD_ID), ask_for(w.busy, OLD_ID + 1)};
    serve_streams();
    for (int k = 0; k < 2; k++) {
        EQUAL(counted(old[k]), ENTRIES);
        EQUAL(gw_release(k ? w.busy : w.patient, old[k]), 0);
    }
}
static void somebody_reads(void) {
    slots_are_worn();
    await_stream(0, w.patient, PATIENT_ID);
}
static void two_read(void) {
    somebody_reads();
    await_stream(1, w.busy, QUEUED_ID);
}

/* One has had an entry; one has had one, and was not told of the next when the owner died; one was abandoned. */
static void owner_died_streaming(void) {
    two_read();
    int64_t abandoned = ask_for(w.busy, QUEUED_ID + 2);
    step_streams();
    gw_stream *log = (gw_stream *)gw_response_area(r.owner, gw_slot_of(waiters[1].ticket));
    uint64_t *entries = (uint64_t *)(log + 1);
    entries[1] = entry_after(entries[0]);
    log->written = 2;
    EQUAL(gw_cancel(w.busy, abandoned), 1);
    w.owner_deaths = 1;
    new_owner();
    streams.n = 0;
}

static void next_streaming_owner(void) {
    next_owner();
    streams.n = 0;
}
static void streams_and_others_go_on(void) {
    serve_streams();
    reap();
    others_go_on(1);
}
static void streaming_owner_dies(void) {
    w.owner_deaths++;
    next_streaming_owner();
    streams_and_others_go_on();
}
static void two_streaming_owners_die(void) {
    w.owner_deaths++;
    next_streaming_owner();
    if (w.owner_deaths == 1) step_streams(); /* or it would be the third to die of them, and the last that may */
    streaming_owner_dies();
}
static void streaming_owner_ends(void) {
    next_streaming_owner();
    streams_and_others_go_on();
}

/* The slot's next life is another stream, which has nothing of this one's. */
static void withdraw_now_and_read_again(void) {
    if (waiters[1].withdrawn || withdraw(1)) return;
    w.busy->home = gw_slot_of(waiters[1].ticket);
    await_stream(3, w.busy, QUEUED_ID + 1);
    EQUAL(gw_slot_of(waiters[3].ticket), gw_slot_of(waiters[1].ticket));
}

static void a_reader_has_died(void) { /* nobody has noticed yet */
    gw_port *dead = join_as_sleeper();
    ask_for(dead, DEAD_ID + 2);
    port_close(dead);
}

static const mode streaming_owner_modes[] = {
    {"kill", KILL, NULL, NULL, NULL, NULL, streaming_owner_dies},
    {"kill-twice", KILL, NULL, NULL, NULL, NULL, two_streaming_owners_die},
    {"kill-cancelled", KILL, NULL, withdraw_running, NULL, NULL, streaming_owner_dies},
    {"kill-cancelled-dead", KILL, NULL, NULL, NULL, withdraw_now, streaming_owner_dies},
    {"kill-reused", KILL, NULL, NULL, NULL, withdraw_now_and_read_again, streaming_owner_dies},
    {"pause", PAUSE, NULL, NULL, NULL, others_cannot_be_served, streaming_owner_ends},
    {"pause-cancelled", PAUSE, NULL, withdraw_running, NULL, others_cannot_be_served, streaming_owner_ends},
    {"pause-cancelled-now", PAUSE, NULL, NULL, NULL, withdraw_now_and_go_on, streaming_owner_ends},
    {"pause-reused", PAUSE, NULL, NULL, NULL, withdraw_now_and_read_again, streaming_owner_ends},
    {"kill-reader-dead", KILL, a_reader_has_died, NULL, NULL, NULL, streaming_owner_dies},
};
static const mode keeper_beside_streams[] = {{"pause-keeper", PAUSE, a_reader_has_died, NULL, NULL, keeper_ticks, streaming_owner_ends}};

static void reap_then_stream(void) { reap(); streams_and_others_go_on(); }
static void one_step_more(void) { step_streams(); reap(); others_go_on(0); }
static void owner_dies_halfway(void) { /* the next one has only begun */
    w.owner_deaths++;
    next_streaming_owner();
    one_step_more();
}

static const mode reader_modes[] = {
    {"kill", KILL, NULL, NULL, feed_sleeper, NULL, reap_then_stream},
    {"kill-running", KILL, NULL, admit_streams, feed_sleeper, NULL, reap_then_stream},
    {"kill-ahead", KILL, NULL, step_streams, NULL, NULL, reap_then_stream},
    {"kill-with-owner", KILL, NULL, admit_streams, feed_sleeper, NULL, streaming_owner_dies},
    {"pause", PAUSE, NULL, NULL, feed_sleeper, streams_and_others_go_on, NULL},
    {"pause-step", PAUSE, NULL, NULL, feed_sleeper, one_step_more, NULL},
    {"pause-ahead", PAUSE, NULL, step_streams, NULL, others_cannot_be_served, NULL},
    {"pause-owner-dies", PAUSE, NULL, NULL, feed_sleeper, owner_dies_halfway, NULL},
    {"pause-owner-dies-running", PAUSE, NULL, admit_streams, feed_sleeper, owner_dies_halfway, NULL},
};

/* The victim's is withdrawn by another thread of its process, and its slot is used by another stream, if it is free. */
static void withdraw_and_read_again(void) {
    gw_port twin = *w.patient;
    twin.me = VICTIM;
    for (uint32_t i = 0; i < CAPACITY; i++) {
        uint64_t word = twin.slots[i].word;
        if (gw_phase_of(word) == GW_FREE || gw_participant_of(word) != VICTIM) continue;
        *report = gw_cancel(&twin, gw_ticket(word, i));
        if (*report == 1) serve_streams(); /* it leaves */
        if (*report == 2) return;
        w.busy->home = i;
        await_stream(1, w.busy, QUEUED_ID);
        EQUAL(gw_slot_of(waiters[1].ticket), i);
        step_streams();
    }
}
static const mode alone_modes[] = {
    {"pause-rest", PAUSE_ALONE, NULL, NULL, feed_sleeper, serve_streams, NULL},
    {"pause-rest-running", PAUSE_ALONE, NULL, admit_streams, feed_sleeper, serve_streams, NULL},
    {"pause-withdrawn", PAUSE_ALONE, NULL, NULL, feed_sleeper, withdraw_and_read_again, NULL},
    {"kill-withdrawn", KILL, NULL, NULL, feed_sleeper, withdraw_and_read_again, reap_then_stream},
};

static const scenario stream_scenarios[] = {
    {"stream", two_read, own, NULL, stream_all, NULL, serve_streams, MODES(streaming_owner_modes)},
    {"stream", two_read, own, NULL, stream_all, NULL, serve_streams, MODES(keeper_beside_streams)},
    {"stream-take-over", owner_died_streaming, own, NULL, take_streams_over, NULL, serve_streams, MODES(streaming_owner_modes)},
    {"read-stream", somebody_reads, join, NULL, read_stream, NULL, serve_streams, MODES(reader_modes)},
    {"read-on", somebody_reads, join_and_ask, NULL, read_alone, NULL, serve_streams, MODES(alone_modes)},
    {"stop-reading", somebody_reads, join, NULL, stop_reading, NULL, serve_streams, MODES(reader_modes)},
};

#endif
