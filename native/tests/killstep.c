/* Nothing lost, nobody blocked: a process is killed, and separately stopped and let go on, after every machine instruction of the ring's calls.
 *
 *     killstep [--sample N] [--seed S] [--only SCENARIO[/MODE] [--step K]] [--list]
 *
 * For each scenario (which calls the victim makes) and mode (what the others do, and when), and for each instruction of these calls: a world is
 * made, a victim is forked and brought there, and is killed or stopped. Its death is proved by waitpid and by the lock that the kernel drops. The
 * others go on; then all have been served with their own right answers, every sleeper was woken by somebody and not by a time-out,
 * all slots are free and work, every place among the participants can be taken, no file is left, what was
 * cancelled in time never ran, and nothing ran twice but for the death of an owner. Instructions inside libc and the vDSO and around system calls
 * count; of those inside the kernel a sleep is one point more.
 *
 * How a victim gets to its point: the first run of each scenario and mode goes step by step and notes the instructions; each later one runs at full
 * speed to hardware breakpoints, where the others had acted and at the point itself, and falls back to single steps when it took another path.
 *
 * What this does not prove: it covers every place of one switch (the victim stops, the others do something whole, the victim dies or goes on), not
 * every interleaving of two processes (native/model does), nor weak memory (one process at a time runs, on x86-64), nor the Python around it. */
#define _GNU_SOURCE
#ifdef __x86_64__
#include "killstep_run.h"
#include <sys/stat.h>

enum { MAX_WORKERS = 16, MAX_ROWS = 512 };

/* The rows are shared out among one worker for each core. */
typedef struct { pid_t pid; int row; } worker;
static row rows[MAX_ROWS];
static struct { int parts_left; long points, leapt; uint64_t ns; } results[MAX_ROWS];
static trace *paths[MAX_ROWS];
static int n_rows, n_workers;
static uint64_t seed;
static worker workers[MAX_WORKERS];
static char directory[] = "/tmp/killstep-XXXXXX";

static void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void add_rows(const scenario *all, int n, const char *only) {
    char name[64];
    for (const scenario *s = all; s < all + n; s++)
        for (const mode *m = s->modes; m < s->modes + s->n_modes; m++) {
            snprintf(name, sizeof name, "%s/%s", s->name, m->name);
            if (!only || !strcmp(only, name) || !strcmp(only, s->name)) rows[n_rows++] = (row){s, m};
        }
}

static void work_in(int slot, int cpu) { /* a core and a directory of its own */
    cpu_set_t set;
    char name[16];
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
    snprintf(name, sizeof name, "%d", slot);
    int base = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    mkdirat(base, name, 0700);
    spill_dir = openat(base, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(spill_dir >= 0);
}

static void clean_up(void) {
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", directory);
    if (system(command)) fprintf(stderr, "killstep: %s is left\n", directory);
}

static void say_where(int slot) {
    const row *it = &rows[workers[slot].row];
    const progress *p = &all_progress[slot];
    char command[128];
    fprintf(stderr, "killstep: FAILED in %s/%s at step %ld, at %#lx:\n", it->scenario->name, it->mode->name, p->point, p->ip);
    snprintf(command, sizeof command, "addr2line -fipe /proc/%d/exe %#lx >&2", (int)getpid(), (unsigned long)p->ip);
    if (system(command)) fprintf(stderr, "(no addr2line)\n");
    fprintf(stderr, "again: killstep --only %s/%s --step %ld\n", it->scenario->name, it->mode->name, p->point);
}

static void start(int slot, int cpu, int row_index, share mine) {
    all_progress[slot] = (progress){0};
    workers[slot].row = row_index;
    fflush(stdout);
    if ((workers[slot].pid = fork())) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    const row *it = &rows[row_index];
    static char name[64];
    snprintf(name, sizeof name, "%s/%s:", it->scenario->name, it->mode->name);
    context = name;
    self = &all_progress[slot];
    path = paths[row_index];
    work_in(slot, cpu);
    run_row(it, mine);
    _exit(0);
}

static void stop_all(int status) {
    for (int k = 0; k < n_workers; k++)
        if (workers[k].pid > 0) kill(workers[k].pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) {}
    clean_up();
    exit(status);
}

static void interrupted(int number) { (void)number; } /* waitpid returns */

/* Waits for a worker. -> its slot */
static int finish(void) {
    int status, slot = 0;
    pid_t pid = waitpid(-1, &status, 0);
    if (pid < 0) stop_all(130);
    while (workers[slot].pid != pid) slot++;
    workers[slot].pid = 0;
    if (status) {
        say_where(slot);
        stop_all(1);
    }
    int i = workers[slot].row;
    results[i].points += all_progress[slot].points;
    results[i].leapt += all_progress[slot].leapt;
    if (--results[i].parts_left == 0) {
        munmap(paths[i], sizeof *paths[i]);
        printf("%-20s %-26s %6ld points %7.2f s\n", rows[i].scenario->name, rows[i].mode->name, results[i].points,
               1e-9 * (double)(gw_now() - results[i].ns));
    }
    return slot;
}

/* The sample is spread evenly over the rows: a long row is mostly a long loop. */
static long quota_of(int row_index, long sample) {
    uint64_t dice = seed ^ (uint64_t)row_index << 32;
    return sample / n_rows + (below(&dice, (uint32_t)n_rows) < sample % n_rows);
}

static void run_all(long sample, long only_step) {
    cpu_set_t set;
    int cpus[CPU_SETSIZE], n_cpus = 0, busy = 0;
    sched_getaffinity(0, sizeof set, &set);
    for (int k = 0; k < CPU_SETSIZE; k++)
        if (CPU_ISSET(k, &set)) cpus[n_cpus++] = k;
    n_workers = n_cpus < MAX_WORKERS ? n_cpus : MAX_WORKERS;
    int parts = sample || only_step >= 0 ? 1 : n_workers;
    for (int i = 0; i < n_rows; i++) {
        share each = {.only_step = only_step, .quota = sample ? quota_of(i, sample) : 0, .dice = seed + 0x10001u * (uint64_t)i, .parts = parts};
        if (sample && !each.quota) continue;
        results[i].parts_left = parts;
        paths[i] = shared_memory(sizeof *paths[i]);
        paths[i]->steps = -1;
        for (; each.part < parts; each.part++) {
            int slot = busy < n_workers ? busy++ : finish();
            if (!results[i].ns) results[i].ns = gw_now();
            start(slot, cpus[slot], i, each);
        }
    }
    while (busy--) finish();
}

/* Some containers do not let a process trace its child. */
static int may_trace(void) {
    int status;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) _exit(ptrace(PTRACE_TRACEME, 0, 0, 0) != 0);
    EQUAL(waitpid(pid, &status, 0), pid);
    return status == 0;
}

