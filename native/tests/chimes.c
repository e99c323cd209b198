/* Chimes: who is rung when, how often, and by what; and that no wake-up is lost between threads. */
#define _GNU_SOURCE
#include "stream_cases.h"
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>

static char folder[] = "/tmp/gpuworker-chimes-XXXXXX";

static void path_of(const gw_port *port, char *path) {
    uint64_t incarnation = GW_LOAD(&r.owner->participants[port->me - 1].word) >> 2;
    sprintf(path, "%s/%u-%llu", folder, port->me, (unsigned long long)incarnation);
}

/* As a frontend makes it; -> its descriptor. The owner knows where to look. */
static int make_chime(const gw_port *port) {
    char path[128];
    path_of(port, path);
    EQUAL(mkfifo(path, 0600), 0);
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static void tell_owner(void) {
    char prefix[128];
    sprintf(prefix, "%s/", folder);
    EQUAL(gw_set_chimes(r.owner, prefix, -1), 0);
}

static void end_chime(const gw_port *port, int fd) {
    char path[128];
    path_of(port, path);
    close(fd);
    EQUAL(unlink(path), 0);
}

static int bytes_in(int fd) {
    char some[64];
    ssize_t n = read(fd, some, sizeof some);
    return n < 0 ? 0 : (int)n;
}

/* What one loop waits for. */
typedef struct { gw_port *port; int fd; int64_t tickets[CAPACITY]; uint32_t seen[CAPACITY], found[CAPACITY], is_over; } watch;
static int look(watch *w) { return gw_poll_many(w->port, w->fd, w->tickets, w->seen, w->found, &w->is_over); }
static void await(watch *w, int64_t ticket, uint32_t seen) {
    w->tickets[gw_slot_of(ticket)] = ticket;
    w->seen[gw_slot_of(ticket)] = seen;
}
static void forget_all(watch *w) { memset(w->tickets, 0xff, sizeof w->tickets); }
static watch watch_of(gw_port *port, int fd) {
    watch w = {.port = port, .fd = fd};
    forget_all(&w);
    return w;
}

static int take_and_finish(int n) {
    uint64_t taken[2 * CAPACITY];
    gw_collect(r.owner, 0);
    n = gw_take(r.owner, n, 0, taken);
    for (int k = 0; k < n; k++) EQUAL(gw_respond(r.owner, (int64_t)taken[2 * k], GW_KIND_BYTES, NULL, 0, NULL, 0), 0);
    EQUAL(gw_finish(r.owner, taken, n), 0);
    return n;
}

static void one_byte_for_a_batch(void) {
    tell_owner();
    watch w = watch_of(front, make_chime(front));
    for (int k = 0; k < 3; k++) await(&w, submit(front, "x"), GW_TO_THE_END);
    int64_t others = submit(other, "x");
    EQUAL(look(&w), 0);
    EQUAL(take_and_finish(4), 4);
    EQUAL(bytes_in(w.fd), 1);
    EQUAL(GW_LOAD(&r.owner->participants[front->me - 1].chime), GW_CHIME_TAKEN);
    EQUAL(look(&w), 3);
    for (int k = 0; k < 3; k++) EQUAL(gw_release(front, w.tickets[w.found[k]]), 0);
    EQUAL(gw_release(other, others), 0);
    end_chime(front, w.fd);
}

static void not_again_until_it_is_armed(void) {
    tell_owner();
    watch w = watch_of(front, make_chime(front));
    int64_t a = submit(front, "a"), b = submit(front, "b");
    EQUAL(take_and_finish(1), 1); /* not armed yet */
    EQUAL(bytes_in(w.fd), 0);
    await(&w, a, GW_TO_THE_END);
    await(&w, b, GW_TO_THE_END);
    EQUAL(look(&w), 1); /* armed, and what was there before is seen */
    EQUAL(gw_release(front, a), 0);
    w.tickets[gw_slot_of(a)] = -1;
    EQUAL(take_and_finish(1), 1);
    int64_t c = submit(front, "c");
    EQUAL(take_and_finish(1), 1);
    EQUAL(bytes_in(w.fd), 1); /* the second one found it taken */
    EQUAL(look(&w), 1);
    EQUAL(gw_release(front, b) | gw_release(front, c), 0);
    end_chime(front, w.fd);
}

static void by_all_that_answers(void) {
    tell_owner();
    watch w = watch_of(front, make_chime(front));
#define RINGS(call) (forget_all(&w), look(&w), (void)(call), bytes_in(w.fd))
    int64_t a = submit(front, "a");
    EQUAL(RINGS(gw_refuse(r.owner, a, GW_KIND_DRAINING)), 1);
    EQUAL(gw_release(front, a), 0);
    a = gw_submit(front, GW_KIND_BYTES, NULL, 0, NULL, 0, 1, 0);
    EQUAL(RINGS(gw_expire(r.owner, gw_now())), 1);
    EQUAL(gw_release(front, a), 0);
    a = gw_submit(front, GW_KIND_BYTES, NULL, 0, NULL, 0, 1, 0);
    EQUAL(RINGS(take_and_finish(1)), 1); /* it has expired, so there is no batch */
    EQUAL(gw_release(front, a), 0);
    EQUAL(RINGS(gw_wake_all(r.owner)), 1); /* whoever waits for a slot, too */
    a = submit(front, "a");
    EQUAL(take_and_finish(1), 1);
    look(&w);
    atomic_store(&r.owner->participants[front->me - 1].chime, GW_CHIME_TAKEN); /* an owner that died before it had written the byte */
    EQUAL(bytes_in(w.fd), 0);
    gw_recover(r.owner, 3, GW_KIND_DIED);
    EQUAL(bytes_in(w.fd), 1);
    EQUAL(gw_release(front, a), 0);
    EQUAL(RINGS(gw_recover(r.owner, 3, GW_KIND_DIED)), 0);
    end_chime(front, w.fd);
}

static void by_each_piece_that_is_waited_for(void) {
    rig small = r;
    gw_port *fronts[2] = {front, other};
    r = rig_open(CAPACITY, PARTICIPANTS, ROOM);
    front = rig_join(&r, 1);
    tell_owner();
    watch w = watch_of(front, make_chime(front));
    int64_t a = begin(front);
    EQUAL(gw_stream_open(r.owner, a, 4, 8), 0);
    await(&w, a, 0);
    EQUAL(look(&w), 0);
    EQUAL(append_to(a, 1, 0, 8), 0);
    EQUAL(bytes_in(w.fd), 1);
    EQUAL(gw_has_news(front, a, 0), 1);
    EQUAL(gw_has_news(front, a, 1), 0);
    EQUAL(look(&w), 1);
    await(&w, a, 1);
    EQUAL(look(&w), 0);
    await(&w, a, GW_TO_THE_END);
    EQUAL(append_to(a, 1, 1, 8), 0);
    EQUAL(look(&w), 0); /* not for a piece */
    EQUAL(end(a), 0);
    EQUAL(bytes_in(w.fd), 1);
    EQUAL(look(&w), 1);
    EQUAL(gw_release(front, a), 0);
    EQUAL(gw_has_news(front, a, 0), 1); /* its life is over */
    end_chime(front, w.fd);
    port_close(front);
    rig_close(&r);
    r = small, front = fronts[0], other = fronts[1];
}

static void what_is_no_fifo_of_ours(void) {
    tell_owner();
    char path[128], target[128];
    path_of(front, path);
    sprintf(target, "%s/target", folder);
    watch w = watch_of(front, -1);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    for (int round = 0; round < 3; round++) {
        int64_t a = submit(front, "a");
        atomic_store(&r.owner->participants[front->me - 1].chime, GW_CHIME_ARMED);
        EQUAL(take_and_finish(1), 1);
        EQUAL(lseek(file, 0, SEEK_END), 0); /* nothing was written there */
        EQUAL(look(&w), 0);
        EQUAL(gw_release(front, a), 0);
        if (round == 0) EQUAL(rename(path, target) | symlink(target, path), 0);
        if (round == 1) EQUAL(unlink(path), 0);
    }
    EQUAL(unlink(target), 0);
    close(file);
    char long_prefix[400];
    memset(long_prefix, 'x', sizeof long_prefix);
    long_prefix[399] = 0;
    EQUAL(gw_set_chimes(r.owner, long_prefix, -1), -ENAMETOOLONG);
}

static void places_that_are_taken_anew(void) {
    tell_owner();
    for (int life = 0; life < 3; life++) {
        gw_port *port = rig_join(&r, 3);
        EQUAL(GW_LOAD(&r.owner->participants[port->me - 1].chime), GW_CHIME_NONE);
        watch w = watch_of(port, make_chime(port));
        await(&w, submit(port, "x"), GW_TO_THE_END);
        EQUAL(look(&w), 0);
        EQUAL(take_and_finish(1), 1);
        EQUAL(bytes_in(w.fd), 1);
        EQUAL(look(&w), 1);
        EQUAL(r.owner->chimes_open, 1);
        end_chime(port, w.fd);
        uint32_t me = port->me;
        port_close(port);
        if (life == 1) atomic_store(&r.owner->participants[me - 1].word, GW_LOAD(&r.owner->participants[me - 1].word) & ~3ull); /* unnoticed by its owner */
        if (life == 1) EQUAL(gw_count(r.owner, GW_DONE), 1);
        else EQUAL(gw_reap(r.owner, me), life ? 2 : 1);
        EQUAL(r.owner->chimes_open, life == 1 ? 1 : 0);
    }
}

static void scribbled_entries_and_closed_ports(void) {
    tell_owner();
    for (uint32_t i = 0; i < PARTICIPANTS; i++) atomic_store(&r.owner->participants[i].chime, GW_CHIME_ARMED);
    gw_owe_chime(r.owner, 0);
    gw_owe_chime(r.owner, PARTICIPANTS + 1);
    gw_owe_chime_again(r.owner, UINT_MAX);
    gw_wake_all(r.owner); /* nobody has a FIFO */
    EQUAL(r.owner->chimes_open, 0);
    watch w = watch_of(front, -1);
    gw_port *left = rig_join(&r, 3);
    uint32_t me = left->me;
    gw_close(left);
    w.port = left;
    EQUAL(look(&w), -ECHILD);
    w.port = r.owner; /* it has no place */
    EQUAL(look(&w), -ECHILD);
    free(left);
    EQUAL(gw_reap(r.owner, me), 0);
}

/* ---- threads ---- */

enum { CALLS = 4000 };
static _Atomic int over;

typedef struct { pthread_t thread; gw_port *port; int fd; uint64_t seed, wakes, answers; } loop;

static void *run_loop(void *argument) {
    loop *l = argument;
    watch w = watch_of(l->port, l->fd);
    look(&w);
    for (int sent = 0, waiting = 0; sent < CALLS || waiting;) {
        while (sent < CALLS && waiting < 2 && (!waiting || below(&l->seed, 2))) {
            uint64_t deadline_ns = below(&l->seed, 4) ? 0 : gw_now() + below(&l->seed, 100000);
            int64_t ticket = gw_submit(l->port, GW_KIND_BYTES, NULL, 0, NULL, 0, deadline_ns, 0);
            if (ticket < 0) break;
            await(&w, ticket, GW_TO_THE_END);
            sent++, waiting++;
        }
        if (!waiting) {
            sched_yield();
            continue;
        }
        struct pollfd p = {.fd = l->fd, .events = POLLIN};
        EQUAL(poll(&p, 1, 60000), 1); /* else its wake-up was lost */
        l->wakes++;
        int n = look(&w);
        for (int k = 0; k < n; k++) {
            EQUAL(gw_release(l->port, w.tickets[w.found[k]]), 0);
            w.tickets[w.found[k]] = -1;
            waiting--, l->answers++;
        }
    }
    return NULL;
}

static void *run_owner(void *unused) {
    while (!over) {
        gw_collect(r.owner, gw_now() + SECOND_NS / 100);
        take_and_finish(CAPACITY);
    }
    return unused;
}

static void *run_keeper(void *unused) {
    while (!over) {
        gw_expire(r.owner, gw_now());
        usleep(100);
    }
    return unused;
}

static void no_wake_up_is_lost(void) {
    tell_owner();
    loop loops[2] = {{.port = front, .seed = 1}, {.port = other, .seed = 2}};
    pthread_t owner, keeper;
    pthread_create(&owner, NULL, run_owner, NULL);
    pthread_create(&keeper, NULL, run_keeper, NULL);
    for (int i = 0; i < 2; i++) loops[i].fd = make_chime(loops[i].port);
    for (int i = 0; i < 2; i++) pthread_create(&loops[i].thread, NULL, run_loop, &loops[i]);
    for (int i = 0; i < 2; i++) pthread_join(loops[i].thread, NULL);
    over = 1;
    pthread_join(owner, NULL);
    pthread_join(keeper, NULL);
    for (int i = 0; i < 2; i++) {
        EQUAL(loops[i].answers, CALLS);
        end_chime(loops[i].port, loops[i].fd);
    }
}

static const named_case cases[] = {
    CASE(one_byte_for_a_batch), CASE(not_again_until_it_is_armed), CASE(by_all_that_answers), CASE(by_each_piece_that_is_waited_for),
    CASE(what_is_no_fifo_of_ours), CASE(places_that_are_taken_anew), CASE(scribbled_entries_and_closed_ports), CASE(no_wake_up_is_lost)};

int main(void) {
    CHECK(mkdtemp(folder));
    int result = run_cases("chimes", cases, sizeof cases / sizeof *cases);
    EQUAL(rmdir(folder), 0);
    return result;
}
