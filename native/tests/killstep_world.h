/* The world around a victim: a segment, its owner, the other frontends. Made anew for every point. */
#ifndef GPUWORKER_TESTS_KILLSTEP_WORLD_H
#define GPUWORKER_TESTS_KILLSTEP_WORLD_H
#include "killstep_spill.h"
#include "killstep_trace.h"
#include "killstep_waiter.h"

enum { CAPACITY = 6, PARTICIPANTS = 4, MAX_ATTEMPTS = 3, WAITERS = 4, IDS = 128, STREAM_AREA = 640 };

/* Requests by who sends them. */
enum { VICTIM_ID = 1, DEAD_ID = 8, PATIENT_ID = 16, QUEUED_ID = 24, BUSY_ID = 32 };

static rig r;
static struct {
    gw_port *patient, *busy;      /* frontends of this process: one waits, the other goes on */
    uint64_t taken[2 * CAPACITY]; /* what the owner has taken and not answered */
    int held, owner_deaths;
    uint64_t next_id;             /* of the requests of `busy`, from BUSY_ID on */
    uint32_t probe;               /* a slot that the victim had: its semaphore is to be tried */
} w;
static waiter waiters[WAITERS], owner_thread;

/* Shared with victims, which are other processes. */
enum { UNSAID = -100 };
static _Atomic int *report;       /* what a cancel of the victim's request said */
static _Atomic uint32_t *ran;     /* by id: how often an owner worked it out */
static _Atomic uint64_t *running; /* what the owner runs, as its keeper sees it: a thread of the owner's in life, and a process of its own here */

static inline void world_map(void) { /* once in a process */
    r = rig_open(CAPACITY, PARTICIPANTS, STREAM_AREA);
    void *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    calls_are_over = shared;
    report = (_Atomic int *)(calls_are_over + 1);
    ran = calls_are_over + 2;
    running = (_Atomic uint64_t *)(ran + IDS);
    for (int i = 0; i < WAITERS; i++) waiter_open(&waiters[i]);
    waiter_open(&owner_thread);
}

static inline void new_owner(void) {
    if (r.owner && r.owner->running == running) r.owner->running = NULL;
    rig_new_owner(&r);
    gw_set_wake(r.owner, GW_PARK);
    free((void *)r.owner->running);
    for (int i = 0; i < CAPACITY; i++) running[i] = UINT64_MAX;
    r.owner->running = running;
    w.held = 0;
}

static inline gw_port *join_as_sleeper(void) {
    gw_port *port = rig_join(&r, getpid());
    gw_set_wake(port, GW_PARK); /* no spinning: its steps would be many and never the same */
    return port;
}

static inline void world_open(void) {
    memset(r.base, 0, r.bytes);
    memset((void *)ran, 0, IDS * sizeof *ran);
    *report = UNSAID;
    w.probe = CAPACITY - 1;
    EQUAL(gw_format(r.base, CAPACITY, PARTICIPANTS, STREAM_AREA, STREAM_AREA, SPILL_BYTES, 1), 0);
    new_owner();
    gw_set_policy(r.owner, GW_REJECT, GW_PARK, CAPACITY, CAPACITY, 0, CAPACITY);
    gw_set_state(r.owner, GW_SERVING);
    w.owner_deaths = 0;
    w.next_id = BUSY_ID;
    w.patient = join_as_sleeper();
    w.busy = join_as_sleeper();
}

/* ---- the owner ---- */

static inline void work(gw_port *owner, int64_t ticket, uint64_t request) {
    uint64_t words[WORDS];
    if (gw_kind_of(request) & GW_KIND_SPILLED) spill_read(ticket, 'q', words);
    else memcpy(words, gw_request_area(owner, gw_slot_of(ticket)), PAYLOAD_BYTES);
    uint64_t id = words[0];
    check_filled(words, id);
    CHECK(id > 0 && id < IDS);
    ran[id]++;
    fill(words, answer_to(id));
    if (gw_kind_of(request) & GW_KIND_SPILLED) {
        spill_write(ticket, 'r', words);
        gw_responded(owner, ticket, SPILLED);
    } else gw_respond(owner, ticket, GW_KIND_BYTES, NULL, 0, words, PAYLOAD_BYTES);
}

/* Answers what was taken. The requests are read only now: nobody may have touched them, not even if their senders died meanwhile. */
static inline int answer_taken(gw_port *owner, const uint64_t *taken, int n) {
    for (int k = 0; k < n; k++) work(owner, (int64_t)taken[2 * k], taken[2 * k + 1]);
    for (int k = 0; k < n; k++) gw_finish(owner, taken + 2 * k, 1); /* they may be of several batches, each of which ends with its first */
    for (int k = 0; k < n; k++) spill_clean_up(owner, (int64_t)taken[2 * k]);
    return n;
}

static inline int take(void) { /* all that is queued, in as many batches as it takes, to be answered later */
    int before = w.held;
    gw_collect(r.owner, 0);
    for (int n; (n = gw_take(r.owner, CAPACITY, 0, w.taken + 2 * w.held)); w.held += n) {}
    return w.held - before;
}
static inline int answer(void) {
    int n = answer_taken(r.owner, w.taken, w.held);
    w.held = 0;
    return n;
}
/* What was running when an owner died is a batch of its own, taken when nothing else is on its way: so it comes last. */
static inline int serve(void) {
    int served = 0;
    for (int n = 1; n; served += n) take(), n = answer();
    return served;
}

