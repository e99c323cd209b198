/* Who waits for the next piece of an answer: what ends the wait, that no wake-up is lost, and that whoever scribbles over a log harms nobody but its reader. */
#define _GNU_SOURCE
#include "stream_cases.h"
#include <signal.h>
#include <sys/wait.h>

enum { ENTRIES = 100000, LIVES = 400 };
static const uint32_t modes[] = {GW_PARK, GW_ADAPTIVE, GW_BUSY};

typedef struct { gw_port *port; int64_t ticket, result; uint32_t seen; _Atomic pid_t tid; } reader;
static void *wait_for_more(void *argument) {
    reader *self = argument;
    self->tid = gettid();
    self->result = gw_stream_wait(self->port, self->ticket, self->seen, 0, LONG_NS);
    return NULL;
}
/* In a thread of its own that is asleep when this returns. */
static pthread_t start(reader *self) {
    pthread_t thread;
    self->tid = 0;
    CHECK(!pthread_create(&thread, NULL, wait_for_more, self));
    waiting as_it_waits = {0};
    while (!self->tid) sched_yield();
    as_it_waits.tid = self->tid;
    until_asleep(&as_it_waits);
    return thread;
}
static int64_t told(pthread_t thread, const reader *self, uint64_t since_ns) {
    pthread_join(thread, NULL);
    CHECK(gw_now() - since_ns < LONG_NS); /* by somebody, and not by the time */
    return self->result;
}

static void do_nothing(int number) { (void)number; }

static void who_ends_a_wait(void) {
    struct sigaction action = {.sa_handler = do_nothing};
    sigaction(SIGUSR1, &action, NULL);
    for (int mode = 0; mode < 3; mode++) {
        gw_set_wake(front, modes[mode]);
        int64_t ticket = begin(front);
        reader one = {.port = front, .ticket = ticket};
        uint64_t since = gw_now();
        EQUAL(gw_stream_open(r.owner, ticket, 4, 8), 0);
        pthread_t thread = start(&one);
        append_to(ticket, 1, 0, 8);
        EQUAL(told(thread, &one, since), 1);
        one.seen = 1;
        thread = start(&one);
        pthread_kill(thread, SIGUSR1);
        EQUAL(told(thread, &one, since), -EINTR);
        thread = start(&one);
        gw_set_state(r.owner, GW_RESTARTING); /* and serving again: nothing to be told of */
        gw_set_state(r.owner, GW_DRAINING);
        gw_wake_all(r.owner);
        append_to(ticket, 1, 1, 8);
        EQUAL(told(thread, &one, since), 2);
        gw_set_state(r.owner, GW_SERVING);
        one.seen = 2;
        thread = start(&one);
        EQUAL(end(ticket), 0);
        EQUAL(told(thread, &one, since), GW_DELIVERED);
        release(ticket);
        one = (reader){.port = front, .ticket = begin(front)};
        thread = start(&one);
        EQUAL(gw_cancel(front, one.ticket), 1);
        EQUAL(told(thread, &one, since), -ESTALE);
        EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)one.ticket, 0}, 1), 1);
    }
}

static void states_that_end_a_wait(void) {
    int64_t ticket = begin(front);
    EQUAL(gw_stream_open(r.owner, ticket, 4, 8), 0);
    append_to(ticket, 1, 0, 8);
    const uint32_t over[] = {GW_STOPPED, GW_SUPERSEDED, GW_FAILED};
    for (int k = 0; k < 3; k++) {
        reader one = {.port = front, .ticket = ticket, .seen = 1};
        uint64_t since = gw_now();
        pthread_t thread = start(&one);
        gw_set_state(r.owner, over[k]);
        gw_wake_all(r.owner);
        EQUAL(told(thread, &one, since), -ETIMEDOUT);
        EQUAL(gw_stream_wait(front, ticket, 1, 0, LONG_NS), -ETIMEDOUT);
        CHECK(gw_now() - since < LONG_NS);
        EQUAL(gw_stream_wait(front, ticket, 0, 0, LONG_NS), 1); /* what there is can still be had */
        gw_set_state(r.owner, GW_SERVING);
    }
    for (uint32_t state = GW_STARTING; state <= GW_DRAINING; state++) { /* and these do not: it waits all its time */
        gw_set_state(r.owner, state);
        uint64_t start_ns = gw_now(), slice_ns = 2000000;
        EQUAL(gw_stream_wait(front, ticket, 1, 0, slice_ns), -ETIMEDOUT);
        CHECK(gw_now() >= start_ns + slice_ns);
    }
    EQUAL(end(ticket), 0);
    gw_set_state(r.owner, GW_STOPPED);
    EQUAL(gw_stream_wait(front, ticket, 1, 0, LONG_NS), GW_DELIVERED);
    release(ticket);
}

