/* Answers that come piece by piece: a log in the response area of a slot that is RUNNING.
 *
 *     gw_stream | entry 0 | entry 1 | ... | room for an error
 *
 * The owner appends: S1 the entry's bytes; S2 `written` = its number (release, and seq_cst for chime.c); S3 post the slot's semaphore. The frontend reads: R1 seen = declare; R2 look at
 * `written` (acquire) and the word; R3 sleep(seen). S2 and R2 are one word's release and acquire, so an entry is whole when it is counted. That no wake-up is lost
 * is semaphore.c's proof, with `written` beside the word for what is looked at.
 *
 * Nothing is ever overwritten: the log has room for all that the request may get, which is checked before it begins. So a frontend that reads slowly, or never,
 * holds up nobody and costs no more than its slot; and an owner that follows one that has died finds what was sent, and goes on behind it. An owner killed between
 * S1 and S2 has written what nobody will look at; between S2 and S3, a wake-up is missing, which the frontend's next slice makes good.
 *
 * `life` tells a log from what an earlier request has left there. All of it can be scribbled over by any frontend: an owner goes by what it has counted itself,
 * and checks what it finds; a frontend checks against the area. */
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <string.h>

_Static_assert(sizeof(gw_stream) == GW_LINE, "entries begin on a cache line");

static gw_stream *stream_of(const gw_port *port, int64_t ticket) { return (gw_stream *)gw_response_area(port, gw_slot_of(ticket)); }

static char *entry_at(gw_stream *stream, uint64_t entry_bytes, uint64_t k) { return (char *)(stream + 1) + k * entry_bytes; }

uint64_t gw_stream_bytes(uint32_t most, uint32_t entry_bytes) { return gw_align(sizeof(gw_stream) + (uint64_t)most * entry_bytes) + GW_STREAM_ERROR; }

/* For a request that was taken: room for `most` entries. -> how many an owner before us has written already. -EMSGSIZE: the area is too small. */
int64_t gw_stream_open(gw_port *port, int64_t ticket, uint32_t most, uint32_t entry_bytes) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot || !entry_bytes) return -EINVAL;
    if (!gw_is_taken(slot, ticket)) return -ESTALE;
    if (gw_stream_bytes(most, entry_bytes) > port->response_bytes) return -EMSGSIZE;
    gw_stream *stream = stream_of(port, ticket);
    uint32_t written = GW_LOAD(&stream->written);
    if (GW_LOAD(&stream->life) == gw_life_of(ticket) && stream->entry_bytes == entry_bytes && written <= most) return written;
    atomic_store_explicit(&stream->written, 0, memory_order_relaxed);
    stream->entry_bytes = entry_bytes;
    stream->finish = stream->error_bytes = 0;
    memset(stream->counts, 0, sizeof stream->counts);
    GW_POINT(stream_emptied);
    atomic_store_explicit(&stream->life, gw_life_of(ticket), memory_order_release);
    return 0;
}

/* Whether anything has been sent to the frontend of a ticket. */
int gw_stream_has_begun(const gw_port *port, int64_t ticket) {
    gw_stream *stream = stream_of(port, ticket);
    return port->response_bytes >= sizeof *stream && GW_LOAD(&stream->life) == gw_life_of(ticket) && GW_LOAD(&stream->written) > 0;
}

/* What is there: for an owner that goes on where another has ended. Copies `n` entries out. */
int gw_stream_copy(gw_port *port, int64_t ticket, void *into, uint32_t n, uint32_t entry_bytes) {
    if (!gw_slot_at(port, ticket) || gw_stream_bytes(n, entry_bytes) > port->response_bytes) return -EINVAL;
    memcpy(into, stream_of(port, ticket) + 1, (uint64_t)n * entry_bytes);
    return 0;
}

/* Appends entry `at[k]` to the log of each ticket. gone[0..result): indices of those that nobody waits for any more. */
int gw_stream_append(gw_port *port, const uint64_t *tickets, const uint32_t *at, const char *entries, uint32_t n, uint32_t entry_bytes, int *gone) {
    int abandoned = 0;
    for (uint32_t k = 0; k < n; k++) {
        int64_t ticket = (int64_t)tickets[k];
        gw_slot *slot = gw_slot_at(port, ticket);
        uint64_t word = slot ? GW_LOAD(&slot->word) : 0;
        if (!slot || gw_generation_of(word) != gw_life_of(ticket) || gw_phase_of(word) != GW_RUNNING) {
            gone[abandoned++] = (int)k;
            continue;
        }
        gw_stream *stream = stream_of(port, ticket);
        if (at[k] == UINT32_MAX || gw_stream_bytes(at[k] + 1, entry_bytes) > port->response_bytes) continue; /* the caller has counted wrong */
        memcpy(entry_at(stream, entry_bytes, at[k]), entries + (uint64_t)k * entry_bytes, entry_bytes); /* S1 */
        GW_POINT(stream_copied);
        atomic_store_explicit(&stream->written, at[k] + 1, memory_order_seq_cst);                          /* S2 */
        GW_POINT(stream_counted);
        gw_semaphore_post(&slot->semaphore);                                                               /* S3 */
        GW_POINT(stream_posted);
        gw_owe_chime(port, gw_participant_of(word));
    }
    gw_ring_chimes(port);
    return abandoned;
}

