/* A process's port to the segment: joining, leaving, and what must happen at fork.
 *
 * Proof of life. Each participant holds, for as long as it lives, an open-file-description lock on one byte of the segment's file: byte
 * GW_LOCK_BASE + index, past the end of the data (locks need no bytes there); so do the owner and its supervisor. The kernel arbitrates who gets an entry, and
 * drops the lock only once no thread of the holder can run any more. Inside one pid namespace the reader of the entry prefers a pidfd (see
 * gpuworker/segment/liveness.py), so that neither closing all descriptors nor a child that kept one can mislead it.
 *
 * Fork. A forked child shares the parent's lock description, so it must close (never unlock) it; and it must not touch slots that are the
 * parent's. pthread_atfork covers every libc fork, whoever calls it, and costs the hot path one relaxed load. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GW_LOCK_BASE (1ll << 40)

static pthread_mutex_t ports_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_handlers_once = PTHREAD_ONCE_INIT;
static gw_port *ports;

void gw_lock_ports(void) { pthread_mutex_lock(&ports_mutex); }
void gw_unlock_ports(void) { pthread_mutex_unlock(&ports_mutex); }

/* With the mutex held. */
static void close_lock(gw_port *port) {
    if (port->lock_fd >= 0) close(port->lock_fd);
    port->lock_fd = -1;
}

