/* A small segment with its owner and two frontends, all in this process: fresh for every case, and with every slot free after it. */
#ifndef GPUWORKER_TESTS_CASES_H
#define GPUWORKER_TESTS_CASES_H
#include "rig.h"
#include <pthread.h>

enum { CAPACITY = 4, PARTICIPANTS = 3, AREA = 128 };
#define LONG_NS (30 * SECOND_NS) /* a wake-up that came only now was lost */

static rig r;
static gw_port *front, *other;

static inline int64_t submit(gw_port *port, const char *text) { return gw_submit(port, GW_KIND_STR, NULL, 0, text, strlen(text), 0, 0); }
static inline uint32_t kind_of(gw_port *port, int64_t ticket) { return gw_kind_of((uint64_t)gw_poll(port, ticket)); }

/* Takes up to n and echoes them; -> how many. */
static inline int serve(int n) {
    uint64_t taken[2 * CAPACITY];
    n = gw_take(r.owner, n, 0, taken);
    for (int k = 0; k < n; k++) {
        int64_t ticket = (int64_t)taken[2 * k];
        uint64_t total = gw_total_of(taken[2 * k + 1]);
        CHECK(gw_answer(r.owner, ticket, GW_KIND_STR, NULL, 0, gw_request_area(r.owner, gw_slot_of(ticket)), total) >= 0);
    }
    return n;
}

/* A thread inside gw_wait. */
typedef struct { gw_port *port; int64_t ticket, result; _Atomic pid_t tid; } waiting;
static inline void *wait_response(void *argument) {
    waiting *w = argument;
    w->tid = gettid();
    w->result = gw_wait(w->port, w->ticket, 0, LONG_NS);
    return NULL;
}

static inline void until_asleep(const waiting *w) {
    char path[64], stat[128] = "";
    while (!w->tid) sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", (int)w->tid);
    while (!strstr(stat, ") S ")) {
        int fd = open(path, O_RDONLY);
        CHECK(fd >= 0 && read(fd, stat, sizeof stat - 1) > 0);
        close(fd);
        sched_yield();
    }
}

typedef struct { const char *name; void (*run)(void); } named_case;
#define CASE(name) {#name, name}

static inline int run_cases(const char *title, const named_case *cases, size_t n) {
    for (size_t k = 0; k < n; k++) {
        context = cases[k].name;
        r = rig_open(CAPACITY, PARTICIPANTS, AREA);
        front = rig_join(&r, 1);
        other = rig_join(&r, 2);
        cases[k].run();
        EQUAL(gw_count(r.owner, GW_FREE), CAPACITY);
        port_close(front);
        port_close(other);
        rig_close(&r);
    }
    printf("%s: %zu cases\n", title, n);
    return 0;
}

#endif