/* Those of the tickets that nobody waits for any more, see gw_stream_append. */
int gw_stream_gone(gw_port *port, const uint64_t *tickets, uint32_t n, int *gone) {
    int abandoned = 0;
    for (uint32_t k = 0; k < n; k++) {
        gw_slot *slot = gw_slot_at(port, (int64_t)tickets[k]);
        uint64_t word = slot ? GW_LOAD(&slot->word) : 0;
        if (!slot || gw_generation_of(word) != gw_life_of((int64_t)tickets[k]) || gw_phase_of(word) != GW_RUNNING) gone[abandoned++] = (int)k;
    }
    return abandoned;
}

/* The response: how it ended, three counts, and an error's description, left out if it is longer than GW_STREAM_ERROR. gw_finish publishes it. */
int gw_stream_end(gw_port *port, int64_t ticket, uint32_t finish, const uint32_t counts[3], const void *error, uint32_t error_bytes) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return -EINVAL;
    if (!gw_is_taken(slot, ticket)) return -ESTALE;
    if (gw_stream_bytes(0, 0) > port->response_bytes) return -EMSGSIZE;
    gw_stream *stream = stream_of(port, ticket);
    if (error_bytes > GW_STREAM_ERROR) error_bytes = 0;
    memcpy(stream->counts, counts, sizeof stream->counts);
    stream->finish = finish;
    stream->error_bytes = error_bytes;
    if (error_bytes) memcpy(gw_response_area(port, gw_slot_of(ticket)) + port->response_bytes - GW_STREAM_ERROR, error, error_bytes);
    GW_POINT(stream_ended);
    slot->response = gw_describe(GW_KIND_STREAM, 0, port->response_bytes);
    return 0;
}

/* More than `seen` entries, or the end: as gw_stream_wait, or -EINPROGRESS. */
static int64_t look(gw_port *port, const gw_stream *stream, int64_t ticket, uint32_t seen) {
    int64_t response = gw_poll(port, ticket); /* the word first: after DONE nothing is appended, so what is counted then is all */
    if (response < 0 && response != -EINPROGRESS) return response;
    if (GW_LOAD(&stream->life) == gw_life_of(ticket)) {
        uint32_t written = GW_LOAD(&stream->written); /* R2 */
        if (written > seen) return written;
    }
    return response < 0 ? response : GW_DELIVERED;
}

/* Waits until there are more than `seen` entries. -> how many, or GW_DELIVERED when there will be none and the request is answered (gw_poll tells with what);
 * else as gw_wait. */
int64_t gw_stream_wait(gw_port *port, int64_t ticket, uint32_t seen, uint64_t deadline_ns, uint64_t slice_ns) {
    uint64_t until = gw_now() + slice_ns;
    if (deadline_ns && deadline_ns < until) until = deadline_ns;
    gw_slot *slot = gw_slot_at(port, ticket);
    gw_unsettled(port);
    if (!slot) return -EINVAL;
    const gw_stream *stream = stream_of(port, ticket);
    uint32_t posts = 0;
    for (int round = 0;; round++) {
        if (round) posts = gw_semaphore_declare(&slot->semaphore); /* R1; the first look is free of that: there may be more already */
        int64_t result = look(port, stream, ticket, seen);
        if (result != -EINPROGRESS) return result;
        if (!round) continue;
        if (atomic_load_explicit(&port->header->state, memory_order_seq_cst) > GW_DRAINING) return -ETIMEDOUT; /* as in gw_wait */
        GW_POINT(stream_sleeping);
        int problem = gw_semaphore_sleep(&slot->semaphore, posts, until); /* R3 */
        if (!problem && gw_now() < until) continue; /* or whoever scribbles over the semaphore would keep us from sleeping, and from going */
        result = look(port, stream, ticket, seen);
        return result != -EINPROGRESS ? result : problem ? problem : -ETIMEDOUT;
    }
}