static void before_fork(void) { pthread_mutex_lock(&ports_mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&ports_mutex); }
static void after_fork_in_child(void) {
    for (gw_port *port = ports; port; port = port->next) {
        atomic_store_explicit(&port->forked, 1, memory_order_relaxed);
        close_lock(port);
        gw_close_chimes(port);
    }
    ports = NULL;
    pthread_mutex_unlock(&ports_mutex);
}
static void install_fork_handlers(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

/* `port` is memory of the caller's, zeroed, that stays valid until gw_close. -EILSEQ: the geometry contradicts the file's size. */
int gw_open(gw_port *port, void *base, uint64_t file_bytes) {
    static _Atomic uint64_t serial;
    gw_header *header = base;
    port->header = header;
    port->capacity = header->capacity;
    port->max_participants = header->max_participants;
    port->request_bytes = header->request_bytes;
    port->response_bytes = header->response_bytes;
    port->max_payload_bytes = header->max_payload_bytes;
    /* gw_check has looked, but a frontend may have scribbled since: what counts is this copy. */
    if (!port->capacity || port->capacity > GW_MAX_CAPACITY || !port->max_participants || port->max_participants > GW_MAX_PARTICIPANTS ||
        (port->request_bytes | port->response_bytes) % GW_LINE || (port->request_bytes | port->response_bytes) >= 1ull << 36 ||
        gw_segment_bytes(port->capacity, port->max_participants, port->request_bytes, port->response_bytes) > file_bytes)
        return -EILSEQ;
    port->serial = 1 + atomic_fetch_add_explicit(&serial, 1, memory_order_relaxed);
    port->participants = (gw_participant *)(header + 1);
    port->slots = (gw_slot *)(port->participants + port->max_participants);
    port->areas = (char *)(port->slots + port->capacity);
    port->wake = header->wake;
    port->lock_fd = -1;
    pthread_once(&fork_handlers_once, install_fork_handlers);
    pthread_mutex_lock(&ports_mutex);
    port->next = ports;
    ports = port;
    pthread_mutex_unlock(&ports_mutex);
    return 0;
}

/* Drops what the port holds in this process; not what it holds in the ring (gw_leave). Twice is fine, and so are frontend calls afterwards (-ECHILD): when
 * Python collects a cycle it runs the finalizers of its objects in any order. */
void gw_close(gw_port *port) {
    atomic_store_explicit(&port->forked, 1, memory_order_relaxed);
    GW_POINT(close_begun);
    pthread_mutex_lock(&ports_mutex);
    for (gw_port **p = &ports; *p; p = &(*p)->next)
        if (*p == port) {
            *p = port->next;
            break;
        }
    GW_POINT(close_unlisted);
    close_lock(port); /* in the same breath: a child forked in between would keep it */
    gw_close_chimes(port);
    pthread_mutex_unlock(&ports_mutex);
    free(port->backlog);
    free(port->aside);
    free(port->arrived);
    free(port->gone);
    free(port->in_backlog);
    free((void *)port->running);
    port->backlog = port->aside = port->arrived = NULL;
    port->gone = NULL;
    port->in_backlog = NULL;
    port->running = NULL;
    port->queued = 0;
}

int gw_is_forked(const gw_port *port) { return atomic_load_explicit(&port->forked, memory_order_relaxed) != 0; }

/* Both under the mutex: a fork in between must not close a descriptor that has become somebody else's. */
void gw_keep_lock(gw_port *port, int fd) {
    pthread_mutex_lock(&ports_mutex);
    port->lock_fd = fd;
    pthread_mutex_unlock(&ports_mutex);
}

/* A descriptor of the segment's file (given as `fd`) with a description of its own, for locks, and the port's at once: a fork in another thread finds it recorded,
 * and the child closes it, or finds none. -> it, or a negative errno. */
int gw_open_lock(gw_port *port, int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    pthread_mutex_lock(&ports_mutex);
    if (port->lock_fd < 0) port->lock_fd = open(path, O_RDWR | O_CLOEXEC);
    int result = port->lock_fd < 0 ? -errno : port->lock_fd;
    pthread_mutex_unlock(&ports_mutex);
    return result;
}

void gw_drop_lock(gw_port *port) {
    pthread_mutex_lock(&ports_mutex);
    close_lock(port);
    pthread_mutex_unlock(&ports_mutex);
}

static int lock_byte(int fd, int command, uint32_t index, short *type) {
    struct flock lock = {.l_type = *type, .l_whence = SEEK_SET, .l_start = GW_LOCK_BASE + index, .l_len = 1};
    if (fcntl(fd, command, &lock)) return -errno;
    *type = lock.l_type;
    return 0;
}

int gw_try_lock(int fd, uint32_t index) {
    short type = F_WRLCK;
    int result = lock_byte(fd, F_OFD_SETLK, index, &type);
    return result == -EACCES ? -EAGAIN : result;
}

/* Whether the process of a pidfd is gone. Here and not in Python, where gevent may have put a poll of its own, which switches greenlets. */
int gw_has_ended(int pidfd) {
    struct pollfd p = {.fd = pidfd, .events = POLLIN};
    return poll(&p, 1, 0) > 0;
}

int gw_unlock(int fd, uint32_t index) {
    short type = F_UNLCK;
    return lock_byte(fd, F_OFD_SETLK, index, &type);
}

int gw_is_locked(int fd, uint32_t index) {
    short type = F_WRLCK;
    int result = lock_byte(fd, F_OFD_GETLK, index, &type);
    return result ? result : type != F_UNLCK;
}

static int take_place(gw_port *port, int lock_fd, gw_identity who) {
    for (uint32_t i = 0; i < port->max_participants; i++) {
        gw_participant *entry = &port->participants[i];
        uint64_t word = GW_LOAD(&entry->word);
        if ((word & 3) != GW_VACANT || gw_try_lock(lock_fd, i + 1)) continue;
        GW_POINT(join_locked);
        /* The byte is ours, so nobody else makes this entry alive; but somebody may have, and died, before we had the byte. */
        word = GW_LOAD(&entry->word);
        int vacant = (word & 3) == GW_VACANT;
        if (vacant) {
            entry->identity = who;
            atomic_store_explicit(&entry->chime, GW_CHIME_NONE, memory_order_relaxed);
        }
        GW_POINT(join_identified);
        if (!vacant || !GW_CAS(&entry->word, &word, ((word >> 2) + 1) << 2 | GW_ALIVE)) {
            gw_unlock(lock_fd, i + 1);
            continue;
        }
        GW_POINT(join_alive);
        port->me = i + 1;
        atomic_store_explicit(&port->home, (uint32_t)(((uint64_t)i * 2654435761u) % port->capacity), memory_order_relaxed);
        GW_POINT(join_kept);
        GW_COUNT(&port->header->alive, 1);
        return 0;
    }
    return -EUSERS;
}

/* Takes a vacant entry. On success the port owns lock_fd. -EUSERS: every entry is taken. Once in a port's life. */
int gw_join(gw_port *port, int lock_fd, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace) {
    if (port->me || atomic_load_explicit(&port->forked, memory_order_relaxed)) return -ECHILD;
    if (lock_fd < 0) return -EBADF;
    gw_keep_lock(port, lock_fd); /* first: a child that is forked from here on closes it, or it would hold the place, too */
    int result = take_place(port, lock_fd, (gw_identity){pid, start_ticks, pid_namespace});
    if (result) gw_keep_lock(port, -1);
    return result;
}

/* Says goodbye: withdraws what has not been answered, waking whoever waits for it, and claims and publishes nothing any more. What other threads of
 * this process are still writing (CLAIMED) or reading (DONE) stays theirs. The entry is made vacant by the owner once the lock byte is free, that is
 * once the port is closed and no thread is inside a call with it.
 *
 * `left` is set first, and gw_publish looks at it after its CAS (all seq_cst): what is published is either seen by the loop below or withdrawn there. */
int gw_leave(gw_port *port) {
    if (!port->me || atomic_load_explicit(&port->forked, memory_order_relaxed)) return -ECHILD;
    if (atomic_exchange_explicit(&port->left, 1, memory_order_seq_cst)) return -ESTALE;
    GW_POINT(leave_said);
    for (uint32_t i = 0; i < port->capacity; i++) {
        uint64_t word = atomic_load_explicit(&port->slots[i].word, memory_order_seq_cst);
        if (gw_participant_of(word) == port->me && (gw_phase_of(word) == GW_READY || gw_phase_of(word) == GW_RUNNING)) gw_cancel(port, gw_ticket(word, i));
    }
    GW_POINT(leave_withdrawn);
    gw_participant *entry = &port->participants[port->me - 1];
    uint64_t word = GW_LOAD(&entry->word);
    return (word & 3) == GW_ALIVE && GW_CAS(&entry->word, &word, (word & ~3ull) | GW_LEFT) ? 0 : -ESTALE;
}
