/* The frontend's half of the ring: claim, publish, wait, release, cancel. Each acquire below names the release it pairs with. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <string.h>

static inline int is_forked(const gw_port *port) { return atomic_load_explicit(&port->forked, memory_order_relaxed) != 0; }
static inline int has_left(const gw_port *port) { return atomic_load_explicit(&port->left, memory_order_seq_cst) != 0; }
static inline gw_client_stats *stats_of(gw_port *port) { return &port->participants[port->me - 1].stats; }
static inline uint64_t word_of(const gw_port *port, int64_t ticket, uint32_t phase) { return gw_word(gw_life_of(ticket), port->me, phase); }

/* The ticket's slot, or NULL when the ticket cannot be one of ours. */
static gw_slot *own_slot(gw_port *port, int64_t ticket) {
    uint32_t i = gw_slot_of(ticket);
    return ticket < 0 || i >= port->capacity || !port->me || is_forked(port) ? NULL : &port->slots[i];
}

static void forget(gw_port *port) { atomic_fetch_sub_explicit(&port->inflight, 1, memory_order_relaxed); }

/* The slot that this thread claimed last and has not waited for: a Python signal handler (KeyboardInterrupt) may run between the claim's return and the
 * storing of its result, and then this is the only one who knows the ticket. */
static _Thread_local struct { uint64_t serial; int64_t ticket; } unsettled;

/* The ticket of that slot if it is one of this port's, else 0; and forgets it. */
int64_t gw_unsettled(gw_port *port) {
    int64_t ticket = unsettled.serial == port->serial ? unsettled.ticket : 0;
    unsettled.serial = 0;
    return ticket;
}

int64_t gw_claim(gw_port *port) {
    if (is_forked(port)) return -ECHILD;
    gw_header *header = port->header;
    uint32_t state = GW_LOAD(&header->state); /* pairs with gw_set_state */
    if (state == GW_DRAINING) return -ESHUTDOWN;
    if (state > GW_DRAINING || !port->me || has_left(port)) return -ENOTCONN;
    uint32_t quota = atomic_load_explicit(&header->alive, memory_order_relaxed) > 1 ? header->quota_shared : header->quota_alone;
    if (GW_COUNT(&port->inflight, 1) >= quota) {
        forget(port);
        return quota < port->capacity ? -EDQUOT : -EAGAIN;
    }
    GW_POINT(claim_counted);
    uint32_t home = atomic_load_explicit(&port->home, memory_order_relaxed);
    for (uint32_t k = 0; k < port->capacity; k++) {
        uint32_t i = home + k < port->capacity ? home + k : home + k - port->capacity;
        gw_slot *slot = &port->slots[i];
        uint64_t word = atomic_load_explicit(&slot->word, memory_order_seq_cst); /* pairs with gw_space_wake, see there */
        if (gw_phase_of(word) != GW_FREE) continue;
        uint64_t claimed = gw_word(gw_generation_of(word) + 1, port->me, GW_CLAIMED);
        GW_POINT(claim_found);
        if (!GW_CAS(&slot->word, &word, claimed)) continue; /* somebody was faster, or the word has moved on: try the next */
        GW_POINT(claim_taken);
        gw_semaphore_claimed(&slot->semaphore);
        GW_POINT(claim_drained);
        atomic_store_explicit(&slot->attempts, 0, memory_order_relaxed);
        GW_POINT(claim_reset);
        atomic_store_explicit(&port->home, i, memory_order_relaxed);
        unsettled.serial = port->serial;
        return unsettled.ticket = gw_ticket(claimed, i);
    }
    forget(port);
    return -EAGAIN;
}

