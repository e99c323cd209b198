/* Arming points, and what happens at one. GPUWORKER_FAILPOINT="name:action[:nth]" arms one when the library is loaded; action: kill, stop, exit. */
#define _GNU_SOURCE
#include "failpoints.h"
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef GW_FAILPOINTS

#define EXIT_STATUS 70
#define EXIT_UNKNOWN 71

extern gw_failpoint __start_gw_failpoints[], __stop_gw_failpoints[]; /* the linker's */

void gw_failpoint_pass(gw_failpoint *point) {
    if (atomic_fetch_sub_explicit(&point->passes_left, 1, memory_order_seq_cst) != 1) return;
    switch (atomic_exchange_explicit(&point->action, GW_POINT_OFF, memory_order_seq_cst)) {
    case GW_POINT_KILL: kill(getpid(), SIGKILL); break;
    case GW_POINT_STOP: kill(getpid(), SIGSTOP); break;
    case GW_POINT_EXIT: _exit(EXIT_STATUS);
    default: break;
    }
}

int gw_failpoint_arm(const char *name, uint32_t action, int32_t nth) {
    if (action > GW_POINT_EXIT || nth < 1) return -EINVAL;
    for (gw_failpoint *point = __start_gw_failpoints; point < __stop_gw_failpoints; point++) {
        if (strcmp(point->name, name)) continue;
        atomic_store_explicit(&point->passes_left, nth, memory_order_seq_cst);
        atomic_store_explicit(&point->action, action, memory_order_seq_cst);
        return 0;
    }
    return -ENOENT;
}

const char *gw_failpoint_name(uint32_t i) { return i < (uint32_t)(__stop_gw_failpoints - __start_gw_failpoints) ? __start_gw_failpoints[i].name : NULL; }

__attribute__((constructor)) static void arm_from_environment(void) {
    static const char *actions[] = {[GW_POINT_KILL] = "kill", [GW_POINT_STOP] = "stop", [GW_POINT_EXIT] = "exit"};
    const char *asked = getenv("GPUWORKER_FAILPOINT");
    char name[64], action[8];
    int nth = 1;
    if (!asked || !*asked) return;
    if (sscanf(asked, "%63[^:]:%7[^:]:%d", name, action, &nth) >= 2)
        for (uint32_t i = GW_POINT_KILL; i <= GW_POINT_EXIT; i++)
            if (!strcmp(action, actions[i]) && !gw_failpoint_arm(name, i, nth)) return;
    fprintf(stderr, "GPUWORKER_FAILPOINT=%s: no such point or action\n", asked);
    _exit(EXIT_UNKNOWN);
}
#endif
