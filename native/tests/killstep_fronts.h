/* Victims that send requests: the C calls of gpuworker/client, in its order. */
#ifndef GPUWORKER_TESTS_KILLSTEP_FRONTS_H
#define GPUWORKER_TESTS_KILLSTEP_FRONTS_H
#include "killstep_settle.h"

enum { VICTIM = 3 }; /* its participant: the first place that is vacant */

/* ---- in the victim: first all calls, then what they must have said ---- */

static gw_port *mine;
static uint64_t request[WORDS];
static _Alignas(GW_LINE) uint64_t response[WORDS];
static int64_t my_ticket;
static const int64_t RIGHT = (int64_t)PAYLOAD_BYTES; /* described: bytes, no meta */

static void calls_over(void) { *calls_are_over = 1; }
static void answer_is_right(void) { check_filled(response, answer_to(VICTIM_ID)); }

static void join(void) {
    context = "the victim:";
    mine = join_as_sleeper();
    EQUAL(mine->me, VICTIM);
    fill(request, VICTIM_ID);
}

static void call(void) {
    int64_t ticket = gw_submit(mine, GW_KIND_BYTES, NULL, 0, request, PAYLOAD_BYTES, 0, 0);
    int64_t described = gw_wait(mine, ticket, 0, LONG_NS);
    int received = gw_receive(mine, ticket, 0, response, PAYLOAD_BYTES);
    calls_over();
    EQUAL(described, RIGHT);
    EQUAL(received, 0);
    answer_is_right();
}

static void call_like_the_last(void) {
    int64_t ticket = gw_submit(mine, GW_KIND_BYTES, NULL, 0, request, PAYLOAD_BYTES, 0, 0);
    int64_t delivered = gw_wait_for(mine, ticket, 0, LONG_NS, PAYLOAD_BYTES, "", response);
    calls_over();
    EQUAL(delivered, GW_DELIVERED);
    answer_is_right();
}

static void draft(void) {
    int64_t ticket = gw_claim(mine);
    memcpy(gw_request_area(mine, gw_slot_of(ticket)), request, PAYLOAD_BYTES);
    int published = gw_publish(mine, ticket, PAYLOAD_BYTES, 0, 0);
    gw_unsettled(mine);
    int64_t described = gw_wait(mine, ticket, 0, LONG_NS);
    memcpy(response, gw_response_area(mine, gw_slot_of(ticket)), PAYLOAD_BYTES);
    int released = gw_release(mine, ticket);
    calls_over();
    EQUAL(published, 0);
    EQUAL(described, RIGHT);
    EQUAL(released, 0);
    answer_is_right();
}

static void spill(void) {
    int64_t ticket = gw_claim(mine);
    spill_write(ticket, 'q', request);
    int published = gw_publish(mine, ticket, SPILLED, 0, 0);
    int64_t described = gw_wait(mine, ticket, 0, LONG_NS);
    spill_read(ticket, 'r', response);
    spill_remove(ticket, 'r');
    int released = gw_release(mine, ticket);
    calls_over();
    EQUAL(published, 0);
    EQUAL(described, (int64_t)SPILLED);
    EQUAL(released, 0);
    answer_is_right();
}

static void spill_and_withdraw(void) {
    int64_t ticket = gw_claim(mine);
    spill_write(ticket, 'q', request);
    gw_publish(mine, ticket, SPILLED, 0, 0);
    *report = gw_abandon(mine, ticket);
    if (*report == 0) spill_remove(ticket, 'q');
    if (*report == 2) spill_remove(ticket, 'r');
    calls_over();
    CHECK(*report >= 0);
}

static void drop_claimed(void) {
    gw_claim(mine);
    int dropped = gw_abandon(mine, gw_unsettled(mine));
    calls_over();
    EQUAL(dropped, 0);
}

static void cancel(void) {
    int64_t ticket = gw_submit(mine, GW_KIND_BYTES, NULL, 0, request, PAYLOAD_BYTES, 0, 0);
    int outcome = *report = gw_cancel(mine, ticket);
    int received = outcome == 2 ? gw_receive(mine, ticket, 0, response, PAYLOAD_BYTES) : gw_poll(mine, ticket);
    calls_over();
    EQUAL(received, outcome == 2 ? 0 : -ESTALE);
    if (outcome == 2) answer_is_right();
}

static void too_late(void) { /* a wait that times out, and what the client makes of it */
    int64_t ticket = gw_submit(mine, GW_KIND_BYTES, NULL, 0, request, PAYLOAD_BYTES, 0, 0);
    int64_t described = gw_wait(mine, ticket, gw_now(), LONG_NS);
    if (described == -ETIMEDOUT) *report = gw_abandon(mine, ticket);
    else gw_receive(mine, ticket, 0, response, PAYLOAD_BYTES);
    calls_over();
    if (described == -ETIMEDOUT) CHECK(*report >= 0);
    else answer_is_right();
}