int64_t gw_claim_wait(gw_port *port, uint64_t until_ns) {
    int64_t ticket = gw_claim(port);
    if (ticket != -EAGAIN && ticket != -EDQUOT) return ticket;
    gw_header *header = port->header;
    uint64_t start = gw_now(), bit = 1ull << (port->me & 63);
    _Atomic uint64_t *wanted = &header->space_wanted[port->me / 64 % (GW_MAX_PARTICIPANTS / 64)];
    atomic_fetch_add_explicit(&port->blocked, 1, memory_order_seq_cst);
    GW_POINT(claim_wait_blocked);
    for (;;) {
        uint32_t seen = atomic_load_explicit(&header->space_bell, memory_order_seq_cst);
        GW_POINT(claim_wait_seen);
        atomic_fetch_or_explicit(wanted, bit, memory_order_seq_cst);
        GW_POINT(claim_wait_wanted);
        ticket = gw_claim(port);
        if (ticket != -EAGAIN && ticket != -EDQUOT) break;
        uint64_t now = gw_now(), slice = now + 10000000;
        if (now >= until_ns) {
            ticket = -ETIMEDOUT;
            break;
        }
        GW_POINT(claim_wait_sleeping);
        /* The short slice covers three losses: a releaser killed before its wake, the woken waiter killed before it claims, and the one wake of a release
           going to somebody who may not claim it, being over its own quota. */
        if (gw_futex_wait(&header->space_bell, seen, slice < until_ns ? slice : until_ns) == -EINTR) {
            ticket = -EINTR;
            break;
        }
    }
    GW_POINT(claim_wait_over);
    if (atomic_fetch_sub_explicit(&port->blocked, 1, memory_order_seq_cst) == 1) {
        GW_POINT(claim_wait_unblocked);
        atomic_fetch_and_explicit(wanted, ~bit, memory_order_seq_cst);
        GW_POINT(claim_wait_cleared);
        if (atomic_load_explicit(&port->blocked, memory_order_seq_cst)) {
            atomic_fetch_or_explicit(wanted, bit, memory_order_seq_cst);
            gw_space_wake(port); /* for whoever freed a slot while the bit was clear */
        }
    }
    if (ticket >= 0) gw_observe(&stats_of(port)->claim_wait, gw_now() - start);
    return ticket;
}

/* All of gw_publish but the doorbell. */
static int publish(gw_port *port, int64_t ticket, uint64_t request, uint64_t deadline_ns, uint64_t terms) {
    gw_slot *slot = own_slot(port, ticket);
    if (!slot) return -ECHILD;
    uint64_t word = word_of(port, ticket, GW_CLAIMED);
    if (GW_LOAD(&slot->word) != word) return -ESTALE; /* look before writing: the slot may be in another life */
    GW_POINT(publish_checked);
    atomic_store_explicit(&slot->request, request, memory_order_relaxed);
    atomic_store_explicit(&slot->deadline_ns, deadline_ns, memory_order_relaxed);
    atomic_store_explicit(&slot->terms, terms, memory_order_relaxed);
    atomic_store_explicit(&slot->enqueue_ns, gw_now(), memory_order_relaxed);
    GW_POINT(publish_described);
    if (!GW_CAS(&slot->word, &word, gw_with_phase(word, GW_READY))) return -ESTALE; /* releases the request to gw_take */
    GW_POINT(publish_ready);
    if (has_left(port)) { /* see gw_leave: one of us withdraws it */
        GW_POINT(publish_withdrawing);
        gw_cancel(port, ticket);
        return -ENOTCONN;
    }
    GW_POINT(publish_stayed);
    uint32_t i = gw_slot_of(ticket);
    atomic_fetch_or_explicit(&port->header->ready[i / 64], 1ull << (i % 64), memory_order_seq_cst); /* P1 of the doorbell, after the word */
    GW_POINT(publish_told);
    GW_COUNT(&stats_of(port)->submitted, 1);
    GW_POINT(publish_counted);
    if (port->header->admission) gw_count_arrival(port, terms);
    return 0;
}

int gw_publish(gw_port *port, int64_t ticket, uint64_t request, uint64_t deadline_ns, uint64_t terms) {
    int result = publish(port, ticket, request, deadline_ns, terms);
    if (!result) gw_ring_doorbell(port);
    return result;
}