static void deadlines_and_slices(void) {
    int64_t ticket = begin(front);
    EQUAL(gw_stream_open(r.owner, ticket, 4, 8), 0);
    for (int k = 0; k < 3; k++) {
        uint64_t now = gw_now(), soon = 2000000;
        EQUAL(gw_stream_wait(front, ticket, 0, k == 1 ? now + soon : k == 2 ? now + LONG_NS : 0, k == 1 ? LONG_NS : soon), -ETIMEDOUT);
        CHECK(gw_now() >= now + soon && gw_now() < now + LONG_NS);
        EQUAL(gw_stream_wait(front, ticket, 0, now, LONG_NS), -ETIMEDOUT); /* it is over already */
        CHECK(gw_now() < now + LONG_NS);
    }
    append_to(ticket, 1, 0, 8);
    EQUAL(gw_stream_wait(front, ticket, 0, 1, 0), 1); /* what is there is had at once, however late it is */
    EQUAL(end(ticket), 0);
    EQUAL(gw_stream_wait(front, ticket, 1, 1, 0), GW_DELIVERED);
    release(ticket);
}

/* Who waits for a ticket has it, so an exception later on must not give it back: see gw_unsettled. */
static void waiting_settles(void) {
    int64_t ticket = begin(front);
    EQUAL(gw_unsettled(front), ticket);
    EQUAL(gw_finish(r.owner, (uint64_t[]){(uint64_t)ticket, 0}, 1), 0);
    EQUAL(gw_release(front, ticket), 0);
    ticket = begin(front);
    EQUAL(gw_stream_wait(front, ticket, 0, 0, 0), -ETIMEDOUT);
    EQUAL(gw_unsettled(front), 0);
    EQUAL(end(ticket), 0);
    release(ticket);
}

/* ---- no wake-up is lost: one entry after the other, half of them only when the last one has been read ---- */

static struct { _Atomic uint32_t seen; _Atomic int64_t ticket; } *shared;

static void read_all(gw_port *port, int64_t ticket) {
    const char *entries = (const char *)((gw_stream *)gw_response_area(port, gw_slot_of(ticket)) + 1);
    for (uint32_t seen = 0;;) {
        uint64_t start_ns = gw_now();
        int64_t result = gw_stream_wait(port, ticket, seen, 0, LONG_NS);
        CHECK(gw_now() - start_ns < LONG_NS);
        if (result == GW_DELIVERED) {
            EQUAL(seen, ENTRIES);
            break;
        }
        CHECK(result > seen && result <= ENTRIES);
        expect_entries(entries, 1, seen, (uint32_t)result, 4);
        seen = (uint32_t)result;
        atomic_store_explicit(&shared->seen, seen, memory_order_relaxed);
    }
    EQUAL(gw_release(port, ticket), 0);
}

static void write_all(int64_t ticket) {
    uint64_t whims = 1;
    EQUAL(gw_stream_open(r.owner, ticket, ENTRIES, 4), 0);
    for (uint32_t k = 0; k < ENTRIES; k++) {
        if (below(&whims, 2))
            while (atomic_load_explicit(&shared->seen, memory_order_relaxed) < k) sched_yield();
        EQUAL(append_to(ticket, 1, k, 4), 0);
    }
    EQUAL(end(ticket), 0);
}

static void *thread_that_reads(void *argument) {
    (void)argument;
    read_all(front, shared->ticket);
    return NULL;
}

static void process_that_reads(uint32_t mode) {
    gw_port *mine = rig_join(&r, getpid());
    gw_set_wake(mine, mode);
    shared->ticket = submit(mine, "x");
    read_all(mine, shared->ticket);
    _exit(0);
}

