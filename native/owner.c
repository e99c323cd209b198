/* The owner's half of the ring: collect, take, answer; and on behalf of the dead and the late: reap, recover, expire. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define NO_TICKET UINT64_MAX

static uint32_t ready_words(const gw_port *port) { return (port->capacity + 63) / 64; }

static int any_ready(const gw_port *port) {
    for (uint32_t i = 0; i < ready_words(port); i++)
        if (atomic_load_explicit(&port->header->ready[i], memory_order_seq_cst)) return 1;
    return 0;
}

/* Room for the backlog; call once, before the first gw_collect. */
int gw_open_backlog(gw_port *port) {
    if (!port->backlog) port->backlog = calloc(2 * (size_t)port->capacity, sizeof *port->backlog);
    if (!port->in_backlog) port->in_backlog = malloc(port->capacity * sizeof *port->in_backlog);
    if (!port->running) port->running = malloc(port->capacity * sizeof *port->running);
    if (!port->backlog || !port->in_backlog || !port->running) return -ENOMEM;
    for (uint32_t i = 0; i < port->capacity; i++) port->in_backlog[i] = port->running[i] = NO_TICKET;
    return 0;
}

const gw_item *gw_backlog(const gw_port *port) { return port->backlog; }

/* Drops from the backlog what was cancelled, expired or reaped since, so that a decision counts live requests only. in_backlog is asked too: a hostile
 * word may go back and forth between two lives, and each would stay. */
static void purge(gw_port *port) {
    uint32_t kept = 0;
    for (uint32_t k = 0; k < port->queued; k++) {
        gw_item item = port->backlog[k];
        uint32_t i = gw_slot_of((int64_t)item.ticket);
        uint64_t word = GW_LOAD(&port->slots[i].word);
        if (gw_phase_of(word) == GW_READY && gw_generation_of(word) == gw_life_of((int64_t)item.ticket) && port->in_backlog[i] == item.ticket)
            port->backlog[kept++] = item;
    }
    port->queued = kept;
}

/* Moves newly published requests into the backlog, which stays sorted by enqueue time; they come nearly in that order. A life of a slot enters it once,
 * however often its bit is set (in_backlog), so a slot has at most its present life there and one that ended since the purge: 2 * capacity suffices. */
static void drain_ready_bits(gw_port *port) {
    uint64_t now = 0;
    for (uint32_t group = 0; group < ready_words(port); group++) {
        _Atomic uint64_t *ready = &port->header->ready[group];
        if (!atomic_load_explicit(ready, memory_order_relaxed)) continue;
        uint64_t bits = atomic_exchange_explicit(ready, 0, memory_order_acquire);
        GW_POINT(collect_exchanged);
        for (; bits; bits &= bits - 1) {
            uint32_t i = group * 64 + (uint32_t)__builtin_ctzll(bits);
            if (i >= port->capacity) break;
            gw_slot *slot = &port->slots[i];
            uint64_t word = GW_LOAD(&slot->word);        /* pairs with the release in gw_publish */
            uint64_t ticket = (uint64_t)gw_ticket(word, i);
            if (gw_phase_of(word) != GW_READY || port->in_backlog[i] == ticket) continue; /* cancelled or reaped since; or a hostile bit */
            port->in_backlog[i] = ticket;
            GW_POINT(collect_entered);
            gw_item item = {ticket, GW_PEEK(&slot->enqueue_ns), GW_PEEK(&slot->deadline_ns)};
            if (now < item.enqueue_ns) now = gw_now(); /* published since we began */
            slot->collect_ns = now;
            uint32_t k = port->queued++;
            for (; k > 0 && port->backlog[k - 1].enqueue_ns > item.enqueue_ns; k--) port->backlog[k] = port->backlog[k - 1];
            port->backlog[k] = item;
        }
    }
}