/* gw_submit without the doorbell, for who sends several at once: to be followed by gw_ring_doorbell. (P1 is done, P2 is still to come.) */
int64_t gw_submit_quietly(gw_port *port, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes, uint64_t deadline_ns,
                          uint64_t terms) {
    uint64_t from = gw_align(meta_bytes), total = from + data_bytes;
    if (total > port->request_bytes || meta_bytes > GW_MAX_META) return -EMSGSIZE;
    if (port->header->admission && gw_is_late(port, terms, NULL)) return -ETIME;
    int64_t ticket = gw_claim(port);
    if (ticket < 0) return ticket;
    GW_POINT(submit_claimed);
    char *area = gw_request_area(port, gw_slot_of(ticket));
    if (meta_bytes) memcpy(area, meta, meta_bytes);
    if (data_bytes) memcpy(area + from, data, data_bytes);
    GW_POINT(submit_copied);
    int result = publish(port, ticket, gw_describe(kind, meta_bytes, total), deadline_ns, terms);
    return result ? result : ticket;
}

int64_t gw_submit(gw_port *port, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes, uint64_t deadline_ns,
                  uint64_t terms) {
    int64_t ticket = gw_submit_quietly(port, kind, meta, meta_bytes, data, data_bytes, deadline_ns, terms);
    if (ticket >= 0) gw_ring_doorbell(port);
    return ticket;
}

/* The described response if the ticket is answered, else -EINPROGRESS or -ESTALE. */
static int64_t look(gw_port *port, const gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word); /* pairs with the release in finish, owner.c */
    if (gw_generation_of(word) != gw_life_of(ticket) || gw_participant_of(word) != port->me) return -ESTALE;
    switch (gw_phase_of(word)) {
    case GW_DONE: return (int64_t)slot->response & INT64_MAX;
    case GW_ABANDONED: case GW_FREE: return -ESTALE;
    default: return -EINPROGRESS;
    }
}

int64_t gw_poll(gw_port *port, int64_t ticket) {
    gw_slot *slot = own_slot(port, ticket);
    return slot ? look(port, slot, ticket) : -ECHILD;
}

int64_t gw_wait(gw_port *port, int64_t ticket, uint64_t deadline_ns, uint64_t slice_ns) {
    gw_slot *slot = own_slot(port, ticket);
    unsettled.serial = 0;
    if (!slot) return -ECHILD;
    uint64_t start = gw_now(), until = start + slice_ns;
    if (deadline_ns && deadline_ns < until) until = deadline_ns;
    int slept = !gw_spin_until(port, &port->response_spin, &slot->word, 1, word_of(port, ticket, GW_DONE), until);
    GW_POINT(wait_spun);
    uint32_t seen = 0;
    for (int round = 0;; round++) {
        if (round) seen = gw_semaphore_declare(&slot->semaphore); /* the first look is free of that: the answer may be there */
        GW_POINT(wait_declared);
        int64_t result = look(port, slot, ticket);
        if (result >= 0) {
            GW_POINT(wait_answered);
            uint64_t done = slot->done_ns;
            if (slept) gw_spin_learn(&port->response_spin, done > start ? done - start : 0);
            gw_observe(&stats_of(port)->wake, gw_now() - done);
        }
        if (result != -EINPROGRESS) return result;
        if (!round) continue;
        if (atomic_load_explicit(&port->header->state, memory_order_seq_cst) > GW_DRAINING) return -ETIMEDOUT; /* see gw_wake_all: the caller is to ask why */
        GW_POINT(wait_sleeping);
        int problem = gw_semaphore_sleep(&slot->semaphore, seen, until);
        GW_POINT(wait_woken);
        if (problem && look(port, slot, ticket) == -EINPROGRESS) return problem;
    }
}

