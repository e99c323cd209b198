/* Ends the owner when the process that started it is gone, even while a handler holds the GIL: a thread of plain C waits for the parent's pidfd,
 * asks for a drain with SIGTERM, and after the grace ends the process. (PR_SET_PDEATHSIG would fire when the starting *thread* ends.) */
#define _GNU_SOURCE
#include "ring.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct { int pidfd; uint64_t grace_ns; } watch;

static void *watch_parent(void *argument) {
    watch w = *(watch *)argument;
    free(argument);
    struct pollfd p = {.fd = w.pidfd, .events = POLLIN};
    while (poll(&p, 1, -1) < 0 && errno == EINTR) {}
    kill(getpid(), SIGTERM);
    struct timespec grace = {(time_t)(w.grace_ns / 1000000000u), (long)(w.grace_ns % 1000000000u)};
    while (nanosleep(&grace, &grace) && errno == EINTR) {}
    _exit(128 + SIGTERM);
}

int gw_watch_parent(int pidfd, uint64_t grace_ns) {
    watch *w = malloc(sizeof *w);
    if (!w) return -ENOMEM;
    *w = (watch){pidfd, grace_ns};
    pthread_t thread;
    sigset_t all, old;
    sigfillset(&all); /* signals are for the main thread, where Python handles them */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&thread, NULL, watch_parent, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error) {
        free(w);
        return -error;
    }
    pthread_detach(thread);
    return 0;
}
