/* fork() and the locks that prove a process alive: a child can do nothing with its parent's port, keeps nothing of it alive, and may join by
 * itself. */
#define _GNU_SOURCE
#include "cases.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

/* Runs `body` in a child; -> its exit status, 0 if all its checks held. */
static int in_child(void (*body)(void)) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        body();
        _exit(0);
    }
    int status;
    EQUAL(waitpid(child, &status, 0), child);
    return status;
}

/* A process that lives until it is told to end: by closing the pipe. */
typedef struct { pid_t pid; int pipe; } sleeper;
static sleeper start_sleeper(void (*body)(void)) {
    int ends[2], ready[2];
    char byte = 0;
    EQUAL(pipe(ends) | pipe(ready), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        close(ends[1]);
        if (body) body();
        EQUAL(write(ready[1], &byte, 1), 1);
        _exit((int)read(ends[0], &byte, 1));
    }
    close(ends[0]);
    close(ready[1]);
    EQUAL(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return (sleeper){child, ends[1]};
}
static void end_sleeper(sleeper s) {
    close(s.pipe);
    EQUAL(waitpid(s.pid, NULL, 0), s.pid);
}

static int64_t claimed, ready_, running, done;

static void use_parents_port(void) {
    const int64_t tickets[] = {claimed, ready_, running, done};
    char into[2 * GW_LINE];
    EQUAL(gw_claim(front), -ECHILD);
    EQUAL(gw_claim_wait(front, gw_now() + LONG_NS), -ECHILD);
    EQUAL(submit(front, "x"), -ECHILD);
    EQUAL(gw_leave(front), -ECHILD);
    EQUAL(gw_cancel(front, gw_unsettled(front)), -ECHILD);
    for (int k = 0; k < 4; k++) {
        EQUAL(gw_publish(front, tickets[k], 0, 0, 0), -ECHILD);
        EQUAL(gw_poll(front, tickets[k]), -ECHILD);
        EQUAL(gw_wait(front, tickets[k], 0, LONG_NS), -ECHILD);
        EQUAL(gw_receive(front, tickets[k], 0, into, 1), -ECHILD);
        EQUAL(gw_release(front, tickets[k]), -ECHILD);
        EQUAL(gw_cancel(front, tickets[k]), -ECHILD);
    }
    port_close(front);
}

static void use_it_in_a_grandchild(void) {
    EQUAL(in_child(use_parents_port), 0);
    use_parents_port();
}

static void parents_port_is_out_of_reach(void) {
    done = submit(front, "done");
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    running = submit(front, "running");
    uint64_t taken[2];
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(gw_take(r.owner, 1, 0, taken), 1);
    ready_ = submit(front, "ready");
    claimed = gw_claim(front);
    static char before[sizeof(gw_header) + PARTICIPANTS * sizeof(gw_participant) + CAPACITY * (sizeof(gw_slot) + 2 * AREA)];
    EQUAL(sizeof before, r.bytes);
    memcpy(before, r.base, sizeof before);
    EQUAL(in_child(use_parents_port), 0);
    EQUAL(in_child(use_it_in_a_grandchild), 0);
    EQUAL(memcmp(before, r.base, sizeof before), 0);
    CHECK(gw_is_locked(r.fd, front->me)); /* the parent goes on as before */
    EQUAL(gw_answered(r.owner, running, 0), 0);
    EQUAL(gw_cancel(front, claimed) | gw_cancel(front, ready_) | gw_release(front, running) | gw_release(front, done), 0);
}

static void join_and_submit(void) {
    gw_port *own = rig_join(&r, getpid());
    EQUAL(own->me, 3);
    CHECK(submit(own, "from the child") >= 0);
}

static void child_joins_by_itself(void) {
    sleeper s = start_sleeper(join_and_submit);
    CHECK(gw_is_locked(r.fd, 3));
    EQUAL(r.owner->header->alive, 3);
    gw_participant_view view;
    EQUAL(gw_read_participant(r.owner, 3, &view), GW_ALIVE);
    EQUAL(view.identity.pid, s.pid);
    EQUAL(view.held, 1);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    kill(s.pid, SIGKILL);
    end_sleeper(s);
    EQUAL(gw_is_locked(r.fd, 3), 0);
    EQUAL(gw_reap(r.owner, 3), 1);
}

/* A middle process joins, or takes the owner's byte, and forks a child that outlives it. */
static int child_pipe[2];
static void hold_and_fork(uint32_t index) {
    gw_port *port = index ? rig_join(&r, 1) : port_open(r.base);
    if (!index) {
        int fd = rig_lock_fd(&r);
        EQUAL(gw_try_lock(fd, 0), 0);
        gw_keep_lock(port, fd);
    }
    int forked[2];
    char byte = 0;
    EQUAL(pipe(forked), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        EQUAL(write(forked[1], &byte, 1), 1);
        close(child_pipe[1]);
        _exit((int)read(child_pipe[0], &byte, 1)); /* until the test is over */
    }
    EQUAL(read(forked[0], &byte, 1), 1);
}
static void hold_third(void) { hold_and_fork(3); }
static void hold_owners(void) { hold_and_fork(0); }

static void child_keeps_no_lock_alive(void) {
    for (uint32_t index = 0; index <= 3; index += 3) {
        EQUAL(pipe(child_pipe), 0);
        sleeper middle = start_sleeper(index ? hold_third : hold_owners);
        CHECK(gw_is_locked(r.fd, index));
        kill(middle.pid, SIGKILL);
        end_sleeper(middle);
        EQUAL(gw_is_locked(r.fd, index), 0); /* though its child lives */
        close(child_pipe[0]);
        close(child_pipe[1]);
        if (index) gw_reap(r.owner, index);
    }
}

static void locks_belong_to_descriptions(void) {
    int one = rig_lock_fd(&r), two = rig_lock_fd(&r), copy = dup(one);
    EQUAL(gw_try_lock(one, 0), 0);
    EQUAL(gw_try_lock(one, 0), 0);
    EQUAL(gw_try_lock(copy, 0), 0); /* the same description */
    EQUAL(gw_try_lock(two, 0), -EAGAIN); /* another one, though of the same process */
    EQUAL(gw_try_lock(two, 3), 0); /* byte by byte */
    CHECK(gw_is_locked(two, 0) && gw_is_locked(r.fd, 0));
    EQUAL(gw_is_locked(one, 0), 0); /* by another than itself, that is */
    close(rig_lock_fd(&r));
    close(copy);
    CHECK(gw_is_locked(two, 0)); /* closing some other descriptor of the file drops nothing */
    sleeper s = start_sleeper(NULL);
    close(one);
    CHECK(gw_is_locked(two, 0)); /* a plain child's inherited descriptor does keep a lock: hence the fork handler */
    kill(s.pid, SIGKILL);
    end_sleeper(s);
    EQUAL(gw_is_locked(two, 0), 0);
    EQUAL(gw_try_lock(-1, 0), -EBADF);
    EQUAL(gw_is_locked(-1, 0), -EBADF);
    close(two);
}

static void dropped_and_closed(void) {
    int fd = rig_lock_fd(&r);
    gw_port *port = port_open(r.base);
    EQUAL(gw_try_lock(fd, 0), 0);
    gw_keep_lock(port, fd);
    gw_drop_lock(port);
    EQUAL(gw_is_locked(r.fd, 0), 0);
    EQUAL(fcntl(fd, F_GETFD), -1);
    gw_drop_lock(port);
    port_close(port);
    CHECK(gw_is_locked(r.fd, other->me));
    port_close(other);
    EQUAL(gw_is_locked(r.fd, 2), 0);
    EQUAL(gw_reap(r.owner, 2), 0);
    other = rig_join(&r, 2);
}

/* Forks while other threads open, join and close ports: no child may find the library's mutex held. */
static _Atomic int over;
static void *open_and_close(void *unused) {
    while (!over) port_close(port_open(r.base));
    return unused;
}
static void open_in_child(void) {
    gw_port *port = port_open(r.base);
    EQUAL(gw_claim(port), -ENOTCONN);
    port_close(port);
}

static void forking_beside_threads(void) {
    pthread_t threads[2];
    for (int k = 0; k < 2; k++) pthread_create(&threads[k], NULL, open_and_close, NULL);
    for (int k = 0; k < 50; k++) EQUAL(in_child(open_in_child), 0);
    over = 1;
    for (int k = 0; k < 2; k++) pthread_join(threads[k], NULL);
}

static const named_case cases[] = {
    CASE(parents_port_is_out_of_reach), CASE(child_joins_by_itself), CASE(child_keeps_no_lock_alive), CASE(locks_belong_to_descriptions),
    CASE(dropped_and_closed), CASE(forking_beside_threads)};

int main(void) { return run_cases("fork", cases, sizeof cases / sizeof *cases); }