static void wait_for_room(void) {
    int64_t ticket = gw_claim_wait(mine, gw_now() + LONG_NS);
    memcpy(gw_request_area(mine, gw_slot_of(ticket)), request, PAYLOAD_BYTES);
    int published = gw_publish(mine, ticket, PAYLOAD_BYTES, 0, 0);
    int64_t described = gw_wait(mine, ticket, 0, LONG_NS);
    int received = gw_receive(mine, ticket, 0, response, PAYLOAD_BYTES);
    calls_over();
    EQUAL(published, 0);
    EQUAL(described, RIGHT);
    EQUAL(received, 0);
    answer_is_right();
}

static void join_and_submit(void) {
    join();
    my_ticket = gw_submit(mine, GW_KIND_BYTES, NULL, 0, request, PAYLOAD_BYTES, 0, 0);
}
/* Another thread of this process may cancel, and `report` then says so. If the slot is claimed again before this one sleeps, its wake-up is gone. */
static void wait_alone(void) {
    int64_t described;
    do described = gw_wait(mine, my_ticket, 0, LONG_NS);
    while (described == -ETIMEDOUT);
    if (described >= 0) gw_receive(mine, my_ticket, 0, response, PAYLOAD_BYTES);
    calls_over();
    EQUAL(described, *report == 0 || *report == 1 ? -ESTALE : RIGHT);
    if (described >= 0) answer_is_right();
}

static void join_and_fill_slots(void) {
    join();
    for (int id = VICTIM_ID; id < VICTIM_ID + 3; id++) submit(mine, (uint64_t)id);
    CHECK(gw_claim(mine) > 0);
}
static void leave(void) {
    int left = gw_leave(mine);
    gw_close(mine);
    calls_over();
    EQUAL(left, 0);
    EQUAL(gw_claim(mine), -ECHILD);
    for (int i = 0; i < CAPACITY; i++) { /* nobody works for it any more */
        uint64_t word = mine->slots[i].word;
        CHECK(gw_participant_of(word) != VICTIM || (gw_phase_of(word) != GW_READY && gw_phase_of(word) != GW_RUNNING));
    }
}

static int my_lock_fd;
static void prepare_to_join(void) {
    context = "the victim:";
    my_lock_fd = rig_lock_fd(&r);
    mine = calloc(1, sizeof *mine);
}
static void join_alone(void) {
    gw_open(mine, r.base, r.bytes);
    int joined = gw_join(mine, my_lock_fd, getpid(), 0, 0);
    calls_over();
    EQUAL(joined, 0);
    CHECK(mine->me >= VICTIM);
    EQUAL(mine->participants[mine->me - 1].identity.pid, getpid());
}

/* ---- in the harness ---- */

static void somebody_waits(void) { await(0, w.patient, submit(w.patient, PATIENT_ID), PATIENT_ID); }
static void answer_sleeper(void) { answer(); }
static void serve_sleeper(void) { serve(); }
static void reap_then_serve(void) { reap(); others_go_on(1); }
static void take_then_reap(void) { take(); reap(); others_go_on(1); }
static void serve_then_reap(void) { serve(); reap(); others_go_on(1); }
static void others_are_served(void) { reap(); others_go_on(1); }
static void others_are_served_later(void) { take(); reap(); others_go_on(0); }
/* The owner's own thread does the serving: it must hear the others' bell, whatever became of the victim's. */
static void others_wake_the_owner(void) {
    reap();
    uint64_t id = w.next_id++;
    int64_t ticket = submit(w.busy, id);
    EQUAL(gw_wait(w.busy, ticket, 0, PATIENCE_NS), RIGHT);
    receive_answer(w.busy, ticket, id);
}

static void owner_dies(void) {
    w.owner_deaths++;
    next_owner();
    serve();
    reap();
    others_go_on(1);
}

static const mode front_modes[] = {
    {"kill-reaped", KILL, NULL, NULL, serve_sleeper, NULL, reap_then_serve},
    {"kill-taken", KILL, NULL, NULL, serve_sleeper, NULL, take_then_reap},
    {"kill-served", KILL, NULL, serve, NULL, NULL, serve_then_reap},
    {"kill-running", KILL, NULL, take, answer_sleeper, NULL, reap_then_serve},
    {"kill-owner-asleep", KILL, owner_falls_asleep, NULL, NULL, NULL, others_wake_the_owner},
    {"kill-with-owner", KILL, NULL, take, serve_sleeper, NULL, owner_dies},
    {"pause", PAUSE, NULL, NULL, serve_sleeper, others_are_served, NULL},
    {"pause-taken", PAUSE, NULL, NULL, serve_sleeper, others_are_served_later, NULL},
    {"pause-served", PAUSE, NULL, serve, NULL, others_are_served, NULL},
    {"pause-running", PAUSE, NULL, take, answer_sleeper, others_are_served_later, NULL},
    {"pause-owner-asleep", PAUSE, owner_falls_asleep, NULL, NULL, others_wake_the_owner, NULL},
    {"pause-owner-dies", PAUSE, NULL, NULL, serve_sleeper, owner_dies, NULL},
    {"pause-owner-dies-running", PAUSE, NULL, take, serve_sleeper, owner_dies, NULL},
};

