/* What is done on behalf of others: taking back what the dead held, putting the ring in order after an owner's death, waking everybody. */
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <limits.h>

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
    GW_TALLY(&into->forecast_late, atomic_exchange_explicit(&from->forecast_late, 0, memory_order_relaxed));
    GW_TALLY(&into->satisfied, atomic_exchange_explicit(&from->satisfied, 0, memory_order_relaxed));
    fold(&into->claim_wait, &from->claim_wait);
    fold(&into->wake, &from->wake);
    GW_POINT(reap_folded);
    atomic_store_explicit(&entry->chime, GW_CHIME_NONE, memory_order_relaxed);
    gw_forget_chime(port, participant);
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
 * been tried max_attempts times; so is what so many owners have looked at and not outlived (gw_begin_look), two at least: to have been queued again after one death is no
 * such thing. Where a batch was stuck, the one behind it counts as queued. Any prefix of this may have run before, in another process: it can be run again. */
int gw_recover(gw_port *port, uint32_t max_attempts, uint32_t kind) {
    gw_header *header = port->header;
    uint32_t max_looks = max_attempts < 2 ? 2 : max_attempts;
    uint64_t since_ns = GW_PEEK(&header->batch_started_ns); /* what was dispatched later only waited for the batch that was stuck */
    uint64_t stuck_ns = kind == GW_KIND_STUCK && since_ns ? since_ns : UINT64_MAX;
    int n = 0;
    atomic_store_explicit(&header->owner_asleep, 0, memory_order_seq_cst);
    atomic_store_explicit(&header->batch_started_ns, 0, memory_order_relaxed); /* nobody runs it now, and its time is not the next owner's */
    GW_POINT(recover_awake);
    gw_count_alive(port);
    for (uint32_t g = 0; g < gw_ready_words(port); g++) atomic_store_explicit(&header->ready[g], 0, memory_order_seq_cst);
    GW_POINT(recover_cleared);
    for (uint32_t i = 0; i < port->capacity; i++) {
        gw_slot *slot = &port->slots[i];
        uint64_t word = GW_LOAD(&slot->word);
        int64_t ticket = gw_ticket(word, i);
        GW_POINT(recover_looked);
        if (gw_phase_of(word) == GW_READY && GW_PEEK(&slot->attempts) >= max_looks) {
            gw_refuse(port, ticket, kind);
            continue;
        }
        switch (gw_phase_of(word)) {
        case GW_ABANDONED: gw_end(port, slot, ticket); break;
        case GW_RUNNING:
            /* Between two steps a death is nobody's fault; but where nothing is to be run twice, an answer that has begun to come is not gone on with. */
            if ((slot->dispatch_ns == GW_NOT_BEGUN && !(max_attempts == 1 && gw_stream_has_begun(port, ticket))) || slot->dispatch_ns > stuck_ns) {
                gw_untake(port, ticket);
                n++;
                break;
            }
            if (GW_COUNT(&slot->attempts, 1) + 1 >= max_attempts) { /* never run it again */
                GW_POINT(recover_too_often);
                slot->response = gw_describe(kind, 0, 0);
                slot->done_ns = gw_now();
                GW_POINT(recover_refused);
                gw_end(port, slot, ticket);
            } else {
                GW_POINT(recover_tried); /* killed here, one death counts twice: rather that than never */
                gw_untake(port, ticket);
                n++;
            }
            break;
        case GW_READY: atomic_fetch_or_explicit(&header->ready[i / 64], 1ull << (i % 64), memory_order_seq_cst); break;
        case GW_DONE: /* the dead owner may not have come to it */
            gw_semaphore_post_always(&slot->semaphore);
            gw_owe_chime_again(port, gw_participant_of(word));
            break;
        case GW_FREE: case GW_CLAIMED: break;            /* its frontend goes on, or is reaped */
        default: GW_CAS(&slot->word, &word, gw_freed(word)); /* nobody's: scribbled */
        }
    }
    GW_POINT(recover_over);
    gw_ring_chimes(port);
    GW_TALLY(&header->stats.requeued, (uint64_t)n);
    return n;
}

/* After the state was set to one that answers nothing any more. A waiter declares itself, then looks at the state; here it is the other way round. */
void gw_wake_all(gw_port *port) {
    for (uint32_t i = 0; i < port->capacity; i++)
        if (gw_phase_of(GW_LOAD(&port->slots[i].word)) != GW_FREE) gw_semaphore_post(&port->slots[i].semaphore); /* gw_wait then looks at the state */
    for (uint32_t participant = 1; participant <= port->max_participants; participant++) gw_owe_chime(port, participant); /* and so does gw_poll_many */
    gw_ring_chimes(port);
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