/* The keeper's round: takes back what those held who are proved dead by the lock that the kernel has dropped. */
static inline int reap(void) {
    int n = 0;
    for (uint32_t i = 0; (i = gw_next_participant(r.owner, i));)
        if (!gw_is_locked(r.fd, i)) n += gw_reap(r.owner, i);
    gw_count_alive(r.owner);
    EQUAL(gw_free_strays(r.owner), 0); /* only a scribble makes one */
    spill_sweep(r.owner);
    return n;
}

static inline int64_t serve_until_stopped(waiter *self) {
    while (!self->stop)
        if (gw_collect(self->port, gw_now() + LONG_NS) > 0) serve();
    return 0;
}
static inline void owner_falls_asleep(void) { waiter_start(&owner_thread, serve_until_stopped, r.owner, 0); }
static inline void owner_thread_ends(void) {
    if (!owner_thread.busy) return;
    owner_thread.stop = 1;
    gw_bell(r.owner);
    waiter_end(&owner_thread);
}

static inline int recover(gw_port *owner) { return gw_recover(owner, MAX_ATTEMPTS, GW_KIND_DIED); }

static inline void next_owner(void) {
    new_owner();
    gw_set_owner(r.owner, 3, 3, 3);
    recover(r.owner);
    EQUAL(r.owner->header->batch_started_ns, 0); /* else it would be taken for stuck */
    gw_set_state(r.owner, GW_SERVING);
}

/* ---- the frontends of this process ---- */

static inline int64_t submit(gw_port *port, uint64_t id) {
    uint64_t words[WORDS];
    fill(words, id);
    int64_t ticket = gw_submit(port, GW_KIND_BYTES, NULL, 0, words, PAYLOAD_BYTES, 0, 0);
    CHECK(ticket > 0);
    return ticket;
}

static inline int64_t wait_response(waiter *self) {
    int64_t response;
    do response = gw_wait(self->port, self->ticket, 0, LONG_NS);
    while (response == -ETIMEDOUT && gw_now() < self->until_ns); /* gw_wake_all was for somebody else */
    return response;
}
/* A request whose sender sleeps until it is answered. */
static inline void await(int i, gw_port *port, int64_t ticket, uint64_t id) {
    waiter_start(&waiters[i], wait_response, port, ticket);
    waiters[i].id = id;
}

/* Withdraws it, as another thread of its process would. -> as gw_cancel */
static inline int withdraw(int i) {
    waiter *self = &waiters[i];
    int outcome = gw_cancel(self->port, self->ticket);
    if (outcome == 0 || outcome == 1) self->withdrawn = 1;
    return outcome;
}

/* The sleeper has been told, once and rightly: a lost wake-up would leave it asleep for LONG_NS. */
static inline void expect_told(waiter *self) {
    if (!self->busy) return;
    int64_t response = waiter_end(self);
    if (!self->id) { /* no request's */
        CHECK(response >= 0);
        return;
    }
    if (self->withdrawn) {
        EQUAL(response, -ESTALE);
        return;
    }
    CHECK(response >= 0);
    uint32_t kind = gw_kind_of((uint64_t)response);
    if (response == (int64_t)SPILLED) {
        uint64_t words[WORDS];
        spill_read(self->ticket, 'r', words);
        check_filled(words, answer_to(self->id));
        spill_remove(self->ticket, 'r');
        EQUAL(gw_release(self->port, self->ticket), 0);
        return;
    }
    if (kind == GW_KIND_BYTES && self->or_answered) self->kind = kind;
    EQUAL(kind, self->kind);
    if (kind == GW_KIND_BYTES) {
        receive_answer(self->port, self->ticket, self->id);
        CHECK(ran[self->id] >= 1);
    } else EQUAL(gw_release(self->port, self->ticket), 0);
}

/* Identities are written here as three times the same number. */
static inline int is_whole(const gw_identity *who) { return (uint64_t)who->pid == who->start_ticks && who->start_ticks == who->pid_namespace; }

/* Who may be asked whether it lives has said who it is. */
static inline void participants_are_whole(void) {
    gw_participant_view view;
    for (uint32_t i = 1; i <= PARTICIPANTS; i++)
        if (gw_read_participant(r.owner, i, &view) == GW_ALIVE) CHECK(view.identity.pid > 0);
}

/* `busy` has something to do: a request in each free slot, answered if an owner is there, else withdrawn in time. */
static inline void others_go_on(int is_served) {
    int64_t tickets[CAPACITY];
    uint64_t n = 0, first_id = w.next_id;
    for (int64_t ticket; n < CAPACITY && (ticket = gw_claim(w.busy)) > 0; n++) {
        tickets[n] = ticket;
        put_request(w.busy, ticket, w.next_id++);
        EQUAL(gw_publish(w.busy, ticket, gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES), 0, 0), 0);
    }
    gw_overview overview;
    gw_read_header(r.owner, &overview);
    if (!(overview.epoch & 1)) CHECK(is_whole(&overview.owner));
    if (!(overview.supervisor_epoch & 1)) CHECK(is_whole(&overview.supervisor));
    participants_are_whole();
    if (is_served) serve();
    for (uint64_t k = 0; k < n; k++) {
        int64_t response = gw_wait(w.busy, tickets[k], 0, is_served ? PATIENCE_NS : 0);
        if (response == -ETIMEDOUT && !is_served) {
            CHECK(gw_cancel(w.busy, tickets[k]) < 2);
            continue;
        }
        EQUAL(response, gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES));
        receive_answer(w.busy, tickets[k], first_id + k);
    }
}

#endif
