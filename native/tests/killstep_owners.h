/* Victims that own the ring or look after it: the C calls of gpuworker/worker, in its order. */
#ifndef GPUWORKER_TESTS_KILLSTEP_OWNERS_H
#define GPUWORKER_TESTS_KILLSTEP_OWNERS_H
#include "killstep_fronts.h"

/* ---- in the victim ---- */

static void own(void) {
    context = "the victim:";
    mine = port_open(r.base);
    EQUAL(gw_open_backlog(mine), 0);
    mine->running = running;
    gw_set_wake(mine, GW_PARK);
}

static void keep(void) {
    context = "the victim:";
    mine = port_open(r.base);
    mine->running = running;
}

/* As take and answer_taken, without their checks, which would be steps too. */
static void run_taken(gw_port *owner, const uint64_t *taken, int n) {
    uint64_t words[WORDS];
    for (int k = 0; k < n; k++) {
        int64_t ticket = (int64_t)taken[2 * k];
        if (taken[2 * k + 1] == SPILLED) spill_read(ticket, 'q', words);
        else memcpy(words, gw_request_area(owner, gw_slot_of(ticket)), PAYLOAD_BYTES);
        ran[words[0] % IDS]++;
        fill(words, answer_to(words[0]));
        if (taken[2 * k + 1] == SPILLED) spill_write(ticket, 'r', words);
        if (taken[2 * k + 1] == SPILLED) gw_responded(owner, ticket, SPILLED);
        else gw_respond(owner, ticket, GW_KIND_BYTES, NULL, 0, words, PAYLOAD_BYTES);
    }
    gw_finish(owner, taken, n);
    for (int k = 0; k < n; k++)
        if (taken[2 * k + 1] == SPILLED) spill_clean_up(owner, (int64_t)taken[2 * k]);
}

static void run_batch(gw_port *owner) {
    uint64_t taken[2 * CAPACITY];
    int n = gw_take(owner, CAPACITY, 0, taken);
    run_taken(owner, taken, n);
}

/* As gpuworker/worker/scheduled_line.py: it keeps the queue itself, and chooses from it. */
static void own_queue(void) {
    own();
    gw_set_scheduling(mine, GW_ADMIT_IN_TIME, 0, 0, 0, 0, 1);
    gw_publish_lane(mine, 0, 0, CAPACITY, 1000, 2000);
    gw_publish_lanes(mine, 1);
}

static void collect_and_choose(void) {
    uint64_t taken[2 * CAPACITY], tickets[2 * CAPACITY];
    const gw_item *arrived;
    const uint64_t *gone;
    int n = 0, departures;
    while (!n) {
        gw_collect(mine, gw_now() + LONG_NS);
        n = gw_news(mine, &arrived, &gone, &departures);
    }
    for (int k = 0; k < n; k++) tickets[k] = arrived[n - 1 - k].ticket;
    gw_publish_queue(mine, 0, (uint32_t)n, 0, gw_arrived(mine, 0), gw_now());
    int ran_n = gw_take_these(mine, tickets, n, 0, taken);
    for (int k = 0; ran_n < n && k < n; k++) gw_put_back(mine, (int64_t)tickets[k]);
    gw_note_batch(mine, 1000, 0, 0);
    run_taken(mine, taken, ran_n);
    calls_over();
}

static void collect_and_run(void) {
    while (gw_collect(mine, gw_now() + LONG_NS) <= 0) {}
    run_batch(mine);
    calls_over();
}

static void drain(void) {
    gw_set_state(mine, GW_DRAINING);
    gw_collect(mine, 0);
    const gw_item *backlog = gw_backlog(mine);
    for (uint32_t k = 0; k < mine->queued; k++) gw_refuse(mine, (int64_t)backlog[k].ticket, GW_KIND_DRAINING);
    calls_over();
}

static void retire(void) {
    gw_set_state(mine, GW_STOPPED);
    gw_wake_all(mine);
    calls_over();
}

