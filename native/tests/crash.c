/* Processes killed at any moment.
 *
 *     crash [kills] [seed]
 *
 * First frontends die under an owner that reaps each once the kernel has proved it dead; then owners die under their frontends, and each is followed
 * by one that recovers. The survivors get right answers throughout, and at the end no slot is missing. */
#define _GNU_SOURCE
#include "payload.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { FRONTENDS = 4, CAPACITY = 8, MAX_ATTEMPTS = 2 };
#define LONG_NS (30 * SECOND_NS)
#define SLICE_NS 20000000ull /* a killed poster may take its wake-up with it: so nobody sleeps longer than a slice */

static rig r;
static pid_t frontends[FRONTENDS], owner_process;
static uint64_t seed = 1, reaped;

/* ---- the children ---- */

static int64_t wait_for_answer(gw_port *port, int64_t ticket) {
    uint64_t start = gw_now();
    for (;;) {
        int64_t described = gw_wait(port, ticket, 0, SLICE_NS);
        if (described != -ETIMEDOUT) return described;
        CHECK(gw_now() - start < LONG_NS);
    }
}

static void frontend(uint32_t number) {
    uint64_t whims = seed + (uint64_t)getpid();
    gw_port *port = rig_join(&r, getpid());
    gw_set_wake(port, number % 3);
    context = "frontend:";
    for (uint64_t k = 0;; k++) {
        uint64_t id = (uint64_t)getpid() << 32 | k;
        uint32_t whim = below(&whims, 16);
        int64_t ticket = gw_claim_wait(port, gw_now() + LONG_NS);
        if (ticket == -ESHUTDOWN) _exit(0);
        CHECK(ticket >= 0);
        put_request(port, ticket, id);
        if (whim == 0) EQUAL(gw_cancel(port, ticket), 0);
        if (whim == 0) continue;
        EQUAL(gw_publish(port, ticket, gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES), 0, 0), 0);
        int outcome = whim == 1 ? gw_cancel(port, ticket) : 2;
        CHECK(outcome >= 0);
        if (outcome < 2) continue;
        int64_t described = wait_for_answer(port, ticket);
        if (described == (int64_t)gw_describe(GW_KIND_DIED, 0, 0)) EQUAL(gw_release(port, ticket), 0);
        else {
            EQUAL(described, gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES));
            receive_answer(port, ticket, id);
        }
    }
}

static void kill_and_reap(uint32_t victim);

/* Answers what there is; with `violent` some frontend may be killed between take and answer. */
static void serve(int violent) {
    uint64_t taken[2 * CAPACITY], words[WORDS];
    int n = gw_take(r.owner, CAPACITY, 0, taken);
    for (int k = 0; k < n; k++) {
        if (violent && !below(&seed, 64)) kill_and_reap(below(&seed, FRONTENDS));
        int64_t ticket = (int64_t)taken[2 * k];
        work_out(r.owner, ticket, taken[2 * k + 1], words);
        CHECK(gw_answer(r.owner, ticket, GW_KIND_BYTES, NULL, 0, words, sizeof words) >= 0);
    }
}

static void owner(void) {
    rig_new_owner(&r);
    context = "owner:";
    for (;;)
        if (gw_collect(r.owner, gw_now() + SLICE_NS) > 0) serve(0);
}

/* ---- the parent ---- */

static pid_t start(void (*body)(void), void (*numbered)(uint32_t), uint32_t number) {
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed check of the parent ends us too */
    if (body) body();
    else numbered(number);
    _exit(1);
}

static void take_back(pid_t pid) {
    gw_participant_view view;
    for (uint32_t i = 1; i <= r.owner->max_participants; i++) {
        if (gw_read_participant(r.owner, i, &view) != GW_ALIVE || view.identity.pid != pid) continue;
        EQUAL(gw_is_locked(r.fd, i), 0); /* the kernel's word that it can do nothing more */
        reaped += (uint64_t)gw_reap(r.owner, i);
    }
}