int gw_collect(gw_port *port, uint64_t until_ns) {
    purge(port);
    uint32_t before = port->queued;
    drain_ready_bits(port);
    if (port->queued != before || !until_ns) return (int)port->queued;
    GW_POINT(collect_empty);
    gw_header *header = port->header;
    uint64_t start = gw_now();
    if (start >= until_ns) return (int)port->queued;
    int interrupted = 0, slept = !gw_spin_until(port, &port->request_spin, header->ready, ready_words(port), 0, until_ns);
    if (!slept) {
        GW_TALLY(&header->stats.spins, 1);
    } else { /* the owner's side of the doorbell, wake.c */
        uint32_t seen = atomic_load_explicit(&header->bell, memory_order_seq_cst); /* O1 */
        GW_POINT(collect_seen);
        atomic_store_explicit(&header->owner_asleep, 1, memory_order_seq_cst);     /* O2 */
        GW_POINT(collect_asleep);
        if (!any_ready(port)) {                                                    /* O3 */
            GW_POINT(collect_parking);
            GW_TALLY(&header->stats.parks, 1);
            long result = gw_futex_wait(&header->bell, seen, until_ns); /* O4 */
            GW_POINT(collect_woken);
            interrupted = result == -EINTR;
            if (result == -ETIMEDOUT && any_ready(port)) GW_TALLY(&header->stats.late_wakes, 1);
        }
        atomic_store_explicit(&header->owner_asleep, 0, memory_order_relaxed); /* O5 */
        GW_POINT(collect_awake);
    }
    purge(port);
    before = port->queued;
    drain_ready_bits(port);
    for (uint32_t k = 0; slept && port->queued != before && k < port->queued; k++)
        if (port->backlog[k].enqueue_ns >= start) { /* the earliest arrival since we began to wait */
            gw_spin_learn(&port->request_spin, port->backlog[k].enqueue_ns - start);
            break;
        }
    return interrupted && !port->queued ? -EINTR : (int)port->queued;
}

static gw_slot *slot_at(gw_port *port, int64_t ticket) {
    uint32_t i = gw_slot_of(ticket);
    return ticket < 0 || i >= port->capacity ? NULL : &port->slots[i];
}

/* READY -> RUNNING for one life. The word on success, else 0. */
static uint64_t take(gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word);
    if (gw_generation_of(word) != gw_life_of(ticket) || gw_phase_of(word) != GW_READY) return 0;
    GW_POINT(take_looked);
    uint64_t running = gw_with_phase(word, GW_RUNNING);
    return GW_CAS(&slot->word, &word, running) ? running : 0; /* acquires what gw_publish released */
}