static void tick_late(void) {
    gw_heartbeat(mine, gw_now());
    gw_expire(mine, gw_now());
    calls_over();
}

static void tick_reaping(void) {
    for (uint32_t i = 0; (i = gw_next_participant(mine, i));)
        if (!gw_is_locked(r.fd, i)) gw_reap(mine, i);
    gw_count_alive(mine);
    gw_free_strays(mine);
    calls_over();
}

static void end_stuck_batch(void) { /* the main thread runs a batch, and may yet come to its end */
    gw_recover(mine, 1, GW_KIND_STUCK);
    calls_over();
}

/* ---- in the harness ---- */

static void somebody_died(void) { /* nobody has noticed yet */
    gw_port *dead = join_as_sleeper();
    submit(dead, DEAD_ID);
    port_close(dead);
}

static void two_wait(void) {
    somebody_died();
    await(0, w.patient, submit(w.patient, PATIENT_ID), PATIENT_ID);
    await(1, w.busy, submit(w.busy, QUEUED_ID), QUEUED_ID);
}

static int64_t submit_spilled(gw_port *port, uint64_t id) {
    uint64_t words[WORDS];
    int64_t ticket = gw_claim(port);
    fill(words, id);
    spill_write(ticket, 'q', words);
    EQUAL(gw_publish(port, ticket, SPILLED, 0, 0), 0);
    return ticket;
}
static void two_wait_for_files(void) {
    await(0, w.patient, submit_spilled(w.patient, PATIENT_ID), PATIENT_ID);
    await(1, w.busy, submit_spilled(w.busy, QUEUED_ID), QUEUED_ID);
}

static void two_wait_or_are_refused(void) {
    two_wait();
    for (int i = 0; i < 2; i++) {
        waiters[i].kind = GW_KIND_DRAINING;
        waiters[i].or_answered = 1; /* by the next owner */
    }
}

static void somebody_comes(void) {
    if (!waiters[0].busy) somebody_waits();
}

static void somebody_is_late(void) {
    uint64_t words[WORDS];
    fill(words, PATIENT_ID);
    await(0, w.patient, gw_submit(w.patient, GW_KIND_BYTES, NULL, 0, words, PAYLOAD_BYTES, 1, 0), PATIENT_ID);
    waiters[0].kind = GW_KIND_EXPIRED;
    await(1, w.busy, submit(w.busy, QUEUED_ID), QUEUED_ID);
}

/* Somebody died who held a slot in each phase. */
static void somebody_died_with_everything(void) {
    gw_port *dead = join_as_sleeper();
    int64_t tickets[4];
    for (int k = 0; k < 3; k++) tickets[k] = submit(dead, (uint64_t)(DEAD_ID + k));
    gw_collect(r.owner, 0);
    EQUAL(gw_take(r.owner, 3, 0, w.taken), 3);
    answer_taken(r.owner, w.taken, 1); /* the first is DONE */
    memmove(w.taken, w.taken + 2, 4 * sizeof *w.taken);
    w.held = 2;
    EQUAL(gw_cancel(dead, tickets[2]), 1);
    submit(dead, DEAD_ID + 3);
    CHECK(gw_claim(dead) > 0);
    r.owner->header->space_wanted[0] |= 1u << dead->me;
    port_close(dead);
    somebody_waits();
}

/* The owner's main thread goes on, or not, while the keeper's stands still. */
static void main_serves(void) { others_go_on(1); }
static void main_takes(void) { take(); others_go_on(0); }
static void main_serves_newcomer(void) { answer(); somebody_joins(); others_go_on(1); }
static void two_owners_die(void) {
    w.owner_deaths++;
    next_owner();
    owner_dies();
}
static void owner_ends(void) { /* what it has not served is left to its successor */
    next_owner();
    serve();
    others_go_on(1);
}

