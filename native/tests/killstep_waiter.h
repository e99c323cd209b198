/* A thread that sleeps inside one call of the ring until somebody wakes it. */
#ifndef GPUWORKER_TESTS_KILLSTEP_WAITER_H
#define GPUWORKER_TESTS_KILLSTEP_WAITER_H
#include "killstep_trace.h"
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#define LONG_NS (60 * SECOND_NS) /* longer than PATIENCE_NS: whose wake-up is lost is stuck, not saved by a time-out */

typedef struct waiter waiter;
struct waiter {
    int64_t (*call)(waiter *self);
    gw_port *port;
    int64_t ticket, result;
    uint64_t id, until_ns;
    uint32_t kind;              /* of the response to be expected */
    int busy, withdrawn, or_answered;
    _Atomic int inside, ended, stop;
    _Atomic pid_t tid;
    sem_t begin, end;
};

static inline void *waiter_thread(void *argument) {
    waiter *self = argument;
    self->tid = gettid();
    for (;;) {
        sem_wait(&self->begin);
        self->inside = 1;
        self->result = self->call(self);
        self->inside = 0;
        self->ended = 1;
        sem_post(&self->end);
    }
    return NULL;
}

static inline void waiter_open(waiter *self) { /* lives as long as the process */
    pthread_t thread;
    sem_init(&self->begin, 0, 0);
    sem_init(&self->end, 0, 0);
    EQUAL(pthread_create(&thread, NULL, waiter_thread, self), 0);
}

/* Returns when the thread is asleep inside the call, or has been woken already. */
static inline void waiter_start(waiter *self, int64_t (*call)(waiter *), gw_port *port, int64_t ticket) {
    uint64_t start = gw_now();
    self->call = call;
    self->port = port;
    self->ticket = ticket;
    self->busy = 1;
    self->stop = self->ended = 0;
    self->id = 0;
    self->kind = GW_KIND_BYTES;
    self->withdrawn = self->or_answered = 0;
    self->until_ns = start + PATIENCE_NS;
    sem_post(&self->begin);
    while (!self->ended && !(self->inside && sleeps(getpid(), self->tid))) {
        sched_yield();
        in_time(start, "a thread that was to fall asleep");
    }
}

static inline int64_t waiter_end(waiter *self) {
    struct timespec limit;
    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_sec += PATIENCE_NS / SECOND_NS;
    int woken = sem_clockwait(&self->end, CLOCK_MONOTONIC, &limit) == 0;
    if (!woken) fail(__FILE__, __LINE__, "a waiter that was to be woken", 0, 1);
    self->busy = 0;
    return self->result;
}

#endif