static void no_wake_up_is_lost(void) {
    for (int mode = 0; mode < 3; mode++) {
        gw_set_wake(front, modes[mode]);
        shared->seen = 0;
        shared->ticket = begin(front);
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, thread_that_reads, NULL));
        write_all(shared->ticket);
        pthread_join(thread, NULL);
    }
}

static void none_between_processes(void) {
    for (int mode = 0; mode < 3; mode++) {
        shared->seen = 0;
        fflush(stdout);
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) process_that_reads(modes[mode]);
        while (!gw_collect(r.owner, gw_now() + SECOND_NS / 100)) EQUAL(waitpid(child, NULL, WNOHANG), 0);
        EQUAL(gw_admit(r.owner, 1, taken), 1);
        write_all((int64_t)taken[0]);
        int status;
        EQUAL(waitpid(child, &status, 0), child);
        EQUAL(status, 0);
        EQUAL(gw_reap(r.owner, 3), 0);
    }
}

/* ---- somebody scribbles over the log ---- */

static _Atomic int over;
static _Atomic int64_t open_ticket;

/* Another process would do it without atomics: no ThreadSanitizer here. */
__attribute__((no_sanitize("thread"))) static void scribble_once(uint64_t *dice) {
    static const uint64_t extremes[] = {0, 1, 4, 5, 55, 56, 57, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, 1ull << 63, UINT64_MAX};
    uint64_t value = extremes[below(dice, sizeof extremes / sizeof *extremes)];
    int64_t ticket = open_ticket;
    gw_stream *stream = log_of(ticket);
    volatile uint32_t *plain[] = {&stream->entry_bytes, &stream->finish, &stream->counts[0], &stream->counts[2], &stream->error_bytes};
    switch (below(dice, 6)) {
    case 0: atomic_store_explicit(&stream->life, below(dice, 2) ? value : gw_life_of(ticket) + below(dice, 3) - 1, memory_order_relaxed); break;
    case 1: *plain[below(dice, 5)] = (uint32_t)value; break;
    case 2: *plain[0] = 8; break;
    case 3: atomic_fetch_add_explicit(&r.owner->slots[gw_slot_of(ticket)].semaphore, (uint32_t)value, memory_order_relaxed); break;
    default: atomic_store_explicit(&stream->written, (uint32_t)value, memory_order_relaxed);
    }
}
static void *scribble(void *argument) {
    uint64_t dice = (uint64_t)(uintptr_t)argument;
    while (!over) scribble_once(&dice);
    return NULL;
}

enum { NONE_NOW = -1, NO_MORE = -2 };

/* A reader that does as it is told, within its area: it gets nonsense, but no more than that, and its time is its own. */
static void *read_nonsense(void *argument) {
    _Atomic int64_t *next = argument;
    for (int64_t ticket; (ticket = *next) != NO_MORE;) {
        if (ticket == NONE_NOW) {
            sched_yield();
            continue;
        }
        uint64_t start_ns = gw_now();
        for (uint32_t seen = 0; gw_now() - start_ns < LONG_NS;) {
            uint64_t since = gw_now();
            int64_t result = gw_stream_wait(front, ticket, seen, below(&since, 2) ? since + 100000 : 0, 50000);
            if (result == GW_DELIVERED) break;
            CHECK(result == -ETIMEDOUT || (result > seen && result <= UINT32_MAX));
            if (result < 0) continue;
            seen = result <= FITTING(8) ? (uint32_t)result : 0;
        }
        CHECK(gw_now() - start_ns < LONG_NS);
        EQUAL(gw_phase(front, ticket), GW_DONE);
        EQUAL(gw_release(front, ticket), 0);
        *next = NONE_NOW;
    }
    return NULL;
}