static void two_run(void) {
    two_wait();
    take();
    for (int i = 0; i < 2; i++) {
        waiters[i].kind = GW_KIND_STUCK;
        waiters[i].or_answered = 1; /* by the main thread, or the next owner */
    }
}
static void main_comes_to_its_end(void) { answer(); }

/* The keeper's thread goes on while the main one stands still. */
static void keeper_ticks(void) {
    gw_expire(r.owner, gw_now());
    reap();
    others_go_on(0);
}

static int withdraw_running(void) { return !waiters[1].withdrawn && gw_phase(r.owner, waiters[1].ticket) == GW_RUNNING ? withdraw(1), 1 : 0; }
static void withdraw_now(void) { if (!waiters[1].withdrawn) withdraw(1); }
static void others_cannot_be_served(void) { others_go_on(0); }
static void withdraw_now_and_go_on(void) { withdraw_now(); others_go_on(0); }
/* The slot's next life must not get the answer of the one before. */
static void withdraw_now_and_reuse(void) {
    if (waiters[1].withdrawn || withdraw(1) || r.owner->header->state >= GW_DRAINING) return;
    w.busy->home = gw_slot_of(waiters[1].ticket);
    int64_t ticket = submit(w.busy, QUEUED_ID + 1);
    EQUAL(gw_slot_of(ticket), gw_slot_of(waiters[1].ticket));
    await(3, w.busy, ticket, QUEUED_ID + 1);
    waiters[3].kind = waiters[1].kind;
    waiters[3].or_answered = waiters[1].or_answered;
}

static const mode owner_modes[] = {
    {"kill", KILL, NULL, NULL, NULL, NULL, owner_dies},
    {"kill-twice", KILL, NULL, NULL, NULL, NULL, two_owners_die},
    {"kill-cancelled", KILL, NULL, withdraw_running, NULL, NULL, owner_dies},
    {"kill-cancelled-dead", KILL, NULL, NULL, NULL, withdraw_now, owner_dies},
    {"kill-reused", KILL, NULL, NULL, NULL, withdraw_now_and_reuse, owner_dies},
    {"pause", PAUSE, NULL, NULL, NULL, others_cannot_be_served, owner_ends},
    {"pause-cancelled", PAUSE, NULL, withdraw_running, NULL, others_cannot_be_served, owner_ends},
    {"pause-cancelled-now", PAUSE, NULL, NULL, NULL, withdraw_now_and_go_on, owner_ends},
    {"pause-reused", PAUSE, NULL, NULL, NULL, withdraw_now_and_reuse, owner_ends},
};
static const mode keeper_goes_on[] = {{"pause-keeper", PAUSE, NULL, NULL, NULL, keeper_ticks, owner_ends}};
static const mode park_modes[] = {
    {"kill", KILL, NULL, NULL, NULL, NULL, owner_dies},
    {"pause", PAUSE, NULL, NULL, NULL, others_cannot_be_served, owner_ends},
    {"pause-alone", PAUSE, NULL, NULL, NULL, NULL, owner_ends},
};
static const mode stuck_modes[] = {
    {"kill", KILL, NULL, NULL, NULL, NULL, owner_dies},
    {"kill-answered", KILL, NULL, NULL, NULL, main_comes_to_its_end, owner_dies},
    {"pause", PAUSE, NULL, NULL, NULL, NULL, owner_dies},
    {"pause-answered", PAUSE, NULL, NULL, NULL, main_comes_to_its_end, owner_dies},
};
static const mode keeper_modes[] = {
    {"kill", KILL, NULL, NULL, NULL, NULL, owner_dies},
    {"kill-served", KILL, NULL, serve, NULL, NULL, owner_dies},
    {"pause", PAUSE, NULL, NULL, NULL, main_serves, NULL},
    {"pause-served", PAUSE, NULL, serve, NULL, main_serves, NULL},
    {"pause-taken", PAUSE, NULL, NULL, NULL, main_takes, NULL},
    {"pause-newcomer", PAUSE, NULL, NULL, NULL, main_serves_newcomer, somebody_leaves},
};

