/* The owner's half of the ring: take, answer, refuse. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <string.h>

/* READY -> RUNNING for one life. The word on success, else 0. */
static uint64_t take(gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word);
    if (gw_generation_of(word) != gw_life_of(ticket) || gw_phase_of(word) != GW_READY) return 0;
    GW_POINT(take_looked);
    uint64_t running = gw_with_phase(word, GW_RUNNING);
    return GW_CAS(&slot->word, &word, running) ? running : 0; /* acquires what gw_publish released */
}

/* RUNNING -> DONE and wake, or ABANDONED -> FREE. 1 if it had been abandoned. */
int gw_end(gw_port *port, gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word);
    for (;;) {
        if (gw_generation_of(word) != gw_life_of(ticket)) return -ESTALE;
        if (gw_phase_of(word) == GW_RUNNING) {
            GW_POINT(finish_looked);
            if (!GW_CAS(&slot->word, &word, gw_with_phase(word, GW_DONE))) continue; /* releases the response to gw_wait */
            GW_POINT(finish_done);
            gw_semaphore_post(&slot->semaphore);
            GW_POINT(finish_posted);
            gw_owe_chime(port, gw_participant_of(word));
            return 0;
        }
        if (gw_phase_of(word) != GW_ABANDONED) return -ESTALE;
        GW_POINT(finish_abandoned);
        if (!GW_CAS(&slot->word, &word, gw_freed(word))) continue;
        GW_POINT(finish_freed);
        gw_space_wake(port);
        return 1;
    }
}

static void note_running(gw_port *port, int64_t ticket, uint64_t value) {
    if (port->running) atomic_store_explicit(&port->running[gw_slot_of(ticket)], value, memory_order_release);
}

static void expire(gw_port *port, gw_slot *slot, int64_t ticket) {
    GW_POINT(expire_taken);
    slot->response = gw_describe(GW_KIND_EXPIRED, 0, 0);
    slot->done_ns = gw_now();
    GW_COUNT(&port->header->stats.expired, 1);
    GW_POINT(expire_written);
    if (gw_end(port, slot, ticket) == 1) GW_COUNT(&port->header->stats.expired, -1ull); /* its frontend was faster, and counts it */
}

/* Whether a described request claims more than there is. */
static int exceeds(const gw_port *port, uint64_t request) {
    uint64_t total = gw_total_of(request), room = gw_kind_of(request) & GW_KIND_SPILLED ? port->max_payload_bytes : port->request_bytes;
    return total > room || gw_meta_of(request) > total;
}

enum taken { TAKEN, LEFT_OUT, NOT_YET };

/* Takes one request into the batch that has `n`: LEFT_OUT if it was cancelled, or has expired and is answered. Its ticket and its request as described by the
 * frontend go to `pair`, copied once and checked against the area: UINT64_MAX when it claims more than there is. */
static enum taken take_one(gw_port *port, int64_t ticket, int may_be_suspect, uint64_t now, uint64_t *pair) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return LEFT_OUT;
    /* One that was running when an owner died is a batch of its own, with no other on its way: if it is what kills owners, it takes nobody else's attempts
     * with it. */
    if (!may_be_suspect && GW_PEEK(&slot->attempts)) return NOT_YET;
    uint64_t noted = port->running ? GW_PEEK(&port->running[gw_slot_of(ticket)]) : GW_NO_TICKET;
    note_running(port, ticket, (uint64_t)ticket); /* before the word says so, see is_stray */
    if (!take(slot, ticket)) { /* a ticket of an earlier life: the present one may be running already */
        note_running(port, ticket, noted);
        return LEFT_OUT;
    }
    GW_POINT(take_moved);
    port->in_backlog[gw_slot_of(ticket)] = GW_NO_TICKET; /* gw_untake may bring it back */
    slot->dispatch_ns = now;
    uint64_t request = GW_PEEK(&slot->request), deadline = GW_PEEK(&slot->deadline_ns), budget = gw_budget_of(GW_PEEK(&slot->terms));
    if (deadline && deadline <= now) {
        expire(port, slot, ticket);
        note_running(port, ticket, GW_NO_TICKET);
        return LEFT_OUT;
    }
    if (!budget) budget = port->budget_ns;
    slot->due_ns = budget ? GW_PEEK(&slot->enqueue_ns) + budget : 0;
    if (exceeds(port, request)) request = UINT64_MAX;
    GW_POINT(take_read);
    pair[0] = (uint64_t)ticket;
    pair[1] = request;
    return TAKEN;
}