/* RUNNING -> DONE and wake, or ABANDONED -> FREE. 1 if it had been abandoned. */
static int finish(gw_port *port, gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word);
    for (;;) {
        if (gw_generation_of(word) != gw_life_of(ticket)) return -ESTALE;
        if (gw_phase_of(word) == GW_RUNNING) {
            GW_POINT(finish_looked);
            if (!GW_CAS(&slot->word, &word, gw_with_phase(word, GW_DONE))) continue; /* releases the response to gw_wait */
            GW_POINT(finish_done);
            gw_semaphore_post(&slot->semaphore);
            GW_POINT(finish_posted);
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
    if (finish(port, slot, ticket) == 1) GW_COUNT(&port->header->stats.expired, -1ull); /* its frontend was faster, and counts it */
}

/* Takes up to `count` requests from the front of the backlog and begins a batch of them. For each its ticket and its request as described by the
 * frontend, copied once and checked against the area: UINT64_MAX when it claims more than there is. Cancelled ones are skipped, expired ones answered.
 * One that was running when an owner died is a batch of its own: if it is what kills owners, it takes nobody else's attempts with it. */
int gw_take(gw_port *port, int count, uint32_t reason, uint64_t *taken) {
    uint64_t now = gw_now();
    int n = 0;
    uint32_t k = 0;
    for (; k < port->queued && n < count; k++) {
        int64_t ticket = (int64_t)port->backlog[k].ticket;
        gw_slot *slot = slot_at(port, ticket);
        int suspect = slot && GW_PEEK(&slot->attempts);
        if (suspect && n) break;
        if (!slot) continue;
        uint64_t noted = port->running ? GW_PEEK(&port->running[gw_slot_of(ticket)]) : NO_TICKET;
        note_running(port, ticket, (uint64_t)ticket); /* before the word says so, see is_stray */
        if (!take(slot, ticket)) { /* a ticket of an earlier life: the present one may be running already */
            note_running(port, ticket, noted);
            continue;
        }
        GW_POINT(take_moved);
        port->in_backlog[gw_slot_of(ticket)] = NO_TICKET; /* gw_untake may bring it back */
        slot->dispatch_ns = now;
        uint64_t request = GW_PEEK(&slot->request), deadline = GW_PEEK(&slot->deadline_ns);
        if (deadline && deadline <= now) {
            expire(port, slot, ticket);
            note_running(port, ticket, NO_TICKET);
            continue;
        }
        uint64_t total = gw_total_of(request), room = gw_kind_of(request) & GW_KIND_SPILLED ? port->max_payload_bytes : port->request_bytes;
        if (total > room || gw_meta_of(request) > total) request = UINT64_MAX;
        GW_POINT(take_read);
        taken[2 * n] = (uint64_t)ticket;
        taken[2 * n + 1] = request;
        n++;
        if (suspect) {
            k++;
            break;
        }
    }
    port->queued -= k;
    memmove(port->backlog, port->backlog + k, port->queued * sizeof *port->backlog);
    port->batch_size = (uint32_t)n;
    port->batch_reason = reason;
    GW_POINT(take_all);
    if (n) atomic_store_explicit(&port->header->batch_started_ns, now, memory_order_relaxed);
    GW_POINT(take_stamped);
    return n;
}

/* RUNNING -> READY: taken, but not run after all. */
int gw_untake(gw_port *port, int64_t ticket) {
    gw_slot *slot = slot_at(port, ticket);
    if (!slot) return -EINVAL;
    note_running(port, ticket, NO_TICKET);
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
    return finish(port, slot, ticket); /* abandoned meanwhile */
}

/* Whether the ticket was taken and not answered: RUNNING or ABANDONED, which nobody but the owner ends. */
static int is_taken(const gw_slot *slot, int64_t ticket) {
    uint64_t word = GW_LOAD(&slot->word);
    return gw_generation_of(word) == gw_life_of(ticket) && (gw_phase_of(word) == GW_RUNNING || gw_phase_of(word) == GW_ABANDONED);
}

/* Publishes the response that the slot now holds. 0, or 1 if the request had been abandoned. */
static int answer(gw_port *port, gw_slot *slot, int64_t ticket) {
    gw_stats *stats = &port->header->stats;
    uint64_t now = gw_now();
    slot->done_ns = now;
    GW_POINT(answer_stamped);
    /* Everything is counted before it is published: a caller that has its answer finds it in the statistics. */
    if (port->batch_size) { /* the first answer of a batch ends its run */
        gw_batch_done(port, port->batch_size, port->batch_reason, now - slot->dispatch_ns);
        port->batch_size = 0;
    }
    gw_observe(&stats->queue_wait, slot->collect_ns - GW_PEEK(&slot->enqueue_ns));
    gw_observe(&stats->batch_wait, slot->dispatch_ns - slot->collect_ns);
    _Atomic uint64_t *outcome = (gw_kind_of(slot->response) & ~(uint32_t)GW_KIND_SPILLED) < GW_KIND_ERROR ? &stats->completed : &stats->failed;
    GW_COUNT(outcome, 1);
    GW_POINT(answer_counted);
    int result = finish(port, slot, ticket);
    GW_POINT(answer_published);
    if (result == 1) {
        GW_COUNT(outcome, -1ull);
        GW_COUNT(&stats->abandoned, 1);
    }
    return result;
}

/* Copies a response into its area. Not published yet: until gw_finish the request areas of the whole batch stay as they are, as a handler may return views
 * of any of them. -EMSGSIZE: it does not fit, nothing happened. */
int gw_respond(gw_port *port, int64_t ticket, uint32_t kind, const void *meta, uint32_t meta_bytes, const void *data, uint64_t data_bytes) {
    gw_slot *slot = slot_at(port, ticket);
    uint64_t from = gw_align(meta_bytes), total = from + data_bytes;
    if (!slot) return -EINVAL;
    if (!is_taken(slot, ticket)) return -ESTALE;
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
    gw_slot *slot = slot_at(port, ticket);
    if (!slot) return -EINVAL;
    if (!is_taken(slot, ticket)) return -ESTALE;
    GW_POINT(responded_checked);
    slot->response = response;
    return 0;
}

/* Publishes the responses of a batch; `taken` as gw_take left it: pairs that begin with the ticket. -> how many requests had been abandoned. */
int gw_finish(gw_port *port, const uint64_t *taken, int n) {
    int abandoned = 0;
    for (int k = 0; k < n; k++) {
        int64_t ticket = (int64_t)taken[2 * k];
        gw_slot *slot = slot_at(port, ticket);
        if (!slot) continue;
        if (is_taken(slot, ticket)) abandoned += answer(port, slot, ticket) == 1;
        note_running(port, ticket, NO_TICKET);
    }
    atomic_store_explicit(&port->header->batch_started_ns, 0, memory_order_relaxed); /* also when there was nothing left to answer */
    return abandoned;
}

int gw_refuse(gw_port *port, int64_t ticket, uint32_t kind) {
    gw_slot *slot = slot_at(port, ticket);
    if (!slot || !take(slot, ticket)) return -ESTALE;
    GW_POINT(refuse_taken);
    slot->response = gw_describe(kind, 0, 0);
    slot->done_ns = gw_now();
    GW_COUNT(&port->header->stats.failed, 1);
    GW_POINT(refuse_written);
    return finish(port, slot, ticket);
}

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
    return n;
}

