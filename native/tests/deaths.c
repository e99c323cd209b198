/* Dead owners and dead frontends: what the next one finds; and how a process joins and leaves. */
#define _GNU_SOURCE
#include "cases.h"

static void owners_die(void) {
    int64_t killer = submit(front, "killer"), queued = 0;
    uint64_t taken[2];
    for (int owner = 1; owner <= 3; owner++) {
        EQUAL(gw_collect(r.owner, 0), owner == 1 ? 1 : 2);
        EQUAL(gw_take(r.owner, 1, 0, taken), 1);
        EQUAL(taken[0], killer);
        if (owner == 1) queued = submit(other, "queued"); /* its ready bit is lost with the owner that collects it */
        if (owner == 2) EQUAL(gw_collect(r.owner, 0), 1);
        rig_new_owner(&r);
        EQUAL(gw_recover(r.owner, 3, GW_KIND_DIED), owner < 3);
        EQUAL(gw_recover(r.owner, 3, GW_KIND_DIED), 0); /* killed in the middle, it is run again */
        EQUAL(rig_slot(&r, killer)->attempts, owner);
    }
    EQUAL(kind_of(front, killer), GW_KIND_DIED);
    EQUAL(gw_wait(front, killer, 0, LONG_NS), gw_describe(GW_KIND_DIED, 0, 0));
    EQUAL(gw_release(front, killer), 0);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    EQUAL(gw_release(other, queued), 0);
    int64_t next = submit(front, "next"); /* the slot's next life starts from nought */
    EQUAL(gw_slot_of(next), gw_slot_of(killer));
    EQUAL(rig_slot(&r, next)->attempts, 0);
    EQUAL(gw_cancel(front, next), 0);
    EQUAL(r.owner->header->stats.requeued, 2);
}

static void a_wake_lost_with_the_owner(void) {
    int64_t ticket = submit(front, "x");
    gw_collect(r.owner, 0);
    serve(1);
    uint32_t posts = rig_slot(&r, ticket)->semaphore - 2; /* as if killed between DONE and post */
    r.owner->slots[gw_slot_of(ticket)].semaphore = posts;
    rig_new_owner(&r);
    gw_recover(r.owner, 2, GW_KIND_DIED);
    EQUAL(rig_slot(&r, ticket)->semaphore, posts + 2);
    EQUAL(gw_release(front, ticket), 0);
}

static void frontends_die(void) {
    int64_t running = submit(front, "running"), mine = submit(other, "mine");
    uint64_t taken[4], word = front->participants[0].word;
    EQUAL(gw_collect(r.owner, 0), 2);
    EQUAL(gw_take(r.owner, 1, 0, taken), 1);
    CHECK(submit(front, "ready") >= 0 && gw_claim(front) >= 0);
    EQUAL(r.owner->header->alive, 2);
    EQUAL(gw_reap(r.owner, 0), -EINVAL);
    EQUAL(gw_reap(r.owner, PARTICIPANTS + 1), -EINVAL);
    EQUAL(gw_reap(r.owner, 1), 3);
    EQUAL(gw_reap(r.owner, 1), 0);
    EQUAL(r.owner->header->alive, 1);
    EQUAL(r.owner->header->departed.submitted, 2);
    EQUAL(gw_count(r.owner, GW_FREE), CAPACITY - 2);
    gw_participant_view view;
    EQUAL(gw_read_participant(r.owner, 1, &view), GW_VACANT);
    port_close(front); /* drops the lock byte, as the kernel would */
    front = rig_join(&r, 7);
    EQUAL(front->me, 1);
    EQUAL(front->participants[0].word, word + 4); /* the next incarnation */
    EQUAL(gw_read_participant(r.owner, 1, &view), GW_ALIVE);
    EQUAL(view.identity.pid, 7);
    EQUAL(gw_cancel(front, running), -ESTALE); /* abandoned by the dead: not its successor's */
    EQUAL(gw_poll(front, running), -ESTALE);
    EQUAL(gw_answered(r.owner, running, 0), 1);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    EQUAL(gw_release(other, mine), 0);
}

/* A process may leave while a thread of it waits. That thread is told, and the slot's semaphore works for whoever has the slot next. */
static void waiters_of_one_that_left(void) {
    gw_set_wake(front, GW_PARK);
    gw_set_wake(other, GW_PARK);
    waiting left = {.port = front, .ticket = submit(front, "x")}, next = {.port = other};
    pthread_t thread;
    uint64_t start = gw_now();
    pthread_create(&thread, NULL, wait_response, &left);
    until_asleep(&left);
    EQUAL(gw_leave(front), 0); /* withdraws it: the owner reaps only once no thread can be inside a call */
    pthread_join(thread, NULL);
    EQUAL(left.result, -ESTALE);
    atomic_store(&other->home, gw_slot_of(left.ticket));
    next.ticket = submit(other, "y");
    EQUAL(gw_slot_of(next.ticket), gw_slot_of(left.ticket));
    pthread_create(&thread, NULL, wait_response, &next);
    until_asleep(&next);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    pthread_join(thread, NULL);
    EQUAL(next.result, gw_describe(GW_KIND_STR, 0, 1));
    EQUAL(gw_release(other, next.ticket), 0);
    CHECK(gw_now() - start < LONG_NS);
}

static void join_and_leave(void) {
    gw_port *third = rig_join(&r, 3), *late = port_open(r.base);
    int lock_fd = rig_lock_fd(&r);
    EQUAL(third->me, 3);
    EQUAL(gw_join(late, lock_fd, 4, 0, 0), -EUSERS);
    int64_t answered = submit(third, "answered"), claimed = gw_claim(third);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    int64_t left_behind = submit(third, "x");
    EQUAL(gw_leave(third), 0);
    EQUAL(gw_leave(third), -ESTALE);
    EQUAL(gw_claim(third), -ENOTCONN);
    EQUAL(gw_poll(third, left_behind), -ESTALE); /* withdrawn */
    EQUAL(gw_publish(third, claimed, 0, 0, 0), -ENOTCONN); /* given back */
    EQUAL(gw_phase(r.owner, claimed), GW_FREE);
    CHECK(gw_poll(third, answered) >= 0); /* a thread may be reading it */
    gw_participant_view view;
    EQUAL(gw_read_participant(r.owner, 3, &view), GW_LEFT);
    EQUAL(view.held, 1);
    EQUAL(gw_release(third, answered), 0);
    EQUAL(gw_join(late, lock_fd, 4, 0, 0), -EUSERS); /* not vacant yet */
    EQUAL(gw_phase(r.owner, left_behind), GW_FREE);
    EQUAL(gw_reap(r.owner, 3), 0);
    EQUAL(gw_join(late, lock_fd, 4, 0, 0), -EUSERS); /* vacant, but the byte is still locked */
    port_close(third);
    EQUAL(gw_join(late, lock_fd, 4, 0, 0), 0);
    EQUAL(late->me, 3);
    port_close(late);
}

static const named_case cases[] = {
    CASE(owners_die), CASE(a_wake_lost_with_the_owner), CASE(frontends_die), CASE(waiters_of_one_that_left), CASE(join_and_leave)};

int main(void) { return run_cases("deaths", cases, sizeof cases / sizeof *cases); }
