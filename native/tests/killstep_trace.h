/* A child process that runs instruction by instruction, or at full speed to one of them, and can be killed or stopped there. x86-64. */
#ifndef GPUWORKER_TESTS_KILLSTEP_TRACE_H
#define GPUWORKER_TESTS_KILLSTEP_TRACE_H
#include "rig.h"
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

#ifndef PATIENCE_NS
#define PATIENCE_NS (20 * SECOND_NS) /* whoever has not moved on by then is stuck */
#endif

/* ASLEEP: inside the system call that it would otherwise have stepped over. OVER: it has made all its calls, or is gone. */
enum event { STEPPED, ASLEEP, OVER };

typedef struct { pid_t pid; uint64_t ip; enum event last; long sleep; int gone, status; } victim;

static _Atomic uint32_t *calls_are_over; /* shared with the victim, which sets it */

static inline void in_time(uint64_t start_ns, const char *what) {
    if (gw_now() - start_ns > PATIENCE_NS) fail(__FILE__, __LINE__, what, 0, 1);
}

/* 0: it is not asleep. Else a number that differs from one sleep to the next. */
static inline long sleeps(pid_t pid, pid_t tid) {
    char path[64], status[4096];
    snprintf(path, sizeof path, "/proc/%d/task/%d/status", (int)pid, (int)tid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, status, sizeof status - 1);
    close(fd);
    status[n > 0 ? n : 0] = 0;
    const char *switches = strstr(status, "\nvoluntary_ctxt_switches:");
    return strstr(status, "State:\tS") && switches ? 1 + atol(strchr(switches, ':') + 1) : 0;
}

/* The child prepares itself and then stops just before `body`. */
static inline victim launch(void (*prepare)(void), void (*body)(void)) {
    *calls_are_over = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (ptrace(PTRACE_TRACEME, 0, 0, 0)) perror("killstep needs ptrace"), _exit(1);
        prepare();
        raise(SIGSTOP);
        body();
        _exit(0);
    }
    victim v = {.pid = pid};
    EQUAL(waitpid(pid, &v.status, 0), pid);
    CHECK(WIFSTOPPED(v.status) && WSTOPSIG(v.status) == SIGSTOP); /* else its preparation has failed */
    EQUAL(ptrace(PTRACE_SETOPTIONS, pid, 0, PTRACE_O_EXITKILL), 0);
    return v;
}

static inline uint64_t peek_user(const victim *v, size_t offset) { return (uint64_t)ptrace(PTRACE_PEEKUSER, v->pid, offset, 0); }

/* What has become of a victim that was set going: it stopped after an instruction, fell asleep, or is over. */
static inline enum event next_event(victim *v) {
    uint64_t start = gw_now();
    while (!waitpid(v->pid, &v->status, WNOHANG)) {
        long sleep = sleeps(v->pid, v->pid);
        if (sleep && sleep != v->sleep) {
            v->sleep = sleep;
            return v->last = ASLEEP;
        }
        sched_yield();
        in_time(start, "a call that was to end");
    }
    v->gone = !WIFSTOPPED(v->status);
    if (v->gone) return v->last = OVER;
    EQUAL(WSTOPSIG(v->status), SIGTRAP);
    v->ip = peek_user(v, offsetof(struct user_regs_struct, rip));
    return v->last = *calls_are_over ? OVER : STEPPED;
}

/* The child runs the parent's text at the same addresses, so the parent may look there. */
static inline int is_system_call(uint64_t ip) { return ip && !memcmp((const void *)ip, "\x0f\x05", 2); }

/* One instruction. After ASLEEP: the rest of the system call. */
static inline enum event step(victim *v) {
    if (v->last == ASLEEP) return next_event(v);
    int may_sleep = is_system_call(v->ip);
    EQUAL(ptrace(PTRACE_SINGLESTEP, v->pid, 0, 0), 0);
    if (!may_sleep) EQUAL(waitid(P_PID, (id_t)v->pid, &(siginfo_t){0}, WSTOPPED | WEXITED | WNOWAIT), 0);
    return next_event(v);
}

/* 0 where there are no hardware breakpoints. An address of 0 takes it away. */
static inline int set_breakpoint(const victim *v, uint64_t ip) {
    return !ptrace(PTRACE_POKEUSER, v->pid, offsetof(struct user, u_debugreg[0]), ip) &&
           !ptrace(PTRACE_POKEUSER, v->pid, offsetof(struct user, u_debugreg[7]), ip ? 1 : 0);
}

/* At full speed to the next time it is about to execute the breakpoint's instruction. */
static inline enum event run_on(victim *v) {
    if (v->last != ASLEEP) EQUAL(ptrace(PTRACE_CONT, v->pid, 0, 0), 0);
    return next_event(v);
}

static inline void kill_victim(victim *v) {
    EQUAL(kill(v->pid, SIGKILL), 0);
    do EQUAL(waitpid(v->pid, &v->status, 0), v->pid);
    while (WIFSTOPPED(v->status)); /* a sleeper may have come to the end of its system call just before */
    CHECK(WIFSIGNALED(v->status) && WTERMSIG(v->status) == SIGKILL);
    v->gone = 1;
}

/* Stopped, also if it was inside a system call. */
static inline void stop_victim(victim *v) {
    if (v->last != ASLEEP) return;
    EQUAL(kill(v->pid, SIGSTOP), 0);
    EQUAL(waitpid(v->pid, &v->status, 0), v->pid);
    CHECK(WIFSTOPPED(v->status));
    v->last = STEPPED;
}

/* Lets it go on by itself; call again until it says 1: it has ended, and well. */
static inline void resume_victim(victim *v) {
    if (v->gone) return;
    stop_victim(v); /* only what is stopped can be let go */
    EQUAL(ptrace(PTRACE_DETACH, v->pid, 0, 0), 0);
    kill(v->pid, SIGCONT); /* a SIGSTOP of ours may have come second to the end of its system call */
}
static inline int has_ended(victim *v) {
    v->gone = v->gone || waitpid(v->pid, &v->status, WNOHANG) == v->pid;
    if (v->gone) EQUAL(v->status, 0); /* else one of its own checks has failed */
    return v->gone;
}

#endif