static void fold(gw_histogram *into, gw_histogram *from) {
    for (int i = 0; i < GW_BUCKETS; i++) GW_TALLY(&into->count[i], atomic_exchange_explicit(&from->count[i], 0, memory_order_relaxed));
    GW_TALLY(&into->sum_ns, atomic_exchange_explicit(&from->sum_ns, 0, memory_order_relaxed));
    GW_TALLY(&into->n, atomic_exchange_explicit(&from->n, 0, memory_order_relaxed));
}

/* Whether a word says RUNNING or ABANDONED of what this owner does not run: somebody scribbled. For the thread that reaps and expires. */
static int is_stray(const gw_port *port, uint32_t i, uint64_t word) {
    uint32_t phase = gw_phase_of(word);
    if (!port->running || (phase != GW_RUNNING && phase != GW_ABANDONED)) return 0;
    return atomic_load_explicit(&port->running[i], memory_order_acquire) != (uint64_t)gw_ticket(word, i);
}

/* Gives back what a participant held. Call only for one that the kernel has proved dead, or that has left and whose lock byte is free, which it is once
 * its port is closed: in either case none of its threads can act any more. */
int gw_reap(gw_port *port, uint32_t participant) {
    if (!participant || participant > port->max_participants) return -EINVAL;
    gw_header *header = port->header;
    int n = 0;
    for (uint32_t i = 0; i < port->capacity; i++) {
        gw_slot *slot = &port->slots[i];
        uint64_t word = GW_LOAD(&slot->word);
        for (;;) {
            uint32_t phase = gw_phase_of(word);
            int stray = is_stray(port, i, word);
            if (phase == GW_FREE || (phase == GW_ABANDONED && !stray) || gw_participant_of(word) != participant) break; /* finish frees ABANDONED */
            if (!GW_CAS(&slot->word, &word, phase == GW_RUNNING && !stray ? gw_with_phase(word, GW_ABANDONED) : gw_freed(word))) continue;
            GW_POINT(reap_moved);
            n++;
            break;
        }
    }
    GW_POINT(reap_slots);
    atomic_fetch_and_explicit(&header->space_wanted[participant / 64 % (GW_MAX_PARTICIPANTS / 64)], ~(1ull << (participant & 63)), memory_order_seq_cst);
    GW_POINT(reap_unwanted);
    gw_participant *entry = &port->participants[participant - 1];
    gw_client_stats *from = &entry->stats, *into = &header->departed;
    GW_TALLY(&into->submitted, atomic_exchange_explicit(&from->submitted, 0, memory_order_relaxed));
    GW_TALLY(&into->rejected, atomic_exchange_explicit(&from->rejected, 0, memory_order_relaxed));
    GW_TALLY(&into->cancelled, atomic_exchange_explicit(&from->cancelled, 0, memory_order_relaxed));
    GW_TALLY(&into->expired, atomic_exchange_explicit(&from->expired, 0, memory_order_relaxed));
    GW_TALLY(&into->fallbacks, atomic_exchange_explicit(&from->fallbacks, 0, memory_order_relaxed));
    fold(&into->claim_wait, &from->claim_wait);
    fold(&into->wake, &from->wake);
    GW_POINT(reap_folded);
    uint64_t word = GW_LOAD(&entry->word);
    if ((word & 3) != GW_VACANT) GW_CAS(&entry->word, &word, (word & ~3ull) | GW_VACANT);
    GW_POINT(reap_vacant);
    gw_count_alive(port);
    GW_TALLY(&header->stats.reaped_slots, (uint64_t)n);
    if ((word & 3) == GW_ALIVE) GW_TALLY(&header->stats.reaped_participants, 1);
    GW_POINT(reap_counted);
    if (n) gw_space_wake(port);
    return n;
}

/* Frees what nobody holds though its word says so, as only a scribble does: ABANDONED and not running, or under the index of nobody who joined. For the
 * thread that reaps and expires: no entry becomes vacant meanwhile. */