static int is_suspect(const gw_port *port, uint64_t ticket) { return GW_PEEK(&port->slots[gw_slot_of((int64_t)ticket)].attempts) != 0; }

static void begin(gw_port *port, int n, uint32_t reason, uint64_t now, const uint64_t *taken) {
    GW_POINT(take_all);
    if (n) gw_begin_batch(port, (gw_batch){taken[0], 0, (uint32_t)n, reason, (uint32_t)is_suspect(port, taken[0])}, now);
    GW_POINT(take_stamped);
    gw_ring_chimes(port); /* of what has expired */
}

/* Takes up to `count` requests from the front of the backlog and begins a batch of them. -> n; `taken`: n pairs, see take_one. */
int gw_take(gw_port *port, int count, uint32_t reason, uint64_t *taken) {
    uint64_t now = gw_now();
    int n = 0;
    uint32_t k = 0;
    if (port->fair && count > 0) gw_fair_front(port, (uint32_t)count);
    if (gw_runs_alone(port)) return 0;
    while (k < port->queued && n < count) {
        enum taken result = take_one(port, (int64_t)port->backlog[k].ticket, !n && !gw_batches_running(port), now, taken + 2 * n);
        if (result == NOT_YET) break;
        k++;
        if (result == TAKEN && is_suspect(port, taken[2 * n++])) break;
    }
    port->queued -= k;
    memmove(port->backlog, port->backlog + k, port->queued * sizeof *port->backlog);
    begin(port, n, reason, now, taken);
    return n;
}

/* Takes up to `count` requests that run for many batches, joining and leaving them one by one: none begins here (see gw_begin_step), and one that was running when
 * an owner died is not kept apart, as it goes on where it was. */
int gw_admit(gw_port *port, int count, uint64_t *taken) {
    uint64_t now = gw_now();
    int n = 0;
    uint32_t k = 0;
    for (; k < port->queued && n < count; k++)
        if (take_one(port, (int64_t)port->backlog[k].ticket, 1, now, taken + 2 * n) == TAKEN)
            gw_slot_at(port, (int64_t)taken[2 * n++])->dispatch_ns = GW_NOT_BEGUN;
    port->queued -= k;
    memmove(port->backlog, port->backlog + k, port->queued * sizeof *port->backlog);
    GW_POINT(admit_all);
    gw_ring_chimes(port); /* of what has expired */
    return n;
}

/* The same for any requests of the backlog; they leave it at the next gw_collect. Those after a suspect are not taken: see gw_put_back. */
int gw_take_these(gw_port *port, const uint64_t *tickets, int count, uint32_t reason, uint64_t *taken) {
    uint64_t now = gw_now();
    int n = 0;
    for (int k = 0; k < count && !gw_runs_alone(port); k++) {
        enum taken result = take_one(port, (int64_t)tickets[k], !n && !gw_batches_running(port), now, taken + 2 * n);
        if (result == NOT_YET) continue;
        if (result == TAKEN && is_suspect(port, taken[2 * n++])) break;
    }
    begin(port, n, reason, now, taken);
    return n;
}

/* RUNNING -> READY: taken, but not run after all. */
int gw_untake(gw_port *port, int64_t ticket) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return -EINVAL;
    note_running(port, ticket, GW_NO_TICKET);
    uint64_t word = GW_LOAD(&slot->word);
    if (gw_generation_of(word) != gw_life_of(ticket)) return -ESTALE;
    GW_POINT(untake_looked);
    if (gw_phase_of(word) == GW_RUNNING && GW_CAS(&slot->word, &word, gw_with_phase(word, GW_READY))) {
        GW_POINT(untake_moved);
        uint32_t i = gw_slot_of(ticket);
        atomic_fetch_or_explicit(&port->header->ready[i / 64], 1ull << (i % 64), memory_order_seq_cst);
        GW_POINT(untake_told);
        return 0;
    }
    return gw_end(port, slot, ticket); /* abandoned meanwhile */
}

/* Whether the ticket was taken and not answered: RUNNING or ABANDONED, which nobody but the owner ends. */
int gw_is_taken(const gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word);
    return gw_generation_of(word) == gw_life_of(ticket) && (gw_phase_of(word) == GW_RUNNING || gw_phase_of(word) == GW_ABANDONED);
}