int main(int argc, char **argv) {
    const char *only = NULL;
    long sample = 0, only_step = -1, list = 0;
    seed = gw_now();
    for (int k = 1; k < argc; k++) {
        const char *value = k + 1 < argc ? argv[k + 1] : "";
        if (!strcmp(argv[k], "--list")) list = 1;
        else if (!strcmp(argv[k], "--sample")) sample = atol(value), k++;
        else if (!strcmp(argv[k], "--seed")) seed = strtoull(value, NULL, 0), k++;
        else if (!strcmp(argv[k], "--step")) only_step = atol(value), k++;
        else if (!strcmp(argv[k], "--only")) only = value, k++;
        else return fprintf(stderr, "usage: killstep [--sample N] [--seed S] [--only SCENARIO[/MODE] [--step K]] [--list]\n"), 2;
    }
    add_rows(front_scenarios, sizeof front_scenarios / sizeof *front_scenarios, only);
    add_rows(owner_scenarios, sizeof owner_scenarios / sizeof *owner_scenarios, only);
    add_rows(recovery_scenarios, sizeof recovery_scenarios / sizeof *recovery_scenarios, only);
    add_rows(stream_scenarios, sizeof stream_scenarios / sizeof *stream_scenarios, only);
    if (!n_rows) return fprintf(stderr, "killstep: no scenario is called %s\n", only), 2;
    for (int i = 0; list && i < n_rows; i++) printf("%s/%s\n", rows[i].scenario->name, rows[i].mode->name);
    if (list) return 0;
    if (!may_trace()) return puts("killstep: SKIPPED, ptrace is not permitted here"), 0;
    printf("killstep: seed %llu%s\n", (unsigned long long)seed, sample ? ", a sample" : "");
    all_progress = shared_memory(sizeof *all_progress * MAX_WORKERS);
    if (!mkdtemp(directory)) return perror(directory), 2;
    struct sigaction action = {.sa_handler = interrupted};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    uint64_t start_ns = gw_now();
    run_all(sample, only_step);
    long points = 0, leapt = 0;
    for (int i = 0; i < n_rows; i++) points += results[i].points, leapt += results[i].leapt;
    printf("killstep: %ld points in %d scenarios and modes (%ld at full speed), %.1f s: nothing lost, nobody blocked\n", points, n_rows, leapt,
           1e-9 * (double)(gw_now() - start_ns));
    clean_up();
    return 0;
}

#else
#include <stdio.h>
int main(void) { return puts("killstep: skipped, it steps x86-64 only"), 0; }
#endif