int gw_free_strays(gw_port *port) {
    int n = 0;
    for (uint32_t i = 0; i < port->capacity; i++) {
        gw_slot *slot = &port->slots[i];
        uint64_t word = GW_LOAD(&slot->word);
        uint32_t phase = gw_phase_of(word), participant = gw_participant_of(word);
        if (phase == GW_FREE) continue;
        int nobodys = !participant || participant > port->max_participants || (GW_LOAD(&port->participants[participant - 1].word) & 3) == GW_VACANT;
        int stray = is_stray(port, i, word);
        if (phase == GW_ABANDONED ? !stray : !nobodys || (phase == GW_RUNNING && !stray)) continue;
        n += GW_CAS(&slot->word, &word, gw_freed(word));
    }
    if (n) gw_space_wake(port);
    return n;
}

/* Counts the joined participants, for the quota; joiners add themselves in between. */
void gw_count_alive(gw_port *port) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < port->max_participants; i++) n += (GW_LOAD(&port->participants[i].word) & 3) == GW_ALIVE;
    GW_POINT(alive_counted);
    atomic_store_explicit(&port->header->alive, n, memory_order_relaxed);
}

/* Puts the ring in order after an owner's death; for whoever holds the owner's lock byte. What was running is queued again, or answered with `kind` if it has
 * been tried max_attempts times. Any prefix of this may have run before, in another process: it can be run again. */
int gw_recover(gw_port *port, uint32_t max_attempts, uint32_t kind) {
    gw_header *header = port->header;
    int n = 0;
    atomic_store_explicit(&header->owner_asleep, 0, memory_order_seq_cst);
    atomic_store_explicit(&header->batch_started_ns, 0, memory_order_relaxed); /* nobody runs it now, and its time is not the next owner's */
    GW_POINT(recover_awake);
    gw_count_alive(port);
    for (uint32_t g = 0; g < ready_words(port); g++) atomic_store_explicit(&header->ready[g], 0, memory_order_seq_cst);
    GW_POINT(recover_cleared);
    for (uint32_t i = 0; i < port->capacity; i++) {
        gw_slot *slot = &port->slots[i];
        uint64_t word = GW_LOAD(&slot->word);
        int64_t ticket = gw_ticket(word, i);
        GW_POINT(recover_looked);
        switch (gw_phase_of(word)) {
        case GW_ABANDONED: finish(port, slot, ticket); break;
        case GW_RUNNING:
            if (GW_COUNT(&slot->attempts, 1) + 1 >= max_attempts) { /* never run it again */
                GW_POINT(recover_too_often);
                slot->response = gw_describe(kind, 0, 0);
                slot->done_ns = gw_now();
                GW_POINT(recover_refused);
                finish(port, slot, ticket);
            } else {
                GW_POINT(recover_tried); /* killed here, one death counts twice: rather that than never */
                gw_untake(port, ticket);
                n++;
            }
            break;
        case GW_READY: atomic_fetch_or_explicit(&header->ready[i / 64], 1ull << (i % 64), memory_order_seq_cst); break;
        case GW_DONE: gw_semaphore_post_always(&slot->semaphore); break; /* the dead owner may not have come to it */
        case GW_FREE: case GW_CLAIMED: break;            /* its frontend goes on, or is reaped */
        default: GW_CAS(&slot->word, &word, gw_freed(word)); /* nobody's: scribbled */
        }
    }
    GW_POINT(recover_over);
    GW_TALLY(&header->stats.requeued, (uint64_t)n);
    return n;
}

/* After the state was set to one that answers nothing any more. A waiter declares itself, then looks at the state; here it is the other way round. */
void gw_wake_all(gw_port *port) {
    for (uint32_t i = 0; i < port->capacity; i++)
        if (gw_phase_of(GW_LOAD(&port->slots[i].word)) != GW_FREE) gw_semaphore_post(&port->slots[i].semaphore); /* gw_wait then looks at the state */
    GW_POINT(wake_all_posted);
    atomic_fetch_add_explicit(&port->header->space_bell, 1, memory_order_seq_cst);
    GW_POINT(wake_all_bumped);
    gw_futex_wake(&port->header->space_bell, INT_MAX);
}

int gw_count(gw_port *port, uint32_t phase) {
    int n = 0;
    for (uint32_t i = 0; i < port->capacity; i++) n += gw_phase_of(GW_LOAD(&port->slots[i].word)) == phase;
    return n;
}

void gw_set_state(gw_port *port, uint32_t state) { atomic_store_explicit(&port->header->state, state, memory_order_seq_cst); }