/* A request and a place in the ring are waited for. Whom the retiring owner wakes sees its state; the others are served by the next owner. */
static int64_t told_or_answered(waiter *self, int64_t described) {
    if (described == -ETIMEDOUT) return gw_abandon(self->port, self->ticket);
    return described < 0 ? described : gw_receive(self->port, self->ticket, 0, (uint64_t[WORDS]){0}, PAYLOAD_BYTES);
}
static int64_t wait_to_be_told(waiter *self) { return told_or_answered(self, gw_wait(self->port, self->ticket, 0, LONG_NS)); }
static int64_t wait_while_served(waiter *self) { /* who was told of an end that the next owner has taken back waits on */
    int64_t described;
    do described = gw_wait(self->port, self->ticket, 0, LONG_NS);
    while (described == -ETIMEDOUT && self->port->header->state < GW_STOPPED);
    return told_or_answered(self, described);
}
static int64_t wait_room_or_be_told(waiter *self) {
    int64_t outcome = wait_room(self);
    return outcome == -ENOTCONN ? 0 : outcome;
}
static void fill_ring_and_wait(int64_t (*wait)(waiter *)) {
    int64_t ticket = submit(w.patient, PATIENT_ID);
    fill_ring();
    waiter_start(&waiters[0], wait, w.patient, ticket);
    waiter_start(&waiters[1], wait_room_or_be_told, w.patient, 0);
}
static void a_full_ring_waits(void) { fill_ring_and_wait(wait_to_be_told); }
static void a_full_ring_waits_while_served(void) { fill_ring_and_wait(wait_while_served); }
static void all_were_told(void) {
    for (int i = 0; i < 2; i++) expect_told(&waiters[i]);
    next_owner();
    others_go_on(1);
}
static void owner_dies_retiring(void) {
    w.owner_deaths++;
    next_owner();
    serve();
    make_room();
}
static const mode kill_retiring[] = {{"kill", KILL, NULL, NULL, NULL, NULL, owner_dies_retiring}};
static const mode pause_retiring[] = {{"pause", PAUSE_ALONE, NULL, NULL, NULL, NULL, all_were_told}};

static const scenario owner_scenarios[] = {
    {"serve", two_wait, own, NULL, collect_and_run, NULL, NULL, MODES(owner_modes)},
    {"choose", two_wait, own_queue, NULL, collect_and_choose, NULL, NULL, MODES(owner_modes)},
    {"choose", two_wait, own_queue, NULL, collect_and_choose, NULL, NULL, MODES(keeper_goes_on)},
    {"serve", two_wait, own, NULL, collect_and_run, NULL, NULL, MODES(keeper_goes_on)},
    {"serve-spilled", two_wait_for_files, own, NULL, collect_and_run, NULL, NULL, MODES(owner_modes)},
    {"serve-spilled", two_wait_for_files, own, NULL, collect_and_run, NULL, NULL, MODES(keeper_goes_on)},
    {"park", NULL, own, NULL, collect_and_run, somebody_comes, NULL, MODES(park_modes)},
    {"drain", two_wait_or_are_refused, own, NULL, drain, NULL, NULL, MODES(owner_modes)},
    {"drain", two_wait_or_are_refused, own, NULL, drain, NULL, NULL, MODES(keeper_goes_on)},
    {"retire", a_full_ring_waits, own, NULL, retire, NULL, empty_ring, MODES(pause_retiring)},
    {"retire", a_full_ring_waits_while_served, own, NULL, retire, NULL, empty_ring, MODES(kill_retiring)},
    {"expire", somebody_is_late, keep, NULL, tick_late, NULL, NULL, MODES(keeper_modes)},
    {"reap", somebody_died_with_everything, keep, NULL, tick_reaping, NULL, NULL, MODES(keeper_modes)},
    {"end-stuck-batch", two_run, keep, NULL, end_stuck_batch, NULL, NULL, MODES(stuck_modes)},
};

#endif
