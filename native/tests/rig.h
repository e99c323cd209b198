/* A segment in a memory file with its owner's port, as the tests need it: one mapping, so that a sanitizer sees every access. */
#ifndef GPUWORKER_TESTS_RIG_H
#define GPUWORKER_TESTS_RIG_H
#include "../ring.h"
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct { void *base; uint64_t bytes; int fd; gw_port *owner; } rig;

static inline gw_port *port_open(void *base) {
    gw_port *port = calloc(1, sizeof *port);
    CHECK(port);
    EQUAL(gw_open(port, base, UINT64_MAX), 0);
    return port;
}

static inline void port_close(gw_port *port) {
    gw_close(port);
    free(port);
}

/* One request answered at once. */
static inline int rig_finish(gw_port *port, int64_t ticket, int result) {
    uint64_t taken[2] = {(uint64_t)ticket, 0};
    return result ? result : gw_finish(port, taken, 1);
}
#define gw_answer(port, ticket, ...) rig_finish(port, ticket, gw_respond(port, ticket, __VA_ARGS__))
#define gw_answered(port, ticket, response) rig_finish(port, ticket, gw_responded(port, ticket, response))

#define SECOND_NS 1000000000ull

/* What the owner's process knew is lost; what it wrote into the segment stays. */
static inline void rig_new_owner(rig *r) {
    if (r->owner) port_close(r->owner);
    r->owner = port_open(r->base);
    CHECK(r->owner);
    EQUAL(gw_open_backlog(r->owner), 0);
}

static inline rig rig_open(uint32_t capacity, uint32_t max_participants, uint64_t area_bytes) {
    rig r = {.bytes = gw_segment_bytes(capacity, max_participants, area_bytes, area_bytes), .fd = memfd_create("rig", MFD_CLOEXEC)};
    CHECK(r.fd >= 0);
    EQUAL(ftruncate(r.fd, (off_t)r.bytes), 0);
    r.base = mmap(NULL, r.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, r.fd, 0);
    CHECK(r.base != MAP_FAILED);
    EQUAL(gw_format(r.base, capacity, max_participants, area_bytes, area_bytes, 1 << 20, 1), 0);
    EQUAL(gw_check(r.base, r.bytes), 0);
    rig_new_owner(&r);
    gw_set_policy(r.owner, GW_REJECT, GW_ADAPTIVE, capacity, capacity, 0, capacity);
    gw_set_state(r.owner, GW_SERVING);
    return r;
}

/* A descriptor with an open file description of its own: OFD locks belong to the description. */
static inline int rig_lock_fd(const rig *r) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", r->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

/* One more participant; what joins is this process, whatever `pid` says. */
static inline gw_port *rig_join(const rig *r, int64_t pid) {
    gw_port *port = port_open(r->base);
    CHECK(port);
    EQUAL(gw_join(port, rig_lock_fd(r), pid, 0, 0), 0);
    return port;
}

static inline void rig_close(rig *r) {
    port_close(r->owner);
    munmap(r->base, r->bytes);
    close(r->fd);
}

static inline const gw_slot *rig_slot(const rig *r, int64_t ticket) { return &r->owner->slots[gw_slot_of(ticket)]; }

#endif