uint64_t gw_deadline(const gw_port *port, int64_t ticket) {
    const gw_slot *slot = gw_slot_at(port, ticket);
    return slot && gw_is_taken(slot, ticket) ? GW_PEEK(&slot->deadline_ns) : 0;
}

uint32_t gw_attempts(const gw_port *port, int64_t ticket) {
    const gw_slot *slot = gw_slot_at(port, ticket);
    return slot ? GW_PEEK(&slot->attempts) : 0;
}

/* Publishes the response that the slot now holds. 0, or 1 if the request had been abandoned. `batch`: not counted yet, see gw_batch_done. */
static int answer(gw_port *port, gw_slot *slot, int64_t ticket, gw_batch *batch) {
    gw_stats *stats = &port->header->stats;
    uint64_t now = gw_now();
    slot->done_ns = now;
    GW_POINT(answer_stamped);
    /* Everything is counted before it is published: a caller that has its answer finds it in the statistics. */
    if (batch->size) { /* the first answer of a batch ends its run */
        gw_batch_done(port, batch, now - slot->dispatch_ns, now);
        batch->size = 0;
    }
    gw_observe(&stats->queue_wait, slot->collect_ns - GW_PEEK(&slot->enqueue_ns));
    if (slot->dispatch_ns != GW_NOT_BEGUN) gw_observe(&stats->batch_wait, slot->dispatch_ns - slot->collect_ns);
    uint32_t kind = gw_kind_of(slot->response) & ~(uint32_t)GW_KIND_SPILLED;
    _Atomic uint64_t *outcome = kind < GW_KIND_ERROR ? &stats->completed : kind == GW_KIND_EXPIRED ? &stats->expired : &stats->failed;
    _Atomic uint64_t *in_time = !slot->due_ns ? NULL : now <= slot->due_ns ? &stats->on_time : &stats->late;
    GW_COUNT(outcome, 1);
    if (in_time) GW_COUNT(in_time, 1);
    GW_POINT(answer_counted);
    int result = gw_end(port, slot, ticket);
    GW_POINT(answer_published);
    if (result == 1) {
        GW_COUNT(outcome, -1ull);
        if (in_time) GW_COUNT(in_time, -1ull);
        GW_COUNT(&stats->abandoned, 1);
    }
    return result;
}

/* Copies a response into its area. Not published yet: until gw_finish the request areas of the whole batch stay as they are, as a handler may return views
 * of any of them. -EMSGSIZE: it does not fit, nothing happened. */
int gw_respond(gw_port *port, int64_t ticket, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes) {
    gw_slot *slot = gw_slot_at(port, ticket);
    uint64_t from = gw_align(meta_bytes), total = from + data_bytes;
    if (!slot) return -EINVAL;
    if (!gw_is_taken(slot, ticket)) return -ESTALE;
    if (total > port->response_bytes || meta_bytes > GW_MAX_META) return -EMSGSIZE;
    char *area = gw_response_area(port, gw_slot_of(ticket));
    if (meta_bytes) memcpy(area, meta, meta_bytes);
    if (data_bytes) memcpy(area + from, data, data_bytes);
    GW_POINT(respond_copied);
    slot->response = gw_describe(kind, meta_bytes, total);
    GW_POINT(respond_described);
    return 0;
}

/* The same for a response that was written in place, or to a spill file. */
int gw_responded(gw_port *port, int64_t ticket, uint64_t response) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return -EINVAL;
    if (!gw_is_taken(slot, ticket)) return -ESTALE;
    GW_POINT(responded_checked);
    slot->response = response;
    return 0;
}

/* Publishes the responses of a batch; `taken` as gw_take left it: pairs that begin with the ticket. Batches on their way end in the order in which they began.
 * -> how many requests had been abandoned. */
int gw_finish(gw_port *port, const uint64_t *taken, int n) {
    int abandoned = 0;
    gw_batch batch = gw_end_batch(port, n > 0 ? taken[0] : GW_NO_TICKET);
    for (int k = 0; k < n; k++) {
        int64_t ticket = (int64_t)taken[2 * k];
        gw_slot *slot = gw_slot_at(port, ticket);
        if (!slot) continue;
        if (gw_is_taken(slot, ticket)) abandoned += answer(port, slot, ticket, &batch) == 1;
        note_running(port, ticket, GW_NO_TICKET);
    }
    if (batch.size) gw_stamp_running(port, gw_now()); /* nothing was left to answer */
    gw_ring_chimes(port);
    return abandoned;
}