int gw_release(gw_port *port, int64_t ticket) {
    gw_slot *slot = own_slot(port, ticket);
    if (!slot) return -ECHILD;
    uint64_t word = word_of(port, ticket, GW_DONE);
    if (!GW_CAS(&slot->word, &word, gw_freed(word))) return -ESTALE; /* releases our reads of the response to the next claimer */
    GW_POINT(release_freed);
    atomic_store_explicit(&port->home, gw_slot_of(ticket), memory_order_relaxed); /* its lines are in our cache */
    forget(port);
    GW_POINT(release_forgotten);
    gw_space_wake(port);
    return 0;
}

int gw_receive(gw_port *port, int64_t ticket, uint64_t from, void *into, uint64_t bytes) {
    gw_slot *slot = own_slot(port, ticket);
    if (!slot) return -ECHILD;
    if (from > port->response_bytes || bytes > port->response_bytes - from) return -EILSEQ;
    memcpy(into, gw_response_area(port, gw_slot_of(ticket)) + from, bytes);
    GW_POINT(receive_copied);
    return gw_release(port, ticket);
}

/* gw_wait, and if the response is just what the caller expects (a response described as `expected` that begins with that `meta`), its data is copied to
 * `into` and the slot is released: GW_DELIVERED. Any other response is left where it is, as by gw_wait. */
int64_t gw_wait_for(gw_port *port, int64_t ticket, uint64_t deadline_ns, uint64_t slice_ns, uint64_t expected, const void *meta, void *into) {
    int64_t response = gw_wait(port, ticket, deadline_ns, slice_ns);
    if (response < 0 || (uint64_t)response != expected) return response;
    GW_POINT(wait_for_expected);
    const char *area = gw_response_area(port, gw_slot_of(ticket));
    uint64_t from = gw_align(gw_meta_of(expected)), total = gw_total_of(expected);
    if (total > port->response_bytes || memcmp(area, meta, gw_meta_of(expected))) return response;
    memcpy(into, area + from, total - from);
    GW_POINT(wait_for_copied);
    int result = gw_release(port, ticket);
    return result ? result : GW_DELIVERED;
}

int gw_cancel(gw_port *port, int64_t ticket) {
    gw_slot *slot = own_slot(port, ticket);
    if (!slot) return -ECHILD;
    uint64_t word = GW_LOAD(&slot->word);
    for (;;) {
        if (gw_generation_of(word) != gw_life_of(ticket) || gw_participant_of(word) != port->me) return -ESTALE;
        uint32_t phase = gw_phase_of(word);
        if (phase == GW_FREE || phase == GW_ABANDONED) return -ESTALE;
        if (phase == GW_DONE) return 2;
        GW_POINT(cancel_looked);
        /* A running request keeps its slot until the owner lets go of it: the owner may be writing the response. */
        if (!GW_CAS(&slot->word, &word, phase == GW_RUNNING ? gw_with_phase(word, GW_ABANDONED) : gw_freed(word))) continue;
        GW_POINT(cancel_moved);
        forget(port);
        GW_POINT(cancel_forgotten);
        gw_semaphore_post_always(&slot->semaphore); /* another thread may be waiting for this ticket: let it look */
        GW_POINT(cancel_posted);
        if (phase != GW_RUNNING) gw_space_wake(port);
        return phase == GW_RUNNING;
    }
}

int gw_abandon(gw_port *port, int64_t ticket) {
    int outcome = gw_cancel(port, ticket);
    GW_POINT(abandon_cancelled);
    if (outcome == 2) gw_release(port, ticket);
    return outcome;
}

int gw_phase(gw_port *port, int64_t ticket) {
    uint32_t i = gw_slot_of(ticket);
    if (ticket < 0 || i >= port->capacity) return -EINVAL;
    uint64_t word = GW_LOAD(&port->slots[i].word);
    return gw_generation_of(word) == gw_life_of(ticket) ? (int)gw_phase_of(word) : -ESTALE;
}