static void end(pid_t pid) {
    int status;
    EQUAL(kill(pid, SIGKILL), 0);
    EQUAL(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); /* and no failed check of its own */
}

static uint32_t kills;
static void kill_and_reap(uint32_t victim) {
    end(frontends[victim]);
    take_back(frontends[victim]);
    frontends[victim] = start(NULL, frontend, victim);
    kills++;
}

static void begin(void) {
    r = rig_open(CAPACITY, FRONTENDS, PAYLOAD_AREA);
    for (uint32_t i = 0; i < FRONTENDS; i++) frontends[i] = start(NULL, frontend, i);
    kills = 0;
    reaped = 0;
}

/* Drains; then every slot must be free, and good for a request. */
static void finish(const char *title) {
    gw_set_state(r.owner, GW_DRAINING);
    gw_wake_all(r.owner);
    for (uint32_t i = 0; i < FRONTENDS; i++) {
        int status;
        pid_t gone;
        while (!(gone = waitpid(frontends[i], &status, WNOHANG)))
            if (gw_collect(r.owner, gw_now() + 1000000) > 0) serve(0);
        EQUAL(gone, frontends[i]);
        EQUAL(status, 0);
        take_back(gone);
    }
    if (gw_collect(r.owner, 0) > 0) serve(0);
    gw_stats *stats = &r.owner->header->stats;
    printf("crash: %u %s killed; %lu requests answered, %lu abandoned, %lu requeued, %lu died; %lu slots reaped\n", kills, title, stats->completed,
           stats->abandoned, stats->requeued, stats->failed, reaped);
    EQUAL(gw_count(r.owner, GW_FREE), CAPACITY);
    CHECK(stats->completed > 0);
    gw_set_state(r.owner, GW_SERVING);
    gw_port *port = rig_join(&r, getpid());
    int64_t tickets[CAPACITY];
    for (uint64_t k = 0; k < CAPACITY; k++) {
        CHECK((tickets[k] = gw_claim(port)) >= 0);
        put_request(port, tickets[k], k + 1);
        EQUAL(gw_publish(port, tickets[k], gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES), 0, 0), 0);
    }
    EQUAL(gw_claim(port), -EAGAIN);
    EQUAL(gw_collect(r.owner, 0), CAPACITY);
    serve(0);
    for (uint64_t k = 0; k < CAPACITY; k++) {
        EQUAL(gw_wait(port, tickets[k], 0, LONG_NS), gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES));
        receive_answer(port, tickets[k], k + 1);
    }
    port_close(port);
    rig_close(&r);
}

static void frontends_die(uint32_t wanted) {
    begin();
    for (uint64_t next = gw_now(); kills < wanted;) {
        if (gw_collect(r.owner, gw_now() + below(&seed, 300000)) > 0) serve(1);
        if (gw_now() < next) continue;
        kill_and_reap(below(&seed, FRONTENDS));
        next = gw_now() + below(&seed, 2000000);
    }
    finish("frontends");
}

static void owners_die(uint32_t wanted) {
    begin();
    for (; kills < wanted; kills++) {
        owner_process = start(owner, NULL, 0);
        usleep(below(&seed, 3000));
        end(owner_process);
        uint32_t victim = below(&seed, 4 * FRONTENDS);
        if (victim < FRONTENDS) end(frontends[victim]);
        rig_new_owner(&r);
        gw_recover(r.owner, MAX_ATTEMPTS, GW_KIND_DIED);
        if (victim >= FRONTENDS) continue;
        take_back(frontends[victim]);
        frontends[victim] = start(NULL, frontend, victim);
    }
    finish("owners");
}

int main(int argc, char **argv) {
    uint32_t wanted = 200;
    if (argc > 1) wanted = (uint32_t)atoi(argv[1]);
    if (argc > 2) seed = strtoull(argv[2], NULL, 0);
    printf("crash: %u kills, seed %llu\n", wanted, (unsigned long long)seed);
    frontends_die(wanted);
    owners_die(wanted / 4);
    return 0;
}