static void fill_ring(void) {
    while (gw_claim(w.busy) > 0) {}
}
static int64_t wait_room(waiter *self) {
    int64_t ticket = gw_claim_wait(self->port, gw_now() + LONG_NS);
    return ticket < 0 ? ticket : gw_abandon(self->port, ticket);
}
static void everybody_wants_room(void) {
    fill_ring();
    waiter_start(&waiters[0], wait_room, w.patient, 0);
}
/* Room for two: the victim and the other one. */
static int free_two(void) {
    int freed = 0;
    for (uint32_t i = 0; i < CAPACITY && freed < 2; i++) {
        uint64_t word = w.busy->slots[i].word;
        if (gw_phase_of(word) == GW_CLAIMED && gw_participant_of(word) == w.busy->me) freed += gw_cancel(w.busy, gw_ticket(word, i)) == 0;
    }
    return freed;
}
static void make_room(void) { free_two(); }
static void empty_ring(void) { while (free_two()) {} }

/* The victim's request is cancelled by another thread of its process, and the slot's next life is that of somebody who sleeps. */
static void withdraw_and_reuse(void) {
    gw_port twin = *w.patient;
    twin.me = VICTIM;
    for (uint32_t i = 0; i < CAPACITY; i++) {
        uint64_t word = twin.slots[i].word;
        if (gw_phase_of(word) == GW_FREE || gw_participant_of(word) != VICTIM) continue;
        *report = gw_cancel(&twin, gw_ticket(word, i));
        if (*report) return;
        w.busy->home = i;
        int64_t ticket = submit(w.busy, QUEUED_ID);
        EQUAL(gw_slot_of(ticket), i);
        await(1, w.busy, ticket, QUEUED_ID);
    }
}
static void withdraw_reuse_serve(void) { withdraw_and_reuse(); serve(); }
static const mode wait_modes[] = {
    {"kill-reused", KILL, NULL, NULL, serve_sleeper, withdraw_and_reuse, reap_then_serve},
    {"kill-reused-served", KILL, NULL, NULL, serve_sleeper, withdraw_reuse_serve, reap_then_serve},
    {"pause-reused", PAUSE_ALONE, NULL, NULL, serve_sleeper, withdraw_and_reuse, NULL},
    {"pause-reused-served", PAUSE_ALONE, NULL, NULL, serve_sleeper, withdraw_reuse_serve, NULL},
    {"pause-withdrawn-running", PAUSE_ALONE, NULL, take, answer_sleeper, withdraw_and_reuse, NULL},
};

static void one_of_each_phase(void) { /* of what the victim has: DONE, RUNNING, READY, CLAIMED */
    if (owner_thread.busy) return; /* it has answered all of them, or will */
    gw_collect(r.owner, 0);
    EQUAL(gw_take(r.owner, 2, 0, w.taken), 2); /* the other one's came first */
    w.held = 2;
    answer();
    EQUAL(gw_take(r.owner, 1, 0, w.taken), 1);
    w.held = 1;
}

static gw_port *newcomer;
static void somebody_joins(void) { participants_are_whole(), newcomer = join_as_sleeper(); }
static void somebody_leaves(void) {
    if (!newcomer) return;
    EQUAL(newcomer->participants[newcomer->me - 1].identity.pid, getpid());
    gw_leave(newcomer);
    port_close(newcomer);
    newcomer = NULL;
    others_go_on(1);
}
static const mode join_modes[] = {
    {"kill", KILL, NULL, NULL, NULL, participants_are_whole, reap_then_serve},
    {"kill-while-joining", KILL, NULL, NULL, NULL, somebody_joins, somebody_leaves},
    {"pause", PAUSE, NULL, NULL, NULL, somebody_joins, somebody_leaves},
};

static const scenario front_scenarios[] = {
    {"call", somebody_waits, join, NULL, call, NULL, NULL, MODES(front_modes)},
    {"call-like-the-last", somebody_waits, join, NULL, call_like_the_last, NULL, NULL, MODES(front_modes)},
    {"draft", somebody_waits, join, NULL, draft, NULL, NULL, MODES(front_modes)},
    {"spill", somebody_waits, join, NULL, spill, NULL, NULL, MODES(front_modes)},
    {"spill-and-withdraw", somebody_waits, join, NULL, spill_and_withdraw, NULL, NULL, MODES(front_modes)},
    {"drop-claimed", somebody_waits, join, NULL, drop_claimed, NULL, NULL, MODES(front_modes)},
    {"cancel", somebody_waits, join, NULL, cancel, NULL, NULL, MODES(front_modes)},
    {"too-late", somebody_waits, join, NULL, too_late, NULL, NULL, MODES(front_modes)},
    {"wait-for-room", everybody_wants_room, join, NULL, wait_for_room, make_room, empty_ring, MODES(front_modes)},
    {"wait", somebody_waits, join_and_submit, NULL, wait_alone, NULL, NULL, MODES(wait_modes)},
    {"leave", somebody_waits, join_and_fill_slots, one_of_each_phase, leave, NULL, NULL, MODES(front_modes)},
    {"join", somebody_waits, prepare_to_join, NULL, join_alone, NULL, NULL, MODES(join_modes)},
};

#endif