/* The request of a ticket that is READY, as described, for a look at its area before it is taken: which a frontend may cancel and fill anew meanwhile. -ESTALE,
 * or -EILSEQ when it claims more than there is. */
int64_t gw_peek(gw_port *port, int64_t ticket) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return -EINVAL;
    uint64_t word = GW_LOAD(&slot->word), request = GW_PEEK(&slot->request) & INT64_MAX;
    if (gw_generation_of(word) != gw_life_of(ticket) || gw_phase_of(word) != GW_READY) return -ESTALE;
    return exceeds(port, request) ? -EILSEQ : (int64_t)request;
}

/* The owner is about to look at a queued request with the user's own code (its length). That counts as an attempt, and as time of a batch, until gw_end_look: if it
 * kills or hangs owners, the next one is not to do it again and again (see gw_recover). -> attempts before, or -ESTALE. */
int gw_begin_look(gw_port *port, int64_t ticket) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return -EINVAL;
    uint64_t word = GW_LOAD(&slot->word);
    if (gw_generation_of(word) != gw_life_of(ticket) || gw_phase_of(word) != GW_READY) return -ESTALE;
    atomic_store_explicit(&port->header->batch_started_ns, gw_now(), memory_order_relaxed);
    return (int)(GW_COUNT(&slot->attempts, 1) & INT32_MAX);
}

/* Its frontend may have withdrawn it meanwhile, and whoever claimed the slot then has set the attempts to 0: that stays. */
void gw_end_look(gw_port *port, int64_t ticket, int before) {
    gw_slot *slot = gw_slot_at(port, ticket);
    uint32_t counted = (uint32_t)before + 1;
    if (slot) atomic_compare_exchange_strong_explicit(&slot->attempts, &counted, (uint32_t)before, memory_order_relaxed, memory_order_relaxed);
    atomic_store_explicit(&port->header->batch_started_ns, gw_batches_running(port) ? port->running_since_ns : 0, memory_order_relaxed);
}

/* READY -> DONE without running. */
int gw_refuse_with(gw_port *port, int64_t ticket, uint32_t kind, const void *data, uint32_t bytes) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (bytes > GW_MAX_REFUSAL || bytes > port->response_bytes) return -EMSGSIZE;
    if (!slot || !take(slot, ticket)) return -ESTALE;
    GW_POINT(refuse_taken);
    if (port->in_backlog && port->in_backlog[gw_slot_of(ticket)] == (uint64_t)ticket) port->in_backlog[gw_slot_of(ticket)] = GW_NO_TICKET; /* no news */
    if (bytes) memcpy(gw_response_area(port, gw_slot_of(ticket)), data, bytes);
    slot->response = gw_describe(kind, 0, bytes);
    slot->done_ns = gw_now();
    gw_stats *stats = &port->header->stats;
    GW_COUNT(kind == GW_KIND_LATE ? &stats->rejected_late : kind == GW_KIND_EXPIRED ? &stats->expired : &stats->failed, 1);
    GW_POINT(refuse_written);
    int result = gw_end(port, slot, ticket);
    gw_ring_chimes(port);
    return result;
}

int gw_refuse(gw_port *port, int64_t ticket, uint32_t kind) { return gw_refuse_with(port, ticket, kind, NULL, 0); }

/* Answers everything that is queued; for a worker that ends without an owner. */
int gw_refuse_all(gw_port *port, uint32_t kind) {
    int n = 0;
    for (uint32_t i = 0; i < port->capacity; i++) {
        uint64_t word = GW_LOAD(&port->slots[i].word);
        n += gw_phase_of(word) == GW_READY && gw_refuse(port, gw_ticket(word, i), kind) >= 0;
    }
    return n;
}

/* Answers queued requests whose deadline has passed. Safe beside the thread that forms batches: each slot goes to one of them by CAS. */
int gw_expire(gw_port *port, uint64_t now_ns) {
    int n = 0;
    for (uint32_t i = 0; i < port->capacity; i++) {
        gw_slot *slot = &port->slots[i];
        uint64_t word = GW_LOAD(&slot->word), deadline = GW_PEEK(&slot->deadline_ns);
        if (gw_phase_of(word) != GW_READY || !deadline || deadline > now_ns) continue;
        int64_t ticket = gw_ticket(word, i);
        if (!take(slot, ticket)) continue; /* success: it has been READY in this life all along, so the deadline was this life's */
        expire(port, slot, ticket);
        n++;
    }
    gw_ring_chimes(port);
    return n;
}
