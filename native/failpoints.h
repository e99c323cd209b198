/* Named places between the atomics of every transition, where a test makes a process die or stop.
 *
 * GW_POINT(name); stands after one step and before the next. It is nothing at all unless GW_FAILPOINTS is defined (GPUWORKER_FAILPOINTS=1, native/build.py).
 * Each use makes one entry of the linker's section gw_failpoints, so the points need no list; a name is used once. */
#ifndef GPUWORKER_FAILPOINTS_H
#define GPUWORKER_FAILPOINTS_H

#ifndef GW_FAILPOINTS
#define GW_POINT(label) ((void)0)
#else
#include <stdatomic.h>
#include <stdint.h>

enum gw_failpoint_action { GW_POINT_OFF = 0, GW_POINT_KILL, GW_POINT_STOP, GW_POINT_EXIT }; /* SIGKILL, SIGSTOP, _exit(70) */

typedef struct { const char *name; _Atomic uint32_t action; _Atomic int32_t passes_left; } gw_failpoint;

#define GW_POINT(label)                                                                                                                      \
    do {                                                                                                                                     \
        static gw_failpoint point __attribute__((section("gw_failpoints"), used, aligned(8))) = {.name = #label};                            \
        if (atomic_load_explicit(&point.action, memory_order_relaxed)) gw_failpoint_pass(&point);                                            \
    } while (0)

/* The armed point acts at its nth pass in this process, once. Armed points are inherited by fork. */
void gw_failpoint_pass(gw_failpoint *point);
int gw_failpoint_arm(const char *name, uint32_t action, int32_t nth); /* 0, -ENOENT (no such point), -EINVAL */
const char *gw_failpoint_name(uint32_t i);                            /* NULL after the last one */
#endif
#endif