static void scribbled_over(void) {
    pthread_t threads[3];
    static _Atomic int64_t next;
    const uint32_t most = (uint32_t)FITTING(8);
    static char copy[ROOM];
    over = 0;
    next = NONE_NOW;
    int64_t neighbour = begin(other);
    EQUAL(gw_stream_open(r.owner, neighbour, most, 8), 0);
    for (uint32_t k = 0; k < most; k++) append_to(neighbour, 9, k, 8);
    memcpy(copy, log_of(neighbour), ROOM);
    uint32_t its_semaphore = rig_slot(&r, neighbour)->semaphore;
    int64_t ticket = begin(front); /* where all the others will be, too */
    guard(ticket, 0);
    memcpy(log_of(neighbour), copy, ROOM);
    open_ticket = ticket;
    for (uintptr_t k = 0; k < 2; k++) CHECK(!pthread_create(&threads[k], NULL, scribble, (void *)(k + 1)));
    CHECK(!pthread_create(&threads[2], NULL, read_nonsense, &next));
    for (int life = 0; life < LIVES; life++) {
        if (life) {
            while (next != NONE_NOW) sched_yield();
            ticket = gw_submit(front, GW_KIND_STR, NULL, 0, NULL, 0, 0, 0);
            EQUAL(gw_slot_of(ticket), gw_slot_of(open_ticket));
            EQUAL(admit(1), 1);
        }
        open_ticket = next = ticket;
        for (uint32_t k = 0; k < most; k++) {
            int64_t written = gw_stream_open(r.owner, ticket, most, 8); /* as each new owner */
            CHECK(written >= 0 && written <= most);
            EQUAL(gw_stream_copy(r.owner, ticket, (char[ROOM]){0}, (uint32_t)written, 8), 0);
            EQUAL(append_to(ticket, 1, k, 8), 0);
        }
        EQUAL(end(ticket), 0);
    }
    while (next != NONE_NOW) sched_yield();
    over = 1;
    next = NO_MORE;
    for (int k = 0; k < 3; k++) pthread_join(threads[k], NULL);
    EQUAL(memcmp(copy, log_of(neighbour), ROOM), 0);
    EQUAL(rig_slot(&r, neighbour)->semaphore, its_semaphore);
    memset(log_of(neighbour), 0x3c, ROOM);
    guard(ticket, 1);
    EQUAL(end(neighbour), 0);
    EQUAL(gw_release(other, neighbour), 0);
}

/* Nothing comes, and what it sleeps on never stands still; or it comes and goes. */
static void *keep_it_awake(void *argument) {
    _Atomic uint32_t *semaphore = argument;
    while (!over) atomic_fetch_add_explicit(semaphore, 2, memory_order_relaxed);
    return NULL;
}
static void *come_and_go(void *argument) {
    gw_stream *stream = argument;
    for (uint64_t life = stream->life; !over; life ^= UINT64_MAX) atomic_store_explicit(&stream->life, life, memory_order_relaxed);
    return NULL;
}
static void a_slice_is_a_slice(void) {
    for (int k = 0; k < 2; k++) {
        int64_t ticket = begin(front);
        EQUAL(gw_stream_open(r.owner, ticket, 4, 8), 0);
        if (k) append_to(ticket, 1, 0, 8);
        pthread_t thread;
        over = 0;
        CHECK(!pthread_create(&thread, NULL, k ? come_and_go : keep_it_awake, k ? (void *)log_of(ticket) : &r.owner->slots[gw_slot_of(ticket)].semaphore));
        for (int waits = 0; waits < 500; waits++) {
            uint64_t start_ns = gw_now();
            int64_t result = gw_stream_wait(front, ticket, 0, 0, 50000);
            CHECK(result == -ETIMEDOUT || result == k);
            CHECK(gw_now() - start_ns < LONG_NS);
        }
        over = 1;
        pthread_join(thread, NULL);
        EQUAL(end(ticket), 0);
        EQUAL(gw_release(front, ticket), 0);
    }
}

static const stream_case cases[] = {
    {CASE(who_ends_a_wait), ROOM}, {CASE(states_that_end_a_wait), ROOM}, {CASE(deadlines_and_slices), ROOM}, {CASE(waiting_settles), ROOM},
    {CASE(no_wake_up_is_lost), 1 << 19}, {CASE(none_between_processes), 1 << 19}, {CASE(a_slice_is_a_slice), ROOM}, {CASE(scribbled_over), ROOM}};

int main(void) {
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    run_stream_cases(cases, sizeof cases / sizeof *cases);
    printf("stream_waits: %zu cases, %d entries in each wake mode, between threads and between processes\n", sizeof cases / sizeof *cases, ENTRIES);
    return 0;
}
