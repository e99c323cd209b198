/* Victims that put the ring in order after an owner's death: its supervisor, and the owner that comes next. */
#ifndef GPUWORKER_TESTS_KILLSTEP_RECOVERY_H
#define GPUWORKER_TESTS_KILLSTEP_RECOVERY_H
#include "killstep_owners.h"

/* ---- in the victim ---- */

static void bury(void) { /* a supervisor, whose owner has died */
    gw_set_state(mine, GW_RESTARTING);
    recover(mine);
    gw_set_note(mine, "died", 4);
    gw_count_event(mine, GW_RESTARTED);
    calls_over();
}

static void give_up(void) { /* a supervisor, whose owners die again and again */
    gw_set_note(mine, "died", 4);
    gw_set_state(mine, GW_FAILED);
    gw_recover(mine, 1, GW_KIND_FAILED);
    gw_refuse_all(mine, GW_KIND_FAILED);
    gw_wake_all(mine);
    calls_over();
}

static void take_over(void) {
    gw_set_state(mine, GW_STARTING);
    gw_set_supervisor(mine, 7, 7, 7);
    gw_set_owner(mine, 5, 5, 5);
    recover(mine);
    gw_set_policy(mine, GW_REJECT, GW_PARK, CAPACITY, CAPACITY, 0, CAPACITY);
    gw_set_info(mine, "{}", 2);
    gw_set_state(mine, GW_SERVING);
    collect_and_run();
}

/* ---- in the harness ---- */

/* What an owner can leave behind. Waiters: 0 READY, its bit lost; 1 RUNNING; 2 DONE and not posted. Of `patient`, without a thread: `last`, RUNNING for
 * the last time it may. And one ABANDONED, one CLAIMED. */
static struct { int64_t last, claimed; } left_behind;
static void owner_died_with_everything(void) {
    await(2, w.patient, submit(w.patient, PATIENT_ID + 2), PATIENT_ID + 2);
    take();
    EQUAL(w.held, 1);
    work(r.owner, waiters[2].ticket, PAYLOAD_BYTES);
    gw_slot *slot = &r.owner->slots[gw_slot_of(waiters[2].ticket)];
    slot->done_ns = gw_now();
    slot->word = gw_with_phase(slot->word, GW_DONE);
    await(1, w.busy, submit(w.busy, QUEUED_ID), QUEUED_ID);
    left_behind.last = submit(w.patient, PATIENT_ID + 1);
    int64_t abandoned = submit(w.busy, QUEUED_ID + 2);
    take();
    r.owner->slots[gw_slot_of(left_behind.last)].attempts = MAX_ATTEMPTS - 1;
    EQUAL(gw_cancel(w.busy, abandoned), 1);
    await(0, w.patient, submit(w.patient, PATIENT_ID), PATIENT_ID);
    gw_collect(r.owner, 0);
    left_behind.claimed = gw_claim(w.busy);
    CHECK(left_behind.claimed > 0);
    EQUAL(gw_claim(w.busy), -EAGAIN);
    w.owner_deaths = 1;
    new_owner();
}
static void everything_was_dealt_with(void) {
    if (!waiters[1].withdrawn) CHECK(rig_slot(&r, waiters[1].ticket)->attempts >= 1); /* one owner died of it at least */
    EQUAL(gw_wait(w.patient, left_behind.last, 0, PATIENCE_NS), gw_describe(GW_KIND_DIED, 0, 0));
    EQUAL(gw_release(w.patient, left_behind.last), 0);
    EQUAL(ran[PATIENT_ID + 1], 0);
    EQUAL(ran[PATIENT_ID + 2], 1); /* was done, and is not done again */
    EQUAL(gw_abandon(w.busy, left_behind.claimed), 0);
}

static void everything_failed_or_was_dealt_with(void) {
    for (int i = 0; i < 2; i++) { /* READY and RUNNING: failed, or queued again by the next supervisor */
        waiters[i].kind = GW_KIND_FAILED;
        waiters[i].or_answered = 1;
    }
    int64_t last = gw_wait(w.patient, left_behind.last, 0, PATIENCE_NS);
    CHECK(last == (int64_t)gw_describe(GW_KIND_DIED, 0, 0) || last == (int64_t)gw_describe(GW_KIND_FAILED, 0, 0));
    EQUAL(gw_release(w.patient, left_behind.last), 0);
    EQUAL(ran[PATIENT_ID + 1], 0);
    EQUAL(gw_abandon(w.busy, left_behind.claimed), 0);
}

static const scenario recovery_scenarios[] = {
    {"bury", owner_died_with_everything, own, NULL, bury, NULL, everything_was_dealt_with, MODES(owner_modes)},
    {"take-over", owner_died_with_everything, own, NULL, take_over, NULL, everything_was_dealt_with, MODES(owner_modes)},
    {"give-up", owner_died_with_everything, own, NULL, give_up, NULL, everything_failed_or_was_dealt_with, MODES(owner_modes)},
};

#endif
